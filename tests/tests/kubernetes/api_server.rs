//! A mock of the part of an API server that the agent uses: paged lists, watches with selectors and bookmarks, apply,
//! merge patches and replacements that compare versions, and delete. It can also simulate faults.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, Request as Asked, State},
    http::{HeaderMap, Method, StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::get as get_route,
    serve::ListenerExt as _,
};
use futures_util::stream;
use lb_tests::{netns::Netns, server::bind};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::watch};

use crate::{
    pod_exec::{self, PodExec},
    selection::Selection,
};

/// A mock API server with its objects, which stay after [`ApiServer::stop`].
pub(crate) struct ApiServer {
    store: Arc<Store>,
    /// The namespace in which the server listens; `None` for that of the test process.
    netns: Option<Netns>,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct Store {
    contents: Mutex<Contents>,
    changed: watch::Sender<()>,
}

/// The identity of an object: plural of its kind, namespace, name.
type Key = (String, String, String);

#[derive(Default)]
struct Contents {
    version: u64,
    objects: BTreeMap<Key, Value>,
    changes: Vec<Change>,
    /// Oldest version from which a watch can start; a watch from an older version gets 410 Gone.
    oldest: u64,
    /// Generation of watches; watches of an older generation end.
    generation: u64,
    faults: HashMap<String, Fault>,
    /// For each token of a paged list, the objects that later pages will contain.
    pages: HashMap<String, Vec<Value>>,
    requests: Vec<Request>,
    events: Vec<Value>,
    /// How the server answers `exec` in a Pod, by the Pod's name.
    pods: HashMap<String, PodExec>,
    /// Number of patches that were refused, because their `resourceVersion` was outdated or [`Fault::status_patch`]
    /// was set.
    refused_writes: usize,
}

struct Change {
    version: u64,
    plural: String,
    before: Option<Value>,
    after: Option<Value>,
    kind: ChangeKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChangeKind {
    Object,
    Bookmark,
    /// The first watch that sends this change ends in the middle of the line.
    Cut,
}

/// Faults that the server simulates for one resource.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fault {
    /// Whether the server answers no list until this is reset.
    pub(crate) held: bool,
    /// HTTP status with which all lists and watches are answered; `None` for normal answers.
    pub(crate) status: Option<u16>,
    /// Whether all pages of a list except the first have expired.
    pub(crate) expired_pages: bool,
    /// Whether each watch ends as soon as it has begun.
    pub(crate) short_watches: bool,
    /// HTTP status with which the server refuses patches of an object's status, such as 409 as if another client had
    /// been faster; `None` for normal answers.
    pub(crate) status_patch: Option<u16>,
}

/// A request for a list or a watch that the server has received.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) plural: String,
    pub(crate) query: HashMap<String, String>,
    pub(crate) time: Instant,
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

    /// Creates, changes or deletes an object, with a new resource version.
    fn set(&self, key: Key, mut object: Option<Value>, kind: ChangeKind) {
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
        contents.changes.push(Change { version, plural: key.0, before, after: object, kind });
        drop(contents);
        self.changed.send_replace(());
    }
}

impl ApiServer {
    /// Starts a server on the loopback device of the namespace; `None` stands for the namespace of the test process.
    pub(crate) fn start(netns: Option<&Netns>) -> Self {
        Self::start_at(netns, Ipv4Addr::LOCALHOST.into())
    }

    /// Starts a server at an address of the namespace.
    pub(crate) fn start_at(netns: Option<&Netns>, address: IpAddr) -> Self {
        let address = SocketAddr::new(address, 0);
        let mut server = Self { store: Arc::default(), netns: netns.cloned(), address, runtime: None };
        server.listen();
        server
    }

