//! The configuration of BIRD 2.
//!
//! The export filter of each peer sets communities and local preference. The text depends only on the agent's options,
//! the node's name and labels, MetalLB's objects, and the passwords in the Secrets that these objects name. So no
//! change of a Service makes BIRD reconfigure. While an object that a session needs has errors or has not been read,
//! the session is held back: its text stays as it is in the file. Comments in the text of a session name the objects
//! from which the agent created it. From these comments, a restarted agent knows which sessions need an object that it
//! cannot read.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{Display, Write as _},
    net::Ipv4Addr,
};

use super::{
    advertisement::{BgpAdvertisement, RouteSet},
    community::Community,
    objects::Unread,
    peer::{BfdProfile, Peer, RemoteAsn},
    token::{Word, comment, symbol},
};
use crate::{
    announce::advertisement::Advertised,
    convert::{ConvertError, Object},
    family::Family,
    fnv::fnv1a,
    load_balancer::Labels,
    model::ObjectName,
};

/// Protocol number of the agent's routes in the kernel (`rtnetlink(7)`, `rtm_protocol`), by which BIRD recognises them.
pub const PROTOCOL: u8 = 109;
/// The text that begins the session with a peer; the peer's name follows.
const SESSION: &str = "\n# BGPPeer ";
/// The text before the router id.
const ROUTER_ID: &str = "router id ";
/// The text that begins the options of BFD.
const BFD: &str = "  bfd {";
/// Interval in seconds at which BIRD scans the kernel's table, to find changes that no netlink message has announced.
const SCAN: u32 = 10;

/// The content of BIRD's configuration file for one node, as far as the objects are valid.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Configuration {
    table: u32,
    router_id: Option<Ipv4Addr>,
    /// The router id of a node that has no IPv4 address; `None` if BIRD finds an id itself.
    derived_id: Option<Ipv4Addr>,
    /// The text of each session, by peer.
    sessions: BTreeMap<ObjectName, String>,
    /// Peers that have errors or whose passwords are unknown, or to which an advertisement with an error applies. The
    /// sessions with these peers stay as they are in the file.
    pub held_back: BTreeSet<ObjectName>,
    /// The comments that name unread objects. Sessions with one of these comments stay as they are in the file.
    unread: BTreeSet<String>,
    /// Errors: objects that name an unknown or ambiguous community or a missing BFDProfile, or that contradict other
    /// objects, and advertisements whose routes to a pool are refused.
    pub errors: Vec<ConvertError>,
    /// Warnings about fields without the intended effect: references to a missing BGPPeer, or to an IPAddressPool that
    /// is missing or not used, and a local preference that another advertisement overrides.
    pub warnings: Vec<ConvertError>,
}

/// Creates the configuration for a node with these labels; `table` is the kernel's routing table with the node's
/// routes.
pub fn configuration(advertised: &Advertised, table: u32, labels: &Labels) -> Configuration {
    let unread = comments_of(&advertised.bgp.unread);
    let result = Configuration { table, unread, ..Configuration::default() };
    let mut builder = Builder { advertised, labels, result };
    let advertisements = builder.advertisements();
    let peers = builder.peers();
    builder.check_references();
    let session = |(peer, profile): (&Peer, _)| {
        let mut text = String::new();
        _ = session(&mut text, peer, profile, &advertisements);
        (peer.name.clone(), text)
    };
    Configuration { sessions: peers.into_iter().map(session).collect(), ..builder.result }
}

impl Configuration {
    /// Derives the router id from the name of the node, unless a peer sets one. BIRD needs this on a node without an
    /// IPv4 address: it does not start without an id.
    #[must_use]
    pub fn with_derived_id(self, node: &str) -> Self {
        Self { derived_id: Some(router_id(node)), ..self }
    }

