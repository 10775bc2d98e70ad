//! The table of settings. One entry declares the flag, its help, its environment variable and its keys in the file of
//! `--config`. A test compares `docs/settings.md` with the table, and writes the page if `UPDATE_DOCS` is set.

use std::{
    mem,
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use serde::Deserialize;

/// The names of one setting: as flag, as environment variable, and as keys in the configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag without its leading dashes; also the setting's key in the file of `--config`.
    pub flag: &'static str,
    /// The environment variable that gives the setting.
    pub environment: &'static str,
    /// The setting's second key in the file of `--config`: the flag in camelCase, or in the spelling that Kubernetes
    /// uses.
    pub alias: &'static str,
}

/// Declares settings: `"flag" "ENVIRONMENT" "alias" field: type of the flag | type in the file, clap arguments`.
macro_rules! settings {
    (
        $(
            $(#[$struct_attribute:meta])*
            struct $name:ident {
                $(
                    $(#[$attribute:meta])*
                    $flag:literal $environment:literal $alias:literal $field:ident: $typed:ty | $in_file:ty, ($($arg:tt)*);
                )*
                $(also { $($also:tt)* })?
            }
        )*
    ) => {
        $(
            #[derive(Debug, Clone, Default, Args)]
            $(#[$struct_attribute])*
            pub struct $name {
                $(
                    $(#[$attribute])*
                    #[arg(long = $flag, env = $environment, hide_env_values = true, $($arg)*)]
                    pub $field: $typed,
                )*
                $($($also)*)?
            }

            impl $name {
                /// Fills in missing values from `file`, and removes the settings of this struct from `file`.
                pub(crate) fn or_in_file(mut self, file: &mut FileSettings) -> Self {
                    $(self.$field = self.$field.or_in_file(mem::take(&mut file.$field));)*
                    self
                }
            }
        )*

        /// Settings in the file of `--config`, each under the name of its flag or its alias.
        #[derive(Debug, Default, Deserialize, PartialEq)]
        #[serde(deny_unknown_fields, default)]
        #[expect(missing_docs, reason = "the flags of the same names have docs")]
        pub struct FileSettings {
            $($(
                #[serde(rename = $flag, alias = $alias)]
                pub $field: $in_file,
            )*)*
        }

        /// Every setting of the agent, in the order in which this file declares them.
        pub const SETTINGS: &[Setting] = &[
            $($(Setting { flag: $flag, environment: $environment, alias: $alias },)*)*
        ];
    };
}

settings! {
    /// Settings of every command.
    #[command(next_help_heading = "Settings of every command")]
    struct KernelArgs {
        /// BPF file system for pinned maps and programs; `run` mounts one there if there is none [default: /sys/fs/bpf]
        "bpffs" "LB_AGENT_BPFFS" "bpffs"
        bpffs: Option<PathBuf> | Option<PathBuf>, (global = true, value_name = "DIR");
        /// cgroup2 directory to attach socket programs to, see --socket-lb [default: the root of the cgroup2 mount]
        "cgroup" "LB_AGENT_CGROUP" "cgroup"
        cgroup: Option<PathBuf> | Option<PathBuf>, (global = true, value_name = "DIR");
        also {
            /// YAML file of settings, each named as its flag, or a KubeProxyConfiguration. Flags override the
            /// environment, which overrides the file [default: /etc/lb-agent/config.yaml, if it exists]
            #[arg(long, global = true, value_name = "FILE", env = "LB_AGENT_CONFIG", hide_env_values = true)]
            pub config: Option<PathBuf>,
        }
    }

    /// Settings of `run`. Lists are given as several values, by repeating the flag, or with commas.
    struct RunArgs {
        /// Directory of YAML manifests with Services, EndpointSlices and Endpoints; changes are applied at once
        "manifests" "LB_AGENT_MANIFESTS" "manifests"
        manifests: Option<PathBuf> | Option<PathBuf>, (value_name = "DIR");
        /// Kubeconfig of the API server to read Services and EndpointSlices from [default in a Pod: its service
        /// account]
        "kubeconfig" "LB_AGENT_KUBECONFIG" "kubeconfig"
        kubeconfig: Option<PathBuf> | Option<PathBuf>, (value_name = "FILE");
        /// Name of this node, as in the nodeName of endpoints [default: the host name]
        "node-name" "LB_AGENT_NODE_NAME" "nodeName"
        node_name: Option<String> | Option<String>, (value_name = "NAME");
        /// Zone of this node, for topology hints and Services that prefer their zone; with an API server the label
        /// topology.kubernetes.io/zone of the Node names it [default: none]
        "zone" "LB_AGENT_ZONE" "zone"
        zone: Option<String> | Option<String>, (value_name = "NAME");
        /// IP address of this node. With 0.0.0.0 or :: the Node object gives the address, and this one only selects the
        /// default family of the health and metrics servers [default: 0.0.0.0]
        "bind-address" "LB_AGENT_BIND_ADDRESS" "bindAddress"
        bind_address: Option<String> | Option<String>, (value_name = "ADDR");
        /// Interfaces towards other machines [default: those with a default route or a global address of the node, and
        /// network cards, bonds, VLANs and tunnels without address]
        "wire-device" "LB_AGENT_WIRE_DEVICE" "wireDevice"
        wire_device: Option<Vec<String>> | Option<List>, (value_name = "NAME|GLOB", num_args = 1.., value_delimiter = ',');
        /// Host-side interfaces of pods [default: veth devices whose other end is in another network namespace]
        "workload-device" "LB_AGENT_WORKLOAD_DEVICE" "workloadDevice"
        workload_device: Option<Vec<String>> | Option<List>, (value_name = "NAME|GLOB", num_args = 1.., value_delimiter = ',');
        /// Ranges of cluster IPs, at most one per address family. Packets to unassigned addresses of these ranges are
        /// dropped, except in the default ranges of --manifests [default: the ranges that the API server names; with
        /// --manifests 10.96.0.0/12,fd00:10:96::/112]
        "service-cluster-ip-range" "LB_AGENT_SERVICE_CLUSTER_IP_RANGE" "serviceClusterIPRange"
        service_cluster_ip_range: Option<Vec<String>> | Option<List>, (value_name = "CIDR", num_args = 1.., value_delimiter = ',');
        /// With --manifests: networks from which Services of type LoadBalancer get addresses, in addition to the
        /// IPAddressPools in the directory [default: none]
        "load-balancer-pool" "LB_AGENT_LOAD_BALANCER_POOL" "loadBalancerPool"
        load_balancer_pool: Option<Vec<String>> | Option<List>, (value_name = "CIDR", num_args = 1.., value_delimiter = ',');
        /// The loadBalancerClass of the Services that get addresses from pools [default: those without a class]
        "load-balancer-class" "LB_AGENT_LOAD_BALANCER_CLASS" "loadBalancerClass"
        load_balancer_class: Option<String> | Option<String>, (value_name = "NAME");
        /// Assign addresses from the IPAddressPools of the API server to Services of type LoadBalancer. The agents with
        /// this setting elect the one that does so
        "load-balancer-controller" "LB_AGENT_LOAD_BALANCER_CONTROLLER" "loadBalancerController"
        load_balancer_controller: bool | bool, ();
        /// Give a Service another address, as MetalLB does, if its own is in no pool any more or in one that may not
        /// serve it any more [default: Services keep their addresses]
        "load-balancer-reassign" "LB_AGENT_LOAD_BALANCER_REASSIGN" "loadBalancerReassign"
        load_balancer_reassign: bool | bool, ();
        /// Announce load balancers' addresses at layer 2 as the L2Advertisements of the API server say; one Node at a
        /// time announces each address. Every Node needs --announce-key-file
        "announce" "LB_AGENT_ANNOUNCE" "announce"
        announce: bool | bool, ();
        /// UDP port at which each Node receives the others' messages, with --announce [default: 7947]
        "announce-port" "LB_AGENT_ANNOUNCE_PORT" "announcePort"
        announce_port: Option<u16> | Option<u16>, (value_name = "PORT");
        /// Name and UDP address of every node that announces the same load balancers' addresses, this one included
        /// [default: none: this node alone announces its addresses]
        "announce-member" "LB_AGENT_ANNOUNCE_MEMBER" "announceMember"
        announce_member: Option<Vec<String>> | Option<List>, (value_name = "NAME=ADDR:PORT", num_args = 1.., value_delimiter = ',');
        /// File with the key that authenticates the members' messages, at least 16 bytes; the same on all nodes
        "announce-key-file" "LB_AGENT_ANNOUNCE_KEY_FILE" "announceKeyFile"
        announce_key_file: Option<PathBuf> | Option<PathBuf>, (value_name = "FILE");
        /// Whether two members that receive no messages from each other both announce (`availability`), or neither of
        /// them (`single`) [default: availability]
        "announce-prefer" "LB_AGENT_ANNOUNCE_PREFER" "announcePrefer"
        announce_prefer: Option<AnnouncePrefer> | Option<AnnouncePrefer>, (value_name = "WHAT");
        /// Routing table in which the agent keeps a route to each load balancer's address that a BGPAdvertisement
        /// announces from this node, for a BGP daemon on the node [default: none: nothing is announced by BGP]
        "announce-table" "LB_AGENT_ANNOUNCE_TABLE" "announceTable"
        announce_table: Option<u32> | Option<u32>, (value_name = "NUMBER");
        /// Configuration file of BIRD 2, which the agent writes from BGPPeers and BGPAdvertisements [default: none]
        "bird-config" "LB_AGENT_BIRD_CONFIG" "birdConfig"
        bird_config: Option<PathBuf> | Option<PathBuf>, (value_name = "FILE");
        /// Control socket of the BGP daemon BIRD, through which the agent makes BIRD read the file of --bird-config
        /// [default: /run/bird/bird.ctl]
        "bird-socket" "LB_AGENT_BIRD_SOCKET" "birdSocket"
        bird_socket: Option<PathBuf> | Option<PathBuf>, (value_name = "PATH");
        /// How to recognise internal clients. External clients of cluster IPs are masqueraded [default: ClusterCIDR]
        "detect-local-mode" "LB_AGENT_DETECT_LOCAL_MODE" "detectLocalMode"
        detect_local_mode: Option<DetectLocalMode> | Option<DetectLocalMode>, (value_name = "MODE");
        /// Pod networks, for --detect-local-mode ClusterCIDR [default: none: pods count as external, and external
        /// clients of cluster IPs are not masqueraded]
        "cluster-cidr" "LB_AGENT_CLUSTER_CIDR" "clusterCIDR"
        cluster_cidr: Option<Vec<String>> | Option<List>, (value_name = "CIDR", num_args = 1.., value_delimiter = ',');
        /// Bridge of the pods' interfaces, for --detect-local-mode BridgeInterface
        "pod-bridge-interface" "LB_AGENT_POD_BRIDGE_INTERFACE" "podBridgeInterface"
        pod_bridge_interface: Option<String> | Option<String>, (value_name = "NAME");
        /// Prefix of the names of the pods' interfaces, for --detect-local-mode InterfaceNamePrefix
        "pod-interface-name-prefix" "LB_AGENT_POD_INTERFACE_NAME_PREFIX" "podInterfaceNamePrefix"
        pod_interface_name_prefix: Option<String> | Option<String>, (value_name = "PREFIX");
        /// Masquerade all clients of cluster IPs, including internal ones
        "masquerade-all" "LB_AGENT_MASQUERADE_ALL" "masqueradeAll"
        masquerade_all: bool | bool, ();
        /// Source ports of masqueraded packets; no socket of the node may use them [default: 10000-29999]
        "masquerade-ports" "LB_AGENT_MASQUERADE_PORTS" "masqueradePorts"
        masquerade_ports: Option<String> | Option<String>, (value_name = "FIRST-LAST");
        /// Node addresses that serve node ports: those in these networks, or `primary` for the primary address of each
        /// family [default: all]
        "nodeport-addresses" "LB_AGENT_NODEPORT_ADDRESSES" "nodePortAddresses"
        nodeport_addresses: Option<Vec<String>> | Option<List>, (value_name = "CIDR|primary", num_args = 1.., value_delimiter = ',');
        /// Networks whose external clients may use no Service on this node, at any kind of address; at most 16. Pods in
        /// them are also denied, unless --cluster-cidr or another --detect-local-mode recognises them as internal
        /// [default: none]
        "deny-source" "LB_AGENT_DENY_SOURCE" "denySource"
        deny_source: Option<Vec<String>> | Option<List>, (value_name = "CIDR", num_args = 1.., value_delimiter = ',');
        /// Do not serve external IPs (spec.externalIPs), which any user who may edit a Service can set to any address
        "ignore-external-ips" "LB_AGENT_IGNORE_EXTERNAL_IPS" "ignoreExternalIPs"
        ignore_external_ips: bool | bool, ();
        /// Scheduler of Services without the annotation lb.dev/scheduler: random, rr, wrr, lc, wlc, sed, nq, sh, dh or
        /// mh [default: random]
        "scheduler" "LB_AGENT_SCHEDULER" "scheduler"
        scheduler: Option<String> | Option<String>, (value_name = "NAME");
        /// Entries in the lookup table of each Service with the scheduler mh: 251, 509, 1021, 2039, 4093, 8191, 16381,
        /// 32749, 65521 or 131071. A hundred entries for each backend spread flows evenly [default: 16381]
        "maglev-table-size" "LB_AGENT_MAGLEV_TABLE_SIZE" "maglevTableSize"
        maglev_table_size: Option<u32> | Option<u32>, (value_name = "PRIME");
        /// Hash seed of the schedulers mh, sh and dh. Nodes choose the same backend only with the same seed
        /// [default: a fixed number]
        "maglev-seed" "LB_AGENT_MAGLEV_SEED" "maglevSeed"
        maglev_seed: Option<u64> | Option<u64>, (value_name = "NUMBER");
        /// How packets of external clients reach backends on other nodes, for Services without the annotation
        /// lb.dev/north-south-mode: snat (masqueraded with the node's address), dsr (through a tunnel; the backend
        /// answers the client directly) or hybrid (dsr for TCP, snat for other protocols) [default: snat]
        "north-south-mode" "LB_AGENT_NORTH_SOUTH_MODE" "northSouthMode"
        north_south_mode: Option<String> | Option<String>, (value_name = "MODE");
        /// Tunnel of the modes dsr and hybrid [default: ipip]
        "dsr-encapsulation" "LB_AGENT_DSR_ENCAPSULATION" "dsrEncapsulation"
        dsr_encapsulation: Option<DsrEncapsulation> | Option<DsrEncapsulation>, (value_name = "KIND");
        /// Networks of further machines that may send tunnelled packets to backends on this node, in every
        /// --north-south-mode. If the mode is dsr or hybrid, or this flag is set, the other nodes of the cluster (with
        /// --manifests: the members of --announce-member) may as well [default: none]
        "dsr-peers" "LB_AGENT_DSR_PEERS" "dsrPeers"
        dsr_peers: Option<Vec<String>> | Option<List>, (value_name = "CIDR", num_args = 1.., value_delimiter = ',');
        /// Which processes get Service addresses translated at connect() and sendmsg() instead of per packet [default:
        /// host]
        "socket-lb" "LB_AGENT_SOCKET_LB" "socketLb"
        socket_lb: Option<SocketLb> | Option<SocketLb>, (value_name = "WHOSE");
        /// Which wire devices are served at XDP, before the kernel allocates an skb: routed packets bypass all
        /// netfilter rules, and attaching may reset the network card [default: off]
        "xdp" "LB_AGENT_XDP" "xdp"
        xdp: Option<Xdp> | Option<Xdp>, (value_name = "MODE");
        /// Move a connection to another backend after this many retransmissions of a SYN that its backend does not
        /// answer; 0: never [default: 0]
        "syn-retries" "LB_AGENT_SYN_RETRIES" "synRetries"
        syn_retries: Option<u16> | Option<u16>, (value_name = "NUMBER");
        /// How packets of Services get from interface to interface: through the stack, or directly, bypassing netfilter
        /// rules of the node [default: stack]
        "forwarding" "LB_AGENT_FORWARDING" "forwarding"
        forwarding: Option<Forwarding> | Option<Forwarding>, (value_name = "HOW");
        /// Address that serves /healthz and /livez; empty: none [default: 0.0.0.0:10256, or with an IPv6
        /// --bind-address [::]:10256]
        "healthz-bind-address" "LB_AGENT_HEALTHZ_BIND_ADDRESS" "healthzBindAddress"
        healthz_bind_address: Option<String> | Option<String>, (value_name = "HOST:PORT");
        /// Address that serves /metrics and /proxyMode; empty: none [default: 127.0.0.1:10249, or with an IPv6
        /// --bind-address [::1]:10249]
        "metrics-bind-address" "LB_AGENT_METRICS_BIND_ADDRESS" "metricsBindAddress"
        metrics_bind_address: Option<String> | Option<String>, (value_name = "HOST:PORT");
        /// Address that serves the pages for a browser, such as 127.0.0.1:8088; one that is no loopback address needs
        /// --web-token-file [default: none]
        "web-bind-address" "LB_AGENT_WEB_BIND_ADDRESS" "webBindAddress"
        web_bind_address: Option<String> | Option<String>, (value_name = "HOST:PORT");
        /// File with the token, at least 16 characters, that users of the web pages at --web-bind-address log in with
        /// [default: none: every process of the node may look]
        "web-token-file" "LB_AGENT_WEB_TOKEN_FILE" "webTokenFile"
        web_token_file: Option<PathBuf> | Option<PathBuf>, (value_name = "FILE");
        /// Addresses of this node at which the agent answers DNS queries over UDP and TCP, on port 53 unless given
        /// [default: none: no DNS server]
        "dns-bind-address" "LB_AGENT_DNS_BIND_ADDRESS" "dnsBindAddress"
        dns_bind_address: Option<Vec<String>> | Option<List>, (value_name = "ADDR[:PORT]", num_args = 1.., value_delimiter = ',');
        /// DNS domain of the names of Services [default: cluster.local]
        "cluster-domain" "LB_AGENT_CLUSTER_DOMAIN" "clusterDomain"
        cluster_domain: Option<String> | Option<String>, (value_name = "NAME");
        /// DNS servers for all other names [default: those in /etc/resolv.conf]
        "dns-upstream" "LB_AGENT_DNS_UPSTREAM" "dnsUpstream"
        dns_upstream: Option<Vec<String>> | Option<List>, (value_name = "ADDR[:PORT]", num_args = 1.., value_delimiter = ',');
        /// Networks whose clients the DNS server answers, in addition to the node itself [default: private and
        /// link-local networks, and --cluster-cidr]
        "dns-allow" "LB_AGENT_DNS_ALLOW" "dnsAllow"
        dns_allow: Option<Vec<String>> | Option<List>, (value_name = "CIDR", num_args = 1.., value_delimiter = ',');
        /// DNS queries per second over UDP that the agent answers to each source (docs/dns.md#clients); 0: any number
        /// [default: 2000]
        "dns-rate-limit" "LB_AGENT_DNS_RATE_LIMIT" "dnsRateLimit"
        dns_rate_limit: Option<u32> | Option<u32>, (value_name = "NUMBER");
        /// The DNS Service of the cluster, such as kube-system/kube-dns: the agent answers the queries of this node's
        /// pods in its place, while it can. The flag without a value is kube-system/kube-dns [default: none: the
        /// Service's endpoints answer]
        "dns-intercept" "LB_AGENT_DNS_INTERCEPT" "dnsIntercept"
        dns_intercept: Option<String> | Option<String>, (value_name = "NAMESPACE/NAME", num_args = 0..=1, default_missing_value = "kube-system/kube-dns");
        /// Port at the node's addresses on which the agent answers the DNS queries that pods send to the Service of
        /// --dns-intercept [default: 9053]
        "dns-intercept-port" "LB_AGENT_DNS_INTERCEPT_PORT" "dnsInterceptPort"
        dns_intercept_port: Option<u16> | Option<u16>, (value_name = "PORT");
        /// Detail of flow, packet and byte counts in /metrics [default: service]
        "service-metrics" "LB_AGENT_SERVICE_METRICS" "serviceMetrics"
        service_metrics: Option<ServiceMetrics> | Option<ServiceMetrics>, (value_name = "WHAT");
        /// Where to log each connection as a line of JSON: a file, - (standard output), or unix:PATH, a listening
        /// stream socket [default: none: no flow log]
        "flow-log" "LB_AGENT_FLOW_LOG" "flowLog"
        flow_log: Option<String> | Option<String>, (value_name = "FILE|-|unix:PATH");
        /// Seconds between two lines of a long connection [default: 60]
        "flow-log-interval" "LB_AGENT_FLOW_LOG_INTERVAL" "flowLogInterval"
        flow_log_interval: Option<u32> | Option<NonZeroU32>, (value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..));
        /// Which part of the connections the flow log has, from 0.000001 to 1: all lines of a connection, or none
        /// [default: 1]
        "flow-log-sample" "LB_AGENT_FLOW_LOG_SAMPLE" "flowLogSample"
        flow_log_sample: Option<f64> | Option<f64>, (value_name = "PART");
        /// Services whose connections the agent logs in the flow log, unless an annotation of the Service says
        /// otherwise [default: all]
        "flow-log-services" "LB_AGENT_FLOW_LOG_SERVICES" "flowLogServices"
        flow_log_services: Option<FlowLogServices> | Option<FlowLogServices>, (value_name = "WHICH");
        /// Size in MiB from which on the agent rotates the file of the flow log; 0: never [default: 100]
        "flow-log-max-size" "LB_AGENT_FLOW_LOG_MAX_SIZE" "flowLogMaxSize"
        flow_log_max_size: Option<u32> | Option<u32>, (value_name = "MIB");
        /// Rotated files that stay, FILE.1 to FILE.N [default: 5]
        "flow-log-keep" "LB_AGENT_FLOW_LOG_KEEP" "flowLogKeep"
        flow_log_keep: Option<u32> | Option<u32>, (value_name = "N");
        /// Log level, or a filter in the syntax of RUST_LOG [default: RUST_LOG, else info]
        "log-level" "LB_AGENT_LOG_LEVEL" "logLevel"
        log_level: Option<String> | Option<String>, (value_name = "FILTER");
        /// Format of log lines [default: human]
        "log-format" "LB_AGENT_LOG_FORMAT" "logFormat"
        log_format: Option<LogFormat> | Option<LogFormat>, (value_name = "FORMAT");
        /// Capacity for frontends, each a virtual address with a port [default: 131072]
        "max-frontends" "LB_AGENT_MAX_FRONTENDS" "maxFrontends"
        max_frontends: Option<u32> | Option<NonZeroU32>, (value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..));
        /// Capacity for backends, counted for each service port; during an update old and new ones need room
        /// [default: 262144]
        "max-backends" "LB_AGENT_MAX_BACKENDS" "maxBackends"
        max_backends: Option<u32> | Option<NonZeroU32>, (value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..));
        /// Capacity for entries of the tables of schedulers; during an update old and new ones need room
        /// [default: 524288]
        "max-table-slots" "LB_AGENT_MAX_TABLE_SLOTS" "maxTableSlots"
        max_table_slots: Option<u32> | Option<NonZeroU32>, (value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..));
        /// Capacity for connections; one that is masqueraded through the stack counts as two. Near it, unproven ones
        /// are evicted early [default: 32768 for each CPU, from 131072 to 1048576]
        "max-connections" "LB_AGENT_MAX_CONNECTIONS" "maxConnections"
        max_connections: Option<u32> | Option<NonZeroU32>, (value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1 << 30));
        /// Capacity for clients of Services with session affinity; beyond it, the client idle for longest is evicted
        /// and rebalanced [default: 32768]
        "max-affinity-clients" "LB_AGENT_MAX_AFFINITY_CLIENTS" "maxAffinityClients"
        max_affinity_clients: Option<u32> | Option<NonZeroU32>, (value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..));
        /// Log level of the BPF programs; logging costs time for every packet [default: off]
        "bpf-log" "LB_AGENT_BPF_LOG" "bpfLog"
        bpf_log: Option<BpfLog> | Option<BpfLog>, (value_name = "LEVEL");
    }
}

