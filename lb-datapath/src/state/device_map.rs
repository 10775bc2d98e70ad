//! The map `DEVICES`: which frames are for the node, and on which devices packets may bypass the stack.

use std::collections::{BTreeMap, BTreeSet};

use lb_common::{DeviceInfo, device_flags};

use crate::{
    attach::xdp::XdpAttacher,
    bpf::{bpffs::Folder, layout, options::Forwarding, table::Table},
    error::DatapathError,
    net::devices::{Device, DeviceKind, Layer},
};

/// Writes the map `DEVICES`. Only one instance may be used at a time.
#[derive(Debug)]
pub struct DeviceMap {
    map: Table<u32, DeviceInfo>,
    forwarding: Forwarding,
}

impl DeviceMap {
    pub(crate) fn open(folder: &Folder, forwarding: Forwarding) -> Result<Self, DatapathError> {
        Ok(Self { map: Table::open(&layout::DEVICES, &folder.map(layout::DEVICES.name))?, forwarding })
    }

    /// Makes the map contain exactly these devices. `xdp` knows which of them run the XDP program.
    pub fn sync(&self, devices: &[Device], xdp: &XdpAttacher) -> Result<(), DatapathError> {
        let bridges: BTreeSet<u32> = devices
            .iter()
            .filter(|device| device.kind == DeviceKind::Workload)
            .filter_map(|device| device.controller)
            .collect();
        let has_catch = devices.iter().any(|device| device.kind == DeviceKind::Catch);
        let info = |device: &Device| {
            let xdp = XdpRole {
                runs_program: xdp.mode_of(device.index).is_some(),
                sends_back: xdp.sends_back(device),
                is_target: xdp.is_redirect_target(device),
            };
            let bridge = bridges.contains(&device.index).then_some(PodBridge { has_catch });
            info(device, xdp, bridge, self.forwarding)
        };
        let wanted: BTreeMap<u32, DeviceInfo> =
            devices.iter().map(|device| (device.index, info(device))).collect();
        let found = self.map.entries()?;
        let gone: Vec<u32> = found.keys().filter(|index| !wanted.contains_key(index)).copied().collect();
        let (new, values): (Vec<u32>, Vec<DeviceInfo>) =
            wanted.into_iter().filter(|(index, info)| found.get(index) != Some(info)).unzip();
        self.map.delete_all(&gone)?;
        self.map.update_all(&new, &values)
    }
}

/// How XDP programs use a device.
#[derive(Clone, Copy, Debug)]
struct XdpRole {
    /// Whether the XDP program runs on the device.
    runs_program: bool,
    /// Whether frames that the program on this device sends back (`XDP_TX`) really leave through the device.
    sends_back: bool,
    /// Whether frames that programs on other devices redirect to this device really leave through it.
    is_target: bool,
}

impl XdpRole {
    fn flags(self) -> u32 {
        let back = if self.sends_back { device_flags::XDP_TX } else { 0 };
        let target = if self.is_target { device_flags::XDP_REDIRECT_TARGET } else { 0 };
        back | target
    }
}

/// What else the entry of a device depends on if the device is the bridge of a workload device.
#[derive(Clone, Copy, Debug)]
struct PodBridge {
    /// Whether the node has a catch device.
    has_catch: bool,
}

