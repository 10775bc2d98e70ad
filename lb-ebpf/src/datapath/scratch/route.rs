//! A route lookup, a value of `SCRATCH`.

use aya_ebpf::bindings::{bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1};
use lb_common::{Address, conntrack::Tuple};

/// A route lookup: its arguments, then its results. `struct bpf_fib_lookup`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Route {
    family: u8,
    protocol: u8,
    source_port: u16,
    destination_port: u16,
    /// Before the lookup: the size of the packet in bytes, in host byte order. After the lookup: the MTU of the route,
    /// if the kernel reports it.
    length: u16,
    /// Before the lookup: the device that the packet came in through. After the lookup: the device that the packet
    /// leaves through.
    pub(crate) device: u32,
    service_class: u32,
    source: [u32; 4],
    destination: [u32; 4],
    table: u32,
    /// After the lookup: the MAC addresses of the device and of the next hop.
    macs: [[u8; 6]; 2],
}

const _: () = assert!(size_of::<Route>() == size_of::<aya_ebpf::bindings::bpf_fib_lookup>());

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

impl Route {
    /// The arguments of a lookup for packets with `length` bytes that came in through `device` as `from`, and have the
    /// destination of `to` now.
    #[inline(always)]
    pub(crate) fn request(from: &Tuple, to: &Tuple, length: u16, device: u32) -> Self {
        let is_v4 = to.destination.is_v4();
        let words = |address: &Address| if is_v4 { [address.v4_word(), 0, 0, 0] } else { address.words() };
        Self {
            family: if is_v4 { AF_INET } else { AF_INET6 },
            protocol: to.protocol,
            source_port: from.source_port.to_be(),
            destination_port: to.destination_port.to_be(),
            length,
            device,
            service_class: 0,
            source: words(&from.source),
            destination: words(&to.destination),
            table: 0,
            macs: [[0; 6]; 2],
        }
    }

    /// Sets the mark of the packet, which a lookup with `BPF_FIB_LOOKUP_MARK` reads.
    #[inline(always)]
    pub(crate) const fn set_mark(&mut self, mark: u32) {
        // In the kernel's struct, the mark shares a union with the MAC addresses, which are outputs.
        let [a, b, c, d] = mark.to_ne_bytes();
        self.macs[0] = [a, b, c, d, 0, 0];
    }

    /// Removes the source. A lookup that does not report the node's address leaves the client's address in this field,
    /// and [`Self::source`] would return that address as the node's.
    #[inline(always)]
    pub(crate) const fn clear_source(&mut self) {
        self.source = [0; 4];
    }

    /// The address of the packet's family (`is_v4`) that the node itself would use as source, after a lookup with
    /// `BPF_FIB_LOOKUP_SRC`; `None` on kernels before Linux 6.7, which do not report it. (After a lookup of an IPv4
    /// route with an IPv6 gateway, the family in the result is that of the gateway.)
    #[inline(always)]
    pub(crate) fn source(&self, is_v4: bool) -> Option<Address> {
        let source =
            if is_v4 { Address::from_v4_word(self.source[0]) } else { Address::from_words(self.source) };
        (self.source != [0; 4]).then_some(source)
    }

    /// Size in bytes of the largest packet on this route, if the lookup checked a length.
    #[inline(always)]
    pub(crate) const fn mtu(&self) -> u16 {
        self.length
    }

    /// The IP address of the next hop, after a lookup that has found a route: the address of the gateway, which may be
    /// of the other family, or, if the route has no gateway, the packet's destination.
    #[inline(always)]
    pub(crate) fn next_hop(&self) -> bpf_redir_neigh {
        let address = bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: self.destination };
        bpf_redir_neigh { nh_family: self.family.into(), __bindgen_anon_1: address }
    }

    /// The MAC addresses of the next hop and of the device towards it.
    #[inline(always)]
    pub(crate) const fn macs(&self) -> ([u8; 6], [u8; 6]) {
        let [source, destination] = self.macs;
        (destination, source)
    }
}
