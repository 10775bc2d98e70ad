//! Finds the compiler, its `core` for BPF, and the linker.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TARGET, workspace_root};

/// The required version of bpf-linker.
pub const LINKER_VERSION: &str = "0.13.0";

/// The major version of bpf-linker's LLVM. The linker reads bitcode of compilers with this LLVM or an older one.
pub const LLVM_VERSION: u32 = 22;

/// A missing part of the BPF toolchain.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    /// No compiler can build for the BPF target.
    #[error(
        "this machine has no Rust compiler for {TARGET}: it must be {minimum} or newer, use LLVM {LLVM_VERSION} or \
         older, and have a prebuilt `core` for the target or the `rust-src` component; looked in {}. \
         Run `cargo xtask setup`, which installs one",
        display_all(.looked_in)
    )]
    Compiler {
        /// The oldest supported compiler.
        minimum: &'static str,
        /// The sysroots that were searched.
        looked_in: Vec<PathBuf>,
    },
    /// No bpf-linker of the right version.
    #[error(
        "bpf-linker {LINKER_VERSION} is missing; looked for it at {} and in PATH. \
         Run `cargo xtask setup`, which installs it",
        .cached.display()
    )]
    Linker {
        /// The path to which `cargo xtask setup` installs bpf-linker.
        cached: PathBuf,
    },
}

/// Compiler and linker of the object.
#[derive(Debug, Clone)]
pub struct Toolchain {
    /// Compiles the programs to LLVM bitcode.
    pub compiler: Compiler,
    /// `bpf-linker`, which converts the bitcode to the BPF object.
    pub linker: PathBuf,
}

impl Toolchain {
    /// Finds the toolchain on this machine.
    ///
    /// # Errors
    ///
    /// The first [`Missing`] part.
    pub fn find() -> Result<Self, Missing> {
        let compiler = find_compiler()?;
        let linker = find_linker()?;
        Ok(Self { compiler, linker })
    }
}

/// A Rust compiler that can build for [`TARGET`].
#[derive(Debug, Clone)]
pub struct Compiler {
    /// The compiler itself, not rustup's proxy.
    pub rustc: PathBuf,
    /// The cargo of the same release; if the sysroot has none, the cargo in use.
    pub cargo: PathBuf,
    /// Whether the `core` library for BPF is compiled already, or is source.
    pub core: CoreLibrary,
    /// The version of the compiler, such as `1.96.0`.
    pub version: String,
}

/// The form in which a sysroot has `core` for [`TARGET`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreLibrary {
    /// The sysroot contains `core` compiled (Debian's `libstd-rust-web-dev-bpf`).
    Prebuilt,
    /// The sysroot contains the source of `core` (rustup's `rust-src`), which cargo compiles.
    Source,
}

impl CoreLibrary {
    fn in_sysroot(sysroot: &Path) -> Option<Self> {
        let rustlib = sysroot.join("lib/rustlib");
        if rustlib.join(TARGET).join("lib").is_dir() {
            return Some(Self::Prebuilt);
        }
        // Checks for the lock file, which `-Z build-std` needs: the folder may exist without the component `rust-src`.
        rustlib.join("src/rust/library/Cargo.lock").is_file().then_some(Self::Source)
    }
}

/// Finds a compiler for BPF: the compiler of the toolchain in use, else of another rustup toolchain, else of the
/// distribution.
///
/// # Errors
///
/// [`Missing::Compiler`] names the sysroots that were searched.
pub fn find_compiler() -> Result<Compiler, Missing> {
    let looked_in = sysroots();
    let found = looked_in.iter().find_map(|sysroot| compiler_in(sysroot));
    found.ok_or(Missing::Compiler { minimum: env!("CARGO_PKG_RUST_VERSION"), looked_in })
}

fn compiler_in(sysroot: &Path) -> Option<Compiler> {
    let core = CoreLibrary::in_sysroot(sysroot)?;
    let rustc = sysroot.join("bin/rustc");
    let output = Command::new(&rustc).arg("-vV").output().ok()?;
    let version = CompilerVersion::parse(&String::from_utf8_lossy(&output.stdout))?;
    if !version.is_usable() {
        return None;
    }
    // `-Z build-std` needs the cargo of the same release; with a prebuilt `core` any cargo works.
    let own_cargo = sysroot.join("bin/cargo");
    let cargo = if own_cargo.is_file() { own_cargo } else { cargo_in_use() };
    Some(Compiler { rustc, cargo, core, version: version.release })
}

