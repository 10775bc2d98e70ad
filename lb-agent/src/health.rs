//! `/healthz` and `/livez`, in the words of kube-proxy (`pkg/proxy/healthcheck/proxy_health.go`).

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State as Shared,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use jiff::Timestamp;
use serde::Serialize;

use crate::{
    daemon::state::{Health, State},
    metrics::Metrics,
};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    last_updated: Option<Timestamp>,
    current_time: Timestamp,
    /// Only in `/healthz`. Whether load balancers should send traffic to this node: without an API server there is
    /// no Node object that could say no.
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: Families,
}

/// Both families are written by one task in one go, so they are always in the same state.
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
    last_updated: Option<Timestamp>,
    healthy: bool,
}

impl Body {
    fn new(Health { healthy, last_updated }: Health, node_eligible: Option<bool>) -> Self {
        let family = Family { last_updated, healthy };
        let status = Families { v4: family, v6: family };
        Self { last_updated, current_time: Timestamp::now(), node_eligible, healthy, status }
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

/// The service of `--healthz-bind-address`.
pub fn router(state: Arc<State>, metrics: Arc<Metrics>) -> Router {
    Router::new().route("/healthz", get(healthz)).route("/livez", get(livez)).with_state((state, metrics))
}

async fn healthz(Shared((state, metrics)): Shared<(Arc<State>, Arc<Metrics>)>) -> impl IntoResponse {
    let body = Body::new(state.health(), Some(true));
    metrics.count_healthz(body.code().as_u16());
    body.response()
}

async fn livez(Shared((state, metrics)): Shared<(Arc<State>, Arc<Metrics>)>) -> impl IntoResponse {
    let body = Body::new(state.health(), None);
    metrics.count_livez(body.code().as_u16());
    body.response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_has_the_keys_of_kube_proxy() {
        let health = Health { healthy: true, last_updated: Some(Timestamp::now()) };
        let body = serde_json::to_value(Body::new(health, Some(true))).unwrap();
        for pointer in
            ["/lastUpdated", "/currentTime", "/status/IPv4/lastUpdated", "/status/IPv6/lastUpdated"]
        {
            let text = body.pointer(pointer).and_then(|value| value.as_str()).unwrap();
            assert!(text.parse::<Timestamp>().is_ok(), "{pointer}: {text}");
        }
        for pointer in ["/nodeEligible", "/healthy", "/status/IPv4/healthy", "/status/IPv6/healthy"] {
            assert_eq!(body.pointer(pointer), Some(&serde_json::Value::Bool(true)), "{pointer}");
        }
        assert_eq!(serde_json::to_value(Body::new(health, None)).unwrap().get("nodeEligible"), None);
    }

    #[test]
    fn unhealthy_is_503() {
        let body = Body::new(Health { healthy: false, last_updated: None }, Some(true));
        assert_eq!(body.code(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
