//! Serves `/healthz` and `/livez`, as kube-proxy does in `pkg/proxy/healthcheck/proxy_health.go`.

use std::{fmt, sync::Arc};

use axum::{
    Json, Router,
    extract::State as Shared,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::any,
};
use jiff::{Timestamp, civil};
use serde::Serialize;

use super::Health;
use crate::metrics::Metrics;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    last_updated: Timestamp,
    current_time: Timestamp,
    /// Whether load balancers may send traffic to this node; only in `/healthz`.
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    /// The state of IPv4 and IPv6; absent before the first synchronisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Families>,
}

/// The state of each family. One task writes both families together, so both always have the same state.
#[derive(Debug, Serialize)]
struct Families {
    #[serde(rename = "IPv4")]
    v4: Family,
    #[serde(rename = "IPv6")]
    v6: Family,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Family {
    last_updated: Timestamp,
    healthy: bool,
}

impl Body {
    /// The body of `/healthz`.
    fn of_health(health: Health, node_eligible: bool) -> Self {
        Self::new(health, health.healthy, Some(node_eligible))
    }

    /// The body of `/livez`, as kube-proxy sends it. (The probes of the chart run `lb-agent ready --live` instead.)
    fn of_life(health: Health) -> Self {
        Self::new(health, health.alive, None)
    }

    fn new(Health { last_updated, now, .. }: Health, healthy: bool, node_eligible: Option<bool>) -> Self {
        let status = last_updated.map(|last_updated| {
            let family = Family { last_updated, healthy };
            Families { v4: family, v6: family }
        });
        let good = healthy && node_eligible != Some(false);
        let last_updated = if good { now } else { last_updated.unwrap_or_else(never) };
        Self { last_updated, current_time: now, node_eligible, healthy, status }
    }

    fn code(&self) -> StatusCode {
        if self.healthy && self.node_eligible != Some(false) {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        }
    }

    fn response(self) -> impl IntoResponse {
        (self.code(), [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], Json(self))
    }
}

/// Stands for a synchronisation that has not happened yet: Go's zero time, `0001-01-01T00:00:00Z`, as in kube-proxy's
/// responses, because clients expect a time.
fn never() -> Timestamp {
    let midnight = civil::date(1, 1, 1).to_datetime(civil::Time::midnight());
    jiff::tz::Offset::UTC.to_timestamp(midnight).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[derive(Clone)]
struct Probes {
    health: Arc<dyn Fn() -> Health + Send + Sync>,
    eligible: Arc<dyn Fn() -> bool + Send + Sync>,
    metrics: Arc<Metrics>,
}

impl fmt::Debug for Probes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probes").finish_non_exhaustive()
    }
}

/// Routes of `--healthz-bind-address`. `health` returns the health of the agent, `eligible` whether load balancers may
/// send traffic to this node.
pub fn router(
    health: impl Fn() -> Health + Send + Sync + 'static,
    eligible: impl Fn() -> bool + Send + Sync + 'static,
    metrics: Arc<Metrics>,
) -> Router {
    let probes = Probes { health: Arc::new(health), eligible: Arc::new(eligible), metrics };
    Router::new().route("/healthz", any(healthz)).route("/livez", any(livez)).with_state(probes)
}

async fn healthz(Shared(probes): Shared<Probes>) -> impl IntoResponse {
    let body = Body::of_health((probes.health)(), (probes.eligible)());
    probes.metrics.count_healthz(body.code().as_u16());
    body.response()
}

