//! `cargo xtask test`: all tests that this machine can run.

use std::path::Path;

use anyhow::ensure;

use crate::agent::{Profile, build_debug_agents, given, with_agent};
use crate::busy::beside_busy_loops;
use crate::fuzz;
use crate::process::{cargo, run as run_command};
use crate::setup;
use crate::stages::Stages;
use crate::user::is_root;
use crate::vm;

/// Arguments of `test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also run the short list of tests on older kernels, as `cargo xtask vm --share` does
    #[arg(long)]
    vm: bool,
    /// Build the agent in release mode, as for benchmarks and packages, for the tests that need root; by default they
    /// run a debug build
    #[arg(long)]
    release: bool,
    /// Run the kernel tests twice beside one busy loop for each CPU, as on an overloaded machine
    #[arg(long)]
    busy: bool,
}

/// Runs all stages. After a failure, skips the stages that depend on the failed one.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut stages = Stages::default();
    if stages.run("setup", setup::run) {
        stages.run("unit tests", unit_tests);
        stages.run("fuzz targets", || fuzz::run(&fuzz::Args::of_ci()));
        let profile = if args.release { Profile::Release } else { Profile::Debug };
        if stages.run("agents", || build_agents(profile)) {
            let agent = given().map_or_else(|| profile.path(), Ok)?;
            let tests = || kernel_tests(&agent);
            if args.busy {
                stages.run("kernel tests beside busy loops", || beside_busy_loops(tests));
                stages.run("kernel tests beside busy loops, again", || beside_busy_loops(tests));
            } else {
                stages.run("kernel tests", tests);
            }
            if args.vm {
                stages.run("older kernels", || vm::run(&vm::Args::of_ci(agent.clone())));
            }
        }
    }
    stages.finish()
}

/// Runs the tests that need no root, and those of the second map layout.
fn unit_tests() -> anyhow::Result<()> {
    run_command(cargo(["test", "--no-fail-fast"]))?;
    run_command(cargo(["test", "--package", "lb-common", "--features", "next-layout", "--lib", "layout"]))
}

/// Builds the agents that the kernel tests run, but no release build if `$LB_AGENT` names the agent to test.
fn build_agents(profile: Profile) -> anyhow::Result<()> {
    build_debug_agents()?;
    match profile {
        Profile::Release if given().is_none() => profile.build(),
        Profile::Release | Profile::Debug => Ok(()),
    }
}

/// Runs the tests that need root, with this agent. Each has namespaces, pins and maps of its own; they run three at a
/// time, because most of their time is waiting.
fn kernel_tests(agent: &Path) -> anyhow::Result<()> {
    ensure!(
        is_root()?,
        "the kernel tests create network namespaces and load BPF programs: run `cargo xtask test` as root"
    );
    let mut command = cargo(["test", "--package", "lb-tests", "--no-fail-fast", "--", "--test-threads=3"]);
    with_agent(&mut command, agent);
    run_command(command)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// The features of each package that is not of this workspace, in the builds that `cargo tree` shows. (A package
    /// has several sets of features if build scripts use other features than the programs.)
    fn features(arguments: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
        let mut command = cargo(["tree", "--locked", "--prefix=none", "--format={p}|{f}"]);
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let mut features = BTreeMap::<String, BTreeSet<String>>::new();
        for line in text.lines() {
            let Some((package, of_package)) = line.trim_end_matches(" (*)").split_once('|') else { continue };
            let is_of_workspace = package.contains(" (/");
            if !is_of_workspace {
                features.entry(package.to_owned()).or_default().insert(of_package.to_owned());
            }
        }
        features
    }

    /// If two stages built a dependency with different features, the later stage would compile it again, and all
    /// packages that depend on it.
    #[test]
    fn stages_share_builds_of_dependencies() {
        let [with_tests, without] = ["--edges=normal,build,dev", "--edges=normal,build"];
        let (tests, kernel_tests) = (vec![with_tests], vec!["--package=lb-tests", with_tests]);
        let (fuzz, agent) = (vec!["--package=lb-fuzz", without], vec!["--package=lb-agent", without]);
        for (first, second) in [(tests, kernel_tests), (fuzz, agent)] {
            let (built, needed) = (features(&first), features(&second));
            assert!(!needed.is_empty(), "{second:?}");
            for (package, needed) in needed {
                let built = built.get(&package);
                assert!(
                    built.is_none_or(|built| needed.is_subset(built)),
                    "{package}: {first:?} builds {built:?}, {second:?} needs {needed:?}"
                );
            }
        }
    }
}
