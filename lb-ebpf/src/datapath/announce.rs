//! ARP and neighbour discovery for the virtual addresses that the node announces at layer 2.
//!
//! A program of its own, `tc_announce`, runs before `tc_ingress` on the devices where addresses are announced. It sends
//! an answer in place of a request (an ARP request or a neighbour solicitation), drops a request that it could not turn
//! into an answer, and passes every other packet untouched. It also passes every frame of a VLAN: the program of the
//! VLAN's device, if there is one, answers the frame. A frame whose tag only has a priority is for the device itself;
//! the answer keeps the tag.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, PerCpuArray},
    helpers::generated::bpf_ktime_get_boot_ns,
    macros::btf_map,
};
use lb_common::{Address, AnnounceKey, Announcement, Heard, Outcome, capacity};
use lb_ebpf::{
    announce::{
        ARP, IPV6, arp,
        neighbour::{self, Advertisement, Audience, HEADERS, Headers, MESSAGE, SHORTEST},
    },
    parse::bounds::clamped,
    rules::announce::{Message, Reaction, may_answer, reaction},
};

use super::{link::has_vlan_beside, skb::Skb, words};

/// The right of the node to answer for each address, on each device: the agent renews it.
#[btf_map]
static ANNOUNCED: HashMap<
    AnnounceKey,
    Announcement,
    { capacity::ANNOUNCED },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// The numbers of answers, failures and conflicts, and the last conflict, for each address on each device.
#[btf_map]
static ANNOUNCE_HEARD: HashMap<AnnounceKey, Heard, { capacity::ANNOUNCED }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// A neighbour discovery message that is being read, and the answer. (Not on the stack: the length of the message
/// varies.)
struct Buffer {
    headers: [u8; HEADERS],
    message: [u8; MESSAGE],
    answer: [u8; neighbour::FRAME],
}

#[btf_map]
static ANNOUNCE_BUFFER: PerCpuArray<Buffer, 1> = PerCpuArray::new();

/// Whether the program has sent an answer in place of the packet.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Done {
    Nothing = 0,
    Sent = 1,
    /// The kernel failed to rewrite or redirect the packet: it may be half an answer by now, so the caller must drop
    /// it.
    Failed = 2,
}

/// Answers the packet if it asks for an address for which the node has the right to answer on this device. Records a
/// conflict if another machine claims such an address.
#[inline(always)]
pub(crate) fn process(skb: &mut Skb) -> Done {
    if has_vlan_beside(skb) {
        return Done::Nothing;
    }
    match skb.protocol() {
        ARP => of_arp(skb),
        IPV6 => of_neighbour(skb),
        _ => Done::Nothing,
    }
}

#[inline(always)]
fn of_arp(skb: &mut Skb) -> Done {
    let mut bytes = [0; arp::FRAME];
    if skb.load_bytes(0, &mut bytes, arp::FRAME as u32).is_err() {
        return Done::Nothing;
    }
    // SAFETY: `Frame` is a `Header`, which is valid for every bit pattern, and has the size of `bytes`.
    let frame: arp::Frame = unsafe { core::mem::transmute(bytes) };
    if let Some(claim) = frame.claimed().and_then(|address| Record::of(skb, address)) {
        let claimed = frame.claim(claim.mac());
        if claim.reaction(claimed) == Reaction::Yield {
            claim.note_conflict(frame.sender_mac);
            return Done::Nothing;
        }
    }
    let Some(record) = frame.asked().and_then(|address| Record::of(skb, address)) else {
        return Done::Nothing;
    };
    if record.reaction(frame.question(record.mac())) != Reaction::Answer {
        return Done::Nothing;
    }
    let reply = frame.reply(record.mac());
    let sent = skb.store_frame(reply.bytes()).and_then(|()| skb.send_back());
    record.finish(sent)
}

