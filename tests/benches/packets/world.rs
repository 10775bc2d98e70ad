//! The state that the programs work on: Services, flows, routes.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use bytemuck::Zeroable as _;
use lb_common::{Scheduler, Service, protocol, service_flags};
use lb_tests::netns::Netns;

use crate::{
    baselines::Baselines,
    candidate::{Candidate, Kind},
    datapath::Datapath,
    frames::{Flags, Frame, Sender, Transport},
};

/// Number of flows in rotation, in cases with many flows.
pub(crate) const MANY: u32 = 65_536;
/// New flows of one measurement. They are deleted before the next one.
pub(crate) const NEW: u32 = 16_384;
/// Backends of a Service that balances new flows.
const BACKENDS: u8 = 100;

/// Interface index of the device that leads to clients and backends.
pub(crate) const WIRE: u32 = 50;
/// Interface index of another device, which leads to one more backend.
const OTHER: u32 = 52;
const MTU: u32 = 1500;

/// All schedulers of the programs.
pub(crate) const SCHEDULERS: [Scheduler; 6] = [
    Scheduler::Random,
    Scheduler::RoundRobin,
    Scheduler::WeightedRoundRobin,
    Scheduler::SourceHash,
    Scheduler::DestinationHash,
    Scheduler::Maglev,
];

/// Addresses of one family.
#[derive(Clone, Copy)]
pub(crate) struct Family {
    /// A Service with one backend, over TCP and UDP.
    pub(crate) vip: SocketAddr,
    /// Like `vip`, with every client masqueraded.
    pub(crate) masquerading: SocketAddr,
    /// Like `vip`, with many backends, between wires.
    pub(crate) routed: SocketAddr,
    /// Like `vip`, with its backend beyond another device.
    pub(crate) across: SocketAddr,
    /// A Service without backends, over TCP.
    pub(crate) empty: SocketAddr,
    /// An address of no Service.
    pub(crate) elsewhere: SocketAddr,
    /// The backend, or the first of many.
    pub(crate) backend: SocketAddr,
    /// The backend beyond another device.
    far: SocketAddr,
    /// This node's address.
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

    /// The address of a Service with many backends and this scheduler, over TCP.
    pub(crate) const fn scheduled(&self, scheduler: Scheduler) -> SocketAddr {
        let mut vip = self.vip;
        vip.set_port(1000 + scheduler as u16);
        vip
    }

    /// Many backends, sorted, with weights.
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

/// The BPF objects.
pub(crate) struct Objects {
    /// The measured data plane.
    pub(crate) datapath: PathBuf,
    /// The program that gives the measured program a fresh packet each time.
    pub(crate) restore: PathBuf,
    /// The minimal baseline programs.
    pub(crate) baselines: PathBuf,
}

/// All loaded objects.
pub(crate) struct World {
    /// Path of the object that gives programs fresh packets.
    pub(crate) restore: PathBuf,
    pub(crate) v4: Family,
    pub(crate) v6: Family,
    /// The data plane with existing flows.
    pub(crate) settled: Datapath,
    pub(crate) settled_baselines: Baselines,
    /// The data plane without flows, for packets that create one.
    pub(crate) fresh: Datapath,
    pub(crate) fresh_baselines: Baselines,
}

impl World {
    /// Loads all objects. The thread must be in the namespace of [`netns`].
    pub(crate) fn new(objects: Objects) -> anyhow::Result<Self> {
        let Objects { datapath, restore, baselines } = objects;
        let mut world = Self {
            restore,
            v4: Family::v4()?,
            v6: Family::v6()?,
            settled: Datapath::load(&datapath)?,
            settled_baselines: Baselines::load(&baselines)?,
            fresh: Datapath::load(&datapath)?,
            fresh_baselines: Baselines::load(&baselines)?,
        };
        world.make_services()?;
        world.open_flows()?;
        Ok(world)
    }

