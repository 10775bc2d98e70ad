//! Finds the conditions that the annotations of a Service cause.

use super::Reconciler;
use crate::{
    convert::SLOW_START,
    kubelet_probes,
    model::{self, AnnotationError, IgnoredAnnotation, ObjectName, Policy, Protocol},
    plan::Condition,
    slow_start,
};

/// The error about a Service that requests a slow start although its scheduler does not support it.
fn unsupported_slow_start(service: &model::Service, policy: &Policy) -> Option<AnnotationError> {
    let (period, scheduler) = (service.slow_start()?, service.scheduler(policy));
    let why = format!("the scheduler {scheduler} does not support it: use random, wrr, wlc, sed or nq");
    let value = format!("{period:?}");
    (!slow_start::is_supported(scheduler)).then_some(AnnotationError { annotation: SLOW_START, value, why })
}

impl Reconciler {
    /// Starts the list of conditions of a Service with those of its annotations: invalid ones, those without effect,
    /// and the PROXY protocol if it may break kubelet's probes.
    pub(super) fn note_annotations(&mut self, service: &ObjectName) {
        let known = self.store.service(service);
        let settings = known.and_then(|service| service.settings.as_ref());
        let bad = |error: &AnnotationError| Condition::BadAnnotation {
            service: service.clone(),
            error: error.clone(),
        };
        let ignored = |ignored: &IgnoredAnnotation| Condition::IgnoredAnnotation {
            service: service.clone(),
            ignored: ignored.clone(),
        };
        let slow_start = known.and_then(|service| unsupported_slow_start(service, &self.node.policy));
        let probes = known.and_then(|known| self.probes_without_header(service, known));
        let problems: Vec<Condition> = settings.map_or_else(Vec::new, |settings| {
            let of_clouds = settings.ignored.iter().map(ignored);
            let bad = settings.annotation_errors.iter().chain(&slow_start).map(bad);
            bad.chain(of_clouds).chain(probes).collect()
        });
        if problems.is_empty() {
            self.problems.remove(service);
        } else {
            self.problems.insert(service.clone(), problems);
        }
    }

    /// The condition of a Service whose pods must read a PROXY protocol header; `None` if no port of the pods expects a
    /// header.
    fn probes_without_header(&self, service: &ObjectName, known: &model::Service) -> Option<Condition> {
        if !known.has_proxy_protocol(Protocol::Tcp) {
            return None;
        }
        let ports = kubelet_probes::ports_of_pods(known, &self.store.slices(service));
        (!ports.is_empty()).then(|| Condition::ProbesWithoutHeader { service: service.clone(), ports })
    }
}
