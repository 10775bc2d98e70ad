use core::net::SocketAddr;

use super::flow_flags;
#[cfg(feature = "next-layout")]
pub use super::next_layout::Tuple;
use crate::Address;

/// The five values that name one direction of a flow; key of the flow table.
#[cfg(not(feature = "next-layout"))]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Tuple {
    /// Source address.
    pub source: Address,
    /// Destination address.
    pub destination: Address,
    /// Source port, host byte order.
    pub source_port: u16,
    /// Destination port, host byte order.
    pub destination_port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Padding, always 0. (Separate from `zeros`: LLVM would fill one field of three bytes by a call to `memset`.)
    pub zero: u8,
    /// Padding, always 0: the tuple is a key that is compared as a whole.
    pub zeros: u16,
}

const _: () = assert!(size_of::<Tuple>() == 40);

#[cfg(not(feature = "next-layout"))]
crate::layout::describe!(Tuple { source, destination, source_port, destination_port, protocol, zero, zeros });

impl Tuple {
    /// The tuple of a packet; ports in host byte order.
    #[inline(always)]
    pub const fn new(
        source: Address,
        destination: Address,
        source_port: u16,
        destination_port: u16,
        protocol: u8,
    ) -> Self {
        Self { source, destination, source_port, destination_port, protocol, zero: 0, zeros: 0 }
    }

    /// The tuple of the opposite direction.
    #[inline(always)]
    #[must_use]
    pub const fn reversed(&self) -> Self {
        Self::new(self.destination, self.source, self.destination_port, self.source_port, self.protocol)
    }

    /// The node's address and port that the backend sees in place of the client's; `None` if the flow does not
    /// masquerade the client's packets. The flow has the flags `flags`, and translates this tuple to `to`.
    ///
    /// A hairpin flow whose translated packets have the VIP as their source does not masquerade. A tunnelled flow does
    /// not masquerade either: the packets in the tunnel keep the client's address.
    pub fn masqueraded_as(&self, to: &Self, flags: u8) -> Option<SocketAddr> {
        let is_from_vip = flags & flow_flags::HAIRPIN != 0 && to.source == self.destination;
        let masquerades = to.source != self.source && !is_from_vip && flags & flow_flags::TUNNEL == 0;
        masquerades.then(|| to.source_socket())
    }

    /// Source address and port.
    pub fn source_socket(&self) -> SocketAddr {
        SocketAddr::new(self.source.into(), self.source_port)
    }

    /// Destination address and port.
    pub fn destination_socket(&self) -> SocketAddr {
        SocketAddr::new(self.destination.into(), self.destination_port)
    }
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Tuple {}

#[cfg(test)]
mod tests {
    use super::super::{
        fixtures::{pair, tuple},
        flow_flags,
    };
    use crate::{Address, protocol};

    #[test]
    fn reversed_tuple_is_the_key_of_the_reverse_entry() {
        let (forward, reply) = pair(protocol::TCP);
        assert_eq!(reply.to.reversed(), tuple(protocol::TCP));
        assert_eq!(forward.to.reversed().reversed(), forward.to);
        assert_eq!(
            forward.address_delta, !reply.address_delta,
            "what one direction adds the other takes away"
        );
    }

    #[test]
    fn only_an_address_of_the_node_in_place_of_the_client_masquerades() {
        let from = tuple(protocol::UDP);
        let node = Address::from_v4([172, 18, 0, 1]);
        let to = |source| super::Tuple { source, source_port: 10_017, ..from };
        let at = |source: Address| Some(super::SocketAddr::new(source.into(), 10_017));
        assert_eq!(from.masqueraded_as(&to(node), flow_flags::ROUTED), at(node));
        assert_eq!(from.masqueraded_as(&to(from.source), 0), None, "another port of the client");
        for hairpin in [flow_flags::HAIRPIN, flow_flags::CAUGHT] {
            assert_eq!(from.masqueraded_as(&to(from.destination), hairpin), None);
            assert_eq!(from.masqueraded_as(&to(node), hairpin), at(node), "caught by the node");
        }
        for flags in [flow_flags::ROUTED, flow_flags::MASQUERADED] {
            let at_node_port = from.masqueraded_as(&to(from.destination), flags);
            assert_eq!(at_node_port, at(from.destination), "the VIP is the node's address");
        }
        assert_eq!(from.masqueraded_as(&to(node), flow_flags::ROUTED | flow_flags::TUNNEL), None);
    }
}
