//! The data of the pages, as JSON. Requests read the data plane on threads that may block.

use std::{convert::Infallible, fmt::Write as _, sync::Arc};

use axum::{
    Json, Router,
    extract::{Path, Query as Parameters, State},
    http::{StatusCode, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::get,
};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::task;

use crate::{
    Web,
    services::Wanted,
    source::{Query, ServicePorts, Source, SourceError},
};

/// The most rows of the page Connections.
const SHOWN: usize = 1000;
/// The most rows of the export.
const EXPORTED: usize = 100_000;
/// Columns of the export: the keys of `lb-agent conntrack list -o json`.
const COLUMNS: [&str; 11] = [
    "protocol",
    "client",
    "vip",
    "backend",
    "masqueradedAs",
    "phase",
    "idleSeconds",
    "secondsLeft",
    "service",
    "tunnelled",
    "half",
];

/// The routes below `/api`.
pub(crate) fn router<S: Source>() -> Router<Arc<Web<S>>> {
    Router::new()
        .route("/overview", get(overview))
        .route("/services", get(services))
        .route("/service/{namespace}/{name}", get(service))
        .route("/connections", get(connections))
        .route("/connections.csv", get(export))
        .route("/explain", get(explain))
        .route("/live", get(live))
        // The pages request this path to find out whether the server runs.
        .route("/ping", get(|| async { Json(json!({})) }))
}

/// Why a request has no answer.
enum Refusal {
    Source(SourceError),
    Missing(String),
}

impl From<SourceError> for Refusal {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Self::Source(SourceError::Failed(error))
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, text) = match self {
            Self::Missing(text) => (StatusCode::NOT_FOUND, text),
            Self::Source(error @ SourceError::Question(_)) => (StatusCode::BAD_REQUEST, error.to_string()),
            Self::Source(error @ SourceError::Failed(_)) => {
                (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
        };
        (status, Json(json!({ "error": text }))).into_response()
    }
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let result = task::spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(anyhow::Error::new(error).context("this request failed").into()))
}

/// As [`blocking`], for `work` that reads all connections; waits until fewer than [`WALKS`](crate::WALKS) other
/// requests do such work.
async fn walking<S: Source, T: Send + 'static>(
    web: Arc<Web<S>>,
    work: impl FnOnce(&Web<S>) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    // The semaphore is never closed.
    let permit = Arc::clone(&web.walks).acquire_owned().await.map_err(anyhow::Error::new)?;
    blocking(move || {
        // The work keeps its permit even if the browser stops waiting for the answer.
        let _permit = permit;
        work(&web)
    })
    .await
}

async fn overview<S: Source>(State(web): State<Arc<Web<S>>>) -> Result<Json<Value>, Refusal> {
    blocking(move || {
        let plots = web.sampler.plots();
        let status = web.sampler.status();
        let (status, failure) = match status {
            Ok(status) => (Some(status), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Ok(Json(json!({ "plots": plots, "state": status, "failure": failure })))
    })
    .await
}

async fn services<S: Source>(
    State(web): State<Arc<Web<S>>>,
    Parameters(wanted): Parameters<Wanted>,
) -> Result<Response, Refusal> {
    blocking(move || Ok(web.sampler.services(|services| Json(services.page(&wanted)).into_response())?)).await
}

async fn service<S: Source>(
    State(web): State<Arc<Web<S>>>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<Json<Value>, Refusal> {
    blocking(move || {
        let ServicePorts { ports, agent_answers } = web.sampler.source.service(&namespace, &name)?;
        if ports.is_empty() {
            return Err(Refusal::Missing(format!("the kernel has no Service {namespace}/{name}")));
        }
        let with_rates = |mut port: Value| {
            let id = port["id"].as_u64().and_then(|id| u32::try_from(id).ok());
            let rates =
                id.map(|id| web.sampler.services(|services| json!(services.rates(id)))).transpose()?;
            if let Value::Object(port) = &mut port {
                port.insert("rates".to_owned(), rates.unwrap_or(Value::Null));
            }
            Ok(port)
        };
        let ports = ports.into_iter().map(with_rates).collect::<Result<Vec<_>, Refusal>>()?;
        Ok(Json(json!(ServicePorts { ports, agent_answers })))
    })
    .await
}

async fn connections<S: Source>(
    State(web): State<Arc<Web<S>>>,
    Parameters(query): Parameters<Query>,
) -> Result<Json<Value>, Refusal> {
    walking(web, move |web| {
        let found = web.sampler.source.connections(&query, SHOWN)?;
        Ok(Json(json!({ "matched": found.matched, "limit": SHOWN, "connections": found.shown })))
    })
    .await
}

async fn export<S: Source>(
    State(web): State<Arc<Web<S>>>,
    Parameters(query): Parameters<Query>,
) -> Result<Response, Refusal> {
    let text =
        walking(web, move |web| Ok(csv(&web.sampler.source.connections(&query, EXPORTED)?.shown))).await?;
    let headers = [
        (header::CONTENT_TYPE, "text/csv; charset=utf-8"),
        (header::CONTENT_DISPOSITION, "attachment; filename=\"connections.csv\""),
    ];
    Ok((headers, text).into_response())
}

/// A table in the format of RFC 4180. Values are addresses, numbers and names of Kubernetes objects, so no value needs
/// quotes.
fn csv(connections: &[Value]) -> String {
    let mut text = COLUMNS.join(",") + "\r\n";
    for connection in connections {
        let cell = |column: &&str| match &connection[*column] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
                other.to_string()
            }
        };
        let cells: Vec<String> = COLUMNS.iter().map(cell).collect();
        // Writing to a text cannot fail.
        write!(text, "{}\r\n", cells.join(",")).unwrap_or_default();
    }
    text
}

async fn explain<S: Source>(
    State(web): State<Arc<Web<S>>>,
    Parameters(query): Parameters<Query>,
) -> Result<Json<Value>, Refusal> {
    blocking(move || Ok(Json(web.sampler.source.explain(&query)?))).await
}

async fn live<S: Source>(
    State(web): State<Arc<Web<S>>>,
    Parameters(query): Parameters<Query>,
) -> Result<Response, Refusal> {
    let messages = blocking(move || {
        let filter = web.sampler.source.event_filter(&query)?;
        Ok(web.live.listen(&web.sampler.source, filter)?)
    })
    .await?;
    let event = |message| {
        let event = Event::default()
            .json_data(message)
            .unwrap_or_else(|error| Event::default().comment(error.to_string()));
        Ok::<_, Infallible>(event)
    };
    Ok(Sse::new(messages.map(event)).keep_alive(KeepAlive::default()).into_response())
}
