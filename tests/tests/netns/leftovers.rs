//! Tests that `cleanup` removes everything of the agent, `cleanup --kube-proxy` everything of kube-proxy, and that
//! neither affects other programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{
    maps::{MapInfo, loaded_maps},
    programs::{ProgramInfo, loaded_programs},
};
use lb_tests::{
    agent::{self, Agent, run},
    cleanup::mounts_below,
    kube_proxy::{Cluster, Port, Service, iptables, nftables},
    netns::Netns,
    skip, wait_for,
};

use crate::bed::Bed;

const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];

pub(crate) fn text_of(netns: &Netns, program: &str, arguments: &[&str]) -> String {
    String::from_utf8(run(netns.command(program).args(arguments)).unwrap().stdout).unwrap()
}

/// Parts of a node's state that an agent changes: traffic control, sysctls, mounts, and folders in the BPF file system.
#[derive(Debug, PartialEq, Eq)]
struct Snapshot {
    qdiscs: String,
    filters: Vec<String>,
    sysctls: BTreeMap<PathBuf, String>,
    mounts: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Snapshot {
    fn of(bed: &Bed) -> Self {
        let node = &bed.cluster.node1;
        let filters = |(device, side)| text_of(node, "tc", &["filter", "show", "dev", device, side]);
        let devices = ["lo", "eth0", "eth1", "pod1", "pod2"];
        let sides = devices.into_iter().flat_map(|device| [(device, "ingress"), (device, "egress")]);
        let sysctls = node.run(|| Ok(sysctls(Path::new("/proc/sys/net")))).unwrap();
        Self {
            qdiscs: text_of(node, "tc", &["qdisc", "show"]),
            filters: sides.map(filters).collect(),
            sysctls,
            mounts: mounts_below(bed.cluster.folder()).unwrap(),
            folders: fs::read_dir(bed.cluster.bpffs(1))
                .into_iter()
                .flatten()
                .map(|entry| entry.unwrap().path())
                .collect(),
        }
    }
}

/// All readable sysctls, with three exceptions: a counter, lists of loaded modules, and the sysctls of the device pod1.
fn sysctls(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut values = BTreeMap::new();
    for path in fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            values.append(&mut sysctls(&path));
        } else if !path.ends_with("nf_conntrack_count")
            && !path.file_name().is_some_and(|name| name.to_string_lossy().contains("available"))
            // The kernel resets the sysctls of a device that was down.
            && !path.parent().is_some_and(|parent| parent.ends_with("pod1"))
            && let Ok(value) = fs::read_to_string(&path)
        {
            values.insert(path, value);
        }
    }
    values
}

/// Ids of programs pinned below a folder, and of maps that are pinned there or used by the programs.
fn objects(folder: &Path) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut programs, mut maps) = (BTreeSet::new(), BTreeSet::new());
    for path in fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            let (more_programs, more_maps) = objects(&path);
            programs.extend(more_programs);
            maps.extend(more_maps);
        } else if path.parent().is_some_and(|parent| parent.ends_with("programs")) {
            let info = ProgramInfo::from_pin(&path).unwrap();
            programs.insert(info.id());
            maps.extend(info.map_ids().unwrap().unwrap_or_default());
        } else if let Ok(info) = MapInfo::from_pin(&path) {
            maps.insert(info.id());
        }
    }
    (programs, maps)
}

fn live_objects() -> (BTreeSet<u32>, BTreeSet<u32>) {
    let programs = loaded_programs().filter_map(Result::ok).map(|info| info.id()).collect();
    (programs, loaded_maps().filter_map(Result::ok).map(|info| info.id()).collect())
}

/// Faults: an agent killed while it starts, a refused second agent, a renamed device, and a killed agent.
#[test]
fn cleanup_after_faults_leaves_nothing_behind() {
    let mut bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &PODS);
    let (node1, bpffs) = (bed.cluster.node1.clone(), bed.cluster.bpffs(1));
    let before = Snapshot::of(&bed);
    let half_started = Agent::spawn(&node1, bed.cluster.agent_settings(1)).unwrap();
    wait_for(Duration::from_secs(15), || bpffs.join("lb").exists().then_some(())).unwrap();
    half_started.kill().unwrap();
    bed.start_agent();
    let first = objects(&bpffs);
    let refused = Agent::spawn(&node1, bed.cluster.agent_settings(1)).unwrap();
    assert!(!refused.wait().unwrap().success(), "one at a time");
    node1.ip("link set pod1 down\nlink set pod1 name gone1\nlink set gone1 up\n").unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    node1.ip("link set gone1 down\nlink set gone1 name pod1\nlink set pod1 up\n").unwrap();
    bed.start_agent();
    let second = objects(&bpffs);
    assert!(first.0.len() > 8 && first.1.len() > 18 && second.0 != first.0, "{first:?} {second:?}");
    bed.agent.take().unwrap().kill().unwrap();

    agent::ask(&node1, &bpffs, &["cleanup"]).unwrap();
    let after = Snapshot::of(&bed);
    assert_eq!(after.qdiscs, before.qdiscs);
    for (path, value) in &before.sysctls {
        assert_eq!(after.sysctls.get(path), Some(value), "{}", path.display());
    }
    assert_eq!((after.filters, after.mounts, after.folders), (before.filters, before.mounts, before.folders));
    // The kernel frees unreferenced objects asynchronously.
    let gone = || {
        let live = live_objects();
        let none = |ours: &BTreeSet<u32>, live: &BTreeSet<u32>| ours.is_disjoint(live);
        [&first, &second].into_iter().all(|(p, m)| none(p, &live.0) && none(m, &live.1)).then_some(())
    };
    wait_for(Duration::from_secs(10), gone).expect("programs or maps are still in the kernel");
}

