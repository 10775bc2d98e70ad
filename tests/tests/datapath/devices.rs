//! Tests which devices are detected, and which programs they get when they appear.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use aya::programs::TcAttachType;
use lb_datapath::{
    Attacher, Datapath, Device, DeviceKind, DevicePatterns, DeviceWatcher, Layer, Options, detect_devices,
};
use lb_tests::skip;
use tokio::runtime::{Builder, Runtime};

use super::sandbox::{LIMIT, OtherNamespace, Sandbox, ip, link_inodes, run, sync, tcx, wire};

fn found(devices: &[Device]) -> Vec<(&str, DeviceKind, Layer)> {
    devices.iter().map(|device| (device.name.as_str(), device.kind, device.layer)).collect()
}

#[test]
fn wires_and_workload_devices_are_detected() {
    let _sandbox = Sandbox::new();
    let pod = OtherNamespace::new();
    wire("wire0", 50);
    ip("addr add 192.0.2.1/24 dev wire0");
    wire("idle0", 51);
    wire("up0", 52);
    ip("route add default dev up0");
    ip(&format!("link add pod0 index 53 type veth peer name eth0 netns {}", pod.pid()));
    ip("link add here0 index 54 type veth peer name here1");
    ip(&format!("link add node0 index 56 type veth peer name uplink netns {}", pod.pid()));
    ip("addr add 2001:db8::1/64 dev node0 nodad");
    ip("tuntap add tun0 mode tun");
    ip("addr add 192.0.2.9/32 dev tun0");

    use DeviceKind::{Wire, Workload};
    let devices = detect_devices(&DevicePatterns::default()).unwrap();
    let mut devices = found(&devices);
    devices.sort_unstable();
    let expected = [
        ("node0", Wire, Layer::Ethernet),
        ("pod0", Workload, Layer::Ethernet),
        ("tun0", Wire, Layer::Ip),
        ("up0", Wire, Layer::Ethernet),
        ("wire0", Wire, Layer::Ethernet),
    ];
    assert_eq!(devices, expected);
}

#[test]
fn macvlan_of_the_node_without_address_is_a_wire_and_macvtap_of_a_vm_is_not() {
    let _sandbox = Sandbox::new();
    wire("idle0", 50);
    for (name, kind) in [("of-node", "macvlan"), ("of-vm", "macvtap")] {
        let arguments = format!("link add link idle0 name {name} type {kind} mode bridge");
        if !Command::new("ip").args(arguments.split(' ')).status().unwrap().success() {
            return skip::whole("the kernel has no macvlan or macvtap devices");
        }
        ip(&format!("link set {name} up"));
    }
    let devices = detect_devices(&DevicePatterns::default()).unwrap();
    assert_eq!(found(&devices), [("of-node", DeviceKind::Wire, Layer::Ethernet)]);
}

/// The watcher does not poll: without a netlink event the device would never get programs.
#[test]
fn new_device_gets_its_programs_on_its_netlink_event() {
    let sandbox = Sandbox::new();
    let datapath = sandbox.open();
    let mut attacher = datapath.attacher().unwrap();
    runtime().block_on(async {
        let mut watcher = DeviceWatcher::open(DevicePatterns::default()).unwrap();
        assert_eq!(sync(&mut attacher, &watcher.devices().unwrap()), (0, 0));
        let pod = attach_within_a_second(&mut watcher, &mut attacher).await;

        ip("link set pod0 name renamed0");
        ip("addr add 192.0.2.1/24 dev renamed0");
        until(&mut watcher, |devices| found(devices) == [("renamed0", DeviceKind::Wire, Layer::Ethernet)])
            .await;
        ip("addr del 192.0.2.1/24 dev renamed0");
        until(&mut watcher, |devices| devices.iter().all(|device| device.kind == DeviceKind::Workload)).await;
        drop(pod);
        until(&mut watcher, |devices| devices.is_empty()).await;
        assert_eq!(sync(&mut attacher, &watcher.devices().unwrap()), (0, 2));
        assert!(link_inodes(&sandbox).is_empty(), "the links of a deleted device are removed");
    });
}

