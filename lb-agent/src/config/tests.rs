use std::{io::Write as _, path::Path};

use clap::CommandFactory as _;
use glob::Pattern;

use super::*;
use crate::cli::DetectLocalMode;

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn with(file: &tempfile::NamedTempFile) -> KernelArgs {
    KernelArgs { config: Some(file.path().to_owned()), ..KernelArgs::default() }
}

fn minimal() -> RunArgs {
    RunArgs { manifests: Some("/".into()), node_name: Some("a".into()), ..RunArgs::default() }
}

fn refusal(kernel: KernelArgs, run: RunArgs) -> String {
    Config::new(kernel, run).unwrap_err().to_string()
}

#[test]
fn defaults_are_those_of_kube_proxy() {
    let config = Config::new(KernelArgs::default(), minimal()).unwrap();
    assert_eq!(config.kernel, KernelPaths { bpffs: "/sys/fs/bpf".into(), cgroup: None });
    assert_eq!(config.healthz.unwrap().to_string(), "0.0.0.0:10256");
    assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:10249");
    let ranges: Vec<_> = config.service_ranges.iter().flatten().map(ToString::to_string).collect();
    assert_eq!(ranges, ["10.96.0.0/12", "fd00:10:96::/112"]);
    assert!(!config.drops_unknown_vips, "other machines may have addresses in the default ranges");
    assert_eq!(config.devices, DevicePatterns::default());
    assert_eq!(config.detect_local, DetectLocal::Never);
    assert_eq!(config.nodeport_addresses, NodePortAddresses::All);
    assert_eq!((config.masquerade_ports.clone(), config.socket_lb), (10_000..=29_999, SocketLb::Host));
    let policy = Policy { node_name: "a".into(), ..Policy::default() };
    assert_eq!(config.policy(), policy);
    assert_eq!(config.node_ip(), None);
    assert_eq!((config.log_format, config.bpf_log), (LogFormat::Human, None));
}

#[test]
fn invalid_file_matters_only_to_commands_that_read_it() {
    let invalid = file("bpffs: /from/file\nnode-nmae: b");
    let given = || KernelArgs { bpffs: Some("/given".into()), ..with(&invalid) };
    assert_eq!(KernelPaths::only_bpffs(given()).unwrap(), Path::new("/given"));
    KernelPaths::new(given()).unwrap_err();
    KernelPaths::only_bpffs(with(&invalid)).unwrap_err();
    let valid = file("bpffs: /from/file");
    assert_eq!(KernelPaths::only_bpffs(with(&valid)).unwrap(), Path::new("/from/file"));
}

#[test]
fn packets_bypass_netfilter_only_on_request() {
    let config = Config::new(KernelArgs::default(), minimal()).unwrap();
    assert_eq!((config.xdp, config.forwarding), (XdpOption::Off, Forwarding::Stack));
}

#[test]
fn api_server_source_has_only_the_given_cluster_ip_ranges() {
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    let run = || RunArgs { manifests: None, kubeconfig: Some(kubeconfig.path().to_owned()), ..minimal() };
    let named = Config::new(KernelArgs::default(), run()).unwrap();
    assert_eq!((named.service_ranges, named.drops_unknown_vips), (None, true));
    let given = RunArgs { service_cluster_ip_range: Some(vec!["10.0.0.0/16".into()]), ..run() };
    let ranges = Config::new(KernelArgs::default(), given).unwrap().service_ranges;
    assert_eq!(ranges, Some(vec!["10.0.0.0/16".parse().unwrap()]));
}

#[test]
fn flag_overrides_the_file() {
    let file = file(
        "node-name: from-file\nbpffs: /from/file\nwire-device: [eth0, 'bond*']\nworkload-device: a,b\n\
         bpf-log: debug\nmetrics-bind-address: ''\nmax-backends: 100\nmax-connections: 100\n",
    );
    let run = RunArgs {
        node_name: Some("Typed".into()),
        wire_device: Some(vec!["wg0".into()]),
        max_backends: Some(50),
        ..minimal()
    };
    let config = Config::new(with(&file), run).unwrap();
    assert_eq!(config.node_name, "typed");
    assert_eq!(config.kernel.bpffs, Path::new("/from/file"));
    let names = |patterns: &[Pattern]| patterns.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names(&config.devices.wire), ["wg0"]);
    assert_eq!(names(&config.devices.workload), ["a", "b"]);
    assert_eq!(config.bpf_log, Some(BpfLogLevel::Debug));
    let capacities = Capacities { backends: 50, conntrack: 200, ..Capacities::default() };
    assert_eq!(config.capacities, capacities);
    assert_eq!(config.metrics, None);
}

