//! The test binaries of `lb-tests`, and the agents that they run.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::folders;
use crate::agent::{Profile, build_debug_agents, target_dir};
use crate::elf;
use crate::process::{cargo, command_line};

/// The names of the agents in the guest.
pub(super) const AGENTS: [&str; 2] = ["lb-agent", "next-lb-agent"];

/// A test binary of `lb-tests`.
pub(super) struct TestBinary {
    /// The name of the test program, for example `packet`.
    pub(super) name: String,
    /// The binary without debugging information.
    pub(super) path: PathBuf,
}

/// A line of `cargo test --message-format=json`.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    target: Option<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Builds the two [`AGENTS`] and strips them. An agent that is `given` takes the place of the first one.
pub(super) fn build_agents(given: Option<&Path>) -> anyhow::Result<()> {
    let programs = folders::programs()?;
    let [agent, next_agent] = AGENTS.map(|name| programs.join(name));
    build_debug_agents()?;
    elf::strip(&target_dir()?.join("next-layout/lb-agent"), &next_agent)?;
    match given {
        Some(given) => elf::strip(given, &agent),
        None => {
            Profile::Release.build()?;
            elf::strip(&Profile::Release.path()?, &agent)
        }
    }
}

/// Builds the integration tests, and strips them.
pub(super) fn build_tests() -> anyhow::Result<Vec<TestBinary>> {
    let mut command = cargo(["test", "--package", "lb-tests", "--no-run", "--message-format=json"]);
    let line = command_line(&command);
    eprintln!("$ {line}");
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{line}`"))?;
    ensure!(output.status.success(), "`{line}` failed: {}", output.status);
    let text = String::from_utf8(output.stdout).context("the output of cargo is not Unicode")?;
    let folder = folders::programs()?;
    let mut tests = Vec::new();
    for message in text.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok()) {
        let (Some(executable), Some(target)) = (message.executable, message.target) else { continue };
        if target.kind == ["test"] {
            let path = folder.join(&target.name);
            elf::strip(&executable, &path)?;
            tests.push(TestBinary { name: target.name, path });
        }
    }
    ensure!(!tests.is_empty(), "`{line}` built no test");
    Ok(tests)
}
