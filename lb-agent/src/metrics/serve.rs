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

use super::{Metrics, encode, exposition};

const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The HTTP routes `/metrics` and `/metrics/slis`.
pub fn router(metrics: Arc<Metrics>) -> Router {
    Router::new().route("/metrics", get(scrape)).route("/metrics/slis", get(slis)).with_state(metrics)
}

async fn scrape(Shared(metrics): Shared<Arc<Metrics>>, headers: HeaderMap) -> Response {
    response(&metrics.registry, &headers)
}

async fn slis(Shared(metrics): Shared<Arc<Metrics>>, headers: HeaderMap) -> Response {
    response(&metrics.slis.registry, &headers)
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
