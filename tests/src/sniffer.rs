//! Records which machines claim an IP address on a bridge, and asks for the address all the time.
//!
//! A claim is a frame that makes other machines send packets for an IP address to a MAC address: an ARP packet from the
//! IP address, or a neighbour advertisement for it. The kernel stamps each frame with the time at which it arrived, so
//! the times do not depend on when a thread of the test runs.

use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, spawn},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::{
    cmsg_space,
    errno::Errno,
    libc,
    net::if_::if_nametoindex,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{
            AddressFamily, ControlMessageOwned, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType,
            recvmsg, setsockopt, socket, sockopt,
        },
        time::TimeSpec,
    },
};

use crate::{icmp::internet_checksum, netns::Netns};

/// Interval at which [`Sniffer`] asks for each address.
const INTERVAL: Duration = Duration::from_millis(20);
/// Size in bytes of the socket's buffer: enough for some thousand claims.
const BUFFER: usize = 4 << 20;
/// Values of the field EtherType.
const ARP: [u8; 2] = [0x08, 0x06];
const IPV6: [u8; 2] = [0x86, 0xdd];
/// IPv6 next header ICMPv6, and its types neighbour solicitation and advertisement (RFC 4861 §4.3, §4.4).
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;

/// The kind of frame of a [`Claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// An ARP request from the address.
    ArpRequest,
    /// An ARP reply from the address.
    ArpReply,
    /// A neighbour advertisement for the address, with its flags.
    Advertisement {
        /// Whether it answers a solicitation.
        solicited: bool,
        /// Whether it replaces the MAC address that a neighbour knows.
        overrides: bool,
    },
}

/// A frame that claims an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// When the frame arrived at the bridge, as the time since 1970.
    pub at: Duration,
    /// The MAC address at which the sender claims to have the address.
    pub mac: String,
    /// The claimed address.
    pub address: IpAddr,
    /// The kind of frame.
    pub form: Form,
    /// Whether the frame is for all machines (an announcement), not for one (an answer).
    pub to_all: bool,
}

/// Consecutive claims of an address with the same MAC address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The MAC address.
    pub mac: String,
    /// When the first of the claims arrived, as the time since 1970.
    pub first: Duration,
    /// When the last of the claims arrived, as the time since 1970.
    pub last: Duration,
}

/// Groups consecutive claims with the same MAC address. All `claims` are for one IP address, in the order of their
/// times.
pub fn turns(claims: &[Claim]) -> Vec<Turn> {
    let same = claims.chunk_by(|one, next| one.mac == next.mac);
    same.map(|claims| {
        let (first, last) = (&claims[0], &claims[claims.len() - 1]);
        Turn { mac: first.mac.clone(), first: first.at, last: last.at }
    })
    .collect()
}

/// Records claims in the background, and asks for addresses every 20 ms, until this is dropped.
#[derive(Debug)]
pub struct Sniffer {
    stop: Arc<AtomicBool>,
    claims: Arc<Mutex<Vec<Claim>>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Sniffer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

/// The sender of ARP requests and neighbour solicitations: the bridge itself. No machine is configured with these IP
/// addresses.
#[derive(Clone, Copy, Debug)]
pub struct Asker {
    /// MAC address of the bridge.
    pub mac: [u8; 6],
    /// Source address of ARP requests.
    pub v4: Ipv4Addr,
    /// Source address of neighbour solicitations.
    pub v6: Ipv6Addr,
}

impl Sniffer {
    /// Starts to record the claims that arrive at the ports of the bridge `device`, and to ask for `addresses`.
    ///
    /// # Errors
    /// A packet socket cannot be opened.
    pub fn start(netns: &Netns, device: &str, asker: &Asker, addresses: &[IpAddr]) -> Result<Self> {
        let (socket, bridge) = netns
            .run(|| {
                let index = i32::try_from(if_nametoindex(device)?).map_err(io::Error::other)?;
                Ok((open_socket()?, index))
            })
            .with_context(|| format!("opening a packet socket in namespace {}", netns.name()))?;
        let questions: Vec<Vec<u8>> = addresses.iter().map(|address| asker.question(*address)).collect();
        let (stop, claims) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let thread = spawn({
            let (stop, claims) = (Arc::clone(&stop), Arc::clone(&claims));
            move || {
                if let Err(error) = record(&socket, bridge, &questions, (&stop, &claims)) {
                    eprintln!("recording claims: {error}");
                }
            }
        });
        Ok(Self { stop, claims, thread: Some(thread) })
    }