#[test]
fn camel_case_keys_are_accepted() {
    let file = file("nodeName: b\nserviceClusterIPRange: [10.0.0.0/16]\n");
    let config = Config::new(with(&file), RunArgs { node_name: None, ..minimal() }).unwrap();
    assert_eq!(config.node_name, "b");
    assert_eq!(config.service_ranges, Some(vec!["10.0.0.0/16".parse().unwrap()]));
    assert!(config.drops_unknown_vips);
}

#[test]
fn unknown_key_is_named_in_the_error() {
    let file = file("node-name: a\nnode-nmae: b\n");
    let error = refusal(with(&file), minimal());
    assert!(error.contains("node-nmae") && error.contains(&file.path().display().to_string()), "{error}");
    assert!(KernelPaths::new(with(&file)).is_err(), "also for commands that need only a part of the file");
}

#[test]
fn reassign_without_an_agent_that_gives_addresses_is_rejected() {
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    let of_api_server = RunArgs {
        manifests: None,
        kubeconfig: Some(kubeconfig.path().to_owned()),
        load_balancer_reassign: true,
        ..minimal()
    };
    let error = refusal(KernelArgs::default(), of_api_server.clone());
    assert!(
        error.contains("--load-balancer-reassign") && error.contains("--load-balancer-controller"),
        "{error}"
    );
    let controller = RunArgs { load_balancer_controller: true, ..of_api_server };
    for run in [controller, RunArgs { load_balancer_reassign: true, ..minimal() }] {
        assert!(Config::new(KernelArgs::default(), run).unwrap().load_balancer_reassign);
    }
}

#[test]
fn empty_file_changes_nothing() {
    for text in ["", "# nothing\n"] {
        assert!(Config::new(with(&file(text)), minimal()).is_ok(), "{text:?}");
    }
}

#[test]
fn file_of_another_kind_is_rejected() {
    let file = file("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n");
    let error = refusal(with(&file), minimal());
    assert!(error.contains("KubeletConfiguration") && error.contains("KubeProxyConfiguration"), "{error}");
}

#[test]
fn malformed_kind_is_rejected() {
    let error = refusal(with(&file("kind: [KubeProxyConfiguration]\n")), minimal());
    assert!(error.contains("kind") && error.contains("string"), "{error}");
}

#[test]
fn kube_proxy_configuration_sets_the_same_settings() {
    let file = file(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nbindAddress: '::'\n\
         clientConnection: {kubeconfig: /nowhere}\nclusterCIDR: 10.0.0.0/16\nhostnameOverride: ' B '\nipvs: {strictARP: true}\n",
    );
    let config = Config::new(with(&file), RunArgs { node_name: None, ..minimal() }).unwrap();
    assert_eq!(config.node_name, "b");
    assert_eq!(config.detect_local, DetectLocal::ClusterCidr(vec!["10.0.0.0/16".parse().unwrap()]));
    assert_eq!(config.without_effect, ["ipvs.strictARP"]);
    assert_eq!(config.healthz.unwrap().to_string(), "[::]:10256");
    assert_eq!(config.metrics.unwrap().to_string(), "[::1]:10249");
    assert_eq!(
        (config.source, config.bind_address.to_string()),
        (Source::Manifests("/".into()), "::".to_owned())
    );
}

