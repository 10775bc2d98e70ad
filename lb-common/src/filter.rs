//! The filter: most packets of a node belong to no Service, and two words of bit arrays suffice to find that out.
//!
//! Two bit arrays hold hashed endpoints (address, port, protocol). [`Side::Front`] has the endpoints that clients send
//! to: programs look up the destination of a packet in it. [`Side::Back`] has the endpoints that answer: programs look
//! up the source in it. Every frontend of `SERVICES` is marked in `Front`. [`Mark::of_entry`] says in which of the two
//! an entry of the flow table is marked. A packet whose destination and source are both unmarked has neither a frontend
//! nor a flow.
//!
//! An obsolete mark costs a lookup; a missing mark would break a connection. So the programs and the agent only add
//! marks: before an entry or a frontend becomes visible, and to both copies of the arrays (lookups read only the copy
//! in use). To drop obsolete marks, the agent rebuilds the other copy:
//!
//! 1. A grace period, so that no program still reads that copy.
//! 2. Zero it. No insertion by the agent runs meanwhile.
//! 3. A grace period. Before step 2, a program may have found the mark of its new entry in that copy, and so not have
//!    set the mark that step 2 then erased. After this grace period, every such program has inserted its entry.
//! 4. Mark all frontends and all entries in that copy. Everything that is inserted from now on was marked after step 2.
//! 5. Make that copy the one in use.
//!
//! The hash needs no seed: a sender that finds collisions only makes its own packets take the lookups.

use bytemuck::{Pod, Zeroable};

use crate::{
    Address, Network, Networks, ServiceKey,
    conntrack::{Tuple, flow_flags},
    layout::describe,
};

const WORD_BITS: u32 = 15;
/// Words of 64 bits in each array: 256 KiB, which fit into a second-level cache. With 20,000 frontends, 0.1 % of all
/// other destinations are false positives; with 65,536 frontends, 0.6 %.
pub const WORDS: usize = 1 << WORD_BITS;

/// The value of [`Filter::active`] that makes programs look up every packet. It is 0, so zeroed memory is a valid
/// filter.
pub const OFF: u64 = 0;

/// Value of the only element of `FILTER`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Filter {
    /// The copy that programs read: 2 for the first one, 1 for the second one, or [`OFF`].
    pub active: u64,
    /// The ranges of cluster IPs.
    pub ranges: ServiceRanges,
    /// Both arrays of the first copy, then those of the second one: see [`Mark`].
    pub words: [u64; 4 * WORDS],
}

describe!(Filter { active, ranges.v4, ranges.v6, words });

const _: () = assert!(size_of::<Filter>() == 88 + 4 * 8 * WORDS);

/// The value of [`Filter::active`] that selects a copy: 2 for copy 0, 1 for copy 1.
pub const fn activated(copy: usize) -> u64 {
    if copy == 0 { 2 } else { 1 }
}

/// The copy that a value of [`Filter::active`] other than [`OFF`] selects.
#[inline(always)]
pub const fn copy_of(active: u64) -> usize {
    (active & 1) as usize
}

/// Ranges of cluster IPs in a form that takes few comparisons: at most two networks of each family, which together
/// contain all ranges of the node. Zeros cover every address, so a filter that no agent has written excludes none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ServiceRanges {
    /// IPv4: the address in the lower half, the mask in the upper half, both as they lie in memory.
    pub v4: [u64; 2],
    /// IPv6: two words of the address, two words of the mask, as they lie in memory.
    pub v6: [[u64; 4]; 2],
}

/// A range that contains no address: its mask is 0, but its own address is not.
const NO_V4: u64 = 1;
const NO_V6: [u64; 4] = [1, 0, 0, 0];

impl ServiceRanges {
    /// Ranges that contain all addresses of these networks. They are exact for up to two networks of a family. With
    /// more networks, the second range is the smallest network that contains all networks but the first.
    pub fn covering(networks: &Networks) -> Self {
        let listed = || networks.networks.iter().take(networks.count as usize);
        let mut ranges = Self { v4: [NO_V4; 2], v6: [NO_V6; 2] };
        let v4 = listed().filter(|network| network.reaches_v4());
        for (range, network) in ranges.v4.iter_mut().zip(covered(v4)) {
            let [address, mask] = [network.address, network.mask].map(|part| u64::from(part.v4_word()));
            *range = mask << 32 | address;
        }
        let v6 = listed().filter(|network| !network.is_v4());
        for (range, network) in ranges.v6.iter_mut().zip(covered(v6)) {
            let ([a, b], [c, d]) = (halves(&network.address), halves(&network.mask));
            *range = [a, b, c, d];
        }
        ranges
    }

    /// Whether the address may be in one of the networks.
    #[inline(always)]
    pub fn contains(&self, address: &Address) -> bool {
        if address.is_v4() {
            let word = u64::from(address.v4_word());
            let differs = |range: u64| (word & (range >> 32)) ^ (range & 0xffff_ffff) != 0;
            return !(differs(self.v4[0]) && differs(self.v4[1]));
        }
        let [high, low] = halves(address);
        let differs = |[a, b, c, d]: [u64; 4]| ((high & c) ^ a) | ((low & d) ^ b) != 0;
        !(differs(self.v6[0]) && differs(self.v6[1]))
    }
}

/// At most two networks that together cover all of `networks`.
fn covered<'a>(mut networks: impl Iterator<Item = &'a Network>) -> impl Iterator<Item = Network> {
    let first = networks.next().copied();
    let others = networks.copied().reduce(|one, other| one.union(&other));
    first.into_iter().chain(others)
}

