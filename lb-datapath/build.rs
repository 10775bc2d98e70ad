//! Builds the BPF object and stores it as `OUT_DIR/lb`, from where `aya::include_bytes_aligned!` includes it.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Prints the error instead of returning it from main, where a backtrace would hide the compiler's messages.
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    let arch = env::var("CARGO_CFG_TARGET_ARCH").context("cargo sets CARGO_CFG_TARGET_ARCH")?;

    let mut target_dir = ebpf_build::target_dir(ebpf_build::profile_dir(&out_dir));
    let mut datapath = ebpf_build::DATAPATH;
    if env::var_os("CARGO_FEATURE_NEXT_LAYOUT").is_some() {
        datapath = ebpf_build::NEXT_DATAPATH;
        // Builds in a separate folder, so that builds with and without the feature do not replace each other.
        target_dir.push("next-layout");
    }
    let object = ebpf_build::build(datapath, &target_dir, &arch)?;
    for line in object.warnings.lines() {
        println!("cargo::warning={line}");
    }
    let copy = out_dir.join(ebpf_build::DATAPATH.name);
    fs::copy(&object.path, &copy)
        .with_context(|| format!("copying {} to {}", object.path.display(), copy.display()))?;

    let root = ebpf_build::workspace_root();
    for input in [ebpf_build::DATAPATH.package, "lb-common", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(input).display());
    }
    println!("cargo::rerun-if-changed={}", object.toolchain.linker.display());
    println!("cargo::rerun-if-changed={}", object.toolchain.compiler.rustc.display());
    Ok(())
}
