//! Tests of the XDP programs: devices, modes, and coexistence with foreign programs.

use std::{fs, os::unix::fs::MetadataExt as _, slice::from_ref};

use lb_datapath::{Datapath, Device, DeviceKind, Layer, Options, Pinned, XdpMode, XdpOption, check, cleanup};
use lb_tests::{
    offload::{self, Offload},
    skip,
};
use nix::mount::{MntFlags, umount2};

use super::sandbox::{Sandbox, eventually, ip, run, wire};

/// The reason for which tests that need XDP features of drivers are skipped.
const NO_FEATURES: &str = "the kernel does not tell the XDP features of devices before Linux 6.3";

/// Mode and id of the XDP program on a device, as `ip` prints them; `None` without a program.
fn xdp_on(device: &str) -> Option<(String, u64)> {
    let text = run("ip", &format!("-j -d link show dev {device}"));
    let links: serde_json::Value = serde_json::from_str(&text).unwrap();
    let xdp = links[0].get("xdp")?;
    let mode = match xdp["mode"].as_u64()? {
        1 => "native",
        2 => "generic",
        other => panic!("mode {other}"),
    };
    Some((mode.to_owned(), xdp["prog"]["id"].as_u64()?))
}

fn open_with(sandbox: &Sandbox, xdp: XdpOption) -> Datapath {
    Datapath::open(&Options { xdp, ..sandbox.options() }).unwrap()
}

#[test]
fn xdp_attaches_to_wires_in_an_allowed_mode() {
    let sandbox = Sandbox::new();
    let pair = wire("wire0", 50);
    let workload = Device { kind: DeviceKind::Workload, ..wire("pod0", 51) };
    let bare = Device { layer: Layer::Ip, ..wire("wg0", 52) };
    ip("link add name br0 index 53 type bridge");
    let bridge = Device { index: 53, name: "br0".to_owned(), is_pair: false, ..pair.clone() };
    let devices = [pair, workload, bare, bridge];
    for (option, on_pair, on_bridge) in [
        (XdpOption::Auto, None, None),
        (XdpOption::Native, Some("native"), None),
        (XdpOption::Generic, Some("native"), Some("generic")),
        (XdpOption::Off, None, None),
    ] {
        let datapath = open_with(&sandbox, option);
        let mut attacher = datapath.xdp_attacher();
        for _again in 0..2 {
            attacher.sync(&devices).unwrap();
            for (device, expected) in [("wire0", on_pair), ("pod0", None), ("wg0", None), ("br0", on_bridge)]
            {
                eventually(|| xdp_on(device).map(|(mode, _)| mode).as_deref() == expected);
            }
        }
        let mode = |device: &Device| attacher.mode_of(device.index).map(XdpMode::as_str);
        let modes: Vec<_> = devices.iter().map(mode).collect();
        assert_eq!(modes, [on_pair, None, None, on_bridge], "{option:?}");
        let shown = Pinned::open(&sandbox.bpffs()).unwrap().xdp_attachments().unwrap();
        assert_eq!(shown.len(), on_pair.iter().chain(&on_bridge).count(), "{shown:?}");
    }
}

#[test]
fn xdp_programs_are_loaded_when_a_device_runs_them() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let is_loaded = |mode: XdpMode| sandbox.pin(&format!("programs/xdp_{}", mode.as_str())).exists();
    for (option, native) in [
        (XdpOption::Off, false),
        (XdpOption::Auto, false),
        (XdpOption::Native, true),
        (XdpOption::Off, false),
    ] {
        let datapath = open_with(&sandbox, option);
        assert!(!is_loaded(XdpMode::Native), "{option:?}: no device is known yet");
        datapath.xdp_attacher().sync(from_ref(&wire)).unwrap();
        assert_eq!(is_loaded(XdpMode::Native), native, "{option:?}");
        assert!(!is_loaded(XdpMode::Generic), "{option:?}: the driver runs the program");
        eventually(|| xdp_on("wire0").is_some() == native);
    }
}

#[test]
fn frames_are_redirected_only_to_devices_whose_drivers_send_them() {
    if skip::is_older_than(6, 3) {
        return skip::whole(NO_FEATURES);
    }
    let sandbox = Sandbox::new();
    let pair = wire("wire0", 50);
    ip("link add name br0 index 53 type bridge");
    let bridge = Device { index: 53, name: "br0".to_owned(), is_pair: false, ..pair.clone() };
    let datapath = open_with(&sandbox, XdpOption::Generic);
    let mut attacher = datapath.xdp_attacher();
    for takes in [false, true] {
        // With GRO, the other end of the veth takes frames that programs redirect to the veth.
        offload::set("wire0-far", Offload::Reception, takes).unwrap();
        attacher.sync(&[pair.clone(), bridge.clone()]).unwrap();
        assert_eq!(attacher.mode_of(pair.index), Some(XdpMode::Native));
        assert_eq!(attacher.is_redirect_target(&pair), takes);
        assert!(
            !attacher.is_redirect_target(&bridge),
            "a bridge sends no frames of the veth's native program"
        );
    }
}