    /// Starts to listen; after [`Self::stop`], at the same address as before.
    pub(crate) fn listen(&mut self) {
        let bind = || bind(|| TcpListener::bind(self.address));
        let listener = self.netns.as_ref().map_or_else(bind, |netns| netns.run(bind)).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = Router::new()
            .route(EXEC, get_route(exec_in_pod))
            .fallback(answer)
            .with_state(Arc::clone(&self.store));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            // Like real API servers, sends at once: else an event may wait 40 ms for the ACK of the previous event.
            let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
            axum::serve(listener, router).await.unwrap();
        });
        self.runtime = Some(runtime);
    }

    /// Ends all connections and refuses new ones.
    pub(crate) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }

    /// The text of a kubeconfig for this server.
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

    /// Stores an object without validating it.
    pub(crate) fn put(&self, object: Value) {
        self.store.set(key_of(&object), Some(object), ChangeKind::Object);
    }

    /// Deletes an object; possible also while the server is stopped.
    pub(crate) fn delete(&self, object: &Value) {
        self.store.set(key_of(object), None, ChangeKind::Object);
    }

    /// Stores an object; the first watch that sends the change ends in the middle of the line.
    pub(crate) fn put_and_cut(&self, object: Value) {
        self.store.set(key_of(&object), Some(object), ChangeKind::Cut);
    }

    /// Sends a bookmark with a new version to all watches of a resource.
    pub(crate) fn bookmark(&self, plural: &str) {
        let mut contents = self.store.lock();
        contents.version += 1;
        let (version, plural) = (contents.version, plural.to_owned());
        contents.changes.push(Change {
            version,
            plural,
            before: None,
            after: None,
            kind: ChangeKind::Bookmark,
        });
        drop(contents);
        self.store.changed.send_replace(());
    }

    /// Makes changes that no watch reports: ends all watches and drops the history.
    pub(crate) fn unseen(&self, change: impl FnOnce(&Self)) {
        self.store.lock().generation += 1;
        change(self);
        self.drop_history();
    }

    /// Drops the history: watches from earlier versions, and further pages of lists, get 410 Gone.
    pub(crate) fn drop_history(&self) {
        let mut contents = self.store.lock();
        contents.oldest = contents.version;
        contents.changes.clear();
        contents.pages.clear();
        drop(contents);
        self.store.changed.send_replace(());
    }

    /// Ends all watches, as an API server does after some time.
    pub(crate) fn end_watches(&self) {
        self.store.lock().generation += 1;
        self.store.changed.send_replace(());
    }

    /// Sets the faults that the server simulates for a resource.
    pub(crate) fn set_fault(&self, plural: &str, fault: Fault) {
        self.store.lock().faults.insert(plural.to_owned(), fault);
        self.store.changed.send_replace(());
    }

    /// Sets how the server answers `exec` in a Pod.
    pub(crate) fn set_exec(&self, pod: &str, exec: PodExec) {
        self.store.lock().pods.insert(pod.to_owned(), exec);
    }

    /// All requests for lists and watches since the server was created.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.store.lock().requests.clone()
    }

    /// An object as the server has stored it.
    pub(crate) fn object(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.store.lock().objects.get(&key).cloned()
    }

    /// Number of patches that were refused, because their `resourceVersion` was outdated or [`Fault::status_patch`]
    /// was set.
    pub(crate) fn refused_writes(&self) -> usize {
        self.store.lock().refused_writes
    }

    /// All Events that clients have created.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.store.lock().events.clone()
    }

    /// Number of lists (only first pages count) and of watches of a resource that clients have requested.
    pub(crate) fn counts(&self, plural: &str) -> (usize, usize) {
        let requests = self.requests();
        let of_kind = requests.iter().filter(|request| request.plural == plural);
        let (watches, lists): (Vec<_>, Vec<_>) = of_kind.partition(|request| request.is_watch());
        (lists.iter().filter(|list| !list.query.contains_key("continue")).count(), watches.len())
    }
}

fn key_of(object: &Value) -> Key {
    let kind = object["kind"].as_str().unwrap().to_lowercase();
    let plural = kind.strip_suffix('y').map_or_else(|| format!("{kind}s"), |stem| format!("{stem}ies"));
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (plural, text("namespace"), text("name"))
}

