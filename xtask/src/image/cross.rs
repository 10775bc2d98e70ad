//! Builds an agent for arm64 on a machine with another processor: with Debian's cross compiler and C library for arm64,
//! and Rust's standard library for arm64.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::AGENT;
use crate::process::{cargo, is_installed, run};
use crate::{agent, elf, release, setup};

/// The rustc target of the agent.
const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Cross compiler, its C library, and an emulator that runs the agent once.
const PACKAGES: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user-static"];
const COMPILER: &str = "aarch64-linux-gnu-gcc";
const STRIP: &str = "aarch64-linux-gnu-strip";
const EMULATOR: &str = "qemu-aarch64-static";
/// The folder of Debian's libraries for arm64.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu/lib";
/// Licences of the libraries.
pub(super) const COPYRIGHTS: [&str; 2] =
    ["/usr/share/doc/libc6-arm64-cross/copyright", "/usr/share/doc/libgcc-s1-arm64-cross/copyright"];

/// Writes the agent, without its debug information, to the folder. If `$LB_AGENT` names an agent, takes that agent,
/// else builds one. First installs [`PACKAGES`].
pub(super) fn stripped_agent(folder: &Path) -> anyhow::Result<PathBuf> {
    setup::install_missing(&PACKAGES)?;
    let built = match std::env::var_os("LB_AGENT") {
        Some(agent) => agent.into(),
        None => build()?,
    };
    let stripped = folder.join("lb-agent");
    elf::strip_with(STRIP, &built, &stripped)?;
    Ok(stripped)
}

fn build() -> anyhow::Result<PathBuf> {
    setup::run()?;
    install_standard_library()?;
    let mut command = cargo(["build", "--release", "--package", "lb-agent", "--target", TARGET]);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER);
    run(command)?;
    Ok(agent::target_dir()?.join(TARGET).join("release/lb-agent"))
}

fn install_standard_library() -> anyhow::Result<()> {
    let rustup = |arguments: &[&str]| {
        let mut command = Command::new("rustup");
        command.current_dir(ebpf_build::workspace_root()).args(arguments);
        command
    };
    ensure!(
        is_installed("rustup"),
        "this machine has no rustup, which installs Rust's standard library for {TARGET}: install rustup, or build the \
         image on an arm64 machine by `cargo xtask image`"
    );
    let installed = release::output(rustup(&["target", "list", "--installed"]))?;
    if installed.lines().any(|target| target == TARGET) {
        return Ok(());
    }
    run(rustup(&["target", "add", TARGET]))
}

/// All libraries that the program needs, directly or through other libraries, by their paths in the image. They are in
/// `/lib`, where the loader is and where it searches for libraries.
pub(super) fn libraries(program: &Path) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut missing = needed(program)?;
    while let Some(name) = missing.pop_first() {
        let file = Path::new(LIBRARIES).join(&name);
        ensure!(file.exists(), "{} needs {name}, which is not in {LIBRARIES}", program.display());
        let more = needed(&file)?;
        found.insert(format!("lib/{name}"), file);
        missing.extend(more.into_iter().filter(|name| !found.contains_key(&format!("lib/{name}"))));
    }
    Ok(found)
}

fn needed(program: &Path) -> anyhow::Result<BTreeSet<String>> {
    elf::needed(&fs::read(program).with_context(|| format!("cannot read {}", program.display()))?)
}

/// Runs the agent of an unpacked image with the libraries of the image; returns its output for `--version`.
pub(super) fn version_in(root: &Path) -> anyhow::Result<String> {
    let mut command = Command::new(EMULATOR);
    command.arg("-L").arg(root).arg(root.join(AGENT)).arg("--version");
    release::output(command)
}

#[cfg(test)]
mod tests {
    use object::{Architecture, Object as _};

    use super::super::{Image, System, archive, unpack};
    use super::*;

    /// A program for arm64 that prints what `lb-agent --version` prints; `None` on a machine that cannot build or run
    /// it.
    fn program(folder: &Path) -> Option<PathBuf> {
        let lacks: Vec<_> = [COMPILER, EMULATOR].into_iter().filter(|tool| !is_installed(tool)).collect();
        if !lacks.is_empty() {
            lb_tests::skip::whole(&format!(
                "this machine lacks {}, of the packages {}",
                lacks.join(" and "),
                PACKAGES.join(" ")
            ));
            return None;
        }
        let (source, program) = (folder.join("agent.c"), folder.join("agent"));
        let code = format!(
            "#include <stdio.h>\nint main() {{ puts(\"lb-agent {}\"); }}\n",
            env!("CARGO_PKG_VERSION")
        );
        fs::write(&source, code).unwrap();
        let mut command = Command::new(COMPILER);
        command.arg("-o").arg(&program).arg(&source);
        release::output(command).unwrap();
        Some(program)
    }

    #[test]
    fn image_for_arm64_has_only_files_for_arm64() {
        let folder = tempfile::tempdir().unwrap();
        let Some(program) = program(folder.path()) else { return };
        let image = Image { system: System::Arm64, program, date: 7 }.build().unwrap();
        let files = archive::read(&image).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&files["index.json"].content).unwrap();
        assert_eq!(index["manifests"][0]["platform"]["architecture"], "arm64");
        let root = folder.path().join("root");
        unpack(&image, &root).unwrap();
        for file in [AGENT, "lib/libc.so.6", "lib/ld-linux-aarch64.so.1"] {
            let content = fs::read(root.join(file)).unwrap();
            let machine = object::File::parse(content.as_slice()).unwrap().architecture();
            assert_eq!(machine, Architecture::Aarch64, "{file}");
        }
        release::check_version(&version_in(&root).unwrap()).unwrap();
        fs::remove_file(root.join("lib/libc.so.6")).unwrap();
        version_in(&root).unwrap_err();
    }

    #[test]
    fn program_for_another_processor_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let Some(_) = program(folder.path()) else { return };
        let image = Image { system: System::Arm64, program: "/usr/bin/env".into(), date: 7 };
        let error = image.build().unwrap_err().to_string();
        assert!(error.contains("is for amd64, not for arm64"), "{error}");
    }
}
