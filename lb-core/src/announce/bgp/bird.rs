//! The configuration of BIRD 2.
//!
//! Communities and local preference are set where routes leave towards a peer. Only advertisements, peers and pools change
//! the text, and equal objects give equal text, so that BIRD is never configured for the change of a Service.

use std::{collections::BTreeSet, fmt::Write as _, net::Ipv4Addr};

use super::{
    advertisement::{BgpAdvertisement, RouteSet},
    community::Community,
    peer::{BfdProfile, Peer, RemoteAsn},
};
use crate::{
    announce::advertisement::Advertised,
    convert::{ConvertError, Object},
    family::Family,
    load_balancer::Labels,
    model::ObjectName,
};

/// Marks the routes that the agent offers (`rtnetlink(7)`, `rtm_protocol`).
pub const PROTOCOL: u8 = 109;
/// Seconds between two scans of the kernel's table, which find changes that no message has announced.
const SCAN: u32 = 10;

/// A configuration, as far as the objects are sound.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Configuration {
    /// The text of the file. It may have passwords.
    pub text: String,
    /// Objects that the text leaves out, because they refer to missing objects or contradict others; and advertisements
    /// whose routes for a pool it leaves out, because they are wider than the pool.
    pub errors: Vec<ConvertError>,
    /// References without effect.
    pub warnings: Vec<ConvertError>,
}

/// The configuration for a node with these labels, whose routes are in the kernel's table `table`.
pub fn configuration(advertised: &Advertised, table: u32, labels: &Labels) -> Configuration {
    let mut builder = Builder { advertised, labels, result: Configuration::default() };
    let advertisements = builder.advertisements();
    let peers = builder.peers();
    builder.check_references();
    let mut text = head(&peers, table);
    for (peer, profile) in &peers {
        _ = session(&mut text, peer, *profile, &advertisements);
    }
    Configuration { text, ..builder.result }
}

/// The configuration without its passwords.
pub fn without_passwords(text: &str) -> String {
    let line = |line: &str| match line.split_once("password \"") {
        Some((before, _)) => format!("{before}password \"...\"; # hidden\n"),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

/// An advertisement with its routes and attributes.
struct Resolved<'a> {
    advertisement: &'a BgpAdvertisement,
    routes: BTreeSet<RouteSet>,
    communities: BTreeSet<Community>,
}

struct Builder<'a> {
    advertised: &'a Advertised,
    labels: &'a Labels,
    result: Configuration,
}

