//! Runs a second, "inner" cargo that compiles and links the BPF object. The "outer" cargo is the one that builds the
//! workspace and runs this code in a build script or in xtask.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::toolchain::{CoreLibrary, Missing, Toolchain};
use crate::{Binary, TARGET, workspace_root};

/// Why a BPF object could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The toolchain is incomplete.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// Cargo could not be started.
    #[error("cannot run {} to build the BPF object", .cargo.display())]
    Start {
        /// The path of cargo.
        cargo: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The programs do not compile or link.
    #[error("the BPF programs do not build:\n{messages}")]
    Compile {
        /// Output of cargo, compiler and linker.
        messages: String,
    },
}

/// A built BPF object.
#[derive(Debug)]
pub struct Object {
    /// The path of the ELF file.
    pub path: PathBuf,
    /// The toolchain that built the object.
    pub toolchain: Toolchain,
    /// The warnings of cargo, compiler and linker; empty if there were none.
    pub warnings: String,
}

/// Builds the BPF object `binary` for hosts of `arch` (`x86_64`, `aarch64`: the layout of the kernel's register
/// structures depends on it) in the folder `target_dir`. Fast if nothing has changed.
///
/// # Errors
///
/// A part of the toolchain is missing, cargo cannot be started, or the programs do not compile or link.
pub fn build(binary: Binary, target_dir: &Path, arch: &str) -> Result<Object, BuildError> {
    let toolchain = Toolchain::find()?;
    let mut command = cargo(&toolchain, binary, target_dir, arch);
    let Output { status, stderr, .. } = command
        .output()
        .map_err(|source| BuildError::Start { cargo: toolchain.compiler.cargo.clone(), source })?;
    let messages = String::from_utf8_lossy(&stderr).into_owned();
    if !status.success() {
        return Err(BuildError::Compile { messages });
    }
    let path = target_dir.join(TARGET).join("release").join(binary.name);
    Ok(Object { path, toolchain, warnings: messages })
}

fn cargo(toolchain: &Toolchain, binary: Binary, target_dir: &Path, arch: &str) -> Command {
    let compiler = &toolchain.compiler;
    let mut command = Command::new(&compiler.cargo);
    command.current_dir(workspace_root()).args(["build", "--quiet", "--release", "--target", TARGET]);
    command.args(["--package", binary.package, "--bin", binary.name]).arg("--target-dir").arg(target_dir);
    if !binary.features.is_empty() {
        command.arg("--features").arg(binary.features.join(","));
    }
    match compiler.core {
        CoreLibrary::Prebuilt => {}
        CoreLibrary::Source => {
            command.args(["-Z", "build-std=core"]);
        }
    }
    for (name, _) in std::env::vars_os().filter(|(name, _)| belongs_to_outer_cargo(name)) {
        command.env_remove(name);
    }
    // The BPF target and its inline assembly are not stable yet.
    command.env("RUSTC", &compiler.rustc).env("RUSTC_BOOTSTRAP", "1");
    // An empty value overrides a wrapper in the user's cargo configuration.
    command.env("RUSTC_WRAPPER", "").env("RUSTC_WORKSPACE_WRAPPER", "");
    command.env("CARGO_ENCODED_RUSTFLAGS", rustflags(&toolchain.linker, arch));
    command
}

/// The flags, in the encoding of `CARGO_ENCODED_RUSTFLAGS`.
fn rustflags(linker: &Path, arch: &str) -> OsString {
    let mut linker_flag = OsString::from("-Clinker=");
    linker_flag.push(linker);
    let arch_flag = OsString::from(format!("--cfg=bpf_target_arch=\"{arch}\""));
    let mut flags = vec![linker_flag, arch_flag];
    flags.extend(CODEGEN_FLAGS.map(OsString::from));
    flags.join(&OsString::from("\x1f"))
}

// These flags do not include `--cpu-features=+allows-misaligned-mem-access`. It would permit unaligned access to
// packets and map values, which the verifier accepts, but also to the stack: the verifier rejects the resulting code
// for locals with an alignment below their size ("misaligned stack access").
const CODEGEN_FLAGS: [&str; 4] = [
    // The linker generates BTF from the debug information.
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    // 32-bit registers and jumps, supported by every kernel since 5.1; rustc passes the value to the linker as `--cpu`.
    "-Ctarget-cpu=v3",
    // By default bpf-linker makes LLVM expand a memcpy to pairs of a load and a store, which some JITs recognise. If
    // LLVM may choose another order, the programs have 3 % fewer instructions.
    "-Clink-arg=--disable-expand-memcpy-in-order",
];

/// Whether to hide the variable from the inner cargo: it is one of the outer cargo's own, or sets compiler, wrappers,
/// flags, profiles or target. Package sources and the job limit are shared.
fn belongs_to_outer_cargo(name: &OsString) -> bool {
    const SHARED: [&str; 7] = [
        "CARGO_HOME",
        "CARGO_MAKEFLAGS",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTRIES_",
        "CARGO_REGISTRY_",
        "CARGO_SOURCE_",
    ];
    let name = name.to_string_lossy();
    if SHARED.iter().any(|shared| name.starts_with(shared)) {
        return false;
    }
    ["CARGO", "RUSTC", "RUSTDOC", "RUSTFLAGS", "CLIPPY"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_cargo_does_not_see_settings_of_the_outer() {
        for name in [
            "CARGO",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_BUILD_TARGET",
            "CARGO_PROFILE_RELEASE_STRIP",
            "CARGO_TARGET_DIR",
            "RUSTC",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTFLAGS",
            "CLIPPY_ARGS",
        ] {
            assert!(belongs_to_outer_cargo(&OsString::from(name)), "{name}");
        }
        for name in
            ["CARGO_HOME", "CARGO_MAKEFLAGS", "CARGO_NET_OFFLINE", "CARGO_HTTP_CAINFO", "RUSTUP_HOME", "PATH"]
        {
            assert!(!belongs_to_outer_cargo(&OsString::from(name)), "{name}");
        }
    }

    #[test]
    fn flags_are_encoded_for_cargo() {
        let flags = rustflags(Path::new("/with a space/bpf-linker"), "aarch64");
        let flags: Vec<&str> = flags.to_str().into_iter().flat_map(|flags| flags.split('\x1f')).collect();
        assert_eq!(flags[0], "-Clinker=/with a space/bpf-linker");
        assert_eq!(flags[1], "--cfg=bpf_target_arch=\"aarch64\"");
        assert!(flags.contains(&"-Clink-arg=--btf"));
    }
}
