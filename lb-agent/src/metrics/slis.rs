//! The page `/metrics/slis`: results of health checks in the form that Kubernetes components use (KEP-3466).

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Check {
    name: &'static str,
    r#type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckResult {
    name: &'static str,
    status: &'static str,
    r#type: &'static str,
}

#[derive(Debug)]
pub(super) struct Slis {
    pub(super) registry: Registry,
    last: Family<Check, Gauge>,
    all: Family<CheckResult, Counter>,
}

impl Slis {
    pub(super) fn new() -> Self {
        let mut slis =
            Self { registry: Registry::default(), last: Family::default(), all: Family::default() };
        let help = "Result of the last health check: 1 for success, else 0";
        slis.registry.register("kubernetes_healthcheck", help, slis.last.clone());
        let help = "Health checks by result";
        slis.registry.register("kubernetes_healthchecks", help, slis.all.clone());
        slis
    }

    /// Records a result of the health check `ping`, which `/healthz` at `--metrics-bind-address` serves.
    pub(super) fn record(&self, success: bool) {
        let (name, r#type) = ("ping", "healthz");
        let status = if success { "success" } else { "error" };
        self.last.get_or_create(&Check { name, r#type }).set(i64::from(success));
        self.all.get_or_create(&CheckResult { name, status, r#type }).inc();
    }
}
