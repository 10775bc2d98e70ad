//! Reads and watches the xfrm (IPsec) policies of direction `out`. The kernel looks policies up when it routes a
//! packet. At that moment the source of a Service's reply is still the endpoint's address, so a policy for a virtual
//! address does not encrypt the reply.

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{IpAddr, Ipv4Addr},
};

use lb_common::{Address, Network, protocol};
use netlink_packet_core::{DecodeError, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_XFRM};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    error::DatapathError,
    net::netlink::{Message, Netlink, read_pending},
};

/// Numbers from include/uapi/linux/xfrm.h.
const XFRM_MSG_GETPOLICY: u16 = 0x15;
const XFRM_POLICY_OUT: u8 = 1;
const XFRM_POLICY_ALLOW: u8 = 0;
const XFRMA_TMPL: u16 = 5;
const XFRMA_MARK: u16 = 21;
const XFRMA_IF_ID: u16 = 31;
const AF_INET: u16 = 2;
/// Size of `struct xfrm_userpolicy_info` in bytes (attributes follow it), and the offsets of its fields.
const POLICY: usize = 168;
const SOURCE: usize = 16;
/// Position of the destination port's mask.
const DESTINATION_PORTS: std::ops::Range<usize> = 34..36;
const FAMILY: usize = 40;
const DESTINATION_PREFIX: usize = 42;
const SOURCE_PREFIX: usize = 43;
const IP_PROTOCOL: usize = 44;
const DEVICE: std::ops::Range<usize> = 48..52;
const DIRECTION: usize = 160;
const ACTION: usize = 161;

/// Networks of a policy that encrypts packets when they leave this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutPolicy {
    pub(crate) source: (IpAddr, u8),
    pub(crate) destination: (IpAddr, u8),
}

impl OutPolicy {
    /// Whether replies from this virtual address bypass the policy. Replies never bypass a policy without a source
    /// network (`src 0.0.0.0/0`), because such a policy also matches the endpoint's address.
    pub(crate) fn is_bypassed_from(&self, vip: IpAddr) -> bool {
        self.source.1 > 0 && contains(self.source, vip)
    }

    /// Whether replies from this virtual address to this client bypass the policy.
    pub(crate) fn is_bypassed(&self, vip: IpAddr, client: IpAddr) -> bool {
        self.is_bypassed_from(vip) && contains(self.destination, client)
    }

    /// The network of the clients to which the policy encrypts packets: address and prefix length.
    pub const fn clients(&self) -> (IpAddr, u8) {
        self.destination
    }
}

fn contains((network, prefix): (IpAddr, u8), address: IpAddr) -> bool {
    network.is_ipv4() == address.is_ipv4()
        && Network::new(network.into(), prefix).contains(&Address::from(address))
}

impl fmt::Display for OutPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((source, from), (destination, to)) = (self.source, self.destination);
        write!(f, "src {source}/{from} dst {destination}/{to} dir out")
    }
}

/// The policies of this network namespace that encrypt packets when they leave the node, except those that replies of
/// Services cannot bypass ([`is_for_replies`]). Empty on a kernel without xfrm.
pub(crate) fn out_policies() -> Result<Vec<OutPolicy>, DatapathError> {
    let failed = |error| DatapathError::netlink("list xfrm policies", error);
    let mut netlink = match Netlink::open() {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        opened => opened.map_err(failed)?,
    };
    let answers: io::Result<Vec<Xfrm>> = netlink.dump(&Xfrm::List);
    let policy = |answer| if let Xfrm::Policy(policy) = answer { policy } else { None };
    Ok(answers.map_err(failed)?.into_iter().filter_map(policy).collect())
}

/// The policies among `policies` that replies from virtual addresses bypass, each with the virtual addresses of these
/// replies. Calls `vips` only if there is a policy.
pub(crate) fn bypassed(
    policies: Vec<OutPolicy>,
    vips: impl FnOnce() -> Result<BTreeSet<IpAddr>, DatapathError>,
) -> Result<Vec<(OutPolicy, Vec<IpAddr>)>, DatapathError> {
    if policies.is_empty() {
        return Ok(Vec::new());
    }
    let vips = vips()?;
    let with_vips = |policy: OutPolicy| {
        let of: Vec<IpAddr> = vips.iter().copied().filter(|vip| policy.is_bypassed_from(*vip)).collect();
        (!of.is_empty()).then_some((policy, of))
    };
    Ok(policies.into_iter().filter_map(with_vips).collect())
}

