//! The terminal while it is `top`'s. However that ends, the terminal is then as it was before.

use std::{
    io,
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

/// Whose turn it is to write to the terminal: a signal must not give it back in the middle of a picture.
static TURN: Mutex<()> = Mutex::new(());

/// A terminal that was taken over; given back when dropped, by a signal that ends the process, and before the message of a panic.
pub(super) struct Screen(DefaultTerminal);

impl Screen {
    pub(super) fn take() -> anyhow::Result<Self> {
        give_back_at_signals().context("cannot listen for signals")?;
        let _turn = turn();
        // Gives it back also where somebody panics.
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
        // The hook for panics has done it already, and what it wrote since must stay.
        if !thread::panicking() {
            let _turn = turn();
            give_back();
        }
    }
}

/// Ends the process at a signal as that would end it anyway, but for the terminal. (In a thread: the one that reads keys does not come
/// back where the terminal is gone.)
fn give_back_at_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    thread::Builder::new().spawn(move || {
        for signal in signals.forever() {
            let _turn = turn();
            give_back();
            low_level::emulate_default_handler(signal).unwrap_or_default();
        }
    })?;
    Ok(())
}

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A terminal that is gone takes nothing back, and there is nobody left to tell.
fn give_back() {
    ratatui::try_restore().and_then(|()| execute!(io::stdout(), Show)).unwrap_or_default();
}