impl KernelArgs {
    /// These values; if `--config` is not given and the file `default` exists, `--config` becomes that file.
    #[must_use]
    pub fn or_config_file(mut self, default: &Path) -> Self {
        self.config = self.config.or_else(|| default.exists().then(|| default.to_owned()));
        self
    }
}

/// A list of values in the file of `--config`: a YAML list, or one text with commas, as for a flag.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged, expecting = "expected a list of texts, or one text with commas")]
pub enum List {
    /// One text, whose items are separated by commas.
    Text(String),
    /// A YAML list of texts.
    Items(Vec<String>),
}

impl List {
    /// The items of the list, not trimmed.
    pub fn items(self) -> Vec<String> {
        match self {
            Self::Text(text) => text.split(',').map(str::to_owned).collect(),
            Self::Items(items) => items,
        }
    }
}

/// The value of a flag or environment variable, which overrides the value in the file.
trait OrInFile<File> {
    /// This value or, if it is missing, the file's.
    fn or_in_file(self, file: File) -> Self;
}

impl<T> OrInFile<Self> for Option<T> {
    fn or_in_file(self, file: Self) -> Self {
        self.or(file)
    }
}

impl OrInFile<Option<List>> for Option<Vec<String>> {
    fn or_in_file(self, file: Option<List>) -> Self {
        self.or_else(|| file.map(List::items))
    }
}

