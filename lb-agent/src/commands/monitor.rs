//! The command `monitor`: prints events of the BPF programs as they arrive.

use std::{
    io::{self, IsTerminal as _, Write as _},
    os::fd::AsFd,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use jiff::Timestamp;
use lb_common::{Event, ServiceKey, conntrack::Tuple};
use lb_core::plan::ServiceLabels;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime,
    signal::unix::{SignalKind, signal},
    time,
};

use super::event_view::{EventFilter, EventView, Style, line};
use crate::cli::{MonitorArgs, TableOrJson};
use lb_datapath::{DatapathError, Monitor, Pinned, ServiceMaps, device_name, monotonic_nanoseconds};

/// Interval at which the monitor renews its request for events.
const PULSE: Duration = Duration::from_secs(1);

/// Maximum number of events that the monitor handles before it checks for signals and renews its request again.
const AT_ONCE: u32 = 1000;

/// Prints events until a signal arrives or standard output is closed.
pub(super) fn run(pinned: &Pinned, args: MonitorArgs) -> anyhow::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let MonitorArgs { service, client, verdict, output } = args;
    let printer = Printer {
        maps: pinned.maps().clone(),
        filter: EventFilter { service, client, verdict },
        output,
        style: style(),
    };
    runtime.block_on(listen(pinned.monitor()?, &printer))
}

/// Colour if standard output is a terminal and `NO_COLOR` is unset or empty.
fn style() -> Style {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if io::stdout().is_terminal() && !unwanted { Style::Coloured } else { Style::Plain }
}

async fn listen(monitor: Monitor, printer: &Printer) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut pulse = time::interval(PULSE);
    // SAFETY: the monitor owns the descriptor of its ring buffer, and keeps it open as long as the monitor exists.
    let mut monitor = unsafe { AsyncFd::register_with_interest(monitor, Interest::READABLE) }
        .map_err(|refused| refused.into_parts().1)?;
    let mut lost = 0;
    loop {
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = pulse.tick() => {
                if is_closed(&io::stdout())? {
                    return Ok(());
                }
                monitor.get_ref().extend()?;
                lost = tell_lost(monitor.get_ref(), lost)?;
            }
            ready = monitor.readable_mut() => {
                let mut ready = ready?;
                // Under a flood there is always another event, so the loop also ends after `AT_ONCE` events: signals
                // and the pulse must not wait for longer.
                for _ in 0..AT_ONCE {
                    let Some(event) = ready.get_inner_mut().next_event() else {
                        ready.clear_ready();
                        break;
                    };
                    if !printer.print(&event)? {
                        return Ok(());
                    }
                }
            }
        }
    }
}

/// Whether the reader of the output is gone. A write would also fail then. But while no event passes the filter, the
/// monitor writes nothing: it would run on, and no other monitor could start.
fn is_closed(output: &impl AsFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(output, PollFlags::empty())];
    match poll(&mut polled, Some(&Timespec::default())) {
        // The signal ends the monitor.
        Err(Errno::INTR) => return Ok(false),
        result => result?,
    };
    Ok(polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP))
}

/// Prints to standard error how many events were lost since the total was `before`, if any. Returns the new total.
fn tell_lost(monitor: &Monitor, before: u64) -> Result<u64, DatapathError> {
    let lost = monitor.lost()?;
    if lost > before {
        eprintln!(
            "{} events were lost, {lost} in total: they arrive faster than monitor prints them",
            lost - before
        );
    }
    Ok(lost)
}

struct Printer {
    maps: ServiceMaps,
    filter: EventFilter,
    output: TableOrJson,
    style: Style,
}

impl Printer {
    /// Prints the event if it passes the filter. Returns false if standard output is closed.
    fn print(&self, event: &Event) -> anyhow::Result<bool> {
        let view = view(&self.maps, event)?;
        if !self.filter.lets_through(&view) {
            return Ok(true);
        }
        let text = match self.output {
            TableOrJson::Table => line(&view, self.style),
            TableOrJson::Json => serde_json::to_string(&view)?,
        };
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Makes the view of an event, with the labels of its Service read from the maps.
pub(super) fn view(maps: &ServiceMaps, event: &Event) -> Result<EventView, DatapathError> {
    Ok(EventView::new(event, wall_clock(event.time), labels(maps, event)?.as_ref(), device_name))
}

/// The labels of the event's Service. They are read for each event, because Services change.
fn labels(maps: &ServiceMaps, event: &Event) -> Result<Option<ServiceLabels>, DatapathError> {
    let Tuple { destination, destination_port, protocol, .. } = event.from;
    let id = match event.service {
        0 => maps.service_at(&ServiceKey::new(destination, destination_port, protocol))?,
        id => Some(id),
    };
    id.map_or(Ok(None), |id| maps.labels_of(id))
}

/// Converts nanoseconds of the monotonic clock to wall-clock time.
fn wall_clock(nanoseconds: u64) -> Timestamp {
    let age = Duration::from_nanos(monotonic_nanoseconds().saturating_sub(nanoseconds));
    SystemTime::now().checked_sub(age).and_then(|time| time.try_into().ok()).unwrap_or_else(Timestamp::now)
}
