//! Forgetting connections: those whose time is over, and UDP flows and sockets whose backend has gone.

use std::{collections::BTreeSet, convert::Infallible, sync::Arc, time::Duration};

use anyhow::Context as _;
use lb_common::{
    Address, ServiceKey,
    conntrack::{Flow, Pressure, Tuple},
    protocol,
};
use lb_core::{
    family::Family,
    stale_udp::{ServedUdp, StaleFrontends},
};
use tokio::{
    sync::{mpsc, watch},
    task,
    time::{self, Instant},
};
use tracing::{debug, info, warn};

use super::{shortage::Tally, state::State, traffic::ServiceTraffic};
use crate::metrics::Metrics;
use lb_datapath::{Conntrack, DatapathError, GcReport, Recount, UdpSockets, grace};

/// From one sweep to the next, and when the map is nearly full.
const CALM: Duration = Duration::from_secs(5);
const PRESSED: Duration = Duration::from_secs(1);

/// Entries that a flow may take, see docs/maps.md.
const ENTRIES: u64 = 4;

/// Whom the sweeps tell what they have found.
#[derive(Debug)]
pub(super) struct Observers {
    pub(super) metrics: Arc<Metrics>,
    pub(super) state: Arc<State>,
    /// The counters that flows have.
    pub(super) counters: watch::Sender<BTreeSet<u32>>,
    /// What services do, if that is wanted.
    pub(super) traffic: Option<ServiceTraffic>,
}

/// What tells which UDP flows and sockets are stale.
#[derive(Debug)]
pub(super) struct Udp {
    pub(super) sockets: UdpSockets,
    /// Frontends that have lost endpoints, once the kernel has lost them, too.
    pub(super) moved: mpsc::UnboundedReceiver<StaleFrontends>,
    /// What serves them.
    pub(super) served: ServedUdp,
}

/// Runs for ever. `tally` says how many flows have begun.
pub(super) async fn run(
    conntrack: Conntrack,
    udp: Udp,
    mut tally: watch::Receiver<Tally>,
    observers: Observers,
) -> anyhow::Result<Infallible> {
    let Udp { sockets, mut moved, served } = udp;
    let mut fill = Fill::default();
    let mut recount = Recount::default();
    let mut trouble = Trouble::default();
    let mut next_sweep = Instant::now() + CALM;
    // What is left to do: packets first, since after the grace period there no program connects sockets either.
    let (mut packets_of, mut sockets_of) = (StaleFrontends::new(), StaleFrontends::new());
    loop {
        tokio::select! {
            () = time::sleep_until(next_sweep) => {}
            frontends = moved.recv() => packets_of.extend(frontends.context("the writer has ended")?),
            looked = tally.changed() => {
                looked.context("nobody counts packets any more")?;
                if !fill.may_be_pressed(*tally.borrow_and_update(), conntrack.table().capacity()) {
                    continue;
                }
                next_sweep = next_sweep.min(Instant::now());
            }
        }
        while let Ok(more) = moved.try_recv() {
            packets_of.extend(more);
        }
        let mut result = Ok(());
        if !packets_of.is_empty() {
            let stale = Stale { frontends: packets_of.clone(), served: served.clone() };
            result = forget(conntrack.clone(), stale, &observers.metrics).await?;
            if result.is_ok() {
                sockets_of.append(&mut packets_of);
            }
        }
        if !sockets_of.is_empty() {
            let stale = Stale { frontends: sockets_of.clone(), served: served.clone() };
            let ended = end_sockets(sockets.clone(), stale).await?;
            if ended.is_ok() {
                sockets_of.clear();
            }
            result = result.and(ended);
        }
        // However often backends move: what is due must not be put off.
        if next_sweep <= Instant::now() {
            fill.tally = *tally.borrow();
            let swept = sweep(conntrack.clone(), &observers, &mut fill, &mut recount).await?;
            if swept.is_ok() {
                observers.counters.send_replace(recount.in_flows().clone());
            }
            result = result.and(swept);
            next_sweep = Instant::now() + if fill.pressure == Pressure::NONE { CALM } else { PRESSED };
        }
        trouble.note(result);
    }
}

/// What cannot be forgotten, said once.
#[derive(Debug, Default)]
struct Trouble(Option<String>);

impl Trouble {
    fn note(&mut self, result: Result<(), DatapathError>) {
        let error = result.err().map(|error| error.to_string());
        if let Some(error) = &error
            && self.0.as_ref() != Some(error)
        {
            warn!("connections cannot be forgotten: {error}; trying again");
        }
        self.0 = error;
    }
}

/// How full the map was when it was last swept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Fill {
    pressure: Pressure,
    entries: usize,
    /// What was counted then.
    tally: Tally,
}

impl Fill {
    /// Whether flows that have begun since may have filled the map. A flood does that long before the next sweep in calm.
    /// (Under pressure sweeps are frequent enough.)
    fn may_be_pressed(&self, tally: Tally, capacity: u32) -> bool {
        let begun = tally.begun.saturating_sub(self.tally.begun).saturating_mul(ENTRIES);
        let entries = usize::try_from(begun).unwrap_or(usize::MAX).saturating_add(self.entries);
        let refused = tally.refused > self.tally.refused;
        self.pressure == Pressure::NONE && (refused || Pressure::of(entries, capacity) > Pressure::NONE)
    }
}

