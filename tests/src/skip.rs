//! Reports tests that cannot run on this kernel, with the reason, so that they do not pass silently.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    thread,
};

/// Reports that the calling test cannot run at all on this machine.
pub fn whole(reason: &str) {
    note(&format!("WHOLE {reason}"), reason);
}

/// Reports that part of the calling test cannot run on this machine.
pub fn part(reason: &str) {
    note(reason, reason);
}

/// Whether this kernel is older than Linux `major.minor`.
pub fn is_older_than(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("/proc is mounted");
    let version: Vec<u32> = release.split('.').map_while(|part| part.parse().ok()).take(2).collect();
    version.as_slice() < &[major, minor]
}

/// Prints that a test was skipped. If `$LB_TEST_SKIPS` names a file, appends the test's name and `line` to that file,
/// in which `cargo xtask vm` counts skips.
fn note(line: &str, reason: &str) {
    eprintln!("SKIPPED: {reason}");
    let Some(path) = std::env::var_os("LB_TEST_SKIPS") else { return };
    let thread = thread::current();
    // libtest runs each test in a thread that has the test's name.
    let test = thread.name().expect("a test's own thread skips it");
    let file = OpenOptions::new().append(true).create(true).open(&path);
    let written = file.and_then(|mut file| writeln!(file, "{test}\t{line}"));
    // A skip that was not recorded would look like a pass.
    assert!(written.is_ok(), "cannot write to {}: {written:?}", path.display());
}
