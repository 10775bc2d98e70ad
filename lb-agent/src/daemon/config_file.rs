//! What happens when the file of `--config` changes: as kube-proxy, the agent ends, to be started again with it by what
//! keeps it running. Other than kube-proxy it does so only for settings that differ and can be used.

use std::{future, path::PathBuf, time::Duration};

use tokio::{fs, time};
use tracing::{info, warn};

use crate::config::{Config, ConfigError};

/// How often the file is read. It must be the same twice: whoever writes it may not have finished.
const PERIOD: Duration = Duration::from_secs(1);

/// The file of a running agent.
pub struct ConfigFile {
    /// Where it is; `None` where there is none, and nothing to watch.
    pub path: Option<PathBuf>,
    /// What holds when the agent starts now.
    pub read: Box<dyn Fn() -> Result<Config, ConfigError> + Send + Sync>,
}

impl ConfigFile {
    /// Waits until the file leads to another configuration than the one that runs; its path.
    pub(super) async fn changed(self, running: &Config) -> PathBuf {
        self.changed_within(running, PERIOD).await
    }

    async fn changed_within(self, running: &Config, period: Duration) -> PathBuf {
        // A pipe has nothing more to say.
        let Some(path) = self.path.filter(|path| path.is_file()) else { return future::pending().await };
        let mut last = fs::read(&path).await.ok();
        // What is there now may be newer than what runs: the agent has loaded its programs since it read it.
        let mut judged = None;
        loop {
            time::sleep(period).await;
            let now = fs::read(&path).await.ok();
            let settled = now == last;
            last = now;
            if !settled || judged.as_ref() == Some(&last) {
                continue;
            }
            let is_first = judged.replace(last.clone()).is_none();
            match (self.read)() {
                Ok(config) if config == *running => {
                    if !is_first {
                        info!("{} has changed, but no setting", path.display());
                    }
                }
                Ok(_) => return path,
                Err(error) => warn!("the agent goes on as it was started: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::cli::{PlaceArgs, RunArgs};

    const FAST: Duration = Duration::from_millis(2);
    const LONG: Duration = Duration::from_millis(200);

    struct Bed {
        dir: tempfile::TempDir,
        running: Config,
    }

    impl Bed {
        fn new(text: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("config"), text).unwrap();
            let running = Self::read(dir.path().join("config")).unwrap();
            Self { dir, running }
        }

        fn read(path: PathBuf) -> Result<Config, ConfigError> {
            let place = PlaceArgs { config: Some(path), ..PlaceArgs::default() };
            Config::new(place, RunArgs { manifests: Some("/".into()), ..RunArgs::default() })
        }

        /// Whether the agent would end when the file gets this text.
        async fn ends_with(&self, text: &str) -> bool {
            let path = self.dir.path().join("config");
            let file = path.clone();
            let file = ConfigFile { path: Some(path), read: Box::new(move || Self::read(file.clone())) };
            let changes = async {
                time::sleep(FAST * 5).await;
                // As the kubelet does it, and careful people.
                std::fs::write(self.dir.path().join("new"), text).unwrap();
                std::fs::rename(self.dir.path().join("new"), self.dir.path().join("config")).unwrap();
                future::pending::<()>().await;
            };
            let ends = async {
                tokio::select! {
                    _path = file.changed_within(&self.running, FAST) => {}
                    () = changes => {}
                }
            };
            timeout(LONG, ends).await.is_ok()
        }
    }

    #[tokio::test]
    async fn the_agent_ends_for_other_settings_only() {
        let bed = Bed::new("node-name: a\n");
        assert!(!bed.ends_with("node-name: a\n").await, "the same");
        assert!(!bed.ends_with("# a comment\nnode-name: a\n").await, "nothing that counts");
        assert!(!bed.ends_with("node-nmae: b\n").await, "a mistake");
        assert!(!bed.ends_with("node-name: a\n").await, "back");
        assert!(bed.ends_with("node-name: b\n").await, "another name");
    }

    #[tokio::test]
    async fn a_change_while_the_agent_starts_counts() {
        let bed = Bed::new("node-name: a\n");
        std::fs::write(bed.dir.path().join("config"), "node-name: b\n").unwrap();
        assert!(bed.ends_with("node-name: b\n").await);
    }

    #[tokio::test]
    async fn without_a_file_there_is_nothing_to_watch() {
        let file = ConfigFile { path: None, read: Box::new(|| unreachable!()) };
        let running = Bed::new("node-name: a\n").running;
        assert!(timeout(LONG, file.changed_within(&running, FAST)).await.is_err());
    }
}
