//! Flows whose backend gets a PROXY protocol header: the programs send the header, and shift the sequence numbers of
//! the client's bytes. [`rules::proxy_protocol`](lb_ebpf::rules::proxy_protocol) decides what happens to each segment.
//!
//! Segments are changed before their addresses are translated. The entries of the flow record the client's sequence
//! numbers, without the shift.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_csum_diff, bpf_loop},
};
use lb_common::{
    Outcome,
    checksum::Sum,
    conntrack::{Flow, Segment, seen, tcp_flags},
    protocol,
};
use lb_ebpf::{
    headers::pseudo_header,
    parse::{
        Body, Packet, Part,
        bounds::clamped,
        frame::{Frame as _, lengths},
    },
    proxy_protocol::{self as bytes, HeaderChange, LONGEST, Options, TCP_LONGEST, TcpBytes},
    rules::proxy_protocol::{self as rules, ToBackend, ToClient},
};

use crate::datapath::{
    context::Hook,
    early_return::{number_of, rewritten},
    flow::conntrack,
    scratch::scratch,
    skb::{ChecksumField, Skb},
};

/// Whether the flow with this entry is lost: see [`rules::is_lost`].
#[inline(never)]
pub(crate) fn is_lost(flow: &Flow) -> bool {
    rules::is_lost(flow, || conntrack::lookup(&flow.to.reversed()).is_some())
}

/// Changes a packet of a flow with a PROXY protocol header, as [`proxy_plan`] decides.
#[inline(always)]
pub(crate) fn change(skb: &mut Skb, packet: &mut Packet, flow: &mut Flow, hook: Hook) -> Result<(), Outcome> {
    if packet.body != Body::Tcp {
        return Ok(());
    }
    rewritten(proxy_change(skb.ctx.skb.skb, packet, flow, u32::from(hook.is_egress())))
}

/// [`change`] for a TCP segment, as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn proxy_change(raw: *mut __sk_buff, packet: *mut Packet, flow: *mut Flow, is_egress: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(packet), Some(flow)) = (unsafe { (packet.as_mut(), flow.as_mut()) }) else { return 0 };
    number_of(change_segment(&mut Skb::new_unknown(raw), packet, flow, is_egress != 0))
}

#[inline(always)]
fn change_segment(
    skb: &mut Skb,
    packet: &mut Packet,
    flow: &mut Flow,
    is_egress: bool,
) -> Result<(), Outcome> {
    let header = bytes::length(packet.tuple.source.is_v4());
    let plan = proxy_plan(&raw mut packet.segment, &raw mut *flow, header);
    if plan & COPY != 0 && !is_egress {
        skb.repeat();
    }
    // Only an unfragmented segment can lose its payload or get the header.
    if plan & LOST != 0 || plan & CUT != 0 && packet.fragment.part != Part::Whole {
        return Err(Outcome::RewriteFailed);
    }
    let by = if plan & CHANGE == HeaderChange::SetAck as u32 { flow.last_ack } else { header };
    change_tcp(skb, packet, plan & CHANGE, by)?;
    if plan & CUT != 0 {
        replace(skb, packet, if plan & HEADER != 0 { header } else { 0 })?;
    }
    Ok(())
}

/// Bits of a plan: the [`HeaderChange`] of the TCP header.
const CHANGE: u32 = 0xff;
/// Bit of a plan: the segment loses its payload.
const CUT: u32 = 0x100;
/// Bit of a plan, together with [`CUT`]: the PROXY protocol header becomes the payload.
const HEADER: u32 = 0x200;
/// Bit of a plan: the client's bytes go to the backend in a copy of the segment, which enters the node again behind
/// this one. (At egress the copy would come first, so there the client has to retransmit its bytes.)
const COPY: u32 = 0x400;
/// Bit of a plan: the reverse entry of the flow is lost.
const LOST: u32 = 0x800;

/// Plans what happens to a segment of the flow with this entry, and records the progress in the entry; `header` is the
/// length of the PROXY protocol header. (A global function: the verifier checks it once, and assumes that the result
/// may be any number.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn proxy_plan(segment: *mut Segment, flow: *mut Flow, header: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(segment), Some(flow)) = (unsafe { (segment.as_mut(), flow.as_mut()) }) else { return LOST };
    if flow.is_reply() {
        return plan_to_client(segment, flow, header);
    }
    match conntrack::lookup(&flow.to.reversed()) {
        Some(reply) => plan_to_backend(segment, flow, reply),
        None => LOST,
    }
}

#[inline(always)]
fn plan_to_backend(segment: &mut Segment, flow: &mut Flow, reply: &Flow) -> u32 {
    match rules::to_backend(segment, flow, reply) {
        ToBackend::Unchanged => HeaderChange::Nothing as u32,
        ToBackend::Shift => HeaderChange::ShiftSeq as u32,
        ToBackend::Bare => {
            let cut = if segment.payload == 0 { 0 } else { CUT };
            segment.payload = 0;
            HeaderChange::RemoveFastOpen as u32 | cut
        }
        ToBackend::Header => {
            flow.seen |= seen::PROXY_HEADER;
            let mut plan = HeaderChange::Carry as u32 | CUT | HEADER;
            if segment.end() != segment.seq {
                // Sets the recorded sequence number back, so that the copy does not count as a retransmission when it
                // enters the node.
                flow.next_seq = segment.seq;
                plan |= COPY;
            }
            segment.payload = 0;
            segment.flags &= !tcp_flags::FIN;
            plan
        }
    }
}