impl OrInFile<Option<NonZeroU32>> for Option<u32> {
    fn or_in_file(self, file: Option<NonZeroU32>) -> Self {
        self.or(file.map(NonZeroU32::get))
    }
}

/// A flag that takes no value is on if the command line, the environment or the file turns it on.
impl OrInFile<Self> for bool {
    fn or_in_file(self, file: Self) -> Self {
        self || file
    }
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text for people
    Human,
    /// One JSON object on each line
    Json,
}

/// How internal clients are recognised; the values have kube-proxy's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
pub enum DetectLocalMode {
    /// The address of the client is in --cluster-cidr
    #[value(name = "ClusterCIDR")]
    #[serde(rename = "ClusterCIDR", alias = "")]
    ClusterCidr,
    /// The address of the client is in a pod network that the Node object of this node names
    #[value(name = "NodeCIDR")]
    #[serde(rename = "NodeCIDR")]
    NodeCidr,
    /// Packets of the client arrive through --pod-bridge-interface
    #[value(name = "BridgeInterface")]
    BridgeInterface,
    /// Packets of the client arrive on an interface whose name begins with --pod-interface-name-prefix
    #[value(name = "InterfaceNamePrefix")]
    InterfaceNamePrefix,
}

/// What two members do while they receive no messages from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnnouncePrefer {
    /// Both announce all addresses: a dead node is replaced
    Availability,
    /// Neither announces: two nodes never answer for one address, and a dead node is not replaced
    Single,
}

