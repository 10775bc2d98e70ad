//! What an address is for a socket, and which backend it gets.

use aya_ebpf::helpers::generated::bpf_get_current_pid_tgid;
use bytemuck::Zeroable as _;
use lb_common::{
    Address, Backend, Choice, EventHook, Outcome, Service, ServiceKey, conntrack::Tuple, protocol,
    service_flags, vip_flags,
};
use lb_ebpf::service::schedule;

use super::call::Call;
use crate::datapath::{
    events,
    flow::affinity,
    service::{self, admit::is_in_source_range, choose, vips},
    settings,
};

/// The service that the socket may use under this address; [`Outcome::NoService`] where the address is none of ours.
///
/// Sockets of other namespaces are served only where nothing is in question: otherwise their packets decide, which have
/// a source address, and can be dropped without a word.
#[inline(always)]
pub(super) fn find(call: &Call, key: &ServiceKey) -> Result<Service, Outcome> {
    let mut service = Service::zeroed();
    match record(key, &mut service) {
        FOUND => {}
        Outcome::NoService if call.is_of_node() => return Err(unlisted(key)),
        other => return Err(other),
    }
    let verdict = admit(&service, key);
    if call.is_of_node() {
        return verdict.map(|()| service);
    }
    let limited = service_flags::SOCKETS_ONLY | service_flags::SOURCE_RANGES;
    if verdict.is_err() || service.flags & limited != 0 {
        return Err(Outcome::NoService);
    }
    Ok(service)
}

/// Whether no service has this port.
#[inline(always)]
pub(super) fn is_unlisted(key: &ServiceKey) -> bool {
    record(key, &mut Service::zeroed()) == Outcome::NoService
}

/// What [`record`] returns for a service that is there.
const FOUND: Outcome = Outcome::NewFlow;

/// Copies the record of a frontend, as it is for processes of the node. A subprogram, since its copy is made register by
/// register: these would take twice its size of the caller's stack, which kernels before 6.8 have less of.
#[inline(never)]
fn record(key: &ServiceKey, service: &mut Service) -> Outcome {
    match service::find(key) {
        Ok(found) => {
            *service = found.for_client(true);
            FOUND
        }
        Err(other) => other,
    }
}

/// Whether the service takes processes of the node, and can serve them.
#[inline(always)]
fn admit(service: &Service, key: &ServiceKey) -> Result<(), Outcome> {
    if service.flags & service_flags::SOURCE_RANGES != 0
        && !is_in_source_range(service.id, &node_address(&key.address))
    {
        return Err(Outcome::SourceNotAllowed);
    }
    if service.backends_count > 0 {
        return Ok(());
    }
    if service.flags & service_flags::DROP_WITHOUT_BACKENDS != 0 {
        return Err(Outcome::NoLocalBackend);
    }
    Err(rejection(key))
}

/// An address and port that no service has: refused where the address is a cluster IP, or could become one.
#[inline(never)]
fn unlisted(key: &ServiceKey) -> Outcome {
    if !settings::is_in_service_range(&key.address) {
        return Outcome::NoService;
    }
    match vips::lookup(&key.address) {
        None if settings::drops_unknown_vips() => Outcome::UnknownVip,
        None => Outcome::NoService,
        Some(vip) if vip.flags & vip_flags::CLUSTER_IP == 0 => Outcome::NoService,
        Some(_) => rejection(key),
    }
}

#[inline(always)]
const fn rejection(key: &ServiceKey) -> Outcome {
    if key.protocol == protocol::TCP { Outcome::RejectTcp } else { Outcome::RejectUdp }
}

/// A backend for a connection, or for a datagram that belongs to none. Nobody knows its source port yet: the number of the
/// socket stands for it.
#[inline(always)]
pub(super) fn choose(call: &Call, key: &ServiceKey, service: &Service) -> Result<&'static Backend, Outcome> {
    let client = client(call, &key.address);
    let tuple = Tuple::new(client, key.address, call.number(), key.port, key.protocol);
    let slot = choose::choose(&tuple, service, || {});
    if slot == schedule::NONE {
        return Err(rejection(key));
    }
    let backend = service::backend(slot).ok_or(Outcome::NoBackend)?;
    choose::made(service.id, service.scheduler);
    if events::is_watched() {
        tell(&tuple, backend, service, slot);
    }
    if service.affinity_seconds > 0 {
        affinity::remember(&client, service.id, backend);
    }
    Ok(backend)
}

/// Tells a monitor of the backend that was chosen, in this slot. (Whose choice that was is found out once more rather than
/// carried along: the verifier would follow both.)
#[inline(never)]
fn tell(tuple: &Tuple, backend: &Backend, service: &Service, slot: u32) {
    let affine = service.affinity_seconds > 0 && affinity::find(&tuple.source, service) == slot;
    let choice = if affine { Choice::Affinity } else { Choice::Scheduler };
    events::tell(|event| {
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

/// Tells a monitor of a call that fails.
#[inline(always)]
pub(super) fn tell_refused(call: &Call, outcome: Outcome) {
    let to = call.remote();
    if events::is_watched()
        && let Ok(key) = call.key(&to)
    {
        let tuple = Tuple::new(client(call, &key.address), key.address, 0, key.port, key.protocol);
        events::tell_refused(&tuple, process(), outcome, EventHook::Socket);
    }
}

/// The process that makes the system call.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the thread is in the other half")]
fn process() -> u32 {
    // SAFETY: takes nothing and has no side effects.
    (unsafe { bpf_get_current_pid_tgid() } >> 32) as u32
}

/// Whom affinity takes a socket for. The source address is not known before a route is, and all processes of the node
/// would have the same anyway; those of another namespace have the number of that, in a network that no packet comes
/// from (`100::/64`, RFC 6666).
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "both halves are kept")]
fn client(call: &Call, vip: &Address) -> Address {
    if call.is_of_node() {
        return node_address(vip);
    }
    let netns = call.netns;
    Address::from_words([u32::from_be(0x0100_0000), 0, (netns >> 32) as u32, netns as u32])
}

/// The node's own address of the family of `like`.
#[inline(always)]
pub(super) fn node_address(like: &Address) -> Address {
    match settings::current() {
        Some(settings) if like.is_v4() => settings.source_v4,
        Some(settings) => settings.source_v6,
        None => Address::default(),
    }
}