/// One port for each Service, as no two Services share a node port.
static PORTS: [Port; 5] = [port(30080), port(30081), port(30082), port(30083), port(30084)];

const fn port(node_port: u16) -> Port {
    Port { protocol: "tcp", port: 80, target: 9376, node_port }
}

/// Rules of kube-proxy for Services other than those of the bed: of mode iptables, and of mode nftables.
fn rules_of_kube_proxy(is_ipv6: bool) -> [String; 2] {
    let of = |last: u8| -> IpAddr {
        if is_ipv6 {
            Ipv6Addr::new(0xfd00, 0x10, 0x97, 0, 0, 0, 0, last.into()).into()
        } else {
            [10, 97, 0, last].into()
        }
    };
    let service = |(number, port): (u8, &'static Port)| Service {
        name: format!("s{number}"),
        cluster_ip: of(number),
        load_balancer: Some(of(100 + number)),
        ports: std::slice::from_ref(port),
        endpoints: vec![of(200), of(201)],
        is_local: false,
    };
    let services: Vec<Service> = (1..).zip(&PORTS).map(service).collect();
    let (cluster_cidr, service_cidr) =
        if is_ipv6 { ("fd00:10:244::/48", "fd00:10:97::/112") } else { ("10.244.0.0/16", "10.97.0.0/16") };
    let cluster =
        Cluster { is_ipv6, cluster_cidr, service_cidr, node_addresses: &[of(250)], services: &services };
    [iptables::rules(&cluster), nftables::rules(&cluster)]
}

/// Foreign rules: of kubelet, of a CNI plugin, of an administrator whose chains resemble kube-proxy's.
const OTHERS: &str = r#"*filter
:KUBE-FIREWALL - [0:0]
:MINE - [0:0]
-A INPUT -j KUBE-FIREWALL
-A INPUT -m comment --comment "before -j KUBE-SERVICES" -j MINE
-A KUBE-FIREWALL -m comment --comment "of kubelet" -j RETURN
-A MINE -p tcp -m tcp --dport 9999 -j DROP
COMMIT
*nat
:KUBE-POD-FW-ABCDEFGHIJKLMNOP - [0:0]
:KUBE-SVC-MINE - [0:0]
-A POSTROUTING -j KUBE-SVC-MINE
COMMIT
"#;

/// The built-in chains of the tables that hold kube-proxy's rules. `cleanup` leaves these tables in place, even empty.
pub(crate) const BUILT_IN: &str = "\
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
COMMIT
";

/// All rules, without counters and dates.
pub(crate) fn rules(node: &Netns) -> Vec<String> {
    let mut lines = Vec::new();
    for (program, arguments) in
        [("iptables-save", &[][..]), ("ip6tables-save", &[]), ("nft", &["-s", "list", "ruleset"])]
    {
        let text = text_of(node, program, arguments);
        lines.extend(text.lines().filter(|line| !line.starts_with('#')).map(
            |line| match line.split_once(" [") {
                Some((chain, _)) if line.starts_with(':') => chain.to_owned(),
                _ => line.to_owned(),
            },
        ));
    }
    lines
}

#[test]
fn cleanup_removes_only_leftovers_of_kube_proxy() {
    let bed = Bed::with_web(&PODS);
    let node1 = &bed.cluster.node1;
    if ["iptables-save", "nft"].iter().any(|tool| node1.command(tool).arg("-V").output().is_err()) {
        return skip::whole("there is no iptables or no nft");
    }
    let cleanup = |more: &[&str]| {
        let arguments = [&["cleanup", "--kube-proxy"], more].concat();
        String::from_utf8(agent::ask(node1, &bed.cluster.bpffs(1), &arguments).unwrap().stdout).unwrap()
    };
    for restore in ["iptables-restore", "ip6tables-restore"] {
        node1.feed(restore, &["--noflush"], BUILT_IN).unwrap();
        node1.feed(restore, &["--noflush"], OTHERS).unwrap();
    }
    let mine = "table inet mine {\n chain kube-proxy {\n counter\n }\n}\ntable ip mine {\n}\n";
    node1.feed("nft", &["-f", "-"], mine).unwrap();
    let others = rules(node1);
    assert!(cleanup(&["--dry-run"]).contains("has left nothing"));
    let traffic = bed.traffic();

    for (is_ipv6, restore) in [(false, "iptables-restore"), (true, "ip6tables-restore")] {
        let [iptables, nftables] = rules_of_kube_proxy(is_ipv6);
        node1.feed(restore, &["--noflush"], &iptables).unwrap();
        node1.feed("nft", &["-f", "-"], &nftables).unwrap();
    }
    // The device is a bridge: any kind will do, and not every kernel has dummy devices.
    node1.ip("link add kube-ipvs0 type bridge\naddress add 10.97.0.1/32 dev kube-ipvs0\n").unwrap();
    let all = rules(node1);
    assert!(all.len() > others.len() + 150, "{} and {}", others.len(), all.len());

    let status = bed.agent.as_ref().unwrap().ask(&["status"]).unwrap();
    assert!(String::from_utf8(status.stdout).unwrap().contains("cleanup --kube-proxy"));
    let would = cleanup(&["--dry-run"]);
    assert_eq!(would.lines().count(), 7, "two tables of two families, two of nftables, a device: {would}");
    assert_eq!(rules(node1), all, "a dry run changes nothing");
    let did = cleanup(&[]);
    assert_eq!(did.replace("Removed", "Would remove"), would);
    assert_eq!(rules(node1), others);
    assert!(!text_of(node1, "ip", &["link", "show"]).contains("kube-ipvs0"));
    assert!(cleanup(&[]).contains("has left nothing"), "a second cleanup finds nothing");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}
