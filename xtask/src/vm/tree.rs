//! The files of an initramfs, copied from this machine, and their archive.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};
use cpio::newc::{Builder, ModeFileType, trailer};

/// The entry at a path.
enum Node {
    Folder,
    Link(PathBuf),
    File { from: PathBuf, mode: u32 },
    Text(Vec<u8>),
}

/// Entries by absolute path, in the order of the archive: a folder comes before its entries.
#[derive(Default)]
pub(crate) struct Tree {
    nodes: BTreeMap<PathBuf, Node>,
}

impl Tree {
    /// Adds an empty folder.
    pub(crate) fn folder(&mut self, path: impl AsRef<Path>) {
        self.nodes.entry(path.as_ref().to_owned()).or_insert(Node::Folder);
    }

    /// Adds a file with this content.
    pub(crate) fn text(&mut self, path: impl AsRef<Path>, text: impl Into<Vec<u8>>) {
        self.parents(path.as_ref());
        self.nodes.insert(path.as_ref().to_owned(), Node::Text(text.into()));
    }

    /// Adds a copy of the file `from`.
    pub(crate) fn file(&mut self, path: impl AsRef<Path>, from: &Path) -> anyhow::Result<()> {
        let mode = fs::metadata(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.parents(path.as_ref());
        let node = Node::File { from: from.to_owned(), mode: mode.permissions().mode() & 0o777 };
        self.nodes.insert(path.as_ref().to_owned(), node);
        Ok(())
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: impl AsRef<Path>, target: impl Into<PathBuf>) {
        self.parents(path.as_ref());
        self.nodes.insert(path.as_ref().to_owned(), Node::Link(target.into()));
    }

    /// Adds a file of this machine, or a folder with its contents, at its path with all symbolic links resolved. Also
    /// adds the links on `path` (such as `/lib`, a link to `usr/lib`).
    pub(super) fn add(&mut self, path: &Path) -> anyhow::Result<()> {
        let real = self.resolve(path)?;
        if !real.is_dir() {
            return self.file(&real, &real);
        }
        self.copy_below(&real, &real)
    }

    /// Adds the contents of the folder `from` below `path`.
    pub(crate) fn copy_below(&mut self, path: &Path, from: &Path) -> anyhow::Result<()> {
        self.parents(path);
        self.folder(path);
        let context = || format!("cannot read {}", from.display());
        for entry in fs::read_dir(from).with_context(context)? {
            let entry = entry.with_context(context)?;
            let (path, from) = (path.join(entry.file_name()), entry.path());
            let kind = entry.file_type().with_context(context)?;
            if kind.is_dir() {
                self.copy_below(&path, &from)?;
            } else if kind.is_symlink() {
                self.link(path, fs::read_link(&from).with_context(context)?);
            } else {
                self.file(path, &from)?;
            }
        }
        Ok(())
    }

    /// Adds the symbolic links on a path of this machine; returns the path with all links resolved. Entries must be
    /// added at the returned path: the kernel unpacks an archive in order, and follows a link only if its target
    /// already exists.
    pub(super) fn resolve(&mut self, path: &Path) -> anyhow::Result<PathBuf> {
        let mut resolved = PathBuf::from("/");
        for (index, component) in path.components().enumerate() {
            match component {
                Component::RootDir => continue,
                Component::ParentDir => {
                    resolved.pop();
                    continue;
                }
                Component::Normal(name) => resolved.push(name),
                Component::CurDir | Component::Prefix(_) => bail!("{} is not absolute", path.display()),
            }
            if let Ok(target) = fs::read_link(&resolved) {
                self.link(&resolved, &target);
                let parent = resolved.parent().unwrap_or(Path::new("/"));
                let rest: PathBuf = path.components().skip(index + 1).collect();
                return self.resolve(&parent.join(target).join(rest));
            }
        }
        Ok(resolved)
    }

    fn parents(&mut self, path: &Path) {
        for folder in path.ancestors().skip(1).filter(|folder| folder.parent().is_some()) {
            self.folder(folder);
        }
    }

    /// Writes the archive in the format of an initramfs.
    pub(crate) fn write(&self, archive: &Path) -> anyhow::Result<()> {
        let file = File::create(archive).with_context(|| format!("cannot create {}", archive.display()))?;
        let mut to = BufWriter::new(file);
        // The root itself has no entry.
        let nodes = self.nodes.iter().filter(|(path, _)| path.parent().is_some());
        for (number, (path, node)) in (1..).zip(nodes) {
            to = node
                .write(to, number, path)
                .with_context(|| format!("cannot write {} to {}", path.display(), archive.display()))?;
        }
        trailer(to)
            .and_then(|mut to| to.flush())
            .with_context(|| format!("cannot write {}", archive.display()))
    }
}

impl Node {
    fn write<W: Write>(&self, to: W, number: u32, path: &Path) -> anyhow::Result<W> {
        let name = path.strip_prefix("/").unwrap_or(path).to_str().context("the name is not Unicode")?;
        let entry = Builder::new(name).ino(number);
        match self {
            Self::Folder => put(entry.mode(0o755), ModeFileType::Directory, to, io::empty(), 0),
            Self::Link(target) => {
                let target = target.to_str().context("the target is not Unicode")?.as_bytes();
                put(entry.mode(0o777), ModeFileType::Symlink, to, target, target.len() as u64)
            }
            Self::Text(text) => {
                put(entry.mode(0o755), ModeFileType::Regular, to, text.as_slice(), text.len() as u64)
            }
            Self::File { from, mode } => {
                let file = File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
                let size = file.metadata()?.len();
                put(entry.mode(*mode), ModeFileType::Regular, to, file, size)
            }
        }
    }
}

fn put<W: Write>(
    entry: Builder,
    kind: ModeFileType,
    to: W,
    mut from: impl Read,
    size: u64,
) -> anyhow::Result<W> {
    let size = u32::try_from(size).context("it is too large for the archive's format")?;
    let mut writer = entry.set_mode_file_type(kind).write(to, size);
    io::copy(&mut from, &mut writer)?;
    Ok(writer.finish()?)
}

#[cfg(test)]
mod tests {
    use cpio::NewcReader;

    use super::*;

    #[test]
    fn folders_precede_their_entries_and_links_are_kept() {
        let folder = std::env::temp_dir().join(format!("lb-xtask-tree-{}", std::process::id()));
        fs::create_dir_all(folder.join("real")).unwrap();
        fs::write(folder.join("real/file"), "bytes").unwrap();
        std::os::unix::fs::symlink("real", folder.join("link")).unwrap();
        let mut tree = Tree::default();
        tree.add(&folder.join("link/file")).unwrap();
        tree.text("/etc/plan", "text");
        let archive = folder.join("archive");
        tree.write(&archive).unwrap();

        let base = folder.strip_prefix("/").unwrap().to_str().unwrap();
        let expected = [
            ("etc".to_owned(), String::new()),
            ("etc/plan".to_owned(), "text".to_owned()),
            ("tmp".to_owned(), String::new()),
            (base.to_owned(), String::new()),
            (format!("{base}/link"), "real".to_owned()),
            (format!("{base}/real"), String::new()),
            (format!("{base}/real/file"), "bytes".to_owned()),
        ];
        let mut found = Vec::new();
        let mut file = File::open(&archive).unwrap();
        loop {
            let mut reader = NewcReader::new(file).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            found.push((reader.entry().name().to_owned(), text));
            file = reader.finish().unwrap();
        }
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, expected);
    }
}