    /// The text of the file, which may contain passwords. A session that is held back stays as it is in `last`, the
    /// text in use. If `last` lacks the session, the new text contains the session without the parts that have errors,
    /// or omits the session if the peer itself has an error, or if the peer's password is unknown. A session that was
    /// made from an unread object is held back as well. Unless the agent has read every object that it can read
    /// (`is_complete`), all sessions of `last` are held back, because they may come from objects that the agent has not
    /// read yet.
    pub fn text(&self, last: &str, is_complete: bool) -> String {
        let known = sessions_of(last);
        let mut sessions: BTreeMap<String, &str> =
            self.sessions.iter().map(|(name, text)| (comment(name), &**text)).collect();
        let held_back: BTreeSet<String> = self.held_back.iter().map(comment).collect();
        // An unread peer may have set the router id in use. A different id would end all sessions.
        let keeps_id =
            !is_complete || known.keys().any(|name| self.unread.contains(&origin("BGPPeer", name)));
        let is_unread = |text: &str| text.lines().any(|line| self.unread.contains(line));
        for (name, text) in known {
            // The session of a peer that is gone, or that no longer selects this node, ends.
            let has_peer = sessions.contains_key(name) || self.unread.contains(&origin("BGPPeer", name));
            if !is_complete || held_back.contains(name) || has_peer && is_unread(text) {
                sessions.insert(name.to_owned(), text);
            }
        }
        let last_id =
            || last.lines().find_map(|line| line.strip_prefix(ROUTER_ID)?.strip_suffix(';')?.parse().ok());
        let router_id =
            self.router_id.or_else(|| if keeps_id { last_id() } else { None }).or(self.derived_id);
        let uses_bfd = sessions.values().any(|text| text.lines().any(|line| line.starts_with(BFD)));
        sessions.into_values().fold(head(self.table, router_id, uses_bfd), |text, session| text + session)
    }
}

/// The comment by which a session names an object from which it was made.
fn origin(kind: &str, name: impl Display) -> String {
    format!("# {kind} {name}")
}

/// The comments by which sessions name these objects.
fn comments_of(unread: &Unread) -> BTreeSet<String> {
    let advertisements = unread.advertisements.iter().map(|name| origin("BGPAdvertisement", comment(name)));
    let peers = unread.peers.iter().map(|name| origin("BGPPeer", comment(name)));
    let pools = unread.pools.iter().map(|name| origin("IPAddressPool", Word(&name.name)));
    advertisements.chain(peers).chain(pools).collect()
}

/// A router id that differs between nodes, and stays the same for a node. It is below 192.0.0.0, because some routers
/// refuse ids that are no unicast address (RFC 4271 §6.2). (30 bits of a hash: among 100 nodes, two share an id with a
/// probability of 5 in a million.)
fn router_id(node: &str) -> Ipv4Addr {
    let [a, b, c, d, ..] = fnv1a(&["router-id", node]).to_be_bytes();
    Ipv4Addr::new(0x80 | a & 0x3f, b, c, d)
}

/// The sessions in a configuration text, by the peer's name in the comment before each session.
pub(super) fn sessions_of(text: &str) -> BTreeMap<&str, &str> {
    let starts: Vec<usize> = text.match_indices(SESSION).map(|(start, _)| start).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    let session = |(start, end): (&usize, usize)| {
        let session = &text[*start..end];
        let name = session[SESSION.len()..].lines().next().unwrap_or_default();
        (name, session)
    };
    starts.iter().zip(ends).map(session).collect()
}

/// The number of BGP sessions in a configuration text.
pub fn session_count(text: &str) -> usize {
    sessions_of(text).len()
}

/// The configuration text in which passwords are replaced.
pub fn without_passwords(text: &str) -> String {
    let line = |line: &str| match line.split_once("password \"") {
        Some((before, _)) => format!("{before}password \"...\"; # hidden\n"),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

/// An advertisement with its routes, the names of the pools to which they lead, and the values of its communities.
struct Resolved<'a> {
    advertisement: &'a BgpAdvertisement,
    pools: BTreeSet<&'a str>,
    routes: BTreeSet<RouteSet>,
    communities: BTreeSet<Community>,
}

struct Builder<'a> {
    advertised: &'a Advertised,
    labels: &'a Labels,
    result: Configuration,
}

