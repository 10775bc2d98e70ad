//! The state that programs work on: Services, routes, and a population of flows.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use bytemuck::Zeroable as _;
use lb_common::{Scheduler, Service, protocol, service_flags};
use lb_tests::netns::Netns;

use crate::{
    baselines::{Baseline, Baselines},
    caches::Caches,
    candidate::{Candidate, Kind},
    datapath::Datapath,
    frames::{Flags, Frame, Sender, Transport},
};

/// Number of flows that the packets of a case with many flows belong to.
pub(crate) const MANY: u32 = 65_536;
/// Number of flows that fill half of the table: each has two entries.
pub(crate) const HALF_FULL: u32 = 131_072;
/// Number of new flows per measurement; they are deleted before the next measurement.
pub(crate) const NEW: u32 = 16_384;
/// Number of backends of a Service whose scheduler is measured.
const BACKENDS: u8 = 100;

/// Interface index of the device that leads to clients and backends.
pub(crate) const WIRE: u32 = 50;
/// Interface index of another wire, which leads to one further backend.
const OTHER: u32 = 52;
const MTU: u32 = 1500;

/// All schedulers except those that compare numbers of active flows.
pub(crate) const SCHEDULERS: [Scheduler; 6] = [
    Scheduler::Random,
    Scheduler::RoundRobin,
    Scheduler::WeightedRoundRobin,
    Scheduler::SourceHash,
    Scheduler::DestinationHash,
    Scheduler::Maglev,
];

/// The IP family of a case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ip {
    V4,
    V6,
}

impl Ip {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];
}

impl fmt::Display for Ip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// The addresses of the world in one family.
#[derive(Clone, Copy)]
pub(crate) struct Family {
    /// A Service for TCP and UDP, with one backend, but with many backends in [`Population::Empty`].
    pub(crate) vip: SocketAddr,
    /// A Service like `vip` that masquerades every client.
    pub(crate) masquerading: SocketAddr,
    /// A Service like `masquerading`, with many backends that are behind the device where clients' packets arrive.
    pub(crate) routed: SocketAddr,
    /// A Service like `masquerading`, but for TCP only, whose one backend is behind another device.
    pub(crate) across: SocketAddr,
    /// A Service without backends, for TCP.
    pub(crate) empty: SocketAddr,
    /// An address that belongs to no Service.
    pub(crate) elsewhere: SocketAddr,
    /// The only backend of `vip`, or the first one if `vip` has many.
    pub(crate) backend: SocketAddr,
    /// The backend that is behind another device.
    far: SocketAddr,
    /// The address of this node.
    node: SocketAddr,
}

impl Family {
    fn new(addresses: [&str; 9]) -> anyhow::Result<Self> {
        let mut parsed = Vec::new();
        for text in addresses {
            parsed.push(text.parse().with_context(|| format!("the address {text}"))?);
        }
        let [vip, masquerading, routed, across, empty, elsewhere, backend, far, node] = parsed[..] else {
            bail!("these are not nine addresses: {addresses:?}");
        };
        Ok(Self { vip, masquerading, routed, across, empty, elsewhere, backend, far, node })
    }

    fn v4() -> anyhow::Result<Self> {
        Self::new([
            "192.0.2.1:80",
            "192.0.2.2:80",
            "192.0.2.3:80",
            "192.0.2.4:80",
            "192.0.2.5:80",
            "203.0.113.1:80",
            "198.51.100.1:8080",
            "198.51.101.1:8080",
            "198.18.0.1:0",
        ])
    }

    fn v6() -> anyhow::Result<Self> {
        Self::new([
            "[2001:db8:1::1]:80",
            "[2001:db8:1::2]:80",
            "[2001:db8:1::3]:80",
            "[2001:db8:1::4]:80",
            "[2001:db8:1::5]:80",
            "[2001:db8:3::1]:80",
            "[2001:db8:2::1]:8080",
            "[2001:db8:4::1]:8080",
            "[2001:db8:5::1]:0",
        ])
    }

    /// The TCP address of a Service with many backends and this scheduler.
    pub(crate) const fn scheduled(&self, scheduler: Scheduler) -> SocketAddr {
        let mut vip = self.vip;
        vip.set_port(1000 + scheduler as u16);
        vip
    }

    /// Many backends in sorted order, each with a weight.
    fn backends(&self) -> Vec<(SocketAddr, u32)> {
        let nth = |n: u8| {
            let mut backend = self.backend;
            backend.set_ip(match backend.ip() {
                IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() + u32::from(n)).into(),
                IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() + u128::from(n)).into(),
            });
            (backend, 1 + u32::from(n) % 3)
        };
        (0..BACKENDS).map(nth).collect()
    }
}

/// The flows that are in the table while cases are measured. Every population gets its own maps, because the cost of a
/// lookup depends on how full the table is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Population {
    /// One flow of each kind, in both families.
    Few,
    /// This number of flows through the stack, all in one family.
    Stack(Ip, u32),
    /// This number of routed flows (between wires), all in one family.
    Routed(Ip, u32),
    /// No flows: every measured packet creates one.
    Empty,
}

