//! All routes, over a data plane that is made up.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::bail;
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, Response, StatusCode, header},
};
use futures_util::StreamExt as _;
use lb_common::Outcome;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use super::*;

const SECRET: &str = "a secret of enough characters";

/// A data plane with one Service.
#[derive(Clone, Default)]
struct Made {
    /// Whether the data plane is gone.
    gone: Arc<AtomicBool>,
    /// Number of event readers that exist.
    readers: Arc<AtomicUsize>,
    status_readings: Arc<AtomicUsize>,
}

impl Made {
    fn is_there(&self) -> anyhow::Result<()> {
        if self.gone.load(Ordering::Relaxed) {
            bail!("there is no data plane at /sys/fs/bpf/lb: start the agent");
        }
        Ok(())
    }
}

struct OnePort;

impl ServiceReader for OnePort {
    fn read(&mut self) -> anyhow::Result<Vec<ServicePort>> {
        Ok(vec![ServicePort {
            id: 7,
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            port: 80,
            port_name: String::new(),
            protocol: "TCP",
            frontends: vec![([10, 96, 0, 10], 80).into()],
            ready: 1,
            terminating: 0,
            unhealthy: 0,
            traffic: BTreeMap::new(),
        }])
    }
}

/// An event reader whose only event at each reading is the number of that reading.
struct Counting {
    next: u32,
    readers: Arc<AtomicUsize>,
}

