//! Measures in many short rounds. In each round a program, its baseline and a program that returns at once (the
//! overhead) take turns on one CPU.
//!
//! Machines change their speed, and neighbours slow down virtual ones. So values to compare are measured within a tenth
//! of a second, and a round is dropped if the overhead at its beginning differs from that at its end.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::{
    baselines::Baseline,
    candidate::{Candidate, Kind},
    cases::{Case, Subject},
    world::World,
};

/// The extent of the measurement.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// Accepted rounds wanted for each case.
    pub(crate) rounds: u32,
    /// Approximate time that a program runs in each round.
    pub(crate) slice: Duration,
}

/// The largest relative difference of the overhead between the ends of an accepted round.
const DRIFT: f64 = 0.1;
/// Attempts for each accepted round.
const ATTEMPTS: u32 = 4;
/// Packets of the trial that estimates the time per packet.
const TRIAL: u32 = 20_000;

/// Results of one round, in nanoseconds per packet.
#[derive(Clone, Copy)]
pub(crate) struct Round {
    pub(crate) program: f64,
    pub(crate) baseline: f64,
    /// The overhead, with the packets of the program.
    pub(crate) program_overhead: f64,
    /// The overhead, with the packets of the baseline.
    pub(crate) baseline_overhead: f64,
}

/// A case with its loaded programs and its results.
pub(crate) struct Contest {
    pub(crate) case: Case,
    program: Runner,
    baseline: Runner,
    program_overhead: Runner,
    /// Measures the overhead with the baseline's packets; `None` if program and baseline get the same packets.
    baseline_overhead: Option<Runner>,
    /// Accepted rounds.
    pub(crate) rounds: Vec<Round>,
    /// Rounds that were not accepted.
    pub(crate) dropped: u32,
}

/// A candidate and the number of packets of one measurement.
struct Runner {
    candidate: Candidate,
    packets: u32,
    /// Packets before the measurement, which warm the caches.
    warm_up: u32,
}

impl Runner {
    fn new(candidate: Candidate, slice: Duration) -> anyhow::Result<Self> {
        let nanos = candidate.run(TRIAL)?;
        let flows = candidate.frame().count();
        let many = flows > 1;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "slices last milliseconds"
        )]
        let packets = (slice.as_nanos() as f64 / nanos) as u32;
        // A multiple of the number of flows.
        let packets = packets.max(flows) / flows * flows;
        Ok(Self { candidate, packets, warm_up: if many { flows } else { 0 } })
    }

    /// Measures packets that create a flow each, so each packet runs once.
    fn once(candidate: Candidate) -> Self {
        let packets = candidate.frame().count();
        Self { candidate, packets, warm_up: 0 }
    }

    fn run(&self) -> anyhow::Result<f64> {
        if self.warm_up > 0 {
            self.candidate.run(self.warm_up)?;
        }
        self.candidate.run(self.packets)
    }
}

impl Contest {
    /// Loads a case and checks that its programs return the expected results.
    pub(crate) fn new(world: &mut World, case: Case, plan: Plan) -> anyhow::Result<Self> {
        let kind = case.kind();
        let World { settled_baselines, fresh, fresh_baselines, settled, restore, .. } = &*world;
        let candidate = |program, frame| Candidate::new(restore, kind, program, frame);
        let overhead = |frame| {
            let program = settled_baselines.program(Baseline::Return, kind)?;
            Runner::new(candidate(program, frame)?, plan.slice / 2)
        };
        let (datapath, baselines) =
            if case.makes_flows() { (fresh, fresh_baselines) } else { (settled, settled_baselines) };
        let program = match case.subject {
            Subject::Ours(name) => datapath.program(name)?,
            Subject::Baseline(baseline) => baselines.program(baseline, kind)?,
        };
        let program = candidate(program, &case.frame)?;
        let baseline = candidate(baselines.program(case.baseline, kind)?, &case.baseline_frame)?;
        let program_overhead = overhead(&case.frame)?;
        let baseline_overhead =
            (case.frame != case.baseline_frame).then(|| overhead(&case.baseline_frame)).transpose()?;
        case.check(&program)?;
        baseline.ensure_does(case.baseline)?;
        let runner = |candidate| {
            if case.makes_flows() { Ok(Runner::once(candidate)) } else { Runner::new(candidate, plan.slice) }
        };
        let (program, baseline) = (runner(program)?, runner(baseline)?);
        if case.makes_flows() {
            world.fresh.clear_flows()?;
            world.fresh_baselines.clear_flows()?;
        }
        Ok(Self {
            case,
            program,
            baseline,
            program_overhead,
            baseline_overhead,
            rounds: Vec::new(),
            dropped: 0,
        })
    }