/// The processes for which programs on sockets translate Service addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketLb {
    /// Processes of the node, and pods in its network namespace
    Host,
    /// Also pods with network namespaces of their own; their packets are then neither translated nor masqueraded
    All,
    /// None; processes of the node reach no Service
    Off,
}

/// The tunnel through which packets of clients reach backends on other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DsrEncapsulation {
    /// IP in IP: IPv4 in IPv4, IPv6 in IPv6
    Ipip,
    /// IP in UDP to port 6080 (GUE); each flow has its own source port, so that network cards and routers spread flows
    Gue,
}

/// How packets of Services get from interface to interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Forwarding {
    /// Through the node's network stack, with its routing and netfilter rules. With --xdp, packets between a
    /// client and a backend that are both on other machines bypass it
    Stack,
    /// Bypass the stack wherever the next hop is known, which is faster. Netfilter rules of the node, and network
    /// policies written with them, do not apply to these packets
    Direct,
}

/// Detail of flow, packet and byte counts in /metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceMetrics {
    /// Nothing
    None,
    /// Service ports
    Service,
    /// Service ports and each of their backends, which can be many series
    Backend,
}

/// The Services whose connections the agent logs in the flow log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowLogServices {
    /// All but those with the annotation service.beta.kubernetes.io/aws-load-balancer-access-log-enabled: "false"
    All,
    /// Only those with the annotation service.beta.kubernetes.io/aws-load-balancer-access-log-enabled: "true"
    Annotated,
}