    /// The claims of an address so far, in the order of their times.
    ///
    /// # Panics
    /// The socket failed, so later claims are unknown.
    pub fn claims(&self, address: IpAddr) -> Vec<Claim> {
        let has_ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        assert!(!has_ended, "the thread that records claims has ended");
        let claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let mut claims: Vec<Claim> =
            claims.iter().filter(|claim| claim.address == address).cloned().collect();
        claims.sort_by_key(|claim| claim.at);
        claims
    }
}

/// Adds the claims that arrive at ports of the bridge `device` to `claims`, and sends the requests `questions` once per
/// [`INTERVAL`], until `stop` is set.
fn record(
    socket: &OwnedFd,
    device: i32,
    questions: &[Vec<u8>],
    (stop, claims): (&AtomicBool, &Mutex<Vec<Claim>>),
) -> io::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        for question in questions {
            // Ignores errors: a full queue drops a request, as any link may.
            let _lost = send(socket, device, question);
        }
        let end = Instant::now() + INTERVAL;
        while let Some(rest) = end.checked_duration_since(Instant::now()) {
            let heard = receive(socket, device, rest)?;
            claims.lock().unwrap_or_else(PoisonError::into_inner).extend(heard);
        }
    }
    Ok(())
}

/// A packet socket that receives all claims in this thread's namespace.
fn open_socket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll)?;
    keep_claims_only(&fd)?;
    setsockopt(&fd, sockopt::RcvBufForce, &BUFFER)?;
    setsockopt(&fd, sockopt::ReceiveTimestampns, &true)?;
    Ok(fd)
}

/// Makes the kernel drop frames that [`parse`] would ignore, so that other traffic does not fill the socket's buffer.
fn keep_claims_only(fd: &OwnedFd) -> io::Result<()> {
    // Opcodes of classic BPF: load 2 bytes, load 1 byte, skip `jt` instructions if equal and `jf` if not, return.
    let [half, byte, equal, give] = [0x28, 0x30, 0x15, 0x06];
    let step = |code, k: u32, jt, jf| libc::sock_filter { code, jt, jf, k };
    let word = |ether_type| u32::from(u16::from_be_bytes(ether_type));
    let mut program = [
        step(half, 12, 0, 0),
        step(equal, word(ARP), 6, 0),
        step(equal, word(IPV6), 0, 4),
        step(byte, 20, 0, 0),
        step(equal, ICMPV6.into(), 0, 2),
        step(byte, 54, 0, 0),
        step(equal, ADVERTISEMENT.into(), 1, 0),
        step(give, 0, 0, 0),
        step(give, u32::MAX, 0, 0),
    ];
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    let size = libc::socklen_t::try_from(size_of_val(&program)).map_err(io::Error::other)?;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    // SAFETY: the kernel reads a `sock_fprog` and the instructions that it points to, both of which outlive the call.
    let result = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const program).cast(), size) };
    Errno::result(result)?;
    Ok(())
}

/// Sends a frame from the device with this index.
fn send(fd: &OwnedFd, device: i32, frame: &[u8]) -> io::Result<()> {
    // SAFETY: all of `sockaddr_ll` is integers; zero is valid.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    (to.sll_family, to.sll_ifindex) = (u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?, device);
    let size = libc::socklen_t::try_from(size_of_val(&to)).map_err(io::Error::other)?;
    let (bytes, address) = (frame.as_ptr().cast(), (&raw const to).cast());
    // SAFETY: the kernel reads the frame and the address, which have the given lengths.
    let result = unsafe { libc::sendto(fd.as_raw_fd(), bytes, frame.len(), 0, address, size) };
    Errno::result(result)?;
    Ok(())
}