/// The entry of a device in `DEVICES`; `bridge` is `Some` if the device is the bridge of a workload device.
fn info(device: &Device, xdp: XdpRole, bridge: Option<PodBridge>, forwarding: Forwarding) -> DeviceInfo {
    let direct = forwarding == Forwarding::Direct;
    let bypass = match device.kind {
        DeviceKind::Wire if xdp.runs_program => device_flags::WIRE | xdp.flags(),
        DeviceKind::Wire if direct && device.layer == Layer::Ethernet => device_flags::WIRE,
        DeviceKind::Workload if direct && device.peer_elsewhere => device_flags::REDIRECT_PEER,
        DeviceKind::Wire | DeviceKind::Workload => 0,
        DeviceKind::Catch => device_flags::CATCH,
    };
    let tunnels = if device.kind == DeviceKind::Wire && bridge.is_none() { device_flags::TUNNELS } else { 0 };
    let pods = if bridge.is_some_and(|bridge| bridge.has_catch) { device_flags::BRIDGES_PODS } else { 0 };
    let (mtu, mac) = (device.mtu, device.mac.unwrap_or_default());
    let workload = if device.kind == DeviceKind::Workload { device_flags::WORKLOAD } else { 0 };
    DeviceInfo { mtu, flags: bypass | tunnels | pods | workload, mac, ..DeviceInfo::UNKNOWN }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: DeviceKind, layer: Layer, peer_elsewhere: bool) -> Device {
        let (index, name, mtu, mac) = (3, "eth0".to_owned(), 1500, Some([2, 0, 0, 0, 0, 3]));
        Device {
            index,
            name,
            kind,
            layer,
            mtu,
            mac,
            controller: None,
            is_pair: peer_elsewhere,
            peer_elsewhere,
            loses_xdp_tx: false,
            has_vlans: false,
            is_bond: false,
        }
    }

    const NO_XDP: XdpRole = XdpRole { runs_program: false, sends_back: false, is_target: false };
    const BACK: XdpRole = XdpRole { runs_program: true, sends_back: true, is_target: false };
    const TARGET: XdpRole = XdpRole { runs_program: true, sends_back: false, is_target: true };

    fn flags(device: &Device, xdp: XdpRole, forwarding: Forwarding) -> u32 {
        info(device, xdp, None, forwarding).flags
    }

    #[test]
    fn packets_bypass_the_stack_only_on_suitable_devices() {
        use DeviceKind::{Catch, Wire, Workload};
        use Forwarding::{Direct, Stack};
        use Layer::{Ethernet, Ip};
        use device_flags::{CATCH, REDIRECT_PEER, TUNNELS, WIRE, WORKLOAD, XDP_REDIRECT_TARGET, XDP_TX};

        let wire = device(Wire, Ethernet, false);
        assert_eq!(flags(&wire, TARGET, Stack), WIRE | XDP_REDIRECT_TARGET | TUNNELS);
        assert_eq!(flags(&wire, BACK, Stack), WIRE | XDP_TX | TUNNELS);
        assert_eq!(flags(&wire, TARGET, Direct), WIRE | XDP_REDIRECT_TARGET | TUNNELS);
        assert_eq!(flags(&wire, NO_XDP, Stack), TUNNELS);
        assert_eq!(flags(&wire, NO_XDP, Direct), WIRE | TUNNELS);
        assert_eq!(flags(&device(Wire, Ip, false), NO_XDP, Direct), TUNNELS, "it has no MAC addresses");
        let pod = device(Workload, Ethernet, true);
        assert_eq!(flags(&pod, NO_XDP, Stack), WORKLOAD);
        assert_eq!(flags(&pod, NO_XDP, Direct), REDIRECT_PEER | WORKLOAD);
        assert_eq!(flags(&device(Workload, Ethernet, false), NO_XDP, Direct), WORKLOAD, "a bridge");
        assert_eq!(flags(&device(Catch, Ethernet, false), NO_XDP, Direct), CATCH);
    }

    #[test]
    fn tunnels_end_at_wires_that_no_pod_is_behind() {
        let wire = device(DeviceKind::Wire, Layer::Ethernet, false);
        let flags = |bridge| info(&wire, NO_XDP, bridge, Forwarding::Stack).flags;
        assert_eq!(flags(None), device_flags::TUNNELS);
        assert_eq!(flags(Some(PodBridge { has_catch: false })), 0);
        assert_eq!(flags(Some(PodBridge { has_catch: true })), device_flags::BRIDGES_PODS);
    }
}
