//! Garbage collection (GC) of the flow table. Also deletes UDP flows and closes UDP sockets whose backend is gone, and
//! deletes masqueraded connections whose source address the node has lost.

use std::{collections::BTreeSet, convert::Infallible, sync::Arc, time::Duration};

use anyhow::Context as _;
use lb_common::{
    Address, Endpoint, ServiceKey,
    conntrack::{Flow, Pressure, Tuple},
    protocol,
};
use lb_core::{
    family::Family,
    model::NodeAddresses,
    stale_udp::{ServedUdp, StaleFrontends},
};
use tokio::{
    sync::{mpsc, watch},
    task,
    time::{self, Instant},
};
use tracing::{debug, info, warn};

use super::{
    ends::Ends, published::Published, shortage_watch::FlowCounts, state::State, traffic::ServiceTraffic,
};
use crate::{flow_log::FlowLog, metrics::Metrics};
use lb_datapath::{
    Conntrack, DatapathError, FilterFill, FlowWalk, GcReport, NodeSockets, Recount, Routes, grace,
};

/// Time from a GC pass until the next one is due: `CALM` normally, `PRESSED` while the flow table is nearly full. A
/// flood makes the next pass due earlier, see [`Fill::may_be_pressed`].
const CALM: Duration = Duration::from_secs(5);
const PRESSED: Duration = Duration::from_secs(1);

/// Maximum number of flow table entries that one connection takes, see docs/maps.md.
const ENTRIES: u64 = 4;

/// The receivers of the results of each GC pass.
#[derive(Debug)]
pub(super) struct Observers {
    pub(super) metrics: Arc<Metrics>,
    pub(super) state: Arc<State>,
    /// The slots of the map `ACTIVE` (flow counters) that existing flows and sockets refer to.
    pub(super) counters: watch::Sender<BTreeSet<u32>>,
    /// Traffic counters of Services; `None` with `--service-metrics none`.
    pub(super) traffic: Option<ServiceTraffic>,
    /// The flow log; `None` without `--flow-log`.
    pub(super) flow_log: Option<FlowLog>,
}

/// UDP frontends whose flows and sockets the task must check.
#[derive(Clone, Debug, Default)]
pub(super) struct UdpFrontends {
    /// Frontends that may have stale flows, and stale sockets.
    pub(super) stale: StaleFrontends,
    /// Frontends that Services have gained while this agent ran.
    pub(super) begun: StaleFrontends,
}

/// State for deleting UDP flows and closing UDP sockets whose backend is gone.
#[derive(Debug)]
pub(super) struct Udp {
    pub(super) sockets: NodeSockets,
    /// The UDP frontends that have lost endpoints. The writer sends them after it has applied the steps.
    pub(super) stale_udp: mpsc::UnboundedReceiver<UdpFrontends>,
    /// The present endpoints of each UDP frontend.
    pub(super) served: Published<ServedUdp>,
}

/// Runs GC, and after each pass ends the connections that `ends` selects. Runs GC early if `flow_counts` shows that the
/// table may be nearly full. Between passes, deletes stale UDP flows, and closes stale UDP sockets. When `addresses`
/// (those of the node) change, deletes masqueraded connections whose source address is gone.
pub(super) async fn run(
    conntrack: Conntrack,
    (udp, ends): (Udp, Ends),
    mut addresses: watch::Receiver<NodeAddresses>,
    mut flow_counts: watch::Receiver<FlowCounts>,
    observers: Observers,
) -> anyhow::Result<Infallible> {
    let Udp { sockets, mut stale_udp, served } = udp;
    let mut gc = GarbageCollection::new(conntrack, (sockets, served), ends, observers);
    gc.filter.update(&gc.conntrack, &gc.observers.metrics).await;
    let mut log = ErrorLog::default();
    loop {
        tokio::select! {
            () = time::sleep_until(gc.next_run) => {}
            changed = addresses.changed() => {
                changed.context("the node task has ended")?;
                gc.checks_addresses = true;
            }
            frontends = stale_udp.recv() => {
                gc.note(frontends.context("the writer has ended")?);
            }
            looked = flow_counts.changed() => {
                looked.context("the task that counts packets has ended")?;
                if !gc.schedule_if_pressed(*flow_counts.borrow_and_update()) {
                    continue;
                }
            }
        }
        while let Ok(more) = stale_udp.try_recv() {
            gc.note(more);
        }
        let mut result = gc.end_stale().await?;
        // Checked after every event, so that frequent changes of addresses or backends do not delay GC.
        if gc.next_run <= Instant::now() {
            let flow_counts = *flow_counts.borrow();
            result = result.and(gc.run(flow_counts).await?);
        }
        log.note(result);
    }
}