/// The wire devices that are served at XDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Xdp {
    /// Those whose drivers support native mode, except veth: there the other end would need an XDP program as well
    Auto,
    /// Those whose drivers support native mode, including veth whose other end has an XDP program or GRO
    Native,
    /// All: in native mode if the driver supports it, else in generic mode, which works on copies of packets
    Generic,
    /// None; all packets are handled at tc
    Off,
}

/// Log level of the BPF programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum BpfLog {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fmt::Write as _, fs};

    use clap::{Arg, CommandFactory as _};

    use super::*;
    use crate::cli::Cli;

    /// Flags whose alias, the second key that the configuration file accepts, is not the flag in plain camelCase; each
    /// with its alias.
    const OF_KUBE_PROXY: [(&str, &str); 4] = [
        ("cluster-cidr", "clusterCIDR"),
        ("ignore-external-ips", "ignoreExternalIPs"),
        ("nodeport-addresses", "nodePortAddresses"),
        ("service-cluster-ip-range", "serviceClusterIPRange"),
    ];

    fn camel_case(flag: &str) -> String {
        if let Some((_, alias)) = OF_KUBE_PROXY.iter().find(|(name, _)| *name == flag) {
            return (*alias).to_owned();
        }
        let mut words = flag.split('-');
        let mut alias = words.next().unwrap().to_owned();
        for word in words {
            alias.push_str(&word[..1].to_uppercase());
            alias.push_str(&word[1..]);
        }
        alias
    }

    /// The arguments of `lb-agent run` as clap knows them.
    fn run_flags() -> Vec<Arg> {
        let mut command = Cli::command();
        command.build();
        command.find_subcommand("run").unwrap().get_arguments().cloned().collect()
    }

    #[test]
    fn every_flag_of_run_has_its_environment_variable_and_keys() {
        let flags = run_flags();
        let with_key =
            flags.iter().filter_map(Arg::get_long).filter(|flag| !["help", "config"].contains(flag));
        let declared: BTreeSet<&str> = SETTINGS.iter().map(|setting| setting.flag).collect();
        assert_eq!(with_key.collect::<BTreeSet<_>>(), declared);
        for Setting { flag, environment, alias } in SETTINGS {
            let arg = flags.iter().find(|arg| arg.get_long() == Some(flag)).unwrap();
            assert_eq!(arg.get_env().unwrap(), *environment);
            assert_eq!(*environment, format!("LB_AGENT_{}", flag.replace('-', "_").to_uppercase()));
            assert_eq!(*alias, camel_case(flag));
            assert_eq!(arg.get_id().as_str(), flag.replace('-', "_"), "the field has the name of the flag");
        }
    }

    /// A value that the configuration file accepts for the setting with this flag.
    fn value(arg: &Arg) -> String {
        let possible = arg.get_possible_values();
        match (possible.first(), arg.get_long().unwrap()) {
            (Some(first), _) => first.get_name().to_owned(),
            (None, flag) if flag.starts_with("max-") || flag.starts_with("maglev-") => "7".to_owned(),
            (None, "flow-log-sample") => "0.5".to_owned(),
            (None, "flow-log-interval" | "flow-log-max-size" | "flow-log-keep") => "7".to_owned(),
            (
                None,
                "syn-retries" | "announce-port" | "announce-table" | "dns-intercept-port" | "dns-rate-limit",
            ) => "2".to_owned(),
            (
                None,
                "masquerade-all"
                | "ignore-external-ips"
                | "load-balancer-controller"
                | "load-balancer-reassign"
                | "announce",
            ) => "true".to_owned(),
            (None, _) => "x".to_owned(),
        }
    }

    #[test]
    fn both_keys_of_every_setting_are_read_from_the_file() {
        for setting in SETTINGS {
            let arg = run_flags().into_iter().find(|arg| arg.get_long() == Some(setting.flag)).unwrap();
            let read = |key: &str| -> FileSettings {
                let text = format!("{key}: {}\n", value(&arg));
                serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
            };
            let by_flag = read(setting.flag);
            assert_eq!(by_flag, read(setting.alias), "{setting:?}");
            assert_ne!(by_flag, FileSettings::default(), "{setting:?}");
        }
    }

    /// The text that `docs/settings.md` must have.
    fn page() -> String {
        let mut page = "# Settings\n\n\
            Made from `lb-agent/src/cli/settings.rs` by `UPDATE_DOCS=1 cargo test -p lb-agent settings`; change that.\n\n\
            Each setting can be a flag, an environment variable, or a key in the YAML file of `--config`, which also takes the\n\
            second key. A flag overrides the environment, which overrides the file; but a switch (a flag without a value) is on if\n\
            any of the three turns it on. `lb-agent run --help` describes the values.\n\n\
            [limits.md](limits.md#what-no-setting-changes) lists values that no setting changes, such as the UDP timeout.\n\n\
            | flag | environment | second key | meaning |\n| --- | --- | --- | --- |\n"
            .to_owned();
        let flags = run_flags();
        for Setting { flag, environment, alias } in SETTINGS {
            let arg = flags.iter().find(|arg| arg.get_long() == Some(flag)).unwrap();
            let help = arg.get_help().unwrap().to_string().replace('|', "\\|");
            let alias = if alias == flag { String::new() } else { format!("`{alias}`") };
            writeln!(page, "| `--{flag}` | `{environment}` | {alias} | {help} |").unwrap();
        }
        page
    }

    #[test]
    fn docs_list_every_setting() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/settings.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(&path, page()).unwrap();
        }
        let text = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(text, page(), "UPDATE_DOCS=1 cargo test -p lb-agent settings writes it");
    }
}
