//! Runs the programs of other software, such as BIRD and qemu, in the background.

use std::{
    fs::File,
    io,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};

use crate::cleanup::Cleanup;

/// A running process. Dropping this kills the process.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    cleanup: Option<Cleanup>,
}

impl Daemon {
    /// Starts the process.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let started = Cleanup::spawn(command.stdin(Stdio::null()));
        let (child, cleanup) = started.with_context(|| format!("starting {command:?} (is it installed?)"))?;
        Ok(Self { child, cleanup: Some(cleanup) })
    }

    /// Starts the process, with its standard output and standard error in the file `log`.
    ///
    /// # Errors
    /// The file cannot be written, or the process cannot be started.
    pub fn start_with_log(command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        Self::start(command.stdout(file.try_clone()?).stderr(file))
    }

    /// Whether the process runs.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn is_running(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.kill().and_then(|()| self.child.wait()).is_ok()
            && let Some(cleanup) = self.cleanup.take()
        {
            cleanup.disarm();
        }
    }
}
