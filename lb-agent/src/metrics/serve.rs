//! Serves `/metrics` and `/metrics/slis`.

use std::{fmt, sync::Arc};

use axum::{
    Router,
    extract::State as Shared,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use prometheus_client::registry::Registry;
use tokio::{sync::Semaphore, task};

use super::{Metrics, encode, exposition};

const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The HTTP routes `/metrics` and `/metrics/slis`.
pub fn router(metrics: Arc<Metrics>) -> Router {
    Router::new().route("/metrics", get(scrape)).route("/metrics/slis", get(slis)).with_state(metrics)
}

async fn scrape(Shared(metrics): Shared<Arc<Metrics>>, headers: HeaderMap) -> Response {
    on_blocking_thread(move || response(&metrics.registry, &headers)).await
}

async fn slis(Shared(metrics): Shared<Arc<Metrics>>, headers: HeaderMap) -> Response {
    on_blocking_thread(move || response(&metrics.slis.registry, &headers)).await
}

/// Computes a response on a thread that may block: the agent reads the packet counters and the names of Services from
/// the kernel, and may have to wait for a walk over all flows. Computes one response at a time, so that many requests
/// keep few threads busy.
async fn on_blocking_thread(respond: impl FnOnce() -> Response + Send + 'static) -> Response {
    static TURN: Semaphore = Semaphore::const_new(1);
    let turn = TURN.acquire().await;
    let responded = task::spawn_blocking(move || (respond(), drop(turn)).0).await;
    responded.unwrap_or_else(|_panicked| {
        (StatusCode::INTERNAL_SERVER_ERROR, "cannot collect the metrics").into_response()
    })
}

/// Answers with the metrics in the text format of Prometheus, like kube-proxy, or in OpenMetrics if the request accepts
/// it.
fn response(registry: &Registry, headers: &HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open_metrics = accepted.into_iter().any(|types| types.contains("application/openmetrics-text"));
    match encode(registry) {
        Ok(text) if open_metrics => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Ok(text) => ([(header::CONTENT_TYPE, PROMETHEUS)], exposition::prometheus(&text)).into_response(),
        Err(fmt::Error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, "cannot write the metrics as text").into_response()
        }
    }
}
