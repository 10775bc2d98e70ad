//! Programs on the tc hooks of devices: by tcx links, or by clsact filters if the kernel has no tcx.
//!
//! Links are pinned, so they outlive the agent. The next agent replaces the programs in the links that it finds, so no
//! packet bypasses our programs in between. Our programs are attached to run first at ingress and last at egress, so
//! that other programs see consistent addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    sync::Arc,
};

use tracing::debug;

use crate::{
    attach::{
        clsact::{self, Role},
        direction::{Direction, parse_pin},
        tcx::TcxHook,
    },
    bpf::{
        bpffs::{self, Folder},
        layout::{CATCH_PROGRAMS, PROGRAMS, PROGRAMS_WITHOUT_LINK_LAYER},
        options::AttachMode,
        program::Programs,
        sys::{self, Tcx, TcxProgram},
    },
    error::DatapathError,
    net::{
        devices::{Device, DeviceKind, Layer},
        netlink::Netlink,
    },
};

impl AttachMode {
    /// The best mode that this kernel supports: tcx if the kernel has it, else clsact. Queries device 1, which is the
    /// loopback device of every network namespace.
    pub fn probe() -> Result<Self, DatapathError> {
        match sys::query_tcx(1, Tcx::Ingress) {
            Ok(_) => Ok(Self::Tcx),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(Self::Clsact),
            Err(error) => Err(DatapathError::Attach {
                action: "list the programs on",
                hook: "tcx ingress".to_owned(),
                device: "lo".to_owned(),
                source: error,
            }),
        }
    }
}

/// One of the two tc hooks of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttachPoint {
    /// Interface index.
    pub index: u32,
    /// Interface name; `None` in [`SyncReport::detached`], because the device may be gone.
    pub name: Option<String>,
    /// Whether the hook gets packets that arrive at the host, or packets that leave it.
    pub direction: Direction,
}

impl fmt::Display for AttachPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name} {}", self.direction.as_str()),
            None => write!(f, "device {} {}", self.index, self.direction.as_str()),
        }
    }
}

/// The changes that one call of [`Attacher::sync`] has made.
#[derive(Debug, Default)]
pub struct SyncReport {
    /// Hooks to which the call has attached a program, also in place of the program of an earlier agent.
    pub attached: Vec<AttachPoint>,
    /// Hooks from which a program that this process had attached was removed, because the device is gone or no longer
    /// needs it.
    pub detached: Vec<AttachPoint>,
    /// Hooks to which the program could not be attached, except hooks of devices that are gone. The next call tries
    /// again.
    pub failed: Vec<(AttachPoint, DatapathError)>,
}

/// Attaches the tc programs to devices, in the network namespace of the thread that created this attacher.
#[derive(Debug)]
pub struct Attacher {
    folder: Folder,
    programs: Arc<Programs>,
    mode: AttachMode,
    netlink: Netlink,
    /// The hooks to which this process has attached a program, with the link's id in tcx mode.
    attached: BTreeMap<(u32, Direction), Option<u32>>,
    first: bool,
}

impl Attacher {
    pub(crate) fn new(
        folder: Folder,
        programs: Arc<Programs>,
        mode: AttachMode,
    ) -> Result<Self, DatapathError> {
        let netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        Ok(Self { folder, programs, mode, netlink, attached: BTreeMap::new(), first: true })
    }

    /// How the programs are attached: by tcx links, or by clsact filters.
    pub const fn mode(&self) -> AttachMode {
        self.mode
    }

    /// Attaches the tc programs to exactly these `devices`, and again where another process has detached them.
    pub fn sync(&mut self, devices: &[Device]) -> Result<SyncReport, DatapathError> {
        let mut report = SyncReport::default();
        self.load_programs(devices);
        for device in devices {
            // Attaches at ingress last: the ingress program creates flows, and their replies need the egress program.
            for direction in [Direction::Egress, Direction::Ingress] {
                let point = AttachPoint { index: device.index, name: Some(device.name.clone()), direction };
                match self.ensure(device, direction) {
                    Ok(true) => report.attached.push(point),
                    Ok(false) => {}
                    Err(error) if is_device_gone(&error) => debug!("{point} is gone already"),
                    Err(error) => report.failed.push((point, error)),
                }
            }
        }
        let wanted: BTreeSet<u32> = devices.iter().map(|device| device.index).collect();
        self.detach_from_others(&wanted, &mut report)?;
        self.first = false;
        Ok(report)
    }

    /// Loads in parallel the programs that these devices need and that are not loaded yet.
    fn load_programs(&self, devices: &[Device]) {
        let of_device = |device| Direction::BOTH.map(|direction| program_of(device, direction));
        let names: BTreeSet<&str> = devices.iter().flat_map(of_device).collect();
        let names: Vec<&str> = names.into_iter().collect();
        // Ignores errors: attaching a program that cannot be loaded reports the error for each device.
        drop(self.programs.load(&names));
    }

    fn ensure(&mut self, device: &Device, direction: Direction) -> Result<bool, DatapathError> {
        match self.mode {
            AttachMode::Tcx => self.ensure_link(device, direction),
            AttachMode::Clsact => self.ensure_filter(device, direction),
        }
    }

