//! Pages that `--metrics-bind-address` serves in addition to metrics, at the paths of kube-proxy.
//!
//! | path | answer |
//! |---|---|
//! | `/healthz`, `/healthz/ping` | `ok`: the process answers; [`crate::health`] has the health of the agent |
//! | `/proxyMode` | [`PROXY_MODE`] |
//! | `/configz` | the effective configuration under the names of a KubeProxyConfiguration |
//! | `/statusz` | start time, version, paths |
//! | `/flagz` | the effective flags |

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use axum::{
    Router,
    extract::{RawQuery, State as Shared},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use jiff::{Timestamp, tz::TimeZone};
use serde_json::Value;

use crate::metrics::Metrics;

/// The body of `/proxyMode`. kube-proxy answers `iptables`, `ipvs` or `nftables`. If the agent answered with one of
/// these, tools would look for rules that do not exist.
pub const PROXY_MODE: &str = "ebpf";

const COMPONENT: &str = "lb-agent";
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
                       guarantees and is for debugging purposes only.";
/// Paths that the page `/statusz` lists.
const PATHS: &str = "/configz /flagz /healthz /metrics /metrics/slis /proxyMode";

/// The data that the pages show.
#[derive(Debug)]
pub struct About {
    /// The JSON of the page `/configz`.
    pub configz: Value,
    /// Names and values of the flags that the page `/flagz` shows.
    pub flagz: BTreeMap<&'static str, String>,
    /// When the agent started, for the page `/statusz`.
    pub started: Timestamp,
    /// Metrics that count requests for `/healthz` and `/healthz/ping`.
    pub metrics: Arc<Metrics>,
}

/// The HTTP routes of the pages.
pub fn router(about: About) -> Router {
    Router::new()
        .route("/healthz", any(healthz))
        .route("/healthz/ping", any(healthz))
        .route("/proxyMode", any(|| async { text(PROXY_MODE) }))
        .route("/configz", any(configz))
        .route("/statusz", any(statusz))
        .route("/flagz", any(flagz))
        .with_state(Arc::new(about))
}

fn text(text: impl Into<String>) -> impl IntoResponse {
    let headers =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, text.into())
}

/// Answers `ok` while the process runs, and counts the request.
async fn healthz(Shared(about): Shared<Arc<About>>, RawQuery(query): RawQuery) -> impl IntoResponse {
    about.metrics.record_health_check(true);
    let verbose =
        query.is_some_and(|query| query.split('&').any(|key| key.split('=').next() == Some("verbose")));
    text(if verbose { "[+]ping ok\nhealthz check passed\n" } else { "ok" })
}

async fn configz(Shared(about): Shared<Arc<About>>) -> impl IntoResponse {
    axum::Json(about.configz.clone())
}

async fn statusz(Shared(about): Shared<Arc<About>>, headers: HeaderMap) -> Response {
    for_people(&headers, || status(about.started, Timestamp::now()))
}

async fn flagz(Shared(about): Shared<Arc<About>>, headers: HeaderMap) -> Response {
    for_people(&headers, || {
        let mut page = format!("\n{COMPONENT} flags\n{WARNING}\n\n");
        for (flag, value) in &about.flagz {
            // Writing to a String never fails.
            let _infallible = writeln!(page, "{flag}={value}");
        }
        page
    })
}

fn status(started: Timestamp, now: Timestamp) -> String {
    let up = now.duration_since(started).as_secs().max(0);
    let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
    let started = started.to_zoned(TimeZone::UTC).strftime("%a %b %e %H:%M:%S %Z %Y").to_string();
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "\n{COMPONENT} statusz\n{WARNING}\n\n\
         Started: {started}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\n\
         Binary version: {version}\n\nPaths: {PATHS}\n"
    )
}

/// Answers with a page for people, whose format may change. As in kube-proxy, a request whose `Accept` header excludes
/// plain text is rejected.
fn for_people(headers: &HeaderMap, page: impl FnOnce() -> String) -> Response {
    let mut accepted =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).peekable();
    let is_text = |types: &str| {
        let mut types = types.split(',').map(|kind| kind.split(';').next().unwrap_or_default().trim());
        types.any(|kind| matches!(kind, "text/plain" | "text/*" | "*/*"))
    };
    if accepted.peek().is_none() || accepted.any(is_text) {
        text(page()).into_response()
    } else {
        (StatusCode::NOT_ACCEPTABLE, "only text/plain is available\n").into_response()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{http_test::Server, metrics::NoPackets};

    async fn server() -> (Server, Arc<Metrics>) {
        let metrics = Arc::new(Metrics::new(NoPackets, Some(NoPackets)));
        let about = About {
            configz: json!({"kubeproxy.config.k8s.io": {"clusterCIDR": ""}}),
            flagz: BTreeMap::from([("node-name", "a".to_owned()), ("cluster-cidr", String::new())]),
            started: "2026-01-02T03:04:05Z".parse().unwrap(),
            metrics: Arc::clone(&metrics),
        };
        (Server::start(router(about).merge(crate::metrics::router(Arc::clone(&metrics)))).await, metrics)
    }

    #[tokio::test]
    async fn healthz_says_ok_and_counts() {
        let (server, _metrics) = server().await;
        let answer = server.get("/healthz").await;
        assert_eq!((answer.code, &*answer.body), (200, "ok"));
        assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(server.get("/healthz?verbose").await.body, "[+]ping ok\nhealthz check passed\n");
        assert_eq!(server.get("/healthz/ping").await.body, "ok");
        let slis = server.get("/metrics/slis").await.body;
        let counted = "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 3";
        assert!(slis.contains(counted), "{slis}");
    }

    #[tokio::test]
    async fn proxy_mode_is_ebpf() {
        let (server, _metrics) = server().await;
        let answer = server.get("/proxyMode").await;
        assert_eq!((answer.code, &*answer.body), (200, "ebpf"));
        assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
    }

    #[tokio::test]
    async fn configz_is_json() {
        let (server, _metrics) = server().await;
        let answer = server.get("/configz").await;
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.json(), json!({"kubeproxy.config.k8s.io": {"clusterCIDR": ""}}));
    }

    #[tokio::test]
    async fn flagz_is_a_line_for_each_flag() {
        let (server, _metrics) = server().await;
        let page = server.get("/flagz").await.body;
        assert_eq!(page, format!("\nlb-agent flags\n{WARNING}\n\ncluster-cidr=\nnode-name=a\n"));
    }

    #[tokio::test]
    async fn pages_for_people_are_text() {
        let (server, _metrics) = server().await;
        for path in ["/statusz", "/flagz"] {
            assert_eq!(server.get(path).await.header("content-type"), Some("text/plain; charset=utf-8"));
            for accept in ["*/*", "text/html, text/plain;q=0.5", "text/*"] {
                assert_eq!(server.get_with(path, &format!("Accept: {accept}")).await.code, 200, "{accept}");
            }
            assert_eq!(server.get_with(path, "Accept: application/json").await.code, 406);
        }
    }

    #[test]
    fn statusz_is_a_page_of_kubernetes() {
        let started: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let page = status(started, "2026-01-03T04:05:07.9Z".parse().unwrap());
        let version = env!("CARGO_PKG_VERSION");
        let expected = format!(
            "\nlb-agent statusz\n{WARNING}\n\nStarted: Fri Jan  2 03:04:05 UTC 2026\nUp: 25 hr 01 min 02 sec\n\
             Binary version: {version}\n\nPaths: {PATHS}\n"
        );
        assert_eq!(page, expected);
    }
}
