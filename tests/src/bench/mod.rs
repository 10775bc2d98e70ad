//! What the benchmarks share: the machine, figures and their targets, plots.

use std::process::ExitCode;

pub mod figure;
pub mod machine;
pub mod plot;

pub use self::{
    figure::{Figure, Quantile, Samples, Unit},
    machine::Machine,
    plot::{Bar, Plot},
};

/// How a benchmark ends that has found out whether every target is met; says so where one is not.
pub fn exit_code(all_met: anyhow::Result<bool>) -> ExitCode {
    let error = match all_met {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => "a target is missed".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    eprintln!("error: {error}");
    ExitCode::FAILURE
}
