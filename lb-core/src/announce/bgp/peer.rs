//! MetalLB's `BGPPeer` and `BFDProfile`.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU32,
    ops::RangeInclusive,
};

use super::{super::scope::Nodes, token::Quoted};
use crate::{
    api,
    convert::{ConvertError, Object, object_name},
    load_balancer::Labels,
    model::ObjectName,
    rules,
};

/// Default hold time in seconds: that of MetalLB's own daemon.
const HOLD: u64 = 90;
/// The default TCP port of a peer.
const PORT: u16 = 179;
/// Number of nanoseconds in a second.
const SECOND: u128 = 1_000_000_000;
/// The longest duration of Go, in nanoseconds: 292 years.
const LONGEST: u128 = (1 << 63) - 1;
/// Maximum length of the name of a protocol in BIRD, in bytes.
const MAX_NAME: usize = 63;

/// A router that learns routes from nodes by BGP.
#[derive(Clone, PartialEq, Eq)]
pub struct Peer {
    /// Namespace and name of the BGPPeer object.
    pub name: ObjectName,
    nodes: Nodes,
    pub(super) local_asn: NonZeroU32,
    pub(super) remote_asn: RemoteAsn,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) source: Option<IpAddr>,
    /// Hold time in seconds; 0 for a session that never expires.
    pub(super) hold: u64,
    /// Seconds between two keepalive messages. It is 0 exactly if `hold` is 0; then no such messages are sent.
    pub(super) keepalive: u64,
    /// Seconds between two attempts to connect.
    pub(super) connect: u64,
    pub(super) router_id: Option<Ipv4Addr>,
    pub(super) password: Option<Quoted>,
    /// The Secret whose key `password` holds the password; `None` if the BGPPeer itself holds it, or has no password.
    pub password_secret: Option<ObjectName>,
    pub(super) bfd_profile: Option<String>,
    pub(super) graceful_restart: bool,
    pub(super) multihop: bool,
    /// Whether the router must be in a network of the node. Set for BFD within an AS if no source address is given,
    /// because BFD over several hops needs a source address.
    pub(super) direct: bool,
    pub(super) vrf: Option<Quoted>,
    /// Whether one session carries routes of IPv4 and IPv6.
    pub(super) both_families: bool,
}

/// The autonomous system that the router must belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RemoteAsn {
    Number(NonZeroU32),
    Internal,
    External,
}

/// The intervals and limits with which BFD detects that a router has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BfdProfile {
    /// Minimum interval, in milliseconds, at which this end is ready to receive BFD packets.
    pub(super) receive: u32,
    /// Minimum interval, in milliseconds, at which this end sends BFD packets.
    pub(super) transmit: u32,
    pub(super) multiplier: u32,
    pub(super) passive: bool,
}

