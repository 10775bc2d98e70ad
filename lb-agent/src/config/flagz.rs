//! The effective configuration as flags: the page `/flagz`.

use std::{collections::BTreeMap, net::SocketAddr, num::NonZeroU32, path::Path};

use lb_core::announce::lease::Prefer;

use super::{Config, DetectLocal, DsrEncapsulation, NodePortAddresses, SocketLb, Source};
use crate::{
    cli::{LogFormat, ServiceMetrics},
    flow_log::FlowLogConfig,
    kubernetes::ApiServer,
};
use lb_datapath::{BpfLogLevel, Forwarding, XdpOption};

impl Config {
    /// The effective value of each setting of `run`, by the name of its flag; empty for a setting without a value.
    pub fn flagz(&self) -> BTreeMap<&'static str, String> {
        let path = |path: &Path| path.display().to_string();
        let address = |address: Option<SocketAddr>| address.map_or_else(String::new, |a| a.to_string());
        let web_token = self.web.as_ref().and_then(|web| web.token_file.as_deref());
        let (intercept, text) = (self.dns.intercept.as_ref(), |of: Option<String>| of.unwrap_or_default());
        let mut flags = self.node_flags();
        flags.extend([
            ("bpffs", path(&self.kernel.bpffs)),
            ("cgroup", self.kernel.cgroup.as_deref().map_or_else(String::new, path)),
            ("node-name", self.node_name.clone()),
            ("wire-device", list(&self.devices.wire)),
            ("workload-device", list(&self.devices.workload)),
            ("healthz-bind-address", address(self.healthz)),
            ("metrics-bind-address", address(self.metrics)),
            ("web-bind-address", address(self.web.as_ref().map(|web| web.address))),
            ("web-token-file", web_token.map_or_else(String::new, path)),
            ("dns-bind-address", list(&self.dns.bind)),
            ("cluster-domain", self.dns.zone.name().to_owned()),
            ("dns-upstream", list(&self.dns.upstreams)),
            ("dns-allow", list(&self.dns.access.allowed)),
            ("dns-intercept", text(intercept.map(|of| of.service.to_string()))),
            ("dns-intercept-port", text(intercept.map(|of| of.port.to_string()))),
            ("dns-rate-limit", self.dns.access.rate.map_or(0, NonZeroU32::get).to_string()),
            ("log-level", self.log_filter.clone().unwrap_or_default()),
            ("log-format", log_format(self.log_format).to_owned()),
            ("bpf-log", bpf_log(self.bpf_log).to_owned()),
            ("max-frontends", self.capacities.services.to_string()),
            ("max-backends", self.capacities.backends.to_string()),
            ("max-table-slots", self.capacities.tables.to_string()),
            ("max-connections", (self.capacities.conntrack / 2).to_string()),
            ("max-affinity-clients", self.capacities.affinity.to_string()),
        ]);
        let (manifests, kubeconfig) = match &self.source {
            Source::Manifests(dir) => (path(dir), String::new()),
            Source::ApiServer(ApiServer::Kubeconfig(file)) => (String::new(), path(file)),
            Source::ApiServer(ApiServer::InCluster) => Default::default(),
        };
        flags.extend([("manifests", manifests), ("kubeconfig", kubeconfig)]);
        flags.extend(self.flow_log_flags());
        flags
    }

    /// The flags of the flow log; all are empty without a flow log.
    fn flow_log_flags(&self) -> [(&'static str, String); 6] {
        let of = |value: fn(&FlowLogConfig) -> String| self.flow_log.as_ref().map(value).unwrap_or_default();
        [
            ("flow-log", of(|log| log.target.to_string())),
            ("flow-log-interval", of(|log| log.interval.as_secs().to_string())),
            ("flow-log-sample", of(|log| (f64::from(log.sample) / 1e6).to_string())),
            ("flow-log-services", of(|log| if log.only_annotated { "annotated" } else { "all" }.to_owned())),
            ("flow-log-max-size", of(|log| (log.rotation.max_size >> 20).to_string())),
            ("flow-log-keep", of(|log| log.rotation.keep.to_string())),
        ]
    }

    /// The flags about the node's addresses, Services and forwarding.
    fn node_flags(&self) -> BTreeMap<&'static str, String> {
        let node_ports = match &self.nodeport_addresses {
            NodePortAddresses::All => String::new(),
            NodePortAddresses::Primary => "primary".to_owned(),
            NodePortAddresses::Networks(networks) => list(networks),
        };
        // Leaves out the default ranges: if a flag named them, the agent would drop packets to unassigned addresses in
        // them.
        let given_ranges = self.service_ranges.as_deref().filter(|_| self.drops_unknown_vips);
        let ports = &self.masquerade_ports;
        let mut flags = BTreeMap::from([
            ("zone", self.zone.clone().unwrap_or_default()),
            ("bind-address", self.bind_address.to_string()),
            ("service-cluster-ip-range", list(given_ranges.unwrap_or_default())),
            ("load-balancer-pool", list(&self.load_balancer_pool)),
            ("load-balancer-class", self.load_balancer_class.clone().unwrap_or_default()),
            ("load-balancer-controller", self.load_balancer_controller.to_string()),
            ("load-balancer-reassign", self.load_balancer_reassign.to_string()),
            ("masquerade-all", self.masquerade_all.to_string()),
            ("masquerade-ports", format!("{}-{}", ports.start(), ports.end())),
            ("nodeport-addresses", node_ports),
            ("deny-source", list(&self.denied_sources)),
            ("ignore-external-ips", self.ignore_external_ips.to_string()),
            ("scheduler", self.scheduler.to_string()),
            ("maglev-table-size", self.maglev.size.to_string()),
            ("maglev-seed", self.maglev.seed.to_string()),
            ("north-south-mode", self.north_south.to_string()),
            ("dsr-encapsulation", encapsulation(self.dsr_encapsulation).to_owned()),
            ("dsr-peers", list(&self.dsr_peers)),
            ("socket-lb", socket_lb(self.socket_lb).to_owned()),
            ("xdp", xdp(self.xdp).to_owned()),
            ("forwarding", forwarding(self.forwarding).to_owned()),
            ("syn-retries", self.syn_retries.to_string()),
            ("service-metrics", service_metrics(self.service_metrics).to_owned()),
        ]);
        flags.extend(self.detection_flags());
        flags.extend(self.announcement_flags());
        flags
    }

    /// The flags that say which clients are internal.
    fn detection_flags(&self) -> [(&'static str, String); 4] {
        let (mode, [cidrs, bridge, prefix]) = match &self.detect_local {
            DetectLocal::Never => ("ClusterCIDR", Default::default()),
            DetectLocal::ClusterCidr(networks) => {
                ("ClusterCIDR", [list(networks), String::new(), String::new()])
            }
            DetectLocal::NodeCidr => ("NodeCIDR", Default::default()),
            DetectLocal::BridgeInterface(name) => {
                ("BridgeInterface", [String::new(), name.clone(), String::new()])
            }
            DetectLocal::InterfaceNamePrefix(prefix) => {
                ("InterfaceNamePrefix", [String::new(), String::new(), prefix.clone()])
            }
        };
        [
            ("detect-local-mode", mode.to_owned()),
            ("cluster-cidr", cidrs),
            ("pod-bridge-interface", bridge),
            ("pod-interface-name-prefix", prefix),
        ]
    }

    /// The flags about announcements at layer 2 and by BGP.
    fn announcement_flags(&self) -> [(&'static str, String); 8] {
        let key_file = self.announce.key_file.as_deref().map(|file| file.display().to_string());
        let members: Vec<String> =
            self.announce.members.iter().map(|(name, address)| format!("{name}={address}")).collect();
        let bird = self.bgp.as_ref().and_then(|bgp| bgp.bird.as_ref());
        let prefer = match self.announce.prefer {
            Prefer::Availability => "availability",
            Prefer::Single => "single",
        };
        [
            ("announce", self.announce.port.is_some().to_string()),
            ("announce-port", self.announce.port.map(|port| port.to_string()).unwrap_or_default()),
            ("announce-member", members.join(",")),
            ("announce-key-file", key_file.unwrap_or_default()),
            ("announce-prefer", prefer.to_owned()),
            ("announce-table", self.bgp.as_ref().map(|bgp| bgp.table.to_string()).unwrap_or_default()),
            ("bird-config", bird.map(|bird| bird.file.display().to_string()).unwrap_or_default()),
            ("bird-socket", bird.map(|bird| bird.socket.display().to_string()).unwrap_or_default()),
        ]
    }
}

fn list(items: &[impl ToString]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

const fn log_format(format: LogFormat) -> &'static str {
    match format {
        LogFormat::Human => "human",
        LogFormat::Json => "json",
    }
}

const fn socket_lb(whose: SocketLb) -> &'static str {
    match whose {
        SocketLb::Host => "host",
        SocketLb::All => "all",
        SocketLb::Off => "off",
    }
}