#[test]
fn every_error_names_setting_and_value() {
    let some = |text: &str| Some(vec![text.to_owned()]);
    let refusals = [
        ("--cluster-cidr", "10.0.0.0", RunArgs { cluster_cidr: some("10.0.0.0"), ..minimal() }),
        (
            "--nodeport-addresses",
            "primary",
            RunArgs { nodeport_addresses: Some(vec!["primary".into(), "10.0.0.0/8".into()]), ..minimal() },
        ),
        ("--masquerade-ports", "0-9", RunArgs { masquerade_ports: Some("0-9".into()), ..minimal() }),
        ("--masquerade-ports", "9-8", RunArgs { masquerade_ports: Some("9-8".into()), ..minimal() }),
        ("--bind-address", "localhost", RunArgs { bind_address: Some("localhost".into()), ..minimal() }),
        (
            "--detect-local-mode",
            "NodeCIDR",
            RunArgs { detect_local_mode: Some(DetectLocalMode::NodeCidr), ..minimal() },
        ),
        (
            "--pod-bridge-interface",
            "",
            RunArgs { detect_local_mode: Some(DetectLocalMode::BridgeInterface), ..minimal() },
        ),
        (
            "--pod-interface-name-prefix",
            "sixteen-letters-",
            RunArgs {
                detect_local_mode: Some(DetectLocalMode::InterfaceNamePrefix),
                pod_interface_name_prefix: Some("sixteen-letters-".into()),
                ..minimal()
            },
        ),
        ("--wire-device", "eth/0", RunArgs { wire_device: some("eth/0"), ..minimal() }),
        ("--workload-device", "a[", RunArgs { workload_device: some("a["), ..minimal() }),
        (
            "--service-cluster-ip-range",
            "10.0.0.0/33",
            RunArgs { service_cluster_ip_range: some("10.0.0.0/33"), ..minimal() },
        ),
        (
            "--healthz-bind-address",
            "nowhere:1",
            RunArgs { healthz_bind_address: Some("nowhere:1".into()), ..minimal() },
        ),
        ("--log-level", "lb=loud", RunArgs { log_level: Some("lb=loud".into()), ..minimal() }),
        ("--manifests", "/nowhere", RunArgs { manifests: Some("/nowhere".into()), ..minimal() }),
        ("--node-name", "", RunArgs { node_name: Some(" ".into()), ..minimal() }),
    ];
    for (setting, value, run) in refusals {
        let error = refusal(KernelArgs::default(), run);
        assert!(error.starts_with(&format!("{setting}: {value:?}")), "{error}");
    }
}

#[test]
fn at_most_one_cluster_ip_range_per_family_is_accepted() {
    let run = RunArgs {
        service_cluster_ip_range: Some(vec!["10.0.0.0/16".into(), "10.1.0.0/16".into()]),
        ..minimal()
    };
    assert!(refusal(KernelArgs::default(), run).contains("second range"));
}

#[test]
fn at_most_sixteen_networks_are_denied() {
    let networks = |count: u8| (0..count).map(|n| format!("192.0.{n}.0/25")).collect::<Vec<_>>();
    let run = |denied| RunArgs { deny_source: Some(denied), ..minimal() };
    let config = Config::new(KernelArgs::default(), run(networks(16))).unwrap();
    assert_eq!(config.denied_sources.len(), 16);
    let error = refusal(KernelArgs::default(), run(networks(17)));
    assert!(error.starts_with("--deny-source: \"192.0.16.0/25\"") && error.contains("at most 16"), "{error}");
    // A network inside another given network does not count towards the maximum.
    let config =
        Config::new(KernelArgs::default(), run([networks(17), vec!["192.0.0.0/16".into()]].concat()));
    assert_eq!(config.unwrap().denied_sources, ["192.0.0.0/16".parse().unwrap()]);
}

#[test]
fn error_without_a_source_names_the_flags() {
    let error = check::source((None, None), false).unwrap_err().to_string();
    assert!(error.contains("--manifests DIR") && error.contains("--kubeconfig FILE"), "{error}");
}

#[test]
fn pod_uses_the_api_server_of_its_cluster_by_default() {
    let source = |given| check::source(given, true).unwrap();
    assert_eq!(source((None, None)), Source::ApiServer(ApiServer::InCluster));
    assert_eq!(source((Some("/".into()), None)), Source::Manifests("/".into()));
}

