//! Gives every repetition of a test run a fresh packet: writes the headers anew, those of another flow each time, and jumps to
//! the program that is measured. A program that returns at once, measured in the same way, shows what this costs.
#![cfg_attr(target_arch = "bpf", no_std)]
#![cfg_attr(target_arch = "bpf", no_main)]

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{
        EbpfContext,
        bindings::{TC_ACT_STOLEN, xdp_action::XDP_ABORTED},
        btf_maps::ProgramArray,
        macros::{btf_map, classifier, xdp},
        programs::{TcContext, XdpContext},
    };
    use lb_ebpf_bench::{RESTORED_V4, RESTORED_V6, Template, Variation, mixed, octets::Octets};

    /// Written by the benchmark before it loads this.
    #[unsafe(no_mangle)]
    static TEMPLATE: Template = Template { octets: [0; 80], is_v6: 0, is_reply: 0, mask: 0, is_mixed: 0 };

    /// Packets so far.
    #[unsafe(no_mangle)]
    static mut COUNT: u32 = 0;

    /// The program that is measured.
    #[btf_map]
    static MEASURED: ProgramArray<1> = ProgramArray::new();

    #[classifier]
    fn tc_restore(ctx: TcContext) -> i32 {
        go_on(&ctx, ctx.data(), ctx.data_end());
        TC_ACT_STOLEN as i32
    }

    #[xdp(frags)]
    fn xdp_restore(ctx: XdpContext) -> u32 {
        go_on(&ctx, ctx.data(), ctx.data_end());
        XDP_ABORTED
    }

    /// Comes back only where there is no room for the packet, or no program to go to.
    #[inline(always)]
    fn go_on(ctx: &impl EbpfContext, start: usize, end: usize) {
        if restore(start, end).is_some() {
            // SAFETY: nothing here has to be dropped.
            unsafe { MEASURED.tail_call(ctx, 0) };
        }
    }

    #[inline(always)]
    fn restore(start: usize, end: usize) -> Option<()> {
        let template = &raw const TEMPLATE;
        // SAFETY: these are never written while the program is loaded; `read_volatile`, since the compiler thinks it knows them.
        let (is_v6, is_reply, mask, is_mixed) = unsafe {
            (
                (&raw const (*template).is_v6).read_volatile() != 0,
                (&raw const (*template).is_reply).read_volatile() != 0,
                (&raw const (*template).mask).read_volatile(),
                (&raw const (*template).is_mixed).read_volatile() != 0,
            )
        };
        // SAFETY: what is loaded below lies within 80 octets.
        let from = unsafe { Octets::of(&raw const (*template).octets) };
        let number = count() & mask;
        let variation = Variation::of(if is_mixed { mixed(number, mask) } else { number });
        if is_v6 {
            // SAFETY: stores end there.
            let to = unsafe { Octets::of_packet(start, end, RESTORED_V6)? };
            ethernet(from, to);
            v6(from, to, variation.address, is_reply);
            transport::<54, 58, 62, 66, 70>(from, to, variation.port, is_reply);
        } else {
            // SAFETY: as above.
            let to = unsafe { Octets::of_packet(start, end, RESTORED_V4)? };
            ethernet(from, to);
            v4(from, to, variation.address, is_reply);
            transport::<34, 38, 42, 46, 50>(from, to, variation.port, is_reply);
        }
        Some(())
    }

    /// Counts packets.
    #[inline(always)]
    fn count() -> u32 {
        // SAFETY: test runs of one program are not made on two CPUs at once.
        unsafe {
            let count = (&raw const COUNT).read();
            (&raw mut COUNT).write(count.wrapping_add(1));
            count
        }
    }

    // The stores are those of the fields, pairs of which may be loaded as one: a CPU that loads what was just stored in two
    // parts has to wait, as it would not for a packet that a device has written.

    #[inline(always)]
    fn ethernet(from: Octets, to: Octets) {
        to.store_32::<0>(from.load_32::<0>());
        to.store_16::<4>(from.load_16::<4>());
        to.store_32::<6>(from.load_32::<6>());
        to.store_16::<10>(from.load_16::<10>());
        to.store_16::<12>(from.load_16::<12>());
    }

    #[inline(always)]
    fn v4(from: Octets, to: Octets, client: u32, is_reply: bool) {
        let client = u64::from(client) << if is_reply { 32 } else { 0 };
        to.store_32::<14>(from.load_32::<14>());
        to.store_32::<18>(from.load_32::<18>());
        to.store_32::<22>(from.load_32::<22>());
        to.store_64::<26>(from.load_64::<26>() ^ client);
    }

    #[inline(always)]
    fn v6(from: Octets, to: Octets, client: u32, is_reply: bool) {
        let client = u64::from(client) << 32;
        let (source, destination) = if is_reply { (0, client) } else { (client, 0) };
        to.store_32::<14>(from.load_32::<14>());
        to.store_32::<18>(from.load_32::<18>());
        to.store_64::<22>(from.load_64::<22>());
        to.store_64::<30>(from.load_64::<30>() ^ source);
        to.store_64::<38>(from.load_64::<38>());
        to.store_64::<46>(from.load_64::<46>() ^ destination);
    }

    /// 20 octets, whatever the protocol; the offsets of their words.
    #[inline(always)]
    fn transport<const A: usize, const B: usize, const C: usize, const D: usize, const E: usize>(
        from: Octets,
        to: Octets,
        client: u16,
        is_reply: bool,
    ) {
        let port = u32::from(client) << if is_reply { 16 } else { 0 };
        to.store_32::<A>(from.load_32::<A>() ^ port);
        to.store_32::<B>(from.load_32::<B>());
        to.store_32::<C>(from.load_32::<C>() ^ u32::from(client));
        to.store_32::<D>(from.load_32::<D>());
        to.store_32::<E>(from.load_32::<E>());
    }

    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}

#[cfg(not(target_arch = "bpf"))]
#[expect(clippy::print_stderr, reason = "there is nothing else to do on a host")]
fn main() {
    eprintln!("this is a BPF object: `cargo xtask bench packets` builds and loads it");
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
