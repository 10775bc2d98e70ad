//! Parts shared by the benchmarks: the machine, figures with targets, plots.

use std::process::ExitCode;

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
