//! Writes lines to their target: a file that the agent or `logrotate` rotates, standard output, or a Unix socket.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::{
        fs::{MetadataExt as _, OpenOptionsExt as _},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Pause between two attempts to open the file or connect to the socket.
const RETRY: Duration = Duration::from_secs(1);

/// The target that `--flow-log` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlowLogTarget {
    /// `-`: standard output.
    Stdout,
    /// A path: a regular file, or a named pipe.
    File(PathBuf),
    /// `unix:PATH`: a listening stream socket.
    Unix(PathBuf),
}

impl From<&str> for FlowLogTarget {
    fn from(text: &str) -> Self {
        match text.strip_prefix("unix:") {
            Some(path) => Self::Unix(path.into()),
            None if text == "-" => Self::Stdout,
            None => Self::File(text.into()),
        }
    }
}

impl fmt::Display for FlowLogTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("-"),
            Self::File(path) => path.display().fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// When the agent rotates the file, and how many rotated files stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Maximum size in bytes: the agent rotates the file before a write that would exceed it. 0 means no maximum.
    pub max_size: u64,
    /// Number of rotated files that stay: `FILE.1` (the latest one) to `FILE.N`. If 0, the agent deletes the full file.
    pub keep: u32,
}

/// The opened file of the flow log.
struct OpenFile {
    file: File,
    /// Device and inode number, to notice that another program has renamed the file.
    id: (u64, u64),
    /// Size in bytes; `None` for a named pipe, which is never rotated.
    size: Option<u64>,
}

impl OpenFile {
    /// Whether the path still leads to this file.
    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == self.id)
    }
}

enum Opened {
    Stdout(io::Stdout),
    File(OpenFile),
    Unix(UnixStream),
}

/// Writes whole lines. An error may have cut off a line of the file or of standard output, so the next write that
/// succeeds begins with a line break. A socket needs no line break: after an error, the agent opens a new connection.
pub(super) struct Sink {
    target: FlowLogTarget,
    rotation: Rotation,
    opened: Option<Opened>,
    /// Earliest time of the next attempt to open the target; `None` if it may be opened at once.
    retry_at: Option<Instant>,
    is_torn: bool,
}

impl Sink {
    pub(super) const fn new(target: FlowLogTarget, rotation: Rotation) -> Self {
        Self { target, rotation, opened: None, retry_at: None, is_torn: false }
    }

    /// Opens the target if it is a regular file or does not exist yet, so that an agent with an unwritable path fails
    /// at the start.
    pub(super) fn check(&mut self) -> io::Result<()> {
        match &self.target {
            FlowLogTarget::File(path) if fs::metadata(path).map_or(true, |found| found.is_file()) => {
                self.opened = Some(Opened::File(open_file(path)?));
                Ok(())
            }
            FlowLogTarget::Stdout | FlowLogTarget::File(_) | FlowLogTarget::Unix(_) => Ok(()),
        }
    }

    /// Writes lines; first rotates the file if they would make it too large. If this returns an error, some of the
    /// lines may have been written.
    pub(super) fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        self.rotate_before(lines.len() as u64)?;
        let is_torn = self.is_torn;
        let opened = self.open()?;
        let mut result = if is_torn { opened.write_all(b"\n") } else { Ok(()) };
        if result.is_ok() {
            result = opened.write_all(lines);
        }
        if result.is_err() {
            self.opened = None;
            self.retry_at = Some(Instant::now() + RETRY);
        }
        self.is_torn = result.is_err() && !matches!(self.target, FlowLogTarget::Unix(_));
        result
    }

    /// Closes the target, so that the next write opens it again: after a rotation, a new file.
    pub(super) fn reopen(&mut self) {
        (self.opened, self.retry_at) = (None, None);
    }

    /// Closes the file if another program has renamed or removed it, so that the next write opens the path again.
    pub(super) fn follow(&mut self) {
        if let (FlowLogTarget::File(path), Some(Opened::File(open))) = (&self.target, &self.opened)
            && !open.is_at(path)
        {
            self.reopen();
        }
    }

    fn open(&mut self) -> io::Result<&mut Opened> {
        if self.opened.is_none() {
            if self.retry_at.is_some_and(|at| at > Instant::now()) {
                return Err(io::Error::other("waiting for the next attempt to open it"));
            }
            self.retry_at = Some(Instant::now() + RETRY);
            self.opened = Some(match &self.target {
                FlowLogTarget::Stdout => Opened::Stdout(io::stdout()),
                FlowLogTarget::File(path) => Opened::File(open_file(path)?),
                FlowLogTarget::Unix(path) => Opened::Unix(UnixStream::connect(path)?),
            });
        }
        self.opened.as_mut().ok_or_else(|| io::Error::other("it is not open"))
    }

    fn rotate_before(&mut self, length: u64) -> io::Result<()> {
        // `reopen` closes the file, so its size is unknown until it is open again. After SIGHUP, the path may still
        // lead to the same file.
        self.open()?;
        let Rotation { max_size, keep } = self.rotation;
        let (FlowLogTarget::File(path), Some(Opened::File(open))) = (&self.target, &self.opened) else {
            return Ok(());
        };
        let Some(size) = open.size else { return Ok(()) };
        if max_size > 0 && size > 0 && size.saturating_add(length) > max_size {
            // If another program has renamed or removed the file, the agent rotates nothing, and only begins a new
            // file.
            if open.is_at(path) {
                rotate(path, keep)?;
            }
            self.reopen();
        }
        Ok(())
    }
}