async fn sweep(
    conntrack: Conntrack,
    observers: &Observers,
    fill: &mut Fill,
    recount: &mut Recount,
) -> anyhow::Result<Result<(), DatapathError>> {
    let capacity = conntrack.table().capacity();
    let mut counting = std::mem::take(recount);
    let traffic = observers.traffic.clone();
    let (swept, counted) = task::spawn_blocking(move || {
        let mut ledger = traffic.as_ref().map(ServiceTraffic::ledger);
        let swept = conntrack.expire_and_recount(Conntrack::now(), &mut counting, ledger.as_deref_mut());
        (swept, counting)
    })
    .await?;
    *recount = counted;
    let sweep = match swept {
        Ok(sweep) => sweep,
        Err(error) => return Ok(Err(error)),
    };
    let GcReport { entries, expired, evicted, restored, orphans, pressure, .. } = sweep;
    let left = sweep.entries_left();
    observers.metrics.set_map("CONNTRACK", left, capacity);
    observers.metrics.swept(sweep.flows_left(), expired, evicted);
    debug!(entries, expired, evicted, restored, orphans, "collected expired connections");
    let text = (pressure > Pressure::NONE).then(|| {
        format!(
            "CONNTRACK is nearly full, {entries} of {capacity} entries: connections that are half open or over are forgotten \
             early, and new ones are dropped when it is full; start anew with a larger --max-connections (after `lb-agent \
             cleanup`), or find out who opens so many (`lb-agent conntrack list`)"
        )
    });
    let now = std::time::Instant::now();
    observers.state.with_shortages(|shortages| shortages.lasts("CONNTRACK", text.as_deref(), now));
    (fill.pressure, fill.entries) = (pressure, left);
    Ok(Ok(()))
}

/// Forgets UDP flows to backends that their frontend does not have any more, once no program can make new ones.
async fn forget(
    conntrack: Conntrack,
    stale: Stale,
    metrics: &Metrics,
) -> anyhow::Result<Result<(), DatapathError>> {
    let started = Instant::now();
    let forgotten = task::spawn_blocking(move || {
        grace::wait()?;
        let mut of_family = [0, 0];
        conntrack.purge(|key, flow| {
            let is_stale = stale.is_flow(key, flow);
            let family = Family::of(key.destination.into());
            of_family[family as usize] += usize::from(is_stale);
            is_stale
        })?;
        Ok(of_family)
    });
    Ok(forgotten.await?.map(|of_family| {
        metrics.conntrack_reconciled(started.elapsed(), of_family);
        let flows: usize = of_family.iter().sum();
        if flows > 0 {
            info!(flows, "forgot UDP flows to backends that are gone");
        }
    }))
}

/// Ends UDP sockets that are connected to backends that their frontend does not have any more.
async fn end_sockets(sockets: UdpSockets, stale: Stale) -> anyhow::Result<Result<(), DatapathError>> {
    let ended = task::spawn_blocking(move || {
        sockets.destroy(|vip, backend| {
            stale.is(&ServiceKey::new(vip.address, vip.port, protocol::UDP), (backend.address, backend.port))
        })
    });
    Ok(ended.await?.map(|sockets| {
        if sockets > 0 {
            info!(sockets, "ended UDP sockets whose backend is gone");
        }
    }))
}

/// What is stale: whatever leads from one of these frontends to an endpoint that does not serve it, at the moment when that is
/// asked. Others may have come since they have moved.
struct Stale {
    frontends: StaleFrontends,
    served: ServedUdp,
}

impl Stale {
    fn is_flow(&self, key: &Tuple, flow: &Flow) -> bool {
        let frontend = ServiceKey::new(key.destination, key.destination_port, key.protocol);
        self.is(&frontend, (flow.to.destination, flow.to.destination_port))
    }

    fn is(&self, frontend: &ServiceKey, endpoint: (Address, u16)) -> bool {
        self.frontends.contains(frontend) && self.served.has_lost(frontend, endpoint)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use lb_common::{Address, conntrack::Tick, protocol};

    use super::*;

    fn ip(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn a_flood_is_noticed_before_the_next_sweep_in_calm() {
        let fill = Fill { entries: 100, tally: Tally { begun: 1000, refused: 5 }, ..Fill::default() };
        let pressed = |begun, refused| fill.may_be_pressed(Tally { begun, refused }, 1600);
        assert!(!pressed(1000, 5));
        assert!(!pressed(1275, 5), "1,200 of 1,600 entries at most");
        assert!(pressed(1300, 5));
        assert!(pressed(1000, 6), "something was refused");
        assert!(
            !Fill { pressure: Pressure::MOST, ..fill }
                .may_be_pressed(Tally { begun: 9000, refused: 9 }, 1600)
        );
    }

    #[test]
    fn only_flows_of_the_frontend_to_other_backends_are_stale() {
        let frontend = ServiceKey::new(ip("10.96.0.53"), 53, protocol::UDP);
        let other = ServiceKey::new(ip("10.96.0.54"), 53, protocol::UDP);
        let serving = Arc::new(BTreeSet::from([(ip("10.1.0.5"), 5353)]));
        let served = [(frontend, Arc::clone(&serving)), (other, serving)].into_iter().collect();
        let those = Stale { frontends: StaleFrontends::from([frontend]), served };
        let stale = |vip: &str, backend: &str, port| {
            let key = Tuple::new(ip("192.0.2.1"), ip(vip), 4000, 53, protocol::UDP);
            let to = Tuple { destination: ip(backend), destination_port: port, ..key };
            those.is_flow(&key, &Flow::new(&key, &to, 1, 0, Tick(0)))
        };
        assert!(stale("10.96.0.53", "10.1.0.6", 5353));
        assert!(stale("10.96.0.53", "10.1.0.5", 53));
        assert!(!stale("10.96.0.53", "10.1.0.5", 5353));
        assert!(!stale("10.96.0.54", "10.1.0.6", 5353), "another frontend");
    }
}
