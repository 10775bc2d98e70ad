//! Where kernels come from: Debian's packages, unpacked into the cache.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use super::create_dir;
use crate::process;

/// The kernels that run where none is named.
pub(super) const DEFAULTS: [&str; 2] = ["6.1", "6.12"];

/// A kernel with its modules.
pub(super) struct Kernel {
    /// As it was asked for.
    pub(super) name: String,
    /// What `uname -r` says.
    pub(super) release: String,
    /// The compressed image that a boot loader takes.
    pub(super) image: PathBuf,
    /// `lib/modules/RELEASE`, with the tables of depmod.
    pub(super) modules: PathBuf,
}

/// Finds a kernel by version, path, or as that of this machine.
pub(super) fn find(name: &str) -> anyhow::Result<Kernel> {
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
        fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot tell this kernel's release")?;
    let release = release.trim().to_owned();
    let (image, modules) =
        (format!("/boot/vmlinuz-{release}").into(), format!("/lib/modules/{release}").into());
    let kernel = Kernel { name: "host".to_owned(), release, image, modules };
    ensure!(
        kernel.image.is_file() && kernel.modules.is_dir(),
        "the image or the modules of this machine's kernel are not here ({}, {}): its tests run on the machine itself, \
         by `cargo xtask test`",
        kernel.image.display(),
        kernel.modules.display()
    );
    Ok(kernel)
}

/// An unpacked package.
fn in_folder(name: &str, folder: &Path) -> anyhow::Result<Kernel> {
    let image = only_entry(&folder.join("boot"), "vmlinuz-")?;
    let file_name = image.file_name().unwrap_or_default().to_string_lossy();
    let release = file_name.trim_start_matches("vmlinuz-").to_owned();
    let modules = ["lib/modules", "usr/lib/modules"].map(|path| folder.join(path).join(&release));
    let Some(modules) = modules.into_iter().find(|path| path.is_dir()) else {
        bail!("there are no modules of {release} in {}", folder.display());
    };
    Ok(Kernel { name: name.to_owned(), release, image, modules })
}

fn only_entry(folder: &Path, prefix: &str) -> anyhow::Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut entries = entries.filter_map(Result::ok).map(|entry| entry.path());
    let found =
        entries.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
    found.with_context(|| format!("there is no {prefix}… in {}", folder.display()))
}

/// The newest one that Debian has of this version; where nothing can be asked, the newest one that was used before.
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
    // There are no package lists yet. Offline, what is cached will do.
    if let Err(error) = process::run(crate::setup::apt_get(&["update"])) {
        eprintln!("vm: {error:#}; going on with the package lists that are there");
    }
    packages(version)
}

/// The newest signed image for clouds, such as `linux-image-6.1.0-56-cloud-amd64`.
fn packages(version: &str) -> anyhow::Result<Option<String>> {
    let output = Command::new("apt-cache")
        .args(["pkgnames", &format!("linux-image-{version}.")])
        .output()
        .context("cannot start apt-cache: kernels come from Debian's packages; name an unpacked one by --kernel PATH")?;
    let names = String::from_utf8_lossy(&output.stdout);
    let names = names.lines().filter(|name| name.ends_with("-cloud-amd64") && is_offered(name));
    Ok(names.max_by(|a, b| by_numbers(a, b)).map(str::to_owned))
}

/// A name may be that of something that is only mentioned.
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
        format!("apt offers no package {prefix}*-cloud-amd64 here, and none was used before: add Debian's sources, or name an \
                 unpacked package by --kernel PATH")
    })?;
    Ok(cache()?.join(newest))
}

/// Compares names as people do: runs of digits are numbers.
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
    let mut command = crate::setup::apt_get(&["download", &package]);
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

/// Unpacks a package and does what its installation would do for the modules. The folder is there whole or not at all.
fn unpack(package: &Path, cached: &Path) -> anyhow::Result<()> {
    let whole = cached.with_extension(format!("unpacking-{}", std::process::id()));
    create_dir(&whole)?;
    let mut command = Command::new("dpkg-deb");
    command.arg("--extract").arg(package).arg(&whole);
    process::run(command)?;
    let kernel = in_folder("", &whole)?;
    let mut command = Command::new("depmod");
    let base = kernel.modules.ancestors().nth(3).unwrap_or(&whole);
    command.arg("--basedir").arg(base).arg(&kernel.release);
    process::run(command)?;
    fs::rename(&whole, cached)
        .with_context(|| format!("cannot rename {} to {}", whole.display(), cached.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_package_has_the_largest_numbers() {
        let newest =
            |names: &[&str]| names.iter().copied().max_by(|a, b| by_numbers(a, b)).map(str::to_owned);
        let names = ["linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-56-cloud-amd64"];
        assert_eq!(newest(&names).as_deref(), Some(names[1]));
        let names = ["linux-image-6.12.117+deb12-cloud-amd64", "linux-image-6.12.9+deb12-cloud-amd64"];
        assert_eq!(newest(&names).as_deref(), Some(names[0]));
    }

    #[test]
    fn what_is_no_kernel_is_named() {
        let error = find("newest").map(|kernel| kernel.release).map_err(|error| error.to_string());
        assert!(error.is_err_and(|error| error.contains("\"newest\" is neither a version")));
    }
}
