//! Watches the file of `--config`. Like kube-proxy, the agent ends when the file changes, so that its supervisor
//! restarts it. Unlike kube-proxy, the agent ends only if a setting changes and the new configuration is valid.

use std::{future, path::PathBuf, time::Duration};

use tokio::{fs, time};
use tracing::info;

use super::named_files;
use crate::{
    config::{Config, ConfigError},
    log_few::warn_new,
};

/// Interval between two reads of the file. A change takes effect once two successive reads return the same text: before
/// that, the program that writes the file may not have finished.
const PERIOD: Duration = Duration::from_secs(1);

/// The configuration file of a running agent.
pub struct ConfigFile {
    /// Path that `--config` gives; `None` without `--config`.
    pub path: Option<PathBuf>,
    /// Reads the configuration that a restart would use.
    pub read: Box<dyn Fn() -> Result<Config, ConfigError> + Send + Sync>,
}

impl ConfigFile {
    /// Waits until the file holds a valid configuration other than `running`; returns the file's path. Waits forever
    /// if there is no file, or the file is not a regular one.
    pub(super) async fn changed(self, running: &Config) -> PathBuf {
        self.changed_within(running, PERIOD).await
    }

    async fn changed_within(self, running: &Config, period: Duration) -> PathBuf {
        // Watches only a regular file: a pipe, for example, can be read only once.
        let Some(path) = self.path.filter(|path| path.is_file()) else { return future::pending().await };
        let mut last = fs::read(&path).await.ok();
        // The loop also checks the text of the first read, because the file may have changed while the agent started.
        let mut judged = None;
        let mut refusals = Vec::new();
        loop {
            time::sleep(period).await;
            let now = fs::read(&path).await.ok();
            let settled = now == last;
            last = now;
            if !settled || judged.as_ref() == Some(&last) {
                continue;
            }
            let is_first = judged.replace(last.clone()).is_none();
            let refusal = match (self.read)().map_err(anyhow::Error::from) {
                Ok(config) if config == *running => {
                    if !is_first {
                        info!("{} has changed, but no setting in it", path.display());
                    }
                    None
                }
                Ok(config) => {
                    let Err(error) = named_files::check(&config) else { return path };
                    // Checks again in the next period even if this file does not change: a file that it names may
                    // change.
                    judged = None;
                    Some(error)
                }
                Err(error) => Some(error),
            };
            let refusal = refusal.map(|error| {
                format!(
                    "the agent goes on as it was started, because the new configuration is invalid: {error:#}"
                )
            });
            warn_new(&mut refusals, refusal.as_slice());
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::cli::{KernelArgs, RunArgs};

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
            let kernel = KernelArgs { config: Some(path), ..KernelArgs::default() };
            Config::new(kernel, RunArgs { manifests: Some("/".into()), ..RunArgs::default() })
        }

        /// Whether the agent would end after the file gets this text.
        async fn ends_with(&self, text: &str) -> bool {
            let path = self.dir.path().join("config");
            let file = path.clone();
            let file = ConfigFile { path: Some(path), read: Box::new(move || Self::read(file.clone())) };
            let changes = async {
                time::sleep(FAST * 5).await;
                // Replaces the file by a rename, as the kubelet also does.
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
    async fn agent_ends_only_if_a_setting_changes() {
        let bed = Bed::new("node-name: a\n");
        assert!(!bed.ends_with("node-name: a\n").await, "the same");
        assert!(!bed.ends_with("# a comment\nnode-name: a\n").await, "nothing that counts");
        assert!(!bed.ends_with("node-nmae: b\n").await, "a mistake");
        for unusable in [
            "flow-log: /nonexistent/flows.json\n",
            "web-bind-address: 127.0.0.1:8088\nweb-token-file: /nonexistent/token\n",
            "web-bind-address: 192.0.2.1:8088\n",
        ] {
            assert!(!bed.ends_with(&format!("node-name: b\n{unusable}")).await, "{unusable}");
        }
        assert!(!bed.ends_with("node-name: a\n").await, "back");
        assert!(bed.ends_with("node-name: b\n").await, "another name");
    }

    #[tokio::test]
    async fn change_during_start_ends_the_agent() {
        let bed = Bed::new("node-name: a\n");
        std::fs::write(bed.dir.path().join("config"), "node-name: b\n").unwrap();
        assert!(bed.ends_with("node-name: b\n").await);
    }

    #[tokio::test]
    async fn no_watch_without_a_file() {
        let file = ConfigFile { path: None, read: Box::new(|| unreachable!()) };
        let running = Bed::new("node-name: a\n").running;
        assert!(timeout(LONG, file.changed_within(&running, FAST)).await.is_err());
    }
}
