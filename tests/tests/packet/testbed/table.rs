//! The flow table: `FLOWS`, `FLOW_TABLE`, and the overflow `CONNTRACK`.

use std::collections::BTreeMap;

use aya::maps::{Array, HashMap, MapData};
use bytemuck::Zeroable as _;
use lb_common::{
    Address,
    conntrack::{Flow, Tick, Tuple},
    filter::Mark,
    flow_table::{Control, Header, PLACES, Places, Seed, Slot},
};

use super::{Testbed, UDP};

/// The seed of the flow table, the same in every run. Any other would do.
const SEED: Seed = Seed {
    words: [
        0x9e37_79b9,
        0x7f4a_7c15,
        0xf39c_c060,
        0x5ced_c834,
        0x1082_276b,
        0xf3a2_7251,
        0xf86c_6a11,
        0xd0c1_8e95,
        0x2767_f0b1,
        0x53d2_7b7f,
    ],
    multiplier: 0x9fb2_1c65_1e98_df25,
};

impl Testbed {
    fn slots(&self) -> Array<&MapData, Slot> {
        self.object.map("FLOWS").unwrap().try_into().unwrap()
    }

    pub(crate) fn overflow(&self) -> HashMap<&MapData, Tuple, Flow> {
        self.object.map("CONNTRACK").unwrap().try_into().unwrap()
    }

    fn overflow_mut(&mut self) -> HashMap<&mut MapData, Tuple, Flow> {
        self.object.map_mut("CONNTRACK").unwrap().try_into().unwrap()
    }

    pub(crate) fn header(&self) -> Header {
        let header: Array<_, Header> = self.object.map("FLOW_TABLE").unwrap().try_into().unwrap();
        header.get(&0, 0).unwrap()
    }

    /// The indices of the slots where the entry of the tuple may be.
    pub(crate) fn places(&self, key: &Tuple) -> Vec<u32> {
        let places = self.places_of(key);
        (0..PLACES).map(|place| places.slot(place)).collect()
    }

    fn places_of(&self, key: &Tuple) -> Places {
        Places::new(SEED.hash(key), self.slots().len())
    }

    pub(crate) fn slot(&self, index: u32) -> Slot {
        self.slots().get(&index, 0).unwrap()
    }

    fn is_live(slot: &Slot) -> bool {
        Control(slot.control).is_live()
    }

    /// The index of the slot that has the entry.
    fn find(&self, key: &Tuple) -> Option<u32> {
        let has = |index: &u32| {
            let slot = self.slot(*index);
            Self::is_live(&slot) && slot.key == *key
        };
        self.places(key).into_iter().find(has)
    }

    /// The entry with this key.
    pub(crate) fn flow(&self, key: &Tuple) -> Option<Flow> {
        match self.find(key) {
            Some(index) => Some(self.slot(index).flow),
            None => self.overflow().get(key, 0).ok(),
        }
    }

    /// All entries. Asserts that no slot is being changed, that no entry is both in the table and in the overflow, and
    /// that the header has the number of entries in the overflow.
    #[track_caller]
    pub(super) fn entries(&self) -> BTreeMap<Tuple, Flow> {
        let slots = (0..self.slots().len()).map(|index| self.slot(index));
        let used = slots.filter(|slot| !Control(slot.control).is_free());
        let mut entries: BTreeMap<Tuple, Flow> = used
            .inspect(|slot| assert!(Self::is_live(slot), "{}: {slot:?}", self.context()))
            .map(|slot| (slot.key, slot.flow))
            .collect();
        let in_table = entries.len();
        entries.extend(self.overflow().iter().map(Result::unwrap));
        let in_overflow = (entries.len() - in_table) as u64;
        assert_eq!(self.header().overflow, in_overflow, "{}: entries in both, or miscounted", self.context());
        entries
    }

    /// Inserts an entry, or replaces its flow. A new entry goes to the first free place, or to the overflow if no place
    /// is free or [`Self::take_all_into_overflow`] applies.
    pub(super) fn put_entry(&mut self, key: &Tuple, flow: &Flow) {
        let header = self.header();
        let is_free = |index: &u32| header.takes_all == 0 && Control(self.slot(*index).control).is_free();
        let index = self.find(key).or_else(|| self.places(key).into_iter().find(is_free));
        if let Some(index) = index {
            let slot = Slot::with_entry(&self.places_of(key), *key, *flow);
            return self.put("FLOWS", index, slot);
        }
        let is_new = self.overflow().get(key, 0).is_err();
        self.overflow_mut().insert(key, flow, 0).unwrap();
        self.put("FLOW_TABLE", 0, Header { overflow: header.overflow + u64::from(is_new), ..header });
    }

    /// Writes an entry into this slot, whatever is there.
    pub(crate) fn put_into_slot(&mut self, index: u32, key: &Tuple, flow: &Flow) {
        Mark::of_entry(key, flow.flags).iter().for_each(|mark| mark.set(&self.filter));
        self.put("FLOWS", index, Slot::with_entry(&self.places_of(key), *key, *flow));
    }

    pub(crate) fn remove_entry(&mut self, key: &Tuple) {
        if let Some(index) = self.find(key) {
            // Keeps the generation: programs treat a slot whose control word is 0 as never used, and look no further.
            let free = Slot { control: self.slot(index).control >> 32 << 32, ..Slot::zeroed() };
            return self.put("FLOWS", index, free);
        }
        self.overflow_mut().remove(key).unwrap();
        let header = self.header();
        self.put("FLOW_TABLE", 0, Header { overflow: header.overflow - 1, ..header });
    }

    /// Removes all entries.
    pub(crate) fn clear_flows(&mut self) {
        let used: Vec<u32> =
            (0..self.slots().len()).filter(|index| self.slot(*index) != Slot::zeroed()).collect();
        used.into_iter().for_each(|index| self.put("FLOWS", index, Slot::zeroed()));
        self.clear::<Tuple, Flow>("CONNTRACK");
        let takes_all = self.header().takes_all;
        self.put("FLOW_TABLE", 0, Header { seed: SEED, overflow: 0, takes_all });
    }

    /// Makes new entries go to the overflow if `yes`, else to the table again.
    pub(crate) fn take_all_into_overflow(&mut self, yes: bool) {
        let header = Header { takes_all: u64::from(yes), ..self.header() };
        self.put("FLOW_TABLE", 0, header);
    }

    /// Fills the overflow, and directs every new entry there: no new flow has room.
    pub(crate) fn fill_overflow(&mut self) {
        self.take_all_into_overflow(true);
        let unrelated = Address::from_v4([198, 18, 0, 1]);
        // The map has 256 entries.
        for port in 0..256 {
            let tuple = Tuple::new(unrelated, unrelated, port, 9, UDP);
            self.insert_entry(&tuple, &Flow::new(&tuple, &tuple, 1, 0, Tick(0)));
        }
    }
}
