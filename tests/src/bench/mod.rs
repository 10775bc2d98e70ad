//! Parts shared by the benchmarks: the machine, figures with targets, plots.

use std::{fs, path::Path, process::ExitCode};

use anyhow::Context as _;
use serde::Serialize;

pub mod figure;
pub mod machine;
pub mod plot;
pub mod process;

pub use self::{
    figure::{Figure, Quantile, Samples, Unit},
    machine::Machine,
    plot::{Bar, Plot},
    process::{Resident, cpu_time},
};

/// The exit code of a benchmark: success if all targets are met; else failure, with a message.
pub fn exit_code(all_met: anyhow::Result<bool>) -> ExitCode {
    let error = match all_met {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => "a target is missed".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Writes the results of a benchmark to `file`, the value of its argument `--json`.
pub fn write_json(file: &Path, results: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(results)?;
    fs::write(file, text + "\n").with_context(|| format!("cannot write the results to {}", file.display()))
}