/// Creates a pod's device `pod0`, which must get its programs within a second; tries several times, in case the machine
/// is busy.
async fn attach_within_a_second(watcher: &mut DeviceWatcher, attacher: &mut Attacher) -> OtherNamespace {
    let start = Instant::now();
    loop {
        let pod = OtherNamespace::new();
        let began = Instant::now();
        let mut create = Command::new("ip")
            .args(format!("link add pod0 index 53 type veth peer name eth0 netns {}", pod.pid()).split(' '))
            .spawn()
            .unwrap();
        while sync(attacher, &watcher.devices().unwrap()) != (2, 0) {
            tokio::time::timeout(LIMIT, watcher.changed()).await.expect("an event").unwrap();
        }
        let took = began.elapsed();
        println!("programs {took:?} after `ip link add` was started");
        assert!(create.wait().unwrap().success());
        assert_eq!(tcx("pod0", TcAttachType::Ingress).len(), 1);
        if took < Duration::from_secs(1) {
            return pod;
        }
        assert!(start.elapsed() < LIMIT, "no attempt took less than a second, the last one {took:?}");
        drop(pod);
        until(watcher, |devices| devices.is_empty()).await;
        assert_eq!(sync(attacher, &watcher.devices().unwrap()), (0, 2));
    }
}

/// Programs for devices without link-layer header are loaded only when such a device appears.
#[test]
fn new_device_without_link_layer_header_gets_its_programs() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let is_loaded = |name: &str| sandbox.pin(&format!("programs/{name}")).exists();
    let programs = ["tc_ingress_l3", "tc_egress_l3"];
    let datapath = sandbox.open();
    let mut attacher = datapath.attacher().unwrap();
    assert_eq!(sync(&mut attacher, std::slice::from_ref(&wire)), (2, 0));
    assert!(is_loaded("tc_ingress") && !programs.iter().any(|name| is_loaded(name)));
    ip("tuntap add tun0 mode tun");
    let links: serde_json::Value = serde_json::from_str(&run("ip", "-j link show dev tun0")).unwrap();
    let index = u32::try_from(links[0]["ifindex"].as_u64().unwrap()).unwrap();
    let bare = Device { index, name: "tun0".to_owned(), layer: Layer::Ip, is_pair: false, ..wire.clone() };
    let both = [wire, bare];
    assert_eq!(sync(&mut attacher, &both), (2, 0));
    assert!(programs.iter().all(|name| is_loaded(name)));
    assert_eq!(sync(&mut attacher, &both), (0, 0));
    drop((attacher, datapath));

    // The next agent keeps the links and loads programs for them.
    let links = link_inodes(&sandbox);
    let datapath = sandbox.open();
    assert!(!programs.iter().any(|name| is_loaded(name)), "the pins of the last agent are removed");
    let mut attacher = datapath.attacher().unwrap();
    assert_eq!(sync(&mut attacher, &both), (4, 0));
    assert!(programs.iter().all(|name| is_loaded(name)));
    assert_eq!(link_inodes(&sandbox), links);
    drop((attacher, datapath));

    // `Datapath::open` itself loads the programs of devices in its options.
    let options = Options { devices: both.to_vec(), ..sandbox.options() };
    drop(Datapath::open(&options).unwrap());
    assert!(programs.iter().all(|name| is_loaded(name)));
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

async fn until(watcher: &mut DeviceWatcher, wanted: impl Fn(&[Device]) -> bool) {
    while !wanted(&watcher.devices().unwrap()) {
        tokio::time::timeout(LIMIT, watcher.changed()).await.expect("an event").unwrap();
    }
}

#[test]
fn netlink_overrun_loses_no_device() {
    let _sandbox = Sandbox::new();
    runtime().block_on(async {
        let mut watcher = DeviceWatcher::open(DevicePatterns::default()).unwrap();
        assert!(watcher.devices().unwrap().is_empty());
        wire("wire0", 50);
        // The batch causes more events than the buffer of the watcher's socket can hold.
        let batch: String =
            (0..3000).map(|n| format!("addr add 10.1.{}.{}/32 dev wire0\n", n / 250, n % 250 + 1)).collect();
        let file = std::env::temp_dir().join(format!("lb-datapath-{}-batch", std::process::id()));
        fs::write(&file, batch).unwrap();
        run("ip", &format!("-batch {}", file.display()));
        fs::remove_file(&file).unwrap();
        until(&mut watcher, |devices| devices.len() == 1).await;
    });
}
