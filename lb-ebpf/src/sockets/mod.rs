//! Socket hooks: when a system call names a virtual address, they replace it by the address of a backend, so that the
//! packets of the socket need no translation.
//!
//! A connected socket keeps its connection in its own storage. For datagrams of unconnected sockets, the hooks keep the
//! backend of each socket and virtual address as long as the service has that backend and the socket keeps sending
//! ([`SocketBackend::is_valid`]). The hooks translate replies back only from backends that the same socket has sent to
//! or connected to.

mod call;
mod counts;
mod frontend;
mod hooks;
mod maps;

use aya_ebpf::{EbpfContext as _, helpers::generated::bpf_get_socket_cookie, programs::SockContext};
use lb_common::{Address, Endpoint, Outcome, Service, ServiceKey, SocketBackend, SocketConnection, protocol};
use lb_ebpf::{
    rules::socket::{self, SocketVerdict},
    service::schedule,
};

use self::{
    call::Call,
    maps::{CONNECTED_SOCKETS, SOCKET_BACKENDS, SOCKET_VIPS},
};
use crate::datapath::{clock::now, service};

/// Handles `connect(2)` of TCP and UDP sockets.
#[inline(always)]
fn connect(call: &Call) -> Result<Outcome, Outcome> {
    let to = call.remote();
    let key = call.key(&to)?;
    let service = match frontend::find(call, &key) {
        Ok(service) => service,
        Err(outcome) => {
            let is_nowhere = socket::connects_nowhere(outcome, || frontend::is_unlisted(&key));
            let outcome = if is_nowhere { connect_nowhere(call, &to) } else { outcome };
            // If the call fails, a UDP socket stays connected to its previous backend.
            if socket::verdict(outcome) == SocketVerdict::Continue {
                call.delete_connection();
                delete_connected(call, &key);
                delete_reply_address(call, &key, &to);
                counts::end(call);
            }
            return Err(outcome);
        }
    };
    // When a socket connects again, its previous connection ends before the choice of a backend, which may depend on
    // the number of connections. (If all backends have weight 0, the call fails and the socket keeps the previous
    // connection, which no longer counts. To restore the count would increase the verifier's work by half.)
    counts::end(call);
    let backend = frontend::choose(call, &key, &service)?;
    counts::begin(call, service.id, backend);
    let backend = Endpoint::new(backend.address, backend.port);
    let mut connection = SocketConnection { vip: to, backend };
    call.set_connection(&mut connection);
    if key.protocol == protocol::UDP && call.is_on_node() {
        // If the insert fails, the socket still works, but the agent does not close it when its backend is gone.
        CONNECTED_SOCKETS.insert(&call.cookie(), &connection, 0).unwrap_or_default();
    }
    call.set_remote(&backend);
    Ok(Outcome::NewFlow)
}

/// Connects a UDP socket to an address that refuses datagrams, because the call names a port that no service has.
/// Usually the process sends nothing, and only wants to know which source address the kernel chooses: getaddrinfo(3)
/// sorts addresses that way (RFC 6724). If the process does send, its datagrams must be refused, but the kernel runs no
/// hook for `send(2)`, which names no address. So the hook connects the socket to port 0 of the node, which no socket
/// can have.
#[inline(always)]
fn connect_nowhere(call: &Call, to: &Endpoint) -> Outcome {
    let nowhere = Endpoint::new(frontend::node_address(&to.address), 0);
    if nowhere.address != Address::NONE {
        call.set_remote(&nowhere);
    }
    Outcome::NoService
}

/// Handles `sendto(2)` and `sendmsg(2)` with an address.
#[inline(always)]
fn send(call: &Call) -> Result<Outcome, Outcome> {
    let to = call.remote();
    let key = call.key(&to)?;
    let service = frontend::find(call, &key).inspect_err(|_| {
        if !call.is_connected() {
            call.delete_connection();
        }
        delete_reply_address(call, &key, &to);
    })?;
    let (backend, outcome) = match kept_backend(call, &to, &service) {
        Some(backend) => (backend, Outcome::Forward),
        None => (new_backend(call, &key, &to, &service)?, Outcome::NewFlow),
    };
    record_reply_address(call, &to, &backend)?;
    call.set_remote(&backend);
    Ok(outcome)
}

