//! `cargo xtask bench compare REV`: the packet benchmark of this tree and of another revision in one run.
//!
//! The other revision builds its BPF object itself, with its own `cargo xtask`, in a git worktree below
//! `target/compare`. xtask then removes the worktree, and keeps the object in `target/compare` under the name of its
//! commit.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use ebpf_build::{DATAPATH, TARGET, workspace_root};

use crate::process::{command_line, describes_package, remove_variables, run};

/// Number of digits of a commit's hash in file names and tables.
const DIGITS: usize = 12;

/// Builds the object of a revision; returns the arguments for the packet benchmark.
pub(crate) fn prepare(args: &[OsString]) -> anyhow::Result<Vec<OsString>> {
    let (revision, options) = args
        .split_first()
        .filter(|(revision, _)| !revision.to_string_lossy().starts_with('-'))
        .context("name a revision: `cargo xtask bench compare REV [options of bench packets]`")?;
    let name = revision.to_string_lossy().into_owned();
    let commit = commit(revision)?;
    let object = object(&name, &commit)?;
    let mut arguments: Vec<OsString> = vec!["--against".into(), object.into()];
    arguments.extend(["--against-name".into(), OsString::from(&commit[..DIGITS])]);
    arguments.extend(options.iter().cloned());
    Ok(arguments)
}

/// The full hash of a revision's commit.
fn commit(revision: &OsStr) -> anyhow::Result<String> {
    let mut wanted = revision.to_owned();
    wanted.push("^{commit}");
    let output = git(["rev-parse", "--verify", "--quiet"].map(OsStr::new)).arg(wanted).output()?;
    let hash = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let is_hash = hash.len() > DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    ensure!(output.status.success() && is_hash, "git knows no commit {}", revision.display());
    Ok(hash)
}

/// The BPF object of a commit, built unless an earlier comparison has kept it.
fn object(revision: &str, commit: &str) -> anyhow::Result<PathBuf> {
    let folder = target()?.join("compare");
    let kept = folder.join(format!("{}.o", &commit[..DIGITS]));
    if kept.is_file() {
        return Ok(kept);
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let tree = Tree::create(folder.join(format!("{}-{}", &commit[..DIGITS], std::process::id())), commit)?;
    tree.build().with_context(|| {
        format!("{revision} cannot be compared: it does not build its BPF object by `cargo xtask build-ebpf`")
    })?;
    let built = tree.target().join("ebpf").join(TARGET).join("release").join(DATAPATH.name);
    fs::copy(&built, &kept).with_context(|| {
        format!(
            "{revision} cannot be compared: its `cargo xtask build-ebpf` leaves no object at {}",
            built.display()
        )
    })?;
    Ok(kept)
}

/// A git worktree, which is removed when this value is dropped.
struct Tree {
    path: PathBuf,
}

impl Tree {
    fn create(path: PathBuf, commit: &str) -> anyhow::Result<Self> {
        let mut add = git(["worktree", "add", "--quiet", "--detach"].map(OsStr::new));
        add.args([path.as_os_str(), OsStr::new(commit)]);
        run(add)?;
        Ok(Self { path })
    }

    fn target(&self) -> PathBuf {
        self.path.join("target")
    }

    fn build(&self) -> anyhow::Result<()> {
        // The revision's own toolchain file and cargo configuration apply, not the environment of this cargo.
        let mut build = Command::new("cargo");
        build.current_dir(&self.path).args(["xtask", "build-ebpf"]);
        remove_variables(&mut build, belongs_to_this_cargo);
        build.env("CARGO_TARGET_DIR", self.target());
        run(build)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let mut remove = git(["worktree", "remove", "--force"].map(OsStr::new));
        remove.arg(&self.path);
        let line = command_line(&remove);
        let removed = remove.status().is_ok_and(|status| status.success());
        if !removed {
            eprintln!("`{line}` failed: remove {} yourself", self.path.display());
        }
    }
}

/// Whether the variable comes from the cargo that runs xtask.
fn belongs_to_this_cargo(name: &str) -> bool {
    name == "CARGO" || name == "RUSTUP_TOOLCHAIN" || describes_package(name)
}

/// The target folder of this xtask.
fn target() -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot find the path of the xtask binary")?;
    let target = me.parent().and_then(Path::parent).context("xtask is not in a target folder")?;
    Ok(target.to_owned())
}

fn git<'a>(args: impl IntoIterator<Item = &'a OsStr>) -> Command {
    let mut command = Command::new("git");
    command.current_dir(workspace_root()).args(args);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_revision_is_rejected() {
        let error = prepare(&["no-such-revision".into()]).map_err(|error| error.to_string());
        assert_eq!(error, Err("git knows no commit no-such-revision".to_owned()));
    }

    #[test]
    fn option_in_place_of_a_revision_is_rejected() {
        for args in [&[][..], &["--rounds".into()][..]] {
            let error = prepare(args).map_err(|error| error.to_string());
            assert!(error.is_err_and(|error| error.starts_with("name a revision")), "{args:?}");
        }
    }
}