#[test]
fn configuration_file_of_the_package_is_the_default() {
    let file = file("manifests: /\n");
    assert_eq!(KernelArgs::default().or_config_file(file.path()).config.as_deref(), Some(file.path()));
    assert_eq!(KernelArgs::default().or_config_file(Path::new("/missing")).config, None);
    let given = KernelArgs { config: Some("/given".into()), ..KernelArgs::default() };
    assert_eq!(given.or_config_file(file.path()).config, Some("/given".into()));
}

#[test]
fn zone_is_for_manifests_only() {
    let zone = |text: &str| RunArgs { zone: Some(text.into()), ..minimal() };
    let of = |run| Config::new(KernelArgs::default(), run).unwrap().zone;
    assert_eq!((of(zone("z1")), of(zone("")), of(minimal())), (Some("z1".into()), None, None));
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    let run = RunArgs { manifests: None, kubeconfig: Some(kubeconfig.path().to_owned()), ..zone("z1") };
    let error = refusal(KernelArgs::default(), run);
    assert!(error.contains("--zone") && error.contains("topology.kubernetes.io/zone"), "{error}");
}

#[test]
fn two_sources_are_rejected() {
    let run = RunArgs { kubeconfig: Some("/k".into()), ..minimal() };
    let error = refusal(KernelArgs::default(), run);
    assert!(error.contains("--manifests /") && error.contains("--kubeconfig /k"), "{error}");
}

#[test]
fn source_flag_overrides_the_source_in_the_file() {
    let file = file("kubeconfig: /nowhere\n");
    let config = Config::new(with(&file), minimal()).unwrap();
    assert_eq!(config.source, Source::Manifests("/".into()));
    let error = refusal(with(&file), RunArgs { manifests: None, ..minimal() });
    assert!(error.starts_with("--kubeconfig: \"/nowhere\""), "{error}");
}

#[test]
fn bind_address_without_a_port_gets_the_default_port() {
    for (text, bound) in [("::1", "[::1]:10256"), ("127.0.0.1", "127.0.0.1:10256"), ("[::]:80", "[::]:80")] {
        let config = Config::new(
            KernelArgs::default(),
            RunArgs { healthz_bind_address: Some(text.into()), ..minimal() },
        );
        assert_eq!(config.unwrap().healthz.unwrap().to_string(), bound);
    }
}

#[test]
fn pages_off_loopback_need_a_token() {
    let web = |address: &str, token: Option<&str>| {
        let token = token.map(Into::into);
        RunArgs { web_bind_address: Some(address.into()), web_token_file: token, ..minimal() }
    };
    let config = |run| Config::new(KernelArgs::default(), run).unwrap().web;
    assert_eq!(config(minimal()), None);
    assert_eq!(config(web("", None)), None);
    let on_loopback = config(web("::1", None)).unwrap();
    assert_eq!((on_loopback.address.to_string().as_str(), on_loopback.token_file), ("[::1]:8088", None));
    assert!(config(web("0.0.0.0:80", Some("/token"))).unwrap().token_file.is_some());
    for address in ["0.0.0.0:80", "[::]:80", "192.0.2.1"] {
        let error = refusal(KernelArgs::default(), web(address, None));
        assert!(error.starts_with("--web-bind-address") && error.contains("--web-token-file"), "{error}");
    }
    let error = refusal(KernelArgs::default(), web("", Some("/token")));
    assert!(error.starts_with("--web-token-file"), "{error}");
}

#[test]
fn detect_local_mode_selects_internal_clients() {
    let detected = |mode, run: RunArgs| {
        let run = RunArgs { detect_local_mode: Some(mode), ..run };
        Config::new(KernelArgs::default(), run).unwrap().detect_local
    };
    let run = RunArgs {
        cluster_cidr: Some(vec!["10.1.2.3/16".into(), "fd00::/48".into(), String::new()]),
        pod_bridge_interface: Some("cni0".into()),
        pod_interface_name_prefix: Some("veth".into()),
        ..minimal()
    };
    let networks = vec!["10.1.0.0/16".parse().unwrap(), "fd00::/48".parse().unwrap()];
    for (mode, expected) in [
        (DetectLocalMode::ClusterCidr, DetectLocal::ClusterCidr(networks)),
        (DetectLocalMode::BridgeInterface, DetectLocal::BridgeInterface("cni0".into())),
        (DetectLocalMode::InterfaceNamePrefix, DetectLocal::InterfaceNamePrefix("veth".into())),
    ] {
        assert_eq!(detected(mode, run.clone()), expected);
    }
    assert_eq!(detected(DetectLocalMode::ClusterCidr, minimal()), DetectLocal::Never);
}

