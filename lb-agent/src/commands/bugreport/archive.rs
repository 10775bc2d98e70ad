//! The archive of a bug report: a directory of files as `.tar.gz`, readable by its owner only.

use std::io::{self, IsTerminal as _};

use flate2::{Compression, write::GzEncoder};
use jiff::Timestamp;
use lb_output::archive::Archive;
pub(super) use lb_output::archive::{create, discard};

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
    let mut archive = Archive::new(GzEncoder::new(file, Compression::default()), folder, now);
    for (name, bytes) in files {
        archive.add(name, bytes)?;
    }
    archive.finish()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read as _};

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
