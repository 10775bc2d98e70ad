//! Creates idle flows: connections in the flow table that have no sockets. `BPF_PROG_TEST_RUN` passes the
//! packets of their handshakes to the pinned programs, which is far cheaper than opening real connections.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use aya::{
    maps::{Map, MapData, PerCpuArray},
    programs::SchedClassifier,
};
use lb_common::Outcome;

use crate::{
    candidate::{Candidate, Kind, build},
    family::Family,
    frames::{Flags, Frame, Sender, Transport},
    load::Targets,
    node::{Node, PODS},
    way::Way,
    workload::Workload,
};

/// Network of the clients of idle flows (IPv4 only). The agent must treat these clients as internal, so the network is
/// also its `--cluster-cidr`.
pub(crate) const CLIENTS: &str = "10.0.0.0/8";

/// Opens this number of established flows from pods to the measured Service, through the programs pinned below `bpffs`.
///
/// The number of flows that a test run opens is a power of two, so several runs add up to `flows`.
pub(crate) fn open(node: &Node, bpffs: &Path, flows: u32) -> Result<()> {
    let pins = Pins::find(bpffs)?;
    let restore = build(ebpf_build::RESTORE)?;
    let before = pins.new_flows()?;
    node.node.run(|| open_all(&pins, &restore, flows).map_err(io::Error::other))?;
    let opened = pins.new_flows()? - before;
    ensure!(opened == u64::from(flows), "the programs opened {opened} flows, not {flows}");
    Ok(())
}

fn open_all(pins: &Pins, restore: &Path, flows: u32) -> Result<()> {
    let device = nix::net::if_::if_nametoindex(PODS[0])?;
    let (ingress, egress) = (pins.program("tc_ingress")?, pins.program("tc_egress")?);
    let Targets { tcp: vip, .. } = Workload::targets(Family::V4, Way::Pod);
    let Targets { tcp: endpoint, .. } = Workload::endpoint(Family::V4, Way::Pod);
    let [syn, syn_ack, ack] = [Flags::Syn, Flags::SynAck, Flags::Ack].map(Transport::Tcp);
    for (program, transport, sender, server) in [
        (&ingress, syn, Sender::Client, vip),
        (&egress, syn_ack, Sender::Server, endpoint),
        (&ingress, ack, Sender::Client, vip),
    ] {
        let mut first = 0;
        for power in (0..32).rev().map(|bit| flows & 1 << bit).filter(|power| *power > 0) {
            let frame = Frame::new(transport, sender, server)?.through(device).in_order();
            let candidate =
                Candidate::new(restore, Kind::Tc, program.fd()?, &frame.flows(power).starting_at(first))?;
            candidate.run(power)?;
            first += power;
        }
    }
    Ok(())
}

/// The programs and maps that an agent has pinned.
pub(crate) struct Pins {
    /// The folder `DIR/lb/vN` of the pins.
    folder: PathBuf,
}

impl Pins {
    pub(crate) fn find(bpffs: &Path) -> Result<Self> {
        let root = bpffs.join("lb");
        let entries = fs::read_dir(&root).with_context(|| format!("reading {}", root.display()))?;
        let is_version = |path: &PathBuf| path.join("programs").is_dir();
        let folder = entries.filter_map(|entry| Some(entry.ok()?.path())).find(is_version);
        Ok(Self { folder: folder.with_context(|| format!("no programs are pinned in {}", root.display()))? })
    }

    fn program(&self, name: &str) -> Result<SchedClassifier> {
        let path = self.folder.join("programs").join(name);
        SchedClassifier::from_pin(&path).with_context(|| format!("opening {}", path.display()))
    }

    /// Number of flows that the programs have created so far.
    fn new_flows(&self) -> Result<u64> {
        let map = MapData::from_pin(self.folder.join("STATS")).context("opening the counters")?;
        let counters: PerCpuArray<_, u64> = PerCpuArray::try_from(Map::PerCpuArray(map))?;
        Ok(counters.get(&(Outcome::NewFlow as u32), 0)?.iter().sum())
    }

    /// Memory in bytes that the kernel charges for all pinned maps.
    pub(crate) fn memory(&self) -> Result<u64> {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let mut bytes = 0;
        for entry in fs::read_dir(&self.folder)? {
            // Skips entries that are folders, not maps.
            let Ok(map) = MapData::from_pin(entry?.path()) else { continue };
            let file = format!("/proc/thread-self/fdinfo/{}", map.fd().as_fd().as_raw_fd());
            let text = fs::read_to_string(&file).with_context(|| format!("reading {file}"))?;
            let memory = lb_tests::bench::machine::field(&text, "memlock").context("no field memlock")?;
            bytes += memory.parse::<u64>()?;
        }
        Ok(bytes)
    }
}
