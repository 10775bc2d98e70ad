//! Measures in many short rounds. In each round the programs, their baselines and a program that returns at once (the
//! overhead) take turns on one CPU.
//!
//! Machines change their speed, and virtual machines share CPUs with other guests. So values to compare are measured in
//! the same short round, and a round is dropped if the overhead at its beginning differs from that at its end.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::{
    baselines::Baseline,
    caches::Caches,
    candidate::{Candidate, Kind},
    cases::Case,
    world::World,
};

/// The plan of the measurement: number and length of rounds.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// Number of accepted rounds that each case should have.
    pub(crate) rounds: u32,
    /// Approximate time that a program runs in each round.
    pub(crate) slice: Duration,
}

/// Maximum relative difference of the overhead between start and end of an accepted round.
const DRIFT: f64 = 0.1;
/// Maximum number of rounds that a case takes, as a multiple of the accepted rounds that it should have.
const ATTEMPTS: u32 = 4;
/// Number of packets in the trial that estimates the time per packet.
const TRIAL: u32 = 20_000;

/// Results of one round: nanoseconds per packet, without the overhead.
pub(crate) struct Round {
    /// Time of each build's program.
    pub(crate) programs: Vec<f64>,
    /// Time of each baseline of the case.
    pub(crate) baselines: Vec<f64>,
    /// Time of a program that returns at once, with the packets that the measured program gets.
    pub(crate) program_overhead: f64,
}

/// A case, the programs that are measured for it, and their results.
pub(crate) struct Contest {
    /// The same case once per build. In the packets, the ports of masqueraded clients differ between builds.
    cases: Vec<Case>,
    /// The measured program of each build.
    programs: Vec<Runner>,
    baselines: Vec<Runner>,
    program_overhead: Runner,
    /// Measures the overhead with the baseline's packets; `None` if these are the same as the program's.
    baseline_overhead: Option<Runner>,
    /// Results of the accepted rounds.
    pub(crate) rounds: Vec<Round>,
    /// Number of rounds that were not accepted.
    pub(crate) dropped: u32,
}

/// A candidate, and how many packets a measurement has.
struct Runner {
    candidate: Candidate,
    packets: u32,
    /// Number of packets before the measurement, to warm the caches.
    warm_up: u32,
}

/// The program that a measurement within a round runs: that of a build, or a baseline, by index.
#[derive(Clone, Copy)]
enum Turn {
    Program(usize),
    Baseline(usize),
}

impl Runner {
    /// Prepares measurements that last about `slice` and send packets of existing flows. With `makes_flows`, each
    /// packet creates a flow instead: a measurement then sends one packet of each flow, however long that takes.
    fn new(candidate: Candidate, makes_flows: bool, slice: Duration) -> anyhow::Result<Self> {
        let flows = candidate.frame().count();
        if makes_flows {
            return Ok(Self { candidate, packets: flows, warm_up: 0 });
        }
        let nanos = candidate.run(TRIAL)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "slices last milliseconds"
        )]
        let packets = (slice.as_nanos() as f64 / nanos) as u32;
        // Rounds the number of packets down to a multiple of the number of flows.
        let packets = packets.max(flows) / flows * flows;
        Ok(Self { candidate, packets, warm_up: if flows > 1 { flows } else { 0 } })
    }

    fn run(&self) -> anyhow::Result<f64> {
        if self.warm_up > 0 {
            self.candidate.run(self.warm_up)?;
        }
        self.candidate.run(self.packets)
    }
}

