//! Sends requests to the kernel over netlink(7), one at a time.

use std::{io, marker::PhantomData};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_ECHO, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tracing::debug;

/// Maximum number of attempts at a dump. A dump is repeated if the configuration has changed meanwhile.
const DUMP_ATTEMPTS: u32 = 10;

/// A type of messages of one netlink protocol.
pub(crate) trait Message: NetlinkSerializable + NetlinkDeserializable + Clone {
    /// Number of the netlink protocol, `NETLINK_…`, that carries these messages.
    const PROTOCOL: isize;
}

impl Message for RouteNetlinkMessage {
    const PROTOCOL: isize = NETLINK_ROUTE;
}

/// A netlink socket in the network namespace of the thread that opened it.
pub(crate) struct Netlink<M = RouteNetlinkMessage> {
    socket: Socket,
    sequence: u32,
    messages: PhantomData<fn() -> M>,
}

impl<M> std::fmt::Debug for Netlink<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Netlink").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl<M: Message> Netlink<M> {
    /// Opens a socket in the network namespace of this thread.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(M::PROTOCOL)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, messages: PhantomData })
    }

    /// Makes the kernel filter dumps by the fields of the request.
    pub(crate) fn filter_dumps(self) -> io::Result<Self> {
        self.socket.set_netlink_get_strict_chk(true)?;
        Ok(self)
    }

    /// All answers to a dump request. Leaves out messages that this code cannot parse.
    ///
    /// # Errors
    /// The kernel refuses the request, or ends the dump with an error, so that the list is incomplete; or the
    /// configuration has changed during each of [`DUMP_ATTEMPTS`] attempts.
    pub(crate) fn dump(&mut self, request: &M) -> io::Result<Vec<M>> {
        for _ in 0..DUMP_ATTEMPTS {
            self.send(request.clone(), NLM_F_DUMP)?;
            let mut answers = Vec::new();
            if self.receive(|answer| answers.push(answer))? {
                return Ok(answers);
            }
        }
        Err(io::Error::other("the network configuration changes faster than it can be read"))
    }

    /// Sends a request that changes the configuration, with these flags, such as `NLM_F_CREATE`.
    pub(crate) fn execute(&mut self, request: M, flags: u16) -> io::Result<()> {
        self.send(request, NLM_F_ACK | flags)?;
        self.receive(drop).map(drop)
    }

    /// The answers to a request that reads one object. (The kernel answers some of these requests, such as
    /// `RTM_GETQDISC`, only with `NLM_F_ECHO`.)
    pub(crate) fn get(&mut self, request: M) -> io::Result<Vec<M>> {
        self.send(request, NLM_F_ACK | NLM_F_ECHO)?;
        let mut answers = Vec::new();
        self.receive(|answer| answers.push(answer))?;
        Ok(answers)
    }

    fn send(&mut self, request: M, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        message.finalize();
        let mut buffer = vec![0; message.buffer_len()];
        message.serialize(&mut buffer);
        let sent = self.socket.send(&buffer, 0)?;
        if sent == buffer.len() {
            Ok(())
        } else {
            Err(io::Error::other("the kernel accepted only a part of a message"))
        }
    }

    /// Reads answers up to the last one. Returns whether they are consistent, that is, the configuration has not
    /// changed during the dump.
    fn receive(&mut self, mut see: impl FnMut(M)) -> io::Result<bool> {
        let mut consistent = true;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while let Some(message) = take_message(&mut rest) {
                let header: Header = Header::read(message);
                if header.sequence != self.sequence {
                    continue;
                }
                consistent &= header.flags & NLM_F_DUMP_INTR == 0;
                match NetlinkMessage::<M>::deserialize(message).map(|message| message.payload) {
                    // A dump that fails ends with the error in its last message (`netlink_dump` of the kernel).
                    Ok(NetlinkPayload::Done(done)) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-done.code));
                    }
                    Ok(NetlinkPayload::Done(_)) => return Ok(consistent),
                    Ok(NetlinkPayload::Error(error)) => {
                        return if error.code.is_none() { Ok(consistent) } else { Err(error.to_io()) };
                    }
                    Ok(NetlinkPayload::InnerMessage(answer)) => see(answer),
                    Ok(_) => {}
                    Err(error) => debug!("ignoring a netlink message of type {}: {error}", header.kind),
                }
            }
        }
    }
}

/// The fields of `struct nlmsghdr` that are needed before a message is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: u16,
    flags: u16,
    sequence: u32,
}

impl Header {
    const LENGTH: usize = 16;

    fn read(message: &[u8]) -> Self {
        let short = |at: usize| u16::from_ne_bytes([message[at], message[at + 1]]);
        let sequence = u32::from_ne_bytes([message[8], message[9], message[10], message[11]]);
        Self { kind: short(4), flags: short(6), sequence }
    }
}

/// Removes the first message from a datagram and returns it; `None` if no complete message is left.
fn take_message<'a>(datagram: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = datagram.get(..4)?.try_into().map(u32::from_ne_bytes).ok()? as usize;
    if length < Header::LENGTH {
        return None;
    }
    let message = datagram.get(..length)?;
    *datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(message)
}

/// Reads the datagrams that wait on a non-blocking socket of a multicast group. Returns whether the kernel has dropped
/// events because the socket's queue was full. (The kernel then queues no event until the queue is empty, so this
/// function reads until no datagram is left.)
///
/// # Errors
/// The socket cannot be read.
pub(crate) fn read_pending(socket: &Socket, mut see: impl FnMut(&[u8])) -> io::Result<bool> {
    let mut lost = false;
    loop {
        match socket.recv_from_full() {
            Ok((datagram, _)) => see(&datagram),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(lost),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
            Err(error) => return Err(error),
        }
    }
}

/// Header and payload of each message in a datagram from a multicast group.
pub(crate) fn events(mut datagram: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    std::iter::from_fn(move || take_message(&mut datagram))
        .map(|message| (Header::read(message), &message[Header::LENGTH..]))
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::{
        AddressFamily,
        route::{RouteAttribute, RouteMessage},
    };

    use super::*;

    #[test]
    fn dump_that_the_kernel_ends_with_an_error_fails() {
        let absent = RouteAttribute::Table(0x7fff_fff0);
        let mut request = RouteMessage::default();
        request.header.address_family = AddressFamily::Inet;
        request.attributes.push(absent);
        let mut netlink = Netlink::open().and_then(Netlink::filter_dumps).unwrap();
        let result = netlink.dump(&RouteNetlinkMessage::GetRoute(request));
        assert_eq!(result.map_err(|error| error.kind()), Err(io::ErrorKind::NotFound));
    }

    #[test]
    fn datagram_is_cut_into_messages() {
        let message = |kind: u16, payload: &[u8]| {
            let mut bytes = vec![0; Header::LENGTH];
            bytes[..4].copy_from_slice(&u32::try_from(Header::LENGTH + payload.len()).unwrap().to_ne_bytes());
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(payload);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let datagram = [message(16, b"abcde"), message(17, b""), vec![9, 0]].concat();
        let found: Vec<(u16, &[u8])> =
            events(&datagram).map(|(header, payload)| (header.kind, payload)).collect();
        assert_eq!(found, [(16, b"abcde".as_slice()), (17, b"")]);
        assert_eq!(events(&[0; 64]).count(), 0, "a message of no length ends the walk");
    }
}
