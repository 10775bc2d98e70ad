//! Tests that cannot run on this kernel say so by name and reason, and never silently pass.

use std::{fs::OpenOptions, io::Write as _};

/// The calling test does not run here at all, for this reason.
pub fn whole(reason: &str) {
    note(&format!("WHOLE {reason}"), reason);
}

/// A part of the calling test does not run here, for this reason.
pub fn part(reason: &str) {
    note(reason, reason);
}

/// Prints it, and writes it to where `cargo xtask vm` counts it.
fn note(line: &str, reason: &str) {
    eprintln!("SKIPPED: {reason}");
    let Some(path) = std::env::var_os("LB_TEST_SKIPS") else { return };
    let file = OpenOptions::new().append(true).create(true).open(&path);
    let written = file.and_then(|mut file| writeln!(file, "{line}"));
    // Else a skip would look like a pass.
    assert!(written.is_ok(), "cannot write to {}: {written:?}", path.display());
}
