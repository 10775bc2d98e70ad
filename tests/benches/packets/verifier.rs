//! Measures the cost of loading: how many instructions the verifier processes for each program, and how long the load
//! takes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use aya::programs::Program;
use serde::Serialize;

use crate::{datapath, world::Build};

/// Number of loads per program; the fastest counts.
const LOADS: u32 = 3;

/// The cost of loading one program.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) program: String,
    /// Number of instructions that the verifier processed, on all paths.
    pub(crate) verified: u32,
    /// Milliseconds that the fastest load of the program took: mostly verifier and JIT compiler.
    pub(crate) milliseconds: f64,
}

/// The costs of loading all programs of a build, sorted by name.
pub(crate) fn costs(build: &Build) -> anyhow::Result<Vec<Cost>> {
    let mut fastest = load_all(build)?;
    for _ in 1..LOADS {
        for (cost, again) in fastest.iter_mut().zip(load_all(build)?) {
            cost.milliseconds = cost.milliseconds.min(again.milliseconds);
        }
    }
    Ok(fastest)
}

fn load_all(build: &Build) -> anyhow::Result<Vec<Cost>> {
    let mut ebpf = datapath::open(&build.object)?;
    let mut costs = Vec::new();
    for (name, program) in ebpf.programs_mut() {
        let load = || format!("loading the program {name} of the build {}", build.name);
        let time = load_program(program).with_context(load)?;
        let verified = program.info()?.verified_instruction_count().unwrap_or(0);
        costs.push(Cost { program: name.to_owned(), verified, milliseconds: time.as_secs_f64() * 1e3 });
    }
    costs.sort_by(|a, b| a.program.cmp(&b.program));
    Ok(costs)
}

fn load_program(program: &mut Program) -> anyhow::Result<Duration> {
    let start = Instant::now();
    if let Program::SchedClassifier(program) = program {
        program.load()?;
    } else if let Program::Xdp(program) = program {
        program.load()?;
    } else if let Program::CgroupSockAddr(program) = program {
        program.load()?;
    } else if let Program::CgroupSock(program) = program {
        program.load()?;
    } else {
        bail!("the benchmark cannot load programs of type {:?}", program.prog_type());
    }
    Ok(start.elapsed())
}