#[test]
fn nodeport_addresses_are_parsed() {
    let serving = |texts: &[&str]| {
        let texts = texts.iter().map(ToString::to_string).collect();
        let run = RunArgs { nodeport_addresses: Some(texts), ..minimal() };
        Config::new(KernelArgs::default(), run).unwrap().nodeport_addresses
    };
    assert_eq!(serving(&["primary"]), NodePortAddresses::Primary);
    assert_eq!(serving(&[""]), NodePortAddresses::All);
    let networks = vec!["192.0.2.0/24".parse().unwrap(), "fd00::1/128".parse().unwrap()];
    assert_eq!(serving(&["192.0.2.0/24", "fd00::1/128"]), NodePortAddresses::Networks(networks));
}

#[test]
fn configz_has_the_settings_in_force_and_parses_as_a_file() {
    let run = RunArgs {
        bind_address: Some("192.0.2.1".into()),
        cluster_cidr: Some(vec!["10.0.0.0/16".into(), "fd00::/48".into()]),
        nodeport_addresses: Some(vec!["primary".into()]),
        masquerade_all: true,
        ignore_external_ips: true,
        log_format: Some(LogFormat::Json),
        ..minimal()
    };
    let config = Config::new(KernelArgs::default(), run).unwrap();
    let told = config.configz();
    let told = &told["kubeproxy.config.k8s.io"];
    assert_eq!(told["clusterCIDR"], "10.0.0.0/16,fd00::/48");
    assert_eq!(told["healthzBindAddress"], "0.0.0.0:10256");
    assert_eq!(told["featureGates"], serde_json::json!({"AllowServiceExternalIPs": false}));
    let again = Config::new(
        with(&file(&told.to_string())),
        RunArgs { manifests: Some("/".into()), ..RunArgs::default() },
    );
    assert_eq!(again.unwrap(), config);
}

#[test]
fn announced_routes_have_a_table_of_their_own() {
    let run = |table| RunArgs { announce_table: table, bird_config: Some("/lb.conf".into()), ..minimal() };
    let bgp = Config::new(KernelArgs::default(), run(Some(1080))).unwrap().bgp.unwrap();
    let bird = bgp.bird.unwrap();
    assert_eq!(
        (bgp.table, bird.file.to_str(), bird.socket.to_str()),
        (1080, Some("/lb.conf"), Some("/run/bird/bird.ctl"))
    );
    assert!(refusal(KernelArgs::default(), run(None)).contains("--announce-table"));
    for table in [0, 254, 255] {
        assert!(
            refusal(KernelArgs::default(), run(Some(table))).contains("the kernel uses this table"),
            "{table}"
        );
    }
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    let cluster =
        RunArgs { manifests: None, kubeconfig: Some(kubeconfig.path().to_owned()), ..run(Some(1080)) };
    assert_eq!(Config::new(KernelArgs::default(), cluster).unwrap().bgp.unwrap().table, 1080);
    assert_eq!(Config::new(KernelArgs::default(), minimal()).unwrap().bgp, None);
}

