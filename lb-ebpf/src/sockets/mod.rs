//! Sockets that speak to services: the address is exchanged when the system call names it, so that no packet ever
//! carries a virtual one and nothing is to be done for each packet.
//!
//! A connected socket keeps what it was connected to in its own storage. Datagrams of sockets that are not connected
//! keep their backend for each socket and virtual address, as long as the service has it; answers are translated back
//! only for backends that this very socket was sent to.

mod call;
mod frontend;
mod hooks;
mod maps;

use lb_common::{
    Address, Endpoint, Outcome, Service, ServiceKey, SocketBackend, SocketConnection, Verdict, protocol,
};
use lb_ebpf::service::schedule;

use self::{
    call::Call,
    maps::{CONNECTED_SOCKETS, SOCKET_BACKENDS, SOCKET_VIPS},
};
use crate::datapath::{flow::conntrack::now, service, stats};

/// `connect(2)` of TCP and UDP sockets.
#[inline(always)]
fn connect(call: &Call) -> Result<Outcome, Outcome> {
    let to = call.remote();
    let key = call.key(&to)?;
    let service = match frontend::find(call, &key) {
        Ok(service) => service,
        Err(outcome) => {
            call.forget_connection();
            forget_socket(call, &key);
            forget_answers(call, &key, &to);
            let probes = outcome == Outcome::RejectUdp && frontend::is_unlisted(&key);
            return Err(if probes { lead_nowhere(call, &to) } else { outcome });
        }
    };
    let backend = frontend::choose(call, &key, &service)?;
    let backend = Endpoint::new(backend.address, backend.port);
    let mut connection = SocketConnection { vip: to, backend };
    call.set_connection(&mut connection);
    if key.protocol == protocol::UDP && call.is_of_node() {
        // Without room the socket works all the same, and is not ended with its backend.
        CONNECTED_SOCKETS.insert(&call.cookie(), &connection, 0).unwrap_or_default();
    }
    call.set_remote(&backend);
    Ok(Outcome::NewFlow)
}

/// A UDP socket is connected to a port that no service has. That asks for a source address more often than for anything
/// else: getaddrinfo(3) sorts addresses so (RFC 6724), and sends nothing. What is sent nevertheless has to be refused: no
/// hook sees it, but a port of the node that nobody can have does.
#[inline(always)]
fn lead_nowhere(call: &Call, to: &Endpoint) -> Outcome {
    let nowhere = Endpoint::new(frontend::node_address(&to.address), 0);
    if nowhere.address != Address::default() {
        call.set_remote(&nowhere);
    }
    Outcome::NoService
}

/// A datagram that is sent with an address.
#[inline(always)]
fn send(call: &Call) -> Result<Outcome, Outcome> {
    let to = call.remote();
    let key = call.key(&to)?;
    let service = frontend::find(call, &key).inspect_err(|_| {
        if !call.is_connected() {
            call.forget_connection();
        }
        forget_answers(call, &key, &to);
    })?;
    let (backend, outcome) = match kept_backend(call, &to, &service) {
        Some(backend) => (backend, Outcome::Forward),
        None => (new_backend(call, &key, &to, &service)?, Outcome::NewFlow),
    };
    expect_answers(call, &to, &backend)?;
    call.set_remote(&backend);
    Ok(outcome)
}

/// Where the socket's datagrams to this address go, if the service still has that backend.
#[inline(always)]
fn kept_backend(call: &Call, to: &Endpoint, service: &Service) -> Option<Endpoint> {
    let backend = match call.connection() {
        // A connected socket hears its own peer only.
        Some(connection) if connection.vip == *to => connection.backend,
        _ => {
            let kept = SOCKET_BACKENDS.get_ptr_mut(&call.socket(to))?;
            // SAFETY: elements of an LRU map may be reused, but never freed, while a program runs. What is read then
            // is no backend of this service, or as good as any.
            let kept = unsafe { &mut *kept };
            let now = now();
            if !kept.is_valid(now) {
                return None;
            }
            kept.last_used = now;
            kept.backend
        }
    };
    let slot = service::find_backend(service, &backend.address, backend.port);
    (slot != schedule::NONE).then_some(backend)
}

