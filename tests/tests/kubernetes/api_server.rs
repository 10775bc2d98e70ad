//! As much of an API server as the agent sees of one: lists in pages, watches with selectors and bookmarks, changes by
//! apply and delete. And every fault of one.

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
    extract::{Query, State},
    http::{Method, StatusCode, Uri},
    response::{IntoResponse as _, Response},
};
use futures_util::stream;
use lb_tests::netns::Netns;
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::watch};

use crate::selection::Selection;

/// A server and what it knows, which outlives [`ApiServer::stop`].
pub(crate) struct ApiServer {
    store: Arc<Store>,
    /// Where it listens; `None` is where the test itself runs.
    netns: Option<Netns>,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct Store {
    contents: Mutex<Contents>,
    changed: watch::Sender<()>,
}

/// Where an object is: plural of its kind, namespace, name.
type Key = (String, String, String);

#[derive(Default)]
struct Contents {
    version: u64,
    objects: BTreeMap<Key, Value>,
    changes: Vec<Change>,
    /// Watches from an older version than this get 410 Gone.
    oldest: u64,
    /// Watches of an older generation end.
    generation: u64,
    faults: HashMap<String, Fault>,
    /// The rest of lists of which a page was fetched.
    pages: HashMap<String, Vec<Value>>,
    requests: Vec<Request>,
    events: Vec<Value>,
}

struct Change {
    version: u64,
    plural: String,
    before: Option<Value>,
    after: Option<Value>,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Object,
    Bookmark,
    /// The line is cut off in the middle, once, and the watch ends.
    Cut,
}

/// What goes wrong with a kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fault {
    /// How long a list takes.
    pub(crate) slow: Duration,
    /// The status that lists and watches are answered with.
    pub(crate) status: Option<u16>,
    /// Whether the second page of a list has always expired.
    pub(crate) expired_pages: bool,
    /// Whether watches end as soon as they have begun.
    pub(crate) short_watches: bool,
}

/// A list or a watch that was asked for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) plural: String,
    pub(crate) query: HashMap<String, String>,
}

impl Request {
    pub(crate) fn is_watch(&self) -> bool {
        self.query.get("watch").is_some_and(|watch| watch == "true")
    }

    fn selection(&self) -> Selection {
        let get = |name| self.query.get(name).map_or("", String::as_str);
        Selection::new(get("labelSelector"), get("fieldSelector"))
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap()
    }

    /// Makes, changes or removes an object, in a version of its own.
    fn set(&self, key: Key, mut object: Option<Value>, what: What) {
        let mut contents = self.lock();
        contents.version += 1;
        let version = contents.version;
        if let Some(object) = &mut object {
            object["metadata"]["resourceVersion"] = version.to_string().into();
        }
        let before = contents.objects.remove(&key);
        if let Some(object) = &object {
            contents.objects.insert(key.clone(), object.clone());
        }
        contents.changes.push(Change { version, plural: key.0, before, after: object, what });
        drop(contents);
        self.changed.send_replace(());
    }
}

