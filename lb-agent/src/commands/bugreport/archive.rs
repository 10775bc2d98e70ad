//! The archive of a bug report: a directory of files as `.tar.gz`, readable by its owner only.

use std::{
    fs::{File, OpenOptions},
    io::{self, IsTerminal as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::Context as _;
use flate2::{Compression, write::GzEncoder};
use jiff::Timestamp;
use tar::{Builder, Header};

/// Creates the archive's file; fails if the path exists.
pub(super) fn create(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot create {}; set another --output", path.display()))
}

/// Standard output, unless it is a terminal.
pub(super) fn stdout() -> anyhow::Result<io::Stdout> {
    let stdout = io::stdout();
    if stdout.is_terminal() {
        anyhow::bail!(
            "standard output is a terminal, which cannot show an archive; redirect it, or set another --output"
        );
    }
    Ok(stdout)
}

/// Writes the files into the archive, below the directory `folder`.
pub(super) fn write(
    file: &mut impl io::Write,
    folder: &str,
    files: &[(String, Vec<u8>)],
    now: Timestamp,
) -> io::Result<()> {
    let mut archive = Builder::new(GzEncoder::new(file, Compression::default()));
    for (name, bytes) in files {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(u64::try_from(now.as_second()).unwrap_or(0));
        archive.append_data(&mut header, format!("{folder}/{name}"), bytes.as_slice())?;
    }
    archive.into_inner()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn archive_is_readable_and_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tar.gz");
        let files = [("one.txt".to_owned(), b"1".to_vec()), ("net/two.txt".to_owned(), vec![b'2'; 70_000])];
        write(&mut create(&path).unwrap(), "report", &files, Timestamp::UNIX_EPOCH).unwrap();
        assert!(create(&path).unwrap_err().to_string().contains("--output"));
        let mut archive = tar::Archive::new(GzDecoder::new(File::open(&path).unwrap()));
        let read: Vec<(String, Vec<u8>)> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).unwrap();
                (entry.path().unwrap().display().to_string(), bytes)
            })
            .collect();
        let expected = files.map(|(name, bytes)| (format!("report/{name}"), bytes));
        assert_eq!(read, expected);
    }
}
