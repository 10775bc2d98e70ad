//! The image of a guest: tests, agent, the programs that they call, libraries, and modules of the kernel.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::guest::TESTS;
use super::kernel::Kernel;
use super::plan::{PLAN, Plan};
use super::tree::Tree;
use super::{create_dir, elf};
use crate::process::{self, cargo, command_line};
use crate::setup;

/// Programs that the tests and the guest run, besides those of [`setup::TOOLS`].
const TOOLS: [&str; 17] = [
    "cat",
    "find",
    "ip6tables",
    "ip6tables-restore",
    "ip6tables-save",
    "ipset",
    "iptables-restore",
    "iptables-save",
    "ipvsadm",
    "modprobe",
    "mount",
    "sh",
    "sleep",
    "ss",
    "sysctl",
    "umount",
    "unshare",
];
/// Files that the programs read, if this machine has them.
const FILES: [&str; 5] =
    ["/etc/protocols", "/etc/services", "/etc/iproute2", "/usr/share/iproute2", "/etc/nsswitch.conf"];
/// Folders with plugins.
const PLUGINS: [&str; 2] =
    ["/usr/lib/x86_64-linux-gnu/xtables", "/usr/lib/x86_64-linux-gnu/gconv/gconv-modules"];
/// Empty folders, as mount points.
const FOLDERS: [&str; 7] = ["/proc", "/sys", "/dev", "/run", "/tmp", "/root", "/var"];

/// A test binary of `lb-tests`.
pub(super) struct TestBinary {
    /// For example `packet`.
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

/// Builds the integration tests.
pub(super) fn build_tests() -> anyhow::Result<Vec<TestBinary>> {
    let mut command = cargo(["test", "--package", "lb-tests", "--no-run", "--message-format=json"]);
    let line = command_line(&command);
    eprintln!("$ {line}");
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{line}`"))?;
    ensure!(output.status.success(), "`{line}` failed: {}", output.status);
    let text = String::from_utf8(output.stdout).context("the output of cargo is not Unicode")?;
    let folder = folder()?;
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

/// The folder of stripped programs.
fn folder() -> anyhow::Result<PathBuf> {
    let folder = super::folder("programs")?;
    create_dir(&folder)?;
    Ok(folder)
}

/// Writes the initramfs.
pub(super) fn write(
    archive: &Path,
    kernel: &Kernel,
    tests: &[TestBinary],
    plan: &Plan,
) -> anyhow::Result<()> {
    let mut tree = Tree::default();
    let mut programs = Programs::default();
    FOLDERS.iter().for_each(|path| tree.folder(path));
    let me = env::current_exe().context("cannot find the path of the xtask binary")?;
    let init = folder()?.join("init");
    elf::strip(&me, &init)?;
    tree.file("/init", &init)?;
    programs.add_libraries(&init)?;
    let mut all: Vec<(&str, PathBuf)> =
        tests.iter().map(|test| (test.name.as_str(), test.path.clone())).collect();
    for (name, built) in [("lb-agent", "release/lb-agent"), ("next-lb-agent", "next-layout/lb-agent")] {
        let path = folder()?.join(name);
        elf::strip(&super::target_dir()?.join(built), &path)?;
        all.push((name, path));
    }
    for (name, path) in &all {
        tree.file(Path::new(TESTS).join(name), path)?;
        programs.add_libraries(path)?;
    }
    add_tools(&mut tree, &mut programs)?;
    for library in &programs.libraries {
        tree.add(library)?;
    }
    // Tests read these files at their path in the workspace.
    tree.copy_below(
        &ebpf_build::workspace_root().join("deploy"),
        &ebpf_build::workspace_root().join("deploy"),
    )?;
    let modules = tree.resolve(&Path::new("/lib/modules").join(&kernel.release))?;
    tree.copy_below(&modules, &kernel.modules)?;
    tree.text(PLAN, serde_json::to_vec(plan)?);
    tree.write(archive)
}

fn add_tools(tree: &mut Tree, programs: &mut Programs) -> anyhow::Result<()> {
    // The kernel runs /sbin/modprobe, and scripts run /bin/sh; both may be links.
    for path in ["/sbin/modprobe", "/bin/sh"] {
        tree.resolve(Path::new(path))?;
    }
    let names: BTreeSet<&str> = setup::TOOLS.iter().map(|(name, _)| *name).chain(TOOLS).collect();
    for name in names {
        let path = process::find(name)
            .with_context(|| format!("the guest needs the program {name}, which is not installed"))?;
        tree.add(&path)?;
        programs.add_libraries(&path)?;
    }
    for path in FILES.iter().chain(&PLUGINS).map(Path::new).filter(|path| path.exists()) {
        tree.add(path)?;
    }
    let plugins = fs::read_dir(PLUGINS[0]).into_iter().flatten().filter_map(io::Result::ok);
    plugins.map(|entry| entry.path()).try_for_each(|plugin| programs.add_libraries(&plugin))
}

/// The shared libraries of all programs.
#[derive(Default)]
struct Programs {
    libraries: BTreeSet<PathBuf>,
}

impl Programs {
    fn add_libraries(&mut self, program: &Path) -> anyhow::Result<()> {
        self.libraries.extend(elf::libraries(program)?);
        Ok(())
    }
}
