//! `cargo xtask setup`: installs missing packages and programs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use lb_tests::browser::AXE;

use crate::process;
use crate::user::is_root;

/// Debian's compiler, with `core` for BPF.
const COMPILER_PACKAGES: [&str; 2] = ["rustc-web", "libstd-rust-web-dev-bpf"];
/// Packages needed to build bpf-linker.
const LINKER_PACKAGES: [&str; 4] = ["llvm-22-dev", "libpolly-22-dev", "libzstd-dev", "g++"];
/// The folder into which the package `llvm-22-dev` installs LLVM.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";
/// Programs that the tests and the demo run, with their packages.
pub(crate) const TOOLS: [(&str, &str); 24] = [
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("ping", "iputils-ping"),
    ("arping", "iputils-arping"),
    ("ndisc6", "ndisc6"),
    ("tcpdump", "tcpdump"),
    ("bpftool", "bpftool"),
    ("nsenter", "util-linux"),
    ("tmux", "tmux"),
    ("curl", "curl"),
    ("bird", "bird2"),
    ("birdc", "bird2"),
    ("vtysh", "frr"),
    ("dig", "bind9-dnsutils"),
    ("dnsperf", "dnsperf"),
    ("musl-gcc", "musl-tools"),
    ("chromium", "chromium"),
    ("chromedriver", "chromium-driver"),
    ("npm", "npm"),
    ("nginx", "nginx-light"),
    ("haproxy", "haproxy"),
    ("busybox", "busybox"),
];
/// The program that `docs/first-hour.py` runs in addition to [`TOOLS`], with its package.
const PYTHON: (&str, &str) = ("python3", "python3");
/// Digest of the npm package [`AXE`].
const AXE_SHA256: &str = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745";
/// Further programs that `cargo xtask vm` runs, with their packages.
pub(crate) const VM_TOOLS: [(&str, &str); 8] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("depmod", "kmod"),
    ("modprobe", "kmod"),
    ("strip", "binutils"),
    ("ss", "iproute2"),
    ("sysctl", "procps"),
    ("ipset", "ipset"),
    ("ipvsadm", "ipvsadm"),
];