#[test]
fn members_need_a_key_and_this_node() {
    let run = |node: &str, key: Option<&str>| RunArgs {
        node_name: Some(node.into()),
        announce_member: Some(vec!["a=192.0.2.1:7947".into(), "b=192.0.2.2:7947".into()]),
        announce_key_file: key.map(Into::into),
        ..minimal()
    };
    let whole = Config::new(KernelArgs::default(), run("b", Some("/key"))).unwrap();
    assert_eq!(whole.announce.members.len(), 2);
    assert!(refusal(KernelArgs::default(), run("b", None)).contains("--announce-key-file"));
    assert!(refusal(KernelArgs::default(), run("c", Some("/key"))).contains("c=ADDR:PORT"));
    let twice = RunArgs { announce_member: Some(vec!["a=192.0.2.1:1".into(); 2]), ..run("a", Some("/key")) };
    assert!(refusal(KernelArgs::default(), twice).contains("named twice"));
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    let cluster =
        RunArgs { manifests: None, kubeconfig: Some(kubeconfig.path().to_owned()), ..run("b", Some("/key")) };
    assert!(refusal(KernelArgs::default(), cluster).contains("--announce makes its Nodes the members"));
    assert_eq!(Config::new(KernelArgs::default(), minimal()).unwrap().announce.members.len(), 0);
}

#[test]
fn node_local_dns_needs_a_service_and_a_free_port() {
    let refused = |service: &str, port| {
        let (dns_intercept, dns_intercept_port) = (Some(service.to_owned()), port);
        refusal(KernelArgs::default(), RunArgs { dns_intercept, dns_intercept_port, ..minimal() })
    };
    for service in ["kube-dns", "a/b/c", "/kube-dns", "kube-system/"] {
        let error = refused(service, None);
        assert!(error.contains("--dns-intercept") && error.contains("NAMESPACE/NAME"), "{error}");
    }
    for port in [0, 53] {
        let error = refused("kube-system/kube-dns", Some(port));
        assert!(error.contains("--dns-intercept-port"), "{error}");
    }
}

#[test]
fn nodes_of_a_cluster_announce_with_a_key_only() {
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    let run = |key: Option<&str>, port: Option<u16>| RunArgs {
        manifests: None,
        kubeconfig: Some(kubeconfig.path().to_owned()),
        announce: true,
        announce_port: port,
        announce_key_file: key.map(Into::into),
        ..minimal()
    };
    let port = |run: RunArgs| Config::new(KernelArgs::default(), run).unwrap().announce.port;
    assert_eq!(port(run(Some("/key"), None)), Some(7947));
    assert_eq!(port(run(Some("/key"), Some(9_000))), Some(9_000));
    assert_eq!(port(RunArgs { announce: false, ..run(None, None) }), None);
    assert!(refusal(KernelArgs::default(), run(None, None)).contains("--announce-key-file"));
    assert!(refusal(KernelArgs::default(), run(Some("/key"), Some(0))).contains("--announce-port"));
    let folder = RunArgs { announce: true, announce_key_file: Some("/key".into()), ..minimal() };
    assert!(refusal(KernelArgs::default(), folder).contains("--announce-member"));
}

/// Skips each default that the help describes in several words, such as "the host name": that default depends on the
/// machine or on other settings.
#[test]
fn help_names_the_defaults_that_apply() {
    let kubeconfig = file("{apiVersion: v1, kind: Config}");
    // These flags have no default. Other flags have a default only if these flags are given.
    let run = RunArgs {
        manifests: None,
        kubeconfig: Some(kubeconfig.path().to_owned()),
        announce: true,
        announce_key_file: Some("/key".into()),
        announce_table: Some(1080),
        bird_config: Some("/bird.conf".into()),
        dns_bind_address: Some(vec!["127.0.0.1:53".into()]),
        dns_intercept: Some("kube-system/kube-dns".into()),
        flow_log: Some("-".into()),
        ..minimal()
    };
    let values = Config::new(KernelArgs::default(), run).unwrap().flagz();
    let command = crate::cli::Cli::command();
    let mut compared = 0;
    for flag in command.find_subcommand("run").unwrap().get_arguments() {
        let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
        let (Some(name), Some((_, default))) = (flag.get_long(), help.rsplit_once("[default: ")) else {
            continue;
        };
        let default = default.trim_end_matches(']');
        let is_literal = default != "none" && !default.contains(' ');
        if !is_literal {
            continue;
        }
        let value = values.get(name).unwrap_or_else(|| panic!("/flagz has no --{name}"));
        let is_same = value == default || (name == "nodeport-addresses" && value.is_empty());
        assert!(is_same, "--{name}: {default:?} in the help, but {value:?}");
        compared += 1;
    }
    assert!(compared >= 30, "only {compared} defaults");
}