/// The backend that already gets the socket's datagrams to this address, if the service still has that backend.
#[inline(always)]
fn kept_backend(call: &Call, to: &Endpoint, service: &Service) -> Option<Endpoint> {
    let backend = match call.connection() {
        // A connected socket receives only from its peer, so it must also send to that backend.
        Some(connection) if connection.vip == *to => connection.backend,
        _ => {
            let kept = SOCKET_BACKENDS.get_ptr_mut(&call.socket(to))?;
            // SAFETY: the memory of an element stays mapped while the program runs, and every bit pattern is a valid
            // value. An LRU map may reuse the element: `backend` is then either no backend of this service, or a
            // backend that any client may use.
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

/// Records that replies of the backend appear to come from `vip`. If two virtual addresses share a backend, replies
/// appear to come from the one that the socket has used last.
#[inline(always)]
fn record_reply_address(call: &Call, vip: &Endpoint, backend: &Endpoint) -> Result<(), Outcome> {
    let key = call.socket(backend);
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is compared at once.
    if unsafe { SOCKET_VIPS.get(&key) } == Some(vip) {
        return Ok(());
    }
    SOCKET_VIPS.insert(&key, vip, 0).map_err(|_| Outcome::ConntrackFull)
}

/// Deletes the entry of a UDP socket in `CONNECTED_SOCKETS`: the socket is no longer connected to a service.
#[inline(always)]
fn delete_connected(call: &Call, key: &ServiceKey) {
    if key.protocol == protocol::UDP {
        delete_cookie(call.cookie());
    }
}

/// Deletes the entry of the socket with this cookie in `CONNECTED_SOCKETS`, if there is such an entry.
#[inline(always)]
fn delete_cookie(cookie: u64) {
    // Most sockets are not in the map, and a lookup takes no lock.
    if CONNECTED_SOCKETS.get_ptr(&cookie).is_some() {
        // Another CPU may already have deleted the entry.
        CONNECTED_SOCKETS.remove(&cookie).unwrap_or_default();
    }
}

/// Handles the release of a socket, which ends its connection.
#[inline(always)]
fn release(ctx: &SockContext) {
    if counts::release(ctx) {
        // SAFETY: the helper takes the context of this program type.
        delete_cookie(unsafe { bpf_get_socket_cookie(ctx.as_ptr()) });
    }
}

/// Deletes the virtual address that replaces the source of replies from `to`: the socket now sends to `to` itself.
#[inline(always)]
fn delete_reply_address(call: &Call, key: &ServiceKey, to: &Endpoint) {
    if key.protocol != protocol::UDP {
        return;
    }
    let answers = call.socket(to);
    // Most sockets have no entry in the map, and a lookup takes no lock.
    if SOCKET_VIPS.get_ptr(&answers).is_some() {
        // Another CPU may already have deleted the entry.
        SOCKET_VIPS.remove(&answers).unwrap_or_default();
    }
}

/// Handles calls of `recvfrom(2)` and `recvmsg(2)` that ask for the sender's address: replaces a backend's address by
/// the virtual one.
#[inline(always)]
fn receive(call: &Call) -> Result<Outcome, Outcome> {
    let from = call.remote();
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once.
    let last_used = || unsafe { SOCKET_VIPS.get(&call.socket(&from)) }.copied();
    // A socket that the process has disconnected still has its last connection, for replies that are on their way.
    let vip = if call.is_connected() {
        connected_vip(call, &from).or_else(last_used)
    } else {
        last_used().or_else(|| connected_vip(call, &from))
    };
    call.set_remote(&vip.ok_or(Outcome::NoService)?);
    Ok(Outcome::Reply)
}

/// Handles `getpeername(2)`: if a socket was connected to a virtual address, that address is its peer.
#[inline(always)]
fn name_peer(call: &Call) {
    if let Some(vip) = connected_vip(call, &call.remote()) {
        call.set_remote(&vip);
    }
}

/// The virtual address through which this socket was connected to `backend`; `None` if there is none.
#[inline(always)]
fn connected_vip(call: &Call, backend: &Endpoint) -> Option<Endpoint> {
    let connection = call.connection()?;
    (connection.backend == *backend).then_some(connection.vip)
}