impl Population {
    pub(crate) const ALL: [Self; 10] = [
        Self::Few,
        Self::Stack(Ip::V4, MANY),
        Self::Stack(Ip::V6, MANY),
        Self::Routed(Ip::V4, MANY),
        Self::Routed(Ip::V6, MANY),
        Self::Stack(Ip::V4, HALF_FULL),
        Self::Stack(Ip::V6, HALF_FULL),
        Self::Routed(Ip::V4, HALF_FULL),
        Self::Routed(Ip::V6, HALF_FULL),
        Self::Empty,
    ];

    /// Number of flows that the packets of a case belong to.
    pub(crate) const fn flows(self) -> u32 {
        match self {
            Self::Few => 1,
            Self::Stack(_, flows) | Self::Routed(_, flows) => flows,
            Self::Empty => NEW,
        }
    }
}

impl fmt::Display for Population {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Few => f.write_str("one flow of each kind"),
            Self::Stack(ip, flows) => write!(f, "{flows} {ip} flows through the stack"),
            Self::Routed(ip, flows) => write!(f, "{flows} {ip} flows between wires"),
            Self::Empty => f.write_str("no flows"),
        }
    }
}

/// A BPF object with the data plane, and the name of the build in reports.
pub(crate) struct Build {
    pub(crate) name: String,
    pub(crate) object: PathBuf,
}

pub(crate) struct Objects {
    /// The measured data plane and, if any, the one that it is compared with.
    pub(crate) builds: Vec<Build>,
    /// Path of the object with the program that gives measured programs a fresh packet each time.
    pub(crate) restore: PathBuf,
    /// Path of the object with the minimal baseline programs.
    pub(crate) baselines: PathBuf,
}

/// All loaded objects, with Services, routes and flows.
pub(crate) struct World {
    /// Path of the BPF object whose program writes the original packet again before each run of a measured program.
    pub(crate) restore: PathBuf,
    pub(crate) v4: Family,
    pub(crate) v6: Family,
    /// The loaded data plane of each build.
    pub(crate) datapaths: Vec<Datapath>,
    pub(crate) baselines: Baselines,
    /// Empties the caches, for populations whose packets create flows.
    pub(crate) caches: Option<Caches>,
    pub(crate) population: Population,
}

impl World {
    /// Loads all objects and creates the flows. The thread must be in the namespace of [`netns`].
    pub(crate) fn new(objects: &Objects, population: Population) -> anyhow::Result<Self> {
        let Objects { builds, restore, baselines } = objects;
        let load = |build: &Build| {
            Datapath::load(&build.name, &build.object).with_context(|| format!("the build {}", build.name))
        };
        let mut world = Self {
            restore: restore.clone(),
            v4: Family::v4()?,
            v6: Family::v6()?,
            datapaths: builds.iter().map(load).collect::<anyhow::Result<_>>()?,
            baselines: Baselines::load(baselines)?,
            caches: (population == Population::Empty).then(Caches::new),
            population,
        };
        let families = [world.v4, world.v6];
        for datapath in &mut world.datapaths {
            let name = datapath.name.clone();
            make_services(datapath, families, population).with_context(|| format!("the build {name}"))?;
            datapath.finish_setup()?;
        }
        world.open_flows()?;
        Ok(world)
    }

    pub(crate) const fn family(&self, ip: Ip) -> Family {
        match ip {
            Ip::V4 => self.v4,
            Ip::V6 => self.v6,
        }
    }

    /// Creates the population's flows by running packets through the programs.
    fn open_flows(&mut self) -> anyhow::Result<()> {
        let flows = self.population.flows();
        for index in 0..self.datapaths.len() {
            match self.population {
                Population::Few => {
                    for ip in Ip::ALL {
                        self.open_stack_flows(index, ip, 1)?;
                        self.open_routed_flows(index, ip, 1)?;
                    }
                }
                Population::Stack(ip, flows) => self.open_stack_flows(index, ip, flows)?,
                Population::Routed(ip, flows) => self.open_routed_flows(index, ip, flows)?,
                Population::Empty => {}
            }
        }
        if self.population == Population::Empty {
            return Ok(());
        }
        let Family { vip, backend, .. } = self.v4;
        for protocol in [protocol::TCP, protocol::UDP] {
            self.baselines.service(protocol, Frame::client(vip), vip, backend, flows)?;
        }
        Ok(())
    }

    fn open_stack_flows(&self, datapath: usize, ip: Ip, flows: u32) -> anyhow::Result<()> {
        let [syn, syn_ack, ack] = [Flags::Syn, Flags::SynAck, Flags::Ack].map(Transport::Tcp);
        let Family { vip, backend, .. } = self.family(ip);
        let there = |transport| Frame::new(transport, Sender::Client, vip);
        let back = |transport| Frame::new(transport, Sender::Server, backend);
        self.send(datapath, "tc_ingress", &there(syn)?.flows(flows))?;
        self.send(datapath, "tc_egress", &back(syn_ack)?.flows(flows))?;
        self.send(datapath, "tc_ingress", &there(ack)?.flows(flows))?;
        if flows == 1 {
            self.send(datapath, "tc_ingress", &there(Transport::Udp)?)?;
            self.send(datapath, "tc_egress", &back(Transport::Udp)?)?;
        }
        Ok(())
    }

