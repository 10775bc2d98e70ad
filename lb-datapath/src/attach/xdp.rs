//! The XDP program on wire devices.
//!
//! Links are pinned, like those of tc. Some devices are left to tc: devices that cannot run the program, devices that
//! have VLANs and strip the tags from frames, and veths that would lose the frames that the program sends. The other
//! end of a veth receives such frames only if it has an XDP program or GRO. If the other end has only GRO, it receives
//! redirected frames, but frames that the program sends back (`XDP_TX`) stay in the ring of the other end, because the
//! kernel does not schedule the other end's NAPI for them (`veth_xdp_flush`).

use std::{
    collections::BTreeMap,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::{debug, info, warn};

use crate::{
    attach::pinned_link::adopt,
    bpf::{
        bpffs::{self, Folder},
        layout::XDP_PROGRAMS,
        options::XdpOption,
        program::{LoadedProgram, Programs},
        sys,
    },
    error::DatapathError,
    net::{
        devices::{Device, DeviceKind, Layer},
        ethtool,
        xdp_features::{XdpFeatureReader, XdpFeatures},
    },
};

/// Whether the driver of a device or the network stack runs the XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XdpMode {
    /// The device driver runs the program, before the kernel allocates an skb.
    Native,
    /// The network stack runs the program, on packets that already have an skb.
    Generic,
}

impl XdpMode {
    const ALL: [Self; 2] = [Self::Native, Self::Generic];

    /// Name of the XDP program for this mode.
    pub(crate) const fn program(self) -> &'static str {
        let [native, generic] = XDP_PROGRAMS;
        match self {
            Self::Native => native,
            Self::Generic => generic,
        }
    }

    /// The mode's name in tables, JSON and names of pins.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }

    /// The flag that selects the mode: `XDP_FLAGS_DRV_MODE` or `XDP_FLAGS_SKB_MODE` of include/uapi/linux/if_link.h.
    const fn flags(self) -> u32 {
        match self {
            Self::Native => 4,
            Self::Generic => 2,
        }
    }
}

/// Attaches the XDP program to wire devices. Only one instance may be used at a time.
#[derive(Debug)]
pub struct XdpAttacher {
    folder: Folder,
    programs: Arc<Programs>,
    /// Modes whose program the kernel has refused, with the error. The agent does not try them again.
    refused: BTreeMap<XdpMode, String>,
    option: XdpOption,
    attached: BTreeMap<u32, XdpMode>,
    /// XDP features of the drivers, by interface index; no entry if the kernel did not report them.
    features: BTreeMap<u32, XdpFeatures>,
    /// Devices, by interface index, that should run the program but are left to tc, with the reason that was logged.
    at_tc: BTreeMap<u32, DatapathError>,
}

impl XdpAttacher {
    pub(crate) fn new(folder: Folder, programs: Arc<Programs>, option: XdpOption) -> Self {
        let (attached, features, at_tc) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { folder, programs, refused: BTreeMap::new(), option, attached, features, at_tc }
    }

    /// In which mode the program runs on the device with this index; `None` if it is not attached.
    pub fn mode_of(&self, index: u32) -> Option<XdpMode> {
        self.attached.get(&index).copied()
    }

    /// Whether frames that the program on this device sends back (`XDP_TX`) really leave through the device.
    pub fn sends_back(&self, device: &Device) -> bool {
        match self.mode_of(device.index) {
            Some(XdpMode::Native) => !device.loses_xdp_tx,
            Some(XdpMode::Generic) => true,
            None => false,
        }
    }

    /// Whether frames that programs on other devices redirect to this device really leave through it. False if this
    /// device does not run the program. Generic programs redirect through the stack, so if all programs are generic,
    /// the driver does not matter. Otherwise the driver must report that it sends redirected frames as large as the
    /// MTU. If the kernel reports no features, a driver that runs the program natively counts as able to send them.
    pub fn is_redirect_target(&self, device: &Device) -> bool {
        let Some(mode) = self.mode_of(device.index) else { return false };
        let takes_from_native = match self.features.get(&device.index) {
            Some(features) => features.sends_frames_of(device.mtu),
            None => mode == XdpMode::Native,
        };
        takes_from_native || self.attached.values().all(|mode| *mode == XdpMode::Generic)
    }

