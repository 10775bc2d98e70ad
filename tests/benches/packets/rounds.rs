//! Measuring: many short rounds, in each of which a program, its floor and a program that returns at once take turns on
//! one CPU.
//!
//! Machines change their speed, and virtual ones are slowed down by their neighbours. So what is compared is measured
//! within the same tenth of a second, and a round in which the program that returns at once has become faster or slower does
//! not count.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::{
    candidate::{Candidate, Kind},
    cases::{Case, Subject},
    floors::Floor,
    world::World,
};

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// Rounds that count, for each case.
    pub(crate) rounds: u32,
    /// How long a program runs in each round, about.
    pub(crate) slice: Duration,
}

/// By how much the program that returns at once may take longer at one end of a round than at the other.
const DRIFT: f64 = 0.1;
/// Rounds that are tried for each that counts.
const ATTEMPTS: u32 = 4;
/// Packets that tell how long one takes, about.
const TRIAL: u32 = 20_000;

/// What one round found, in nanoseconds for a packet.
#[derive(Clone, Copy)]
pub(crate) struct Round {
    /// The program.
    pub(crate) program: f64,
    /// The floor.
    pub(crate) floor: f64,
    /// The program that returns at once, with the packets of the program.
    pub(crate) program_base: f64,
    /// The same, with the packets of the floor.
    pub(crate) floor_base: f64,
}

/// A case with everything that it needs.
pub(crate) struct Contest {
    pub(crate) case: Case,
    program: Runner,
    floor: Runner,
    program_base: Runner,
    /// `None` where the floor gets the same packets.
    floor_base: Option<Runner>,
    /// Rounds that count.
    pub(crate) rounds: Vec<Round>,
    /// Rounds that do not.
    pub(crate) dropped: u32,
}

/// A candidate and how many packets it gets at a time.
struct Runner {
    candidate: Candidate,
    packets: u32,
    /// Packets before those, so that caches hold what they hold after a while.
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
        // Whole turns through all flows.
        let packets = packets.max(flows) / flows * flows;
        Ok(Self { candidate, packets, warm_up: if many { flows } else { 0 } })
    }

    /// For packets each of which makes a flow: all of them once.
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
    /// Prepares and checks a case.
    pub(crate) fn new(world: &mut World, case: Case, plan: Plan) -> anyhow::Result<Self> {
        let kind = case.kind();
        let World { settled_floors, fresh, fresh_floors, settled, restore, .. } = &*world;
        let candidate = |program, frame| Candidate::new(restore, kind, program, frame);
        let base = |frame| {
            let program = settled_floors.program(Floor::Return, kind)?;
            Runner::new(candidate(program, frame)?, plan.slice / 2)
        };
        let (datapath, floors) =
            if case.makes_flows() { (fresh, fresh_floors) } else { (settled, settled_floors) };
        let program = match case.subject {
            Subject::Ours(name) => datapath.program(name)?,
            Subject::Floor(floor) => floors.program(floor, kind)?,
        };
        let program = candidate(program, &case.frame)?;
        let floor = candidate(floors.program(case.floor, kind)?, &case.floor_frame)?;
        let program_base = base(&case.frame)?;
        let floor_base = (case.frame != case.floor_frame).then(|| base(&case.floor_frame)).transpose()?;
        case.check(&program)?;
        floor.ensure_does(case.floor)?;
        let runner = |candidate| {
            if case.makes_flows() { Ok(Runner::once(candidate)) } else { Runner::new(candidate, plan.slice) }
        };
        let (program, floor) = (runner(program)?, runner(floor)?);
        if case.makes_flows() {
            world.fresh.forget()?;
            world.fresh_floors.forget()?;
        }
        Ok(Self { case, program, floor, program_base, floor_base, rounds: Vec::new(), dropped: 0 })
    }

    /// Whether it has been tried often enough.
    fn is_done(&self, plan: Plan) -> bool {
        let kept = u32::try_from(self.rounds.len()).unwrap_or(u32::MAX);
        kept >= plan.rounds || kept.saturating_add(self.dropped) >= plan.rounds.saturating_mul(ATTEMPTS)
    }

    fn round(&mut self, world: &mut World) -> anyhow::Result<()> {
        let before = self.bases()?;
        let (program, floor);
        if fastrand::bool() {
            program = self.run_program(world)?;
            floor = self.run_floor(world)?;
        } else {
            floor = self.run_floor(world)?;
            program = self.run_program(world)?;
        }
        let after = self.bases()?;
        let steady = before.iter().zip(&after).all(|(before, after)| {
            let least = before.min(*after);
            (before - after).abs() <= DRIFT * least
        });
        if steady {
            let [program_base, floor_base] = [0, 1].map(|index| (before[index] + after[index]) / 2.0);
            self.rounds.push(Round { program, floor, program_base, floor_base });
        } else {
            self.dropped += 1;
        }
        Ok(())
    }

    /// With the packets of the program, and of the floor.
    fn bases(&self) -> anyhow::Result<[f64; 2]> {
        let program = self.program_base.run()?;
        let floor = self.floor_base.as_ref().map_or(Ok(program), Runner::run)?;
        Ok([program, floor])
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
            world.fresh.forget()?;
            world.fresh_floors.forget()?;
        }
        Ok(nanos)
    }

    fn run_floor(&self, world: &mut World) -> anyhow::Result<f64> {
        let nanos = self.floor.run()?;
        if self.case.makes_flows() {
            world.fresh_floors.forget()?;
        }
        Ok(nanos)
    }
}

impl Candidate {
    /// Fails unless the floor program does what it is for.
    fn ensure_does(&self, floor: Floor) -> anyhow::Result<()> {
        let verdict = self.once()?.verdict;
        let wanted = match self.kind() {
            Kind::Tc => u32::MAX,
            Kind::Xdp => 3,
        };
        ensure!(verdict == wanted, "the floor that {} returned {verdict:x}", floor.label());
        Ok(())
    }
}

/// Measures all cases, in another order in each round.
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
