//! The results of a synchronisation, for other tasks, the metrics, the log and `status`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use lb_core::{
    arena::Arena, family::Family, health_checks::NoLocalEndpoints, plan::Condition, stale_udp::StaleFrontends,
};
use tracing::debug;

use super::Writer;
use crate::{
    daemon::{conntrack::UdpFrontends, fill::Fill, state::Progress},
    log_few::warn_few,
};

impl Writer {
    /// Publishes the result of a synchronisation in metrics, the log and the shared state.
    pub(super) fn report(&mut self, failure: Option<String>) {
        let pending = self.pending;
        let contents = self.reconciler.contents();
        let (services, endpoints) = (contents.service_labels.len(), contents.backends.len());
        self.metrics.set_services(services, endpoints, pending);
        for Fill { map, used, capacity } in self.fill() {
            self.metrics.set_map(map, used, capacity);
        }
        self.report_shortages();
        for problem in self.waiting.update(self.reconciler.problems()) {
            self.listeners.events.map_full(problem.service().clone(), problem.to_string());
        }
        let problems = self.reconciler.problems().filter(|problem| problem.waits_for().is_none());
        let problems: BTreeMap<String, &Condition> = problems.map(|it| (it.to_string(), it)).collect();
        let new = problems.iter().filter(|(text, _)| !self.logged.contains(*text));
        for (text, problem) in new.clone() {
            self.emit_annotation(problem, text);
        }
        warn_few(new.map(|(text, _)| text));
        let problems: BTreeSet<String> = problems.into_keys().collect();
        self.logged = problems;
        let (advice, conflicts): (Vec<&Condition>, Vec<&Condition>) =
            self.reconciler.problems().partition(|problem| problem.is_advice());
        let texts = |of: Vec<&Condition>| of.into_iter().map(ToString::to_string).collect();
        let (advice, conflicts) = (texts(advice), texts(conflicts));
        let failures = failure.into_iter().collect();
        self.state.progressed(Progress { services, endpoints, pending, failures, conflicts, advice });
    }

    /// Emits an Event if the condition is about an annotation.
    fn emit_annotation(&self, problem: &Condition, text: &str) {
        if let Some(reason) = problem.annotation_event() {
            self.listeners.events.annotation(problem.service().clone(), reason, text.to_owned());
        }
    }

    /// How full the maps are that grow with the Services.
    fn fill(&self) -> [Fill; 6] {
        let (contents, room) = (self.reconciler.contents(), self.datapath.maps().room());
        let used = |arena: &Arena| (arena.slots() - arena.free_slots()) as usize;
        let (backends, tables) = (used(self.reconciler.arena()), used(self.reconciler.table_arena()));
        [
            Fill { map: "SERVICES", used: contents.frontends.len(), capacity: room.frontends },
            Fill { map: "BACKENDS", used: backends, capacity: room.backends },
            Fill { map: "TABLES", used: tables, capacity: room.tables },
            Fill { map: "VIPS", used: contents.vips.len(), capacity: room.vips },
            Fill { map: "SOURCE_RANGES", used: contents.source_ranges.len(), capacity: room.source_ranges },
            Fill { map: "LIMITS", used: contents.limits.len(), capacity: room.limits },
        ]
    }

    /// Reports the maps that have no room for some Service, or are nearly full.
    fn report_shortages(&self) {
        let fill = self.fill();
        let mut waiting: BTreeMap<&str, Vec<&Condition>> =
            Condition::MAPS.into_iter().map(|map| (map, Vec::new())).collect();
        for problem in self.reconciler.problems() {
            if let Some(map) = problem.waits_for() {
                waiting.entry(map).or_default().push(problem);
            }
        }
        for (map, problems) in waiting {
            self.metrics.set_waiting(map, problems.len());
            let text = problems.first().map(|first| match problems.len() - 1 {
                0 => first.to_string(),
                more => format!("{first}; {more} more wait for room in {map}"),
            });
            let nearly_full = || fill.iter().find(|fill| fill.map == map)?.warning();
            let text = text.or_else(nearly_full);
            self.state.with_shortages(|shortages| shortages.lasts(map, text.as_deref(), Instant::now()));
        }
    }

    /// Publishes which Services have endpoints on this node. Does so even if the kernel has refused steps: the refusal
    /// makes the agent unhealthy soon, but the health checks of all other Services must stay up to date.
    pub(super) fn publish_health_checks(&mut self) {
        if self.reconciler.take_health_checks_changed() {
            self.listeners.checks.send_replace(self.reconciler.health_checks().clone());
        }
        for family in Family::ALL {
            let NoLocalEndpoints { internal, external } = self.reconciler.no_local_endpoints(family);
            self.metrics.set_no_local_endpoints(family, internal, external);
        }
    }

    /// Tells the prober which endpoints to probe: after the first plan in any case, and later only if these endpoints
    /// change.
    pub(super) fn publish_targets(&mut self) {
        let targets = self.reconciler.take_target_changes();
        let is_first = !std::mem::replace(&mut self.has_targets, true);
        if (is_first || !targets.is_empty()) && self.listeners.targets.send(targets).is_err() {
            debug!("endpoints are not probed: the agent is stopping");
        }
    }

    /// Publishes the endpoints of UDP frontends, and the timeouts of Services, that a plan or its failure has changed.
    /// The connection tracking task reads both.
    pub(super) fn publish_rules(&mut self) {
        let served = self.reconciler.take_served_changes();
        if !served.is_empty() {
            self.served.change(|all| served.into_iter().for_each(|change| all.apply(change)));
        }
        let rules = self.reconciler.take_rules_changes();
        if !rules.is_empty() {
            self.rules.change(|all| {
                let all = Arc::make_mut(all);
                rules.into_iter().for_each(|change| change.apply(all));
            });
        }
    }

    /// Publishes the families for which the kernel must forward packets. The node task reads them.
    pub(super) fn publish_routed(&self) {
        let routed = self.reconciler.routed();
        self.listeners.routed.send_if_modified(|known| std::mem::replace(known, routed) != routed);
    }

    /// Sends the frontends with stale UDP flows to the task that deletes these flows. The first call covers all UDP
    /// frontends with endpoints, because an earlier agent may have left stale flows.
    pub(super) fn delete_stale_flows(&mut self) {
        let stale = self.reconciler.take_stale_frontends();
        // At the first synchronisation, Services are new to this agent, but another agent or kube-proxy may have served
        // them.
        let is_first = !*self.listeners.synchronised.borrow();
        let begun = self.reconciler.take_begun_frontends();
        let begun = if is_first { StaleFrontends::new() } else { begun };
        if !stale.is_empty() && self.listeners.stale_udp.send(UdpFrontends { stale, begun }).is_err() {
            debug!("stale UDP flows stay: the agent is stopping");
        }
    }
}