    fn pin_of(&self, index: u32, direction: Direction) -> PathBuf {
        self.folder.links().join(format!("{index}-{}", direction.as_str()))
    }

    fn ensure_link(&mut self, device: &Device, direction: Direction) -> Result<bool, DatapathError> {
        let program = &*self.programs.get(program_of(device, direction))?;
        let known = self.attached.get(&(device.index, direction)).copied().flatten();
        let hook = TcxHook { index: device.index, device: &device.name, direction };
        let pin = self.pin_of(device.index, direction);
        let successor = |present: &[TcxProgram]| self.earlier_link(device.index, direction, present);
        let Some(link_id) = hook.ensure(program, known, &pin, successor)? else { return Ok(false) };
        // An earlier agent may have attached the program as a clsact filter. If that filter cannot be removed, the next
        // call tries again, because the link counts as unknown.
        clsact::remove(&mut self.netlink, (device.index, direction, Role::Serve))?;
        self.attached.insert((device.index, direction), Some(link_id));
        Ok(true)
    }

    /// The link of an agent with another map layout on this hook, if there is one. Our agent removes this link once it
    /// has taken over the other agent's connections. Until then the program in this link must see the packets that our
    /// program leaves to it, so our program is attached before it, also at egress.
    fn earlier_link(
        &self,
        index: u32,
        direction: Direction,
        present: &[TcxProgram],
    ) -> Result<Option<OwnedFd>, DatapathError> {
        let current = self.folder.current();
        for version in self.folder.versions()?.into_iter().filter(|version| *version != current) {
            let pin = version.join("links").join(format!("{index}-{}", direction.as_str()));
            let link = match sys::open_pin(&pin) {
                Ok(link) => link,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(DatapathError::file("open the pinned link", pin, error)),
            };
            let info = sys::link_info(link.as_fd())
                .map_err(|error| DatapathError::file("inspect the pinned link", pin, error))?;
            if present.iter().any(|program| program.link_id == info.id) {
                return Ok(Some(link));
            }
        }
        Ok(None)
    }

    fn ensure_filter(&mut self, device: &Device, direction: Direction) -> Result<bool, DatapathError> {
        let program = &*self.programs.get(program_of(device, direction))?;
        let place = (device.index, direction, Role::Serve);
        if !clsact::ensure(&mut self.netlink, &self.folder, place, program)? {
            return Ok(false);
        }
        self.attached.insert((device.index, direction), None);
        // An earlier agent may have attached the program by a tcx link.
        bpffs::unpin(&self.pin_of(device.index, direction))?;
        Ok(true)
    }

    /// Detaches the tc programs from all devices except `wanted`.
    fn detach_from_others(
        &mut self,
        wanted: &BTreeSet<u32>,
        report: &mut SyncReport,
    ) -> Result<(), DatapathError> {
        let known = self.attached.keys().copied();
        let mut unwanted: BTreeSet<(u32, Direction)> =
            known.filter(|hook| !wanted.contains(&hook.0)).collect();
        if self.first {
            // The pins include links of an earlier agent on devices that are gone or no longer need programs.
            let pinned = bpffs::entries(&self.folder.links())?;
            let pinned = pinned.iter().filter_map(|path| parse_pin(path));
            let marked = clsact::marked(&self.folder.clsact())?;
            let marked = marked.iter().flat_map(|index| Direction::BOTH.map(|direction| (*index, direction)));
            unwanted.extend(pinned.chain(marked).filter(|hook| !wanted.contains(&hook.0)));
        }
        for (index, direction) in unwanted {
            bpffs::unpin(&self.pin_of(index, direction))?;
            self.remove_filter(index, direction)?;
            if self.attached.remove(&(index, direction)).is_some() {
                report.detached.push(AttachPoint { index, name: None, direction });
            }
        }
        Ok(())
    }

    fn remove_filter(&mut self, index: u32, direction: Direction) -> Result<(), DatapathError> {
        clsact::remove(&mut self.netlink, (index, direction, Role::Serve))?;
        if direction == Direction::Egress {
            clsact::release_qdisc(&mut self.netlink, &self.folder, index)?;
        }
        Ok(())
    }
}

/// Name of the program for one hook of the device.
pub(crate) const fn program_of(device: &Device, direction: Direction) -> &'static str {
    let [ingress, egress] = match (device.kind, device.layer) {
        (DeviceKind::Catch, _) => CATCH_PROGRAMS,
        (DeviceKind::Wire | DeviceKind::Workload, Layer::Ethernet) => PROGRAMS,
        (DeviceKind::Wire | DeviceKind::Workload, Layer::Ip) => PROGRAMS_WITHOUT_LINK_LAYER,
    };
    match direction {
        Direction::Ingress => ingress,
        Direction::Egress => egress,
    }
}

fn is_device_gone(error: &DatapathError) -> bool {
    let (DatapathError::Attach { source, .. } | DatapathError::Netlink { source, .. }) = error else {
        return false;
    };
    source.raw_os_error() == Some(libc::ENODEV)
}
