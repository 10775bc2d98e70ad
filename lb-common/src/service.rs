use bytemuck::{Pod, Zeroable};

#[cfg(feature = "next-layout")]
pub use crate::next_layout::Service;
use crate::{Address, conntrack::Tick, layout::describe};

/// Key of `SERVICES`: the destination of a client's packets.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct ServiceKey {
    /// The virtual address that clients connect to.
    pub address: Address,
    /// Destination port, host byte order.
    pub port: u16,
    /// IP protocol number, see [`crate::protocol`].
    pub protocol: u8,
    zero: u8,
}

const _: () = assert!(size_of::<ServiceKey>() == 20);

describe!(ServiceKey { address, port, protocol, zero });

impl ServiceKey {
    /// The key of `address:port/protocol`; `port` in host byte order.
    #[inline(always)]
    pub const fn new(address: Address, port: u16, protocol: u8) -> Self {
        Self { address, port, protocol, zero: 0 }
    }
}

/// The kind of a frontend's address. The agent derives flags from it. Programs read it only in
/// [`Service::requires_syn`], for the source port of hairpin flows, for packets that leave a tunnel, and for sockets of
/// the node that connect to a Service whose backends get a PROXY protocol header.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// `spec.clusterIPs`
    ClusterIp = 0,
    /// A node's address with `spec.ports[].nodePort`
    NodePort = 1,
    /// `status.loadBalancer.ingress[].ip`
    LoadBalancer = 2,
    /// `spec.externalIPs`
    ExternalIp = 3,
}

impl FrontendKind {
    /// The name used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::ExternalIp => "ExternalIP",
        }
    }
}

impl TryFrom<u8> for FrontendKind {
    type Error = u8;

    fn try_from(value: u8) -> Result<Self, u8> {
        match value {
            0 => Ok(Self::ClusterIp),
            1 => Ok(Self::NodePort),
            2 => Ok(Self::LoadBalancer),
            3 => Ok(Self::ExternalIp),
            unknown => Err(unknown),
        }
    }
}

/// Value of `SERVICES`: one frontend of a service port.
///
/// One map update replaces a record as a whole: every packet gets one of the old backends or one of the new ones. The
/// kernel may reuse the memory of a replaced record for another key while a reader still looks at it (hash maps reuse
/// elements at once), so a record carries a seal over itself *and its key*. A reader that finds the seal broken looks
/// up again.
#[cfg(not(feature = "next-layout"))]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Service {
    /// Id of the service port, shared by all its frontends; never 0.
    pub id: u32,
    /// First slot of the backends in `BACKENDS`; the backends are sorted by address, then port.
    pub backends_base: u32,
    /// Number of backends; 0 means that new connections are rejected, or dropped: see
    /// [`service_flags::DROP_WITHOUT_BACKENDS`].
    pub backends_count: u32,
    /// With [`service_flags::SHORT_CIRCUIT`], the first slot of the backends for internal clients; else 0.
    pub internal_base: u32,
    /// With [`service_flags::SHORT_CIRCUIT`], the number of backends for internal clients; else 0.
    pub internal_count: u32,
    /// First slot of the scheduler's table in `TABLES`. The table holds indices of backends relative to
    /// `backends_base`.
    pub table_base: u32,
    /// Number of slots of the table; 0 if the scheduler needs none.
    pub table_count: u32,
    /// Like `table_base`, for internal clients.
    pub internal_table_base: u32,
    /// Like `table_count`, for internal clients.
    pub internal_table_count: u32,
    /// `ClientIP` affinity timeout in seconds; 0 is no affinity.
    pub affinity_seconds: u32,
    /// A [`crate::Scheduler`].
    pub scheduler: u8,
    /// A [`FrontendKind`].
    pub kind: u8,
    /// Bits of [`service_flags`].
    pub flags: u16,
    /// Digest of the key and the other fields, see [`Self::sealed`].
    pub seal: u32,
}

const _: () = assert!(size_of::<Service>() == 48);

#[cfg(not(feature = "next-layout"))]
describe!(Service {
    id,
    backends_base,
    backends_count,
    internal_base = "inside_base",
    internal_count = "inside_count",
    table_base,
    table_count,
    internal_table_base = "inside_table_base",
    internal_table_count = "inside_table_count",
    affinity_seconds,
    scheduler,
    kind,
    flags,
    seal,
});

