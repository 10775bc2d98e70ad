//! Finds the BPF toolchain and builds BPF objects.
//!
//! `cargo xtask build-ebpf` and build scripts both call [`build`], so a plain `cargo build` is complete and the build
//! is defined in one place.

use std::path::{Path, PathBuf};

mod compile;
mod toolchain;

pub use compile::{BuildError, Object, build};
pub use toolchain::{
    Compiler, CoreLibrary, LINKER_VERSION, LLVM_VERSION, Missing, Toolchain, cache_dir, cached_linker_root,
    find_compiler, find_linker,
};

/// The rustc target of the objects: little-endian BPF, because all supported hosts are little-endian.
pub const TARGET: &str = "bpfel-unknown-none";

/// A binary of a package that is built as a BPF object.
#[derive(Debug, Clone, Copy)]
pub struct Binary {
    /// The package, and its folder in the workspace.
    pub package: &'static str,
    /// The name of the binary target.
    pub name: &'static str,
    /// Enabled features of the package.
    pub features: &'static [&'static str],
}

/// The data plane: the object that the agent ships.
pub const DATAPATH: Binary = Binary { package: "lb-ebpf", name: "lb", features: &[] };
/// The data plane with another map layout, for tests of upgrades.
pub const NEXT_DATAPATH: Binary = Binary { features: &["next-layout"], ..DATAPATH };
/// The minimal baseline programs of the packet benchmark.
pub const BASELINES: Binary = Binary { package: "lb-ebpf-bench", name: "baselines", features: &[] };
/// The packet benchmark's program that restores the packet before it calls the measured program.
pub const RESTORE: Binary = Binary { package: "lb-ebpf-bench", name: "restore", features: &[] };

/// The root of this workspace when this crate was compiled.
pub fn workspace_root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// The target folder of the inner cargo, next to the outer cargo's profile folder (`target/debug`).
///
/// The folder is separate because the outer cargo holds the lock of its own folder while a build script runs. All
/// profiles and `cargo xtask` share the folder of the inner cargo, so the object is compiled once.
pub fn target_dir(profile_dir: &Path) -> PathBuf {
    profile_dir.parent().unwrap_or(profile_dir).join("ebpf")
}

/// The profile folder (`target/debug`) of a build script's `OUT_DIR` (`target/debug/build/NAME-HASH/out`); `OUT_DIR`
/// itself if it has another form.
pub fn profile_dir(out_dir: &Path) -> &Path {
    out_dir.ancestors().find(|dir| dir.ends_with("build")).and_then(Path::parent).unwrap_or(out_dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_shares_one_target_dir() {
        for out_dir in [
            "/build/target/debug/build/lb-agent-0123/out",
            "/build/target/release/build/lb-agent-0123/out",
            "/build/target/release/build/lb-agent/0123/out",
        ] {
            assert_eq!(
                target_dir(profile_dir(Path::new(out_dir))),
                Path::new("/build/target/ebpf"),
                "{out_dir}"
            );
        }
    }

    #[test]
    fn out_dir_of_another_form_is_used_itself() {
        assert_eq!(profile_dir(Path::new("/tmp/out")), Path::new("/tmp/out"));
    }

    #[test]
    fn workspace_root_has_the_bpf_package() {
        assert!(workspace_root().join(DATAPATH.package).join("Cargo.toml").is_file());
    }
}