#[inline(always)]
fn plan_to_client(segment: &mut Segment, flow: &mut Flow, header: u32) -> u32 {
    let change = match rules::to_client(segment, flow, header) {
        ToClient::Unchanged => HeaderChange::Nothing,
        ToClient::Accept => HeaderChange::NarrowWindow,
        ToClient::AcknowledgeSyn => {
            segment.ack = flow.last_ack;
            HeaderChange::SetAck
        }
        ToClient::Shift => {
            flow.seen |= seen::PROXY_HEADER;
            segment.ack = segment.ack.wrapping_sub(header);
            HeaderChange::ShiftAck
        }
    };
    change as u32
}

/// Loads the TCP header into `SCRATCH`; returns its length.
#[inline(always)]
fn load(skb: &Skb, packet: &Packet) -> Result<u32, Outcome> {
    let l4 = packet.headers.l4;
    let [data_offset, _] = *skb.header::<[u8; 2]>(l4 + 12)?;
    let length = clamped::<{ lengths::TCP }, TCP_LONGEST>(u32::from(data_offset >> 4) * 4);
    let tcp = scratch()?.tcp();
    *tcp = [0; size_of::<TcpBytes>()];
    skb.load_bytes(l4, tcp, length)?;
    Ok(length)
}

/// Changes the TCP header, but not its length. The update of the TCP checksum compensates the change, so the sum over
/// the frame stays the same.
#[inline(never)]
fn change_tcp(skb: &mut Skb, packet: &Packet, change: u32, by: u32) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let length = load(skb, packet)?;
    let delta = proxy_change_tcp(change, length, by);
    skb.store_uncounted(l4, scratch()?.tcp(), length)?;
    skb.update_checksum(ChecksumField::of(protocol::TCP, l4), delta as u16, false)
}

/// Changes the TCP header of `length` bytes in `SCRATCH`; returns the change of the sum over the header. (A global
/// function: the verifier checks it once, for all arguments and callers.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn proxy_change_tcp(change: u32, length: u32, by: u32) -> u32 {
    let Ok(scratch) = scratch() else { return 0 };
    let before = sum(scratch.tcp());
    bytes::change(scratch.tcp(), change, by);
    *scratch.options() = Options::new(change, length, by);
    // SAFETY: `step` has the signature that the kernel calls it with, and uses no context.
    unsafe { bpf_loop(Options::STEPS, step as *mut _, core::ptr::null_mut(), 0) };
    Sum::ZERO.sub_word(before).add_word(sum(scratch.tcp())).fold().into()
}

/// One step of the change of options; returns 1 to end the loop. The kernel calls this function, so the verifier checks
/// it once.
extern "C" fn step(_index: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    i64::from(scratch.options().step(scratch.tcp()))
}

/// Cuts the payload off the segment. The first `payload` bytes of the PROXY protocol header take its place.
#[inline(never)]
fn replace(skb: &mut Skb, packet: &mut Packet, payload: u32) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let length = load(skb, packet)?;
    let scratch = scratch()?;
    let (tcp, header) = (scratch.tcp(), scratch.proxy_header());
    bytes::write(header, &packet.tuple);
    bytes::clear_checksum(tcp);
    set_length(skb, packet, l4 + length + payload)?;
    skb.resize(l4 + length + payload)?;
    skb.store_bytes(l4, tcp, length)?;
    let mut total = Sum::ZERO.add_word(sum(tcp));
    if payload != 0 {
        skb.store_bytes(l4 + length, header, clamped::<{ bytes::LENGTH_V4 }, { bytes::LENGTH_V6 }>(payload))?;
        total = total.add_word(sum::<LONGEST>(header));
    }
    // Adds the pseudo header in a second step: if the device is to compute the checksum, the field must hold only the
    // sum over the pseudo header.
    let (checksum, total) = (ChecksumField::of(protocol::TCP, l4), total.fold());
    skb.update_checksum(checksum, total, false)?;
    skb.update_frame_sum(!total);
    let pseudo = pseudo_header(&packet.tuple, (length + payload) as u16).fold();
    skb.update_checksum(checksum, pseudo, true)
}

/// Sets the length of the IP packet, so that the packet ends at `end` in the frame.
#[inline(always)]
fn set_length(skb: &mut Skb, packet: &mut Packet, end: u32) -> Result<(), Outcome> {
    let l3 = packet.headers.l3;
    let before = packet.headers.length(skb)?;
    let after = end - l3;
    packet.length = after;
    if packet.headers.is_v4 {
        let delta = Sum::ZERO.sub_word((before as u16).to_be()).add_word((after as u16).to_be()).fold();
        skb.update_ip_checksum(l3 + 10, delta)?;
        skb.store(l3 + 2, &(after as u16).to_be_bytes())
    } else {
        skb.store_summed(l3 + 4, &((after - lengths::IPV6) as u16).to_be_bytes())
    }
}

/// The sum over bytes, in network byte order.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "both halves are kept")]
fn sum<const N: usize>(bytes: &mut [u8; N]) -> u16 {
    const { assert!(N.is_multiple_of(4)) };
    // SAFETY: the array has `N` bytes, a multiple of 4, as the helper demands. The helper reads nothing at the null
    // pointer, for which the length is 0.
    let sum =
        unsafe { bpf_csum_diff(core::ptr::null_mut(), 0, bytes.as_mut_ptr().cast(), N as u32, 0) } as u32;
    Sum::ZERO.add_word(sum as u16).add_word((sum >> 16) as u16).fold()
}