    /// Creates routed flows without replies: the benchmark does not know the masqueraded ports that replies would have
    /// to go to, and the cost of the client's packets does not depend on replies.
    fn open_routed_flows(&self, datapath: usize, ip: Ip, flows: u32) -> anyhow::Result<()> {
        let syn = Transport::Tcp(Flags::Syn);
        let Family { routed, across, .. } = self.family(ip);
        let arriving =
            |transport, to| Ok::<_, anyhow::Error>(Frame::new(transport, Sender::Client, to)?.through(WIRE));
        self.send(datapath, "xdp_native", &arriving(syn, routed)?.flows(flows))?;
        if flows == 1 {
            self.send(datapath, "xdp_native", &arriving(syn, across)?)?;
            self.send(datapath, "xdp_native", &arriving(Transport::Udp, routed)?)?;
        }
        Ok(())
    }

    /// Runs one packet of each flow through a program of a data plane.
    fn send(&self, datapath: usize, program: &str, frame: &Frame) -> anyhow::Result<()> {
        let candidate = self.candidate(datapath, program, &frame.clone().in_order())?;
        candidate.run(frame.count())?;
        Ok(())
    }

    /// Prepares a program of a data plane to get these packets.
    pub(crate) fn candidate(
        &self,
        datapath: usize,
        program: &str,
        frame: &Frame,
    ) -> anyhow::Result<Candidate> {
        let program_fd = self.datapaths[datapath].program(program)?;
        Candidate::new(&self.restore, Kind::of(program), program_fd, frame)
    }

    /// Deletes all flows of the data planes and of the baselines.
    pub(crate) fn clear_flows(&self) -> anyhow::Result<()> {
        self.datapaths.iter().try_for_each(Datapath::clear_flows)?;
        self.baselines.clear_flows()
    }

    /// Prepares a baseline program to get these packets.
    pub(crate) fn baseline(
        &self,
        baseline: Baseline,
        kind: Kind,
        frame: &Frame,
    ) -> anyhow::Result<Candidate> {
        Candidate::new(&self.restore, kind, self.baselines.program(baseline, kind)?, frame)
    }
}

/// Writes settings, devices and Services to the maps.
fn make_services(
    datapath: &mut Datapath,
    families: [Family; 2],
    population: Population,
) -> anyhow::Result<()> {
    let plain = Service::zeroed();
    let masquerading = Service { flags: service_flags::MASQUERADE, ..plain };
    datapath.settings(families.map(|family| family.node))?;
    datapath.wire(WIRE, MTU)?;
    datapath.wire(OTHER, MTU)?;
    for family in families {
        let (one, many) = ([(family.backend, 1)], family.backends());
        let backends = if population == Population::Empty { &many[..] } else { &one[..] };
        for protocol in [protocol::TCP, protocol::UDP] {
            datapath.service(family.vip, protocol, backends, plain)?;
            datapath.service(family.masquerading, protocol, backends, masquerading)?;
            datapath.service(family.routed, protocol, &many, masquerading)?;
        }
        for scheduler in SCHEDULERS {
            let record = Service { scheduler: scheduler as u8, ..plain };
            datapath.service(family.scheduled(scheduler), protocol::TCP, &many, record)?;
        }
        datapath.service(family.across, protocol::TCP, &[(family.far, 1)], masquerading)?;
        datapath.service(family.empty, protocol::TCP, &[], plain)?;
    }
    Ok(())
}

/// Creates a network namespace with the routes that masquerading and XDP look up. Dropping it removes the namespace.
pub(crate) fn netns(name: &str) -> anyhow::Result<Netns> {
    let netns = Netns::create(name)?;
    netns.sysctls(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
    netns.ip("link set lo address 00:00:5e:00:53:02\n\
         link add wire index 50 address 00:00:5e:00:53:02 type veth peer name wire-end\n\
         link add other index 52 type veth peer name other-end\n\
         link set wire up\n\
         link set wire-end up\n\
         link set other up\n\
         link set other-end up\n\
         addr add 198.18.0.1/24 dev wire\n\
         addr add 2001:db8:5::1/64 dev wire nodad\n\
         neigh add 198.18.0.2 lladdr 00:00:5e:00:53:01 dev wire nud permanent\n\
         neigh add 2001:db8:5::2 lladdr 00:00:5e:00:53:01 dev wire nud permanent\n\
         neigh add 198.51.101.1 lladdr 00:00:5e:00:53:01 dev other nud permanent\n\
         neigh add 2001:db8:4::1 lladdr 00:00:5e:00:53:01 dev other nud permanent\n\
         route add default via 198.18.0.2 dev wire\n\
         route add ::/0 via 2001:db8:5::2 dev wire\n\
         route add 198.51.101.0/24 dev other\n\
         route add 2001:db8:4::/64 dev other")?;
    Ok(netns)
}
