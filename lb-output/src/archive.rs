//! Archives of bug reports: a folder of files as `.tar`, readable by its owner only.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::Context as _;
use jiff::Timestamp;
use tar::{Builder, Header};

/// Creates the archive's file.
///
/// # Errors
///
/// The path exists, or cannot be written.
pub fn create(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot create {}; set another --output", path.display()))
}

/// Removes an archive that could not be written whole: it would be in the way of the next attempt. Ignores errors, because
/// the caller reports why the archive could not be written.
pub fn discard(path: &Path) {
    let _removed = fs::remove_file(path);
}

/// An archive that is being written: files in one folder, all with the same modification time.
pub struct Archive<W: Write> {
    builder: Builder<W>,
    folder: String,
    written: u64,
}

impl<W: Write> std::fmt::Debug for Archive<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Archive").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl<W: Write> Archive<W> {
    /// Begins an archive, which `writer` receives. Its files are in `folder` and have the modification time `now`.
    pub fn new(writer: W, folder: &str, now: Timestamp) -> Self {
        let written = u64::try_from(now.as_second()).unwrap_or(0);
        Self { builder: Builder::new(writer), folder: folder.to_owned(), written }
    }

    /// Adds a file.
    ///
    /// # Errors
    ///
    /// Errors of the writer.
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.written);
        self.builder.append_data(&mut header, format!("{}/{name}", self.folder), bytes)
    }

    /// Writes the end of the archive; returns the writer.
    ///
    /// # Errors
    ///
    /// Errors of the writer.
    pub fn finish(self) -> io::Result<W> {
        self.builder.into_inner()
    }
}