/// Watches the xfrm policies of a network namespace.
#[derive(Debug)]
pub struct PolicyWatcher(AsyncFd<Socket>);

impl PolicyWatcher {
    /// Starts to watch the network namespace of this thread; `None` on a kernel without xfrm. Must be called within a
    /// Tokio runtime.
    pub fn open() -> Result<Option<Self>, DatapathError> {
        /// Multicast group `XFRMNLGRP_POLICY` (4), as a bit of `sockaddr_nl`.
        const POLICIES: u32 = 1 << (4 - 1);
        let subscribe = || -> io::Result<AsyncFd<Socket>> {
            let mut socket = Socket::new(NETLINK_XFRM)?;
            socket.set_non_blocking(true)?;
            socket.bind(&SocketAddr::new(0, POLICIES))?;
            // SAFETY: the socket keeps its descriptor until it is dropped, and nothing else closes it.
            Ok(unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?)
        };
        match subscribe() {
            Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(None),
            Err(error) => Err(DatapathError::netlink("watch xfrm policies", error)),
            Ok(events) => Ok(Some(Self(events))),
        }
    }

    /// Returns after a policy has changed. Cancel-safe.
    pub async fn changed(&self) -> Result<(), DatapathError> {
        let ready = self.0.readable().await;
        let mut ready = ready.map_err(|error| DatapathError::netlink("watch xfrm policies", error))?;
        // Lost events also count as a change.
        read_pending(ready.get_inner(), |_| {})
            .map_err(|error| DatapathError::netlink("watch xfrm policies", error))?;
        ready.clear_ready();
        Ok(())
    }
}

/// Messages of the netlink protocol xfrm: requests, and answers.
#[derive(Clone, Copy, Debug)]
enum Xfrm {
    /// A request to list all policies.
    List,
    /// A policy in an answer; `None` for a policy that does not encrypt packets when they leave the node, or that
    /// replies of Services cannot bypass ([`is_for_replies`]).
    Policy(Option<OutPolicy>),
}

impl NetlinkSerializable for Xfrm {
    fn message_type(&self) -> u16 {
        XFRM_MSG_GETPOLICY
    }

    fn buffer_len(&self) -> usize {
        0
    }

    fn serialize(&self, _buffer: &mut [u8]) {}
}

impl NetlinkDeserializable for Xfrm {
    type Error = DecodeError;

    fn deserialize(_header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        if payload.len() < POLICY {
            return Err(DecodeError::from("an xfrm policy that is too short"));
        }
        let encrypts = payload[DIRECTION] == XFRM_POLICY_OUT
            && payload[ACTION] == XFRM_POLICY_ALLOW
            && has_attribute(&payload[POLICY..], XFRMA_TMPL)
            && is_for_replies(payload);
        let is_v4 = u16::from_ne_bytes([payload[FAMILY], payload[FAMILY + 1]]) == AF_INET;
        let networks = || {
            Some(OutPolicy {
                source: (address(&payload[SOURCE..], is_v4)?, payload[SOURCE_PREFIX]),
                destination: (address(payload, is_v4)?, payload[DESTINATION_PREFIX]),
            })
        };
        Ok(Self::Policy(if encrypts { networks() } else { None }))
    }
}

impl Message for Xfrm {
    const PROTOCOL: isize = NETLINK_XFRM;
}

fn address(bytes: &[u8], is_v4: bool) -> Option<IpAddr> {
    if is_v4 {
        let v4: [u8; 4] = *bytes.first_chunk()?;
        Some(Ipv4Addr::from(v4).into())
    } else {
        let v6: [u8; 16] = *bytes.first_chunk()?;
        Some(v6.into())
    }
}

/// Whether replies of Services may bypass the policy, because the kernel looks it up before a program sets the source
/// of the reply to the virtual address. False for policies of tunnels between nodes, which match only the tunnel's
/// protocol or port. Also false for policies with a device, a mark or an interface id, because the kernel looks up
/// these policies after the programs have run.
fn is_for_replies(payload: &[u8]) -> bool {
    let of_services = [0, protocol::TCP, protocol::UDP, protocol::SCTP];
    let attributes = &payload[POLICY..];
    of_services.contains(&payload[IP_PROTOCOL])
        && payload[DESTINATION_PORTS] == [0; 2]
        && payload[DEVICE] == [0; 4]
        && !has_attribute(attributes, XFRMA_MARK)
        && !has_attribute(attributes, XFRMA_IF_ID)
}