/// Bits of [`Service::flags`].
pub mod service_flags {
    /// The traffic policy is `Local` and all endpoints are on other nodes: packets are dropped rather than rejected, so
    /// that a load balancer in front of the nodes moves the traffic to another node instead of passing rejections on to
    /// its clients.
    pub const DROP_WITHOUT_BACKENDS: u16 = 1;
    /// Internal clients (processes of the node, sources in [`crate::Settings::internal`], and senders whose packets
    /// enter through `INSIDE_DEVICES`) get a backend of the slice `internal_base, internal_count`. Set for external
    /// addresses under `externalTrafficPolicy: Local`.
    pub const SHORT_CIRCUIT: u16 = 2;
    /// Internal and external clients are masqueraded, unless the way to the backend needs no masquerading, such as a
    /// tunnel (`rules/forwarding.rs` of lb-ebpf). [`SHORT_CIRCUIT`] overrides this bit and [`MASQUERADE_EXTERNAL`]: no
    /// client is masqueraded.
    pub const MASQUERADE: u16 = 4;
    /// External clients are masqueraded.
    pub const MASQUERADE_EXTERNAL: u16 = 8;
    /// Only sources in `SOURCE_RANGES` are served (`spec.loadBalancerSourceRanges`).
    pub const SOURCE_RANGES: u16 = 16;
    /// Only sockets of the node are translated, never packets: a node port on a loopback address.
    pub const SOCKETS_ONLY: u16 = 32;
    /// Direct server return: backends on other nodes get the packets of external clients unchanged, through a tunnel,
    /// and answer the client directly. Set only together with [`MASQUERADE`]: the node masquerades internal clients,
    /// but external clients only if their backend is on another node and no tunnel leads there.
    pub const DSR: u16 = 64;
    /// Only a SYN (or INIT) begins a TCP (or SCTP) flow, as at every node port. The Service has an address of this
    /// node, so the node's own connections, and connections that netfilter masquerades, may have this port as source
    /// port. Any segment to the port other than a SYN may belong to such a connection. At ports from 1024 on, all load
    /// balancer addresses and external IPs of such a Service have this bit.
    pub const SYN_ONLY: u16 = 128;
    /// The programs answer a TCP segment of no flow with a RST, unless it is a SYN, a SYN-ACK or a RST, has invalid
    /// flags, or the frontend [requires a SYN](crate::Service::requires_syn). The agent ends connections of the
    /// Service, and further segments of such a connection must not begin a flow to whichever backend the scheduler
    /// chooses. Never together with [`DSR`], under which a connection may have no entry on this node.
    pub const RESET_UNKNOWN: u16 = 256;
    /// Backends get a PROXY protocol header, version 2, before the client's first byte. Only at frontends of TCP.
    /// Always together with [`RESET_UNKNOWN`], because only the flow's entry records by how much the client's sequence
    /// numbers are shifted. Never together with [`DSR`].
    pub const PROXY_PROTOCOL: u16 = 512;

    /// New connections have a limit, see [`crate::ConnectionLimits`].
    pub const LIMITED: u16 = 1024;

    /// All bits of [`crate::Service::flags`], for tests and displays.
    pub const ALL: [u16; 11] = [
        DROP_WITHOUT_BACKENDS,
        SHORT_CIRCUIT,
        MASQUERADE,
        MASQUERADE_EXTERNAL,
        SOURCE_RANGES,
        SOCKETS_ONLY,
        DSR,
        SYN_ONLY,
        RESET_UNKNOWN,
        PROXY_PROTOCOL,
        LIMITED,
    ];
}

impl Service {
    /// The record with its seal for `key`.
    #[must_use]
    pub fn sealed(mut self, key: &ServiceKey) -> Self {
        self.seal = 0;
        self.seal = Self::digest(&self, key);
        self
    }

    /// Whether the record was read whole and belongs to `key`.
    #[inline(always)]
    pub fn is_sealed(&self, key: &ServiceKey) -> bool {
        Self::digest(self, key) == 0
    }

    /// Whether only a SYN (or INIT) begins a flow: see [`service_flags::SYN_ONLY`].
    #[inline(always)]
    pub const fn requires_syn(&self) -> bool {
        self.kind == FrontendKind::NodePort as u8 || self.flags & service_flags::SYN_ONLY != 0
    }

    /// Whether internal clients get other backends than external clients: see [`service_flags::SHORT_CIRCUIT`].
    #[inline(always)]
    pub const fn has_internal_slice(&self) -> bool {
        self.flags & service_flags::SHORT_CIRCUIT != 0
    }