    /// Whether the contest has enough rounds or attempts.
    fn is_done(&self, plan: Plan) -> bool {
        let kept = u32::try_from(self.rounds.len()).unwrap_or(u32::MAX);
        kept >= plan.rounds || kept.saturating_add(self.dropped) >= plan.rounds.saturating_mul(ATTEMPTS)
    }

    fn round(&mut self, world: &mut World) -> anyhow::Result<()> {
        let before = self.overheads()?;
        let (program, baseline);
        if fastrand::bool() {
            program = self.run_program(world)?;
            baseline = self.run_baseline(world)?;
        } else {
            baseline = self.run_baseline(world)?;
            program = self.run_program(world)?;
        }
        let after = self.overheads()?;
        let steady = before
            .iter()
            .zip(&after)
            .all(|(before, after)| (before - after).abs() <= DRIFT * before.min(*after));
        if steady {
            let [program_overhead, baseline_overhead] =
                [0, 1].map(|index| (before[index] + after[index]) / 2.0);
            self.rounds.push(Round { program, baseline, program_overhead, baseline_overhead });
        } else {
            self.dropped += 1;
        }
        Ok(())
    }

    /// The overhead with the packets of the program, and with those of the baseline.
    fn overheads(&self) -> anyhow::Result<[f64; 2]> {
        let program = self.program_overhead.run()?;
        let baseline = self.baseline_overhead.as_ref().map_or(Ok(program), Runner::run)?;
        Ok([program, baseline])
    }

    fn run_program(&self, world: &mut World) -> anyhow::Result<f64> {
        let fresh = self.case.makes_flows();
        let datapath = if fresh { &world.fresh } else { &world.settled };
        let before = datapath.counters()?;
        let nanos = self.program.run()?;
        if let Subject::Ours(_) = self.case.subject {
            let packets = u64::from(self.program.packets) + u64::from(self.program.warm_up);
            let counted = datapath.counters()?.ensure_only(&before, self.case.expected.counted, packets);
            counted.with_context(|| self.case.to_string())?;
        }
        if fresh {
            world.fresh.clear_flows()?;
            world.fresh_baselines.clear_flows()?;
        }
        Ok(nanos)
    }

    fn run_baseline(&self, world: &mut World) -> anyhow::Result<f64> {
        let nanos = self.baseline.run()?;
        if self.case.makes_flows() {
            world.fresh_baselines.clear_flows()?;
        }
        Ok(nanos)
    }
}

impl Candidate {
    /// Fails unless the baseline program returns the verdict for a processed packet.
    fn ensure_does(&self, baseline: Baseline) -> anyhow::Result<()> {
        let verdict = self.once()?.verdict;
        let wanted = match self.kind() {
            Kind::Tc => u32::MAX,
            Kind::Xdp => 3,
        };
        ensure!(verdict == wanted, "the baseline \"{}\" returned {verdict:x}", baseline.label());
        Ok(())
    }
}

/// Measures all cases, in a random order in each round.
pub(crate) fn measure(contests: &mut [Contest], world: &mut World, plan: Plan) -> anyhow::Result<()> {
    let mut turn = 0;
    loop {
        let mut left: Vec<&mut Contest> =
            contests.iter_mut().filter(|contest| !contest.is_done(plan)).collect();
        if left.is_empty() {
            return Ok(());
        }
        turn += 1;
        eprintln!("· round {turn}: {} cases", left.len());
        fastrand::shuffle(&mut left);
        for contest in left {
            contest.round(world)?;
        }
    }
}