#[inline(always)]
fn new_backend(call: &Call, key: &ServiceKey, to: &Endpoint, service: &Service) -> Result<Endpoint, Outcome> {
    let backend = frontend::choose(call, key, service)?;
    let backend = Endpoint::new(backend.address, backend.port);
    let kept = SocketBackend { backend, last_used: now() };
    SOCKET_BACKENDS.insert(&call.socket(to), &kept, 0).map_err(|_| Outcome::ConntrackFull)?;
    Ok(backend)
}

/// Notes that answers of the backend are those of `vip`. Of two virtual addresses with one backend it is the one that
/// the socket used last.
#[inline(always)]
fn expect_answers(call: &Call, vip: &Endpoint, backend: &Endpoint) -> Result<(), Outcome> {
    let key = call.socket(backend);
    // SAFETY: compared at once; see `kept_backend`.
    if unsafe { SOCKET_VIPS.get(&key) } == Some(vip) {
        return Ok(());
    }
    SOCKET_VIPS.insert(&key, vip, 0).map_err(|_| Outcome::ConntrackFull)
}

/// The socket is connected to nothing of ours.
#[inline(always)]
fn forget_socket(call: &Call, key: &ServiceKey) {
    let cookie = call.cookie();
    // Most are not in there, which is found out without a lock.
    if key.protocol == protocol::UDP && CONNECTED_SOCKETS.get_ptr(&cookie).is_some() {
        // Nothing is lost if it is gone already.
        CONNECTED_SOCKETS.remove(&cookie).unwrap_or_default();
    }
}

/// The socket speaks to this address without us: if it is that of a backend, answers are the backend's own from now on.
#[inline(always)]
fn forget_answers(call: &Call, key: &ServiceKey, to: &Endpoint) {
    if key.protocol != protocol::UDP {
        return;
    }
    let answers = call.socket(to);
    // Most have none, which is found out without a lock.
    if SOCKET_VIPS.get_ptr(&answers).is_some() {
        // Nothing is lost if it is gone already.
        SOCKET_VIPS.remove(&answers).unwrap_or_default();
    }
}

/// A datagram that is received with its sender's address.
#[inline(always)]
fn receive(call: &Call) -> Result<Outcome, Outcome> {
    let from = call.remote();
    // SAFETY: copied at once; see `kept_backend`.
    let vip = connected_vip(call, &from).or_else(|| unsafe { SOCKET_VIPS.get(&call.socket(&from)) }.copied());
    call.set_remote(&vip.ok_or(Outcome::NoService)?);
    Ok(Outcome::Reply)
}

/// `getpeername(2)`: the socket was connected to a virtual address, so that is its peer.
#[inline(always)]
fn name_peer(call: &Call) {
    if let Some(vip) = connected_vip(call, &call.remote()) {
        call.set_remote(&vip);
    }
}

/// The virtual address that stands for `backend` on this socket.
#[inline(always)]
fn connected_vip(call: &Call, backend: &Endpoint) -> Option<Endpoint> {
    let connection = call.connection()?;
    (connection.backend == *backend).then_some(connection.vip)
}

/// Counts what was done, and says whether the system call goes on; if not, with which error it fails.
#[inline(always)]
fn conclude(call: &Call, result: Result<Outcome, Outcome>) -> Result<(), i32> {
    let outcome = result.unwrap_or_else(|early| early);
    if matches!(outcome, Outcome::NoService | Outcome::NotTransport) {
        // As it would be without us, which is what most calls are.
        return Ok(());
    }
    stats::count_preempted(outcome);
    let errno = match outcome.verdict() {
        Verdict::Pass => return Ok(()),
        Verdict::Bounce | Verdict::Route => ECONNREFUSED,
        Verdict::Drop => EHOSTUNREACH,
    };
    frontend::tell_refused(call, outcome);
    Err(errno)
}

/// What the stack makes of a RST or an ICMP port unreachable.
const ECONNREFUSED: i32 = 111;
/// In place of silence, which a system call cannot keep.
const EHOSTUNREACH: i32 = 113;