impl Opened {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.write_all(bytes).and_then(|()| stdout.flush()),
            Self::Unix(socket) => socket.write_all(bytes),
            Self::File(OpenFile { file, size, .. }) => {
                file.write_all(bytes)?;
                if let Some(size) = size {
                    *size += bytes.len() as u64;
                }
                Ok(())
            }
        }
    }
}

/// The mode of a flow log: the agent writes, and a log collector in the group of the folder (setgid) reads.
pub(crate) const MODE: u32 = 0o640;

fn open_file(path: &Path) -> io::Result<OpenFile> {
    let file = OpenOptions::new().append(true).create(true).mode(MODE).open(path)?;
    let found = file.metadata()?;
    let size = found.is_file().then_some(found.len());
    Ok(OpenFile { file, id: (found.dev(), found.ino()), size })
}

/// Path of the rotated file with this number: `FILE.1` is the latest one.
pub(crate) fn rotated(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

fn rotate(path: &Path, keep: u32) -> io::Result<()> {
    if keep == 0 {
        return fs::remove_file(path);
    }
    for number in (1..keep).rev() {
        let from = rotated(path, number);
        if from.exists() {
            fs::rename(from, rotated(path, number + 1))?;
        }
    }
    fs::rename(path, rotated(path, 1))
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, os::unix::net::UnixListener};

    use super::*;

    const NEVER: Rotation = Rotation { max_size: 0, keep: 5 };

    fn file(folder: &Path, rotation: Rotation) -> (PathBuf, Sink) {
        let path = folder.join("flows.json");
        (path.clone(), Sink::new(FlowLogTarget::File(path), rotation))
    }

    fn text(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn targets_are_written_as_they_are_read() {
        for (text, target) in [
            ("-", FlowLogTarget::Stdout),
            ("/var/log/flows.json", FlowLogTarget::File("/var/log/flows.json".into())),
            ("unix:/run/flows.sock", FlowLogTarget::Unix("/run/flows.sock".into())),
        ] {
            assert_eq!((FlowLogTarget::from(text), target.to_string()), (target, text.to_owned()));
        }
    }

    #[test]
    fn line_break_after_an_error_survives_the_pause() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut sink) = file(folder.path(), NEVER);
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        sink.write(b"torn\n").unwrap_err();
        fs::remove_file(&path).unwrap();
        sink.write(b"lost\n").unwrap_err();
        sink.reopen();
        sink.write(b"whole\n").unwrap();
        sink.write(b"next\n").unwrap();
        assert_eq!(text(&path), "\nwhole\nnext\n");
    }

    #[test]
    fn full_file_is_rotated_and_the_oldest_one_goes() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut sink) = file(folder.path(), Rotation { max_size: 10, keep: 2 });
        for line in ["line 1\n", "line 2\n", "line 3\n", "a very long line\n"] {
            sink.write(line.as_bytes()).unwrap();
        }
        assert_eq!(text(&path), "a very long line\n");
        assert_eq!([1, 2].map(|number| text(&rotated(&path, number))), ["line 3\n", "line 2\n"]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn rotation_of_a_removed_file_loses_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut sink) = file(folder.path(), Rotation { max_size: 10, keep: 2 });
        for line in ["line 1\n", "line 2\n", "line 3\n"] {
            sink.write(line.as_bytes()).unwrap();
        }
        fs::remove_file(&path).unwrap();
        sink.write(b"line 4\n").unwrap();
        assert_eq!(text(&path), "line 4\n");
        assert_eq!([1, 2].map(|number| text(&rotated(&path, number))), ["line 2\n", "line 1\n"]);
    }

    #[test]
    fn size_of_a_file_of_an_earlier_agent_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut sink) = file(folder.path(), Rotation { max_size: 10, keep: 1 });
        fs::write(&path, "earlier\n").unwrap();
        sink.check().unwrap();
        sink.write(b"later\n").unwrap();
        assert_eq!((text(&rotated(&path, 1)), text(&path)), ("earlier\n".to_owned(), "later\n".to_owned()));
    }

    #[test]
    fn size_of_a_reopened_file_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut sink) = file(folder.path(), Rotation { max_size: 10, keep: 1 });
        sink.write(b"earlier\n").unwrap();
        sink.reopen();
        sink.write(b"later\n").unwrap();
        assert_eq!((text(&rotated(&path, 1)), text(&path)), ("earlier\n".to_owned(), "later\n".to_owned()));
    }

    #[test]
    fn renamed_file_is_reopened() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut sink) = file(folder.path(), NEVER);
        sink.write(b"1\n").unwrap();
        let moved = folder.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        sink.write(b"2\n").unwrap();
        sink.follow();
        sink.write(b"3\n").unwrap();
        assert_eq!((text(&moved), text(&path)), ("1\n2\n".to_owned(), "3\n".to_owned()));
    }

    #[test]
    fn file_that_cannot_be_opened_is_reported_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/flows.json");
        let error = Sink::new(FlowLogTarget::File(path), NEVER).check().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn full_disk_is_an_error_and_a_socket_gets_the_next_line_whole() {
        let mut sink = Sink::new(FlowLogTarget::File("/dev/full".into()), NEVER);
        assert_eq!(sink.write(b"line\n").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(sink.write(b"line\n").is_err(), "it waits before it tries again");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut sink = Sink::new(FlowLogTarget::Unix(path.clone()), NEVER);
        assert!(sink.write(b"lost\n").is_err());
        let listener = UnixListener::bind(&path).unwrap();
        sink.reopen();
        sink.write(b"line\n").unwrap();
        drop(sink);
        let mut received = String::new();
        listener.accept().unwrap().0.read_to_string(&mut received).unwrap();
        assert_eq!(received, "line\n");
    }
}
