//! Uses the virtio network cards that `cargo xtask vm` gives a guest: pairs of cards, each connected by a bridge on the
//! host. A test moves both cards of a pair into network namespaces, like the ends of a veth.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use crate::netns::{self, Netns};

/// MTU of all cards, in bytes.
pub const MTU: u32 = 9000;
/// Number of queue pairs of each card.
pub const QUEUES: u32 = 2;
/// Suffixes of the names of a pair's two ends.
pub const END_NAMES: [&str; 2] = ["a", "b"];
/// Folder with an entry for each device of the network namespace in which this sysfs was mounted.
const DEVICES: &str = "/sys/class/net";

/// Two cards that are connected to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Number of the pair, unique in a guest.
    pub number: u8,
    /// Whether the cards accept frames whose checksums are not computed yet (`VIRTIO_NET_F_GUEST_CSUM`).
    pub receives_partial: bool,
}

/// All pairs of cards in a guest.
pub const PAIRS: [Pair; 2] =
    [Pair { number: 0, receives_partial: true }, Pair { number: 1, receives_partial: false }];

impl Pair {
    /// MAC addresses of the two cards, by which tests find the cards.
    pub fn addresses(self) -> [String; 2] {
        [0, 1].map(|end| format!("52:54:00:6c:62:{}{end}", self.number))
    }

    /// Moves the cards into these namespaces, under these names. Dropping the result moves them back.
    pub fn connect(self, ends: [(&Netns, &str); 2]) -> Result<Cards> {
        let mut cards = Cards { pair: self, moved: Vec::new() };
        for ((netns, name), address) in ends.into_iter().zip(self.addresses()) {
            let device = find(&address)
                .with_context(|| format!("the guest has no free network card with the address {address}"))?;
            netns::ip(&format!("link set {device} netns {} name {name}\n", netns.name()))?;
            cards.moved.push((netns.clone(), name.to_owned()));
        }
        Ok(cards)
    }

    /// Names of the cards while no test uses them. They are not `eth0` and the like, because
    /// `ip link add eth0 netns …` fails if the namespace of the caller has an `eth0`.
    fn spare_names(self) -> [String; 2] {
        END_NAMES.map(|end| format!("card{}{end}", self.number))
    }
}

/// The two cards of a pair while a test uses them.
#[derive(Debug)]
pub struct Cards {
    pair: Pair,
    /// The namespace of each card, and the card's name there.
    moved: Vec<(Netns, String)>,
}

impl Drop for Cards {
    fn drop(&mut self) {
        for ((netns, name), spare) in self.moved.iter().zip(self.pair.spare_names()) {
            // Process 1 is in the initial network namespace of the guest.
            if let Err(error) = netns.ip(&format!("link set {name} netns 1 name {spare}\n")) {
                eprintln!("{name} of {} does not come back: {error:#}", netns.name());
            }
        }
    }
}

/// Gives the cards of a guest that has just booted the names that they have while no test uses them.
pub fn name_cards() -> Result<()> {
    for pair in PAIRS {
        for (address, spare) in pair.addresses().iter().zip(pair.spare_names()) {
            if let Some(device) = find(address) {
                netns::ip(&format!("link set {device} name {spare}\n"))?;
            }
        }
    }
    Ok(())
}

/// Name of the device with this MAC address, in the network namespace to which `/sys` belongs.
fn find(address: &str) -> Option<String> {
    let entries = fs::read_dir(DEVICES).ok()?.filter_map(Result::ok);
    let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(|name| {
        fs::read_to_string(Path::new(DEVICES).join(name).join("address"))
            .is_ok_and(|found| found.trim() == address)
    })
}
