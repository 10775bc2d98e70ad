//! The pages that show a node's data plane in a browser. Read-only; one binary, without requests to any other server.
//!
//! ```text
//! source    the trait by which the pages read the data plane; lb-agent implements it
//! sampler   reads the counters every two seconds      history   the last fifteen minutes of them
//! services  the table of Services, with rates         live      events, from one reader to all browsers
//! access    loopback, or a token                      api       the data of the pages, as JSON
//! assets    the files in `assets/`: HTML, CSS, ES modules, uPlot
//! docs      the files in `docs/` of the repository, as HTML
//! ```

mod access;
mod api;
mod assets;
mod docs;
mod history;
mod live;
mod sampler;
mod services;
mod source;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use axum::{
    Form, Router,
    extract::{Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Redirect, Response},
    routing::get,
};
use serde::Deserialize;
use tokio::{sync::Semaphore, time};

use self::{access::Admission, live::Live, sampler::Sampler};
pub use self::{
    access::{Access, Token, TokenError},
    docs::documentation,
    source::{
        Connections, EventFilter, EventReader, Fill, Problem, Query, ServicePort, ServicePorts,
        ServiceReader, Severity, Source, SourceError, Status,
    },
};

/// Pause after a wrong token.
const PENALTY: Duration = Duration::from_millis(500);
/// The content security policy: browsers load only files of this server, no inline code, no styles in tags.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
/// Headers of every answer.
const HEADERS: [(HeaderName, HeaderValue); 4] = [
    (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
];

/// The state that all routes share.
struct Web<S: Source> {
    sampler: Arc<Sampler<S>>,
    live: Live<S::Event>,
    access: Access,
    /// Permits for requests that read all connections.
    walks: Arc<Semaphore>,
}

/// How many requests may read all connections at once: each takes up to some 100 MB of memory and a thread.
const WALKS: usize = 2;

/// All routes. Also starts a task that reads the counters until the router is dropped, so the caller must be inside a
/// Tokio runtime.
pub fn router<S: Source>(source: S, access: Access) -> Router {
    let sampler = Arc::new(Sampler::new(source));
    tokio::spawn(Sampler::run(Arc::downgrade(&sampler)));
    let web =
        Arc::new(Web { sampler, live: Live::default(), access, walks: Arc::new(Semaphore::new(WALKS)) });
    let pages = ["/", "/services", "/services/{namespace}/{name}", "/connections", "/explain", "/live"];
    let pages = pages
        .into_iter()
        .fold(Router::new(), |router, path| router.route(path, get(async || assets::index())));
    pages
        .nest("/api", api::router())
        .route(
            "/assets/{*name}",
            get(async |Path(name): Path<String>, headers: HeaderMap| assets::file(&name, &headers)),
        )
        .route("/docs", get(async |headers: HeaderMap| docs::answer(None, &headers)))
        .route(
            "/docs/{name}",
            get(async |Path(name): Path<String>, headers: HeaderMap| docs::answer(Some(&name), &headers)),
        )
        .route("/login", get(async || assets::login(false)).post(log_in::<S>))
        .layer(middleware::from_fn_with_state(Arc::clone(&web), guard::<S>))
        .with_state(web)
}

/// Refuses requests that the access does not admit, and adds [`HEADERS`] to every response. The page of the login, with
/// its files, needs no login.
async fn guard<S: Source>(State(web): State<Arc<Web<S>>>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    // A browser may load the style sheet before it has logged in, because the page of the login needs it.
    let is_open = ["/login", "/assets/style.css", "/assets/icon.svg"].contains(&path);
    let mut response = match web.access.admits(request.uri(), request.headers()) {
        Admission::Allowed => next.run(request).await,
        Admission::LoginRequired if is_open => next.run(request).await,
        Admission::LoginRequired if request.method() == Method::GET && !path.starts_with("/api/") => {
            Redirect::to("/login").into_response()
        }
        Admission::LoginRequired => (StatusCode::UNAUTHORIZED, "log in at /login first").into_response(),
        Admission::WrongHost => {
            (StatusCode::FORBIDDEN, "open this page as localhost or 127.0.0.1: it answers to no other name")
                .into_response()
        }
        Admission::OtherSite => (StatusCode::FORBIDDEN, "only our own pages may read this").into_response(),
    };
    response.headers_mut().extend(HEADERS);
    if request_is_data(&response) {
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

/// Whether the response still lacks `Cache-Control`. (Pages and files already have it.)
fn request_is_data(response: &Response) -> bool {
    !response.headers().contains_key(header::CACHE_CONTROL)
}

#[derive(Deserialize)]
struct Typed {
    token: String,
}

async fn log_in<S: Source>(State(web): State<Arc<Web<S>>>, Form(Typed { token }): Form<Typed>) -> Response {
    match web.access.log_in(&token) {
        Some(cookie) => ([(header::SET_COOKIE, cookie)], Redirect::to("/")).into_response(),
        None => {
            time::sleep(PENALTY).await;
            assets::login(true)
        }
    }
}
