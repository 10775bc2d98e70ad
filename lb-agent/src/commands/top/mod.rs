//! The command `top`: traffic of Services and backends, refreshed at an interval. It reads the pinned maps and works
//! without an agent.

mod model;
mod screen;
mod view;

use std::{
    io::{self, IsTerminal as _},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use ratatui::crossterm::event::{self, KeyCode, KeyEvent, KeyModifiers};

use self::{
    model::{Column, Key, Model, Next, Row, Sample},
    screen::Screen,
};
use super::{
    output::{print_json, print_table, table},
    service_view,
};
use crate::cli::{TableOrJson, TopArgs};
use lb_datapath::{Conntrack, DatapathError, Ledger, Pinned};

/// Maximum time between two walks through the flow table, well below the time that an entry stays in the table: see
/// [`lb_core::traffic`].
const WALK: Duration = Duration::from_secs(5);

/// Shows the traffic on the terminal until the user quits. With `--once`, `-o json` or no terminal, prints it once.
pub(super) fn run(pinned: &Pinned, args: &TopArgs) -> anyhow::Result<()> {
    let interval = Duration::from_secs_f64(args.interval);
    let mut source = Source { pinned, ledger: Ledger::default(), walked: Instant::now() };
    let mut model = Model::default();
    // Rates are differences between two samples; this is the first sample.
    model.update(source.sample()?, interval);
    if args.once || args.output == TableOrJson::Json || !io::stdout().is_terminal() {
        let started = Instant::now();
        source.wait(interval)?;
        model.update(source.sample()?, started.elapsed());
        return print_once(&model, args.output);
    }
    look(&mut Screen::take()?, &mut model, &mut source, interval)
}

/// Reads samples of the counters from the maps.
struct Source<'a> {
    pinned: &'a Pinned,
    ledger: Ledger,
    /// When the ledger was last brought up to date.
    walked: Instant,
}

impl Source<'_> {
    /// Waits, and keeps the ledger up to date meanwhile.
    fn wait(&mut self, time: Duration) -> Result<(), DatapathError> {
        let begun = Instant::now();
        loop {
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(WALK));
            self.keep_up()?;
        }
    }

    /// Brings the ledger up to date, if an update is due. An update only at the end of a long interval would miss flows
    /// that begin and expire within the interval.
    fn keep_up(&mut self) -> Result<(), DatapathError> {
        if self.walked.elapsed() >= WALK { self.walk() } else { Ok(()) }
    }

    fn walk(&mut self) -> Result<(), DatapathError> {
        let conntrack: &Conntrack = self.pinned.conntrack();
        conntrack.tally(&mut self.ledger)?;
        self.walked = Instant::now();
        Ok(())
    }

    fn sample(&mut self) -> Result<Sample, DatapathError> {
        self.walk()?;
        let contents = self.pinned.maps().contents()?;
        let services = service_view::services(&contents);
        let backends = services
            .iter()
            .flat_map(|service| service.backends.iter().map(|b| (service.id, (b.address, b.port).into())));
        Ok(Sample {
            backends: backends.collect(),
            names: contents.service_labels.into_iter().map(|(id, labels)| (id, labels.name)).collect(),
            tallies: self.ledger.backends().map(|(counted, tally)| (*counted, *tally)).collect(),
        })
    }
}

/// Redraws the screen after each terminal event and each new sample, until the user quits.
fn look(
    screen: &mut Screen,
    model: &mut Model,
    source: &mut Source<'_>,
    interval: Duration,
) -> anyhow::Result<()> {
    let mut sampled = Instant::now();
    loop {
        screen.draw(|frame| view::draw(frame, model))?;
        let left = interval.saturating_sub(sampled.elapsed()).min(WALK);
        if event::poll(left).context("cannot read keys")? {
            let event = event::read().context("cannot read keys")?;
            if event.as_key_press_event().is_some_and(|pressed| press(model, pressed) == Next::Quit) {
                return Ok(());
            }
        }
        if sampled.elapsed() >= interval {
            let sample = source.sample()?;
            model.update(sample, sampled.elapsed());
            sampled = Instant::now();
        }
        source.keep_up()?;
    }
}

/// Applies a key press to the model. In raw mode Ctrl-C arrives as a key.
fn press(model: &mut Model, pressed: KeyEvent) -> Next {
    if pressed.modifiers.contains(KeyModifiers::CONTROL) && pressed.code == KeyCode::Char('c') {
        return Next::Quit;
    }
    key(pressed.code).map_or(Next::Stay, |key| model.press(key))
}

fn key(code: KeyCode) -> Option<Key> {
    #[expect(clippy::wildcard_enum_match_arm, reason = "keyboards have many keys")]
    match code {
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        KeyCode::Enter => Some(Key::Enter),
        KeyCode::Esc => Some(Key::Escape),
        KeyCode::Backspace => Some(Key::Backspace),
        KeyCode::Char(letter) => Some(Key::Letter(letter)),
        _ => None,
    }
}

/// A row of the JSON output of `top`: a service port, with its backends.
#[derive(serde::Serialize)]
struct Entry {
    #[serde(flatten)]
    row: Row,
    backends: Vec<Row>,
}

fn print_once(model: &Model, output: TableOrJson) -> anyhow::Result<()> {
    let rows = model.rows();
    if output == TableOrJson::Json {
        let entry = |row: Row| Entry { backends: model.backend_rows(row.service), row };
        return print_json(&rows.into_iter().map(entry).collect::<Vec<_>>());
    }
    let mut table = table(&Column::ALL.map(Column::head));
    for row in rows {
        table.add_row(Column::ALL.map(|column| view::text(&row, column)));
    }
    print_table(&table)
}
