use bytemuck::{Pod, Zeroable};

use crate::{Address, conntrack::Tick, layout::describe};

/// Key of `SERVICES`: what a client speaks to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct ServiceKey {
    /// The virtual address.
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

/// What kind of address a frontend is; decides how traffic from outside is treated.
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
/// A record is replaced as a whole by one map update: every packet sees the old backends or the new ones.
/// The kernel may hand the memory of a replaced record to another key while a reader still looks at it (hash maps
/// reuse elements at once), so a record carries a seal over itself *and its key*; a reader that finds it broken
/// looks up again.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Service {
    /// As below.
    #[cfg(feature = "next-layout")]
    pub seal: u32,
    /// Identity of the service port, shared by all its frontends; never 0.
    pub id: u32,
    /// First slot of the backends in `BACKENDS`; they are sorted by address, then port.
    pub backends_base: u32,
    /// Number of backends; 0 means that new connections are rejected, or dropped: see
    /// [`service_flags::DROP_WITHOUT_BACKENDS`].
    pub backends_count: u32,
    /// With [`service_flags::SHORT_CIRCUIT`], the first slot of the backends for clients inside the cluster; else 0.
    pub inside_base: u32,
    /// With [`service_flags::SHORT_CIRCUIT`], the number of backends for clients inside the cluster; else 0.
    pub inside_count: u32,
    /// First slot of what the scheduler chooses from in `TABLES`: numbers of backends, counted from `backends_base`.
    pub table_base: u32,
    /// Number of these slots; 0 means that it chooses from the backends themselves, each with the same chance.
    pub table_count: u32,
    /// As `table_base`, for clients inside the cluster.
    pub inside_table_base: u32,
    /// As `table_count`, for clients inside the cluster.
    pub inside_table_count: u32,
    /// `ClientIP` affinity timeout in seconds; 0 is no affinity.
    pub affinity_seconds: u32,
    /// A [`crate::Scheduler`].
    pub scheduler: u8,
    /// A [`FrontendKind`].
    pub kind: u8,
    /// See [`service_flags`].
    pub flags: u16,
    /// Digest of the key and the other fields, see [`Self::sealed`].
    #[cfg(not(feature = "next-layout"))]
    pub seal: u32,
}

const _: () = assert!(size_of::<Service>() == 48);

describe!(Service {
    #[cfg(feature = "next-layout")]
    seal,
    id,
    backends_base,
    backends_count,
    inside_base,
    inside_count,
    table_base,
    table_count,
    inside_table_base,
    inside_table_count,
    affinity_seconds,
    scheduler,
    kind,
    flags,
    #[cfg(not(feature = "next-layout"))]
    seal,
});

/// Bits of [`Service::flags`].
pub mod service_flags {
    /// Endpoints exist, but none on this node, and the traffic policy is `Local`: packets are dropped rather than
    /// rejected, so that a load balancer in front moves the traffic instead of failing its clients.
    pub const DROP_WITHOUT_BACKENDS: u16 = 1;
    /// Clients inside the cluster (the node itself, and sources in [`crate::Settings::inside`]) get the slice
    /// `inside_base, inside_count`: an external address under `externalTrafficPolicy: Local`.
    pub const SHORT_CIRCUIT: u16 = 2;
    /// Every client is masqueraded; under [`SHORT_CIRCUIT`] nobody is, whatever this bit says.
    pub const MASQUERADE: u16 = 4;
    /// Clients that are not inside the cluster are masqueraded.
    pub const MASQUERADE_OUTSIDERS: u16 = 8;
    /// Only sources in `SOURCE_RANGES` are served (`spec.loadBalancerSourceRanges`).
    pub const SOURCE_RANGES: u16 = 16;
    /// Only sockets of the node are served, never packets: a node port on a loopback address.
    pub const SOCKETS_ONLY: u16 = 32;
    /// Backends on other nodes get the packets of clients outside of the cluster as they are, through a tunnel, and answer
    /// directly (direct server return). Only together with [`MASQUERADE`], which holds for everybody else.
    pub const DSR: u16 = 64;
    /// As at every node port, flows of TCP and SCTP begin with packets that open a connection only: the address is that of a node,
    /// whose own connections, and those that netfilter masquerades there, may have the port.
    pub const OPENED_ONLY: u16 = 128;
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

    /// Whether packets in the middle of a connection may be another one's than the service's.
    #[inline(always)]
    pub const fn is_opened_only(&self) -> bool {
        self.kind == FrontendKind::NodePort as u8 || self.flags & service_flags::OPENED_ONLY != 0
    }

    /// Whether it matters where the client is: inside the cluster or outside of it.
    #[inline(always)]
    pub const fn depends_on_client(&self) -> bool {
        use service_flags::{DSR, MASQUERADE_OUTSIDERS, SHORT_CIRCUIT};

        self.flags & (SHORT_CIRCUIT | MASQUERADE_OUTSIDERS | DSR) != 0
    }

