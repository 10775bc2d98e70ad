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
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Tuple {}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{pair, tuple};
    use crate::protocol;

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
}
