//! Whether a packet may be in a tunnel that ends at this node. `ends_here` is whether such tunnels exist at all.

use lb_common::{GUE_PORT, Outcome, conntrack::Tuple, protocol};

use crate::parse::Body;

/// Whether a packet that no flow translates may contain a tunnelled packet; `outcome` is the reason why no flow does.
/// (A UDP packet to the GUE port counts only if it is for no Service, because a Service may use that port.)
#[inline(always)]
pub fn may_be_tunnel(outcome: Outcome, body: Body, tuple: &Tuple, ends_here: impl FnOnce() -> bool) -> bool {
    if matches!(outcome, Outcome::NotTransport) {
        return ends_here();
    }
    matches!(outcome, Outcome::NoService) && body == Body::Udp && may_be_gue(tuple, ends_here)
}

/// Whether a packet with this tuple may be in a GUE tunnel.
#[inline(always)]
pub fn may_be_gue(tuple: &Tuple, ends_here: impl FnOnce() -> bool) -> bool {
    ends_here() && tuple.destination_port == GUE_PORT && tuple.protocol == protocol::UDP
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;
    use lb_common::Address;

    use super::*;

    #[test]
    fn packets_of_other_protocols_and_datagrams_to_the_gue_port_may_be_in_a_tunnel() {
        let tuple = |port, protocol| Tuple::new(Address::zeroed(), Address::zeroed(), 1000, port, protocol);
        for (outcome, body, tuple, expected) in [
            (Outcome::NotTransport, Body::Udp, tuple(0, 0), true),
            (Outcome::NoService, Body::Udp, tuple(GUE_PORT, protocol::UDP), true),
            (Outcome::NoService, Body::Udp, tuple(53, protocol::UDP), false),
            (Outcome::NoService, Body::LaterFragment, tuple(GUE_PORT, protocol::UDP), false),
            (Outcome::NoService, Body::Tcp, tuple(GUE_PORT, protocol::TCP), false),
            (Outcome::RejectUdp, Body::Udp, tuple(GUE_PORT, protocol::UDP), false),
            (Outcome::Malformed, Body::Udp, tuple(GUE_PORT, protocol::UDP), false),
        ] {
            let found = |ends_here| may_be_tunnel(outcome, body, &tuple, || ends_here);
            assert_eq!((found(true), found(false)), (expected, false), "{outcome:?}, {body:?}, {tuple:?}");
        }
    }
}