impl Contest {
    /// Loads the programs and the baselines of a case, and checks that they do what the case expects. `cases` contains
    /// the case once per build.
    pub(crate) fn new(world: &World, cases: Vec<Case>, plan: Plan) -> anyhow::Result<Self> {
        let case = cases.first().context("a case of no build")?;
        let (kind, makes_flows) = (case.kind(), case.makes_flows());
        let mut programs = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            let program = world.candidate(index, case.program, &case.frame)?;
            case.check(&program).with_context(|| format!("the build {}", world.datapaths[index].name))?;
            programs.push(Runner::new(program, makes_flows, plan.slice)?);
        }
        let mut baselines = Vec::new();
        for &baseline in case.baselines {
            let candidate = world.baseline(baseline, kind, &case.baseline_frame)?;
            candidate.ensure_does(baseline)?;
            baselines.push(Runner::new(candidate, makes_flows, plan.slice)?);
        }
        let overhead =
            |frame| Runner::new(world.baseline(Baseline::Return, kind, frame)?, false, plan.slice / 2);
        let program_overhead = overhead(&case.frame)?;
        let baseline_overhead =
            (case.frame != case.baseline_frame).then(|| overhead(&case.baseline_frame)).transpose()?;
        if makes_flows {
            world.clear_flows()?;
        }
        Ok(Self {
            cases,
            programs,
            baselines,
            program_overhead,
            baseline_overhead,
            rounds: Vec::new(),
            dropped: 0,
        })
    }

    /// The case with the packets for the first build.
    pub(crate) fn case(&self) -> &Case {
        &self.cases[0]
    }

    /// Whether the contest has enough accepted rounds, or no attempts are left.
    fn is_done(&self, plan: Plan) -> bool {
        let kept = u32::try_from(self.rounds.len()).unwrap_or(u32::MAX);
        kept >= plan.rounds || kept.saturating_add(self.dropped) >= plan.rounds.saturating_mul(ATTEMPTS)
    }

    fn round(&mut self, world: &World) -> anyhow::Result<()> {
        let mut turns: Vec<Turn> = (0..self.programs.len()).map(Turn::Program).collect();
        turns.extend((0..self.baselines.len()).map(Turn::Baseline));
        fastrand::shuffle(&mut turns);
        let (mut programs, mut baselines) = (vec![0.0; self.programs.len()], vec![0.0; self.baselines.len()]);
        let before = self.overheads()?;
        for turn in turns {
            self.prepare(world)?;
            match turn {
                Turn::Program(index) => programs[index] = self.run_program(world, index)?,
                Turn::Baseline(index) => baselines[index] = self.baselines[index].run()?,
            }
        }
        self.prepare(world)?;
        let after = self.overheads()?;
        let steady = before
            .iter()
            .zip(&after)
            .all(|(before, after)| (before - after).abs() <= DRIFT * before.min(*after));
        if !steady {
            self.dropped += 1;
            return Ok(());
        }
        let [program_overhead, baseline_overhead] = [0, 1].map(|index| (before[index] + after[index]) / 2.0);
        programs.iter_mut().for_each(|nanos| *nanos -= program_overhead);
        baselines.iter_mut().for_each(|nanos| *nanos -= baseline_overhead);
        self.rounds.push(Round { programs, baselines, program_overhead });
        Ok(())
    }

    /// Deletes all flows and empties the caches if the packets of the next measurement create flows. Without empty
    /// caches, programs and baselines would start with different data in the caches, because deletion reads the
    /// programs' whole flow table, but only the used entries of the baselines' maps.
    fn prepare(&self, world: &World) -> anyhow::Result<()> {
        if self.case().makes_flows() {
            world.clear_flows()?;
            world.caches.iter().for_each(Caches::empty);
        }
        Ok(())
    }

    /// Measures the time of a program that returns at once: with the packets that the measured program gets, and with
    /// those that its baselines get.
    fn overheads(&self) -> anyhow::Result<[f64; 2]> {
        let program = self.program_overhead.run()?;
        let baseline = self.baseline_overhead.as_ref().map_or(Ok(program), Runner::run)?;
        Ok([program, baseline])
    }

    fn run_program(&self, world: &World, index: usize) -> anyhow::Result<f64> {
        let (case, runner, datapath) = (&self.cases[index], &self.programs[index], &world.datapaths[index]);
        let before = datapath.counters()?;
        let nanos = runner.run()?;
        let packets = u64::from(runner.packets) + u64::from(runner.warm_up);
        let counted = datapath.counters()?.ensure_only(&before, case.expected.counted, packets);
        counted.with_context(|| format!("{case}, build {}", datapath.name))?;
        Ok(nanos)
    }
}

impl Candidate {
    /// Returns an error unless the baseline program returns `TC_ACT_UNSPEC` at tc, or `XDP_TX` at XDP: the code with
    /// which it reports that it has processed the packet.
    pub(crate) fn ensure_does(&self, baseline: Baseline) -> anyhow::Result<()> {
        let verdict = self.once()?.verdict;
        let wanted = match self.kind() {
            Kind::Tc => u32::MAX,
            Kind::Xdp => 3,
        };
        ensure!(verdict == wanted, "the baseline \"{}\" returned {verdict:x}", baseline.label());
        Ok(())
    }
}

/// Measures all contests round by round, in a random order in each round.
pub(crate) fn measure(contests: &mut [Contest], world: &World, plan: Plan) -> anyhow::Result<()> {
    loop {
        let mut left: Vec<&mut Contest> =
            contests.iter_mut().filter(|contest| !contest.is_done(plan)).collect();
        if left.is_empty() {
            return Ok(());
        }
        fastrand::shuffle(&mut left);
        for contest in left {
            contest.round(world)?;
        }
    }
}