    /// Whether internal and external clients are treated differently.
    #[inline(always)]
    pub const fn depends_on_client(&self) -> bool {
        use service_flags::{DSR, MASQUERADE_EXTERNAL};

        self.has_internal_slice() || self.flags & (MASQUERADE_EXTERNAL | DSR) != 0
    }

    /// The record for an `internal` or external client: `backends_base, backends_count` and `table_base, table_count`
    /// of the result are those for this client.
    #[inline(always)]
    #[must_use]
    pub const fn for_client(mut self, internal: bool) -> Self {
        if internal && self.has_internal_slice() {
            self.backends_base = self.internal_base;
            self.backends_count = self.internal_count;
            self.table_base = self.internal_table_base;
            self.table_count = self.internal_table_count;
            self.flags &= !service_flags::DROP_WITHOUT_BACKENDS;
        }
        self
    }

    /// Whether the flags require that the client is masqueraded; `internal` is whether it is an internal client. The
    /// way to the backend may need no masquerading, see [`service_flags::MASQUERADE`].
    #[inline(always)]
    pub const fn masquerades(&self, internal: bool) -> bool {
        let flags = self.flags;
        !self.has_internal_slice()
            && (flags & service_flags::MASQUERADE != 0
                || (!internal && flags & service_flags::MASQUERADE_EXTERNAL != 0))
    }

    /// Folds key and record into one word that is 0 for a sealed record. Each word is rotated by a different number of
    /// bits, so that swapped words break the seal.
    #[inline(always)]
    fn digest(&self, key: &ServiceKey) -> u32 {
        let [k0, k1, k2, k3, k4]: [u32; 5] = bytemuck::must_cast(*key);
        let key =
            k0.rotate_left(1) ^ k1.rotate_left(3) ^ k2.rotate_left(5) ^ k3.rotate_left(7) ^ k4.rotate_left(9);
        let policy = u32::from(self.scheduler) | u32::from(self.kind) << 8 | u32::from(self.flags) << 16;
        key ^ self.id.rotate_left(11)
            ^ self.backends_base.rotate_left(13)
            ^ self.backends_count.rotate_left(17)
            ^ self.affinity_seconds.rotate_left(19)
            ^ self.internal_base.rotate_left(27)
            ^ self.internal_count.rotate_left(29)
            ^ self.table_base.rotate_left(15)
            ^ self.table_count.rotate_left(21)
            ^ self.internal_table_base.rotate_left(25)
            ^ self.internal_table_count.rotate_left(31)
            ^ policy.rotate_left(23)
            ^ self.seal
    }
}

/// Value of `BACKENDS`: one endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Backend {
    /// The address of the endpoint.
    pub address: Address,
    /// The endpoint's port, host byte order.
    pub port: u16,
    /// Bits of [`backend_flags`].
    pub flags: u16,
    /// Share of new flows relative to the other backends, see [`crate::Scheduler`]; the default is 1. The scheduler
    /// gives no new flows to a backend of weight 0, but clients that affinity pins to that backend keep it.
    pub weight: u32,
    /// The slot of `ACTIVE` that counts the backend's active flows, if the scheduler compares them; 0 means none.
    pub active_flows_slot: u32,
}

const _: () = assert!(size_of::<Backend>() == 28);

describe!(Backend { address, port, flags, weight, active_flows_slot = "counter" });

/// Bits of [`Backend::flags`].
pub mod backend_flags {
    /// The endpoint is terminating. It is a backend because it still serves, and because no ready endpoint is left in
    /// the cluster (or, if the traffic policy is `Local`, on this node). With [`DSR`](super::service_flags::DSR), a
    /// terminating endpoint on this node is also a backend, of weight 0, if this node has no ready endpoint, even if
    /// other nodes have one: packets that other nodes send through a tunnel must find their backend.
    pub const TERMINATING: u16 = 1;
    /// The endpoint is on this node.
    pub const LOCAL: u16 = 2;
    /// The endpoint's address is one of this node's own: packets to it never leave the node, so they are not
    /// masqueraded.
    pub const HOST: u16 = 4;
    /// The endpoint is on another node, both nodes' names are known, and the service has
    /// [`DSR`](super::service_flags::DSR): a tunnel leads to that node.
    pub const PEER: u16 = 8;
}