/// Whether an attribute of type `kind` is among the attributes.
fn has_attribute(mut attributes: &[u8], kind: u16) -> bool {
    while let [a, b, c, d, ..] = *attributes {
        if u16::from_ne_bytes([c, d]) == kind {
            return true;
        }
        // The length of an attribute includes its header of 4 bytes. A length below 4 is malformed and counts as 4, so
        // that the walk always ends.
        let length = usize::from(u16::from_ne_bytes([a, b])).max(4).next_multiple_of(4);
        attributes = attributes.get(length..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(direction: u8, action: u8, attribute: u16) -> Option<OutPolicy> {
        policy_with(direction, action, attribute, |_| {})
    }

    fn policy_with(
        direction: u8,
        action: u8,
        attribute: u16,
        change: impl FnOnce(&mut Vec<u8>),
    ) -> Option<OutPolicy> {
        let mut payload = vec![0; POLICY];
        payload[..4].copy_from_slice(&[192, 0, 2, 0]);
        payload[SOURCE..SOURCE + 4].copy_from_slice(&[10, 96, 0, 0]);
        payload[FAMILY..FAMILY + 2].copy_from_slice(&AF_INET.to_ne_bytes());
        (payload[DESTINATION_PREFIX], payload[SOURCE_PREFIX]) = (24, 12);
        (payload[DIRECTION], payload[ACTION]) = (direction, action);
        payload.extend([4_u16.to_ne_bytes(), 9_u16.to_ne_bytes()].concat());
        payload.extend([4_u16.to_ne_bytes(), attribute.to_ne_bytes()].concat());
        change(&mut payload);
        let Ok(Xfrm::Policy(found)) = Xfrm::deserialize(&NetlinkHeader::default(), &payload) else {
            panic!("no policy")
        };
        found
    }

    #[test]
    fn policies_of_tunnels_between_nodes_and_of_devices_are_no_concern() {
        let found = |change: &dyn Fn(&mut Vec<u8>)| {
            policy_with(XFRM_POLICY_OUT, XFRM_POLICY_ALLOW, XFRMA_TMPL, change).is_some()
        };
        let with =
            |kind: u16| move |bytes: &mut Vec<u8>| bytes.extend([4, kind].map(u16::to_ne_bytes).concat());
        assert!(found(&|_| {}) && found(&|bytes| bytes[IP_PROTOCOL] = protocol::TCP));
        assert!(!found(&|bytes| bytes[IP_PROTOCOL] = 47), "GRE");
        assert!(!found(&|bytes| bytes[DESTINATION_PORTS].fill(0xff)), "one port of the other node");
        assert!(!found(&|bytes| bytes[DEVICE].fill(1)));
        assert!(!found(&with(XFRMA_MARK)) && !found(&with(XFRMA_IF_ID)));
    }

    #[test]
    fn only_policies_that_encrypt_what_leaves_are_found() {
        let found = policy(XFRM_POLICY_OUT, XFRM_POLICY_ALLOW, XFRMA_TMPL).unwrap();
        assert_eq!(found.to_string(), "src 10.96.0.0/12 dst 192.0.2.0/24 dir out");
        for (address, expected) in [("10.100.0.1", true), ("10.0.0.1", false), ("fd00::1", false)] {
            assert_eq!(found.is_bypassed_from(address.parse().unwrap()), expected, "{address}");
        }
        for (client, expected) in [("192.0.2.9", true), ("192.0.3.9", false)] {
            let vip = "10.100.0.1".parse().unwrap();
            assert_eq!(found.is_bypassed(vip, client.parse().unwrap()), expected, "{client}");
            let any = OutPolicy { source: (Ipv4Addr::UNSPECIFIED.into(), 0), ..found };
            assert!(!any.is_bypassed(vip, client.parse().unwrap()), "it encrypts what endpoints send");
        }
        assert_eq!(policy(2, XFRM_POLICY_ALLOW, XFRMA_TMPL), None, "forwarded");
        assert_eq!(policy(XFRM_POLICY_OUT, 1, XFRMA_TMPL), None, "blocks");
        assert_eq!(policy(XFRM_POLICY_OUT, XFRM_POLICY_ALLOW, 6), None, "bypasses");
        assert!(Xfrm::deserialize(&NetlinkHeader::default(), &[0; 20]).is_err());
    }
}