/// The state of GC between its passes: what the last pass has found, and what the task must check next.
struct GarbageCollection {
    conntrack: Conntrack,
    sockets: NodeSockets,
    served: Published<ServedUdp>,
    ends: Ends,
    observers: Observers,
    fill: Fill,
    filter: RebuiltFilter,
    recount: Recount,
    /// When the next GC pass is due.
    next_run: Instant,
    /// Whether the node may have lost addresses: set when a list of addresses arrives, including the first, because the
    /// node may have lost some while no agent ran.
    checks_addresses: bool,
    /// Frontends of which the task must delete the stale flows, and close the stale sockets afterwards. The task first
    /// waits for a grace period, so that no program still connects a socket to an earlier backend.
    packets_of: StaleFrontends,
    /// Frontends whose stale flows the task has deleted, and whose stale sockets it must close next.
    sockets_of: StaleFrontends,
    /// Frontends that Services have gained since the task last closed sockets.
    begun: StaleFrontends,
}

impl GarbageCollection {
    fn new(
        conntrack: Conntrack,
        (sockets, served): (NodeSockets, Published<ServedUdp>),
        ends: Ends,
        observers: Observers,
    ) -> Self {
        Self {
            conntrack,
            sockets,
            served,
            ends,
            observers,
            fill: Fill::default(),
            filter: RebuiltFilter::default(),
            recount: Recount::default(),
            next_run: Instant::now() + CALM,
            checks_addresses: false,
            packets_of: StaleFrontends::new(),
            sockets_of: StaleFrontends::new(),
            begun: StaleFrontends::new(),
        }
    }

    /// Adds frontends to those whose flows and sockets the task must check.
    fn note(&mut self, UdpFrontends { stale, begun }: UdpFrontends) {
        self.packets_of.extend(stale);
        self.begun.extend(begun);
    }

    /// If the flow table may be nearly full, makes the next GC pass due and returns true.
    fn schedule_if_pressed(&mut self, flow_counts: FlowCounts) -> bool {
        let is_pressed = self.fill.may_be_pressed(flow_counts, self.conntrack.table().capacity());
        if is_pressed {
            self.next_run = self.next_run.min(Instant::now());
        }
        is_pressed
    }

    /// Deletes masqueraded connections whose source address the node has lost, and UDP flows whose backend is gone.
    /// Closes UDP sockets whose backend is gone.
    async fn end_stale(&mut self) -> anyhow::Result<Result<(), DatapathError>> {
        let mut result = Ok(());
        if self.checks_addresses {
            result = delete_masqueraded(self.conntrack.clone()).await?;
            self.checks_addresses = result.is_err();
        }
        if !self.packets_of.is_empty() {
            let stale = self.stale(&self.packets_of);
            let deleted = delete_flows(self.conntrack.clone(), stale, &self.observers.metrics).await?;
            if deleted.is_ok() {
                self.sockets_of.append(&mut self.packets_of);
            }
            result = result.and(deleted);
        }
        if !self.sockets_of.is_empty() {
            let stale = self.stale(&self.sockets_of);
            let closed = close_sockets(self.sockets.clone(), stale).await?;
            if closed.is_ok() {
                self.sockets_of.clear();
                self.begun.clear();
            }
            result = result.and(closed);
        }
        Ok(result)
    }

    fn stale(&self, frontends: &StaleFrontends) -> Stale {
        Stale { frontends: frontends.clone(), begun: self.begun.clone(), served: self.served.clone() }
    }

