//! Source ports of new connections: which ports sockets of the node may also use, and how many ports a connection tries
//! towards its backend. (`datapath/flow/claim.rs` tries and claims the ports.)
//!
//! Each attempt after the first tries a random port (in a small range, the next one), so a connection with many
//! attempts mostly finds a free port, even when nine of ten ports are taken. When all ports are taken, as under a
//! flood, attempts only cost time. So the programs record a backend whose ports ran out, and for the rest of the tick
//! new connections to it get few attempts.

use lb_common::{
    FrontendKind, Service,
    conntrack::{Tick, flow_flags},
};

/// Number of source ports that a new connection tries.
const ATTEMPTS: u32 = 32;
/// Number of source ports that a new connection tries if the ports towards its backend have run out in this tick.
const FEW_ATTEMPTS: u32 = 8;

/// How many source ports a new connection tries. `ran_out`: another connection to the same backend has found no free
/// port in this tick.
#[inline(always)]
pub const fn attempts(ran_out: bool) -> u32 {
    if ran_out { FEW_ATTEMPTS } else { ATTEMPTS }
}

/// Whether this attempt may also take the port of an ended or idle flow whose backend may still expect packets (`eager`
/// in [`may_be_replaced`](super::flow::may_be_replaced)): attempts in the second half may. (Unless the ports ran out,
/// the first half tries every port of a range of at most `ATTEMPTS / 2` ports: see [`next`].)
#[inline(always)]
pub const fn is_eager(attempt: u32, ran_out: bool) -> bool {
    attempt >= attempts(ran_out) / 2
}

/// The offset of the port to try after the one at `offset`, in a range of `count` ports: `random`, which is below
/// `count`, or the following offset if the range has at most `ATTEMPTS / 2` ports.
#[inline(always)]
pub const fn next(offset: u32, count: u32, random: u32) -> u32 {
    if count > ATTEMPTS / 2 {
        random
    } else if offset.wrapping_add(1) < count {
        offset + 1
    } else {
        0
    }
}

/// Whether a socket of the node may also use the source port of a flow with these [`flow_flags`]: the source is an
/// address of the node or, in a hairpin or caught flow, the virtual address, which may be an address of the node. A new
/// flow takes such a port from an ended connection only after all entries of that connection are deleted.
#[inline(always)]
pub const fn is_of_node(flags: u8) -> bool {
    matches!(flags, flow_flags::ROUTED | flow_flags::AT_EGRESS)
        || flags & (flow_flags::HAIRPIN | flow_flags::MASQUERADED) != 0
}

/// Whether a hairpin flow of the service gets one of the ports for masquerading: the source is an address of the node,
/// whose sockets may have the client's port.
#[inline(always)]
pub const fn hairpin_changes_port(service: &Service) -> bool {
    service.kind == FrontendKind::NodePort as u8
}

/// `BPF_TCP_LISTEN`.
pub(super) const LISTEN: u32 = 10;

/// Whether a TCP socket in this `state` uses its port, so that a flow must not take the port. The caller has found the
/// socket: it is on the node and would receive the backend's segments. A listening socket does not use its port: it has
/// no connection with the backend.
#[inline(always)]
pub const fn is_used_by_socket(state: u32) -> bool {
    state != LISTEN
}

/// The record of a backend whose ports ran out: the upper 32 bits of `hash`, which stand for the backend, and the tick.
#[inline(always)]
pub const fn exhausted(hash: u64, now: Tick) -> u64 {
    hash & !0xffff_ffff | now.0 as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_of_a_small_range_is_tried_cautiously_first() {
        for count in 1..=ATTEMPTS / 2 {
            let (mut offset, mut tried) = (count / 3, [false; ATTEMPTS as usize]);
            for attempt in (0..).take_while(|attempt| !is_eager(*attempt, false)) {
                assert!(attempt < attempts(false));
                tried[offset as usize] = true;
                offset = next(offset, count, 0);
            }
            assert!(tried.iter().take(count as usize).all(|tried| *tried), "{count} ports");
        }
    }

    #[test]
    fn only_listening_sockets_share_their_port() {
        for state in 1..=12 {
            assert_eq!(is_used_by_socket(state), state != LISTEN, "state {state}");
        }
    }

    #[test]
    fn source_ports_are_of_the_node_unless_the_source_is_the_client() {
        use flow_flags::{AT_EGRESS, CAUGHT, HAIRPIN, MASQUERADED, PROXY_PROTOCOL, ROUTED, TUNNEL};
        for (flags, of_node) in [
            (0, false),
            (PROXY_PROTOCOL, false),
            (ROUTED, true),
            (ROUTED | TUNNEL, false),
            (AT_EGRESS, true),
            (MASQUERADED, true),
            (MASQUERADED | PROXY_PROTOCOL, true),
            (CAUGHT | MASQUERADED, true),
            (HAIRPIN, true),
        ] {
            assert_eq!(is_of_node(flags), of_node, "{flags:#b}");
        }
    }

    #[test]
    fn large_ranges_are_tried_at_random() {
        assert_eq!(next(5, 20_000, 77), 77);
    }

    #[test]
    fn backend_counts_as_exhausted_for_the_rest_of_the_tick() {
        let (hash, other) = (0xabcd_0123_4567_89ab, 0xabcd_0124_4567_89ab);
        let word = exhausted(hash, Tick(7));
        assert_eq!(word, exhausted(hash, Tick(7)));
        assert_ne!(word, exhausted(hash, Tick(8)));
        assert_ne!(word, exhausted(other, Tick(7)));
        assert!(attempts(true) < attempts(false));
    }
}