    /// The record as it is for a client `inside` the cluster or outside of it: from then on its backends are those of
    /// `backends_base, backends_count`, and its table is that of `table_base, table_count`.
    #[inline(always)]
    #[must_use]
    pub const fn for_client(mut self, inside: bool) -> Self {
        if inside && self.flags & service_flags::SHORT_CIRCUIT != 0 {
            self.backends_base = self.inside_base;
            self.backends_count = self.inside_count;
            self.table_base = self.inside_table_base;
            self.table_count = self.inside_table_count;
            self.flags &= !service_flags::DROP_WITHOUT_BACKENDS;
        }
        self
    }

    /// Whether a client `inside` the cluster or outside of it is masqueraded.
    #[inline(always)]
    pub const fn masquerades(&self, inside: bool) -> bool {
        let flags = self.flags;
        flags & service_flags::SHORT_CIRCUIT == 0
            && (flags & service_flags::MASQUERADE != 0
                || (!inside && flags & service_flags::MASQUERADE_OUTSIDERS != 0))
    }

    /// Folds key and record into one word that is 0 for a sealed record. Words are rotated by their place, so that
    /// swapped words are noticed.
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
            ^ self.inside_base.rotate_left(27)
            ^ self.inside_count.rotate_left(29)
            ^ self.table_base.rotate_left(15)
            ^ self.table_count.rotate_left(21)
            ^ self.inside_table_base.rotate_left(25)
            ^ self.inside_table_count.rotate_left(31)
            ^ policy.rotate_left(23)
            ^ self.seal
    }
}

/// Value of `BACKENDS`: one endpoint, where packets go.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Backend {
    /// The endpoint's address.
    pub address: Address,
    /// The endpoint's port, host byte order.
    pub port: u16,
    /// See [`backend_flags`].
    pub flags: u16,
    /// Share of new flows relative to the other backends, see [`crate::Scheduler`]; 0 gets none. 1 where nothing else is
    /// said.
    pub weight: u32,
    /// The slot of `ACTIVE` where its active flows are counted, if the scheduler asks for their number; 0 is none.
    pub counter: u32,
}

const _: () = assert!(size_of::<Backend>() == 28);

describe!(Backend { address, port, flags, weight, counter });

/// Bits of [`Backend::flags`].
pub mod backend_flags {
    /// The endpoint is terminating and serves only because no ready endpoint is left.
    pub const TERMINATING: u16 = 1;
    /// The endpoint is on this node.
    pub const LOCAL: u16 = 2;
    /// The endpoint's address is one of this node's own: its packets never leave the node, so that there is nothing to
    /// masquerade.
    pub const HOST: u16 = 4;
    /// The endpoint is on another node, which is known by name: a tunnel leads there, if the service has
    /// [`DSR`](super::service_flags::DSR). Without that the flag is not set.
    pub const PEER: u16 = 8;
}

/// Value of `VIPS`: what an address is where no port of it is a frontend. Those of the node itself are in there, too,
/// without flags: they are left to its stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Vip {
    /// See [`vip_flags`].
    pub flags: u32,
}

const _: () = assert!(size_of::<Vip>() == 4);

describe!(Vip { flags });

/// Bits of [`Vip::flags`].
pub mod vip_flags {
    /// A cluster IP: packets to ports that no service port has are rejected.
    pub const CLUSTER_IP: u32 = 1;
    /// It answers ICMP echo requests: no address of this node, whose own stack would, and no external IP, which may be that
    /// of another machine.
    pub const ECHO: u32 = 2;
}

/// Key of `SOURCE_RANGES`: who may use a service port, by longest prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct SourceRangeKey {
    /// Significant bits of what follows: 32 more than the (v4-mapped) prefix has.
    pub prefix_length: u32,
    /// The network.
    pub range: SourceRange,
}

const _: () = assert!(size_of::<SourceRangeKey>() == 24);

describe!(SourceRangeKey { prefix_length, range.service_and_family, range.address });

/// A network that may use a service port. The kernel matches it octet by octet, so the service port comes first and
/// always counts whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct SourceRange {
    /// Twice the [`Service::id`], plus 1 for IPv4 (so that `::/0` does not let IPv4 in); host byte order.
    pub service_and_family: u32,
    /// The network's address.
    pub address: Address,
}

impl SourceRange {
    /// Bits of a whole one: what a program looks up for a client.
    pub const BITS: u32 = 32 + 128;

    /// The address as a client of the service port, or as the start of a network that may use it.
    #[inline(always)]
    pub fn new(service: u32, address: Address) -> Self {
        Self { service_and_family: service << 1 | u32::from(address.is_v4()), address }
    }
}

impl SourceRangeKey {
    /// The key of `address/prefix`; the prefix counts in the address's own family.
    pub fn new(service: u32, address: Address, prefix: u8) -> Self {
        let family = if address.is_v4() { 96 } else { 0 };
        Self { prefix_length: 32 + family + u32::from(prefix), range: SourceRange::new(service, address) }
    }
}

