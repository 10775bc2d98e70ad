//! Tests of the source on a real file system.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use lb_core::{
    model::{Change, SourceEvent},
    plan::Contents,
};
use tempfile::TempDir;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

use super::{options, service};
use crate::manifests::{Condition, ManifestsError, ManifestsOptions, Published, run};

/// The running source, on a temporary folder.
struct Source {
    root: TempDir,
    events: mpsc::Receiver<SourceEvent>,
    problems: watch::Receiver<Vec<Condition>>,
    task: JoinHandle<Result<(), ManifestsError>>,
}

impl Source {
    /// Starts the source with these files, each as name and text, and waits until they are read; returns the changes.
    async fn start(files: &[(&str, &str)]) -> (Self, Vec<String>) {
        let root = TempDir::new().unwrap();
        fs::create_dir(root.path().join("dir")).unwrap();
        for (file, text) in files {
            fs::write(root.path().join("dir").join(file), text).unwrap();
        }
        let options = ManifestsOptions { dir: root.path().join("dir"), ..options() };
        let (sender, events) = mpsc::channel(64);
        let (problem_sender, problems) = watch::channel(Vec::new());
        let task = tokio::spawn(async move {
            let published = Published { problems: problem_sender, ..Published::default() };
            run(options, &Contents::default(), sender, published).await
        });
        let mut source = Self { root, events, problems, task };
        let mut changes = Vec::new();
        loop {
            match source.event(Duration::from_secs(5)).await {
                Some(SourceEvent::Changes(some)) => changes.extend(some.iter().map(show)),
                Some(SourceEvent::Synchronised) => return (source, changes),
                Some(SourceEvent::Complete) => panic!("complete before it was synchronised"),
                Some(other) => panic!("{other:?} of a folder"),
                None => panic!("never synchronised; {:?}", source.problems.borrow()),
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join("dir").join(name)
    }

    async fn event(&mut self, limit: Duration) -> Option<SourceEvent> {
        tokio::time::timeout(limit, self.events.recv()).await.ok().flatten()
    }

    /// The next event other than [`SourceEvent::Complete`].
    async fn event_of_objects(&mut self, limit: Duration) -> Option<SourceEvent> {
        match self.event(limit).await {
            Some(SourceEvent::Complete) => self.event(limit).await,
            other => other,
        }
    }

    /// The next changes, as text; they must come within a second.
    async fn changes(&mut self) -> Vec<String> {
        match self.event_of_objects(Duration::from_secs(1)).await {
            Some(SourceEvent::Changes(changes)) => changes.iter().map(show).collect(),
            other => panic!("no changes within a second but {other:?}; {:?}", self.problems.borrow()),
        }
    }

    async fn assert_quiet(&mut self, limit: Duration) {
        let event = self.event_of_objects(limit).await;
        assert_eq!(event, None);
    }

    async fn problem(&mut self) -> String {
        let some = self.problems.wait_for(|problems| !problems.is_empty());
        let some = tokio::time::timeout(Duration::from_secs(1), some)
            .await
            .expect("a problem within a second")
            .unwrap();
        some[0].to_string()
    }
}

/// A change as text: `name:port` for an existing Service, `-name` for a deleted one.
fn show(change: &Change) -> String {
    match change {
        Change::Service(name, Some(service)) => format!("{}:{}", name.name, service.ports[0].port),
        Change::Service(name, None) | Change::EndpointSlice(name, None) => format!("-{}", name.name),
        Change::EndpointSlice(name, Some(_)) => name.name.to_string(),
    }
}

fn rename(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    fs::rename(from, to).unwrap();
}

#[tokio::test]
async fn folder_is_complete_once_no_document_is_bad() {
    let limit = Duration::from_secs(1);
    let (mut source, _) = Source::start(&[("a.yaml", &service("a", 1))]).await;
    assert_eq!(source.event(limit).await, Some(SourceEvent::Complete));

    let (mut source, _) = Source::start(&[("a.yaml", &service("a", 1)), ("bad.yaml", "{")]).await;
    assert_eq!(source.event(Duration::from_millis(300)).await, None);
    fs::write(source.path("b.yaml"), service("b", 2)).unwrap();
    assert!(matches!(source.event(limit).await, Some(SourceEvent::Changes(_))));
    fs::remove_file(source.path("bad.yaml")).unwrap();
    assert_eq!(source.event(limit).await, Some(SourceEvent::Complete));
    fs::write(source.path("bad.yaml"), "{").unwrap();
    source.assert_quiet(Duration::from_millis(300)).await;
}

#[tokio::test]
async fn every_good_object_is_emitted_before_synchronised() {
    let (mut source, changes) =
        Source::start(&[("a.yaml", &service("a", 1)), ("bad.yaml", "{"), ("b.txt", "")]).await;
    assert_eq!(changes, ["a:1"]);
    assert!(
        source.problem().await.ends_with("invalid YAML: unclosed bracket '{' at line 1, column 1"),
        "{}",
        source.problem().await
    );
    source.assert_quiet(Duration::from_millis(300)).await;
}

#[tokio::test]
async fn empty_folder_synchronises() {
    assert_eq!(Source::start(&[]).await.1, [""; 0]);
}

#[tokio::test]
async fn missing_folder_is_an_error() {
    let options = ManifestsOptions { dir: "/nowhere/manifests".into(), ..options() };
    let (sender, _events) = mpsc::channel(1);
    let error = run(options, &Contents::default(), sender, Published::default()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read the folder of manifests /nowhere/manifests: No such file or directory (os error 2); create it, or \
         give another one with --manifests"
    );
}

#[tokio::test]
async fn files_are_followed_as_they_are_created_written_renamed_and_removed() {
    let (mut source, _) = Source::start(&[]).await;
    fs::write(source.path("a.yaml"), service("a", 1)).unwrap();
    assert_eq!(source.changes().await, ["a:1"]);
    let start = Instant::now();
    fs::write(source.path("a.yaml"), service("a", 2)).unwrap();
    assert_eq!(source.changes().await, ["a:2"]);
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    fs::write(source.path(".new"), service("a", 3)).unwrap();
    rename(source.path(".new"), source.path("a.yaml"));
    assert_eq!(source.changes().await, ["a:3"]);
    rename(source.path("a.yaml"), source.path("b.yaml"));
    source.assert_quiet(Duration::from_millis(300)).await;
    rename(source.path("b.yaml"), source.path("b.off"));
    assert_eq!(source.changes().await, ["-a"]);
    rename(source.path("b.off"), source.path("b.yaml"));
    assert_eq!(source.changes().await, ["a:3"]);
    fs::remove_file(source.path("b.yaml")).unwrap();
    assert_eq!(source.changes().await, ["-a"]);
}

#[tokio::test]
async fn editor_that_renames_the_file_first_removes_no_object() {
    let (mut source, _) = Source::start(&[("a.yaml", &service("a", 1))]).await;
    rename(source.path("a.yaml"), source.path("a.yaml~"));
    fs::write(source.path("a.yaml"), service("a", 2)).unwrap();
    fs::remove_file(source.path("a.yaml~")).unwrap();
    assert_eq!(source.changes().await, ["a:2"]);
    source.assert_quiet(Duration::from_millis(300)).await;
}

#[tokio::test]
async fn half_written_file_is_not_read_before_it_is_closed() {
    use std::io::Write as _;
    let text = format!("{}---\n{}", service("a", 1), service("b", 1));
    let (mut source, _) = Source::start(&[("a.yaml", &text)]).await;
    let mut file = fs::File::create(source.path("a.yaml")).unwrap();
    file.write_all(service("a", 2).as_bytes()).unwrap();
    source.assert_quiet(Duration::from_millis(200)).await;
    file.write_all(format!("---\n{}", service("b", 2)).as_bytes()).unwrap();
    drop(file);
    assert_eq!(source.changes().await, ["a:2", "b:2"]);
}

#[tokio::test]
async fn stalled_write_keeps_objects_it_has_not_reached() {
    use std::io::Write as _;
    let text = format!("{}---\n{}---\n{}", service("a", 1), service("b", 1), service("c", 1));
    let (mut source, _) = Source::start(&[("a.yaml", &text)]).await;
    let mut file = fs::File::create(source.path("a.yaml")).unwrap();
    file.write_all(service("a", 2).as_bytes()).unwrap();
    assert_eq!(source.changes().await, ["a:2"], "what is written takes effect within a second");
    assert!(source.problem().await.contains("is open for writing"));
    source.assert_quiet(Duration::from_secs(1)).await;
    file.write_all(format!("---\n{}", service("b", 2)).as_bytes()).unwrap();
    drop(file);
    assert_eq!(source.changes().await, ["-c", "b:2"], "once the file is closed, missing objects are removed");
    source.problems.wait_for(Vec::is_empty).await.unwrap();
}

#[tokio::test]
async fn file_kept_open_is_read_within_a_second() {
    use std::io::Write as _;
    let (mut source, _) = Source::start(&[]).await;
    let mut file = fs::File::create(source.path("a.yaml")).unwrap();
    file.write_all(service("a", 1).as_bytes()).unwrap();
    assert_eq!(source.changes().await, ["a:1"]);
}

#[tokio::test]
async fn swapped_config_map_is_followed() {
    let (mut source, _) = Source::start(&[]).await;
    for version in ["..1", "..2"] {
        fs::create_dir(source.path(version)).unwrap();
        let port = if version == "..1" { 1 } else { 2 };
        fs::write(source.path(version).join("a.yaml"), service("a", port)).unwrap();
    }
    symlink("..1", source.path("..data")).unwrap();
    symlink("..data/a.yaml", source.path("a.yaml")).unwrap();
    assert_eq!(source.changes().await, ["a:1"]);
    symlink("..2", source.path("..data_tmp")).unwrap();
    let start = Instant::now();
    rename(source.path("..data_tmp"), source.path("..data"));
    fs::remove_dir_all(source.path("..1")).unwrap();
    assert_eq!(source.changes().await, ["a:2"]);
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
}

#[tokio::test]
async fn file_behind_a_symlink_is_followed() {
    let (mut source, _) = Source::start(&[]).await;
    let target = source.root.path().join("target");
    fs::write(&target, service("a", 1)).unwrap();
    symlink(&target, source.path("a.yaml")).unwrap();
    assert_eq!(source.changes().await, ["a:1"]);
    fs::write(&target, service("a", 2)).unwrap();
    assert_eq!(source.changes().await, ["a:2"]);
    fs::remove_file(&target).unwrap();
    assert!(source.problem().await.contains("a.yaml: is a link that leads nowhere"));
    source.assert_quiet(Duration::from_millis(300)).await;
    fs::write(&target, service("a", 3)).unwrap();
    assert_eq!(source.changes().await, ["a:3"]);
}

#[tokio::test]
async fn removed_folder_keeps_its_state_until_it_returns() {
    let (mut source, _) = Source::start(&[("a.yaml", &service("a", 1)), ("b.yaml", &service("b", 1))]).await;
    fs::remove_dir_all(source.path("")).unwrap();
    assert!(source.problem().await.contains("dir: cannot be read: No such file or directory"));
    source.assert_quiet(Duration::from_millis(500)).await;
    let next = source.root.path().join("next");
    fs::create_dir(&next).unwrap();
    fs::write(next.join("a.yaml"), service("a", 2)).unwrap();
    rename(next, source.root.path().join("dir"));
    assert_eq!(source.changes().await, ["-b", "a:2"]);
    fs::write(source.path("a.yaml"), service("a", 3)).unwrap();
    assert_eq!(source.changes().await, ["a:3"]);
}

#[tokio::test]
async fn swapped_folder_is_followed() {
    let (mut source, _) = Source::start(&[("a.yaml", &service("a", 1))]).await;
    let next = source.root.path().join("next");
    fs::create_dir(&next).unwrap();
    fs::write(next.join("a.yaml"), service("a", 2)).unwrap();
    rename(source.root.path().join("dir"), source.root.path().join("old"));
    rename(next, source.root.path().join("dir"));
    assert_eq!(source.changes().await, ["a:2"]);
    fs::write(source.path("a.yaml"), service("a", 3)).unwrap();
    assert_eq!(source.changes().await, ["a:3"]);
}

#[tokio::test]
async fn named_pipe_never_blocks_the_source() {
    let (mut source, _) = Source::start(&[]).await;
    let path = std::ffi::CString::new(source.path("p.yaml").to_str().unwrap()).unwrap();
    // SAFETY: the path is a valid C string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    assert!(
        source
            .problem()
            .await
            .ends_with("p.yaml: cannot be read: it is not a regular file; what it defined stays in force")
    );
    fs::write(source.path("a.yaml"), service("a", 1)).unwrap();
    assert_eq!(source.changes().await, ["a:1"]);
}

#[tokio::test]
async fn source_ends_when_the_receiver_is_dropped() {
    let (source, _) = Source::start(&[]).await;
    drop(source.events);
    tokio::time::timeout(Duration::from_secs(1), source.task).await.unwrap().unwrap().unwrap();
}
