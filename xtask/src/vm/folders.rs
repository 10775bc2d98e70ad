//! Folders below `target/vm`: for stripped programs, images, and the output of guests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The folder for the output of kernel and tests: `target/vm/RELEASE`.
pub(super) fn folder(release: &str) -> anyhow::Result<PathBuf> {
    let folder = target_dir()?.join("vm").join(release);
    create_dir(&folder)?;
    Ok(folder)
}

/// The folder of stripped programs: `target/vm/programs`.
pub(super) fn programs() -> anyhow::Result<PathBuf> {
    folder("programs")
}

/// Cargo's target folder, two levels above the xtask binary.
pub(super) fn target_dir() -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot find the path of the xtask binary")?;
    me.ancestors().nth(2).map(Path::to_owned).context("xtask is not in a target folder")
}

pub(super) fn create_dir(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
}