#[inline(always)]
fn of_neighbour(skb: &mut Skb) -> Done {
    let Some(buffer) = ANNOUNCE_BUFFER.get_ptr_mut(0) else { return Done::Nothing };
    // SAFETY: the element belongs to this CPU, and programs on this hook run with bottom halves disabled, so no other
    // program borrows the element before this one ends. The kernel fills it with zeros.
    let buffer = unsafe { &mut *buffer };
    if skb.load_bytes(0, &mut buffer.headers, HEADERS as u32).is_err() {
        return Done::Nothing;
    }
    // SAFETY: `Headers` is a `Header`: valid for every bit pattern, at any address.
    let headers: &Headers = unsafe { &*buffer.headers.as_ptr().cast() };
    let Some(length) = headers.message() else { return Done::Nothing };
    buffer.message = [0; MESSAGE];
    let length = clamped::<SHORTEST, { MESSAGE as u32 }>(length);
    if skb.load_bytes(HEADERS as u32, &mut buffer.message, length).is_err() {
        return Done::Nothing;
    }
    let Some(target) = neighbour::target(&buffer.message) else { return Done::Nothing };
    let Some(record) = Record::of(skb, target) else { return Done::Nothing };
    let message = neighbour::meaning(headers, &buffer.message, length, record.mac());
    let audience = match record.reaction(message) {
        Reaction::Answer => Audience::Asker,
        Reaction::AnswerAll => Audience::All,
        Reaction::Yield => {
            record.note_conflict(headers.from);
            return Done::Nothing;
        }
        Reaction::Pass => return Done::Nothing,
    };
    buffer.answer = *Advertisement::answer(headers, *target.bytes(), record.mac(), audience).bytes();
    let resized = skb.resize(neighbour::FRAME as u32);
    let sent = resized.and_then(|()| skb.store_frame(&buffer.answer)).and_then(|()| skb.send_back());
    record.finish(sent)
}

/// The elements of `ANNOUNCED` and `ANNOUNCE_HEARD` for an address on the device of a packet.
#[derive(Clone, Copy)]
struct Record {
    announcement: &'static Announcement,
    heard: *mut Heard,
}

impl Record {
    /// `None` if the node does not announce the address on this device.
    #[inline(always)]
    fn of(skb: &Skb, address: Address) -> Option<Self> {
        let key = AnnounceKey { address, device: skb.context().device };
        // SAFETY: the memory of an element stays mapped until the program ends. The agent replaces whole elements; if
        // the map reuses the memory of a replaced or deleted one meanwhile, the program reads another announcement.
        let announcement = unsafe { ANNOUNCED.get(&key) }?;
        let heard = ANNOUNCE_HEARD.get_ptr_mut(&key)?;
        Some(Self { announcement, heard })
    }

    #[inline(always)]
    fn mac(self) -> [u8; 6] {
        self.announcement.mac
    }

    #[inline(always)]
    fn reaction(self, message: Message) -> Reaction {
        // SAFETY: the memory of the element stays mapped until the program ends. Counters and times are aligned words,
        // which are never torn.
        let heard = unsafe { &*self.heard };
        reaction(message, may_answer(self.announcement, heard, now()))
    }

    /// Records a conflict, which ends the right to answer.
    #[inline(always)]
    fn note_conflict(self, mac: [u8; 6]) {
        // SAFETY: as above. If two CPUs record a conflict at once, the time and the MAC address of either will do.
        unsafe {
            (*self.heard).conflict_mac = mac;
            (&raw mut (*self.heard).conflict_at).write_volatile(now());
            words::add(&raw mut (*self.heard).conflicts, 1);
        }
    }

    #[inline(always)]
    fn finish(self, sent: Result<(), Outcome>) -> Done {
        // SAFETY: as above.
        unsafe {
            if sent.is_ok() {
                words::add(&raw mut (*self.heard).answers, 1);
                Done::Sent
            } else {
                words::add(&raw mut (*self.heard).failures, 1);
                Done::Failed
            }
        }
    }
}

/// The current time in nanoseconds of `CLOCK_BOOTTIME`.
#[inline(always)]
fn now() -> u64 {
    // SAFETY: the helper takes nothing and only returns a number.
    unsafe { bpf_ktime_get_boot_ns() }
}
