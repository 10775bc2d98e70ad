//! Reads the folder of manifests. Recognises manifests by their names, and distinguishes missing files from unreadable
//! ones.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    path::Path,
};

use super::folder::{Content, Edit};

const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Whether a file with this name is a manifest: the name has one of [`EXTENSIONS`], and does not begin with `.` or `#`.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) && !name.as_bytes().starts_with(b".")
        // Emacs begins the names of its autosave files with `#`.
        && !name.as_bytes().starts_with(b"#")
}

/// Names of the manifests that the folder contains.
pub(super) fn list(dir: &Path) -> io::Result<BTreeSet<OsString>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        if is_manifest(&name) {
            names.insert(name);
        }
    }
    Ok(names)
}

/// Reads a file of the folder into an edit.
pub(super) fn edit(dir: &Path, name: &OsStr) -> Edit {
    let content = match text(&dir.join(name)) {
        Ok(Some(text)) => Content::Text(text),
        Ok(None) => Content::Gone,
        Err(error) if error.kind() == io::ErrorKind::NotFound => gone_or_dangling(&dir.join(name), &error),
        Err(error) => Content::Unreadable(format!("cannot be read: {error}; what it defined stays in force")),
    };
    Edit { file: name.to_owned(), content }
}

/// The content of a missing file: `Gone`, or `Unreadable` for a symbolic link without a target.
fn gone_or_dangling(path: &Path, error: &io::Error) -> Content {
    match fs::symlink_metadata(path) {
        Ok(_) => {
            let message = format!("is a link that leads nowhere: {error}; what it defined stays in force");
            Content::Unreadable(message)
        }
        Err(_) => Content::Gone,
    }
}

/// Reads a regular file; returns `None` for a folder, which kubectl also ignores.
fn text(path: &Path) -> io::Result<Option<String>> {
    // Opens without blocking, because a named pipe may have the name of a manifest.
    let mut file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Ok(None);
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let line =
            1 + memchr::memchr_iter(b'\n', &error.as_bytes()[..error.utf8_error().valid_up_to()]).count();
        io::Error::new(io::ErrorKind::InvalidData, format!("line {line} is not UTF-8 text"))
    })?;
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_are_recognised_by_their_names() {
        for name in ["a.yaml", "b.yml", "c.json", "d.e.yaml", "a~.yaml"] {
            assert!(is_manifest(OsStr::new(name)), "{name}");
        }
        for name in [
            "a",
            "a.txt",
            ".a.yaml",
            "..data",
            "a.yaml~",
            "a.yaml.swp",
            ".a.yaml.swp",
            "#a.yaml#",
            "4913",
            "a.yaml.bak",
        ] {
            assert!(!is_manifest(OsStr::new(name)), "{name}");
        }
        assert!(!is_manifest(OsStr::new("#a.yaml")));
    }
}
