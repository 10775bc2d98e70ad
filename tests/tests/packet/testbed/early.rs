//! The fragments that wait for the first one of their datagram: `EARLY_FRAGMENTS`.

use aya::maps::Array;

use super::Testbed;

/// Number of places in the ring.
pub(crate) const PLACES: usize = 1024;
/// Size of a place in bytes.
const SIZE: usize = 2048;
/// Offset of the tick at which the fragment arrived.
const SEEN: usize = 56;
/// Offset of the packet's length; the packet itself follows this field.
const LENGTH: usize = 60;
/// The state of a place whose fragment waits: the two lowest bits of the control word.
const HELD: u64 = 1;

impl Testbed {
    /// The IP packets that wait, in the order of their arrival.
    pub(crate) fn held(&self) -> Vec<Vec<u8>> {
        let places = self.early_fragments();
        let control = |place: &[u8; SIZE]| u64::from_ne_bytes(place[..8].try_into().unwrap());
        let mut held: Vec<_> = places.into_iter().filter(|place| control(place) & 3 == HELD).collect();
        held.sort_by_key(control);
        let packet = |place: &[u8; SIZE]| {
            let length = u32::from_ne_bytes(place[LENGTH..LENGTH + 4].try_into().unwrap());
            place[LENGTH + 4..][..length as usize].to_vec()
        };
        held.iter().map(packet).collect()
    }

    fn early_fragments(&self) -> Vec<[u8; SIZE]> {
        let map: Array<_, [u8; SIZE]> = self.map("EARLY_FRAGMENTS").try_into().unwrap();
        (0..PLACES).map(|place| map.get(&u32::try_from(place).unwrap(), 0).unwrap()).collect()
    }

    /// Ages the waiting fragments by this number of ticks.
    pub(crate) fn age_held(&mut self, ticks: u32) {
        for (index, mut place) in (0..).zip(self.early_fragments()) {
            let seen = u32::from_ne_bytes(place[SEEN..SEEN + 4].try_into().unwrap());
            if seen != 0 {
                place[SEEN..SEEN + 4].copy_from_slice(&seen.wrapping_sub(ticks).to_ne_bytes());
                self.put("EARLY_FRAGMENTS", index, place);
            }
        }
    }

    /// Sets the number of the last ticket that `EARLY_LISTS` has given out, and empties its lists.
    pub(crate) fn set_tickets(&mut self, tickets: u64) {
        let mut lists = [0; 4097];
        lists[0] = tickets;
        self.put("EARLY_LISTS", 0, lists);
    }

    /// Empties all places and lists.
    pub(super) fn clear_held(&mut self) {
        for place in 0..PLACES {
            self.put("EARLY_FRAGMENTS", u32::try_from(place).unwrap(), [0_u8; SIZE]);
        }
        self.set_tickets(0);
    }
}
