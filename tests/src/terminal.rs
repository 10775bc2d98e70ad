//! Runs programs that need a terminal, in a detached session of tmux (`cargo xtask setup` installs it).

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::{agent::run, netns::Netns, wait_for};

/// A program in a terminal of its own; dropping this ends the program.
#[derive(Debug)]
pub struct Terminal {
    socket: PathBuf,
}

impl Terminal {
    /// Starts a shell command in `netns`, in a terminal with this number of columns and rows. `folder` gets the socket
    /// of tmux.
    pub fn start(netns: &Netns, folder: &Path, (columns, rows): (u16, u16), command: &str) -> Result<Self> {
        let terminal = Self { socket: folder.join("tmux") };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let mut tmux = netns.command("tmux");
        tmux.env("LC_ALL", "C.UTF-8").env_remove("TMUX").arg("-S").arg(&terminal.socket);
        tmux.args(["-u", "-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &rows, command]);
        run(&mut tmux)?;
        Ok(terminal)
    }

    fn tmux(&self, arguments: &[&str]) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.env("LC_ALL", "C.UTF-8").env_remove("TMUX").arg("-S").arg(&self.socket).args(arguments);
        tmux
    }

    /// The text that is on the screen now.
    pub fn screen(&self) -> Result<String> {
        let output =
            run(&mut self.tmux(&["-u", "capture-pane", "-p"])).context("reading the terminal's screen")?;
        Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
    }

    /// A property of the terminal, given in the format language of tmux, such as `#{alternate_on}`.
    pub fn state(&self, of: &str) -> Result<String> {
        let output = run(&mut self.tmux(&["display-message", "-p", of]))
            .context("asking tmux for the terminal's state")?;
        Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
    }

    /// Types keys, which have the names that tmux gives them.
    pub fn press(&self, keys: &[&str]) -> Result<()> {
        run(&mut self.tmux(&[&["send-keys"], keys].concat())).context("typing").map(drop)
    }

    /// Whether the command ends within `limit`; the terminal ends with the command.
    pub fn ends_within(&self, limit: Duration) -> bool {
        wait_for(limit, || self.screen().is_err().then_some(())).is_some()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // If the command has ended, the tmux server has already exited.
        self.tmux(&["kill-server"]).output().map(drop).unwrap_or_default();
    }
}