/// The address as two words as they lie in memory.
#[inline(always)]
fn halves(address: &Address) -> [u64; 2] {
    let [a, b, c, d] = address.words().map(u64::from);
    [b << 32 | a, d << 32 | c]
}

/// One of the two bit arrays of the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Side {
    /// Frontends, and destinations of packets of clients.
    Front = 0,
    /// Sources of packets of backends.
    Back = 1,
}

/// The words of all arrays: [`Filter::words`]. Operations on one word are atomic.
pub trait Memory {
    /// Reads the word with this index.
    fn load(&self, index: usize) -> u64;
    /// Sets bits in the word with this index.
    fn set(&self, index: usize, bits: u64);
}

/// The place of an endpoint in one array: two bits of one word, for fewer false positives than one bit gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    side: Side,
    word: usize,
    bits: u64,
}

/// An odd number whose set bits are spread evenly: 2^64 divided by the golden ratio.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

impl Mark {
    /// The mark of an endpoint; `port` in host byte order.
    #[inline(always)]
    pub fn new(side: Side, address: &Address, port: u16, protocol: u8) -> Self {
        let key = folded(address) ^ (u64::from(port) << 32 | u64::from(protocol) << 48);
        let hash = key.wrapping_mul(MULTIPLIER);
        // Upper bits of a product depend on all bits of its factors.
        let word = (hash >> (64 - WORD_BITS)) as usize;
        let bits = 1 << (hash >> (58 - WORD_BITS) & 63) | 1 << (hash >> (52 - WORD_BITS) & 63);
        Self { side, word, bits }
    }

    /// The mark of a frontend.
    #[inline(always)]
    pub fn of_frontend(key: &ServiceKey) -> Self {
        Self::new(Side::Front, &key.address, key.port, key.protocol)
    }

    /// The marks of an entry of the flow table with these [`flow_flags`]. A forward entry marks its destination in
    /// `Front`; a reverse entry marks its source, the backend, in `Back`. The reverse entry of a routed or hairpin flow
    /// marks the backend in `Front` as well, for packets of the node's own sockets: a socket may send to the same
    /// backend from the flow's translated source address and port. If the filter hid the flow from these packets, the
    /// programs would not find the conflict, and would not replace the socket's source port
    /// ([`flow_flags::is_of_node`]). (A masqueraded connection that is not routed has a second flow, whose forward
    /// entry marks the backend in `Front`.)
    #[inline(always)]
    pub fn of_entry(key: &Tuple, flags: u8) -> [Self; 2] {
        const TO_NODE: u8 = flow_flags::ROUTED | flow_flags::HAIRPIN;
        if flags & flow_flags::REPLY == 0 {
            return [Self::of_destination(key); 2];
        }
        let source = Self::of_source(key);
        let of_sockets = Self { side: Side::Front, ..source };
        if flags & TO_NODE == 0 { [source; 2] } else { [source, of_sockets] }
    }

    /// The marks of an entry of `DNS_INTERCEPT`, whose key is the destination of queries or the source of answers.
    pub fn of_intercept(key: &ServiceKey) -> [Self; 2] {
        [Side::Front, Side::Back].map(|side| Self::new(side, &key.address, key.port, key.protocol))
    }

    #[inline(always)]
    fn of_destination(tuple: &Tuple) -> Self {
        Self::new(Side::Front, &tuple.destination, tuple.destination_port, tuple.protocol)
    }

    #[inline(always)]
    fn of_source(tuple: &Tuple) -> Self {
        Self::new(Side::Back, &tuple.source, tuple.source_port, tuple.protocol)
    }

    #[inline(always)]
    const fn index(self, copy: usize) -> usize {
        copy << (WORD_BITS + 1) | (self.side as usize) << WORD_BITS | self.word
    }

    /// Whether a copy, 0 or 1, has the mark.
    #[inline(always)]
    pub fn is_set(self, memory: &impl Memory, copy: usize) -> bool {
        memory.load(self.index(copy)) & self.bits == self.bits
    }

    /// Adds the mark to a copy, 0 or 1. Does not write a mark that is already set: many flows share a few cache lines,
    /// which each write takes away from the other CPUs.
    #[inline(always)]
    pub fn set_in(self, memory: &impl Memory, copy: usize) {
        if !self.is_set(memory, copy) {
            memory.set(self.index(copy), self.bits);
        }
    }

    /// Adds the mark to both copies. Call it before the entry or the frontend becomes visible.
    #[inline(always)]
    pub fn set(self, memory: &impl Memory) {
        self.set_in(memory, 0);
        self.set_in(memory, 1);
    }
}

/// Whether there may be a flow or a frontend for packets of `tuple`; `active` is [`Filter::active`].
#[inline(always)]
pub fn may_have_flow(memory: &impl Memory, active: u64, tuple: &Tuple) -> bool {
    active == OFF
        || Mark::of_destination(tuple).is_set(memory, copy_of(active))
        || Mark::of_source(tuple).is_set(memory, copy_of(active))
}

/// The indices of all words of a copy, 0 or 1.
pub fn words_of(copy: usize) -> core::ops::Range<usize> {
    2 * WORDS * copy..2 * WORDS * (copy + 1)
}

/// The address as one word: an IPv4 address itself, an IPv6 address hashed by two multiplications.
#[inline(always)]
fn folded(address: &Address) -> u64 {
    if address.is_v4() {
        return u64::from(address.v4_word());
    }
    let [high, low] = halves(address);
    let mixed = high.wrapping_mul(MULTIPLIER);
    let mixed = (mixed ^ (mixed >> 32) ^ low).wrapping_mul(MULTIPLIER);
    mixed ^ (mixed >> 32)
}

#[cfg(test)]
mod tests;