impl<'a> Builder<'a> {
    /// The advertisements of this node. Those with a higher local preference come later, and win.
    fn advertisements(&mut self) -> Vec<Resolved<'a>> {
        let bgp = &self.advertised.bgp;
        let of_node = bgp.advertisements.values().filter(|it| it.selects_node(self.labels));
        let mut resolved: Vec<Resolved<'_>> = of_node.filter_map(|it| self.resolve(it)).collect();
        resolved.sort_by_key(|it| (it.advertisement.local_pref, it.advertisement.name.clone()));
        for (index, one) in resolved.iter().enumerate() {
            let conflicts = |other: &&Resolved<'_>| contradict(one, other);
            if let Some(other) = resolved[..index].iter().find(conflicts) {
                let error = Object::new("BGPAdvertisement", &other.advertisement.name).error(
                    "spec.localPref",
                    format!(
                        "Invalid value: {}: BGPAdvertisement {} announces the same routes with {}, which wins",
                        other.advertisement.local_pref, one.advertisement.name, one.advertisement.local_pref
                    ),
                );
                self.result.warnings.push(error);
            }
        }
        resolved
    }

    /// `None` if a community has no value: without it, routes could go further than they may.
    fn resolve(&mut self, advertisement: &'a BgpAdvertisement) -> Option<Resolved<'a>> {
        let object = Object::new("BGPAdvertisement", &advertisement.name);
        let known = self.result.errors.len();
        let mut communities = BTreeSet::new();
        for (index, text) in advertisement.communities.iter().enumerate() {
            match self.community(text) {
                Ok(community) => _ = communities.insert(community),
                Err(why) => {
                    let error = object.invalid(format!("spec.communities[{index}]"), text, &why);
                    self.result.errors.push(error);
                }
            }
        }
        if self.result.errors.len() > known {
            return None;
        }
        let mut routes = BTreeSet::new();
        for pool in &self.advertised.pools {
            if let Some((field, range)) = advertisement.too_wide(pool) {
                let why = format!("the routes are wider than {range} of IPAddressPool {}", pool.name);
                self.result.errors.push(object.error(field, format!("Invalid value: {why}")));
            } else if advertisement.announces(pool) {
                routes.extend(advertisement.route_sets(pool));
            }
        }
        Some(Resolved { advertisement, routes, communities })
    }

    /// The value of a community. Names come first, as in MetalLB.
    fn community(&self, text: &str) -> Result<Community, String> {
        let named: Vec<_> =
            self.advertised.bgp.communities.values().filter_map(|names| names.get(text)).collect();
        match named[..] {
            [one] => Ok(*one),
            [] => text.parse().map_err(|why| format!("no Community object has this name; a value {why}")),
            _ => Err("several Community objects have this name".to_owned()),
        }
    }

    /// The peers of this node, with their profiles.
    fn peers(&mut self) -> Vec<(&'a Peer, Option<BfdProfile>)> {
        let mut peers: Vec<(&Peer, Option<BfdProfile>)> = Vec::new();
        for peer in self.advertised.bgp.peers.values().filter(|peer| peer.selects_node(self.labels)) {
            let object = Object::new("BGPPeer", &peer.name);
            if let Some((twin, _)) = peers.iter().find(|(other, _)| is_twin(other, peer)) {
                let why = format!("BGPPeer {} has the same address", twin.name);
                self.result.errors.push(object.invalid("spec.peerAddress", peer.address, &why));
                continue;
            }
            let other_id = peers.iter().find(|(other, _)| other.router_id.is_some());
            if let (Some(id), Some((other, _))) = (peer.router_id, other_id)
                && other.router_id != Some(id)
            {
                let why = format!("differs from that of BGPPeer {}: a node has one", other.name);
                self.result.errors.push(object.invalid("spec.routerID", id, &why));
                continue;
            }
            match self.profile(peer) {
                Ok(profile) => peers.push((peer, profile)),
                Err(why) => {
                    let error = object.invalid(
                        "spec.bfdProfile",
                        peer.bfd_profile.as_deref().unwrap_or_default(),
                        why,
                    );
                    self.result.errors.push(error);
                }
            }
        }
        peers
    }

    fn profile(&self, peer: &Peer) -> Result<Option<BfdProfile>, &'static str> {
        let Some(name) = &peer.bfd_profile else { return Ok(None) };
        let named = ObjectName { namespace: peer.name.namespace.clone(), name: name.as_str().into() };
        let profile = self.advertised.bgp.profiles.get(&named);
        profile.copied().map(Some).ok_or("there is no such BFDProfile in the namespace of the peer")
    }

    /// Finds names of peers and pools that nothing has.
    fn check_references(&mut self) {
        let peers: BTreeSet<&str> = self.advertised.bgp.peers.keys().map(|name| &*name.name).collect();
        let pools: BTreeSet<&str> = self.advertised.pools.iter().map(|pool| &*pool.name).collect();
        for advertisement in self.advertised.bgp.advertisements.values() {
            let object = Object::new("BGPAdvertisement", &advertisement.name);
            let unknown = |names: &BTreeSet<String>, known: &BTreeSet<&str>, field: &str, kind: &str| {
                let unknown = names.iter().filter(|name| !known.contains(name.as_str()));
                let error = |name| object.invalid(field, name, &format!("there is no {kind} of this name"));
                unknown.map(error).collect::<Vec<_>>()
            };
            self.result.warnings.extend(unknown(&advertisement.peers, &peers, "spec.peers", "BGPPeer"));
            let of_pools =
                unknown(advertisement.pools(), &pools, "spec.ipAddressPools", "IPAddressPool in use");
            self.result.warnings.extend(of_pools);
        }
    }
}

/// Whether both announce a route to a peer, with different preferences.
fn contradict(one: &Resolved<'_>, other: &Resolved<'_>) -> bool {
    let share_peer = one.advertisement.peers.is_empty()
        || other.advertisement.peers.is_empty()
        || !one.advertisement.peers.is_disjoint(&other.advertisement.peers);
    one.advertisement.local_pref != other.advertisement.local_pref
        && share_peer
        && !one.routes.is_disjoint(&other.routes)
}

fn is_twin(one: &Peer, other: &Peer) -> bool {
    (one.address, one.port, &one.vrf) == (other.address, other.port, &other.vrf)
}

/// Everything but the sessions.
fn head(peers: &[(&Peer, Option<BfdProfile>)], table: u32) -> String {
    let mut text = "# lb-agent writes this file, and overwrites changes.\n\n".to_owned();
    if let Some(id) = router_id(peers) {
        text += &format!("router id {id};\n\n");
    }
    text += "protocol device {\n}\n";
    if peers.iter().any(|(_, profile)| profile.is_some()) {
        text += "\nprotocol bfd {\n}\n";
    }
    for family in Family::ALL {
        let Names { channel, table: name, .. } = names(family);
        text += &format!(
            "\n{channel} table {name};\nprotocol kernel {name}_kernel {{\n  kernel table {table};\n  learn;\n  \
             scan time {SCAN};\n  {channel} {{\n    table {name};\n    import where krt_source = {PROTOCOL};\n    \
             export none;\n  }};\n}}\n"
        );
    }
    text
}

fn router_id(peers: &[(&Peer, Option<BfdProfile>)]) -> Option<Ipv4Addr> {
    peers.iter().find_map(|(peer, _)| peer.router_id)
}

/// The words of a family.
struct Names {
    channel: &'static str,
    table: &'static str,
}

