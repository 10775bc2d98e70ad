//! A kernel of ordered maps. It knows what the data plane relies on and fails the test when a step breaks it.

use std::{collections::BTreeMap, fmt::Write as _, net::SocketAddr};

use lb_common::{Backend, FrontendKind, Service, ServiceKey, backend_flags};
use lb_core::{
    arena::Epoch,
    plan::{Contents, EndpointLabels, Plan, Step},
    reconciler::Reconciler,
};

/// Number of times a state may need a new plan before it is settled.
const ROUNDS: usize = 10;

#[derive(Clone, Debug, Default)]
pub(crate) struct Kernel {
    /// The maps; `backends` keeps what was ever written, as an array does.
    pub(crate) maps: Contents,
    /// Records that programs may still hold: base and count of each, and the epoch that covers its removal.
    stale: Vec<(Option<Epoch>, u32, u32)>,
}

/// The backends of each frontend.
pub(crate) type Resolved = BTreeMap<ServiceKey, Vec<Backend>>;

impl Kernel {
    pub(crate) fn apply(&mut self, step: &Step) {
        match step {
            Step::DeleteFrontend(key) => {
                let gone = self.maps.frontends.remove(key).expect("only a frontend that exists is deleted");
                self.stale.push((None, gone.backends_base, gone.backends_count));
            }
            Step::WriteBackends { base, backends } => {
                let end = base + u32::try_from(backends.len()).expect("fits");
                self.assert_unread(*base, end);
                assert!(backends.is_sorted() && !backends.is_empty());
                self.maps.backends.extend((*base..).zip(backends.iter().copied()));
            }
            Step::PutServiceLabels(id, labels) => {
                assert_ne!(*id, 0);
                self.maps.service_labels.insert(*id, labels.clone());
            }
            Step::PutEndpointLabels(address, labels) => {
                self.maps.endpoint_labels.insert(*address, labels.clone());
            }
            Step::PutFrontend(key, record) => {
                assert!(record.is_sealed(key));
                assert!(self.maps.service_labels.contains_key(&record.id), "a frontend without a name");
                if let Some(old) = self.maps.frontends.insert(*key, *record) {
                    assert_ne!(old, *record, "a step that changes nothing");
                    self.stale.push((None, old.backends_base, old.backends_count));
                }
            }
            Step::ReleaseBackends { base, count } => {
                let reads = |r: &Service| {
                    overlap((r.backends_base, r.backends_base + r.backends_count), (*base, base + count))
                };
                assert!(!self.maps.frontends.values().any(reads), "released under a frontend");
            }
            Step::PutVip(address, vip) => {
                self.maps.vips.insert(*address, *vip);
            }
            Step::DeleteVip(address) => {
                self.maps.vips.remove(address).expect("only an address that exists is deleted");
            }
            Step::PutSourceRange(range) => {
                self.maps.source_ranges.insert(*range);
            }
            Step::DeleteSourceRange(range) => {
                assert!(self.maps.source_ranges.remove(range), "only a range that exists is deleted");
            }
            Step::DeleteServiceLabels(id) => {
                assert!(
                    !self.maps.frontends.values().any(|record| record.id == *id),
                    "unnamed under a frontend"
                );
                self.maps.service_labels.remove(id).expect("only a name that exists is deleted");
            }
            Step::DeleteEndpointLabels(address) => {
                self.maps.endpoint_labels.remove(address).expect("only a name that exists is deleted");
            }
        }
    }

    /// No frontend refers to these slots, and no program that still runs may have found them.
    fn assert_unread(&self, base: u32, end: u32) {
        let current = self
            .maps
            .frontends
            .values()
            .map(|r| (r.backends_base, r.backends_base.saturating_add(r.backends_count)));
        let stale = self.stale.iter().map(|(_, base, count)| (*base, base.saturating_add(*count)));
        for range in current.chain(stale) {
            assert!(
                !overlap(range, (base, end)),
                "slots {base}..{end} are written while {range:?} may be read"
            );
        }
    }

    pub(crate) fn epoch_ended(&mut self, epoch: Epoch) {
        self.stale.iter_mut().for_each(|(of, ..)| *of = of.or(Some(epoch)));
    }

    pub(crate) fn grace_elapsed(&mut self, epoch: Epoch) {
        self.stale.retain(|(of, ..)| of.is_none_or(|of| of > epoch));
    }

    /// What the agent would read when it starts. Programs of before are gone by then: the agent waits once.
    pub(crate) fn read_back(&mut self) -> Contents {
        self.stale.clear();
        let mut contents = self.maps.clone();
        let referred = |slot: &u32| {
            let mut records = self.maps.frontends.values();
            records
                .any(|r| (r.backends_base..r.backends_base.saturating_add(r.backends_count)).contains(slot))
        };
        contents.backends.retain(|slot, _| referred(slot));
        contents
    }

    pub(crate) fn resolved(&self) -> Resolved {
        self.maps.frontends.iter().map(|(key, record)| (*key, self.backends(record))).collect()
    }

    fn backends(&self, record: &Service) -> Vec<Backend> {
        let slots = record.backends_base..record.backends_base + record.backends_count;
        slots
            .map(|slot| *self.maps.backends.get(&slot).expect("a frontend refers to a slot never written"))
            .collect()
    }

