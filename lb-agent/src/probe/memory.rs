//! The unhealthy targets, in a file for the next agent. Without the file, a restarted agent would send new flows to
//! unhealthy endpoints until it has probed them. The maps do not show which endpoints are unhealthy: if all endpoints
//! of a Service are unhealthy, the maps contain all of them. The file is in `/run`, so that it is gone after a restart
//! of the machine.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lb_core::probe::{Check, Memory, Target, Timing, check::Probe};
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

/// The unhealthy targets that an agent keeps for the next one, each with what that agent must know about it.
pub(crate) type Remembered = BTreeMap<Target, Memory>;

/// An unhealthy target, as an element of the file's JSON array.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    address: IpAddr,
    port: u16,
    check: String,
    #[serde(default)]
    proxy_header: bool,
    interval: Duration,
    timeout: Duration,
    healthy: u8,
    unhealthy: u8,
    since: u64,
    failure: String,
}

/// The file that keeps unhealthy targets for the next agent.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    /// Whether the last write of the file failed.
    is_refused: bool,
}

impl File {
    pub(super) const fn new(path: PathBuf) -> Self {
        Self { path, is_refused: false }
    }

    /// Writes the unhealthy targets to the file. Logs only the first of several errors in a row; after an error, the
    /// file keeps its earlier content.
    pub(super) fn write(&mut self, unhealthy: &Remembered) {
        let lines: Vec<Line> = unhealthy.iter().map(line).collect();
        let written = serde_json::to_vec(&lines).map_err(io::Error::other).and_then(|text| {
            let new = self.path.with_extension("new");
            self.path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&new, text)?;
            fs::rename(new, &self.path)
        });
        if let Err(error) = &written
            && !self.is_refused
        {
            warn!(
                file = %self.path.display(), %error,
                "cannot keep the unhealthy endpoints for the next agent, which will use them until it has probed them"
            );
        }
        self.is_refused = written.is_err();
    }
}

/// Reads the unhealthy targets of the earlier agent from the file; empty if it cannot be read.
pub(super) fn read(path: &Path) -> Remembered {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) => {
            debug!(file = %path.display(), %error, "no unhealthy endpoints of an earlier agent");
            return Remembered::new();
        }
    };
    match serde_json::from_slice::<Vec<Line>>(&text) {
        Ok(lines) => lines.into_iter().filter_map(remembered).collect(),
        Err(error) => {
            warn!(file = %path.display(), %error, "cannot read the unhealthy endpoints of the earlier agent: all count as usable");
            Remembered::new()
        }
    }
}

fn line((target, memory): (&Target, &Memory)) -> Line {
    let Check { timing, proxy_header, .. } = *target.check;
    Line {
        address: target.address,
        port: target.port,
        check: target.check.to_string(),
        proxy_header,
        interval: timing.interval,
        timeout: timing.timeout,
        healthy: timing.healthy,
        unhealthy: timing.unhealthy,
        since: memory.since,
        failure: memory.failure.clone(),
    }
}

/// Converts an element of the file; `None` for a kind of check that this version does not know.
fn remembered(line: Line) -> Option<(Target, Memory)> {
    let Line { address, port, check, proxy_header, interval, timeout, healthy, unhealthy, since, failure } =
        line;
    let Probe { kind, port: fixed } = check.parse().ok()?;
    let timing = Timing { interval, timeout, healthy, unhealthy };
    let check = Arc::new(Check { kind, port: fixed, timing, proxy_header });
    Some((Target { address, port, check }, Memory { since, failure }))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn unhealthy_targets_are_read_as_they_were_written() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("new/unhealthy");
        assert_eq!(read(&path), Remembered::new());
        let memory = Memory { since: 7, failure: "status 500".into() };
        let all: Remembered = ["tcp", "http://:80/x", "https:///", "grpc", "dns://:53/a.b"]
            .into_iter()
            .zip(1..)
            .map(|(text, port)| {
                let Probe { kind, port: fixed } = text.parse().unwrap();
                let proxy_header = port == 1;
                let check = Check { kind, port: fixed, timing: Timing::default(), proxy_header };
                let target = Target { address: "fd00::1".parse().unwrap(), port, check: Arc::new(check) };
                (target, memory.clone())
            })
            .collect();
        File::new(path.clone()).write(&all);
        assert_eq!(read(&path), all);
        fs::write(&path, "[{").unwrap();
        assert_eq!(read(&path), Remembered::new());
    }
}
