//! Programs and their shared libraries.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use object::{Architecture, Object as _, ObjectSection as _};

/// The name that Debian and Go give a processor.
pub(crate) fn processor_name(architecture: Architecture) -> anyhow::Result<&'static str> {
    const NAMES: [(Architecture, &str); 2] =
        [(Architecture::X86_64, "amd64"), (Architecture::Aarch64, "arm64")];
    let name = NAMES.iter().find(|(known, _)| *known == architecture);
    Ok(name.with_context(|| format!("no name of {architecture:?} is known: add it to elf.rs"))?.1)
}

/// The strings for the dynamic linker (`.dynstr`) in a program or library: the names of needed libraries, and of the
/// symbols that it imports and exports.
pub(crate) fn names(program: &[u8]) -> anyhow::Result<Vec<&str>> {
    let file = object::File::parse(program).context("the program is not an ELF file")?;
    let strings = file.section_by_name(".dynstr").context("the program is linked statically")?.data()?;
    Ok(strings.split(|&byte| byte == 0).filter_map(|name| str::from_utf8(name).ok()).collect())
}

/// The names of the shared libraries that a program, or a library, needs, such as `libc.so.6`. For a library, the
/// result also contains the library's own name.
pub(crate) fn needed(program: &[u8]) -> anyhow::Result<BTreeSet<String>> {
    Ok(names(program)?.into_iter().filter(|name| name.contains(".so.")).map(str::to_owned).collect())
}

/// The shared libraries of a program, and the loader, at the paths that the loader uses. A static program has none.
pub(crate) fn libraries(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(!text.contains("not found"), "{} lacks libraries:\n{text}", program.display());
    Ok(parse(&text))
}

/// Parses `libc.so.6 => /lib/libc.so.6 (0x7f…)` or `/lib64/ld-linux-x86-64.so.2 (0x7f…)`.
fn parse(text: &str) -> Vec<PathBuf> {
    text.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(|path| path.trim_end_matches(':').into())
        .collect()
}

/// Copies a program of this machine, except for its debugging information: that is the largest part of a test binary.
pub(crate) fn strip(program: &Path, to: &Path) -> anyhow::Result<()> {
    strip_with("strip", program, to)
}

/// Like [`strip`], with `tool`: the `strip` for the program's processor.
pub(crate) fn strip_with(tool: &str, program: &Path, to: &Path) -> anyhow::Result<()> {
    let mut command = Command::new(tool);
    command.arg("--strip-debug").arg("-o").arg(to).arg(program);
    let output = command
        .output()
        .with_context(|| format!("cannot start {tool}, which comes with the linker (binutils)"))?;
    let reason = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot strip {}: {reason}", program.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_from_the_output_of_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse(text), expected);
        assert_eq!(parse("\tstatically linked\n"), Vec::<PathBuf>::new());
    }
}