/// Shows what identifies the peer, never its password.
impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("name", &self.name)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Peer {
    /// Reads a peer.
    ///
    /// # Errors
    ///
    /// The first field that is invalid or that BIRD cannot express.
    pub fn new(peer: &api::BgpPeer) -> Result<Self, ConvertError> {
        let name = object_name("BGPPeer", &peer.metadata)?;
        let object = Object::new("BGPPeer", &name);
        let spec = &peer.spec;
        if name.to_string().len() > MAX_NAME {
            let why =
                format!("with its namespace, the name must be no more than {} characters", MAX_NAME - 1);
            return Err(object.invalid("metadata.name", &*name.name, &why));
        }
        refuse_unsupported(&object, spec)?;
        let address = spec.peer_address.as_deref().unwrap_or_default();
        let address = machine(&object, "spec.peerAddress", address)?;
        let (local_asn, remote_asn) = autonomous_systems(&object, spec)?;
        let (hold, keepalive) = timers(&object, spec)?;
        let multihop = spec.ebgp_multi_hop.unwrap_or(false);
        let is_internal =
            matches!(remote_asn, RemoteAsn::Internal) || remote_asn == RemoteAsn::Number(local_asn);
        if multihop && is_internal {
            return Err(object
                .error("spec.ebgpMultiHop", "Invalid value: true: the peer is of the same AS".to_owned()));
        }
        let source = source(&object, spec, address)?;
        let bfd_profile = spec.bfd_profile.clone().filter(|name| !name.is_empty());
        if multihop && bfd_profile.is_some() && source.is_none() {
            return Err(object.required("spec.sourceAddress", "BIRD needs it for BFD over several hops"));
        }
        let port = spec.peer_port.unwrap_or(PORT.into());
        Ok(Self {
            nodes: Nodes::new(&object, spec.node_selectors.as_deref())?,
            local_asn,
            remote_asn,
            port: number(&object, "spec.peerPort", port, 1..=65535)?,
            source,
            address,
            hold,
            keepalive,
            connect: seconds(&object, "spec.connectTime", spec.connect_time.as_deref())?
                .unwrap_or(120)
                .clamp(1, 65535),
            router_id: router_id(&object, spec)?,
            password: password(&object, spec)?,
            password_secret: password_secret(&object, spec, &name)?,
            // By default BIRD treats a session within an AS as multihop, for which BFD needs a source address.
            direct: is_internal && bfd_profile.is_some() && source.is_none(),
            bfd_profile,
            graceful_restart: spec.enable_graceful_restart.unwrap_or(false),
            multihop,
            vrf: vrf(&object, spec)?,
            both_families: spec.dual_stack_address_family.unwrap_or(false),
            name,
        })
    }

    /// Whether the password of the peer's Secret is not known.
    pub const fn lacks_password(&self) -> bool {
        self.password_secret.is_some() && self.password.is_none()
    }

    /// Sets the password that the peer's Secret has.
    ///
    /// # Errors
    ///
    /// The rules for passwords, if `text` breaks any of them. The error does not show `text`.
    pub fn set_password(&mut self, text: &str) -> Result<(), &'static str> {
        self.password = Some(quoted_password(text).ok_or(VALID_PASSWORD)?);
        Ok(())
    }

    /// Whether nodes with these labels connect to the router.
    pub fn selects_node(&self, labels: &Labels) -> bool {
        self.nodes.select(labels)
    }
}

fn refuse_unsupported(object: &Object, spec: &api::BgpPeerSpec) -> Result<(), ConvertError> {
    let refuse = |field: &str, why: &str| Err(object.error(field, format!("not supported: {why}")));
    if spec.interface.as_ref().is_some_and(|name| !name.is_empty()) {
        return refuse("spec.interface", "give the router's address in spec.peerAddress");
    }
    Ok(())
}

fn autonomous_systems(
    object: &Object,
    spec: &api::BgpPeerSpec,
) -> Result<(NonZeroU32, RemoteAsn), ConvertError> {
    let asn = |field: &str, given: i64| {
        let asn = u32::try_from(given).ok().and_then(NonZeroU32::new);
        asn.ok_or_else(|| object.invalid(field, given, "must be from 1 to 4294967295"))
    };
    let of_node = asn("spec.myASN", spec.my_asn.unwrap_or(0))?;
    let local =
        spec.local_asn.filter(|asn| *asn != 0).map(|given| asn("spec.localASN", given)).transpose()?;
    let number = spec.peer_asn.filter(|asn| *asn != 0);
    let dynamic = spec.dynamic_asn.as_deref().filter(|text| !text.is_empty());
    let remote = match (number, dynamic) {
        (Some(number), None) => RemoteAsn::Number(asn("spec.peerASN", number)?),
        (None, Some("internal")) => RemoteAsn::Internal,
        (None, Some("external")) => RemoteAsn::External,
        (None, Some(other)) => {
            return Err(object.unsupported("spec.dynamicASN", other, &["external", "internal"]));
        }
        (Some(_), Some(_)) | (None, None) => {
            return Err(object.required("spec.peerASN", "give either spec.peerASN or spec.dynamicASN"));
        }
    };
    Ok((local.unwrap_or(of_node), remote))
}

