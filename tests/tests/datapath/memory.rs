//! Tests how much memory the kernel charges for the maps.

use std::{collections::BTreeMap, fs, os::fd::AsFd as _, os::fd::AsRawFd as _};

use aya::{maps::MapInfo, util::nr_cpus};
use lb_common::Vip;
use lb_core::plan::Step;
use lb_datapath::{Capacities, Datapath, Options, Pinned};
use lb_tests::{bench::machine::field, skip};

use super::{
    contents::{key, steps},
    sandbox::Sandbox,
};

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 5;
/// Maximum memory in bytes of all maps (128 MiB), and of all maps except those of flows.
const LIMIT: u64 = 128 << 20;
const LIMIT_OF_OTHERS: u64 = 62_000_000;
/// Names of the maps of flows. `--max-connections` sets the sizes of the first two.
const OF_FLOWS: [&str; 3] = ["CONNTRACK", "FLOWS", "FLOW_TABLE"];
/// Name of a map that allocates elements one by one. If the reported size of this map does not grow with its elements,
/// the kernel does not count the memory of elements.
const NAMES: &str = "ENDPOINT_NAMES";
/// Up to this number of CPUs, maps whose size depends on the number of CPUs have their smallest size.
const MOST_CPUS: usize = 32;
/// Default of `--max-connections` on a machine with few CPUs.
const CONNECTIONS: u32 = 131_072;

#[test]
fn default_maps_stay_small_with_ten_thousand_services() {
    if nr_cpus().unwrap() > MOST_CPUS {
        return skip::whole("maps that are sized by the number of CPUs exceed the limit");
    }
    let sandbox = Sandbox::new();
    let capacities = Capacities { conntrack: 2 * CONNECTIONS, ..Capacities::default() };
    let datapath = Datapath::open(&Options { capacities, ..Options::new(sandbox.bpffs()) }).unwrap();
    let empty = memory(&sandbox)[NAMES];
    datapath.maps().apply(&steps(SERVICES, ENDPOINTS).0).unwrap();
    let vips = (1..=SERVICES).map(|id| Step::PutVip(key(id).address.into(), Vip { flags: 0 }));
    datapath.maps().apply(&vips.collect::<Vec<_>>()).unwrap();

    let memory = memory(&sandbox);
    if memory[NAMES] == empty {
        return skip::whole("the kernel does not count the elements of a map (before Linux 6.4)");
    }
    let others = memory.iter().filter(|(name, _)| !OF_FLOWS.contains(&name.as_str()));
    let (total, others): (u64, u64) = (memory.values().sum(), others.map(|(_, bytes)| bytes).sum());
    println!("{total} bytes, {others} without flows: {memory:#?}");
    assert!(
        total <= LIMIT && others <= LIMIT_OF_OTHERS,
        "{total} bytes, {others} without flows: {memory:#?}"
    );
}

/// Memory in bytes of each map, by name: of the pinned maps, and of those that only programs hold.
fn memory(sandbox: &Sandbox) -> BTreeMap<String, u64> {
    let mut maps = BTreeMap::new();
    let mut pinned = Vec::new();
    for pin in fs::read_dir(sandbox.pin("")).unwrap().map(|pin| pin.unwrap()) {
        if pin.file_type().unwrap().is_file() {
            let info = MapInfo::from_pin(pin.path()).unwrap();
            pinned.push(info.id());
            maps.insert(pin.file_name().into_string().unwrap(), memory_of(&info));
        }
    }
    let objects = Pinned::open(&sandbox.bpffs()).unwrap().objects().unwrap();
    assert_eq!(objects.missing, Vec::<String>::new());
    for map in objects.maps.into_iter().filter(|map| !pinned.contains(&map.id)) {
        maps.insert(format!("{} ({})", map.name, map.id), map.memory.unwrap());
    }
    maps
}

fn memory_of(info: &MapInfo) -> u64 {
    let fd = info.fd().unwrap();
    let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd())).unwrap();
    field(&text, "memlock").unwrap().parse().unwrap()
}
