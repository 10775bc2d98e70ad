//! Finds the kernels to boot: from Debian's packages (unpacked in a cache), from a folder, or that of this machine.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use super::folders::create_dir;
use crate::process;
use crate::setup::apt_get;

/// The kernels of a run without `--kernel`.
pub(super) const DEFAULTS: [&str; 2] = ["6.1", "6.12"];

/// The kernel of a guest, with its modules.
pub(crate) struct Kernel {
    /// The value of `--kernel`.
    pub(super) name: String,
    /// The output of `uname -r`.
    pub(crate) release: String,
    /// The compressed image for a boot loader.
    pub(super) image: PathBuf,
    /// `lib/modules/RELEASE`, with the files of depmod.
    pub(crate) modules: PathBuf,
}

/// Finds a kernel by version or path, or the kernel of this machine (`host`).
pub(crate) fn find(name: &str) -> anyhow::Result<Kernel> {
    if name == "host" {
        return of_host();
    }
    let path = Path::new(name);
    if path.is_dir() {
        return in_folder(name, path);
    }
    if path.is_file() {
        return of_package(name, path);
    }
    ensure!(
        !name.is_empty() && name.chars().all(|c| c.is_ascii_digit() || c == '.'),
        "{name:?} is neither a version such as 6.1, nor `host`, nor a folder or .deb file of a kernel package"
    );
    of_debian(name)
}

fn of_host() -> anyhow::Result<Kernel> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the release of this kernel")?;
    let release = release.trim().to_owned();
    let (image, modules) =
        (format!("/boot/vmlinuz-{release}").into(), format!("/lib/modules/{release}").into());
    let kernel = Kernel { name: "host".to_owned(), release, image, modules };
    ensure!(
        kernel.image.is_file() && kernel.modules.is_dir(),
        "this machine lacks the image or the modules of its kernel ({}, {}): run `cargo xtask test`, which tests it \
         without a virtual machine",
        kernel.image.display(),
        kernel.modules.display()
    );
    Ok(kernel)
}

/// The kernel in the folder of an unpacked package.
fn in_folder(name: &str, folder: &Path) -> anyhow::Result<Kernel> {
    let image = only_entry(&folder.join("boot"), "vmlinuz-")?;
    let file_name = image.file_name().unwrap_or_default().to_string_lossy();
    let release = file_name.trim_start_matches("vmlinuz-").to_owned();
    let modules = ["lib/modules", "usr/lib/modules"].map(|path| folder.join(path).join(&release));
    let Some(modules) = modules.into_iter().find(|path| path.is_dir()) else {
        bail!(
            "{} has no modules of {release}, neither in lib/modules nor in usr/lib/modules",
            folder.display()
        );
    };
    Ok(Kernel { name: name.to_owned(), release, image, modules })
}

fn only_entry(folder: &Path, prefix: &str) -> anyhow::Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut entries = entries.filter_map(Result::ok).map(|entry| entry.path());
    let found =
        entries.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
    found.with_context(|| format!("{} has no file {prefix}…", folder.display()))
}

/// The newest Debian kernel of this version or, if apt offers none, the newest one in the cache.
fn of_debian(version: &str) -> anyhow::Result<Kernel> {
    let package = newest_package(version)?;
    let cached = match &package {
        Some(package) => cache()?.join(package),
        None => newest_cached(version)?,
    };
    if !cached.join("boot").is_dir() {
        download(&cached)?;
    }
    in_folder(version, &cached)
}

fn cache() -> anyhow::Result<PathBuf> {
    let folder = ebpf_build::cache_dir().join("kernels");
    create_dir(&folder)?;
    Ok(folder)
}

fn newest_package(version: &str) -> anyhow::Result<Option<String>> {
    let found = packages(version)?;
    if found.is_some() {
        return Ok(found);
    }
    // The package lists may be missing. If they cannot be downloaded, the caller uses the cache.
    if let Err(error) = process::run(apt_get(&["update"])) {
        eprintln!("vm: {error:#}; continuing with the existing package lists");
    }
    packages(version)
}

