//! What the announcer uses of the kernel: the program on devices, the program's maps, and a socket.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use lb_common::{AnnounceKey, Heard};
use lb_datapath::{AnnounceAttacher, AnnounceSocket, Announcements, DatapathError};

use super::{devices::Wire, frames};

/// The announcer's handles to the kernel: program, maps and socket.
#[derive(Debug)]
pub struct Kernel {
    /// Attaches the program `tc_announce` to devices.
    attacher: AnnounceAttacher,
    /// Maps: the announcement records that the programs read, and the programs' counters of answers and conflicts.
    pub(super) maps: Announcements,
    /// The packet socket that sends announcements. [`Self::serve`] opens it for the first address, so an agent that
    /// announces no address does not need `CAP_NET_RAW`.
    socket: Option<AnnounceSocket>,
    /// The failures of the last call of [`Self::serve`], as sentences.
    failures: Vec<String>,
}

impl Kernel {
    /// Creates the handles without opening the socket.
    pub const fn new(attacher: AnnounceAttacher, maps: Announcements) -> Self {
        Self { attacher, maps, socket: None, failures: Vec::new() }
    }

    /// Attaches the program to exactly the devices of `places`, and joins exactly the multicast groups at which
    /// neighbour solicitations for the addresses of `places` arrive. Returns the programs' counters and conflicts, by
    /// address and device, and the devices that have no program, because it could not be attached.
    pub(super) fn serve(
        &mut self,
        places: &BTreeMap<AnnounceKey, Wire>,
    ) -> Result<(BTreeMap<AnnounceKey, Heard>, BTreeSet<u32>), DatapathError> {
        let devices: BTreeSet<u32> = places.keys().map(|key| key.device).collect();
        let failed = self.attacher.sync(&devices)?;
        if self.socket.is_none() && !places.is_empty() {
            self.socket = Some(AnnounceSocket::open()?);
        }
        let unserved = failed
            .iter()
            .map(|(device, error)| format!("no address is announced at layer 2 on device {device}: {error}"));
        self.failures = unserved.chain(self.join_groups(places)).collect();
        let heard = self.maps.heard(|key| places.contains_key(key))?;
        Ok((heard, failed.into_iter().map(|(device, _)| device).collect()))
    }

    /// The failures of the last call of [`Self::serve`], as sentences.
    pub(super) fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Joins the groups of `places`, and leaves all other groups. Returns why some groups cannot be joined.
    fn join_groups(&mut self, places: &BTreeMap<AnnounceKey, Wire>) -> Vec<String> {
        let Some(socket) = &mut self.socket else { return Vec::new() };
        let group = |key: &AnnounceKey| Some((key.device, frames::group(key.address.into())?));
        let groups: BTreeSet<_> = places.keys().filter_map(group).collect();
        let mut failures = Vec::new();
        for (device, group) in &groups {
            if let Err(error) = socket.join(*device, *group) {
                let loss = "the device may drop neighbour solicitations";
                failures.push(format!(
                    "device {device}: cannot receive the multicast group {group}: {error}; {loss}"
                ));
            }
        }
        socket.leave_others(|device, group| groups.contains(&(device, group)));
        failures
    }

    /// Sends a frame through the device with this interface index; does nothing while the socket is not open.
    pub(super) fn send(&self, device: u32, frame: &[u8]) -> io::Result<()> {
        self.socket.as_ref().map_or(Ok(()), |socket| socket.send(device, frame))
    }
}