    /// Everything but ids and slots, in one order.
    pub(crate) fn dump(&self) -> String {
        let mut blocks: Vec<String> =
            self.maps.frontends.iter().map(|(key, record)| self.dump_frontend(key, record)).collect();
        blocks.sort();
        let mut text = blocks.concat();
        for (address, EndpointLabels { node, zone, pod }) in &self.maps.endpoint_labels {
            let show = |label: &Option<std::sync::Arc<str>>| label.as_deref().unwrap_or("-").to_owned();
            writeln!(text, "address {address} node {} zone {} pod {}", show(node), show(zone), show(pod))
                .expect("memory");
        }
        text
    }

    fn dump_frontend(&self, key: &ServiceKey, record: &Service) -> String {
        let labels = &self.maps.service_labels[&record.id];
        let kind = FrontendKind::try_from(record.kind).expect("a kind we know").as_str();
        let socket = SocketAddr::new(key.address.into(), key.port);
        let mut text = format!("{} {kind} {socket}", labels.name);
        if let Some(node_port) = labels.node_port {
            write!(text, " node port {node_port}").expect("memory");
        }
        if record.affinity_seconds > 0 {
            write!(text, " affinity {} s", record.affinity_seconds).expect("memory");
        }
        text.push('\n');
        for backend in self.backends(record) {
            let terminating =
                if backend.flags & backend_flags::TERMINATING != 0 { " terminating" } else { "" };
            let socket = SocketAddr::new(backend.address.into(), backend.port);
            writeln!(text, "  {socket}{terminating}").expect("memory");
        }
        text
    }
}

/// A reconciler and the kernel it drives.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) reconciler: Reconciler,
    pub(crate) kernel: Kernel,
    slots: u32,
    epochs: Vec<Epoch>,
}

impl Node {
    pub(crate) fn new(slots: u32) -> Self {
        Self::started_on(Kernel::default(), slots)
    }

    pub(crate) fn started_on(kernel: Kernel, slots: u32) -> Self {
        let mut node = Self::started_incomplete_on(kernel, slots);
        node.reconciler.sources_complete();
        node
    }

    /// The sources have not shown everything there is yet.
    pub(crate) fn started_incomplete_on(mut kernel: Kernel, slots: u32) -> Self {
        Self {
            reconciler: Reconciler::new(kernel.read_back(), slots, Default::default()),
            kernel,
            slots,
            epochs: Vec::new(),
        }
    }

    /// The agent is gone and comes back; it must be told everything again.
    pub(crate) fn restart(&mut self) {
        *self = Self::started_on(std::mem::take(&mut self.kernel), self.slots);
    }

    /// Plans and applies the first `steps` of the plan; the rest fails. Checks each prefix.
    pub(crate) fn sync_some(&mut self, steps: usize) -> Plan {
        let plan = self.reconciler.plan();
        let before = self.kernel.resolved();
        let mut whole = self.kernel.clone();
        plan.steps.iter().for_each(|step| whole.apply(step));
        let after = whole.resolved();
        for step in plan.steps.iter().take(steps) {
            self.kernel.apply(step);
            self.reconciler.applied(step);
            self.assert_each_is_old_or_new(&before, &after);
        }
        if steps < plan.steps.len() {
            self.reconciler.failed();
        }
        plan
    }

    fn assert_each_is_old_or_new(&self, before: &Resolved, after: &Resolved) {
        let now = self.kernel.resolved();
        for key in before.keys().chain(after.keys()) {
            let state = now.get(key);
            assert!(
                state == before.get(key) || state == after.get(key),
                "{key:?} is neither what it was nor what it becomes"
            );
        }
    }

    pub(crate) fn sync(&mut self) -> Plan {
        self.sync_some(usize::MAX)
    }

    pub(crate) fn end_epoch(&mut self) {
        if let Some(epoch) = self.reconciler.end_epoch() {
            self.kernel.epoch_ended(epoch);
            self.epochs.push(epoch);
        }
    }

    pub(crate) fn grace(&mut self) {
        if !self.epochs.is_empty() {
            let epoch = self.epochs.remove(0);
            self.kernel.grace_elapsed(epoch);
            self.reconciler.grace_elapsed(epoch);
        }
    }

    /// Synchronises until nothing is left to do, and checks that nothing leaked.
    pub(crate) fn settle(&mut self) {
        for _ in 0..ROUNDS {
            self.sync();
            self.end_epoch();
            while !self.epochs.is_empty() {
                self.grace();
            }
        }
        assert_eq!(self.reconciler.plan().steps, Vec::new(), "a plan after everything is applied");
        let stuck = self.reconciler.problems().next().is_some();
        assert!(stuck || !self.reconciler.needs_plan());
        self.assert_no_leak();
        self.assert_mirror();
    }

    fn assert_no_leak(&self) {
        let records = self.kernel.maps.frontends.values().filter(|record| record.backends_count > 0);
        let referred: std::collections::BTreeSet<(u32, u32)> =
            records.map(|r| (r.backends_base, r.backends_count)).collect();
        let used = self.reconciler.arena().used().map(|range| (range.base, range.count));
        assert_eq!(used.collect::<Vec<_>>(), referred.iter().copied().collect::<Vec<_>>());
        let used: u32 = referred.iter().map(|(_, count)| count).sum();
        assert_eq!(self.reconciler.arena().free_slots(), self.slots - used);
        for id in self.kernel.maps.service_labels.keys() {
            assert!(
                self.kernel.maps.frontends.values().any(|record| record.id == *id),
                "a name without a frontend"
            );
        }
    }

    /// The reconciler knows exactly what is in the kernel.
    fn assert_mirror(&self) {
        assert_eq!(*self.reconciler.contents(), self.kernel.clone().read_back());
    }
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0.max(b.0) < a.1.min(b.1)
}