/// Value of `VIPS`: how to treat packets to an address of a Service at a port that no Service has. The map also has,
/// without flags, the addresses of the node itself, and cluster IPs that another proxy serves: the programs leave
/// packets to their other ports to the stack, or to that proxy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Vip {
    /// Bits of [`vip_flags`].
    pub flags: u32,
}

const _: () = assert!(size_of::<Vip>() == 4);

describe!(Vip { flags });

/// Bits of [`Vip::flags`].
pub mod vip_flags {
    /// A cluster IP: if it is in [`service_ranges`](crate::Settings::service_ranges), the programs reject packets to
    /// ports that no Service has.
    pub const CLUSTER_IP: u32 = 1;
    /// The programs answer ICMP echo requests to the address. Never set for an address of this node: the stack answers
    /// requests to that address. Never set for an address that is only an external IP: that address may belong to
    /// another machine.
    pub const ECHO: u32 = 2;
}

/// Key of `SOURCE_RANGES` (LPM trie): one source range of a service port. The programs look it up only for frontends
/// with the flag [`service_flags::SOURCE_RANGES`], which admit only clients in a range of their service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct SourceRangeKey {
    /// Significant bits of `range`: the 32 bits of `service_and_family`, and the prefix of the (v4-mapped) network.
    pub prefix_length: u32,
    /// The network of clients, and the service port that admits it.
    pub range: SourceRange,
}

const _: () = assert!(size_of::<SourceRangeKey>() == 24);

describe!(SourceRangeKey { prefix_length, range.service_and_family, range.address });

/// One source range of a service port: a network of clients that the port's frontends with the flag
/// [`service_flags::SOURCE_RANGES`] admit. The kernel matches the range byte by byte from the start, so the service
/// port comes first and always matches as a whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct SourceRange {
    /// Twice the [`Service::id`], plus 1 for IPv4 (so that `::/0` does not let IPv4 in); host byte order.
    pub service_and_family: u32,
    /// The first address of the network.
    pub address: Address,
}

impl SourceRange {
    /// Prefix length of a program's lookup for one client.
    pub const BITS: u32 = 32 + 128;

    /// A client's address, or the first address of a network, for the service port `service`.
    #[inline(always)]
    pub fn new(service: u32, address: Address) -> Self {
        Self { service_and_family: service << 1 | u32::from(address.is_v4()), address }
    }

    /// The [`Service::id`] that the range belongs to.
    pub const fn service(&self) -> u32 {
        self.service_and_family >> 1
    }

    /// Whether the range is of IPv4.
    pub const fn is_v4(&self) -> bool {
        self.service_and_family & 1 == 1
    }
}

impl SourceRangeKey {
    /// The key of `address/prefix`; `prefix` is at most 32 for IPv4, although the address is v4-mapped.
    pub fn new(service: u32, address: Address, prefix: u8) -> Self {
        let family = if address.is_v4() { 96 } else { 0 };
        Self { prefix_length: 32 + family + u32::from(prefix), range: SourceRange::new(service, address) }
    }
}

/// Key of `AFFINITY` and `LIMIT_BUCKETS`: one client of one service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct ServiceClient {
    /// The client's address. In `LIMIT_BUCKETS`, an IPv6 client is its /64 network, and `::` stands for all clients.
    pub client: Address,
    /// [`Service::id`]
    pub service: u32,
}

const _: () = assert!(size_of::<ServiceClient>() == 20);

describe!(ServiceClient { client, service });

/// Value of `AFFINITY`: the backend that the client is pinned to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Affinity {
    /// The address of the backend that the client is pinned to.
    pub address: Address,
    /// The backend's port, host byte order.
    pub port: u16,
    /// Padding, always 0.
    pub zeros: u16,
    /// When the client last made a connection.
    pub last_used: Tick,
}

const _: () = assert!(size_of::<Affinity>() == 24);

describe!(Affinity { address, port, zeros, last_used });

