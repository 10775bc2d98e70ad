//! As much of an API server as a watch of Services and EndpointSlices sees of one.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use futures_util::stream;
use lb_tests::netns::Netns;
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::watch};

/// A server and what it knows, which outlives [`ApiServer::stop`].
pub(crate) struct ApiServer {
    store: Arc<Store>,
    netns: Netns,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

/// `services` or `endpointslices`
type Plural = &'static str;

#[derive(Default)]
struct Store {
    contents: Mutex<Contents>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Contents {
    version: u64,
    objects: BTreeMap<(Plural, String), Value>,
    events: Vec<(u64, Plural, Value)>,
    /// Watches from an older version than this get 410 Gone.
    oldest: u64,
    /// Watches of an older generation end.
    generation: u64,
    /// How long a list of EndpointSlices takes.
    slow: Duration,
    /// Whether EndpointSlices cannot be listed.
    broken: bool,
    requests: Vec<Request>,
}

/// A request that was made.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) plural: Plural,
    pub(crate) query: HashMap<String, String>,
}

impl Request {
    pub(crate) fn is_watch(&self) -> bool {
        self.query.get("watch").is_some_and(|watch| watch == "true")
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap()
    }
}

impl ApiServer {
    /// A server on the loopback device of the namespace.
    pub(crate) fn start(netns: &Netns) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self { store: Arc::default(), netns: netns.clone(), address, runtime: None };
        server.listen();
        server
    }

    /// Serves, after [`Self::stop`] again at the same address.
    pub(crate) fn listen(&mut self) {
        let listener = self.netns.run(|| TcpListener::bind(self.address)).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/api/v1/{plural}", get(answer))
            .route("/apis/discovery.k8s.io/v1/{plural}", get(answer))
            .with_state(Arc::clone(&self.store));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
        self.runtime = Some(runtime);
    }

    /// Is away: connections end, new ones are refused.
    pub(crate) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }

    /// A kubeconfig that leads here.
    pub(crate) fn kubeconfig(&self) -> String {
        let server = format!("http://{}", self.address);
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
        })
        .to_string()
    }

    /// Makes an object or changes it.
    pub(crate) fn put(&self, mut object: Value) {
        let mut contents = self.store.lock();
        let key = (plural(&object), object["metadata"]["name"].as_str().unwrap().to_owned());
        contents.version += 1;
        object["metadata"]["resourceVersion"] = contents.version.to_string().into();
        let kind = if contents.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        contents.objects.insert(key.clone(), object.clone());
        self.tell(contents, key.0, kind, object);
    }

    /// Deletes an object.
    pub(crate) fn delete(&self, plural: Plural, name: &str) {
        let mut contents = self.store.lock();
        contents.version += 1;
        let mut object = contents.objects.remove(&(plural, name.to_owned())).unwrap();
        object["metadata"]["resourceVersion"] = contents.version.to_string().into();
        self.tell(contents, plural, "DELETED", object);
    }

    fn tell(&self, mut contents: MutexGuard<'_, Contents>, plural: Plural, kind: &str, object: Value) {
        let version = contents.version;
        contents.events.push((version, plural, json!({"type": kind, "object": object})));
        drop(contents);
        self.store.changed.send_replace(());
    }

    /// Does something that no watch sees: all of them end, and what happened is forgotten.
    pub(crate) fn unseen(&self, change: impl FnOnce(&Self)) {
        self.store.lock().generation += 1;
        change(self);
        let mut contents = self.store.lock();
        contents.oldest = contents.version;
        contents.events.clear();
        drop(contents);
        self.store.changed.send_replace(());
    }

    /// Ends all watches, as a server does with those that are old.
    pub(crate) fn end_watches(&self) {
        self.store.lock().generation += 1;
        self.store.changed.send_replace(());
    }

    /// How long a list of EndpointSlices takes from now on.
    pub(crate) fn slow_slices(&self, slow: Duration) {
        self.store.lock().slow = slow;
    }

    /// Whether a list of EndpointSlices fails from now on.
    pub(crate) fn break_slices(&self, broken: bool) {
        self.store.lock().broken = broken;
    }

    /// All requests since the start.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.store.lock().requests.clone()
    }

    /// How many lists and how many watches were asked for.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let requests = self.requests();
        let watches = requests.iter().filter(|request| request.is_watch()).count();
        (requests.len() - watches, watches)
    }
}

fn plural(object: &Value) -> Plural {
    if object["kind"] == "Service" { "services" } else { "endpointslices" }
}

async fn answer(
    State(store): State<Arc<Store>>,
    Path(plural): Path<String>,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let plural = if plural == "services" { "services" } else { "endpointslices" };
    let request = Request { plural, query };
    store.lock().requests.push(request.clone());
    if request.is_watch() { follow(store, &request) } else { list(&store, plural).await }
}

async fn list(store: &Store, plural: Plural) -> Response {
    let (slow, broken) = {
        let contents = store.lock();
        (contents.slow, contents.broken)
    };
    if plural == "endpointslices" {
        tokio::time::sleep(slow).await;
        if broken {
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
    }
    let contents = store.lock();
    let of_kind = contents.objects.iter().filter(|((other, _), _)| *other == plural);
    let items: Vec<&Value> = of_kind.map(|(_, object)| object).collect();
    Json(json!({"metadata": {"resourceVersion": contents.version.to_string()}, "items": items}))
        .into_response()
}

/// Where a watch is.
struct Position {
    store: Arc<Store>,
    changed: watch::Receiver<()>,
    plural: Plural,
    version: u64,
    generation: u64,
    over: bool,
}

fn follow(store: Arc<Store>, request: &Request) -> Response {
    let version = request.query["resourceVersion"].parse().unwrap();
    let (changed, generation) = (store.changed.subscribe(), store.lock().generation);
    let plural = request.plural;
    let position = Position { store, changed, plural, version, generation, over: false };
    Body::from_stream(stream::unfold(position, next_line)).into_response()
}

async fn next_line(mut position: Position) -> Option<(Result<String, Infallible>, Position)> {
    loop {
        if position.over {
            return None;
        }
        if let Some(event) = position.event()? {
            return Some((Ok(format!("{event}\n")), position));
        }
        position.changed.changed().await.ok()?;
    }
}

impl Position {
    /// The next event, if there is one; `None` at the end of the watch.
    fn event(&mut self) -> Option<Option<Value>> {
        let contents = self.store.lock();
        if self.generation < contents.generation {
            return None;
        }
        if self.version < contents.oldest {
            self.over = true;
            return Some(Some(json!({"type": "ERROR", "object": {
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "too old resource version", "reason": "Expired", "code": 410,
            }})));
        }
        let mut newer = contents
            .events
            .iter()
            .filter(|(version, plural, _)| *version > self.version && *plural == self.plural);
        let (version, event) = match newer.next() {
            Some((version, _, event)) => (*version, event.clone()),
            None => return Some(None),
        };
        self.version = version;
        Some(Some(event))
    }
}