const fn service_metrics(of: ServiceMetrics) -> &'static str {
    match of {
        ServiceMetrics::None => "none",
        ServiceMetrics::Service => "service",
        ServiceMetrics::Backend => "backend",
    }
}

const fn encapsulation(kind: DsrEncapsulation) -> &'static str {
    match kind {
        DsrEncapsulation::Ipip => "ipip",
        DsrEncapsulation::Gue => "gue",
    }
}

const fn forwarding(option: Forwarding) -> &'static str {
    match option {
        Forwarding::Stack => "stack",
        Forwarding::Direct => "direct",
    }
}

const fn xdp(option: XdpOption) -> &'static str {
    match option {
        XdpOption::Auto => "auto",
        XdpOption::Native => "native",
        XdpOption::Generic => "generic",
        XdpOption::Off => "off",
    }
}

const fn bpf_log(level: Option<BpfLogLevel>) -> &'static str {
    match level {
        None => "off",
        Some(BpfLogLevel::Error) => "error",
        Some(BpfLogLevel::Warn) => "warn",
        Some(BpfLogLevel::Info) => "info",
        Some(BpfLogLevel::Debug) => "debug",
        Some(BpfLogLevel::Trace) => "trace",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::cli::{Cli, Command};

    fn config(arguments: &[String]) -> Config {
        let run = ["lb-agent", "run"].into_iter().map(str::to_owned);
        let cli = Cli::try_parse_from(run.chain(arguments.iter().cloned())).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        Config::new(cli.kernel, *run).unwrap()
    }

    #[test]
    fn every_flag_has_a_value() {
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let flags: BTreeSet<&str> =
            run.get_arguments().chain(command.get_arguments()).filter_map(|f| f.get_long()).collect();
        let flags = &flags - &BTreeSet::from(["config", "help", "version"]);
        let config = config(&["--manifests=/".to_owned(), "--node-name=a".to_owned()]);
        assert_eq!(config.flagz().into_keys().collect::<BTreeSet<_>>(), flags);
    }

    #[test]
    fn flags_give_the_same_configuration() {
        for extra in [
            "--node-name=a --zone=z1",
            "--node-name=a --service-cluster-ip-range=10.96.0.0/12,fd00:10:96::/112",
            "--node-name=b --cluster-cidr=10.244.0.0/16,fd00::/64 --masquerade-all --wire-device=eth0,en*",
            "--nodeport-addresses=primary --socket-lb=off --bpf-log=warn --log-level=debug --log-format=json",
            "--nodeport-addresses=192.0.2.0/24 --max-connections=1000 --metrics-bind-address= --masquerade-ports=1024-2047",
            "--scheduler=wlc --maglev-table-size=251 --maglev-seed=7 --max-table-slots=1000",
            "--north-south-mode=hybrid --dsr-encapsulation=gue --dsr-peers=192.0.2.0/24,2001:db8::/64",
            "--deny-source=192.0.2.0/24,2001:db8::/64 --ignore-external-ips",
            "--flow-log=unix:/run/flows --flow-log-sample=0.25 --flow-log-services=annotated --flow-log-keep=0",
            "--dns-bind-address=192.0.2.1,[2001:db8::1]:5353 --cluster-domain=Example. --dns-upstream=192.0.2.53",
            "--dns-intercept=kube-system/kube-dns --dns-intercept-port=9054",
            "--dns-bind-address=192.0.2.1 --dns-allow=198.51.100.0/24,2001:db8::/64 --dns-rate-limit=0",
            "--web-bind-address=192.0.2.1:8088 --web-token-file=/token",
            "--load-balancer-pool=192.0.2.0/24,2001:db8::/64 --load-balancer-class=example.com/lb --load-balancer-reassign",
            "--detect-local-mode=BridgeInterface --pod-bridge-interface=br0 --bind-address=192.0.2.1",
        ] {
            let given: Vec<String> = extra.split(' ').chain(["--manifests=/"]).map(str::to_owned).collect();
            let config = config(&given);
            let told = config.flagz().into_iter().filter_map(|(flag, value)| match (flag, &*value) {
                (
                    "masquerade-all"
                    | "ignore-external-ips"
                    | "load-balancer-controller"
                    | "load-balancer-reassign"
                    | "announce",
                    switch,
                ) => (switch == "true").then(|| format!("--{flag}")),
                ("metrics-bind-address", "") => Some("--metrics-bind-address=".to_owned()),
                (_, "") => None,
                _ => Some(format!("--{flag}={value}")),
            });
            assert_eq!(self::config(&told.collect::<Vec<_>>()), config, "{extra}");
        }
    }
}