impl ApiServer {
    /// A server on the loopback device of the namespace.
    pub(crate) fn start(netns: Option<&Netns>) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self { store: Arc::default(), netns: netns.cloned(), address, runtime: None };
        server.listen();
        server
    }

    /// Serves, after [`Self::stop`] again at the same address.
    pub(crate) fn listen(&mut self) {
        let bind = || TcpListener::bind(self.address);
        let listener = self.netns.as_ref().map_or_else(bind, |netns| netns.run(bind)).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(Arc::clone(&self.store));
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

    /// Takes an object without a look, also one that no API server would take.
    pub(crate) fn put(&self, object: Value) {
        self.store.set(key_of(&object), Some(object), What::Object);
    }

    /// Deletes an object, also while the server is away.
    pub(crate) fn delete(&self, object: &Value) {
        self.store.set(key_of(object), None, What::Object);
    }

    /// Takes an object; watches of its kind end in the middle of telling so.
    pub(crate) fn put_and_cut(&self, object: Value) {
        self.store.set(key_of(&object), Some(object), What::Cut);
    }

    /// Tells the watches of a kind the newest version.
    pub(crate) fn bookmark(&self, plural: &str) {
        let mut contents = self.store.lock();
        contents.version += 1;
        let (version, plural) = (contents.version, plural.to_owned());
        contents.changes.push(Change { version, plural, before: None, after: None, what: What::Bookmark });
        drop(contents);
        self.store.changed.send_replace(());
    }

    /// Does something that no watch sees: all of them end, and what happened is forgotten.
    pub(crate) fn unseen(&self, change: impl FnOnce(&Self)) {
        self.store.lock().generation += 1;
        change(self);
        self.forget();
    }

    /// All that happened so far is forgotten: who asks for it gets 410 Gone.
    pub(crate) fn forget(&self) {
        let mut contents = self.store.lock();
        contents.oldest = contents.version;
        contents.changes.clear();
        contents.pages.clear();
        drop(contents);
        self.store.changed.send_replace(());
    }

    /// Ends all watches, as a server does with those that are old.
    pub(crate) fn end_watches(&self) {
        self.store.lock().generation += 1;
        self.store.changed.send_replace(());
    }

    /// What goes wrong with a kind from now on.
    pub(crate) fn set_fault(&self, plural: &str, fault: Fault) {
        self.store.lock().faults.insert(plural.to_owned(), fault);
    }

    /// All lists and watches since the start.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.store.lock().requests.clone()
    }

    /// All events that were told.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.store.lock().events.clone()
    }

    /// How many first pages of lists and how many watches of a kind were asked for.
    pub(crate) fn counts(&self, plural: &str) -> (usize, usize) {
        let requests = self.requests();
        let of_kind = requests.iter().filter(|request| request.plural == plural);
        let (watches, lists): (Vec<_>, Vec<_>) = of_kind.partition(|request| request.is_watch());
        (lists.iter().filter(|list| !list.query.contains_key("continue")).count(), watches.len())
    }
}

fn key_of(object: &Value) -> Key {
    let plural = format!("{}s", object["kind"].as_str().unwrap().to_lowercase());
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (plural, text("namespace"), text("name"))
}

/// What a path leads to.
struct Target {
    plural: String,
    namespace: String,
    name: Option<String>,
    status: bool,
}

impl Target {
    fn new(path: &str) -> Option<Self> {
        let mut segments = path.trim_matches('/').split('/').map(str::to_owned);
        let depth = if segments.next()? == "api" { 1 } else { 2 };
        let mut segments = segments.skip(depth).peekable();
        let mut namespace = String::new();
        if segments.next_if(|segment| segment == "namespaces").is_some() {
            namespace = segments.next()?;
            if segments.peek().is_none() {
                let (plural, name) = ("namespaces".to_owned(), Some(namespace));
                return Some(Self { plural, namespace: String::new(), name, status: false });
            }
        }
        let (plural, name, status) = (segments.next()?, segments.next(), segments.next().is_some());
        Some(Self { plural, namespace, name, status })
    }
}

async fn answer(
    State(store): State<Arc<Store>>,
    method: Method,
    uri: Uri,
    Query(query): Query<HashMap<String, String>>,
    body: String,
) -> Response {
    let Some(Target { plural, namespace, name, status }) = Target::new(uri.path()) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match (method, name) {
        (Method::GET, None) => {
            let request = Request { plural, query };
            store.lock().requests.push(request.clone());
            read(store, &request).await
        }
        (Method::PATCH, Some(name)) => apply(&store, (plural, namespace, name), status, &body),
        (Method::DELETE, Some(name)) => {
            store.set((plural, namespace, name), None, What::Object);
            Json(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))
                .into_response()
        }
        // Events.
        (Method::POST, None) => {
            store.lock().events.push(serde_json::from_str(&body).unwrap());
            (StatusCode::CREATED, body).into_response()
        }
        _ => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

fn apply(store: &Store, key: Key, status: bool, body: &str) -> Response {
    let mut object: Value = serde_json::from_str(body).unwrap();
    let known = store.lock().objects.get(&key).cloned();
    match known {
        Some(known) if status => {
            object = Value::Object(
                [&known, &object].into_iter().flat_map(|o| o.as_object().unwrap().clone()).collect(),
            );
            object["metadata"] = known["metadata"].clone();
            set_transition_times(&mut object);
        }
        Some(known) => {
            object["metadata"]["uid"] = known["metadata"]["uid"].clone();
            object["status"] = known["status"].clone();
        }
        None => object["metadata"]["uid"] = format!("uid-{}", store.lock().version).into(),
    }
    store.set(key, Some(object.clone()), What::Object);
    Json(object).into_response()
}

/// A condition without `lastTransitionTime` gets `null`: what the encoder of the API server makes of an unset time.
fn set_transition_times(object: &mut Value) {
    for condition in object["status"]["conditions"].as_array_mut().into_iter().flatten() {
        condition.as_object_mut().unwrap().entry("lastTransitionTime").or_insert(Value::Null);
    }
}

async fn read(store: Arc<Store>, request: &Request) -> Response {
    let fault = store.lock().faults.get(&request.plural).copied().unwrap_or_default();
    if let Some(code) = fault.status {
        return failure(code);
    }
    if request.is_watch() && fault.short_watches {
        return StatusCode::OK.into_response();
    }
    if request.is_watch() {
        return follow(store, request);
    }
    tokio::time::sleep(fault.slow).await;
    if fault.expired_pages && request.query.contains_key("continue") {
        return failure(410);
    }
    list(&store, request)
}

fn failure(code: u16) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("a fault {code}"), "reason": "Fault", "code": code,
    });
    (StatusCode::from_u16(code).unwrap(), Json(status)).into_response()
}