    /// Sentences about the devices that are left to tc for a reason that the administrator can remove. Each sentence
    /// also says how to remove the reason.
    pub fn conditions(&self) -> Vec<String> {
        let can_change = |why: &&DatapathError| {
            use DatapathError::{NoWayOut, RunsOnPorts, StripsTags};
            matches!(why, NoWayOut { .. } | RunsOnPorts { .. } | StripsTags { .. })
        };
        self.at_tc.values().filter(can_change).map(ToString::to_string).collect()
    }

    /// Attaches the program to those wire devices among `devices` that can run it, and detaches it from all others.
    pub fn sync(&mut self, devices: &[Device]) -> Result<(), DatapathError> {
        let wires: Vec<&Device> = devices.iter().filter(|device| is_ethernet_wire(device)).collect();
        let mut reader = self.feature_reader();
        let (mut attached, mut features) = (BTreeMap::new(), BTreeMap::new());
        for device in &wires {
            if let Some(mode) = self.ensure(device, reader.as_mut()) {
                attached.insert(device.index, mode);
                // Reads the features after attaching, because some drivers send redirected frames only while they have
                // a program.
                features.extend(read(reader.as_mut(), device).map(|found| (device.index, found)));
            }
        }
        (self.attached, self.features) = (attached, features);
        self.at_tc.retain(|index, _| wires.iter().any(|device| device.index == *index));
        self.release()
    }

    /// Attaches the program in the best allowed mode that the device supports. Returns the mode; `None` leaves the
    /// device to tc.
    fn ensure(&mut self, device: &Device, mut reader: Option<&mut XdpFeatureReader>) -> Option<XdpMode> {
        let mut refused = None;
        let allowed = modes(self.option, device);
        // An earlier agent with another `--xdp` may have attached the program in a mode that excludes these.
        let earlier = XdpMode::ALL.iter().filter(|mode| !allowed.contains(mode));
        if let Err(error) = earlier.copied().try_for_each(|mode| self.detach(device, mode)) {
            warn!("{error}");
        }
        for mode in allowed {
            let way_out = check_way_out(device, *mode, reader.as_deref_mut());
            let attached = match way_out.and_then(|()| check_tags(device)) {
                Ok(()) => self.attach(device, *mode),
                // A device runs programs in one mode only, so this mode's program must be detached before the next mode
                // is tried.
                Err(unfit) => self.detach(device, *mode).and(Err(unfit)),
            };
            match attached {
                Ok(()) => {
                    if self.attached.get(&device.index) != Some(mode) {
                        info!(device = device.name, mode = mode.as_str(), "attached the XDP program");
                    }
                    self.at_tc.remove(&device.index);
                    return Some(*mode);
                }
                Err(error) => refused = Some(error),
            }
        }
        if let Some(why) = refused {
            self.leave_to_tc(device, why);
        }
        None
    }

    /// Records that a device is left to tc; logs the reason if it is new for this device.
    fn leave_to_tc(&mut self, device: &Device, why: DatapathError) {
        let known = self.at_tc.get(&device.index);
        if known.is_some_and(|known| known.to_string() == why.to_string()) {
            debug!("{why}");
        } else {
            warn!("{why}; {} is served at tc", device.name);
        }
        self.at_tc.insert(device.index, why);
    }

    /// A reader of the drivers' XDP features; `None` if no device should run the program, or the kernel cannot report
    /// features.
    fn feature_reader(&self) -> Option<XdpFeatureReader> {
        if self.option == XdpOption::Off { None } else { open_reader() }
    }

