//! The results of system calls.

use lb_common::{Outcome, Verdict};

/// The result of a system call on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SocketVerdict {
    /// The call continues, translated or not.
    Continue = 0,
    /// `ECONNREFUSED`: what the stack returns after a RST or an ICMP port unreachable.
    ConnectionRefused = 111,
    /// `EHOSTUNREACH`: in place of a silent drop, which is not possible for a system call.
    HostUnreachable = 113,
}

/// The result of a system call with this outcome.
#[inline(always)]
pub const fn verdict(outcome: Outcome) -> SocketVerdict {
    match outcome.verdict() {
        Verdict::Pass => SocketVerdict::Continue,
        Verdict::Bounce | Verdict::Route => SocketVerdict::ConnectionRefused,
        // `Hold` is for fragments, which a system call cannot have.
        Verdict::Drop | Verdict::Hold => SocketVerdict::HostUnreachable,
    }
}

/// Whether `connect(2)` of a UDP socket succeeds although `outcome` would refuse it: no Service has the port. A later
/// `send(2)` fails instead.
#[inline(always)]
pub fn connects_nowhere(outcome: Outcome, is_unlisted: impl FnOnce() -> bool) -> bool {
    outcome == Outcome::RejectUdp && is_unlisted()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_and_dropped_calls_fail() {
        for (outcome, expected) in [
            (Outcome::NewFlow, SocketVerdict::Continue),
            (Outcome::NoService, SocketVerdict::Continue),
            (Outcome::RejectTcp, SocketVerdict::ConnectionRefused),
            (Outcome::RejectUdp, SocketVerdict::ConnectionRefused),
            (Outcome::NoLocalBackend, SocketVerdict::HostUnreachable),
            (Outcome::SourceNotAllowed, SocketVerdict::HostUnreachable),
        ] {
            assert_eq!(verdict(outcome), expected, "{}", outcome.as_str());
        }
    }
}
