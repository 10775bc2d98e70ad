//! Archives (tar) whose bytes depend only on their files and on a given date.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::Path;

use tar::{Archive, Builder, EntryType, Header};

/// A file of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    /// The permission bits of the file.
    pub(super) mode: u32,
    pub(super) content: Vec<u8>,
}

/// Files by their paths below the root of the archive.
pub(super) type Files = BTreeMap<String, File>;

/// The archive of the files and of the folders above them. Everything belongs to root and has the time `date`, in
/// seconds since 1970.
pub(super) fn tar(files: &Files, date: u64) -> io::Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for folder in folders(files) {
        append(&mut archive, &format!("{folder}/"), EntryType::Directory, 0o755, date, &[])?;
    }
    for (path, File { mode, content }) in files {
        append(&mut archive, path, EntryType::Regular, *mode, date, content)?;
    }
    archive.into_inner()
}

/// The files of an archive, without its folders.
pub(super) fn read(bytes: &[u8]) -> anyhow::Result<Files> {
    let mut files = Files::new();
    for entry in Archive::new(bytes).entries()? {
        let mut entry = entry?;
        if entry.header().entry_type() != EntryType::Regular {
            continue;
        }
        let (path, mode) = (entry.path()?.display().to_string(), entry.header().mode()?);
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        files.insert(path, File { mode, content });
    }
    Ok(files)
}

/// The folders above the files, each before the folders in it.
fn folders(files: &Files) -> Vec<String> {
    let above = files.keys().flat_map(|path| Path::new(path).ancestors().skip(1));
    let mut folders: Vec<String> = above.map(|path| path.display().to_string()).collect();
    folders.retain(|folder| !folder.is_empty());
    folders.sort();
    folders.dedup();
    folders
}

fn append(
    archive: &mut Builder<Vec<u8>>,
    path: &str,
    kind: EntryType,
    mode: u32,
    date: u64,
    content: &[u8],
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(date);
    header.set_size(content.len() as u64);
    archive.append_data(&mut header, path, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_precede_their_files() {
        let file = |mode| File { mode, content: b"bytes".to_vec() };
        let files = Files::from([("etc/a/b".to_owned(), file(0o644)), ("bin".to_owned(), file(0o755))]);
        let bytes = tar(&files, 7).unwrap();
        let mut archive = Archive::new(bytes.as_slice());
        let entries = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let header = entry.header();
            let (mode, time) = (header.mode().unwrap(), header.mtime().unwrap());
            (entry.path().unwrap().display().to_string(), mode, time)
        });
        let expected = [("etc/", 0o755, 7), ("etc/a/", 0o755, 7), ("bin", 0o755, 7), ("etc/a/b", 0o644, 7)];
        assert_eq!(
            entries.collect::<Vec<_>>(),
            expected.map(|(path, mode, time)| (path.to_owned(), mode, time))
        );
    }

    #[test]
    fn read_returns_what_tar_wrote() {
        let files = Files::from([("a/b".to_owned(), File { mode: 0o755, content: b"bytes".to_vec() })]);
        assert_eq!(read(&tar(&files, 7).unwrap()).unwrap(), files);
    }
}
