//! How the programs treat the later fragments of a datagram, by the outcome of the first fragment.

use lb_common::{Outcome, Verdict};

/// How the programs treat the later fragments of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Becomes {
    /// They get the ports of the first fragment.
    Translated = 0,
    /// They pass.
    Untouched = 1,
    /// They are dropped.
    Dropped = 2,
}

/// How the programs treat the later fragments of a datagram whose first fragment enters the node, gets no flow, and has
/// this outcome. `None`: the programs record nothing about the datagram.
#[inline(always)]
pub const fn becomes(outcome: Outcome) -> Option<Becomes> {
    match (outcome, outcome.verdict()) {
        (Outcome::NoService | Outcome::OtherHook | Outcome::LeftToEarlier, _) => Some(Becomes::Untouched),
        // To answer a fragment, or to forward it without a flow, the program needs the transport header, which only the
        // first fragment has.
        (_, Verdict::Drop | Verdict::Bounce | Verdict::Route) => Some(Becomes::Dropped),
        // All other packets that pass have no ports that later fragments could need, or were never parsed.
        (_, Verdict::Pass | Verdict::Hold) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_fragments_share_the_fate_of_the_first_one() {
        use Becomes::{Dropped, Untouched};
        for (outcome, expected) in [
            (Outcome::NoService, Some(Untouched)),
            (Outcome::OtherHook, Some(Untouched)),
            (Outcome::LeftToEarlier, Some(Untouched)),
            (Outcome::RejectUdp, Some(Dropped)),
            (Outcome::SourceNotAllowed, Some(Dropped)),
            (Outcome::ConnectionLimited, Some(Dropped)),
            (Outcome::Stateless, Some(Dropped)),
            (Outcome::NotTransport, None),
            (Outcome::OtherHost, None),
        ] {
            assert_eq!(becomes(outcome), expected, "{outcome:?}");
        }
    }
}