impl EventReader<u32> for Counting {
    fn read(&mut self, _: Duration) -> anyhow::Result<(Vec<u32>, u64)> {
        std::thread::sleep(Duration::from_millis(5));
        self.next += 1;
        Ok((vec![self.next], u64::from(self.next == 3)))
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Source for Made {
    type Event = u32;

    fn packets(&self) -> anyhow::Result<[u64; Outcome::COUNT]> {
        self.is_there().map(|()| [0; Outcome::COUNT])
    }

    fn fill(&self) -> anyhow::Result<Vec<Fill>> {
        Ok(vec![Fill { name: "FLOWS", entries: 1, capacity: 2 }])
    }

    fn services(&self) -> Box<dyn ServiceReader> {
        Box::new(OnePort)
    }

    fn status(&self) -> anyhow::Result<Status> {
        self.is_there()?;
        self.status_readings.fetch_add(1, Ordering::Relaxed);
        let problem = Problem { severity: Severity::Warning, topic: "Agent", text: "not running".to_owned() };
        Ok(Status { problems: vec![problem], status: json!({ "maps": [] }) })
    }

    fn service(&self, namespace: &str, name: &str) -> anyhow::Result<ServicePorts> {
        self.is_there()?;
        let web = json!({ "id": 7, "port": 80, "healthCheck": { "unhealthy": 1 } });
        let ports = if (namespace, name) == ("default", "web") { vec![web] } else { Vec::new() };
        Ok(ServicePorts { ports, agent_answers: true })
    }

    fn connections(&self, query: &Query, limit: usize) -> Result<Connections, SourceError> {
        let flow = json!({ "protocol": "TCP", "client": "192.0.2.1:40000", "vip": "10.96.0.10:80",
            "backend": "10.1.0.5:8080", "phase": "established", "idleSeconds": 3, "secondsLeft": 86397,
            "service": null, "tunnelled": false, "half": false });
        match query.get("client").map(String::as_str) {
            Some("here") => Err(SourceError::Question("--client: here is no address".to_owned())),
            _ => Ok(Connections { matched: limit + 1, shown: vec![flow] }),
        }
    }

    fn explain(&self, query: &Query) -> Result<Value, SourceError> {
        Ok(json!({ "from": query.get("from") }))
    }

    fn event_filter(&self, query: &Query) -> Result<EventFilter<u32>, SourceError> {
        let even = query.contains_key("even");
        Ok(Box::new(move |event| !even || event % 2 == 0))
    }

    fn events(&self) -> anyhow::Result<Box<dyn EventReader<u32>>> {
        if self.readers.fetch_add(1, Ordering::Relaxed) > 0 {
            self.readers.fetch_sub(1, Ordering::Relaxed);
            bail!("another monitor runs");
        }
        Ok(Box::new(Counting { next: 0, readers: Arc::clone(&self.readers) }))
    }
}

fn on_loopback() -> Router {
    router(Made::default(), Access::Loopback)
}

async fn send(router: &Router, request: Request<Body>) -> Response<Body> {
    router.clone().oneshot(request).await.unwrap()
}

async fn get(router: &Router, path: &str) -> Response<Body> {
    send(router, Request::get(path).header("host", "localhost:8088").body(Body::empty()).unwrap()).await
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap()
}

async fn data(router: &Router, path: &str) -> (StatusCode, Value) {
    let response = get(router, path).await;
    (response.status(), serde_json::from_str(&text(response).await).unwrap())
}

fn head<'a>(response: &'a Response<Body>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

#[tokio::test]
async fn every_page_has_an_address_of_its_own() {
    let router = on_loopback();
    for path in ["/", "/services", "/services/default/web", "/connections?phase=closed", "/explain", "/live"]
    {
        let response = get(&router, path).await;
        assert_eq!(
            (response.status(), head(&response, "content-type")),
            (StatusCode::OK, "text/html; charset=utf-8")
        );
        assert!(text(response).await.contains("src=\"/assets/app.js\""), "{path}");
    }
    assert_eq!(get(&router, "/nothing").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn every_answer_has_a_strict_policy() {
    let router = on_loopback();
    for path in [
        "/",
        "/nothing",
        "/docs",
        "/docs/datapath",
        "/docs/nothing",
        "/assets/app.js",
        "/assets/nothing",
        "/api/overview",
        "/api/nothing",
        "/login",
    ] {
        let response = get(&router, path).await;
        let policy = head(&response, "content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"),
            "{path}: {policy}"
        );
        assert!(!policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"), "{path}: {policy}");
        assert_eq!(head(&response, "x-content-type-options"), "nosniff", "{path}");
        assert_eq!(head(&response, "referrer-policy"), "no-referrer", "{path}");
        let cached = head(&response, "cache-control");
        let is_in_binary = path.starts_with("/assets/") || path.starts_with("/docs");
        assert!(cached == "no-store" || is_in_binary, "{path}: {cached}");
    }
}

#[tokio::test]
async fn documentation_is_served() {
    let router = on_loopback();
    let first = get(&router, "/docs/datapath").await;
    assert_eq!((first.status(), head(&first, "content-type")), (StatusCode::OK, "text/html; charset=utf-8"));
    let tag = head(&first, "etag").to_owned();
    assert!(text(first).await.contains("<h2 id=\"xdp-routed-flows\">"));
    let again = Request::get("/docs/datapath").header("host", "localhost").header("if-none-match", tag);
    let again = send(&router, again.body(Body::empty()).unwrap()).await;
    assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
    assert!(text(get(&router, "/docs").await).await.contains("<a href=\"/docs/datapath\">"));
    for path in ["/docs/nothing", "/docs/..%2FREADME"] {
        assert_eq!(get(&router, path).await.status(), StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn unchanged_file_is_not_sent_again() {
    let router = on_loopback();
    let first = get(&router, "/assets/uplot/uPlot.min.css").await;
    let (tag, cached) = (head(&first, "etag").to_owned(), head(&first, "cache-control").to_owned());
    assert_eq!(
        (first.status(), head(&first, "content-type"), &*cached),
        (StatusCode::OK, "text/css; charset=utf-8", "no-cache")
    );
    let again =
        Request::get("/assets/uplot/uPlot.min.css").header("host", "localhost").header("if-none-match", tag);
    let again = send(&router, again.body(Body::empty()).unwrap()).await;
    assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
}

#[tokio::test]
async fn pages_only_read() {
    let router = on_loopback();
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        for path in ["/", "/services", "/api/overview", "/api/connections", "/api/explain"] {
            let request = Request::builder().method(method).uri(path).header("host", "localhost");
            let status = send(&router, request.body(Body::empty()).unwrap()).await.status();
            assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn rebound_name_gets_nothing() {
    let router = on_loopback();
    for path in ["/", "/api/overview", "/assets/app.js"] {
        let request = Request::get(path).header("host", "evil.example:8088").body(Body::empty()).unwrap();
        let response = send(&router, request).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{path}");
        assert!(text(response).await.contains("127.0.0.1"), "{path}");
    }
}

#[tokio::test]
async fn overview_has_plots_problems_and_status() {
    let (status, answer) = data(&on_loopback(), "/api/overview").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        answer["state"]["problems"][0],
        json!({ "severity": "warning", "topic": "Agent", "text": "not running" })
    );
    assert_eq!((&answer["plots"]["step"], &answer["plots"]["points"]), (&json!(2), &json!(450)));
}

#[tokio::test]
async fn status_is_read_once_for_many_browsers() {
    let made = Made::default();
    let router = router(made.clone(), Access::Loopback);
    for _ in 0..5 {
        data(&router, "/api/overview").await;
    }
    assert_eq!(made.status_readings.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn lost_data_plane_is_an_answer_that_says_what_to_do() {
    let made = Made::default();
    made.gone.store(true, Ordering::Relaxed);
    let router = router(made, Access::Loopback);
    let (status, answer) = data(&router, "/api/overview").await;
    assert_eq!((status, &answer["state"]), (StatusCode::OK, &Value::Null));
    assert_eq!(answer["failure"], "there is no data plane at /sys/fs/bpf/lb: start the agent");
    let (status, answer) = data(&router, "/api/service/default/web").await;
    assert_eq!(
        (status, &answer["error"]),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            &json!("there is no data plane at /sys/fs/bpf/lb: start the agent")
        )
    );
}

#[tokio::test]
async fn services_are_searched_by_the_server() {
    let router = on_loopback();
    let (_, page) = data(&router, "/api/services?q=web&sort=newFlows&reverse=true&offset=0&limit=50").await;
    assert_eq!((&page["matched"], &page["rows"][0]["address"]), (&json!(1), &json!("10.96.0.10:80")));
    let (_, page) = data(&router, "/api/services?q=other&limit=50").await;
    assert_eq!((&page["matched"], &page["total"]), (&json!(0), &json!(1)));
}

#[tokio::test]
async fn service_has_the_rates_of_its_ports() {
    let router = on_loopback();
    let (_, page) = data(&router, "/api/service/default/web").await;
    assert_eq!(page["ports"][0]["rates"]["newFlows"], 0.0, "{page}");
    assert_eq!(page["ports"][0]["healthCheck"]["unhealthy"], 1, "{page}");
    assert_eq!(page["agentAnswers"], true, "{page}");
    let (status, page) = data(&router, "/api/service/default/none").await;
    assert_eq!(
        (status, &page["error"]),
        (StatusCode::NOT_FOUND, &json!("the kernel has no Service default/none"))
    );
}

#[tokio::test]
async fn connections_are_bounded_and_exported() {
    let router = on_loopback();
    let (_, page) = data(&router, "/api/connections").await;
    assert_eq!((&page["matched"], &page["limit"]), (&json!(1001), &json!(1000)));
    let (status, page) = data(&router, "/api/connections?client=here").await;
    assert_eq!((status, &page["error"]), (StatusCode::BAD_REQUEST, &json!("--client: here is no address")));
    let response = get(&router, "/api/connections.csv").await;
    assert_eq!(head(&response, "content-disposition"), "attachment; filename=\"connections.csv\"");
    let expected = "protocol,client,vip,backend,masqueradedAs,phase,idleSeconds,secondsLeft,service,tunnelled,half\r\n\
                    TCP,192.0.2.1:40000,10.96.0.10:80,10.1.0.5:8080,,established,3,86397,,false,false\r\n";
    assert_eq!(text(response).await, expected);
}

#[tokio::test]
async fn explain_gets_the_flags_of_the_command() {
    let (_, answer) = data(&on_loopback(), "/api/explain?from=192.0.2.1").await;
    assert_eq!(answer, json!({ "from": "192.0.2.1" }));
}

/// The first message of `/api/live`.
async fn message(router: &Router, query: &str) -> Value {
    let mut body = get(router, &format!("/api/live{query}")).await.into_body().into_data_stream();
    let bytes = body.next().await.unwrap().unwrap();
    let text = std::str::from_utf8(&bytes).unwrap();
    serde_json::from_str(text.trim().strip_prefix("data: ").unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_reader_serves_every_listener_and_ends_with_the_last() {
    let made = Made::default();
    let router = router(made.clone(), Access::Loopback);
    let (all, even) = tokio::join!(message(&router, ""), message(&router, "?even=1"));
    let numbers = |message: &Value| -> Vec<u64> {
        message["events"].as_array().unwrap().iter().map(|event| event.as_u64().unwrap()).collect()
    };
    assert!(numbers(&all).is_sorted() && numbers(&all).len() > 1, "{all}");
    assert_eq!((&all["skipped"], &all["failure"]), (&json!(1), &Value::Null));
    assert!(!numbers(&even).is_empty() && numbers(&even).iter().all(|number| number % 2 == 0), "{even}");
    while made.readers.load(Ordering::Relaxed) > 0 {
        time::sleep(Duration::from_millis(5)).await;
    }
    assert!(numbers(&message(&router, "").await)[0] < 10, "a new reader");
}

#[tokio::test]
async fn busy_monitor_is_an_error() {
    let made = Made::default();
    made.readers.store(1, Ordering::Relaxed);
    let (status, answer) = data(&router(made, Access::Loopback), "/api/live").await;
    assert_eq!((status, &answer["error"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("another monitor runs")));
}

async fn post_token(router: &Router, token: &str) -> Response<Body> {
    let request = Request::post("/login").header("content-type", "application/x-www-form-urlencoded");
    send(router, request.body(Body::from(format!("token={}", token.replace(' ', "+")))).unwrap()).await
}

#[tokio::test]
async fn token_opens_a_session() {
    let router = router(Made::default(), Access::Token(Token::new(SECRET).unwrap()));
    let page = get(&router, "/services").await;
    assert_eq!((page.status(), head(&page, "location")), (StatusCode::SEE_OTHER, "/login"));
    assert_eq!(get(&router, "/api/overview").await.status(), StatusCode::UNAUTHORIZED);
    for path in ["/assets/app.js", "/docs", "/docs/datapath"] {
        assert_eq!(get(&router, path).await.status(), StatusCode::SEE_OTHER, "{path}");
    }
    assert!(text(get(&router, "/login").await).await.contains("name=\"token\""));

    let wrong = post_token(&router, "another secret of enough characters").await;
    assert_eq!((wrong.status(), head(&wrong, "set-cookie")), (StatusCode::FORBIDDEN, ""));
    assert!(text(wrong).await.contains("This is not the token"));

    let right = post_token(&router, SECRET).await;
    assert_eq!((right.status(), head(&right, "location")), (StatusCode::SEE_OTHER, "/"));
    let cookie = head(&right, header::SET_COOKIE.as_str()).split(';').next().unwrap().to_owned();
    let request = Request::get("/api/overview").header("cookie", cookie).body(Body::empty()).unwrap();
    assert_eq!(send(&router, request).await.status(), StatusCode::OK);
}
