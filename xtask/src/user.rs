//! The user that runs xtask.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

/// Whether the effective user, who owns `/proc/self`, is root.
pub(crate) fn is_root() -> anyhow::Result<bool> {
    Ok(fs::metadata("/proc/self")?.uid() == 0)
}