fn list(store: &Store, request: &Request) -> Response {
    let mut contents = store.lock();
    let mut items = match request.query.get("continue") {
        Some(token) => match contents.pages.remove(token) {
            Some(rest) => rest,
            None => return failure(410),
        },
        None => {
            let selection = request.selection();
            let objects = contents.objects.iter();
            let of_kind = objects
                .filter(|((plural, ..), object)| *plural == request.plural && selection.matches(object));
            of_kind.map(|(_, object)| object.clone()).collect()
        }
    };
    let limit = request.query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
    let mut metadata = json!({"resourceVersion": contents.version.to_string()});
    if items.len() > limit {
        let token = format!("{}-{}", request.plural, contents.pages.len());
        metadata["continue"] = token.clone().into();
        let rest = items.split_off(limit);
        contents.pages.insert(token, rest);
    }
    Json(json!({"metadata": metadata, "items": items})).into_response()
}

/// Where a watch is.
struct Position {
    store: Arc<Store>,
    changed: watch::Receiver<()>,
    plural: String,
    selection: Selection,
    version: u64,
    generation: u64,
    over: bool,
}

fn follow(store: Arc<Store>, request: &Request) -> Response {
    let version = request.query["resourceVersion"].parse().unwrap();
    let (changed, generation) = (store.changed.subscribe(), store.lock().generation);
    let (plural, selection) = (request.plural.clone(), request.selection());
    let position = Position { store, changed, plural, selection, version, generation, over: false };
    Body::from_stream(stream::unfold(position, next_line)).into_response()
}

async fn next_line(mut position: Position) -> Option<(Result<String, Infallible>, Position)> {
    loop {
        if position.over {
            return None;
        }
        if let Some(line) = position.line()? {
            return Some((Ok(line), position));
        }
        position.changed.changed().await.ok()?;
    }
}

impl Position {
    /// The next line, if there is one; `None` at the end of the watch.
    fn line(&mut self) -> Option<Option<String>> {
        let store = Arc::clone(&self.store);
        let contents = &mut *store.lock();
        if self.generation < contents.generation {
            return None;
        }
        if self.version < contents.oldest {
            self.over = true;
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "too old resource version", "reason": "Expired", "code": 410,
            });
            return Some(Some(format!("{}\n", json!({"type": "ERROR", "object": status}))));
        }
        let seen = self.version;
        for change in contents.changes.iter_mut().filter(|change| change.version > seen) {
            self.version = change.version;
            if let Some(event) = self.event(change) {
                let mut line = format!("{event}\n");
                if change.what == What::Cut {
                    line.truncate(line.len() / 2);
                    self.over = true;
                    change.what = What::Object;
                }
                return Some(Some(line));
            }
        }
        Some(None)
    }

    /// What a watch with this selection sees of a change.
    fn event(&self, change: &Change) -> Option<Value> {
        if change.plural != self.plural {
            return None;
        }
        let version = Value::from(change.version.to_string());
        if change.what == What::Bookmark {
            let object =
                json!({"kind": "Bookmark", "apiVersion": "v1", "metadata": {"resourceVersion": version}});
            return Some(json!({"type": "BOOKMARK", "object": object}));
        }
        let seen = |object: &Option<Value>| object.clone().filter(|object| self.selection.matches(object));
        let (kind, mut object) = match (seen(&change.before), seen(&change.after)) {
            (None, Some(after)) => ("ADDED", after),
            (Some(_), Some(after)) => ("MODIFIED", after),
            (Some(before), None) => ("DELETED", before),
            (None, None) => return None,
        };
        object["metadata"]["resourceVersion"] = version;
        Some(json!({"type": kind, "object": object}))
    }
}