impl<'a> Builder<'a> {
    /// The advertisements that apply to this node, sorted by local preference: the last one wins.
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

    /// Looks up the values of an advertisement's communities. Returns `None` if a community has no value, because
    /// routes without that community could spread further than they may. Adds the peers of an advertisement with an
    /// error to [`Configuration::held_back`].
    fn resolve(&mut self, advertisement: &'a BgpAdvertisement) -> Option<Resolved<'a>> {
        let object = Object::new("BGPAdvertisement", &advertisement.name);
        let mut errors = Vec::new();
        let mut communities = BTreeSet::new();
        for (index, text) in advertisement.communities.iter().enumerate() {
            match self.community(text) {
                Ok(community) => _ = communities.insert(community),
                Err(why) => errors.push(object.invalid(format!("spec.communities[{index}]"), text, &why)),
            }
        }
        let is_known = errors.is_empty();
        let (mut routes, mut announced) = (BTreeSet::new(), BTreeSet::new());
        let pools = &self.advertised.pools;
        for pool in pools {
            if let Some((field, why)) = advertisement.refusal(pool, pools) {
                errors.push(object.error(field, format!("Invalid value: {why}")));
            } else if advertisement.announces(pool, pools) {
                routes.extend(advertisement.route_sets(pool));
                announced.insert(&*pool.name);
            }
        }
        if !errors.is_empty() {
            let peers = self.advertised.bgp.peers.keys().filter(|peer| advertisement.is_for(&peer.name));
            self.result.held_back.extend(peers.cloned());
        }
        self.result.errors.append(&mut errors);
        is_known.then_some(Resolved { advertisement, pools: announced, routes, communities })
    }

    /// The value of a community, given as name or value. A name takes precedence, as in MetalLB.
    fn community(&self, text: &str) -> Result<Community, String> {
        let named: Vec<_> =
            self.advertised.bgp.communities.values().filter_map(|names| names.get(text)).collect();
        match named[..] {
            [one] => Ok(*one),
            [] => text.parse().map_err(|why| format!("no Community object has this name; a value {why}")),
            _ => Err("several Community objects have this name".to_owned()),
        }
    }

    /// The valid peers of this node, each with its BFD profile.
    fn peers(&mut self) -> Vec<(&'a Peer, Option<BfdProfile>)> {
        let of_node: Vec<&Peer> =
            self.advertised.bgp.peers.values().filter(|peer| peer.selects_node(self.labels)).collect();
        let with_id = of_node.iter().find(|peer| peer.router_id.is_some()).copied();
        self.result.router_id = with_id.and_then(|peer| peer.router_id);
        let (mut peers, mut earlier): (Vec<(&Peer, Option<BfdProfile>)>, Vec<&Peer>) = Default::default();
        for peer in of_node {
            match self.resolve_peer(peer, &earlier, with_id) {
                Ok(_) if peer.lacks_password() => {
                    self.result.held_back.insert(peer.name.clone());
                    earlier.push(peer);
                }
                Ok(profile) => {
                    peers.push((peer, profile));
                    earlier.push(peer);
                }
                Err(error) => {
                    self.result.errors.push(error);
                    self.result.held_back.insert(peer.name.clone());
                }
            }
        }
        peers
    }

    /// Checks that a peer contradicts neither earlier peers nor the peer that sets the router id. Returns the BFD
    /// profile of the checked peer.
    fn resolve_peer(
        &self,
        peer: &Peer,
        others: &[&Peer],
        with_id: Option<&Peer>,
    ) -> Result<Option<BfdProfile>, ConvertError> {
        let object = Object::new("BGPPeer", &peer.name);
        if let Some(twin) = others.iter().find(|other| is_twin(other, peer)) {
            let why = format!("BGPPeer {} has the same address", twin.name);
            return Err(object.invalid("spec.peerAddress", peer.address, &why));
        }
        if let (Some(id), Some(other)) = (peer.router_id, with_id)
            && other.router_id != Some(id)
        {
            let why = format!("differs from that of BGPPeer {}: a node has one", other.name);
            return Err(object.invalid("spec.routerID", id, &why));
        }
        self.profile(peer).map_err(|why| {
            let name = peer.bfd_profile.as_deref().unwrap_or_default();
            object.invalid("spec.bfdProfile", name, why)
        })
    }

    fn profile(&self, peer: &Peer) -> Result<Option<BfdProfile>, &'static str> {
        let Some(name) = &peer.bfd_profile else { return Ok(None) };
        let named = ObjectName { namespace: peer.name.namespace.clone(), name: name.as_str().into() };
        let profile = self.advertised.bgp.profiles.get(&named);
        profile.copied().map(Some).ok_or("there is no such BFDProfile in the namespace of the peer")
    }

