//! Runs the programs of other software, such as BIRD and qemu, in the background.

use std::{
    fs::File,
    io,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
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
    /// The process cannot be started.
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

    /// The id of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the process runs.
    ///
    /// # Errors
    /// The status cannot be read.
    pub fn is_running(&mut self) -> io::Result<bool> {
        Ok(self.status()?.is_none())
    }

    /// The status with which the process has ended; `None` while it runs.
    ///
    /// # Errors
    /// The status cannot be read.
    pub fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
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