/// Waits for claims for at most `limit`; returns those that have arrived at ports of the bridge `device`.
fn receive(fd: &OwnedFd, device: i32, limit: Duration) -> io::Result<Vec<Claim>> {
    let limit = PollTimeout::try_from(limit).map_err(io::Error::other)?;
    poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], limit)?;
    let (mut claims, mut frame) = (Vec::new(), [0; 2048]);
    loop {
        let mut space = cmsg_space!(TimeSpec);
        let mut parts = [IoSliceMut::new(&mut frame)];
        let flags = MsgFlags::empty();
        let message = match recvmsg::<LinkAddr>(fd.as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Ok(message) => message,
            Err(Errno::EAGAIN) => return Ok(claims),
            Err(error) => return Err(error.into()),
        };
        let stamp = message.cmsgs()?.find_map(|it| {
            if let ControlMessageOwned::ScmTimestampns(at) = it { Some(Duration::from(at)) } else { None }
        });
        // The socket also receives what ports send, and copies of broadcasts at the bridge itself.
        let has_arrived = |from: &LinkAddr| {
            from.pkttype() != libc::PACKET_OUTGOING && i32::try_from(from.ifindex()) != Ok(device)
        };
        let (len, is_wanted) = (message.bytes, message.address.as_ref().is_some_and(has_arrived));
        if let (true, Some(at), Some(claim)) = (is_wanted, stamp, parse(&frame[..len])) {
            claims.push(Claim { at, ..claim });
        }
    }
}

/// The claim in an Ethernet frame, without its time.
fn parse(frame: &[u8]) -> Option<Claim> {
    let to_all = frame.first()? & 1 == 1;
    let claim = |form, mac: &[u8], address: IpAddr| Claim {
        at: Duration::ZERO,
        mac: mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":"),
        address,
        form,
        to_all,
    };
    if frame.get(12..14)? == ARP {
        let form = if frame.get(21)? == &1 { Form::ArpRequest } else { Form::ArpReply };
        let address: [u8; 4] = frame.get(28..32)?.try_into().ok()?;
        return Some(claim(form, frame.get(22..28)?, address.into()));
    }
    if frame.get(12..14)? != IPV6 || (frame.get(20)?, frame.get(54)?) != (&ICMPV6, &ADVERTISEMENT) {
        return None;
    }
    let flags = frame.get(58)?;
    let form = Form::Advertisement { solicited: flags & 0x40 != 0, overrides: flags & 0x20 != 0 };
    let address: [u8; 16] = frame.get(62..78)?.try_into().ok()?;
    // The option "target link-layer address" (type 2, one unit of 8 bytes) comes first in the frames of an agent.
    let mac = if frame.get(78..80) == Some(&[2, 1]) { frame.get(80..86)? } else { frame.get(6..12)? };
    Some(claim(form, mac, address.into()))
}

impl Asker {
    /// The frame that asks for the MAC address of `address`: an ARP request, or a neighbour solicitation.
    fn question(&self, address: IpAddr) -> Vec<u8> {
        match address {
            IpAddr::V4(v4) => self.arp_request(v4),
            IpAddr::V6(v6) => self.solicitation(v6),
        }
    }

    fn arp_request(&self, target: Ipv4Addr) -> Vec<u8> {
        // Hardware type Ethernet, protocol type IPv4, address lengths of 6 and 4 bytes, operation request (RFC 826).
        let header = [0, 1, 8, 0, 6, 4, 0, 1];
        [&[0xff; 6], &self.mac[..], &ARP, &header, &self.mac, &self.v4.octets(), &[0; 6], &target.octets()]
            .concat()
    }

