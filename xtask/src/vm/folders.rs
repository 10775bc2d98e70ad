//! Folders below `target/vm`: for stripped programs, images, and the output of guests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::agent::target_dir;

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

pub(super) fn create_dir(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
}
