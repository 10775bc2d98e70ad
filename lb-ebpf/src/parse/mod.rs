//! Parsing: from bytes to a [`Packet`].

use lb_common::{Outcome, protocol};

pub mod bounds;
pub mod frame;
mod ip;
mod packet;
mod plain;
#[cfg(any(test, feature = "properties"))]
pub mod properties;
mod transport;

pub(crate) use self::ip::{Ip, network_offset};
use self::{
    frame::Frame,
    transport::{icmp, sctp, tcp, udp},
};
pub use self::{
    packet::{Body, Fragment, Headers, Layer, Packet, Part, Quoted},
    plain::{TupleRule, is_plain_and, parse_plain},
    transport::{ECHO_REQUEST_V4, ECHO_REQUEST_V6, parse_quoted},
};

/// Parses the frame of a device of this `layer`.
///
/// # Errors
///
/// [`Outcome::Malformed`] if a header is truncated or invalid, [`Outcome::NotIp`], or [`Outcome::NotTransport`] if no
/// [`Body`] describes the payload.
#[inline(always)]
pub fn parse<F: Frame + ?Sized>(frame: &F, layer: Layer) -> Result<Packet, Outcome> {
    parse_at(frame, network_offset(frame, layer)?)
}

/// Parses the packet whose network header begins `l3` bytes into the frame.
///
/// # Errors
///
/// As [`parse`].
#[inline(always)]
pub fn parse_at<F: Frame + ?Sized>(frame: &F, l3: u32) -> Result<Packet, Outcome> {
    let ip = Ip::read(frame, l3)?;
    let tuple = ip.tuple();
    if ip.fragment.part == Part::Later {
        return Ok(ip.packet(tuple, Body::LaterFragment));
    }
    match ip.protocol {
        protocol::TCP => tcp(frame, &ip, tuple),
        protocol::UDP => udp(frame, &ip, tuple),
        protocol::SCTP => sctp(frame, &ip, tuple),
        protocol::ICMP if ip.headers.is_v4 => icmp(frame, &ip, tuple),
        protocol::ICMPV6 if !ip.headers.is_v4 => icmp(frame, &ip, tuple),
        _ => Err(Outcome::NotTransport),
    }
}

#[cfg(test)]
mod tests;
