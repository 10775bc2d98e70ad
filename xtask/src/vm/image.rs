//! The image of a guest: tests, agents, the programs that they call, libraries, and modules of the kernel.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::binaries::{AGENTS, TestBinary};
use super::folders;
use super::guest::TESTS;
use super::kernel::Kernel;
use super::plan::{PLAN, Plan};
use super::tree::Tree;
use crate::elf;
use crate::process;
use crate::setup;

/// Programs that the tests and the guest run, in addition to those of [`setup::TOOLS`].
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
/// The folder of iptables' plugins, and glibc's list of character set converters.
const PLUGINS: [&str; 2] =
    ["/usr/lib/x86_64-linux-gnu/xtables", "/usr/lib/x86_64-linux-gnu/gconv/gconv-modules"];
/// Empty folders: mount points, and folders that programs expect.
const FOLDERS: [&str; 7] = ["/proc", "/sys", "/dev", "/run", "/tmp", "/root", "/var"];

/// Writes the initial file system of the guest.
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
    let init = folders::programs()?.join("init");
    elf::strip(&me, &init)?;
    tree.file("/init", &init)?;
    programs.add_libraries(&init)?;
    let mut all: Vec<(&str, PathBuf)> =
        tests.iter().map(|test| (test.name.as_str(), test.path.clone())).collect();
    for name in AGENTS {
        all.push((name, folders::programs()?.join(name)));
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
