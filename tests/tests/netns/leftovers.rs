//! What is left behind after `cleanup`: nothing of ours, and all that is of others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
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
    netns::Netns,
    wait_for,
};

use crate::bed::Bed;

const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];

fn text_of(netns: &Netns, program: &str, arguments: &[&str]) -> String {
    String::from_utf8(run(netns.command(program).args(arguments)).unwrap().stdout).unwrap()
}

/// What an agent changes of a node, besides BPF objects.
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

/// Every value that can be read, but for those that count something.
fn sysctls(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut values = BTreeMap::new();
    for path in fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            values.append(&mut sysctls(&path));
        } else if !path.ends_with("nf_conntrack_count")
            // Its own settings are anew when it was down.
            && !path.parent().is_some_and(|parent| parent.ends_with("pod1"))
            && let Ok(value) = fs::read_to_string(&path)
        {
            values.insert(path, value);
        }
    }
    values
}

/// Ids of the programs that are pinned below a folder, and of all maps that are pinned or that they use.
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

/// A life with an agent that is killed as it starts, a device that is made anew, another agent that is refused, and a kill.
#[test]
fn cleanup_after_any_fault_leaves_nothing_behind() {
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
    // The kernel frees what nobody refers to some time later.
    let gone = || {
        let live = live_objects();
        let none = |ours: &BTreeSet<u32>, live: &BTreeSet<u32>| ours.is_disjoint(live);
        [&first, &second].into_iter().all(|(p, m)| none(p, &live.0) && none(m, &live.1)).then_some(())
    };
    wait_for(Duration::from_secs(10), gone).expect("programs or maps are still in the kernel");
}