    /// Warns of names for which there is no BGPPeer or no usable IPAddressPool.
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

/// Whether two advertisements announce the same route to the same peer with different local preferences.
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

/// The configuration text before the first session.
fn head(table: u32, router_id: Option<Ipv4Addr>, uses_bfd: bool) -> String {
    let mut text = "# lb-agent writes this file, and overwrites changes.\n\n".to_owned();
    if let Some(id) = router_id {
        text += &format!("{ROUTER_ID}{id};\n\n");
    }
    text += "protocol device {\n}\n";
    if uses_bfd {
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

/// The words of BIRD's configuration that depend on the address family.
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

/// Appends the session with a peer. (Writing to a text never fails.)
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
    writeln!(text, "{SESSION}{}", comment(&peer.name))?;
    for line in origins(peer, advertisements) {
        writeln!(text, "{line}")?;
    }
    writeln!(text, "protocol bgp {} {{", symbol(&peer.name))?;
    let source = peer.source.map(|source| format!("{source} ")).unwrap_or_default();
    writeln!(text, "  local {source}as {};", peer.local_asn)?;
    writeln!(text, "  neighbor {} port {} {remote};", peer.address, peer.port)?;
    writeln!(text, "  hold time {};", peer.hold)?;
    if peer.hold != 0 {
        writeln!(text, "  keepalive time {};", peer.keepalive)?;
    }
    writeln!(text, "  connect retry time {};", peer.connect)?;
    if let Some(password) = &peer.password {
        writeln!(text, "  password {password};")?;
    }
    if let Some(vrf) = &peer.vrf {
        writeln!(text, "  vrf {vrf};")?;
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
        writeln!(text, "{BFD} {intervals} multiplier {multiplier};{passive} }};")?;
    }
    for family in Family::ALL {
        if peer.both_families || Family::of(peer.address) == family {
            channel(text, peer, family, advertisements)?;
        }
    }
    writeln!(text, "}}")
}

/// The comments that name the advertisements and pools from which the session with a peer is made.
fn origins(peer: &Peer, advertisements: &[Resolved<'_>]) -> BTreeSet<String> {
    let of_peer = advertisements.iter().filter(|it| it.advertisement.is_for(&peer.name.name));
    let mut origins = BTreeSet::new();
    for Resolved { advertisement, pools, .. } in of_peer.filter(|it| !it.routes.is_empty()) {
        origins.insert(origin("BGPAdvertisement", comment(&advertisement.name)));
        origins.extend(pools.iter().map(|name| origin("IPAddressPool", Word(name))));
    }
    origins
}

/// Appends the channel of an address family: which routes go to the peer, with which attributes.
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

/// The filter statements that set the attributes of an advertisement's routes.
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
    let name = comment(&it.advertisement.name);
    format!("      if net ~ {} then {{ # BGPAdvertisement {name}\n{lines}      }}\n", patterns(routes))
}

/// Sets of routes as BIRD's prefix patterns, such as `192.0.2.0/24{32,32}`.
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
