//! Whether the node answers for a virtual address that it announces at layer 2.
//!
//! The right to answer ends by itself at its deadline, and at once when another machine claims the address. The agent
//! moves the deadline only with evidence that no other node has the right.

use lb_common::{Announcement, Heard};

/// The meaning of an ARP packet or a neighbour discovery message for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Message {
    /// Nothing that concerns announcements: the message is invalid, from this node, or for another machine.
    Other = 0,
    /// A request for the MAC address of the address: an ARP request, an ARP probe (RFC 5227 §2.1), or a neighbour
    /// solicitation whose sender has an address (RFC 4861 §4.3).
    Asks = 1,
    /// A check that no machine has the address, before the sender takes it: a neighbour solicitation from the
    /// unspecified address (RFC 4862 §5.4).
    Detects = 2,
    /// A claim that the sender has the address: an ARP packet from the address, or a neighbour advertisement.
    Claims = 3,
}

/// The action of the program on a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Reaction {
    /// The packet goes on untouched.
    Pass = 0,
    /// The answer goes to the machine that asked, in place of the request.
    Answer = 1,
    /// The answer goes to all machines on the network (ff02::1), because the machine that asked has no address.
    AnswerAll = 2,
    /// The program notes the conflict, which ends the node's right to answer. The packet goes on untouched.
    Yield = 3,
}

/// Whether the node has the right to answer at the time `now`, in nanoseconds of `CLOCK_BOOTTIME`.
#[inline(always)]
pub const fn may_answer(announcement: &Announcement, heard: &Heard, now: u64) -> bool {
    now < announcement.deadline && heard.conflict_at < announcement.since
}

/// The reaction to a message about an address; `may_answer` is whether the node may answer for that address.
#[inline(always)]
pub const fn reaction(message: Message, may_answer: bool) -> Reaction {
    match message {
        Message::Asks if may_answer => Reaction::Answer,
        Message::Detects if may_answer => Reaction::AnswerAll,
        Message::Claims if may_answer => Reaction::Yield,
        Message::Other | Message::Asks | Message::Detects | Message::Claims => Reaction::Pass,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANTED: Announcement =
        Announcement { deadline: 2_000, since: 1_000, mac: [2; 6], reserved: [0; 2] };

    fn heard(conflict_at: u64) -> Heard {
        Heard { conflict_at, ..Heard::default() }
    }

    #[test]
    fn right_to_answer_ends_at_the_deadline_or_with_a_conflict() {
        for (conflict_at, now, may) in [
            (0, 1_000, true),
            (0, 1_999, true),
            (0, 2_000, false),
            (0, u64::MAX, false),
            (999, 1_500, true),
            (1_000, 1_500, false),
            (1_400, 1_500, false),
        ] {
            assert_eq!(may_answer(&GRANTED, &heard(conflict_at), now), may, "{conflict_at} {now}");
        }
        let forever = Announcement { deadline: Announcement::NEVER, ..GRANTED };
        assert!(may_answer(&forever, &heard(0), u64::MAX - 1));
    }

    /// A renewal moves the deadline and nothing else, so it cannot undo a conflict that the agent has not seen yet.
    #[test]
    fn renewal_does_not_undo_a_conflict() {
        let renewed = Announcement { deadline: 9_000, ..GRANTED };
        assert!(!may_answer(&renewed, &heard(1_400), 1_500));
        assert!(may_answer(&Announcement { since: 1_401, ..renewed }, &heard(1_400), 1_500));
    }

    #[test]
    fn node_without_the_right_passes_every_message() {
        for (message, with_right) in [
            (Message::Other, Reaction::Pass),
            (Message::Asks, Reaction::Answer),
            (Message::Detects, Reaction::AnswerAll),
            (Message::Claims, Reaction::Yield),
        ] {
            assert_eq!(reaction(message, true), with_right);
            assert_eq!(reaction(message, false), Reaction::Pass);
        }
    }
}