/// Installs the packages of missing programs.
pub(crate) fn install(programs: &[(&str, &'static str)]) -> anyhow::Result<()> {
    let packages: BTreeSet<&str> = missing_programs(programs).collect();
    if packages.is_empty() { Ok(()) } else { install_packages(&Vec::from_iter(packages)) }
}

/// Installs those of the packages that are missing.
pub(crate) fn install_missing(packages: &[&'static str]) -> anyhow::Result<()> {
    let missing: Vec<&str> =
        packages.iter().copied().filter(|package| !is_package_installed(package)).collect();
    if missing.is_empty() { Ok(()) } else { install_packages(&missing) }
}

/// Installs missing packages, bpf-linker and axe-core, and prints what it has installed.
pub(crate) fn run() -> anyhow::Result<()> {
    let packages = missing_packages();
    if !packages.is_empty() {
        install_packages(&packages)?;
    }
    // Searches for the linker again: an existing linker may have failed to start for lack of a library that has just
    // been installed.
    let build_linker = ebpf_build::find_linker().is_err();
    if build_linker {
        install_linker()?;
    }
    let fetch_axe = !ebpf_build::cache_dir().join(AXE).is_dir();
    let axe = if fetch_axe { install_axe() } else { Ok(()) };
    let toolchain = ebpf_build::Toolchain::find().context("the BPF toolchain is still incomplete")?;

    let compiler = &toolchain.compiler;
    eprintln!("setup: BPF compiler: {} {}", compiler.rustc.display(), compiler.version);
    eprintln!("setup: BPF linker: {}", toolchain.linker.display());
    match axe {
        Ok(()) if fetch_axe => eprintln!("setup: downloaded {AXE}"),
        Ok(()) => {}
        Err(error) => {
            eprintln!(
                "setup: {error:#}: the accessibility test of the web pages will fail, nothing else needs it"
            );
        }
    }
    match (packages.is_empty(), build_linker) {
        (true, false) if fetch_axe => {}
        (true, false) => eprintln!("setup: nothing was missing"),
        (true, true) => eprintln!("setup: installed bpf-linker"),
        (false, false) => eprintln!("setup: installed {}", packages.join(" ")),
        (false, true) => eprintln!("setup: installed {} and bpf-linker", packages.join(" ")),
    }
    Ok(())
}

/// Downloads the npm package with which tests check the accessibility of the web pages.
fn install_axe() -> anyhow::Result<()> {
    let folder = ebpf_build::cache_dir().join(AXE);
    // The folder gets its final name once it is complete.
    let unfinished = ebpf_build::cache_dir().join(format!("{AXE}.part"));
    fs::create_dir_all(&unfinished).with_context(|| format!("cannot create {}", unfinished.display()))?;
    let archive = unfinished.join(format!("{AXE}.tgz"));
    let mut download = Command::new("npm");
    download.args(["pack", "--silent", "--pack-destination"]).arg(&unfinished);
    download.arg(AXE.replacen("axe-core-", "axe-core@", 1));
    process::run(download).with_context(|| format!("cannot download {AXE}"))?;
    let digest = Command::new("sha256sum").arg(&archive).output().context("cannot start sha256sum")?;
    ensure!(
        digest.stdout.starts_with(AXE_SHA256.as_bytes()),
        "{} is not the package {AXE} that the tests were written for: remove it and run `cargo xtask setup` again",
        archive.display()
    );
    let mut unpack = Command::new("tar");
    unpack
        .arg("-xzf")
        .arg(&archive)
        .arg("-C")
        .arg(&unfinished)
        .args(["--strip-components=1", "package/axe.min.js"]);
    process::run(unpack)?;
    fs::rename(&unfinished, &folder).with_context(|| format!("cannot create {}", folder.display()))
}

fn missing_packages() -> Vec<&'static str> {
    let mut missing = BTreeSet::new();
    if ebpf_build::find_compiler().is_err() {
        missing.extend(COMPILER_PACKAGES);
    }
    if ebpf_build::find_linker().is_err() {
        missing.extend(LINKER_PACKAGES.iter().filter(|package| !is_package_installed(package)));
    }
    missing.extend(missing_programs(&TOOLS));
    missing.extend(missing_programs(&[PYTHON]));
    missing.into_iter().collect()
}

fn missing_programs(programs: &[(&str, &'static str)]) -> impl Iterator<Item = &'static str> {
    programs.iter().filter(|(program, _)| !process::is_installed(program)).map(|(_, package)| *package)
}

/// Whether a package is installed, for packages without a program to check for.
fn is_package_installed(package: &str) -> bool {
    let query =
        Command::new("dpkg-query").args(["--show", "--showformat=${db:Status-Status}", package]).output();
    query.is_ok_and(|output| output.stdout == b"installed")
}

fn install_packages(packages: &[&str]) -> anyhow::Result<()> {
    ensure!(
        process::is_installed("apt-get"),
        "this machine lacks these packages, named as in Debian: {}. It has no apt-get: install them with its own package \
         manager (`rustup component add rust-src` replaces {}), then run `cargo xtask setup` again",
        packages.join(" "),
        COMPILER_PACKAGES.join(" and "),
    );
    ensure!(
        is_root()?,
        "packages are missing, and installing them needs root: run `sudo apt-get update && sudo apt-get install \
         --no-install-recommends {}`, then `cargo xtask setup` again",
        packages.join(" "),
    );
    if let Err(error) = process::run(apt_get(&["update"])) {
        // An unreachable package source does not stop the setup: if the source matters, the installation fails.
        eprintln!("setup: {error:#}; continuing with the existing package lists");
    }
    let mut install = apt_get(&["install", "--yes", "--no-install-recommends"]);
    install.args(packages);
    process::run(install).with_context(|| {
        let name = os_name().unwrap_or_else(|| "this system".to_owned());
        format!(
            "cannot install packages; if {name} has no {}, `rustup component add rust-src` does the same",
            COMPILER_PACKAGES.join(" and ")
        )
    })
}

pub(crate) fn apt_get(args: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command.args(["-q", "-o", "DPkg::Lock::Timeout=300"]).args(args).env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn os_name() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(name.trim_matches('"').to_owned())
}

/// Builds bpf-linker into the cache: two to three minutes on two cores, once per machine.
fn install_linker() -> anyhow::Result<()> {
    ensure!(
        Path::new(LLVM_PREFIX).is_dir(),
        "bpf-linker is built with LLVM {}, which is not at {LLVM_PREFIX}: install it there, or put bpf-linker {} into \
         PATH, then run `cargo xtask setup` again",
        ebpf_build::LLVM_VERSION,
        ebpf_build::LINKER_VERSION,
    );
    let mut command =
        process::cargo(["install", "bpf-linker", "--version", ebpf_build::LINKER_VERSION, "--locked"]);
    command
        .args(["--no-default-features", "--features", "llvm-22", "--force", "--root"])
        .arg(ebpf_build::cached_linker_root());
    command.env("LLVM_PREFIX", LLVM_PREFIX);
    process::run(command).context("cannot build bpf-linker")
}
