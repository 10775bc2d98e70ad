//! Minimal programs, with which the packet benchmark compares the load balancer. They return at once, look up a missing
//! flow, balance as simply as possible, or insert a new flow. Those that parse a packet accept only TCP and UDP over
//! IPv4, without options and fragments.
#![cfg_attr(target_arch = "bpf", no_std)]
#![cfg_attr(target_arch = "bpf", no_main)]

#[cfg(target_arch = "bpf")]
mod baselines {
    use aya_ebpf::{
        bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action},
        btf_maps::HashMap,
        macros::{btf_map, classifier, xdp},
        programs::{TcContext, XdpContext},
    };
    use lb_ebpf_bench::{BaselineFlow, BaselineService, BaselineTarget, bytes::Bytes, capacity};

    /// Service ports → number of the Service.
    #[btf_map]
    static SERVICES: HashMap<BaselineService, u32, { capacity::SERVICES }> = HashMap::new();

    /// Flows of one direction → their destination.
    #[btf_map]
    static CONNTRACK: HashMap<BaselineFlow, BaselineTarget, { capacity::CONNTRACK }, NO_PREALLOC> =
        HashMap::new();

    /// Like `CONNTRACK`, but preallocated.
    #[btf_map]
    static PREALLOCATED: HashMap<BaselineFlow, BaselineTarget, { capacity::CONNTRACK }> = HashMap::new();

    const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

    const VERSION_AND_LENGTH: u8 = 0x45;
    const TCP: u8 = 6;
    const UDP: u8 = 17;

    #[classifier]
    fn tc_return(_ctx: TcContext) -> i32 {
        TC_ACT_UNSPEC
    }

    #[xdp(frags)]
    fn xdp_return(_ctx: XdpContext) -> u32 {
        xdp_action::XDP_PASS
    }

    #[classifier]
    fn tc_miss(ctx: TcContext) -> i32 {
        tc(miss(ctx.data(), ctx.data_end()))
    }

    #[xdp(frags)]
    fn xdp_miss(ctx: XdpContext) -> u32 {
        xdp(miss(ctx.data(), ctx.data_end()))
    }

    #[classifier]
    fn tc_balance(ctx: TcContext) -> i32 {
        tc(balance(ctx.data(), ctx.data_end()).map(|_packet| ()))
    }

    #[xdp(frags)]
    fn xdp_balance(ctx: XdpContext) -> u32 {
        xdp(balance(ctx.data(), ctx.data_end()).map(|packet| swap_macs(packet)))
    }

    #[classifier]
    fn tc_insert(ctx: TcContext) -> i32 {
        tc(insert(ctx.data(), ctx.data_end(), &CONNTRACK))
    }

    #[classifier]
    fn tc_insert_preallocated(ctx: TcContext) -> i32 {
        tc(insert(ctx.data(), ctx.data_end(), &PREALLOCATED))
    }

    #[xdp(frags)]
    fn xdp_insert(ctx: XdpContext) -> u32 {
        xdp(insert(ctx.data(), ctx.data_end(), &CONNTRACK))
    }

    #[xdp(frags)]
    fn xdp_insert_preallocated(ctx: XdpContext) -> u32 {
        xdp(insert(ctx.data(), ctx.data_end(), &PREALLOCATED))
    }

    /// Passes the packet on if the baseline processed it; otherwise drops it.
    #[inline(always)]
    fn tc(done: Option<()>) -> i32 {
        if done.is_some() { TC_ACT_UNSPEC } else { TC_ACT_SHOT as i32 }
    }

    /// Sends the packet back out of its device if the baseline processed it; otherwise drops it.
    #[inline(always)]
    fn xdp(done: Option<()>) -> u32 {
        if done.is_some() { xdp_action::XDP_TX } else { xdp_action::XDP_DROP }
    }

    /// Parses the packet; returns it and the key of its flow.
    #[inline(always)]
    fn parse(start: usize, end: usize) -> Option<(Bytes, BaselineFlow)> {
        // SAFETY: no load or store goes beyond byte 54, the end of a TCP header; a UDP header is shorter.
        let packet = unsafe { Bytes::of_packet(start, end, 54)? };
        let protocol = packet.load_8::<23>();
        let fragment = packet.load_16::<20>() & 0x3fff_u16.to_be();
        if packet.load_16::<12>() != 0x0800_u16.to_be()
            || packet.load_8::<14>() != VERSION_AND_LENGTH
            || fragment != 0
            || (protocol != TCP && protocol != UDP)
        {
            return None;
        }
        let flow = BaselineFlow {
            source: packet.load_32::<26>(),
            destination: packet.load_32::<30>(),
            ports: packet.load_32::<34>(),
            protocol: u32::from(protocol),
        };
        Some((packet, flow))
    }

    #[inline(always)]
    fn swap_macs(packet: Bytes) {
        let (to, to_end) = (packet.load_32::<0>(), packet.load_16::<4>());
        let (from, from_end) = (packet.load_32::<6>(), packet.load_16::<10>());
        packet.store_32::<0>(from);
        packet.store_16::<4>(from_end);
        packet.store_32::<6>(to);
        packet.store_16::<10>(to_end);
    }

    /// Parses, swaps MAC addresses, and looks up a flow that does not exist.
    #[inline(always)]
    fn miss(start: usize, end: usize) -> Option<()> {
        let (packet, flow) = parse(start, end)?;
        swap_macs(packet);
        match CONNTRACK.get_ptr(&flow) {
            None => Some(()),
            Some(_) => None,
        }
    }

    /// Parses, looks up Service and flow, writes the destination and updates the checksums.
    #[inline(always)]
    fn balance(start: usize, end: usize) -> Option<Bytes> {
        let (packet, flow) = parse(start, end)?;
        let service = BaselineService {
            address: flow.destination,
            port: (flow.ports >> 16) as u16,
            protocol: flow.protocol as u16,
        };
        SERVICES.get_ptr(&service)?;
        // SAFETY: nothing writes the entry while the program runs.
        let target = unsafe { &*CONNTRACK.get_ptr(&flow)? };
        packet.store_32::<30>(target.address);
        packet.store_16::<36>(target.port);
        packet.store_16::<24>(update(packet.load_16::<24>(), target.address_delta));
        if flow.protocol as u8 == TCP {
            packet.store_16::<50>(update(packet.load_16::<50>(), target.delta));
        } else if packet.load_16::<40>() != 0 {
            let checksum = update(packet.load_16::<40>(), target.delta);
            packet.store_16::<40>(if checksum == 0 { 0xffff } else { checksum });
        }
        Some(packet)
    }

    /// Updates a checksum by the difference `delta` (RFC 1624, equation 3).
    #[inline(always)]
    fn update(checksum: u16, delta: u16) -> u16 {
        let sum = u32::from(!checksum) + u32::from(delta);
        !((sum & 0xffff) + (sum >> 16)) as u16
    }

    /// Parses the packet, and inserts an entry for the packet's direction of the flow.
    #[inline(always)]
    fn insert<const FLAGS: usize>(
        start: usize,
        end: usize,
        flows: &HashMap<BaselineFlow, BaselineTarget, { capacity::CONNTRACK }, FLAGS>,
    ) -> Option<()> {
        let (_, flow) = parse(start, end)?;
        let target = BaselineTarget {
            address: flow.destination,
            port: (flow.ports >> 16) as u16,
            address_delta: 0,
            delta: 0,
            zero: 0,
        };
        flows.insert(&flow, &target, u64::from(BPF_NOEXIST)).ok()
    }

    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}

#[cfg(not(target_arch = "bpf"))]
#[expect(clippy::print_stderr, reason = "on a host the binary only explains itself")]
fn main() {
    eprintln!("this is a BPF object: `cargo xtask bench packets` builds and loads it");
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
