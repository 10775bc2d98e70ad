//! The packet buffer of the tc hooks.

use core::{arch::asm, mem::offset_of};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_redir_neigh,
    },
    helpers::generated::{
        bpf_clone_redirect, bpf_csum_update, bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer,
        bpf_skb_change_head, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes, bpf_skb_vlan_pop,
    },
    programs::TcContext,
};
use lb_common::{Outcome, protocol};
use lb_ebpf::{
    parse::{
        Body, Layer, Packet,
        bounds::bounded,
        frame::{Frame, Header, MAX_OFFSET, lengths},
    },
    rewrite::FrameMut,
    rules::forwarding::is_catch,
};

use super::{checksum::Checksum, context::HookContext, device, scratch::scratch};

/// The `sk_buff` of a packet, and the kind of its device.
pub(crate) struct Skb {
    pub(super) ctx: TcContext,
    pub(super) layer: Layer,
    /// How the packet leaves if it bypasses the stack.
    pub(super) exit: Exit,
}

/// How a packet bypasses the stack.
#[derive(Clone, Copy)]
pub(super) struct Exit {
    /// Index of the network device.
    device: u32,
    way: ExitWay,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum ExitWay {
    Neighbour,
    Device,
    Peer,
}

impl Exit {
    /// An exit through `device` to the next hop that the last route lookup has found; the kernel looks up the MAC
    /// address of that next hop.
    #[inline(always)]
    pub(super) const fn neighbour(device: u32) -> Self {
        Self { device, way: ExitWay::Neighbour }
    }

    /// An exit through the device, for a packet that already has its MAC addresses.
    #[inline(always)]
    pub(super) const fn device(device: u32) -> Self {
        Self { device, way: ExitWay::Device }
    }

    /// An exit into the other end of this veth or netkit device, skipping the device itself.
    #[inline(always)]
    pub(super) const fn peer_of(device: u32) -> Self {
        Self { device, way: ExitWay::Peer }
    }
}

/// Number of bytes at the start of the frame that hold the headers of nearly all packets, quoted headers included.
const HEADERS: u32 = 256;

impl Frame for Skb {
    #[inline(always)]
    fn length(&self) -> u32 {
        self.ctx.len()
    }

    #[inline(always)]
    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome> {
        // SAFETY: `bounds` has checked that the whole header lies between `data` and `data_end`, which the kernel
        // guarantees to be readable until a helper moves the packet. A function that calls such a helper takes `&mut
        // self`, which this borrow excludes. A `Header` has alignment 1 and is valid for every bit pattern.
        Ok(unsafe { &*(self.bounds::<T>(offset)? as *const T) })
    }
}

impl FrameMut for Skb {
    #[inline(always)]
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome> {
        // SAFETY: `bounds` has checked that the whole header lies between `data` and `data_end`. A program that
        // writes there begins with a prologue by which the kernel makes the linear part writable and unshared
        // (`bpf_unclone_prologue`). The borrow is mutable, so no other header is borrowed.
        Ok(unsafe { &mut *(self.bounds::<T>(offset)? as *mut T) })
    }
}

impl Skb {
    /// The address of a header that lies within the linear part.
    #[inline(always)]
    fn bounds<T: Header>(&self, offset: u32) -> Result<usize, Outcome> {
        const { assert!(align_of::<T>() == 1) };
        if offset > MAX_OFFSET {
            return Err(Outcome::Malformed);
        }
        let start = self.bound::<{ offset_of!(__sk_buff, data) }>() + bounded(offset) as usize;
        if start + size_of::<T>() > self.bound::<{ offset_of!(__sk_buff, data_end) }>() {
            return Err(Outcome::Malformed);
        }
        Ok(start)
    }