/// Key of `AFFINITY`: one client of one service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct AffinityKey {
    /// The client's address.
    pub client: Address,
    /// [`Service::id`]
    pub service: u32,
}

const _: () = assert!(size_of::<AffinityKey>() == 20);

describe!(AffinityKey { client, service });

/// Value of `AFFINITY`: the backend that the client's connections go to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Affinity {
    /// The backend's address.
    pub address: Address,
    /// The backend's port, host byte order.
    pub port: u16,
    /// Always 0.
    pub zeros: u16,
    /// When the last connection was made.
    pub last_used: Tick,
}

const _: () = assert!(size_of::<Affinity>() == 24);

describe!(Affinity { address, port, zeros, last_used });

impl Affinity {
    /// Whether the client still belongs to this backend, `timeout` seconds after its last connection at most.
    #[inline(always)]
    pub const fn holds(&self, now: Tick, timeout: u32) -> bool {
        // Below zero where the client has come back since: the agent asks with the time at which it began to read.
        let ago = now.0.wrapping_sub(self.last_used.0).cast_signed();
        ago <= Tick::in_seconds(timeout).cast_signed()
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::ServiceKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Service {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Backend {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Vip {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SourceRangeKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::AffinityKey {}
    // SAFETY: as above.
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
    fn a_client_inside_has_its_own_backends_only_under_a_short_circuit() {
        let record = Service { backends_base: 8, inside_base: 16, inside_count: 5, ..record() };
        let tables =
            Service { table_base: 4, table_count: 6, inside_table_base: 7, inside_table_count: 9, ..record };
        let slice = |record: Service, inside| {
            let record = record.for_client(inside);
            (record.backends_base, record.backends_count, record.table_base, record.table_count)
        };
        assert_eq!((slice(tables, true), slice(tables, false)), ((8, 3, 4, 6), (8, 3, 4, 6)));
        let record = Service { flags: service_flags::SHORT_CIRCUIT, ..tables };
        assert_eq!((slice(record, true), slice(record, false)), ((16, 5, 7, 9), (8, 3, 4, 6)));
    }

    #[test]
    fn who_is_masqueraded() {
        use service_flags::{MASQUERADE, MASQUERADE_OUTSIDERS, SHORT_CIRCUIT};
        for (flags, inside, outside) in [
            (0, false, false),
            (MASQUERADE, true, true),
            (MASQUERADE_OUTSIDERS, false, true),
            (SHORT_CIRCUIT | MASQUERADE | MASQUERADE_OUTSIDERS, false, false),
        ] {
            let record = Service { flags, ..record() };
            assert_eq!((record.masquerades(true), record.masquerades(false)), (inside, outside), "{flags}");
        }
    }

    #[test]
    fn affinity_holds_for_its_timeout() {
        let at = |seconds: u64| Tick::from_nanos(seconds * 1_000_000_000);
        let affinity = Affinity { last_used: at(1_000), ..Affinity::zeroed() };
        for (timeout, holds) in [(1, false), (60, false), (10_800, true), (86_400, true)] {
            assert_eq!(affinity.holds(at(1_000 + 100), timeout), holds, "{timeout} s");
        }
        assert!(affinity.holds(at(1_010), 10) && !affinity.holds(at(1_013), 10));
        assert!(affinity.holds(at(990), 10), "a client that came after the question was asked");
        assert!(affinity.holds(at(87_400), 86_400) && !affinity.holds(at(87_403), 86_400));
        let before_the_clock_began = Affinity { last_used: Tick(at(30).0.wrapping_sub(100)), ..affinity };
        assert!(before_the_clock_began.holds(at(30), 200) && !before_the_clock_began.holds(at(30), 10));
    }

    #[test]
    fn a_sealed_record_is_whole_for_its_key_only() {
        let sealed = record().sealed(&key(1));
        assert!(sealed.is_sealed(&key(1)));
        assert!(!sealed.is_sealed(&key(2)));
    }

    #[test]
    fn a_record_mixed_from_two_versions_breaks_the_seal() {
        let old = record().sealed(&key(1));
        let new = Service { backends_base: 128, backends_count: 5, ..record() }.sealed(&key(1));
        assert!(!Service { backends_count: new.backends_count, ..old }.is_sealed(&key(1)));
        assert!(!Service { backends_base: new.backends_base, ..old }.is_sealed(&key(1)));
        assert!(!Service { seal: new.seal, ..old }.is_sealed(&key(1)));
        for changed in [
            Service { table_base: 1, ..old },
            Service { table_count: 1, ..old },
            Service { inside_table_base: 1, ..old },
            Service { inside_table_count: 1, ..old },
        ] {
            assert!(!changed.is_sealed(&key(1)), "{changed:?}");
        }
    }
}
