//! The BPF object, and its entry points for packets (`sockets` has the entry points for system calls). Each entry point
//! except `tc_announce` maps the outcome of a packet to the verdict of its hook, and counts the outcome. XDP does not
//! count packets that it passes on, because tc counts them. `datapath` decides about packets, `sockets` about system
//! calls; the library in the same crate computes everything that needs no kernel.
#![cfg_attr(target_arch = "bpf", no_std)]
#![cfg_attr(target_arch = "bpf", no_main)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod datapath;
#[cfg(target_arch = "bpf")]
mod sockets;

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{
        bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action},
        macros::{classifier, xdp},
        programs::{TcContext, XdpContext},
    };
    use lb_common::{EventHook, Outcome, Verdict};
    use lb_ebpf::parse::Layer;

    use crate::datapath::{
        Hook, Skb,
        announce::{self, Done},
        events, fast_path, link, process, stats,
        xdp::{self, Xdp},
    };

    /// Packets that enter the node through an Ethernet device: from a pod, or from the wire.
    #[classifier]
    fn tc_ingress(ctx: TcContext) -> i32 {
        run(ctx, Hook::Ingress, Layer::Ethernet)
    }

    /// Packets that leave the node through an Ethernet device: to a pod, or to the wire.
    #[classifier]
    fn tc_egress(ctx: TcContext) -> i32 {
        run(ctx, Hook::Egress, Layer::Ethernet)
    }

    /// Like `tc_ingress`, for devices without link-layer header.
    #[classifier]
    fn tc_ingress_l3(ctx: TcContext) -> i32 {
        run(ctx, Hook::Ingress, Layer::Ip)
    }

    /// Like `tc_egress`, for devices without link-layer header.
    #[classifier]
    fn tc_egress_l3(ctx: TcContext) -> i32 {
        run(ctx, Hook::Egress, Layer::Ip)
    }

    /// Packets that leave by the catch device, because no program has translated them so far. This program translates
    /// packets of caught flows. It makes all packets that it passes on, translated or not, enter the node again through
    /// the catch device, where `tc_ingress` creates flows. It drops a packet that came in through the catch device and
    /// leaves by it again.
    #[classifier]
    fn tc_catch(ctx: TcContext) -> i32 {
        let mut skb = Skb::new(TcContext::new(ctx.skb.skb), Layer::Ethernet);
        if skb.came_from_here() {
            const { assert!(matches!(Outcome::Untranslated.verdict(), Verdict::Drop)) };
            stats::count(Outcome::Untranslated);
            events::dropped(&skb.context(), Outcome::Untranslated, EventHook::Egress);
            return TC_ACT_SHOT as i32;
        }
        match run(ctx, Hook::Catch, Layer::Ethernet) {
            TC_ACT_UNSPEC if skb.turn_round().is_ok() => TC_ACT_REDIRECT as i32,
            action => action,
        }
    }

    /// Packets that enter the node through a device on whose network the node announces virtual addresses. Runs before
    /// `tc_ingress`, which counts the packets that this program passes on.
    #[classifier]
    fn tc_announce(ctx: TcContext) -> i32 {
        match announce::process(&mut Skb::new(ctx, Layer::Ethernet)) {
            Done::Nothing => TC_ACT_UNSPEC,
            Done::Sent => TC_ACT_REDIRECT as i32,
            Done::Failed => TC_ACT_SHOT as i32,
        }
    }

    #[inline(always)]
    fn run(ctx: TcContext, hook: Hook, layer: Layer) -> i32 {
        let mut skb = Skb::new(ctx, layer);
        if fast_path::has_no_service_by_filter(&skb, hook) {
            const { assert!(matches!(Outcome::NoService.verdict(), Verdict::Pass)) };
            stats::count(Outcome::NoService);
            return TC_ACT_UNSPEC;
        }
        if hook == Hook::Ingress && !link::takes(&skb) {
            const { assert!(matches!(Outcome::OtherHost.verdict(), Verdict::Pass)) };
            stats::count(Outcome::OtherHost);
            return TC_ACT_UNSPEC;
        }
        let Some(outcome) = process(&mut skb, hook) else { return TC_ACT_UNSPEC };
        let outcome = send(&mut skb, outcome);
        stats::count(outcome);
        match outcome.verdict() {
            // The packet goes to the next program on the hook, then to the stack or, at egress, to the device.
            Verdict::Pass => TC_ACT_UNSPEC,
            Verdict::Bounce | Verdict::Route => TC_ACT_REDIRECT as i32,
            Verdict::Drop => {
                events::dropped(&skb.context(), outcome, hook.event_hook());
                TC_ACT_SHOT as i32
            }
            // (tcx does not support TC_ACT_STOLEN, which would describe this verdict better.)
            Verdict::Hold => TC_ACT_SHOT as i32,
        }
    }

    /// Redirects the packet if the verdict is `Bounce` or `Route`. Returns `outcome`, or `RewriteFailed` on failure.
    #[inline(always)]
    fn send(skb: &mut Skb, outcome: Outcome) -> Outcome {
        match outcome.verdict() {
            Verdict::Bounce if skb.bounce().is_err() => Outcome::RewriteFailed,
            Verdict::Route if skb.route().is_err() => Outcome::RewriteFailed,
            Verdict::Bounce | Verdict::Route | Verdict::Pass | Verdict::Drop | Verdict::Hold => outcome,
        }
    }

    /// Decides about frames from the wire, before there is an skb.
    #[xdp(frags)]
    fn xdp_native(ctx: XdpContext) -> u32 {
        run_xdp(ctx)
    }

    /// As `xdp_native`, for devices where the kernel runs XDP on skbs. The program does not declare support for frames
    /// in several buffers (`frags`): if it did, Linux up to at least 6.18 would give tc a copy of the packet with a
    /// `mac_len` of 0 (`skb_pp_cow_data`).
    #[xdp]
    fn xdp_generic(ctx: XdpContext) -> u32 {
        run_xdp(ctx)
    }

    #[inline(always)]
    fn run_xdp(ctx: XdpContext) -> u32 {
        let mut xdp = Xdp::new(ctx);
        let Some(outcome) = xdp::process(&mut xdp) else { return xdp.send() };
        match outcome.verdict() {
            // tc handles and counts the packet.
            Verdict::Pass | Verdict::Bounce | Verdict::Hold => xdp_action::XDP_PASS,
            Verdict::Route => {
                stats::count(outcome);
                xdp.send()
            }
            Verdict::Drop => {
                stats::count(outcome);
                events::dropped(&xdp.context(), outcome, EventHook::Xdp);
                xdp_action::XDP_DROP
            }
        }
    }

    /// The licence of the BPF object. The kernel lets a program call some helpers only if the program's licence is
    /// compatible with the GPL, as `Dual MIT/GPL` is. (The sources are under MIT or Apache-2.0.)
    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}

#[cfg(not(target_arch = "bpf"))]
#[expect(clippy::print_stderr, reason = "there is nothing else to do on a host")]
fn main() {
    eprintln!("this is a BPF object: build it with `cargo xtask build-ebpf`");
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    // No code panics; if some did, the verifier would reject this endless loop.
    loop {}
}
