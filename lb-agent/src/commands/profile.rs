//! The command `profile`: how often each BPF program runs, and for how long.

use std::{
    thread,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::output::{Mood, cell, print_json, print_table, table};
use crate::{
    cli::{ProfileArgs, TableOrJson},
    config::KernelPaths,
};
use lb_datapath::{Pinned, RunTime, Work, work};

/// Interval between two updates of the progress display.
const STEP: Duration = Duration::from_millis(100);
/// Share of one CPU above which `profile` highlights a program.
const MUCH: f64 = 0.1;

/// The JSON output of `profile`. Scripts read it: keys may be added, never renamed or removed.
#[derive(Debug, Serialize)]
pub(super) struct Profile {
    /// Duration of the measurement, in seconds.
    seconds: f64,
    /// One entry for each BPF program of lb-agent that existed at the end of the measurement, the busiest first.
    programs: Vec<ProgramProfile>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProgramProfile {
    program: String,
    program_id: u32,
    runs: u64,
    runs_per_second: f64,
    /// Average duration of a run in nanoseconds; `None` if the program did not run.
    average_nanoseconds: Option<f64>,
    /// CPU time per second of wall time; 1 is one fully used CPU.
    cpus: f64,
}

/// Runs `profile`.
///
/// # Errors
/// There is no data plane, it cannot be read, or the kernel does not measure programs.
pub fn profile(paths: &KernelPaths, args: &ProfileArgs) -> anyhow::Result<()> {
    let pinned = Pinned::open(&paths.bpffs)?;
    let profile = count(&pinned, Duration::from_secs(args.seconds), wait)?;
    match args.output {
        TableOrJson::Json => print_json(&profile),
        TableOrJson::Table => print_table(&page(&profile)),
    }
}

/// Counts the runs of all programs during `wait(time)`.
pub(super) fn count(pinned: &Pinned, time: Duration, wait: impl Fn(Duration)) -> anyhow::Result<Profile> {
    let counting = RunTime::count()?;
    let before = pinned.all_programs()?;
    let start = Instant::now();
    wait(time);
    let after = pinned.all_programs()?;
    let elapsed = start.elapsed();
    drop(counting);
    Ok(Profile::new(&work(&before, &after), elapsed))
}

impl Profile {
    fn new(work: &[Work], elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64();
        let of = |work: &Work| {
            let (runs, nanoseconds) = (count_of(work.runs), work.time.as_secs_f64() * 1e9);
            ProgramProfile {
                program: work.name.clone(),
                program_id: work.id,
                runs: work.runs,
                runs_per_second: runs / seconds,
                average_nanoseconds: (work.runs > 0).then(|| nanoseconds / runs),
                cpus: work.time.as_secs_f64() / seconds,
            }
        };
        Self { seconds, programs: work.iter().map(of).collect() }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a measurement has fewer than 2^53 runs")]
const fn count_of(runs: u64) -> f64 {
    runs as f64
}

/// Sleeps for `time`; shows the remaining time on a terminal.
fn wait(time: Duration) {
    let steps = u64::try_from(time.as_millis() / STEP.as_millis()).unwrap_or(u64::MAX);
    let bar = ProgressBar::new(steps);
    if let Ok(style) = ProgressStyle::with_template("measuring {bar:30} {eta}") {
        bar.set_style(style);
    }
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        thread::sleep(left.min(STEP));
        bar.inc(1);
    }
    bar.finish_and_clear();
}

fn page(profile: &Profile) -> comfy_table::Table {
    let mut table = table(&["PROGRAM", "ID", "RUNS", "RUNS/S", "NS/RUN", "CPU"]);
    for program in &profile.programs {
        let average = program.average_nanoseconds.map_or_else(|| "-".to_owned(), |ns| format!("{ns:.0}"));
        let mood = if program.cpus > MUCH { Mood::Odd } else { Mood::Good };
        table.add_row([
            program.program.clone().into(),
            program.program_id.into(),
            program.runs.into(),
            format!("{:.0}", program.runs_per_second).into(),
            average.into(),
            cell(format!("{:.2} %", 100.0 * program.cpus), mood),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::output::render;

    #[test]
    fn table_and_json_of_a_profile() {
        let of = |name: &str, id, runs, time| Work { name: name.to_owned(), id, runs, time };
        let work =
            [of("tc_ingress", 12, 4000, Duration::from_millis(1)), of("tc_egress", 13, 0, Duration::ZERO)];
        let profile = Profile::new(&work, Duration::from_secs(2));
        let expected = "\
PROGRAM     ID  RUNS  RUNS/S  NS/RUN  CPU
tc_ingress  12  4000  2000    250     0.05 %
tc_egress   13  0     0       -       0.00 %
";
        assert_eq!(render(&page(&profile)), expected);
        let json = serde_json::to_value(&profile).unwrap();
        assert_eq!(
            (&json["programs"][0]["averageNanoseconds"], &json["seconds"]),
            (&250.0.into(), &2.0.into())
        );
    }
}