#[test]
fn native_program_is_not_attached_to_a_veth_that_sends_none_of_its_frames() {
    if skip::is_older_than(6, 3) {
        return skip::whole(NO_FEATURES);
    }
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    for (option, otherwise) in [(XdpOption::Native, None), (XdpOption::Generic, Some(XdpMode::Generic))] {
        let datapath = open_with(&sandbox, option);
        for (gro, loses_xdp_tx) in [(true, true), (false, false), (false, true)] {
            offload::set("wire0-far", Offload::Reception, gro).unwrap();
            let device = Device { loses_xdp_tx, ..wire.clone() };
            let mut attacher = datapath.xdp_attacher();
            attacher.sync(from_ref(&device)).unwrap();
            let lost = !gro && loses_xdp_tx;
            let expected = if lost { otherwise } else { Some(XdpMode::Native) };
            assert_eq!(attacher.mode_of(device.index), expected);
            assert_eq!(xdp_on("wire0").is_some(), expected.is_some());
            assert_eq!(attacher.sends_back(&device), expected.is_some() && (lost || !loses_xdp_tx));
            let named = attacher.conditions().iter().any(|condition| condition.contains("wire0"));
            assert_eq!(named, lost && otherwise.is_none(), "{:?}", attacher.conditions());
        }
    }
}

#[test]
fn check_names_a_wire_through_which_native_xdp_sends_nothing() {
    if skip::is_older_than(6, 3) {
        return skip::whole(NO_FEATURES);
    }
    let sandbox = Sandbox::new();
    wire("wire0", 50);
    ip("address add 192.0.2.1/24 dev wire0");
    for gro in [true, false] {
        offload::set("wire0-far", Offload::Reception, gro).unwrap();
        let probes = check(&sandbox.bpffs());
        let devices = probes.iter().find(|probe| probe.name == "devices").unwrap();
        assert!(devices.detail.contains("wires wire0"), "{devices:?}");
        assert_eq!(devices.detail.contains("veth wire0 loses the frames"), !gro, "{devices:?}");
    }
}

/// A veth strips VLAN tags from frames, as most network cards do, so XDP programs could not tell VLANs apart.
#[test]
fn no_program_is_attached_to_a_device_that_strips_vlan_tags() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    for option in [XdpOption::Native, XdpOption::Generic] {
        let datapath = open_with(&sandbox, option);
        let mut attacher = datapath.xdp_attacher();
        let mut is_attached = |has_vlans| {
            attacher.sync(&[Device { has_vlans, ..wire.clone() }]).unwrap();
            let named = attacher.conditions().iter().any(|text| text.contains("ethtool -K wire0 rxvlan off"));
            assert_eq!(xdp_on("wire0").is_none(), named, "{:?}", attacher.conditions());
            !named
        };
        assert!(is_attached(false));
        assert!(!is_attached(true), "the program is detached");
        assert!(is_attached(false));
    }
    offload::set("wire0", Offload::VlanTags, false).unwrap();
    let datapath = open_with(&sandbox, XdpOption::Native);
    let mut attacher = datapath.xdp_attacher();
    attacher.sync(&[Device { has_vlans: true, ..wire }]).unwrap();
    assert!(xdp_on("wire0").is_some(), "frames keep their tags");
}

#[test]
fn restart_keeps_the_xdp_link_and_cleanup_removes_it() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let open = || {
        let datapath = open_with(&sandbox, XdpOption::Native);
        datapath.xdp_attacher().sync(from_ref(&wire)).unwrap();
    };
    open();
    let (mode, first) = xdp_on("wire0").expect("the link outlives its agent");
    let inode = || fs::symlink_metadata(sandbox.pin("links/50-xdp-native")).unwrap().ino();
    let link = inode();
    open();
    assert_eq!(inode(), link, "the same link");
    let (_, second) = xdp_on("wire0").unwrap();
    assert!(mode == "native" && second != first, "the link has another program");
    // Creates another device with the same interface index.
    ip("link del wire0");
    let wire = self::wire(&wire.name, wire.index);
    let datapath = open_with(&sandbox, XdpOption::Native);
    datapath.xdp_attacher().sync(from_ref(&wire)).unwrap();
    assert!(xdp_on("wire0").is_some());
    drop(datapath);
    cleanup(&sandbox.bpffs()).unwrap();
    eventually(|| xdp_on("wire0").is_none());
}

#[test]
fn device_keeps_a_foreign_xdp_program() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let others = open_with(&sandbox, XdpOption::Native);
    others.xdp_attacher().sync(from_ref(&wire)).unwrap();
    let (_, program) = xdp_on("wire0").unwrap();
    let second = Options { xdp: XdpOption::Native, bpffs: sandbox.folder.join("other"), ..sandbox.options() };
    fs::create_dir(&second.bpffs).unwrap();
    let ours = Datapath::open(&second).unwrap();
    let mut attacher = ours.xdp_attacher();
    attacher.sync(from_ref(&wire)).unwrap();
    assert_eq!(attacher.mode_of(50), None);
    assert_eq!(xdp_on("wire0").unwrap().1, program, "the foreign program stays");
    drop(ours);
    umount2(&second.bpffs, MntFlags::MNT_DETACH).unwrap();
}
