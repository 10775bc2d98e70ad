//! Functions that build both the package and the image of the agent.

use std::env;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};

use crate::agent::target_dir;
use crate::elf;
use crate::process::command_line;

/// Creates an empty folder for the files of a result: `target/NAME`. Removes the folder of an earlier run.
pub(crate) fn empty_folder(name: &str) -> anyhow::Result<PathBuf> {
    let folder = target_dir()?.join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

/// Writes the agent, without its debug information (most of its size), to the folder; returns the path.
pub(crate) fn stripped(agent: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let stripped = folder.join("lb-agent");
    elf::strip(agent, &stripped)?;
    Ok(stripped)
}

/// The timestamp of all files in a package or image, in seconds since 1970, so that builds of one commit are equal:
/// `$SOURCE_DATE_EPOCH`, else the time of the commit.
pub(crate) fn source_date() -> anyhow::Result<u64> {
    let text = match env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => {
            let mut git = Command::new("git");
            git.current_dir(ebpf_build::workspace_root()).args(["log", "-1", "--format=%ct"]);
            output(git).context("without a git repository, set SOURCE_DATE_EPOCH")?
        }
    };
    text.trim().parse().with_context(|| format!("{text:?} are no seconds since 1970"))
}

/// The output of a command that succeeds.
pub(crate) fn output(mut command: Command) -> anyhow::Result<String> {
    let line = command_line(&command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    let reason = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{line}` failed: {reason}");
    Ok(String::from_utf8(output.stdout)?)
}

/// The SHA-256 digest of `content` in hexadecimal digits.
pub(crate) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compresses `content` with gzip, without a timestamp.
pub(crate) fn gzip(content: &[u8], level: Compression) -> anyhow::Result<Vec<u8>> {
    let mut encoder = GzBuilder::new().mtime(0).write(Vec::new(), level);
    encoder.write_all(content)?;
    Ok(encoder.finish()?)
}

/// Fails if `answer` is not the right output of `lb-agent --version` for this workspace.
pub(crate) fn check_version(answer: &str) -> anyhow::Result<()> {
    let expected = concat!("lb-agent ", env!("CARGO_PKG_VERSION"));
    ensure!(answer.trim() == expected, "the agent in the result answers {answer:?} instead of {expected:?}");
    Ok(())
}

/// Prints path, size and digest of a result.
pub(crate) fn print_result(path: &Path) -> anyhow::Result<()> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    println!("{}\n{} bytes\nsha256 {}", path.display(), content.len(), sha256(&content));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_that_of_the_standard() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
