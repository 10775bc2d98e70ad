//! Finds the BPF toolchain and builds BPF objects.
//!
//! `cargo xtask build-ebpf` and the build script of lb-agent both call [`build`], so that a plain
//! `cargo build` is complete and one place knows how the object is made.

use std::path::{Path, PathBuf};

mod compile;
mod toolchain;

pub use compile::{BuildError, Object, build};
pub use toolchain::{
    Compiler, CoreLibrary, LINKER_VERSION, LLVM_VERSION, Missing, Toolchain, cache_dir, cached_linker_root,
    find_compiler, find_linker,
};

/// The rustc target of the object: BPF in the byte order of the little-endian hosts we support.
pub const TARGET: &str = "bpfel-unknown-none";

/// A binary of a package that is a BPF object.
#[derive(Debug, Clone, Copy)]
pub struct Binary {
    /// The package, and its folder in the workspace.
    pub package: &'static str,
    /// The binary.
    pub name: &'static str,
    /// Features of the package that are switched on.
    pub features: &'static [&'static str],
}

/// The data plane: the object that the agent ships.
pub const DATAPATH: Binary = Binary { package: "lb-ebpf", name: "lb", features: &[] };
/// The same with another layout of the maps, for tests of upgrades.
pub const NEXT_DATAPATH: Binary = Binary { features: &["next-layout"], ..DATAPATH };
/// What the packet benchmark compares with.
pub const FLOORS: Binary = Binary { package: "lb-ebpf-bench", name: "floors", features: &[] };
/// What gives the packet benchmark fresh packets.
pub const RESTORE: Binary = Binary { package: "lb-ebpf-bench", name: "restore", features: &[] };

/// The root of this workspace, as it was when this crate was compiled.
pub fn workspace_root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// The target folder for the inner cargo, beside the outer cargo's profile folder (`target/debug`).
///
/// It has to be a folder of its own, because the outer cargo holds the lock of the other while a build
/// script runs. All profiles and `cargo xtask` share it, so the object is compiled once.
pub fn target_dir(profile_dir: &Path) -> PathBuf {
    profile_dir.parent().unwrap_or(profile_dir).join("ebpf")
}

/// The profile folder (`target/debug`) that a build script's `OUT_DIR` (`target/debug/build/NAME-HASH/out`)
/// belongs to; `OUT_DIR` itself when it has another shape.
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
    fn an_out_dir_of_another_shape_is_used_itself() {
        assert_eq!(profile_dir(Path::new("/tmp/out")), Path::new("/tmp/out"));
    }

    #[test]
    fn the_workspace_root_holds_the_bpf_package() {
        assert!(workspace_root().join(DATAPATH.package).join("Cargo.toml").is_file());
    }
}
