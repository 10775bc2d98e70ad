//! The map `DEVICES`: on which devices packets may bypass the stack.

use std::collections::BTreeMap;

use lb_common::{DeviceInfo, device_flags};

use crate::{
    attach::xdp::XdpMode,
    bpf::{bpffs::Folder, layout, options::Forwarding, table::Table},
    error::DatapathError,
    net::devices::{Device, DeviceKind, Layer},
};

/// Writes `DEVICES`. Use one instance at a time.
#[derive(Debug)]
pub struct DeviceMap {
    map: Table<u32, DeviceInfo>,
    forwarding: Forwarding,
}

impl DeviceMap {
    pub(crate) fn open(folder: &Folder, forwarding: Forwarding) -> Result<Self, DatapathError> {
        Ok(Self { map: Table::open(&layout::DEVICES, &folder.map(layout::DEVICES.name))?, forwarding })
    }

    /// Makes the map contain exactly these devices. `xdp` returns how a device, by interface index, runs the XDP
    /// program.
    pub fn sync(
        &self,
        devices: &[Device],
        xdp: impl Fn(u32) -> Option<XdpMode>,
    ) -> Result<(), DatapathError> {
        let wanted: BTreeMap<u32, DeviceInfo> = devices
            .iter()
            .filter_map(|device| Some((device.index, self.info(device, xdp(device.index).is_some())?)))
            .collect();
        let found = self.map.entries()?;
        let gone: Vec<u32> = found.keys().filter(|index| !wanted.contains_key(index)).copied().collect();
        let (new, values): (Vec<u32>, Vec<DeviceInfo>) =
            wanted.into_iter().filter(|(index, info)| found.get(index) != Some(info)).unzip();
        self.map.delete_all(&gone)?;
        self.map.update_all(&new, &values)
    }

    fn info(&self, device: &Device, has_xdp: bool) -> Option<DeviceInfo> {
        info(device, has_xdp, self.forwarding)
    }
}

/// The entry of a device; `None` if packets never bypass the stack there.
fn info(device: &Device, has_xdp: bool, forwarding: Forwarding) -> Option<DeviceInfo> {
    let direct = forwarding == Forwarding::Direct;
    let flags = match device.kind {
        DeviceKind::Wire if has_xdp => device_flags::WIRE | device_flags::XDP_REDIRECT_TARGET,
        DeviceKind::Wire if direct && device.layer == Layer::Ethernet => device_flags::WIRE,
        DeviceKind::Workload if direct && device.peer_elsewhere => device_flags::REDIRECT_PEER,
        DeviceKind::Wire | DeviceKind::Workload => return None,
    };
    Some(DeviceInfo { mtu: device.mtu, flags })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: DeviceKind, layer: Layer, peer_elsewhere: bool) -> Device {
        let (index, name, mtu) = (3, "eth0".to_owned(), 1500);
        Device { index, name, kind, layer, mtu, is_pair: peer_elsewhere, peer_elsewhere }
    }

    fn flags(device: &Device, has_xdp: bool, forwarding: Forwarding) -> Option<u32> {
        info(device, has_xdp, forwarding).map(|info| info.flags)
    }

    #[test]
    fn packets_bypass_the_stack_only_on_suitable_devices() {
        use DeviceKind::{Wire, Workload};
        use Forwarding::{Direct, Stack};
        use Layer::{Ethernet, Ip};
        use device_flags::{REDIRECT_PEER, WIRE, XDP_REDIRECT_TARGET};

        let wire = device(Wire, Ethernet, false);
        assert_eq!(flags(&wire, true, Stack), Some(WIRE | XDP_REDIRECT_TARGET));
        assert_eq!(flags(&wire, true, Direct), Some(WIRE | XDP_REDIRECT_TARGET));
        assert_eq!(flags(&wire, false, Stack), None);
        assert_eq!(flags(&wire, false, Direct), Some(WIRE));
        assert_eq!(flags(&device(Wire, Ip, false), false, Direct), None, "it has no MAC addresses");
        let pod = device(Workload, Ethernet, true);
        assert_eq!(flags(&pod, false, Stack), None);
        assert_eq!(flags(&pod, false, Direct), Some(REDIRECT_PEER));
        assert_eq!(flags(&device(Workload, Ethernet, false), false, Direct), None, "a bridge");
    }
}