    /// Runs a GC pass, ends the connections whose idle or drain timeout is over, rebuilds the filter if that is due,
    /// and schedules the next pass. `flow_counts` are the present counters.
    async fn run(&mut self, flow_counts: FlowCounts) -> anyhow::Result<Result<(), DatapathError>> {
        self.fill.flow_counts = flow_counts;
        let metrics = &self.observers.metrics;
        let swept = sweep(self.conntrack.clone(), &self.observers, &mut self.fill, &mut self.recount).await?;
        if swept.is_ok() {
            self.observers.counters.send_replace(self.recount.in_flows().clone());
        }
        // Ends connections only after GC: if the flow table is nearly full, GC must first make room for new flows.
        let ended = self.ends.pass(self.conntrack.clone(), metrics).await?;
        self.filter.update(&self.conntrack, metrics).await;
        self.next_run = Instant::now() + if self.fill.pressure == Pressure::NONE { CALM } else { PRESSED };
        Ok(swept.and(ended))
    }
}

/// The fill of the map `FILTER` after its last rebuild.
#[derive(Debug)]
struct RebuiltFilter(FilterFill);

impl Default for RebuiltFilter {
    fn default() -> Self {
        Self(FilterFill::EMPTY)
    }
}

impl RebuiltFilter {
    /// Rebuilds the filter if that is due, and reports its fill. After a failure the programs are only slower, and the
    /// next GC pass tries again.
    async fn update(&mut self, conntrack: &Conntrack, metrics: &Metrics) {
        let (conntrack, rebuilt) = (conntrack.clone(), self.0);
        let work = task::spawn_blocking(move || {
            let result = conntrack.filter().rebuild_if_due(rebuilt);
            (result, conntrack.filter().fill())
        });
        let Ok((result, fill)) = work.await else { return };
        metrics.set_map("FILTER", fill.bits as usize, FilterFill::CAPACITY);
        match result {
            Ok(Some(rebuilt)) => {
                debug!(bits = rebuilt.bits, false_positives = rebuilt.false_positives, "rebuilt the filter");
                self.0 = rebuilt;
            }
            Ok(None) => {}
            Err(error) => warn!("cannot rebuild the filter: {error}; retrying"),
        }
    }
}

/// Remembers the last error, so that a repeated error is logged only once.
#[derive(Debug, Default)]
struct ErrorLog(Option<String>);

impl ErrorLog {
    fn note(&mut self, result: Result<(), DatapathError>) {
        let error = result.err().map(|error| error.to_string());
        if let Some(error) = &error
            && self.0.as_ref() != Some(error)
        {
            warn!("cannot delete connections: {error}; retrying");
        }
        self.0 = error;
    }
}

/// The findings of the last GC pass: how full the flow table was before the pass (`pressure`), and how many entries the
/// pass has left (`entries`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Fill {
    pressure: Pressure,
    entries: usize,
    /// The counters of new and refused flows before the last GC pass.
    flow_counts: FlowCounts,
}

