//! Skips: a test that cannot run on this kernel reports its name and the reason instead of passing silently.

use std::{fs::OpenOptions, io::Write as _};

/// Reports that the calling test cannot run on this machine.
pub fn whole(reason: &str) {
    note(&format!("WHOLE {reason}"), reason);
}

/// Reports that a part of the calling test cannot run on this machine.
pub fn part(reason: &str) {
    note(reason, reason);
}

/// Prints the skip and appends it to the file in which `cargo xtask vm` counts skips.
fn note(line: &str, reason: &str) {
    eprintln!("SKIPPED: {reason}");
    let Some(path) = std::env::var_os("LB_TEST_SKIPS") else { return };
    let file = OpenOptions::new().append(true).create(true).open(&path);
    let written = file.and_then(|mut file| writeln!(file, "{line}"));
    // An unrecorded skip would look like a pass.
    assert!(written.is_ok(), "cannot write to {}: {written:?}", path.display());
}
