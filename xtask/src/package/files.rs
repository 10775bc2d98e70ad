//! The files of the package.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use flate2::Compression;

use super::needs::Needs;
use crate::release::gzip;

/// Files that the administrator edits: an upgrade keeps the changes.
const CONFFILES: &str = "/etc/lb-agent/config.yaml\n";
/// The folder of manifests that the packaged configuration names. It is empty in the package.
const SERVICES: &str = "etc/lb-agent/services";

/// Generated files of the package: the agent writes the completions and the man pages, and the bill of materials comes
/// from Cargo's metadata.
#[derive(Debug)]
pub(super) struct Generated {
    /// Scripts for bash, zsh and fish.
    pub(super) completions: [Vec<u8>; 3],
    /// Names and texts of the man pages.
    pub(super) man_pages: Vec<(String, Vec<u8>)>,
    /// The software bill of materials.
    pub(super) sbom: Vec<u8>,
}

/// A file of the package.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct File {
    /// Path below the root.
    pub(super) path: String,
    pub(super) mode: u32,
    pub(super) content: Vec<u8>,
}

impl File {
    fn new(path: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), mode: 0o644, content: content.into() }
    }

    fn executable(path: &str, content: impl Into<Vec<u8>>) -> Self {
        Self { mode: 0o755, ..Self::new(path, content) }
    }
}

/// Every file of a package of `program`, with those that dpkg reads (`DEBIAN/`).
pub(super) fn files(program: Vec<u8>, generated: Generated) -> anyhow::Result<Vec<File>> {
    let needs = Needs::of(&program)?;
    let mut files = installed(program, generated)?;
    let bytes: usize = files.iter().map(|file| file.content.len()).sum();
    files.push(File::new("DEBIAN/control", control(&needs, bytes)?));
    files.push(File::new("DEBIAN/conffiles", CONFFILES));
    for script in ["postinst", "prerm", "postrm"] {
        files
            .push(File::executable(&format!("DEBIAN/{script}"), source(&format!("deploy/debian/{script}"))?));
    }
    Ok(files)
}

/// The files that the package installs.
fn installed(program: Vec<u8>, generated: Generated) -> anyhow::Result<Vec<File>> {
    let [bash, zsh, fish] = generated.completions;
    let doc = "usr/share/doc/lb-agent";
    let mut files = vec![
        File::executable("usr/bin/lb-agent", program),
        File::new("usr/lib/systemd/system/lb-agent.service", source("deploy/systemd/lb-agent.service")?),
        File::new("etc/lb-agent/config.yaml", source("deploy/debian/config.yaml")?),
        File::new(format!("{doc}/examples/web.yaml"), source("deploy/debian/web.yaml")?),
        File::new(format!("{doc}/copyright"), copyright()?),
        File::new(format!("{doc}/changelog.gz"), gzip(&source("CHANGELOG.md")?, Compression::best())?),
        File::new(format!("{doc}/sbom.cdx.json"), generated.sbom),
        File::new("usr/share/bash-completion/completions/lb-agent", bash),
        File::new("usr/share/zsh/vendor-completions/_lb-agent", zsh),
        File::new("usr/share/fish/vendor_completions.d/lb-agent.fish", fish),
    ];
    for (name, text) in generated.man_pages {
        files.push(File::new(format!("usr/share/man/man1/{name}.gz"), gzip(&text, Compression::best())?));
    }
    Ok(files)
}

/// The file that describes the package to dpkg. `bytes` is the total size of the installed files.
fn control(needs: &Needs, bytes: usize) -> anyhow::Result<String> {
    // Debian sorts `0.2.0~rc.1` before `0.2.0`, but `0.2.0-rc.1` after it.
    let version = env!("CARGO_PKG_VERSION").replace('-', "~");
    let (architecture, depends) = (needs.debian_architecture()?, needs.debian_packages()?);
    let kibibytes = bytes.div_ceil(1024);
    Ok(format!(
        "Package: lb-agent\n\
         Version: {version}\n\
         Architecture: {architecture}\n\
         Maintainer: The authors of lb-agent <lb-agent@packages.invalid>\n\
         Installed-Size: {kibibytes}\n\
         Depends: {depends}\n\
         Section: net\n\
         Priority: optional\n\
         Description: Kubernetes Services in the kernel\n \
         An eBPF load balancer for a node, with or without Kubernetes: the agent writes\n \
         Services into the kernel, whose programs forward packets to the backends, and\n \
         go on doing so while no agent runs.\n"
    ))
}

fn copyright() -> anyhow::Result<Vec<u8>> {
    let mut text =
        b"lb-agent is licensed under the Apache License 2.0 (/usr/share/common-licenses/Apache-2.0)\n\
        or, at your option, the MIT licence:\n\n"
            .to_vec();
    text.extend(source("LICENSE-MIT")?);
    Ok(text)
}

