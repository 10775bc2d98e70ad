//! `cargo xtask fuzz`: builds the fuzz targets with coverage counters, and runs them with libFuzzer.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, anyhow, bail, ensure};
use comfy_table::{Table, presets::NOTHING};

use crate::agent::target_dir;
use crate::process;
use crate::setup;

/// The targets: the files of `fuzz/fuzz_targets/`.
const TARGETS: [&str; 8] =
    ["parse", "rewrite", "reject", "tunnel", "conntrack", "manifests", "config", "dns"];

/// Options of `fuzz`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The target; all of them, as many at a time as there are CPUs, if none is given
    #[arg(value_parser = TARGETS)]
    target: Option<String>,
    /// How long to run each target
    #[arg(long, default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Seed of libFuzzer's random changes; the table at the end prints it [default: another one each time]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    seed: Option<u32>,
}

impl Args {
    /// The arguments that `cargo xtask test`, and thus CI, uses: all targets, half a minute on two CPUs.
    pub(crate) fn of_ci() -> Self {
        Self { target: None, seconds: 8, seed: None }
    }
}

/// Builds the targets and runs them; prints a table.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::install(&[("c++", "g++")])?;
    let root = ebpf_build::workspace_root();
    let mut build = process::cargo(["build", "--locked", "--package", "lb-fuzz", "--bins"]);
    build.env("RUSTC_WORKSPACE_WRAPPER", root.join("fuzz/rustc.sh"));
    process::run(build)?;

    let mut table = Table::new();
    table.load_preset(NOTHING);
    table.set_header(["target", "seed", "executions", "coverage", "corpus"]);
    let (binaries, results) = (target_dir()?.join("debug"), root.join("target/fuzz"));
    let targets: Vec<&str> = match &args.target {
        Some(target) => vec![target.as_str()],
        None => TARGETS.to_vec(),
    };
    let mut failures: Vec<String> = Vec::new();
    // A target uses one CPU, and all run for the same time.
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    for targets in targets.chunks(cpus) {
        let summaries: Vec<anyhow::Result<Summary>> = thread::scope(|scope| {
            let run = |target: &str| fuzz(target, &binaries.join(target), &results, args);
            let running: Vec<_> = targets.iter().map(|target| scope.spawn(move || run(target))).collect();
            let panicked = |_| Err(anyhow!("the thread of the target panicked"));
            running.into_iter().map(|target| target.join().unwrap_or_else(panicked)).collect()
        });
        for (target, summary) in targets.iter().zip(summaries) {
            match summary {
                Ok(summary) => _ = table.add_row(summary.row(target)),
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        if !failures.is_empty() {
            break;
        }
    }
    println!("{table}");
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Runs one target. New inputs that reach more code go to the folder of results; the inputs in the repository are only
/// read.
fn fuzz(target: &str, binary: &Path, results: &Path, args: &Args) -> anyhow::Result<Summary> {
    let root = ebpf_build::workspace_root();
    let [found, findings] = ["corpus", "findings"].map(|name| results.join(name).join(target));
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&findings)?;
    let log = results.join(format!("{target}.log"));
    let mut command = Command::new(binary);
    command.args(["-print_final_stats=1", "-timeout=10"]);
    command.arg(format!("-max_total_time={}", args.seconds));
    command.arg(format!("-seed={}", args.seed.unwrap_or(0)));
    command.arg(format!("-artifact_prefix={}/", findings.display()));
    let words = root.join(format!("fuzz/words/{target}.dict"));
    if words.exists() {
        command.arg(format!("-dict={}", words.display()));
    }
    command.arg(found).arg(root.join("fuzz/corpus").join(target));
    let line = process::command_line(&command);
    eprintln!("$ {line}");
    let status = command
        .stdout(File::create(&log)?)
        .stderr(File::options().append(true).open(&log)?)
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    if !status.success() {
        let last: Vec<&str> = text.lines().rev().take(40).collect();
        eprintln!("{}", last.into_iter().rev().collect::<Vec<_>>().join("\n"));
        bail!(
            "{target} has a finding: {}; with the file as its only argument, {} repeats it",
            reproducer(&text).unwrap_or(findings).display(),
            binary.display()
        );
    }
    Summary::of(&text).with_context(|| format!("{} has no summary", log.display()))
}

/// The file with the input of a finding.
fn reproducer(log: &str) -> Option<PathBuf> {
    log.lines().find_map(|line| line.split_once("Test unit written to ")).map(|(_, path)| path.into())
}

/// Figures from the log of a run of libFuzzer.
#[derive(Debug, PartialEq)]
struct Summary {
    seed: String,
    executions: String,
    /// Number of edges of the code that inputs have reached: after libFuzzer has read the corpus, and at the end.
    coverage: [String; 2],
    /// Number of inputs that libFuzzer keeps: after it has read the corpus, and at the end.
    corpus: [String; 2],
}

impl Summary {
    fn of(log: &str) -> Option<Self> {
        let after = |line: &str, label: &str| {
            let (_, rest) = line.split_once(label)?;
            rest.split(|letter: char| !letter.is_ascii_digit())
                .find(|word| !word.is_empty())
                .map(str::to_owned)
        };
        let of_line = |mark: &str, label: &str| {
            log.lines().rev().find(|line| line.contains(mark)).and_then(|line| after(line, label))
        };
        Some(Self {
            seed: of_line("INFO: Seed", "Seed:")?,
            executions: of_line("stat::number_of_executed_units", "units:")?,
            coverage: [of_line("INITED", "cov:")?, of_line("DONE", "cov:")?],
            corpus: [of_line("INITED", "corp:")?, of_line("DONE", "corp:")?],
        })
    }

    fn row(self, target: &str) -> [String; 5] {
        let change = |[from, to]: [String; 2]| format!("{from} → {to}");
        [target.to_owned(), self.seed, self.executions, change(self.coverage), change(self.corpus)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_file_and_a_corpus() {
        let fuzz = ebpf_build::workspace_root().join("fuzz");
        for target in TARGETS {
            let code = [format!("{target}.rs"), format!("{target}/main.rs")];
            assert!(code.iter().any(|path| fuzz.join("fuzz_targets").join(path).exists()), "{target}");
            assert!(fs::read_dir(fuzz.join("corpus").join(target)).is_ok_and(|mut dir| dir.next().is_some()));
        }
        assert_eq!(fs::read_dir(fuzz.join("fuzz_targets")).map(Iterator::count).ok(), Some(TARGETS.len()));
    }

    #[test]
    fn summary_is_read_from_the_log() {
        let log = "INFO: Seed: 42\n#23\tINITED cov: 316 ft: 362 corp: 19/1450b exec/s: 0 rss: 44Mb\n\
                   #99\tNEW    cov: 320 ft: 380 corp: 20/1500b lim: 4096 exec/s: 0 rss: 44Mb\n\
                   #1048\tDONE   cov: 330 ft: 400 corp: 21/1600b lim: 4096 exec/s: 524 rss: 44Mb\n\
                   stat::number_of_executed_units: 1048\n";
        let row = Summary::of(log).map(|summary| summary.row("parse"));
        assert_eq!(row, Some(["parse", "42", "1048", "316 → 330", "19 → 21"].map(str::to_owned)));
        assert_eq!(Summary::of("INFO: Seed: 42\n"), None);
    }

    #[test]
    fn finding_is_named() {
        let log = "==1== ERROR\nartifact_prefix='/f/'; Test unit written to /f/crash-1\nBase64: AA==\n";
        assert_eq!(reproducer(log), Some("/f/crash-1".into()));
    }
}