/// Hold time and keepalive interval in seconds. Unless the object sets both, the interval is a third of the hold time,
/// which is [`HOLD`] if the object sets neither.
fn timers(object: &Object, spec: &api::BgpPeerSpec) -> Result<(u64, u64), ConvertError> {
    let hold = seconds(object, "spec.holdTime", spec.hold_time.as_deref())?;
    let keepalive = seconds(object, "spec.keepaliveTime", spec.keepalive_time.as_deref())?;
    let hold = hold.or_else(|| keepalive.map(|keepalive| keepalive * 3)).unwrap_or(HOLD);
    if hold != 0 && !(3..=65535).contains(&hold) {
        return Err(object.invalid("spec.holdTime", hold, "must be 0, or from 3 to 65535 seconds"));
    }
    let keepalive = keepalive.unwrap_or(hold / 3);
    if keepalive > hold || (keepalive == 0 && hold != 0) {
        let why = "must be at least 1 second, and not longer than the hold time";
        return Err(object.invalid("spec.keepaliveTime", keepalive, why));
    }
    Ok((hold, keepalive))
}

fn seconds(object: &Object, field: &str, text: Option<&str>) -> Result<Option<u64>, ConvertError> {
    let Some(text) = text else { return Ok(None) };
    let whole = nanoseconds(text).filter(|nanoseconds| *nanoseconds <= LONGEST && nanoseconds % SECOND == 0);
    match whole.and_then(|nanoseconds| u64::try_from(nanoseconds / SECOND).ok()) {
        Some(seconds) => Ok(Some(seconds)),
        None => Err(object.invalid(field, text, "must be a duration of whole seconds, such as 90s or 1m30s")),
    }
}

/// Parses a duration as Go's `time.ParseDuration` does, such as `1m30s`, `+1.5m` or `0`, but no negative duration. The
/// result is in nanoseconds.
fn nanoseconds(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Some(0);
    }
    let mut rest = text;
    let mut sum = 0_u128;
    let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c| !is_of_number(c))?);
        let (unit, after) = after.split_at(after.find(is_of_number).unwrap_or(after.len()));
        let unit: u128 = match unit {
            "ns" => 1,
            "us" | "\u{b5}s" | "\u{3bc}s" => 1000,
            "ms" => 1_000_000,
            "s" => SECOND,
            "m" => 60 * SECOND,
            "h" => 3600 * SECOND,
            _ => return None,
        };
        sum = sum.checked_add(times(number, unit)?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(sum)
}

/// A decimal number such as `1.5` or `.5`, times the unit, rounded down to an integer.
fn times(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<u64>().ok() };
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let part = u128::from(digits(fraction)?) * unit / scale;
    (!whole.is_empty() || !fraction.is_empty()).then_some(u128::from(digits(whole)?) * unit + part)
}

/// Parses the address of a single machine. Loopback is allowed, because a router may run on the node itself.
fn machine(object: &Object, field: &str, text: &str) -> Result<IpAddr, ConvertError> {
    let address = rules::stored_ip(text).map_err(|why| object.invalid(field, text, why))?;
    if !address.is_loopback() {
        rules::endpoint_ip(address).map_err(|why| object.invalid(field, text, why))?;
    }
    Ok(address)
}

fn source(object: &Object, spec: &api::BgpPeerSpec, peer: IpAddr) -> Result<Option<IpAddr>, ConvertError> {
    let field = "spec.sourceAddress";
    let Some(text) = spec.source_address.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
    let source = machine(object, field, text)?;
    if source.is_ipv4() != peer.is_ipv4() {
        return Err(object.invalid(field, text, "must be of the family of spec.peerAddress"));
    }
    Ok(Some(source))
}

fn router_id(object: &Object, spec: &api::BgpPeerSpec) -> Result<Option<Ipv4Addr>, ConvertError> {
    let Some(text) = spec.router_id.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
    let id = text.parse::<Ipv4Addr>().ok().filter(|id| !id.is_unspecified());
    id.map(Some)
        .ok_or_else(|| object.invalid("spec.routerID", text, "must be an IPv4 address other than 0.0.0.0"))
}

