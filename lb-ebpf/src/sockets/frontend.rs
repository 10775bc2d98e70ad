//! The service behind an address, and the backend that a socket gets.

use aya_ebpf::helpers::generated::bpf_get_current_pid_tgid;
use bytemuck::Zeroable as _;
use lb_common::{Address, Backend, Choice, EventHook, Outcome, Service, ServiceKey, conntrack::Tuple};
use lb_ebpf::{
    rules::admission::{self, rejection},
    service::schedule,
};

use super::call::Call;
use crate::datapath::{
    dns, events,
    flow::{affinity, choose},
    service::{self, admit::is_in_source_range, vips},
    settings,
};

/// The service that the socket may use at this address. `Err` is the outcome of a call that this hook does not serve:
/// [`Outcome::NoService`] leaves the address as it is. (`connect` replaces some of the outcomes that make a call fail.)
///
/// The rule [`admission::system_call`] decides which calls this hook serves. The tc programs also decide about each
/// packet of a pod to the DNS Service: a socket that this hook connected would stay with one DNS server.
#[inline(always)]
pub(super) fn find(call: &Call, key: &ServiceKey) -> Result<Service, Outcome> {
    let mut service = Service::zeroed();
    match record(key, &mut service) {
        Ok(()) => {}
        Err(Outcome::NoService) if call.is_on_node() => return Err(unlisted(key)),
        Err(outcome) => return Err(outcome),
    }
    let in_source_ranges = || is_in_source_range(service.id, &node_address(&key.address));
    let is_left =
        || admission::is_left_to_packets(&service, settings::denies_sources) || dns::has_server(key);
    let admission = admission::system_call(&service, call.is_on_node(), in_source_ranges, is_left);
    admission.allow(key.protocol).map(|()| service)
}

/// Whether no service has this address and port.
#[inline(always)]
pub(super) fn is_unlisted(key: &ServiceKey) -> bool {
    record(key, &mut Service::zeroed()) == Err(Outcome::NoService)
}

/// Copies the record of a frontend, as it applies to internal clients. (A subprogram, because LLVM copies the record
/// register by register. Inlined, the copy would take twice its size on the caller's stack, which kernels before 6.8
/// limit more strictly.)
#[inline(never)]
fn record(key: &ServiceKey, service: &mut Service) -> Result<(), Outcome> {
    *service = service::find(key)?.for_client(true);
    Ok(())
}

/// Decides about a call to an address and port that no Service has.
#[inline(never)]
fn unlisted(key: &ServiceKey) -> Outcome {
    vips::unlisted_address(&key.address, false).outcome(key.protocol)
}

/// Chooses a backend for a connection, or for a datagram of an unconnected socket. The source port is not known yet: a
/// number derived from the socket takes its place.
#[inline(always)]
pub(super) fn choose(call: &Call, key: &ServiceKey, service: &Service) -> Result<&'static Backend, Outcome> {
    let client = client(call, &key.address);
    let tuple = Tuple::new(client, key.address, call.number(), key.port, key.protocol);
    let slot = choose::choose(&tuple, service, || {});
    if slot == schedule::NONE {
        return Err(rejection(key.protocol));
    }
    let backend = service::backend(slot).ok_or(Outcome::NoBackend)?;
    choose::flow_began(service.id, service.scheduler);
    if events::is_watched() {
        emit_chosen(&tuple, backend, service, slot);
    }
    if service.affinity_seconds > 0 {
        affinity::remember(&client, service.id, backend);
    }
    Ok(backend)
}

/// Emits an event about the chosen backend in this slot. (The function computes again whether affinity has chosen the
/// backend: if the caller passed the result, the verifier would check all code in between for both values.)
#[inline(never)]
fn emit_chosen(tuple: &Tuple, backend: &Backend, service: &Service, slot: u32) {
    let affine = service.affinity_seconds > 0 && affinity::find(&tuple.source, service) == slot;
    let choice = if affine { Choice::Affinity } else { Choice::Scheduler };
    events::emit(|event| {
        (event.from, event.to) = (*tuple, *tuple);
        event.from.source_port = 0;
        (event.to.destination, event.to.destination_port) = (backend.address, backend.port);
        event.to.source_port = 0;
        event.service = service.id;
        event.origin = process();
        (event.outcome, event.hook) = (Outcome::NewFlow as u8, EventHook::Socket as u8);
        (event.choice, event.scheduler, event.flags) = (choice as u8, service.scheduler, 0);
    });
}

/// Emits an event about a call that fails.
#[inline(always)]
pub(super) fn emit_rejected(call: &Call, outcome: Outcome) {
    let to = call.remote();
    if events::is_watched()
        && let Ok(key) = call.key(&to)
    {
        let tuple = Tuple::new(client(call, &key.address), key.address, 0, key.port, key.protocol);
        events::emit_rejected(&tuple, process(), outcome, EventHook::Socket);
    }
}

/// The id of the process that makes the system call.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the thread is in the other half")]
fn process() -> u32 {
    // SAFETY: the helper takes nothing and only returns a number.
    (unsafe { bpf_get_current_pid_tgid() } >> 32) as u32
}

/// The address that stands for the client in affinity entries, hashes and events. The source address is unknown until
/// the kernel has found the route. Processes of the node share the node's address; for another network namespace the
/// address encodes the cookie of the namespace, in a network that no packet comes from (`100::/64`, RFC 6666).
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "both halves are kept")]
fn client(call: &Call, vip: &Address) -> Address {
    if call.is_on_node() {
        return node_address(vip);
    }
    let netns = call.netns;
    Address::from_words([u32::from_be(0x0100_0000), 0, (netns >> 32) as u32, netns as u32])
}

/// The address of the node in the family of `like`; [`Address::NONE`] if the node has no such address.
#[inline(always)]
pub(super) fn node_address(like: &Address) -> Address {
    settings::current().map_or(Address::NONE, |settings| *settings.source(like.is_v4()))
}
