//! The terminal in raw mode. `top` restores the terminal when `top` returns, panics, or receives SIGHUP, SIGINT,
//! SIGQUIT or SIGTERM.

use std::{
    io, process,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::Context as _;
use ratatui::{
    DefaultTerminal, Frame,
    crossterm::{cursor::Show, execute},
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM},
    iterator::Signals,
    low_level,
};

/// Serialises writes to the terminal: a signal must not restore it while a frame is drawn.
static TURN: Mutex<()> = Mutex::new(());

/// The terminal in raw mode. Dropping this value restores the terminal.
pub(super) struct Screen(DefaultTerminal);

impl Screen {
    pub(super) fn take() -> anyhow::Result<Self> {
        give_back_at_signals().context("cannot listen for signals")?;
        let _turn = turn();
        // `ratatui::try_init` also installs a panic hook that restores the terminal.
        match ratatui::try_init() {
            Ok(terminal) => Ok(Self(terminal)),
            Err(error) => {
                give_back();
                Err(error).context("cannot take over the terminal")
            }
        }
    }

    pub(super) fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>)) -> anyhow::Result<()> {
        let _turn = turn();
        self.0.draw(picture).context("cannot draw").map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The panic hook has already restored the terminal, and its message must stay.
        if !thread::panicking() {
            let _turn = turn();
            give_back();
        }
    }
}

/// Starts a thread that restores the terminal before a signal ends the process. The thread that reads keys cannot do
/// so: its read blocks once the terminal is closed.
fn give_back_at_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    thread::Builder::new().spawn(move || {
        for signal in signals.forever() {
            let _turn = turn();
            give_back();
            if low_level::emulate_default_handler(signal).is_err() {
                process::exit(128 + signal);
            }
        }
    })?;
    Ok(())
}

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the terminal. Ignores errors, because the terminal may be gone.
fn give_back() {
    drop(ratatui::try_restore());
    drop(execute!(io::stdout(), Show));
}
