//! Two CPUs that use one flow table: the time per packet when both run at once, compared with each CPU alone.
//!
//! For every packet of an established flow, a program writes to the flow's entry. For a new flow, it claims entries. So
//! CPUs slow each other down if they write to the same cache lines or take the same locks.

use std::{
    sync::Barrier,
    thread::{ScopedJoinHandle, scope},
};

use anyhow::Context as _;
use lb_common::Outcome;
use lb_tests::bench::Samples;
use serde::Serialize;

use crate::{
    baselines::Baseline,
    candidate::{self, Candidate, Kind},
    cases::{ACK, SYN},
    frames::{Frame, Sender},
    rounds::Plan,
    world::{Ip, MANY, NEW, Objects, Population, WIRE, World},
};

/// A program that is measured on one CPU and on two at once.
struct Contest {
    build: String,
    program: &'static str,
    packets: &'static str,
    ip: Ip,
    /// The program with the first CPU's packets, and with the second CPU's.
    sides: [Candidate; 2],
    /// Number of packets per CPU in one measurement.
    count: u32,
    /// Index of the measured data plane; `None` for a baseline.
    datapath: Option<usize>,
    makes_flows: bool,
    counted: Option<Outcome>,
    alone: Vec<f64>,
    together: Vec<f64>,
}

/// Results of one contest. Times are nanoseconds per packet on one CPU, including the overhead of a test run.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) build: String,
    pub(crate) program: String,
    pub(crate) packets: String,
    /// Time per packet while the other CPU is idle.
    pub(crate) alone: Samples,
    /// Time per packet while both CPUs run.
    pub(crate) together: Samples,
    /// Packets per second of both CPUs together, divided by the packets per second of one CPU alone: 2 is perfect
    /// scaling.
    pub(crate) scaling: Samples,
}

/// A kind of packets that both CPUs process.
struct Load {
    program: &'static str,
    packets: &'static str,
    /// The packets of the first CPU, and those of the second.
    frames: [Frame; 2],
    /// The baseline to compare with; `None` if there is none for these packets.
    baseline: Option<Baseline>,
    counted: Option<Outcome>,
}

/// Measures all cases on these two CPUs.
pub(crate) fn measure(objects: &Objects, plan: Plan, cpus: [usize; 2]) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for ip in Ip::ALL {
        for population in [Population::Stack(ip, MANY), Population::Routed(ip, MANY), Population::Empty] {
            eprintln!("· two CPUs: {ip}, {population}");
            let world = World::new(objects, population)?;
            let mut contests = contests(&world, ip, plan)?;
            for _ in 0..plan.rounds {
                fastrand::shuffle(&mut contests);
                for contest in &mut contests {
                    contest.round(&world, cpus)?;
                }
            }
            contests.sort_by_key(|contest| {
                (contest.program, contest.packets, contest.datapath.is_none(), contest.datapath)
            });
            rows.extend(contests.into_iter().map(Row::new));
        }
    }
    Ok(rows)
}

fn loads(world: &World, ip: Ip) -> anyhow::Result<Vec<Load>> {
    let family = world.family(ip);
    let there = Frame::new(ACK, Sender::Client, family.vip)?;
    let back = Frame::new(ACK, Sender::Server, family.backend)?;
    let halves = |frame: &Frame, flows| [0, 1].map(|half| frame.clone().flows(flows).half(half));
    let is_v4 = ip == Ip::V4;
    Ok(match world.population {
        Population::Stack(..) => vec![
            Load {
                program: "tc_ingress",
                packets: "the same flow on both CPUs",
                frames: halves(&there, 1),
                baseline: is_v4.then_some(Baseline::Balance),
                counted: Some(Outcome::Forward),
            },
            Load {
                program: "tc_ingress",
                packets: "32,768 flows on each CPU",
                frames: halves(&there, MANY),
                baseline: is_v4.then_some(Baseline::Balance),
                counted: Some(Outcome::Forward),
            },
            Load {
                program: "tc_egress",
                packets: "32,768 flows on each CPU",
                frames: halves(&back, MANY),
                baseline: None,
                counted: Some(Outcome::Reply),
            },
        ],
        Population::Routed(..) => {
            let arriving = Frame::new(ACK, Sender::Client, family.routed)?.through(WIRE);
            vec![Load {
                program: "xdp_native",
                packets: "32,768 flows on each CPU",
                frames: halves(&arriving, MANY),
                baseline: is_v4.then_some(Baseline::Balance),
                counted: Some(Outcome::Routed),
            }]
        }
        Population::Empty | Population::Few => {
            let syn = Frame::new(SYN, Sender::Client, family.vip)?;
            vec![Load {
                program: "tc_ingress",
                packets: "new flows on each CPU",
                frames: halves(&syn, NEW),
                baseline: is_v4.then_some(Baseline::InsertPreallocated),
                counted: Some(Outcome::NewFlow),
            }]
        }
    })
}