/// The password of the session, if it has one. Errors never show it.
fn password(object: &Object, spec: &api::BgpPeerSpec) -> Result<Option<Quoted>, ConvertError> {
    let Some(text) = spec.password.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
    let password = quoted_password(text);
    password
        .map(Some)
        .ok_or_else(|| object.error("spec.password", format!("Invalid value: {VALID_PASSWORD}")))
}

/// The rule for passwords, in the words of the error.
const VALID_PASSWORD: &str = "must have 1 to 80 bytes, no quotation marks and no control characters";

fn quoted_password(text: &str) -> Option<Quoted> {
    Quoted::new(text).filter(|_| (1..=80).contains(&text.len()))
}

/// The Secret that has the password, by default in the namespace of the BGPPeer `peer`.
fn password_secret(
    object: &Object,
    spec: &api::BgpPeerSpec,
    peer: &ObjectName,
) -> Result<Option<ObjectName>, ConvertError> {
    let secret = spec.password_secret.clone();
    let Some(name) = secret.name.filter(|name| !name.is_empty()) else { return Ok(None) };
    if spec.password.as_ref().is_some_and(|text| !text.is_empty()) {
        let why = "Invalid value: give either spec.password or spec.passwordSecret".to_owned();
        return Err(object.error("spec.passwordSecret", why));
    }
    let namespace = secret.namespace.filter(|namespace| !namespace.is_empty());
    let namespace = namespace.map_or_else(|| peer.namespace.clone(), Into::into);
    Ok(Some(ObjectName { namespace, name: name.into() }))
}

/// The name of the VRF's device. As in the kernel, at most 15 bytes, without slashes, colons and white space.
fn vrf(object: &Object, spec: &api::BgpPeerSpec) -> Result<Option<Quoted>, ConvertError> {
    let Some(name) = spec.vrf.as_deref().filter(|name| !name.is_empty()) else { return Ok(None) };
    let is_device = name.len() <= 15 && !name.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace());
    let quoted = Quoted::new(name).filter(|_| is_device);
    quoted.map(Some).ok_or_else(|| object.invalid("spec.vrf", name, "must be the name of a device"))
}

fn number<T: TryFrom<i64>>(
    object: &Object,
    field: &str,
    given: i64,
    range: RangeInclusive<i64>,
) -> Result<T, ConvertError> {
    let found = range.contains(&given).then(|| T::try_from(given).ok()).flatten();
    let why = || format!("must be from {} to {}", range.start(), range.end());
    found.ok_or_else(|| object.invalid(field, given, &why()))
}

impl BfdProfile {
    /// Reads a profile. Also returns an error for `echoMode: true` and for a `minimumTtl` other than 254, because BIRD
    /// supports neither. (`echoInterval`, a detail of `echoMode`, gets no error of its own.)
    ///
    /// # Errors
    ///
    /// The first invalid field.
    pub fn new(profile: &api::BfdProfile) -> Result<(Self, Vec<ConvertError>), ConvertError> {
        let object = Object::new("BFDProfile", &object_name("BFDProfile", &profile.metadata)?);
        let spec = &profile.spec;
        let milliseconds = |given: Option<i64>, field: &str| {
            number(&object, &format!("spec.{field}"), given.unwrap_or(300), 10..=60_000)
        };
        let read = Self {
            receive: milliseconds(spec.receive_interval, "receiveInterval")?,
            transmit: milliseconds(spec.transmit_interval, "transmitInterval")?,
            multiplier: number(
                &object,
                "spec.detectMultiplier",
                spec.detect_multiplier.unwrap_or(3),
                2..=255,
            )?,
            passive: spec.passive_mode.unwrap_or(false),
        };
        let without_effect = [
            ("spec.echoMode", spec.echo_mode == Some(true), "BIRD has no echo mode"),
            (
                "spec.minimumTtl",
                spec.minimum_ttl.is_some_and(|ttl| ttl != 254),
                "BIRD checks no TTL over several hops",
            ),
        ];
        let ignored = without_effect.into_iter().filter(|(_, given, _)| *given);
        Ok((read, ignored.map(|(field, _, why)| object.error(field, format!("ignored: {why}"))).collect()))
    }
}
