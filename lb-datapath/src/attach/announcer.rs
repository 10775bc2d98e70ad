//! Attaches the program that answers ARP requests and neighbour solicitations for announced addresses, at tc ingress of
//! the devices on which the node announces an address.
//!
//! It is a separate program, so that it costs nothing on other devices. The agent attaches it at the first position of
//! the hook. The program that serves Services is normally attached there already, so the new program runs before it.
//! The links are pinned, like those of the other programs. The map `ANNOUNCED` alone determines which requests the
//! program answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    attach::{
        clsact::{self, Role},
        direction::Direction,
        tcx::TcxHook,
    },
    bpf::{
        bpffs::{self, Folder},
        layout::ANNOUNCE_PROGRAM,
        options::AttachMode,
        program::Programs,
    },
    error::DatapathError,
    net::netlink::Netlink,
};

/// Attaches the program `tc_announce` to devices, in the network namespace of the thread that created this attacher.
/// Only one instance may be used at a time.
#[derive(Debug)]
pub struct AnnounceAttacher {
    folder: Folder,
    programs: Arc<Programs>,
    mode: AttachMode,
    netlink: Netlink,
    /// Interface indices of the devices to which this process has attached the program, with the link's id in tcx mode.
    attached: BTreeMap<u32, Option<u32>>,
    /// Whether no call of [`Self::sync`] has succeeded yet, or the last one has failed on a device: an earlier agent's
    /// programs may then be on some devices.
    first: bool,
}

impl AnnounceAttacher {
    pub(crate) fn new(
        folder: Folder,
        programs: Arc<Programs>,
        mode: AttachMode,
    ) -> Result<Self, DatapathError> {
        let netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        Ok(Self { folder, programs, mode, netlink, attached: BTreeMap::new(), first: true })
    }

    /// Attaches the program to exactly these devices (interface indices), which must have an Ethernet header; attaches
    /// it again where another process has detached it. Returns the devices to which it could not be attached; the next
    /// call tries again.
    pub fn sync(&mut self, devices: &BTreeSet<u32>) -> Result<Vec<(u32, DatapathError)>, DatapathError> {
        let mut failed = Vec::new();
        for index in devices {
            if let Err(error) = self.ensure(*index) {
                failed.push((*index, error));
            }
        }
        let detached = self.detach_from_others(devices);
        self.first = detached.is_err() || !failed.is_empty();
        detached.map(|()| failed)
    }

    fn ensure(&mut self, index: u32) -> Result<(), DatapathError> {
        let program = self.programs.get(ANNOUNCE_PROGRAM)?;
        let place = (index, Direction::Ingress, Role::Announce);
        let link_id = match self.mode {
            AttachMode::Clsact => {
                clsact::ensure(&mut self.netlink, &self.folder, place, &program)?;
                None
            }
            AttachMode::Tcx => {
                let known = self.attached.get(&index).copied().flatten();
                let device = format!("device {index}");
                let hook = TcxHook { index, device: &device, direction: Direction::Ingress };
                hook.ensure(&program, known, &self.pin_of(index), |_| Ok(None))?.or(known)
            }
        };
        self.attached.insert(index, link_id);
        if self.first {
            self.detach_other_mode(index)?;
        }
        Ok(())
    }

    /// Detaches the program that an earlier agent with the other attach mode has left on the device.
    fn detach_other_mode(&mut self, index: u32) -> Result<(), DatapathError> {
        match self.mode {
            AttachMode::Clsact => bpffs::unpin(&self.pin_of(index)).map(drop),
            AttachMode::Tcx => {
                clsact::remove(&mut self.netlink, (index, Direction::Ingress, Role::Announce)).map(drop)
            }
        }
    }

    /// Detaches the program from all devices except `wanted`, including programs that an earlier agent has left.
    fn detach_from_others(&mut self, wanted: &BTreeSet<u32>) -> Result<(), DatapathError> {
        let mut present: BTreeSet<u32> = self.attached.keys().copied().collect();
        if self.first {
            let pinned = bpffs::entries(&self.folder.links())?;
            present.extend(pinned.iter().filter_map(|path| parse_pin(path)));
            present.extend(clsact::marked(&self.folder.clsact())?);
        }
        for index in present.difference(wanted) {
            bpffs::unpin(&self.pin_of(*index))?;
            let had_filter = clsact::remove(&mut self.netlink, (*index, Direction::Ingress, Role::Announce))?;
            // On any other device, the task that attaches the other tc programs may have just created the qdisc for its
            // first filter.
            if had_filter || self.attached.contains_key(index) {
                clsact::release_qdisc(&mut self.netlink, &self.folder, *index)?;
            }
            self.attached.remove(index);
        }
        Ok(())
    }

    fn pin_of(&self, index: u32) -> PathBuf {
        self.folder.links().join(format!("{index}{SUFFIX}"))
    }
}

/// End of the name of a link's pin, after the interface index.
const SUFFIX: &str = "-announce";

/// The interface index in the name of a link's pin, such as `7-announce`.
pub(super) fn parse_pin(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_suffix(SUFFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_name_gives_the_device() {
        assert_eq!(parse_pin(Path::new("/x/links/17-announce")), Some(17));
        assert_eq!(parse_pin(Path::new("/x/links/17-ingress")), None);
    }
}
