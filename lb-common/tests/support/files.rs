//! The files of this repository.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// All files below a folder whose names end with `suffix`, without build results and hidden folders.
pub(crate) fn paths(folder: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of the repository");
    entries
        .map(|entry| entry.expect("an entry").path())
        .flat_map(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                paths(&path, suffix)
            } else if path.is_file() && name.ends_with(suffix) {
                vec![path]
            } else {
                Vec::new()
            }
        })
        .collect()
}