async fn livez(Shared(probes): Shared<Probes>) -> impl IntoResponse {
    let body = Body::of_life((probes.health)());
    probes.metrics.count_livez(body.code().as_u16());
    body.response()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Mutex,
            atomic::{AtomicBool, Ordering},
        },
        time::Duration,
    };

    use serde_json::{Value, json};

    use super::*;
    use crate::{
        health::{Freshness, Moment},
        http_test::Server,
        metrics::NoPackets,
    };

    /// A change that has waited for this time makes the agent unhealthy; one that has waited for [`NOT_LATE`] does not.
    /// The tests follow those of kube-proxy (`TestHealthzServer`, `TestLivezServer`), which use a limit of 10 s.
    const LATE: Duration = Duration::from_secs(60);
    const NOT_LATE: Duration = Duration::from_secs(5);

    /// The router under test, with a clock that the test moves.
    struct Proxy {
        clock: Arc<Mutex<Moment>>,
        freshness: Arc<Mutex<Freshness>>,
        eligible: Arc<AtomicBool>,
        metrics: Arc<Metrics>,
        server: Server,
        last_updated: Moment,
    }

    impl Proxy {
        async fn start() -> Self {
            let clock = Arc::new(Mutex::new(Moment::now()));
            let freshness = Arc::new(Mutex::new(Freshness::default()));
            let eligible = Arc::new(AtomicBool::new(true));
            let metrics = Arc::new(Metrics::new(NoPackets, Some(NoPackets)));
            let health = {
                let (clock, freshness) = (Arc::clone(&clock), Arc::clone(&freshness));
                move || freshness.lock().unwrap().health(*clock.lock().unwrap())
            };
            let is_eligible = Arc::clone(&eligible);
            let router = router(health, move || is_eligible.load(Ordering::Relaxed), Arc::clone(&metrics));
            let last_updated = *clock.lock().unwrap();
            Self { clock, freshness, eligible, metrics, server: Server::start(router).await, last_updated }
        }

        fn now(&self) -> Moment {
            *self.clock.lock().unwrap()
        }

        fn step(&self, duration: Duration) {
            let mut clock = self.clock.lock().unwrap();
            *clock = *clock + duration;
        }

        fn queued(&self) {
            self.freshness.lock().unwrap().queued(self.now());
        }

        fn updated(&mut self) {
            self.last_updated = self.now();
            self.freshness.lock().unwrap().updated(self.last_updated);
        }

        /// Asserts status code, headers and the whole body of a response. `node_eligible` is the value of that field in
        /// the body.
        async fn assert(&self, path: &str, code: u16, healthy: bool, node_eligible: Option<bool>) {
            let (now, updated) = (self.now().timestamp, self.last_updated.timestamp);
            let family = json!({"lastUpdated": updated, "healthy": healthy});
            let mut expected = json!({
                "lastUpdated": if code == 200 { now } else { updated },
                "currentTime": now,
                "healthy": healthy,
                "status": {"IPv4": family, "IPv6": family},
            });
            if let Some(eligible) = node_eligible {
                expected["nodeEligible"] = eligible.into();
            }
            let answer = self.server.get(path).await;
            assert_eq!((answer.code, &answer.json()), (code, &expected), "{path}");
            assert_eq!(answer.header("content-type"), Some("application/json"));
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        }

        /// Asserts the rules that apply to both paths, `/healthz` and `/livez`.
        async fn assert_freshness_counts(&mut self, path: &str, eligible: Option<bool>) {
            self.updated();
            self.assert(path, 200, true, eligible).await;
            self.step(Duration::from_hours(1));
            self.assert(path, 200, true, eligible).await;
            for _again in 0..2 {
                self.queued();
                self.step(LATE);
                self.assert(path, 503, false, eligible).await;
                self.updated();
                self.step(NOT_LATE);
                self.assert(path, 200, true, eligible).await;
            }
            self.queued();
            self.step(NOT_LATE);
            self.assert(path, 200, true, eligible).await;
            self.queued();
            self.step(LATE - NOT_LATE);
            self.assert(path, 503, false, eligible).await;
            self.updated();
        }
    }

    #[tokio::test]
    async fn healthz_is_about_freshness_and_the_node() {
        let mut proxy = Proxy::start().await;
        proxy.assert_freshness_counts("/healthz", Some(true)).await;
        for eligible in [true, false, true] {
            proxy.eligible.store(eligible, Ordering::Relaxed);
            proxy.step(NOT_LATE);
            let code = if eligible { 200 } else { 503 };
            proxy.assert("/healthz", code, true, Some(eligible)).await;
        }
    }

    #[tokio::test]
    async fn livez_is_about_freshness_only() {
        let mut proxy = Proxy::start().await;
        proxy.assert_freshness_counts("/livez", None).await;
        for eligible in [true, false, true] {
            proxy.eligible.store(eligible, Ordering::Relaxed);
            proxy.assert("/livez", 200, true, None).await;
        }
    }

    #[tokio::test]
    async fn agent_is_live_but_unhealthy_before_the_first_synchronisation() {
        let proxy = Proxy::start().await;
        for waiting in [false, true] {
            let answer = proxy.server.get("/healthz").await;
            let body = answer.json();
            assert_eq!(
                (answer.code, &body["lastUpdated"]),
                (503, &json!("0001-01-01T00:00:00Z")),
                "{waiting}"
            );
            assert_eq!((&body["healthy"], body.get("status")), (&Value::Bool(false), None));
            let answer = proxy.server.get("/livez").await;
            assert_eq!((answer.code, &answer.json()["healthy"]), (200, &Value::Bool(true)), "{waiting}");
            proxy.queued();
        }
        proxy.step(LATE);
        assert_eq!(proxy.server.get("/livez").await.code, 503, "a change has waited too long");
    }

    #[tokio::test]
    async fn every_answer_is_counted() {
        let mut proxy = Proxy::start().await;
        proxy.server.get("/healthz").await;
        proxy.updated();
        proxy.server.get("/healthz").await;
        proxy.server.get("/healthz").await;
        proxy.server.get("/livez").await;
        let text = proxy.metrics.text().unwrap();
        for line in [
            "kubeproxy_proxy_healthz_total{code=\"200\"} 2",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
            "kubeproxy_proxy_livez_total{code=\"200\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
        }
    }

    #[tokio::test]
    async fn every_method_is_answered_on_known_paths_only() {
        let mut proxy = Proxy::start().await;
        proxy.updated();
        assert_eq!(proxy.server.request("HEAD", "/healthz").await.code, 200);
        assert_eq!(proxy.server.request("POST", "/livez").await.code, 200);
        assert_eq!(proxy.server.get("/").await.code, 404);
    }
}