    /// The XDP program for this mode. Returns the old error, without another attempt, if the kernel has refused it
    /// before.
    fn program(&mut self, mode: XdpMode) -> Result<Arc<LoadedProgram>, DatapathError> {
        let program = mode.program();
        if let Some(reason) = self.refused.get(&mode) {
            return Err(DatapathError::Program { program, reason: reason.clone() });
        }
        self.programs.get(program).inspect_err(|error| {
            if let DatapathError::Program { reason, .. } = error {
                self.refused.insert(mode, reason.clone());
            }
        })
    }

    fn attach(&mut self, device: &Device, mode: XdpMode) -> Result<(), DatapathError> {
        let failed = |source| DatapathError::Attach {
            action: "attach a program to",
            hook: format!("XDP ({})", mode.as_str()),
            device: device.name.clone(),
            source,
        };
        let program = &*self.program(mode)?;
        let path = self.pin_of(device.index, mode);
        let is_current = |info: &sys::LinkInfo| info.ifindex() == device.index;
        if adopt(&path, program, is_current)?.is_some() {
            return Ok(());
        }
        let link = sys::attach_xdp(program.fd(), device.index, mode.flags()).map_err(failed)?;
        sys::pin(link.as_fd(), &path).map_err(|error| DatapathError::file("pin the link at", &path, error))
    }

    fn detach(&self, device: &Device, mode: XdpMode) -> Result<(), DatapathError> {
        let path = self.pin_of(device.index, mode);
        let detached = sys::open_pin(&path).and_then(|link| sys::detach_link(link.as_fd()));
        match detached {
            Ok(()) => bpffs::unpin(&path).map(drop),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(DatapathError::file("detach the pinned link", &path, error)),
        }
    }

    fn pin_of(&self, index: u32, mode: XdpMode) -> PathBuf {
        self.folder.links().join(format!("{index}-xdp-{}", mode.as_str()))
    }

    /// Removes the links of devices that no longer run the program, or run it in another mode.
    fn release(&self) -> Result<(), DatapathError> {
        for path in bpffs::entries(&self.folder.links())? {
            if let Some((index, mode)) = parse_pin(&path)
                && self.attached.get(&index) != Some(&mode)
            {
                bpffs::unpin(&path)?;
            }
        }
        Ok(())
    }
}

/// Why `--xdp native` would leave some of these devices to tc; only reasons that the administrator can remove.
pub(crate) fn left_to_tc(devices: &[Device]) -> Vec<DatapathError> {
    let mut reader = open_reader();
    let mut unfit = |device| {
        let way_out = check_way_out(device, XdpMode::Native, reader.as_mut());
        way_out.and_then(|()| check_tags(device)).err()
    };
    devices.iter().filter(|device| is_ethernet_wire(device)).filter_map(&mut unfit).collect()
}

/// A reader of the drivers' XDP features; `None` if the kernel cannot report them.
fn open_reader() -> Option<XdpFeatureReader> {
    XdpFeatureReader::open().unwrap_or_else(|error| {
        warn!("cannot ask the kernel for the XDP features of devices: {error}");
        None
    })
}

/// The XDP features of a device; `None` if they are unknown.
fn read(reader: Option<&mut XdpFeatureReader>, device: &Device) -> Option<XdpFeatures> {
    reader?.read(device.index).unwrap_or_else(|error| {
        warn!(device = device.name, "cannot read the XDP features of the device: {error}");
        None
    })
}

/// Returns an error for a veth through which a native program cannot send frames, and for a bond, whose native program
/// would not even get them as its own. Other devices need no check: drivers of network cards at least send the frames
/// that their own program sends back (`XDP_TX`).
fn check_way_out(
    device: &Device,
    mode: XdpMode,
    reader: Option<&mut XdpFeatureReader>,
) -> Result<(), DatapathError> {
    if mode == XdpMode::Native && device.is_bond {
        return Err(DatapathError::RunsOnPorts { device: device.name.clone() });
    }
    let sends_nothing = mode == XdpMode::Native
        && device.loses_xdp_tx
        && read(reader, device).is_some_and(|features| !features.sends_frames());
    if sends_nothing { Err(DatapathError::NoWayOut { device: device.name.clone() }) } else { Ok(()) }
}