const fn names(family: Family) -> Names {
    match family {
        Family::V4 => Names { channel: "ipv4", table: "lb4" },
        Family::V6 => Names { channel: "ipv6", table: "lb6" },
    }
}

/// Writes the session with a peer. Writing to a text never fails.
fn session(
    text: &mut String,
    peer: &Peer,
    profile: Option<BfdProfile>,
    advertisements: &[Resolved<'_>],
) -> std::fmt::Result {
    let remote = match peer.remote_asn {
        RemoteAsn::Number(asn) => format!("as {asn}"),
        RemoteAsn::Internal => "internal".to_owned(),
        RemoteAsn::External => "external".to_owned(),
    };
    let name = format!("{}.{}", peer.name.namespace, peer.name.name);
    writeln!(text, "\n# BGPPeer {}\nprotocol bgp '{name}' {{", peer.name)?;
    let source = peer.source.map(|source| format!("{source} ")).unwrap_or_default();
    writeln!(text, "  local {source}as {};", peer.local_asn)?;
    writeln!(text, "  neighbor {} port {} {remote};", peer.address, peer.port)?;
    writeln!(text, "  hold time {};", peer.hold)?;
    if peer.hold != 0 {
        writeln!(text, "  keepalive time {};", peer.keepalive)?;
    }
    writeln!(text, "  connect retry time {};", peer.connect)?;
    if let Some(password) = peer.password() {
        writeln!(text, "  password \"{password}\";")?;
    }
    if let Some(vrf) = &peer.vrf {
        writeln!(text, "  vrf \"{vrf}\";")?;
    }
    let options = [
        (peer.multihop, "multihop"),
        (peer.direct, "direct"),
        (peer.graceful_restart, "graceful restart on"),
    ];
    for (set, option) in options {
        if set {
            writeln!(text, "  {option};")?;
        }
    }
    if let Some(BfdProfile { receive, transmit, multiplier, passive }) = profile {
        let passive = if passive { " passive on;" } else { "" };
        let intervals = format!("min rx interval {receive} ms; min tx interval {transmit} ms;");
        writeln!(text, "  bfd {{ {intervals} multiplier {multiplier};{passive} }};")?;
    }
    for family in Family::ALL {
        if peer.both_families || Family::of(peer.address) == family {
            channel(text, peer, family, advertisements)?;
        }
    }
    writeln!(text, "}}")
}

/// Writes which routes of a family go to the peer, with which attributes.
fn channel(
    text: &mut String,
    peer: &Peer,
    family: Family,
    advertisements: &[Resolved<'_>],
) -> std::fmt::Result {
    let Names { channel, table } = names(family);
    writeln!(text, "  {channel} {{\n    table {table};\n    import none;\n    next hop self;")?;
    if family == Family::V4 && peer.address.is_ipv6() {
        writeln!(text, "    extended next hop on;")?;
    }
    let mut all = BTreeSet::new();
    let mut attributes = String::new();
    for it in advertisements.iter().filter(|it| it.advertisement.is_for(&peer.name.name)) {
        let of_family = it.routes.iter().filter(|set| Family::of(set.network.addr()) == family);
        let routes: BTreeSet<RouteSet> = of_family.copied().collect();
        if !routes.is_empty() {
            attributes += &attributes_of(it, &routes);
        }
        all.extend(routes);
    }
    if all.is_empty() {
        writeln!(text, "    export none;")?;
    } else {
        writeln!(text, "    export filter {{")?;
        writeln!(text, "      if net !~ {} then reject;", patterns(&all))?;
        writeln!(text, "{attributes}      accept;\n    }};")?;
    }
    writeln!(text, "  }};")
}

/// The statements that set the attributes of an advertisement's routes.
fn attributes_of(it: &Resolved<'_>, routes: &BTreeSet<RouteSet>) -> String {
    let local_pref = it.advertisement.local_pref;
    let local_pref = (local_pref != 0).then(|| format!("bgp_local_pref = {local_pref};"));
    let community = |community: &Community| match community {
        Community::Standard(a, b) => format!("bgp_community.add(({a},{b}));"),
        Community::Large(a, b, c) => format!("bgp_large_community.add(({a},{b},{c}));"),
    };
    let statements: Vec<String> =
        local_pref.into_iter().chain(it.communities.iter().map(community)).collect();
    if statements.is_empty() {
        return String::new();
    }
    let lines: String = statements.iter().map(|statement| format!("        {statement}\n")).collect();
    let name = &it.advertisement.name;
    format!("      if net ~ {} then {{ # BGPAdvertisement {name}\n{lines}      }}\n", patterns(routes))
}

/// A set of networks in the words of BIRD: those within a network that have a length.
fn patterns(routes: &BTreeSet<RouteSet>) -> String {
    let pattern = |set: &RouteSet| {
        let RouteSet { network, length } = set;
        if network.prefix_len() == *length {
            network.to_string()
        } else {
            format!("{network}{{{length},{length}}}")
        }
    };
    format!("[ {} ]", routes.iter().map(pattern).collect::<Vec<_>>().join(", "))
}