impl Fill {
    /// Whether new flows may have nearly filled the flow table since the last GC pass, or were refused: a flood can
    /// fill the table before the next pass. False if the last pass already found the table nearly full, because GC then
    /// runs often enough.
    fn may_be_pressed(&self, flow_counts: FlowCounts, capacity: u32) -> bool {
        let begun = flow_counts.begun.saturating_sub(self.flow_counts.begun).saturating_mul(ENTRIES);
        let entries = usize::try_from(begun).unwrap_or(usize::MAX).saturating_add(self.entries);
        let refused = flow_counts.refused > self.flow_counts.refused;
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
    let (traffic, flow_log) = (observers.traffic.clone(), observers.flow_log.clone());
    let (swept, counted) = task::spawn_blocking(move || {
        let mut ledger = traffic.as_ref().map(ServiceTraffic::ledger);
        let mut pass = flow_log.as_ref().map(FlowLog::pass);
        let pass = pass.as_mut().map(|pass| -> &mut dyn FlowWalk { pass });
        let swept =
            conntrack.expire_and_recount(Conntrack::now(), &mut counting, ledger.as_deref_mut(), pass);
        (swept, counting)
    })
    .await?;
    *recount = counted;
    let sweep = match swept {
        Ok(sweep) => sweep,
        Err(error) => return Ok(Err(error)),
    };
    let GcReport { entries, expired, evicted, restored, orphans, pressure, overflowed, .. } = sweep;
    let left = sweep.entries_left();
    observers.metrics.set_map("FLOWS", left.saturating_sub(overflowed), capacity);
    observers.metrics.set_map("CONNTRACK", overflowed, capacity);
    observers.metrics.swept(sweep.flows_left(), sweep.expired_connections, evicted);
    debug!(entries, expired, evicted, restored, orphans, "garbage collection of connections");
    let text = (pressure > Pressure::NONE).then(|| {
        format!(
            "the flow table is nearly full, {entries} entries where --max-connections allows for {capacity}: half-open and \
             closed connections are evicted, and new ones may be dropped. Find the clients that open so many \
             (`lb-agent conntrack list`), or run `lb-agent cleanup`, which cuts all connections, and restart with a larger \
             --max-connections"
        )
    });
    let now = std::time::Instant::now();
    observers.state.with_shortages(|shortages| shortages.lasts("CONNTRACK", text.as_deref(), now));
    (fill.pressure, fill.entries) = (pressure, left);
    Ok(Ok(()))
}

/// Deletes UDP flows from a frontend to a backend that the frontend has lost. First waits for a grace period, because
/// programs may still create such flows.
async fn delete_flows(
    conntrack: Conntrack,
    stale: Stale,
    metrics: &Metrics,
) -> anyhow::Result<Result<(), DatapathError>> {
    let started = Instant::now();
    let deleted = task::spawn_blocking(move || {
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
    Ok(deleted.await?.map(|of_family| {
        metrics.conntrack_reconciled(started.elapsed(), of_family);
        let flows: usize = of_family.iter().sum();
        if flows > 0 {
            info!(flows, "deleted UDP flows to removed backends");
        }
    }))
}

/// Deletes connections that are masqueraded with an address that the node has lost, because replies to that address can
/// no longer arrive. The kernel's masquerading does the same. First waits for a grace period, because programs may
/// still use the address.
async fn delete_masqueraded(conntrack: Conntrack) -> anyhow::Result<Result<(), DatapathError>> {
    let deleted = task::spawn_blocking(move || {
        grace::wait()?;
        let mut routes = Routes::open()?;
        let mut lost = BTreeSet::new();
        for source in conntrack.masquerade_sources()? {
            if !routes.is_local(source)? {
                lost.insert(source);
            }
        }
        let connections = if lost.is_empty() { 0 } else { conntrack.purge_masqueraded(&lost)? };
        Ok((connections, lost))
    });
    Ok(deleted.await?.map(|(connections, lost)| {
        if connections > 0 {
            info!(
                connections,
                ?lost,
                "deleted connections masqueraded with addresses that the node has lost"
            );
        }
    }))
}

/// Closes UDP sockets that are connected through a frontend to a backend that the frontend has lost, and UDP sockets
/// that processes connected to the address and port of a frontend before a Service had them.
async fn close_sockets(sockets: NodeSockets, stale: Stale) -> anyhow::Result<Result<(), DatapathError>> {
    let closed = task::spawn_blocking(move || sockets.destroy_udp(|vip, peer| stale.is_socket(vip, peer)));
    Ok(closed.await?.map(|sockets| {
        if sockets > 0 {
            info!(sockets, "closed UDP sockets: their backends are gone, or their Services are new");
        }
    }))
}

/// Selects stale flows and sockets: those that lead from one of `frontends` to an endpoint that does not serve this
/// frontend at the time of the check.
struct Stale {
    frontends: StaleFrontends,
    begun: StaleFrontends,
    served: Published<ServedUdp>,
}

impl Stale {
    fn is_flow(&self, key: &Tuple, flow: &Flow) -> bool {
        let frontend = ServiceKey::new(key.destination, key.destination_port, key.protocol);
        self.is(&frontend, (flow.to.destination, flow.to.destination_port))
    }

    /// Whether a socket that is connected through `vip` to `peer` must be closed. Without `vip`, the socket programs have
    /// left the address as it was, or have connected the socket to port 0 of the node because no Service had the port
    /// that the process named: such a socket must be closed once a Service may have that address and port.
    fn is_socket(&self, vip: Option<&Endpoint>, peer: &Endpoint) -> bool {
        let key = |endpoint: &Endpoint| ServiceKey::new(endpoint.address, endpoint.port, protocol::UDP);
        match vip {
            Some(vip) => self.is(&key(vip), (peer.address, peer.port)),
            None => self.begun.contains(&key(peer)) || (peer.port == 0 && !self.begun.is_empty()),
        }
    }

    fn is(&self, frontend: &ServiceKey, endpoint: (Address, u16)) -> bool {
        self.frontends.contains(frontend) && self.served.read().has_lost(frontend, endpoint)
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
    fn flood_starts_gc_early() {
        let fill =
            Fill { entries: 100, flow_counts: FlowCounts { begun: 1000, refused: 5 }, ..Fill::default() };
        let pressed = |begun, refused| fill.may_be_pressed(FlowCounts { begun, refused }, 1600);
        assert!(!pressed(1000, 5));
        assert!(!pressed(1275, 5), "1,200 of 1,600 entries at most");
        assert!(pressed(1300, 5));
        assert!(pressed(1000, 6), "something was refused");
        assert!(
            !Fill { pressure: Pressure::MOST, ..fill }
                .may_be_pressed(FlowCounts { begun: 9000, refused: 9 }, 1600)
        );
    }

    #[test]
    fn flows_and_sockets_of_the_frontend_to_other_backends_are_stale() {
        let frontend = ServiceKey::new(ip("10.96.0.53"), 53, protocol::UDP);
        let other = ServiceKey::new(ip("10.96.0.54"), 53, protocol::UDP);
        let serving = Arc::new(BTreeSet::from([(ip("10.1.0.5"), 5353)]));
        let served = Published::<ServedUdp>::default();
        served
            .change(|all| *all = [(frontend, Arc::clone(&serving)), (other, serving)].into_iter().collect());
        let (frontends, begun) = (StaleFrontends::from([frontend]), StaleFrontends::from([frontend]));
        let those = Stale { frontends, begun, served };
        let stale = |vip: &str, backend: &str, port| {
            let key = Tuple::new(ip("192.0.2.1"), ip(vip), 4000, 53, protocol::UDP);
            let to = Tuple { destination: ip(backend), destination_port: port, ..key };
            those.is_flow(&key, &Flow::new(&key, &to, 1, 0, Tick(0)))
        };
        assert!(stale("10.96.0.53", "10.1.0.6", 5353));
        assert!(stale("10.96.0.53", "10.1.0.5", 53));
        assert!(!stale("10.96.0.53", "10.1.0.5", 5353));
        assert!(!stale("10.96.0.54", "10.1.0.6", 5353), "another frontend");
        let end = |address: &str, port| Endpoint::new(ip(address), port);
        let vip = end("10.96.0.53", 53);
        assert!(those.is_socket(Some(&vip), &end("10.1.0.6", 5353)));
        assert!(!those.is_socket(Some(&vip), &end("10.1.0.5", 5353)));
        assert!(those.is_socket(Some(&vip), &vip), "the endpoint had the virtual address itself");
        assert!(those.is_socket(None, &vip), "connected before there was a Service");
        assert!(!those.is_socket(None, &end("10.96.0.54", 53)), "another address");
        assert!(those.is_socket(None, &end("192.0.2.9", 0)), "connected to a port of no Service");
        let later = Stale { begun: StaleFrontends::new(), ..those };
        assert!(!later.is_socket(None, &vip), "the Service had the address before");
        assert!(!later.is_socket(None, &end("192.0.2.9", 0)));
    }
}
