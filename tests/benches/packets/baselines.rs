//! The minimal baseline programs that the data plane is compared with, see `lb-ebpf-bench/src/baselines.rs`.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, bail};
use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{HashMap, MapData},
    programs::ProgramFd,
};
use lb_common::checksum::Sum;
use lb_ebpf_bench::{BaselineFlow, BaselineService, BaselineTarget, Variation};

use crate::{
    candidate::{Kind, load, program},
    flows::delete_all,
};

/// A minimal program for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Baseline {
    /// Returns at once: the overhead of a test run.
    Return,
    /// Parses, swaps MAC addresses, and looks up a flow that does not exist.
    Miss,
    /// A minimal load balancer: looks up Service and flow, and translates the packet.
    Balance,
    /// Inserts one entry for a new flow into a map that allocates memory per entry.
    Insert,
    /// Inserts one entry for a new flow into a preallocated map.
    InsertPreallocated,
}

impl Baseline {
    const ALL: [Self; 5] = [Self::Return, Self::Miss, Self::Balance, Self::Insert, Self::InsertPreallocated];

    /// Label of the baseline in tables.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Return => "returns at once",
            Self::Miss => "parses, one lookup that misses",
            Self::Balance => "minimal load balancer",
            Self::Insert => "inserts one entry, allocated on insertion",
            Self::InsertPreallocated => "inserts one entry, preallocated",
        }
    }

    /// Name of the baseline's program for this kind of hook.
    pub(crate) fn program(self, kind: Kind) -> String {
        let name = match self {
            Self::Return => "return",
            Self::Miss => "miss",
            Self::Balance => "balance",
            Self::Insert => "insert",
            Self::InsertPreallocated => "insert_preallocated",
        };
        format!("{}_{name}", kind.prefix())
    }
}

/// The loaded baseline programs, and their maps.
pub(crate) struct Baselines {
    ebpf: Ebpf,
}

impl Baselines {
    pub(crate) fn load(object: &Path) -> anyhow::Result<Self> {
        let mut ebpf =
            EbpfLoader::new().load_file(object).with_context(|| format!("loading {}", object.display()))?;
        for kind in [Kind::Tc, Kind::Xdp] {
            for baseline in Baseline::ALL {
                load(&mut ebpf, &baseline.program(kind))?;
            }
        }
        Ok(Self { ebpf })
    }

    pub(crate) fn program(&self, baseline: Baseline, kind: Kind) -> anyhow::Result<&ProgramFd> {
        program(&self.ebpf, &baseline.program(kind))
    }

    /// Adds a Service with one backend and with `flows` flows to the baselines' maps. `client` is the client of flow 0;
    /// [`Variation`] computes the other clients.
    pub(crate) fn service(
        &mut self,
        protocol: u8,
        client: SocketAddr,
        vip: SocketAddr,
        backend: SocketAddr,
        flows: u32,
    ) -> anyhow::Result<()> {
        let (from, to, client_address) = (word(vip.ip())?, word(backend.ip())?, word(client.ip())?);
        let (from_port, to_port) = (vip.port().to_be(), backend.port().to_be());
        let service = BaselineService { address: from, port: from_port, protocol: protocol.into() };
        self.map::<[u32; 2], u32>("SERVICES")?.insert(bytemuck::must_cast::<_, [u32; 2]>(service), 1, 0)?;
        let addresses = Sum::ZERO.add_wide(!from).add_wide(to);
        let target = BaselineTarget {
            address: to,
            port: to_port,
            address_delta: addresses.fold(),
            delta: addresses.sub_word(from_port).add_word(to_port).fold(),
            zero: 0,
        };
        let mut conntrack = self.map::<[u32; 4], [u32; 3]>("CONNTRACK")?;
        for flow in 0..flows {
            let Variation { address, port } = Variation::of(flow);
            let source_port = client.port().to_be() ^ port;
            let key = BaselineFlow {
                source: client_address ^ address,
                destination: from,
                ports: u32::from(source_port) | u32::from(from_port) << 16,
                protocol: protocol.into(),
            };
            let (key, target): ([u32; 4], [u32; 3]) = (bytemuck::must_cast(key), bytemuck::must_cast(target));
            conntrack.insert(key, target, 0)?;
        }
        Ok(())
    }

    pub(crate) fn clear_flows(&self) -> anyhow::Result<()> {
        for name in ["CONNTRACK", "PREALLOCATED"] {
            delete_all(self.ebpf.map(name).with_context(|| format!("there is no map {name}"))?)?;
        }
        Ok(())
    }

    fn map<K: Pod, V: Pod>(&mut self, name: &str) -> anyhow::Result<HashMap<&mut MapData, K, V>> {
        let map = self.ebpf.map_mut(name).with_context(|| format!("there is no map {name}"))?;
        Ok(HashMap::try_from(map)?)
    }
}

/// An IPv4 address as a number in network byte order.
fn word(address: IpAddr) -> anyhow::Result<u32> {
    match address {
        IpAddr::V4(address) => Ok(u32::from_ne_bytes(Ipv4Addr::octets(&address))),
        IpAddr::V6(address) => bail!("the baselines support IPv4 only, not {address}"),
    }
}