    fn make_services(&mut self) -> anyhow::Result<()> {
        let plain = Service::zeroed();
        let masquerading = Service { flags: service_flags::MASQUERADE, ..plain };
        let families = [self.v4, self.v6];
        for datapath in [&mut self.settled, &mut self.fresh] {
            datapath.settings(families.map(|family| family.node))?;
            datapath.wire(WIRE, MTU)?;
            datapath.wire(OTHER, MTU)?;
        }
        for family in families {
            let (one, many) = ([(family.backend, 1)], family.backends());
            for protocol in [protocol::TCP, protocol::UDP] {
                self.settled.service(family.vip, protocol, &one, plain)?;
                self.fresh.service(family.vip, protocol, &many, plain)?;
                self.settled.service(family.masquerading, protocol, &one, masquerading)?;
                self.settled.service(family.routed, protocol, &many, masquerading)?;
                self.fresh.service(family.masquerading, protocol, &many, masquerading)?;
            }
            for scheduler in SCHEDULERS {
                let record = Service { scheduler: scheduler as u8, ..plain };
                self.fresh.service(family.scheduled(scheduler), protocol::TCP, &many, record)?;
            }
            self.settled.service(family.across, protocol::TCP, &[(family.far, 1)], masquerading)?;
            self.settled.service(family.empty, protocol::TCP, &[], plain)?;
        }
        Ok(())
    }

    /// Opens flows between clients and backends through our programs.
    fn open_flows(&mut self) -> anyhow::Result<()> {
        let [syn, syn_ack, ack] = [Flags::Syn, Flags::SynAck, Flags::Ack].map(Transport::Tcp);
        for Family { vip, routed, across, backend, .. } in [self.v4, self.v6] {
            let there = |transport, to| Frame::new(transport, Sender::Client, to);
            let back = |transport| Frame::new(transport, Sender::Server, backend);
            self.send("tc_ingress", &there(syn, vip)?.flows(MANY))?;
            self.send("tc_egress", &back(syn_ack)?.flows(MANY))?;
            self.send("tc_ingress", &there(ack, vip)?.flows(MANY))?;
            self.send("tc_ingress", &there(Transport::Udp, vip)?)?;
            self.send("tc_egress", &back(Transport::Udp)?)?;
            // These flows get no replies: their masqueraded ports are unknown here, and the client's packets do not
            // depend on replies. (The table has no room for as many flows of both families.)
            let flows = if routed.is_ipv4() { MANY } else { 1 };
            self.send("xdp_native", &there(syn, routed)?.through(WIRE).flows(flows))?;
            self.send("xdp_native", &there(syn, across)?.through(WIRE))?;
            self.send("xdp_native", &there(Transport::Udp, routed)?.through(WIRE))?;
        }
        let Family { vip, backend, .. } = self.v4;
        for protocol in [protocol::TCP, protocol::UDP] {
            self.settled_baselines.service(protocol, Frame::client(vip), vip, backend, MANY)?;
        }
        Ok(())
    }

    /// Runs a packet of each flow through a program of `settled`.
    fn send(&self, program: &str, frame: &Frame) -> anyhow::Result<()> {
        let candidate = self.settled_candidate(program, &frame.clone().in_order())?;
        candidate.run(frame.count())?;
        Ok(())
    }

    /// Prepares a program of `settled` with these packets.
    pub(crate) fn settled_candidate(&self, program: &str, frame: &Frame) -> anyhow::Result<Candidate> {
        Candidate::new(&self.restore, Kind::of(program), self.settled.program(program)?, frame)
    }
}

/// A network namespace with the routes that masquerading and XDP look up. Dropping the guard removes it.
pub(crate) fn netns(name: &str) -> anyhow::Result<Netns> {
    let netns = Netns::create(name)?;
    netns.sysctls(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
    netns.ip("link add wire index 50 type veth peer name wire-end\n\
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