/// The newest signed cloud image, such as `linux-image-6.1.0-56-cloud-amd64`.
fn packages(version: &str) -> anyhow::Result<Option<String>> {
    let output = Command::new("apt-cache")
        .args(["pkgnames", &format!("linux-image-{version}.")])
        .output()
        .context("cannot start apt-cache, which finds Debian's kernel packages; name an unpacked package by --kernel PATH")?;
    let names = String::from_utf8_lossy(&output.stdout);
    let names = names.lines().filter(|name| name.ends_with("-cloud-amd64") && is_offered(name));
    Ok(names.max_by(|a, b| by_numbers(a, b)).map(str::to_owned))
}

/// Whether a package of this name exists; apt also lists names that other packages only refer to.
fn is_offered(package: &str) -> bool {
    let output = Command::new("apt-cache").args(["show", "--no-all-versions", package]).output();
    output.is_ok_and(|output| output.status.success() && !output.stdout.is_empty())
}

fn newest_cached(version: &str) -> anyhow::Result<PathBuf> {
    let prefix = format!("linux-image-{version}.");
    let entries = fs::read_dir(cache()?)?.filter_map(Result::ok).map(|entry| entry.file_name());
    let names = entries.filter_map(|name| name.into_string().ok());
    let newest = names.filter(|name| name.starts_with(&prefix)).max_by(|a, b| by_numbers(a, b));
    let newest = newest.with_context(|| {
        format!("apt offers no package {prefix}*-cloud-amd64 here, and the cache has none: add Debian's sources, or name an \
                 unpacked package by --kernel PATH")
    })?;
    Ok(cache()?.join(newest))
}

/// Compares names by the numbers in them.
fn by_numbers(a: &str, b: &str) -> Ordering {
    let numbers = |name: &str| {
        let parts = name.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
        parts.map(|part| part.parse::<u64>().unwrap_or(u64::MAX)).collect::<Vec<_>>()
    };
    numbers(a).cmp(&numbers(b))
}

/// Downloads the package that the folder is named after.
fn download(cached: &Path) -> anyhow::Result<()> {
    let package = cached.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = cache()?.join(format!("download-{}", std::process::id()));
    create_dir(&folder)?;
    let mut command = apt_get(&["download", &package]);
    command.current_dir(&folder);
    let result = process::run(command).and_then(|()| unpack(&only_entry(&folder, "linux-image-")?, cached));
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    result
}

fn of_package(name: &str, package: &Path) -> anyhow::Result<Kernel> {
    let stem = package.file_stem().unwrap_or_default().to_string_lossy();
    let cached = cache()?.join(stem.split('_').next().unwrap_or(&stem));
    if !cached.join("boot").is_dir() {
        unpack(package, &cached)?;
    }
    in_folder(name, &cached)
}

/// Unpacks a package and runs depmod, as its installation would. The folder appears only when it is complete.
fn unpack(package: &Path, cached: &Path) -> anyhow::Result<()> {
    let unpacked = cached.with_extension(format!("unpacking-{}", std::process::id()));
    create_dir(&unpacked)?;
    let mut command = Command::new("dpkg-deb");
    command.arg("--extract").arg(package).arg(&unpacked);
    process::run(command)?;
    let kernel = in_folder("", &unpacked)?;
    let mut command = Command::new("depmod");
    let base = kernel.modules.ancestors().nth(3).unwrap_or(&unpacked);
    command.arg("--basedir").arg(base).arg(&kernel.release);
    process::run(command)?;
    fs::rename(&unpacked, cached)
        .with_context(|| format!("cannot rename {} to {}", unpacked.display(), cached.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_package_has_the_largest_numbers() {
        let newest =
            |names: &[&str]| names.iter().copied().max_by(|a, b| by_numbers(a, b)).map(str::to_owned);
        let names = ["linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-56-cloud-amd64"];
        assert_eq!(newest(&names).as_deref(), Some(names[1]));
        let names = ["linux-image-6.12.117+deb12-cloud-amd64", "linux-image-6.12.9+deb12-cloud-amd64"];
        assert_eq!(newest(&names).as_deref(), Some(names[0]));
    }

    #[test]
    fn unknown_kernel_is_named_in_the_error() {
        let error = find("newest").map(|kernel| kernel.release).map_err(|error| error.to_string());
        assert!(error.is_err_and(|error| error.contains("\"newest\" is neither a version")));
    }
}
