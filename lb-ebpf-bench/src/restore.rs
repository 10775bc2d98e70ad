//! Gives every repetition of a test run a fresh packet: writes the headers of the next flow, then tail-calls the
//! measured program. To find the overhead, the benchmark measures in the same way a program that returns at once.
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
    use lb_ebpf_bench::{RESTORED_V4, RESTORED_V6, Template, Variation, bytes::Bytes, mixed};

    /// The packet to restore. The benchmark writes it before it loads the object.
    #[unsafe(no_mangle)]
    static TEMPLATE: Template =
        Template { bytes: [0; 80], is_v6: 0, is_reply: 0, mask: 0, first: 0, is_mixed: 0, zero: 0 };

    /// Number of packets so far.
    #[unsafe(no_mangle)]
    static mut COUNT: u32 = 0;

    /// The program that is measured, at index 0.
    #[btf_map]
    static MEASURED: ProgramArray<1> = ProgramArray::new();

    #[classifier]
    fn tc_restore(ctx: TcContext) -> i32 {
        run_measured(&ctx, ctx.data(), ctx.data_end());
        TC_ACT_STOLEN as i32
    }

    #[xdp(frags)]
    fn xdp_restore(ctx: XdpContext) -> u32 {
        run_measured(&ctx, ctx.data(), ctx.data_end());
        XDP_ABORTED
    }

    /// Restores the packet and tail-calls the measured program. Returns only if the packet is too short or no program
    /// is set.
    #[inline(always)]
    fn run_measured(ctx: &impl EbpfContext, start: usize, end: usize) {
        if restore(start, end).is_some() {
            // SAFETY: no value needs to be dropped.
            unsafe { MEASURED.tail_call(ctx, 0) };
        }
    }

    #[inline(always)]
    fn restore(start: usize, end: usize) -> Option<()> {
        let template = &raw const TEMPLATE;
        // SAFETY: the fields are never written while the program is loaded. The program uses `read_volatile`, because
        // the compiler would otherwise take the fields for constants.
        let (is_v6, is_reply, mask, first, is_mixed) = unsafe {
            (
                (&raw const (*template).is_v6).read_volatile() != 0,
                (&raw const (*template).is_reply).read_volatile() != 0,
                (&raw const (*template).mask).read_volatile(),
                (&raw const (*template).first).read_volatile(),
                (&raw const (*template).is_mixed).read_volatile() != 0,
            )
        };
        // SAFETY: all loads below are within the 80 bytes of the template.
        let from = unsafe { Bytes::of(&raw const (*template).bytes) };
        let number = count() & mask;
        let variation = Variation::of(first + if is_mixed { mixed(number, mask) } else { number });
        if is_v6 {
            // SAFETY: all stores below are within `RESTORED_V6` bytes.
            let to = unsafe { Bytes::of_packet(start, end, RESTORED_V6)? };
            ethernet(from, to);
            v6(from, to, variation.address, is_reply);
            transport::<54, 58, 62, 66, 70>(from, to, variation.port, is_reply);
        } else {
            // SAFETY: all stores below are within `RESTORED_V4` bytes.
            let to = unsafe { Bytes::of_packet(start, end, RESTORED_V4)? };
            ethernet(from, to);
            v4(from, to, variation.address, is_reply);
            transport::<34, 38, 42, 46, 50>(from, to, variation.port, is_reply);
        }
        Some(())
    }

    /// Returns the number of packets so far, and counts this one.
    #[inline(always)]
    fn count() -> u32 {
        // SAFETY: the benchmark runs each loaded copy of the program on one CPU at a time.
        unsafe {
            let count = (&raw const COUNT).read();
            (&raw mut COUNT).write(count.wrapping_add(1));
            count
        }
    }

    // Each store is as wide as the loads of the measured programs, which may load two fields at once. A CPU stalls on a
    // load of bytes that it has just stored in two parts, but not on a packet that a device has written.

    #[inline(always)]
    fn ethernet(from: Bytes, to: Bytes) {
        to.store_32::<0>(from.load_32::<0>());
        to.store_16::<4>(from.load_16::<4>());
        to.store_32::<6>(from.load_32::<6>());
        to.store_16::<10>(from.load_16::<10>());
        to.store_16::<12>(from.load_16::<12>());
    }

    #[inline(always)]
    fn v4(from: Bytes, to: Bytes, client: u32, is_reply: bool) {
        let client = u64::from(client) << if is_reply { 32 } else { 0 };
        to.store_32::<14>(from.load_32::<14>());
        to.store_32::<18>(from.load_32::<18>());
        to.store_32::<22>(from.load_32::<22>());
        to.store_64::<26>(from.load_64::<26>() ^ client);
    }

    #[inline(always)]
    fn v6(from: Bytes, to: Bytes, client: u32, is_reply: bool) {
        let client = u64::from(client) << 32;
        let (source, destination) = if is_reply { (0, client) } else { (client, 0) };
        to.store_32::<14>(from.load_32::<14>());
        to.store_32::<18>(from.load_32::<18>());
        to.store_64::<22>(from.load_64::<22>());
        to.store_64::<30>(from.load_64::<30>() ^ source);
        to.store_64::<38>(from.load_64::<38>());
        to.store_64::<46>(from.load_64::<46>() ^ destination);
    }

    /// Writes the 20 bytes from the transport header on, for every protocol. The parameters are the offsets of the five
    /// words.
    #[inline(always)]
    fn transport<const A: usize, const B: usize, const C: usize, const D: usize, const E: usize>(
        from: Bytes,
        to: Bytes,
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
#[expect(clippy::print_stderr, reason = "on a host the binary only explains itself")]
fn main() {
    eprintln!("this is a BPF object: `cargo xtask bench packets` builds and loads it");
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
