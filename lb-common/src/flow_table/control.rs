/// The control word of a slot: its state, who has claimed it, and the flow that it holds.
///
/// ```text
/// bits 0..3    state
/// bit  3       the agent has claimed the slot
/// bits 4..32   fingerprint of the tuple: the upper bits of its hash
/// bits 32..64  generation: increases whenever the slot is claimed or its flow replaced
/// ```
///
/// | state | meaning | next |
/// |---|---|---|
/// | free | no flow; the lower half of the word is 0 | claimed |
/// | claimed | one CPU (or the agent) writes a flow, or evicts one | tentative, free |
/// | tentative | the flow is complete; its key may also be in another place | live, killed, free |
/// | killed | another insert of the same key takes precedence; the owner frees the slot | free |
/// | live | an entry of the table | changing, claimed (to evict it), free (removed) |
/// | changing | one CPU (or the agent) writes another flow for the same key | live |
///
/// If the agent is killed while it owns a slot, the next agent frees the slot (`release_abandoned`).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control(pub u64);

const STATE: u32 = 7;
const AGENT: u32 = 8;
const FINGERPRINT: u32 = !(STATE | AGENT);

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const TENTATIVE: u32 = 2;
const LIVE: u32 = 3;
const CHANGING: u32 = 4;
const KILLED: u32 = 5;

/// The state of a slot, as far as it matters to another CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Free, claimed or killed: the slot holds no entry. Before the owner of a claimed slot makes it a live entry, the
    /// owner itself checks that no other place has the key.
    Empty,
    /// A tentative entry: its insert has not yet checked that no other place has the key.
    Tentative,
    /// The slot has an entry that readers find.
    Live,
    /// An entry whose flow is being replaced.
    Changing,
}

impl Control {
    /// A slot that has never been used: what a new map holds.
    pub const NEVER_USED: Self = Self(0);

    /// The lower half of the word of a live entry with this fingerprint.
    #[inline(always)]
    pub(super) const fn live_tag(fingerprint: u32) -> u32 {
        fingerprint | LIVE
    }

    /// The lower half of the word: state, owner and fingerprint.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    pub(super) const fn tag(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline(always)]
    const fn new(generation: u32, tag: u32) -> Self {
        Self((generation as u64) << 32 | tag as u64)
    }

    #[inline(always)]
    const fn with_state(self, state: u32) -> Self {
        Self::new(self.generation(), self.tag() & !STATE | state)
    }

    /// The next generation of the slot; never 0, because a control word of 0 marks a slot that has never been used.
    #[inline(always)]
    const fn next_generation(self) -> u32 {
        match self.generation().wrapping_add(1) {
            0 => 1,
            next => next,
        }
    }

    /// Whether the slot holds an entry that readers find.
    #[inline(always)]
    pub const fn is_live(self) -> bool {
        self.tag() & STATE == LIVE
    }

    /// Whether an agent has claimed the slot and has not finished.
    #[inline(always)]
    pub(super) const fn is_agents(self) -> bool {
        self.tag() & AGENT != 0
    }

    /// Whether the slot has no entry and no claim.
    #[inline(always)]
    pub const fn is_free(self) -> bool {
        self.tag() == FREE
    }

    #[inline(always)]
    pub(super) const fn has_fingerprint(self, fingerprint: u32) -> bool {
        self.tag() & FINGERPRINT == fingerprint
    }

    #[inline(always)]
    pub(super) const fn state(self) -> State {
        match self.tag() & STATE {
            TENTATIVE => State::Tentative,
            LIVE => State::Live,
            CHANGING => State::Changing,
            _ => State::Empty,
        }
    }

    /// The word of this slot once it is claimed, in its next generation.
    #[inline(always)]
    pub(super) const fn claimed(self, agent: bool) -> Self {
        Self::new(self.next_generation(), if agent { CLAIMED | AGENT } else { CLAIMED })
    }

    /// The word of the claimed slot once its flow is complete: tentative.
    #[inline(always)]
    pub(super) const fn tentative(self, fingerprint: u32) -> Self {
        Self::new(self.generation(), self.tag() & AGENT | fingerprint | TENTATIVE)
    }

    /// The word of the slot as a live entry.
    #[inline(always)]
    pub(super) const fn live(self) -> Self {
        Self::new(self.generation(), self.tag() & FINGERPRINT | LIVE)
    }

    #[inline(always)]
    pub(super) const fn killed(self) -> Self {
        self.with_state(KILLED)
    }

    /// The word of the entry while its flow is replaced, in the slot's next generation.
    #[inline(always)]
    pub(super) const fn changing(self, agent: bool) -> Self {
        let owner = if agent { AGENT } else { 0 };
        Self::new(self.next_generation(), self.tag() & FINGERPRINT | owner | CHANGING)
    }

    /// The word of the slot without a flow: free.
    #[inline(always)]
    pub(super) const fn freed(self) -> Self {
        Self::new(self.generation(), FREE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_slots_never_look_unused() {
        let last = Control::new(u32::MAX, LIVE);
        for control in [Control::NEVER_USED.claimed(false), last.claimed(true), last.changing(false)] {
            assert_eq!(control.generation(), 1);
            assert_ne!(control.freed(), Control::NEVER_USED);
            assert!(control.freed().is_free());
        }
    }

    #[test]
    fn entries_keep_their_fingerprint_and_lose_their_owner() {
        const FINGERPRINT: u32 = 0xabcd_ef10;
        let tentative = Control::NEVER_USED.claimed(true).tentative(FINGERPRINT);
        assert!(tentative.is_agents() && tentative.has_fingerprint(FINGERPRINT));
        assert_eq!(tentative.state(), State::Tentative);
        let live = tentative.live();
        assert!(live.is_live() && !live.is_agents() && live.tag() == Control::live_tag(FINGERPRINT));
        assert_eq!(
            (live.changing(true).state(), live.changing(true).live().tag()),
            (State::Changing, live.tag())
        );
        assert_eq!(tentative.killed().state(), State::Empty);
    }
}