    /// Start or end of the linear part: the field of the context at `OFFSET`.
    ///
    /// LLVM treats the field as 32 bits wide and copies it as such. The kernel treats the field as a pointer of 64 bits
    /// and rejects copies of half a pointer. So one instruction of assembly loads the field.
    #[inline(always)]
    fn bound<const OFFSET: usize>(&self) -> usize {
        let bound: usize;
        // SAFETY: a load within the context, which is valid for the whole run of the program.
        unsafe {
            asm!(
                "{bound} = *(u32 *)({skb} + {offset})",
                bound = out(reg) bound,
                skb = in(reg) self.ctx.skb.skb,
                offset = const OFFSET,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        bound
    }

    #[inline(always)]
    pub(crate) const fn new(ctx: TcContext, layer: Layer) -> Self {
        Self { ctx, layer, exit: Exit::neighbour(0) }
    }

    /// The buffer of a context, for callers that do not need the kind of the device.
    #[inline(always)]
    pub(super) fn new_unknown(raw: *mut __sk_buff) -> Self {
        Self::new(TcContext::new(raw), Layer::Ip)
    }

    /// Pulls the headers into the linear part, unless they are there. If the kernel cannot pull them, nothing changes.
    #[inline(always)]
    pub(super) fn pull_headers(&mut self) {
        let wanted = self.length().min(HEADERS);
        if self.ctx.data_end() - self.ctx.data() < wanted as usize {
            // `pull_data` may fail: every read of a header checks that the header is there.
            let _ = self.ctx.pull_data(wanted);
        }
    }

    /// Writes `value` at `offset`, for a field whose checksums are updated separately.
    #[inline(always)]
    pub(super) fn store<T: Header>(&mut self, offset: u32, value: &T) -> Result<(), Outcome> {
        self.ctx.store(offset as usize, value, 0).map_err(|_| Outcome::RewriteFailed)
    }

    /// Writes `value` at `offset`, and updates the checksum that the device may have computed over everything after the
    /// Ethernet header (`CHECKSUM_COMPLETE`).
    #[inline(always)]
    pub(super) fn store_summed<T: Header>(&mut self, offset: u32, value: &T) -> Result<(), Outcome> {
        self.ctx
            .store(offset as usize, value, u64::from(BPF_F_RECOMPUTE_CSUM))
            .map_err(|_| Outcome::RewriteFailed)
    }

    /// Like [`Self::store_summed`], for the first `length` bytes of `bytes`.
    #[inline(always)]
    pub(super) fn store_bytes<const N: usize>(
        &mut self,
        offset: u32,
        bytes: &[u8; N],
        length: u32,
    ) -> Result<(), Outcome> {
        let length = length.min(N as u32);
        // SAFETY: `bytes` has at least `length` bytes; the kernel checks `offset`. Borrowed headers are excluded by
        // `&mut self`.
        let result = unsafe {
            let from = bytes.as_ptr().cast_mut().cast();
            bpf_skb_store_bytes(self.ctx.skb.skb, offset, from, length, u64::from(BPF_F_RECOMPUTE_CSUM))
        };
        if result == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
    }

    /// Like [`Self::store_bytes`], for bytes whose checksum is updated separately.
    #[inline(always)]
    pub(super) fn store_uncounted<const N: usize>(
        &mut self,
        offset: u32,
        bytes: &[u8; N],
        length: u32,
    ) -> Result<(), Outcome> {
        let length = length.min(N as u32);
        // SAFETY: as in `store_bytes`.
        let result = unsafe {
            bpf_skb_store_bytes(self.ctx.skb.skb, offset, bytes.as_ptr().cast_mut().cast(), length, 0)
        };
        if result == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
    }

    /// Overwrites the beginning of the packet with a frame. The checksum that the device may have computed
    /// (`CHECKSUM_COMPLETE`) does not cover the Ethernet header, so only the write of the bytes after that header
    /// updates the checksum.
    #[inline(always)]
    pub(super) fn store_frame<const N: usize>(&mut self, frame: &[u8; N]) -> Result<(), Outcome> {
        const { assert!(N > lengths::ETHERNET as usize) };
        let (frame, link) = (frame.as_ptr().cast_mut(), lengths::ETHERNET);
        let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
        // SAFETY: the frame has `N` bytes; the kernel checks the length of the packet. Borrowed headers are excluded by
        // `&mut self`.
        let failed = unsafe {
            let rest = frame.add(link as usize).cast();
            bpf_skb_store_bytes(self.ctx.skb.skb, 0, frame.cast(), link, 0)
                | bpf_skb_store_bytes(self.ctx.skb.skb, link, rest, N as u32 - link, flags)
        };
        if failed == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
    }

    /// Copies `length` bytes, beginning at `offset`, to the start of `bytes`.
    #[inline(always)]
    pub(super) fn load_bytes(&self, offset: u32, bytes: &mut [u8], length: u32) -> Result<(), Outcome> {
        // SAFETY: the helper writes `length` bytes to the slice; the verifier checks `length` against the memory of the
        // slice, and the kernel checks `offset`.
        let result =
            unsafe { bpf_skb_load_bytes(self.ctx.skb.skb.cast(), offset, bytes.as_mut_ptr().cast(), length) };
        if result == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
    }

    /// Updates the IPv4 header checksum at `offset` for a change that adds `delta` to the one's complement sum of the
    /// header.
    #[inline(always)]
    pub(super) fn update_ip_checksum(&mut self, offset: u32, delta: u16) -> Result<(), Outcome> {
        self.ctx.l3_csum_replace(offset as usize, 0, u64::from(delta), 0).map_err(|_| Outcome::RewriteFailed)
    }

    /// Updates a transport checksum for a change that adds `delta` to its one's complement sum. `pseudo` marks a change
    /// of the pseudo header: the kernel applies only such a change to an offloaded checksum (`CHECKSUM_PARTIAL`), which
    /// covers only the pseudo header so far.
    #[inline(always)]
    pub(super) fn update_checksum(
        &mut self,
        checksum: ChecksumField,
        delta: u16,
        pseudo: bool,
    ) -> Result<(), Outcome> {
        let flags = checksum.flags | if pseudo { u64::from(BPF_F_PSEUDO_HDR) } else { 0 };
        self.ctx
            .l4_csum_replace(checksum.offset as usize, 0, u64::from(delta), flags)
            .map_err(|_| Outcome::RewriteFailed)
    }

    /// The state of the packet's checksums, as far as the kernel shows it.
    #[inline(always)]
    pub(super) fn checksum(&self) -> Checksum {
        Checksum::of(self.ctx.skb.skb)
    }

    /// Adds `delta` to the checksum that the device may have computed over everything after the Ethernet header
    /// (`CHECKSUM_COMPLETE`): for a change that no checksum in the packet compensates.
    #[inline(always)]
    pub(super) fn update_frame_sum(&mut self, delta: u16) {
        if self.checksum().may_have_frame_sum() {
            // SAFETY: the context is that of this program, and the helper does not move packet data. An error of the
            // helper only means that the device has computed no such checksum, so there is nothing to update.
            let _result = unsafe { bpf_csum_update(self.ctx.skb.skb, u32::from(delta)) };
        }
    }

    /// Cuts or extends the frame to `length` bytes.
    #[inline(always)]
    pub(super) fn resize(&mut self, length: u32) -> Result<(), Outcome> {
        // SAFETY: the context is that of this program. The call may move the packet; `&mut self` excludes borrowed
        // headers.
        let result = unsafe { bpf_skb_change_tail(self.ctx.skb.skb, length, 0) };
        if result == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
    }

    /// Inserts `bytes` bytes between the Ethernet header and the network header; if `bytes` is negative, removes that
    /// many bytes from there. `flags` are `BPF_F_ADJ_ROOM_*`.
    #[inline(always)]
    pub(super) fn adjust_room(&mut self, bytes: i32, flags: u32) -> Result<(), Outcome> {
        let adjusted = self.ctx.adjust_room(bytes, BPF_ADJ_ROOM_MAC, u64::from(flags));
        adjusted.map_err(|_| Outcome::RewriteFailed)
    }

    /// Sends the packet back through the device that it came from; at the catch device, to the stack.
    #[inline(always)]
    pub(crate) fn bounce(&mut self) -> Result<(), Outcome> {
        if self.layer == Layer::Ethernet {
            let [to, from] = *self.header::<[[u8; 6]; 2]>(0)?;
            self.store(0, &[from, to])?;
        }
        if is_catch(&device::info(self.context().device)) {
            return self.turn_round();
        }
        self.send_back()
    }

    /// Sends the frame, which already has its MAC addresses, through the device that the packet came from.
    #[inline(always)]
    pub(super) fn send_back(&self) -> Result<(), Outcome> {
        // SAFETY: the helper takes two numbers, and returns an error for a wrong one.
        let action = unsafe { bpf_redirect(self.context().device, 0) };
        if action == i64::from(aya_ebpf::bindings::TC_ACT_REDIRECT) {
            Ok(())
        } else {
            Err(Outcome::RewriteFailed)
        }
    }

    /// Makes a copy of the packet enter the node again, after this packet, through the device on whose hook this
    /// program runs. If the kernel has no memory for the copy, nothing happens.
    #[inline(always)]
    pub(super) fn repeat(&mut self) {
        // SAFETY: the context is that of this program. The call may move the packet; `&mut self` excludes borrowed
        // headers.
        let _result =
            unsafe { bpf_clone_redirect(self.ctx.skb.skb, self.context().device, u64::from(BPF_F_INGRESS)) };
    }

    /// Makes the packet enter the node through the device on whose hook this program runs.
    #[inline(always)]
    pub(crate) fn turn_round(&mut self) -> Result<(), Outcome> {
        // SAFETY: the helper takes two numbers, and returns an error for a wrong one.
        let action = unsafe { bpf_redirect(self.context().device, u64::from(BPF_F_INGRESS)) };
        if action == i64::from(aya_ebpf::bindings::TC_ACT_REDIRECT) {
            Ok(())
        } else {
            Err(Outcome::RewriteFailed)
        }
    }

    /// Whether the packet came into the node through the device that it leaves by.
    #[inline(always)]
    pub(crate) fn came_from_here(&self) -> bool {
        // SAFETY: the context is valid for the whole run of the program.
        unsafe { (*self.ctx.skb.skb).ingress_ifindex == (*self.ctx.skb.skb).ifindex }
    }

    /// Sends the packet through its [`Exit`], bypassing the stack.
    #[inline(always)]
    pub(crate) fn route(&mut self) -> Result<(), Outcome> {
        self.frame_for_others()?;
        let Exit { device, way } = self.exit;
        // SAFETY: the helpers take numbers, and return errors for wrong ones. `bpf_redirect_neigh` copies the address
        // of the next hop, which has the size that the call names. (Without an address, the helper would look up a
        // route itself, by the translated addresses and without ports, and might find another gateway or no gateway.)
        let action = unsafe {
            match way {
                ExitWay::Neighbour => {
                    let mut next_hop = scratch()?.route().next_hop();
                    bpf_redirect_neigh(device, &raw mut next_hop, size_of::<bpf_redir_neigh>() as i32, 0)
                }
                ExitWay::Device => bpf_redirect(device, 0),
                ExitWay::Peer => bpf_redirect_peer(device, 0),
            }
        };
        if action == i64::from(aya_ebpf::bindings::TC_ACT_REDIRECT) {
            Ok(())
        } else {
            Err(Outcome::RewriteFailed)
        }
    }

    /// Size in bytes of the payload of each segment into which the device will split this packet; `None` if the packet
    /// stays whole.
    #[inline(always)]
    pub(super) fn segment_size(&self) -> Option<u32> {
        // SAFETY: the context is valid for the whole run of the program.
        let size = unsafe { (*self.ctx.skb.skb).gso_size };
        (size != 0).then_some(size)
    }

    /// Size in bytes of the IP packet, or of the largest segment into which the device will split it.
    #[inline(always)]
    pub(super) fn largest(&self, packet: &Packet) -> u32 {
        let whole = self.length().saturating_sub(packet.headers.l3);
        let Some(payload) = self.segment_size() else { return whole };
        let headers = match packet.body {
            Body::Tcp => whole.saturating_sub(packet.segment.payload),
            _ => packet.headers.l4 - packet.headers.l3 + 8,
        };
        headers + payload
    }

    /// Whether the packet has a VLAN tag that the device or the kernel has moved out of the frame into the `sk_buff`.
    /// The tag may name no VLAN and only have a priority.
    #[inline(always)]
    pub(super) fn is_tagged(&self) -> bool {
        // SAFETY: the context is valid for the whole run of the program.
        unsafe { (*self.ctx.skb.skb).vlan_present != 0 }
    }

    /// The EtherType, without VLAN tags that the device or the kernel has taken out of the frame.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the kernel keeps 16 bits in this field")]
    pub(super) fn protocol(&self) -> u16 {
        // SAFETY: the context is valid for the whole run of the program.
        u16::from_be(unsafe { (*self.ctx.skb.skb).protocol } as u16)
    }

    /// Prepares the frame for other devices. If the frame has no Ethernet header, the function makes room for one,
    /// which the kernel writes. Otherwise it removes the VLAN tag of the network that the frame came from, if there is
    /// one. (If the next network is a VLAN, its device adds the tag.)
    #[inline(always)]
    fn frame_for_others(&mut self) -> Result<(), Outcome> {
        // SAFETY: the context is that of this program. The calls may move the packet; `&mut self` excludes borrowed
        // headers.
        let result = unsafe {
            if self.layer == Layer::Ip {
                bpf_skb_change_head(self.ctx.skb.skb, lengths::ETHERNET, 0)
            } else if self.is_tagged() {
                bpf_skb_vlan_pop(self.ctx.skb.skb)
            } else {
                0
            }
        };
        if result == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
    }

    /// Whether the node itself has made the packet: it came in through no device.
    #[inline(always)]
    pub(super) fn is_from_node(&self) -> bool {
        // SAFETY: the context is valid for the whole run of the program.
        unsafe { (*self.ctx.skb.skb).ingress_ifindex == 0 }
    }

    /// The context of the program, for helpers.
    #[inline(always)]
    pub(crate) fn context(&self) -> HookContext {
        // SAFETY: the context is valid for the whole run of the program.
        let (device, mark) = unsafe { ((*self.ctx.skb.skb).ifindex, (*self.ctx.skb.skb).mark) };
        HookContext { raw: self.ctx.as_ptr(), device, mark }
    }
}

/// Position of a transport checksum, and how to update it: one value, so that the updates for addresses and ports
/// agree.
#[derive(Clone, Copy)]
pub(super) struct ChecksumField {
    /// Offset of the checksum from the start of the frame, in bytes.
    pub(super) offset: u32,
    flags: u64,
}

impl ChecksumField {
    /// Where the checksum of the transport header at `l4` is, and how to update it.
    #[inline(always)]
    pub(super) fn of(protocol: u8, l4: u32) -> Self {
        match protocol {
            // A UDP checksum of 0 means "no checksum" and stays 0; a computed 0 is written as 0xffff (RFC 768).
            protocol::UDP => Self { offset: l4 + 6, flags: u64::from(BPF_F_MARK_MANGLED_0) },
            protocol::TCP => Self { offset: l4 + 16, flags: 0 },
            _icmp => Self { offset: l4 + 2, flags: 0 },
        }
    }
}