impl Affinity {
    /// Whether the client is still pinned to this backend: the client last made a connection at most `timeout` seconds
    /// ago.
    #[inline(always)]
    pub const fn is_valid(&self, now: Tick, timeout: u32) -> bool {
        // Negative if the client has made a connection since `now`: the agent passes the time at which it began to read
        // the map.
        let ago = now.0.wrapping_sub(self.last_used.0).cast_signed();
        ago <= Tick::ticks_in(timeout).cast_signed()
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::ServiceKey {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Service {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Backend {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Vip {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::SourceRangeKey {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::ServiceClient {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Affinity {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(last: u8) -> ServiceKey {
        ServiceKey::new(Address::from_v4([10, 96, 0, last]), 80, crate::protocol::TCP)
    }

    fn record() -> Service {
        Service { id: 7, backends_base: 64, backends_count: 3, ..Service::zeroed() }
    }

    #[test]
    fn each_flag_is_listed_once_and_has_a_bit_of_its_own() {
        let source = include_str!("service.rs");
        let flags = source.split("pub mod service_flags").nth(1).unwrap();
        let declared = flags.lines().take_while(|line| *line != "}").filter(|line| line.contains(": u16 = "));
        assert_eq!(declared.count(), service_flags::ALL.len());
        let bits: u16 = service_flags::ALL.iter().sum();
        assert_eq!(bits, (1 << service_flags::ALL.len()) - 1);
    }

    #[test]
    fn internal_clients_have_their_own_backends_only_with_short_circuit() {
        let record = Service { backends_base: 8, internal_base: 16, internal_count: 5, ..record() };
        let tables = Service {
            table_base: 4,
            table_count: 6,
            internal_table_base: 7,
            internal_table_count: 9,
            ..record
        };
        let slice = |record: Service, internal| {
            let record = record.for_client(internal);
            (record.backends_base, record.backends_count, record.table_base, record.table_count)
        };
        assert_eq!((slice(tables, true), slice(tables, false)), ((8, 3, 4, 6), (8, 3, 4, 6)));
        let record = Service { flags: service_flags::SHORT_CIRCUIT, ..tables };
        assert_eq!((slice(record, true), slice(record, false)), ((16, 5, 7, 9), (8, 3, 4, 6)));
    }

    #[test]
    fn masquerading_depends_on_flags_and_client() {
        use service_flags::{MASQUERADE, MASQUERADE_EXTERNAL, SHORT_CIRCUIT};
        for (flags, internal, external) in [
            (0, false, false),
            (MASQUERADE, true, true),
            (MASQUERADE_EXTERNAL, false, true),
            (SHORT_CIRCUIT | MASQUERADE | MASQUERADE_EXTERNAL, false, false),
        ] {
            let record = Service { flags, ..record() };
            assert_eq!(
                (record.masquerades(true), record.masquerades(false)),
                (internal, external),
                "{flags}"
            );
        }
    }

    #[test]
    fn affinity_is_valid_until_its_timeout() {
        let at = |seconds: u64| Tick::from_nanos(seconds * 1_000_000_000);
        let affinity = Affinity { last_used: at(1_000), ..Affinity::zeroed() };
        for (timeout, valid) in [(1, false), (60, false), (10_800, true), (86_400, true)] {
            assert_eq!(affinity.is_valid(at(1_000 + 100), timeout), valid, "{timeout} s");
        }
        assert!(affinity.is_valid(at(1_010), 10) && !affinity.is_valid(at(1_013), 10));
        assert!(affinity.is_valid(at(990), 10), "a client that came back after `now`");
        assert!(affinity.is_valid(at(87_400), 86_400) && !affinity.is_valid(at(87_403), 86_400));
        let used_before_boot = Affinity { last_used: Tick(at(30).0.wrapping_sub(100)), ..affinity };
        assert!(used_before_boot.is_valid(at(30), 200) && !used_before_boot.is_valid(at(30), 10));
    }

    #[test]
    fn seal_is_valid_for_one_key_only() {
        let sealed = record().sealed(&key(1));
        assert!(sealed.is_sealed(&key(1)));
        assert!(!sealed.is_sealed(&key(2)));
    }

    #[test]
    fn record_mixed_from_two_versions_breaks_the_seal() {
        let old = record().sealed(&key(1));
        let new = Service { backends_base: 128, backends_count: 5, ..record() }.sealed(&key(1));
        assert!(!Service { backends_count: new.backends_count, ..old }.is_sealed(&key(1)));
        assert!(!Service { backends_base: new.backends_base, ..old }.is_sealed(&key(1)));
        assert!(!Service { seal: new.seal, ..old }.is_sealed(&key(1)));
        for changed in [
            Service { table_base: 1, ..old },
            Service { table_count: 1, ..old },
            Service { internal_table_base: 1, ..old },
            Service { internal_table_count: 1, ..old },
        ] {
            assert!(!changed.is_sealed(&key(1)), "{changed:?}");
        }
    }
}