/// Returns an error for a device that has VLANs and strips tags from frames: the program could not tell which VLAN a
/// frame belongs to. (A tc program finds the tag in the skb.)
fn check_tags(device: &Device) -> Result<(), DatapathError> {
    let strips = || {
        ethtool::strips_vlan_tags(&device.name).unwrap_or_else(|error| {
            warn!(
                device = device.name,
                "cannot ask whether the device takes out VLAN tags, assuming it does: {error}"
            );
            true
        })
    };
    if device.has_vlans && strips() {
        return Err(DatapathError::StripsTags { device: device.name.clone() });
    }
    Ok(())
}

/// The modes in which a device may run the program, best first.
pub(crate) fn modes(option: XdpOption, device: &Device) -> &'static [XdpMode] {
    match option {
        _ if !is_ethernet_wire(device) => &[],
        XdpOption::Auto if device.is_pair || device.is_bond => &[],
        XdpOption::Auto | XdpOption::Native => &[XdpMode::Native],
        XdpOption::Generic => &XdpMode::ALL,
        XdpOption::Off => &[],
    }
}

fn is_ethernet_wire(device: &Device) -> bool {
    device.kind == DeviceKind::Wire && device.layer == Layer::Ethernet
}

/// The pinned XDP links of devices that still exist: interface index, mode, id of the program.
pub(crate) fn links(folder: &Folder) -> Result<Vec<(u32, XdpMode, u32)>, DatapathError> {
    let mut links = Vec::new();
    for path in bpffs::entries(&folder.links())? {
        let Some((index, mode)) = parse_pin(&path) else { continue };
        let info = sys::open_pin(&path).and_then(|link| sys::link_info(link.as_fd()));
        let info = info.map_err(|error| DatapathError::file("inspect the pinned link", &path, error))?;
        if info.ifindex() == index {
            links.push((index, mode, info.program_id));
        }
    }
    Ok(links)
}

/// Interface index and mode in the name of a link's pin, such as `7-xdp-native`.
pub(super) fn parse_pin(path: &Path) -> Option<(u32, XdpMode)> {
    let (index, mode) = path.file_name()?.to_str()?.split_once("-xdp-")?;
    let mode = XdpMode::ALL.into_iter().find(|candidate| candidate.as_str() == mode)?;
    Some((index.parse().ok()?, mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bond_runs_the_program_only_in_generic_mode() {
        let bond = Device {
            index: 5,
            name: "bond0".to_owned(),
            kind: DeviceKind::Wire,
            layer: Layer::Ethernet,
            mtu: 1500,
            mac: None,
            controller: None,
            is_pair: false,
            peer_elsewhere: false,
            loses_xdp_tx: false,
            has_vlans: false,
            is_bond: true,
        };
        assert_eq!(modes(XdpOption::Auto, &bond), []);
        let refusal = check_way_out(&bond, XdpMode::Native, None).unwrap_err().to_string();
        assert!(refusal.contains("bond0 is a bond"), "{refusal}");
        check_way_out(&bond, XdpMode::Generic, None).unwrap();
    }

    #[test]
    fn pin_name_gives_device_and_mode() {
        assert_eq!(parse_pin(Path::new("/x/links/17-xdp-native")), Some((17, XdpMode::Native)));
        assert_eq!(parse_pin(Path::new("/x/links/17-xdp-generic")), Some((17, XdpMode::Generic)));
        assert_eq!(parse_pin(Path::new("/x/links/17-xdp-offload")), None);
        assert_eq!(parse_pin(Path::new("/x/links/17-ingress")), None);
    }
}