/// A file of this repository.
fn source(path: &str) -> anyhow::Result<Vec<u8>> {
    let path = ebpf_build::workspace_root().join(path);
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes the files below an empty folder. The modes do not depend on the umask.
pub(super) fn stage(root: &Path, files: &[File]) -> anyhow::Result<()> {
    create_folders(root, &root.join(SERVICES))?;
    for File { path, mode, content } in files {
        let path = root.join(path);
        create_folders(root, path.parent().unwrap_or(root))?;
        let cannot = || format!("cannot write {}", path.display());
        fs::write(&path, content).with_context(cannot)?;
        set_mode(&path, *mode)?;
    }
    Ok(())
}

/// Creates the folder and its missing parents, and makes it and its parents up to `root`, including `root`, readable by
/// all users.
fn create_folders(root: &Path, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let below: Vec<PathBuf> =
        folder.ancestors().take_while(|path| path.starts_with(root)).map(Path::to_owned).collect();
    below.iter().try_for_each(|path| set_mode(path, 0o755))
}

fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the mode of {}", path.display()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn generated() -> Generated {
        Generated {
            completions: [b"bash".to_vec(), b"zsh".to_vec(), b"fish".to_vec()],
            man_pages: vec![("lb-agent.1".to_owned(), b"a page".to_vec())],
            sbom: b"{}".to_vec(),
        }
    }

    /// A program that is linked dynamically, as the agent is.
    pub(crate) fn program() -> Vec<u8> {
        fs::read("/usr/bin/env").unwrap()
    }

    fn content<'a>(files: &'a [File], path: &str) -> &'a str {
        let file = files.iter().find(|file| file.path == path).unwrap();
        str::from_utf8(&file.content).unwrap()
    }

    #[test]
    fn package_has_these_files_and_modes() {
        let files = files(program(), generated()).unwrap();
        let listed: Vec<_> = files.iter().map(|file| (file.path.as_str(), file.mode)).collect();
        assert_eq!(
            listed,
            [
                ("usr/bin/lb-agent", 0o755),
                ("usr/lib/systemd/system/lb-agent.service", 0o644),
                ("etc/lb-agent/config.yaml", 0o644),
                ("usr/share/doc/lb-agent/examples/web.yaml", 0o644),
                ("usr/share/doc/lb-agent/copyright", 0o644),
                ("usr/share/doc/lb-agent/changelog.gz", 0o644),
                ("usr/share/doc/lb-agent/sbom.cdx.json", 0o644),
                ("usr/share/bash-completion/completions/lb-agent", 0o644),
                ("usr/share/zsh/vendor-completions/_lb-agent", 0o644),
                ("usr/share/fish/vendor_completions.d/lb-agent.fish", 0o644),
                ("usr/share/man/man1/lb-agent.1.gz", 0o644),
                ("DEBIAN/control", 0o644),
                ("DEBIAN/conffiles", 0o644),
                ("DEBIAN/postinst", 0o755),
                ("DEBIAN/prerm", 0o755),
                ("DEBIAN/postrm", 0o755),
            ]
        );
    }

    #[test]
    fn control_file_has_every_field() {
        let files = files(program(), generated()).unwrap();
        let control = content(&files, "DEBIAN/control");
        let field = |name: &str| control.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        assert_eq!((field("Package"), field("Version")), (Some("lb-agent"), Some(env!("CARGO_PKG_VERSION"))));
        assert!(field("Depends").unwrap().starts_with("libc6 (>= 2."), "{control}");
        let size: usize = field("Installed-Size").unwrap().parse().unwrap();
        assert!(size * 1024 >= program().len(), "{control}");
        for name in ["Architecture", "Maintainer", "Section", "Priority", "Description"] {
            assert!(field(name).is_some(), "{name}");
        }
        // A line of the long description starts with one space, else dpkg-deb takes it for a field.
        let (_, long) = control.split_once("Description: ").unwrap();
        assert!(long.lines().skip(1).all(|line| line.starts_with(' ') && !line.starts_with("  ")), "{long}");
    }

    #[test]
    fn every_conffile_is_installed() {
        let files = files(program(), generated()).unwrap();
        for path in content(&files, "DEBIAN/conffiles").lines() {
            let installed = path.strip_prefix('/').unwrap();
            assert!(installed.starts_with("etc/"), "{path}");
            assert!(files.iter().any(|file| file.path == installed), "{path}");
        }
    }

    #[test]
    fn maintainer_scripts_are_shell_scripts() {
        for file in files(program(), generated()).unwrap().iter().filter(|file| file.mode == 0o755).skip(1) {
            let script = str::from_utf8(&file.content).unwrap();
            assert!(script.starts_with("#!/bin/sh\n") && script.contains("\nset -e\n"), "{}", file.path);
        }
    }
}