/// The resource that a request's path names.
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
            let name = segments.next();
            if segments.peek().is_none() {
                let plural = "namespaces".to_owned();
                return Some(Self { plural, namespace: String::new(), name, status: false });
            }
            namespace = name?;
        }
        let (plural, name, status) = (segments.next()?, segments.next(), segments.next().is_some());
        Some(Self { plural, namespace, name, status })
    }
}

/// Route of `exec` in a Pod.
const EXEC: &str = "/api/v1/namespaces/{namespace}/pods/{name}/exec";

/// Answers an `exec` request for a Pod.
async fn exec_in_pod(
    State(store): State<Arc<Store>>,
    Path((_, name)): Path<(String, String)>,
    Query(query): Query<Vec<(String, String)>>,
    request: Asked,
) -> Response {
    let pod = store.lock().pods.get(&name).cloned();
    let words = query.into_iter().filter(|(field, _)| field == "command").map(|(_, word)| word);
    match pod {
        Some(PodExec::Forbidden) => failure(403),
        Some(pod) => pod_exec::answer(pod, words.collect(), request),
        None => failure(404),
    }
}

async fn answer(
    State(store): State<Arc<Store>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    Query(query): Query<HashMap<String, String>>,
    body: String,
) -> Response {
    let Some(Target { plural, namespace, name, status }) = Target::new(uri.path()) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match (method, name) {
        (Method::GET, None) => {
            let request = Request { plural, query, time: Instant::now() };
            store.lock().requests.push(request.clone());
            read(store, &request).await
        }
        (Method::GET, Some(name)) => get(&store, &(plural, namespace, name)),
        (Method::PATCH, Some(name))
            if headers
                .get(CONTENT_TYPE)
                .is_some_and(|kind| MERGE_PATCHES.iter().any(|known| kind == known)) =>
        {
            merge(&store, (plural, namespace, name), status, &body)
        }
        (Method::PATCH, Some(name)) => apply(&store, (plural, namespace, name), &body),
        (Method::PUT, Some(name)) => replace(&store, (plural, namespace, name), &body),
        (Method::DELETE, Some(name)) => {
            store.set((plural, namespace, name), None, ChangeKind::Object);
            Json(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))
                .into_response()
        }
        (Method::POST, None) if plural == "events" => {
            store.lock().events.push(serde_json::from_str(&body).unwrap());
            (StatusCode::CREATED, body).into_response()
        }
        (Method::POST, None) => create(&store, plural, namespace, &body),
        _ => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

/// The types of a merge patch and of a strategic merge patch. Both have the same effect unless the patch contains a
/// list that Kubernetes merges with the object's list, such as the list of containers; no test sends such a patch.
const MERGE_PATCHES: [&str; 2] = ["application/merge-patch+json", "application/strategic-merge-patch+json"];

fn get(store: &Store, key: &Key) -> Response {
    store.lock().objects.get(key).map_or_else(|| failure(404), |object| Json(object.clone()).into_response())
}

/// Server-side apply, as far as the tests need it: the body replaces everything but identity and status.
fn apply(store: &Store, key: Key, body: &str) -> Response {
    let mut object: Value = serde_json::from_str(body).unwrap();
    let known = store.lock().objects.get(&key).cloned();
    match known {
        Some(known) => {
            object["metadata"]["uid"] = known["metadata"]["uid"].clone();
            object["metadata"]["creationTimestamp"] = known["metadata"]["creationTimestamp"].clone();
            // Fields of other managers stay. In these tests, the only such field is the annotation `GIVEN`.
            for (name, value) in known["metadata"]["annotations"].as_object().into_iter().flatten() {
                if name == lb_core::load_balancer::GIVEN {
                    object["metadata"]["annotations"][name] = value.clone();
                }
            }
            object["status"] = known["status"].clone();
        }
        None => begin(store, &mut object),
    }
    stored(store, key, object)
}

/// A merge patch (RFC 7386) of an object or of its status. A patch of the status also changes metadata, such as
/// annotations, as a real API server does for Services.
fn merge(store: &Store, key: Key, status: bool, body: &str) -> Response {
    let mut patch: Value = serde_json::from_str(body).unwrap();
    let Some(mut object) = store.lock().objects.get(&key).cloned() else { return failure(404) };
    let fault = store.lock().faults.get(&key.0).and_then(|fault| fault.status_patch.filter(|_| status));
    let refusal = fault.or_else(|| (!is_newest(&patch, &object)).then_some(409));
    if let Some(code) = refusal {
        store.lock().refused_writes += 1;
        return failure(code);
    }
    if status {
        patch.as_object_mut().unwrap().retain(|field, _| ["metadata", "status"].contains(&field.as_str()));
    }
    merge_values(&mut object, &patch);
    set_transition_times(&mut object);
    stored(store, key, object)
}

fn merge_values(object: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (name, value) in fields {
        if value.is_null() {
            object.as_object_mut().unwrap().remove(name);
        } else {
            merge_values(&mut object[name], value);
        }
    }
}

/// Replaces an object, unless the body has another version than the object; a body without a version also replaces the
/// object.
fn replace(store: &Store, key: Key, body: &str) -> Response {
    let object: Value = serde_json::from_str(body).unwrap();
    let Some(known) = store.lock().objects.get(&key).cloned() else { return failure(404) };
    if is_newest(&object, &known) { stored(store, key, object) } else { failure(409) }
}

fn create(store: &Store, plural: String, namespace: String, body: &str) -> Response {
    let mut object: Value = serde_json::from_str(body).unwrap();
    let key = (plural, namespace, object["metadata"]["name"].as_str().unwrap().to_owned());
    if store.lock().objects.contains_key(&key) {
        return failure(409);
    }
    begin(store, &mut object);
    stored(store, key, object)
}

/// Sets the fields of a new object that the API server assigns.
fn begin(store: &Store, object: &mut Value) {
    let version = store.lock().version;
    object["metadata"]["uid"] = format!("uid-{version}").into();
    // Objects that are created later get later times.
    object["metadata"]["creationTimestamp"] =
        format!("2026-01-01T{:02}:{:02}:{:02}Z", version / 3600, version / 60 % 60, version % 60).into();
}

/// Whether the version in the body, if there is one, is that of the stored object.
fn is_newest(body: &Value, known: &Value) -> bool {
    let version = &body["metadata"]["resourceVersion"];
    version.is_null() || *version == known["metadata"]["resourceVersion"]
}

fn stored(store: &Store, key: Key, object: Value) -> Response {
    store.set(key.clone(), Some(object), ChangeKind::Object);
    get(store, &key)
}

/// Adds `lastTransitionTime: null` to conditions without it, as the encoder of the API server does.
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
    wait_until_released(&store, &request.plural).await;
    if fault.expired_pages && request.query.contains_key("continue") {
        return failure(410);
    }
    list(&store, request)
}

/// Waits as long as [`Fault::held`] is set for the resource.
async fn wait_until_released(store: &Store, plural: &str) {
    let mut changed = store.changed.subscribe();
    while store.lock().faults.get(plural).is_some_and(|fault| fault.held) {
        if changed.changed().await.is_err() {
            return;
        }
    }
}

fn failure(code: u16) -> Response {
    let reason = match code {
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        _ => "Fault",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("a fault {code}"), "reason": reason, "code": code,
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

/// A watch: its selection, and its progress through the changes.
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
    /// The next line to send; `Some(None)` if there is no line yet, `None` if the watch ends.
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
                if change.kind == ChangeKind::Cut {
                    line.truncate(line.len() / 2);
                    self.over = true;
                    change.kind = ChangeKind::Object;
                }
                return Some(Some(line));
            }
        }
        Some(None)
    }

    /// The watch event for a change; `None` if the change is about another resource, or selectors exclude the object.
    fn event(&self, change: &Change) -> Option<Value> {
        if change.plural != self.plural {
            return None;
        }
        let version = Value::from(change.version.to_string());
        if change.kind == ChangeKind::Bookmark {
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
