//! `cargo xtask package`: a Debian package of the agent. The same commit and toolchain give the same bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::process::run as run_command;
use crate::release;

mod files;
mod guest;
mod needs;
mod sbom;

use self::files::{File, Generated};

/// Arguments of `package`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Then install the package in an emulated Debian with systemd, serve another host, and remove it (needs root)
    #[arg(long)]
    guest: bool,
}

/// Creates a package of this agent, checks it, and prints its path.
pub(crate) fn run(args: &Args, agent: &Path) -> anyhow::Result<()> {
    let folder = release::empty_folder("package")?;
    let agent = release::stripped(agent, &folder)?;
    let generated = generate(&agent, &folder)?;
    let program = fs::read(&agent)?;
    let files = files::files(program, generated)?;
    let package = build(&folder, &files, release::source_date()?)?;
    release::check_version(&version_in(&package, &folder.join("unpacked"))?)?;
    if args.guest {
        guest::run(&package, &folder)?;
    }
    release::print_result(&package)
}

/// Lets the agent write its completions and man pages, and lists its crates.
fn generate(agent: &Path, folder: &Path) -> anyhow::Result<Generated> {
    let completions = |shell: &str| {
        let mut command = Command::new(agent);
        command.args(["completions", shell]);
        release::output(command).map(String::into_bytes)
    };
    let pages = folder.join("man");
    fs::create_dir(&pages)?;
    let mut command = Command::new(agent);
    command.arg("man-pages").arg(&pages);
    release::output(command)?;
    let mut man_pages = Vec::new();
    for page in fs::read_dir(&pages)? {
        let page = page?;
        man_pages.push((page.file_name().to_string_lossy().into_owned(), fs::read(page.path())?));
    }
    man_pages.sort();
    let completions = [completions("bash")?, completions("zsh")?, completions("fish")?];
    Ok(Generated { completions, man_pages, sbom: sbom::of_agent()? })
}

/// Builds the package from the files, in a folder that has no `root` yet. No modification time in the package is later
/// than `source_date`, in seconds since 1970.
fn build(folder: &Path, files: &[File], source_date: u64) -> anyhow::Result<PathBuf> {
    let root = folder.join("root");
    files::stage(&root, files)?;
    let mut command = Command::new("dpkg-deb");
    command.args(["--root-owner-group", "--build"]).arg(&root).arg(folder);
    command.env("SOURCE_DATE_EPOCH", source_date.to_string());
    run_command(command).context("the package dpkg has dpkg-deb, also outside of Debian")?;
    let packages = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
    packages.into_iter().map(|entry| entry.path()).find(is_package).context("dpkg-deb has written no package")
}

/// Unpacks the package and runs its program; returns the output for `--version`.
fn version_in(package: &Path, unpacked: &Path) -> anyhow::Result<String> {
    let mut extract = Command::new("dpkg-deb");
    extract.arg("--extract").arg(package).arg(unpacked);
    release::output(extract)?;
    let mut version = Command::new(unpacked.join("usr/bin/lb-agent"));
    version.arg("--version");
    release::output(version)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::files::tests::{generated, program};
    use super::*;

    fn build_in(folder: &Path) -> PathBuf {
        build(folder, &files::files(program(), generated()).unwrap(), 1_700_000_000).unwrap()
    }

    #[test]
    fn unpacked_program_runs() {
        let folder = tempfile::tempdir().unwrap();
        let package = build_in(folder.path());
        assert!(package.display().to_string().contains(concat!(
            "/lb-agent_",
            env!("CARGO_PKG_VERSION"),
            "_"
        )));
        let unpacked = folder.path().join("unpacked");
        let answer = version_in(&package, &unpacked).unwrap();
        assert!(answer.starts_with("env (GNU coreutils)"), "{answer}");
        let services = fs::metadata(unpacked.join("etc/lb-agent/services")).unwrap();
        assert!(services.is_dir() && services.permissions().mode() & 0o777 == 0o755);
    }

    #[test]
    fn two_builds_have_the_same_bytes() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (first, second) = (build_in(first.path()), build_in(second.path()));
        assert!(fs::read(first).unwrap() == fs::read(second).unwrap());
    }

    #[test]
    fn dpkg_reads_the_fields() {
        let folder = tempfile::tempdir().unwrap();
        let package = build_in(folder.path());
        let mut command = Command::new("dpkg-deb");
        command.arg("--field").arg(&package).args(["Package", "Version", "Priority"]);
        let expected =
            concat!("Package: lb-agent\nVersion: ", env!("CARGO_PKG_VERSION"), "\nPriority: optional\n");
        assert_eq!(release::output(command).unwrap(), expected);
    }

    /// The programs that a maintainer script of the package calls, with their arguments, in order.
    fn calls(script: &str, arguments: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        for program in ["systemctl", "deb-systemd-invoke", "lb-agent"] {
            let stub = folder.path().join(program);
            fs::write(&stub, format!("#!/bin/sh\necho {program} \"$@\" >>{}\n", log.display())).unwrap();
            fs::set_permissions(&stub, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut command = Command::new("/bin/sh");
        command.arg(ebpf_build::workspace_root().join("deploy/debian").join(script)).args(arguments);
        command.env("PATH", folder.path());
        release::output(command).unwrap();
        fs::read_to_string(log).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    #[test]
    fn removal_ends_the_data_plane_and_upgrade_keeps_it() {
        let removal = calls("prerm", &["remove"]);
        assert!(removal.contains(&"systemctl --quiet disable lb-agent.service".to_owned()), "{removal:?}");
        assert_eq!(removal.last().unwrap(), "lb-agent cleanup --config /etc/lb-agent/config.yaml");
        for arguments in
            [&["upgrade", "0.2.0"][..], &["failed-upgrade", "0.1.0"], &["deconfigure", "in-favour"]]
        {
            assert_eq!(calls("prerm", arguments), [""; 0], "{arguments:?}");
        }
    }

    #[test]
    fn installation_starts_no_agent() {
        for arguments in [&["configure"][..], &["configure", "0.0.9"], &["abort-upgrade", "0.2.0"]] {
            let calls = calls("postinst", arguments);
            let starts =
                |call: &String| call.split(' ').any(|word| ["start", "restart", "enable"].contains(&word));
            assert!(!calls.iter().any(starts), "{calls:?}");
        }
    }
}