fn cargo_in_use() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

fn sysroots() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = sysroot_in_use().into_iter().collect();
    let rustup = env::var_os("RUSTUP_HOME").map(PathBuf::from).or_else(|| Some(home()?.join(".rustup")));
    found.extend(rustup.iter().flat_map(|rustup| subfolders(&rustup.join("toolchains"))));
    found.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut unique = Vec::new();
    for sysroot in found {
        if !unique.contains(&sysroot) {
            unique.push(sysroot);
        }
    }
    unique
}

/// The sysroot of the compiler that builds the workspace.
fn sysroot_in_use() -> Option<PathBuf> {
    // Cargo sets `RUSTC` in build scripts.
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    let sysroot = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(sysroot.trim())).filter(|path| path.is_dir())
}

/// The entries of a folder, sorted by name, so that the choice does not depend on the file system; none if it cannot be
/// read.
fn subfolders(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = dir.read_dir() else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// The values that the output of `rustc -vV` gives for `release` and `LLVM version`.
#[derive(Debug, PartialEq, Eq)]
struct CompilerVersion {
    release: String,
    llvm_major: u32,
}

impl CompilerVersion {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let release = field("release:")?.to_owned();
        let llvm_major = field("LLVM version:")?.split('.').next()?.parse().ok()?;
        Some(Self { release, llvm_major })
    }

    fn is_usable(&self) -> bool {
        let new_enough = major_minor(&self.release) >= major_minor(env!("CARGO_PKG_RUST_VERSION"));
        new_enough && self.llvm_major <= LLVM_VERSION
    }
}

fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Finds bpf-linker: the one that `cargo xtask setup` installed, else one of the same version in `PATH`.
///
/// # Errors
///
/// [`Missing::Linker`] names the path of the cached linker.
pub fn find_linker() -> Result<PathBuf, Missing> {
    let cached = cached_linker_root().join("bin/bpf-linker");
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).map(|dir| dir.join("bpf-linker"));
    let found = [cached.clone()].into_iter().chain(in_path).find(|file| has_linker_version(file));
    found.ok_or(Missing::Linker { cached })
}

fn has_linker_version(linker: &Path) -> bool {
    let Ok(output) = Command::new(linker).arg("--version").output() else { return false };
    let version = String::from_utf8_lossy(&output.stdout);
    version.trim().strip_prefix("bpf-linker ") == Some(LINKER_VERSION)
}

/// The folder into which `cargo xtask setup` installs bpf-linker (`cargo install --root`).
pub fn cached_linker_root() -> PathBuf {
    cache_dir().join(format!("bpf-linker-{LINKER_VERSION}"))
}

/// The folder for downloads and built tools. It is outside the repository, so that clones share it. Only if there is
/// neither `$XDG_CACHE_HOME` nor a home folder, it is in the repository.
pub fn cache_dir() -> PathBuf {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(home()?.join(".cache")));
    let cache = cache.unwrap_or_else(|| workspace_root().join(".cache"));
    cache.join("lb-xtask")
}

fn home() -> Option<PathBuf> {
    env::home_dir().filter(|path| path.is_absolute())
}

fn display_all(paths: &[PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(release: &str, llvm: &str) -> Option<CompilerVersion> {
        CompilerVersion::parse(&format!(
            "rustc {release}\nbinary: rustc\nrelease: {release}\nLLVM version: {llvm}\n"
        ))
    }

    #[test]
    fn compiler_version_is_parsed() {
        let expected = CompilerVersion { release: "1.97.0-nightly".to_owned(), llvm_major: 22 };
        assert_eq!(version("1.97.0-nightly", "22.1.4"), Some(expected));
        assert_eq!(CompilerVersion::parse("rustc 1.96.0"), None);
    }

    #[test]
    fn old_compilers_and_newer_llvm_are_rejected() {
        let usable = |release, llvm| version(release, llvm).is_some_and(|version| version.is_usable());
        assert!(usable("1.95.0", "22.1.2"));
        assert!(usable("2.0.0", "21.0"));
        assert!(!usable("1.94.1", "21.1.0"));
        assert!(!usable("1.99.0-nightly", "23.0.0"));
    }

    #[test]
    fn error_of_a_missing_linker_names_setup() {
        let missing = Missing::Linker { cached: PathBuf::from("/cache/bin/bpf-linker") };
        let text = missing.to_string();
        assert!(text.contains("/cache/bin/bpf-linker") && text.contains("cargo xtask setup"), "{text}");
    }
}
