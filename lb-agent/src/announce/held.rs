//! An announcement of an address by this node, and how claims of other machines interrupt it.

use lb_common::Heard;
use lb_core::announce::lease::{Nanos, Right};

/// Nanoseconds for which a node does not answer for an address on a device after another machine claimed it there:
/// `DEFEND_INTERVAL` of RFC 5227.
const HOLD_OFF: Nanos = 10_000_000_000;

/// An announcement of one address by this node on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// [`Right::since`] of the right that this announcement is based on.
    right: Nanos,
    /// When this announcement began, for example because the node got the right, the device appeared or got a new MAC
    /// address, or a hold-off ended.
    pub(super) since: Nanos,
    pub(super) mac: [u8; 6],
    /// Number of announcements that were due ([`due`](lb_core::announce::schedule::due)) when frames were last sent;
    /// 0 if none were sent yet.
    pub(super) sent: u64,
}

impl Held {
    /// Continues the announcement `known`. Begins a new announcement if `known` is `None`, for a new right, for a new
    /// MAC address, or when the hold-off after another machine's claim has ended.
    pub(super) fn after(
        known: Option<Self>,
        mac: [u8; 6],
        right: &Right,
        heard: Option<&Heard>,
        now: Nanos,
    ) -> Self {
        let is_same = |known: &Self| known.right == right.since && known.mac == mac;
        let holds_off = |heard: &Heard| now.saturating_sub(heard.conflict_at) < HOLD_OFF;
        let goes_on = |known: &Self| !known.is_claimed(heard) || heard.is_some_and(holds_off);
        let begin = Self { right: right.since, since: now, mac, sent: 0 };
        known.filter(|known| is_same(known) && goes_on(known)).unwrap_or(begin)
    }

    /// Whether another machine has claimed the address since the announcement began. If so, this node does not answer
    /// for the address.
    pub(super) fn is_claimed(&self, heard: Option<&Heard>) -> bool {
        heard.is_some_and(|heard| heard.conflict_at >= self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_ends_the_announcement_until_the_hold_off_is_over() {
        let right = Right { since: 5, deadline: u64::MAX };
        let begun = Held::after(None, [1; 6], &right, None, 100);
        assert_eq!((begun.since, begun.sent), (100, 0));
        let begun = Held { sent: 3, ..begun };
        let claim = |at| Heard { conflict_at: at, conflicts: 1, ..Heard::default() };
        let after = |heard: &Heard, now| Held::after(Some(begun), [1; 6], &right, Some(heard), now);
        assert_eq!(after(&claim(99), 200), begun, "a claim from before");
        assert_eq!(after(&claim(150), 200), begun, "held off");
        let again = after(&claim(150), 150 + HOLD_OFF);
        assert_eq!((again.since, again.sent), (150 + HOLD_OFF, 0));
        assert!(begun.is_claimed(Some(&claim(150))) && !again.is_claimed(Some(&claim(150))));
        let other_mac = Held::after(Some(begun), [2; 6], &right, None, 200);
        assert_eq!((other_mac.since, other_mac.sent), (200, 0));
    }
}