    fn solicitation(&self, target: Ipv6Addr) -> Vec<u8> {
        let [.., x, y, z] = target.octets();
        // The solicited-node multicast address of the target (RFC 4291 §2.7.1).
        let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(x), u16::from_be_bytes([y, z]));
        // The option "source link-layer address".
        let rest = [&target.octets()[..], &[1, 1], &self.mac].concat();
        let addresses = [self.v6.octets(), group.octets()].concat();
        let pseudo_header = [&addresses[..], &[0, 0, 0, 32, 0, 0, 0, ICMPV6]].concat();
        let summed = [&pseudo_header[..], &[SOLICITATION, 0, 0, 0, 0, 0, 0, 0], &rest].concat();
        let checksum = internet_checksum(&summed).to_be_bytes();
        let header = [0x60, 0, 0, 0, 0, 32, ICMPV6, 255];
        let message = [&[SOLICITATION, 0], &checksum[..], &[0; 4], &rest].concat();
        [&[0x33, 0x33, 0xff, x, y, z], &self.mac[..], &IPV6, &header, &addresses, &message].concat()
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{Icmpv6Type, NetHeaders, PacketHeaders, TransportHeader};

    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
    const ASKER: Asker = Asker {
        mac: MAC,
        v4: Ipv4Addr::new(192, 0, 2, 250),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0xfa),
    };

    fn claim(at: u64, mac: &str) -> Claim {
        let (at, address, form) = (Duration::from_secs(at), IpAddr::from([192, 0, 2, 1]), Form::ArpReply);
        Claim { at, mac: mac.to_owned(), address, form, to_all: false }
    }

    #[test]
    fn turns_group_consecutive_claims_of_one_machine() {
        let turn = |mac: &str, first, last| {
            let [first, last] = [first, last].map(Duration::from_secs);
            Turn { mac: mac.to_owned(), first, last }
        };
        let claims = [claim(1, "a"), claim(2, "a"), claim(5, "b"), claim(6, "a")];
        assert_eq!(turns(&claims), [turn("a", 1, 2), turn("b", 5, 5), turn("a", 6, 6)]);
        assert_eq!(turns(&[]), []);
    }

    #[test]
    fn arp_packet_is_a_claim_of_its_sender_address() {
        let frame = ASKER.arp_request(Ipv4Addr::new(192, 0, 2, 1));
        let parsed = parse(&frame).unwrap();
        assert_eq!((&*parsed.mac, parsed.address), ("02:00:00:00:00:07", IpAddr::from(ASKER.v4)));
        assert_eq!((parsed.form, parsed.to_all), (Form::ArpRequest, true));
        let reply = [&MAC[..], &frame[6..21], &[2], &frame[22..]].concat();
        let parsed = parse(&reply).unwrap();
        assert_eq!((parsed.form, parsed.to_all), (Form::ArpReply, false));
        assert_eq!(parse(&frame[..30]), None);
    }

    #[test]
    fn solicitation_has_a_correct_checksum_and_only_an_advertisement_is_a_claim() {
        let target = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0x6d, 0xa1b2);
        let frame = ASKER.solicitation(target);
        let headers = PacketHeaders::from_ethernet_slice(&frame).unwrap();
        let (Some(NetHeaders::Ipv6(ip, _)), Some(TransportHeader::Icmpv6(icmp))) =
            (&headers.net, &headers.transport)
        else {
            panic!("{headers:?}");
        };
        assert!(matches!(icmp.icmp_type, Icmpv6Type::NeighborSolicitation), "{icmp:?}");
        assert_eq!(ip.destination_addr(), "ff02::1:ff6d:a1b2".parse::<Ipv6Addr>().unwrap());
        let expected =
            icmp.icmp_type.calc_checksum(ip.source, ip.destination, headers.payload.slice()).unwrap();
        assert_eq!(icmp.checksum, expected);
        assert_eq!(parse(&frame), None);

        let mut advertisement = frame;
        (advertisement[54], advertisement[58], advertisement[78]) = (ADVERTISEMENT, 0x60, 2);
        let parsed = parse(&advertisement).unwrap();
        assert_eq!((&*parsed.mac, parsed.address), ("02:00:00:00:00:07", IpAddr::from(target)));
        assert_eq!(parsed.form, Form::Advertisement { solicited: true, overrides: true });
    }
}