fn contests(world: &World, ip: Ip, plan: Plan) -> anyhow::Result<Vec<Contest>> {
    let mut contests = Vec::new();
    for load in loads(world, ip)? {
        for (index, datapath) in world.datapaths.iter().enumerate() {
            let side = |frame: &Frame| world.candidate(index, load.program, frame);
            let sides = [side(&load.frames[0])?, side(&load.frames[1])?];
            contests.push(Contest::new(world, &load, ip, Some(index), datapath.name.clone(), sides, plan)?);
        }
        if let Some(baseline) = load.baseline {
            // The baselines know only the Service `vip`, so for every load they process packets to `vip`.
            let transport = if world.population == Population::Empty { SYN } else { ACK };
            let frame = |half: usize| {
                let frame = Frame::new(transport, Sender::Client, world.v4.vip)?;
                Ok::<_, anyhow::Error>(load.frames[half].clone_extent(frame))
            };
            let side = |half| world.baseline(baseline, Kind::of(load.program), &frame(half)?);
            let name = format!("baseline: {}", baseline.label());
            contests.push(Contest::new(world, &load, ip, None, name, [side(0)?, side(1)?], plan)?);
        }
    }
    Ok(contests)
}

impl Contest {
    fn new(
        world: &World,
        load: &Load,
        ip: Ip,
        datapath: Option<usize>,
        build: String,
        sides: [Candidate; 2],
        plan: Plan,
    ) -> anyhow::Result<Self> {
        let makes_flows = world.population == Population::Empty;
        let flows = sides[0].frame().count();
        let count = if makes_flows {
            flows
        } else {
            let nanos = sides[0].run(flows.max(20_000))?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "slices last milliseconds"
            )]
            let packets = (plan.slice.as_nanos() as f64 / nanos) as u32;
            packets.max(flows) / flows * flows
        };
        Ok(Self {
            build,
            program: load.program,
            packets: load.packets,
            ip,
            sides,
            count,
            datapath,
            makes_flows,
            counted: load.counted,
            alone: Vec::new(),
            together: Vec::new(),
        })
    }

    fn round(&mut self, world: &World, cpus: [usize; 2]) -> anyhow::Result<()> {
        let mut alone = 0.0;
        for (side, cpu) in self.sides.iter().zip(cpus) {
            let [nanos] = self.run(world, [(side, cpu)])?;
            alone += nanos / 2.0;
        }
        let [first, second] = &self.sides;
        let together = self.run(world, [(first, cpus[0]), (second, cpus[1])])?;
        self.alone.push(alone);
        self.together.push(together.iter().sum::<f64>() / 2.0);
        Ok(())
    }

    /// Runs each candidate on its CPU, all at the same time; returns the nanoseconds per packet of each.
    fn run<const N: usize>(
        &self,
        world: &World,
        sides: [(&Candidate, usize); N],
    ) -> anyhow::Result<[f64; N]> {
        let datapath = self.datapath.map(|index| &world.datapaths[index]);
        let before = datapath.map(|datapath| datapath.counters()).transpose()?;
        let (barrier, count, warm_up) = (Barrier::new(N), self.count, !self.makes_flows);
        let times = scope(|scope| {
            let threads = sides.map(|(candidate, cpu)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let ready = candidate::claim(cpu)
                        .and_then(|()| if warm_up { candidate.run(count).map(|_| ()) } else { Ok(()) });
                    barrier.wait();
                    ready.and_then(|()| candidate.run(count))
                })
            });
            threads.map(join)
        });
        if let (Some(datapath), Some(before)) = (datapath, before) {
            let runs = if warm_up { 2 } else { 1 };
            let packets = u64::from(count) * runs * N as u64;
            let counted = datapath.counters()?.ensure_only(&before, self.counted, packets);
            counted
                .with_context(|| format!("two CPUs: {}, {}, {}", self.build, self.program, self.packets))?;
        }
        if self.makes_flows {
            world.clear_flows()?;
        }
        let mut nanos = [0.0; N];
        for (nanos, time) in nanos.iter_mut().zip(times) {
            *nanos = time?;
        }
        Ok(nanos)
    }
}

fn join(thread: ScopedJoinHandle<'_, anyhow::Result<f64>>) -> anyhow::Result<f64> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Row {
    fn new(contest: Contest) -> Self {
        let Contest { build, program, packets, ip, alone, together, .. } = contest;
        let scaling = alone.iter().zip(&together).map(|(alone, together)| 2.0 * alone / together).collect();
        Self {
            build,
            program: program.to_owned(),
            packets: format!("TCP/{ip}, {packets}"),
            alone: Samples::new(alone),
            together: Samples::new(together),
            scaling: Samples::new(scaling),
        }
    }
}
