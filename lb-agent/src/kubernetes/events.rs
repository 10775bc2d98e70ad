//! Kubernetes Events that this node emits for administrators, as kube-proxy and MetalLB do.
//!
//! [`Events`] queues an Event without waiting; the task [`run`] sends it to the API server. An Event that cannot be
//! sent in a few attempts is lost, as in kube-proxy.

use std::{convert::Infallible, time::Duration};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use lb_core::{load_balancer::Notice, model::ObjectName};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use super::client::{ApiServer, KubernetesError, client_config};

/// Maximum number of Events that wait to be sent.
const QUEUE: usize = 64;
/// Number of attempts to send an Event, the time limit of each, and the pause after the first attempt, which doubles
/// after each further one.
const ATTEMPTS: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum length in bytes of an Event's note that the API server accepts.
const LONGEST_NOTE: usize = 1024;

/// The sending end of the queue of Events. Clones share it; the default value has no queue and drops every Event.
#[derive(Clone, Debug, Default)]
pub struct Events(Option<mpsc::Sender<Occurrence>>);

/// The receiving end of the queue of Events, for [`run`].
#[derive(Debug)]
pub struct Outbox(mpsc::Receiver<Occurrence>);

/// The occurrence that an Event reports.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Occurrence {
    Starting,
    HealthCheckFailed {
        service: ObjectName,
        why: String,
    },
    /// An endpoint of the Service has become unhealthy, or healthy again.
    EndpointHealth {
        service: ObjectName,
        is_unhealthy: bool,
        note: String,
    },
    /// An annotation of the Service is invalid, is ignored by this load balancer, or has an effect that administrators
    /// should know.
    Annotation {
        service: ObjectName,
        reason: &'static str,
        note: String,
    },
    /// A map has no room for the Service, which keeps the map entries that it has.
    MapFull {
        service: ObjectName,
        note: String,
    },
    /// A notice of the load balancer controller about a Service's addresses.
    Address(Notice),
    /// Fewer voters on announcements than a majority have Nodes; the text names the voters without a Node.
    VotersLost(String),
}

impl Events {
    /// Creates a queue; returns it with its receiving end for [`run`].
    pub fn channel() -> (Self, Outbox) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self(Some(sender)), Outbox(receiver))
    }

    /// Queues the Event `Starting` on the Node.
    pub fn starting(&self) {
        self.emit(Occurrence::Starting);
    }

    /// Queues the Warning `FailedToStartServiceHealthcheck` on a Service whose `healthCheckNodePort` cannot be served.
    pub fn health_check_failed(&self, service: ObjectName, why: impl Into<String>) {
        self.emit(Occurrence::HealthCheckFailed { service, why: why.into() });
    }

    /// Queues the Warning `EndpointUnhealthy`, or the Event `EndpointHealthy`, on a Service.
    pub(crate) fn endpoint_health(&self, service: ObjectName, is_unhealthy: bool, note: String) {
        self.emit(Occurrence::EndpointHealth { service, is_unhealthy, note });
    }

    /// Queues a Warning about an annotation of a Service, such as `AnnotationInvalid`.
    pub(crate) fn annotation(&self, service: ObjectName, reason: &'static str, note: String) {
        self.emit(Occurrence::Annotation { service, reason, note });
    }

    /// Queues the Warning `MapFull` on a Service that waits for room in a map.
    pub(crate) fn map_full(&self, service: ObjectName, note: String) {
        self.emit(Occurrence::MapFull { service, note });
    }

    /// Queues a notice of the load balancer controller as an Event on the Service.
    pub(super) fn of_address(&self, notice: Notice) {
        self.emit(Occurrence::Address(notice));
    }

    /// Queues the Warning `VotersLost` on the Node.
    pub(super) fn voters_lost(&self, why: String) {
        self.emit(Occurrence::VotersLost(why));
    }

    fn emit(&self, occurrence: Occurrence) {
        if let Some(sender) = &self.0
            && let Err(error) = sender.try_send(occurrence)
        {
            debug!("dropping an Event: {error}");
        }
    }
}

/// Sends queued Events to the API server, forever.
///
/// # Errors
///
/// A configuration without a usable API server.
pub async fn run(server: ApiServer, node: &str, mut outbox: Outbox) -> Result<Infallible, KubernetesError> {
    let client = Client::try_from(client_config(server).await?).map_err(Box::new)?;
    let publisher = Publisher::new(client, node);
    loop {
        match outbox.0.recv().await {
            Some(occurrence) => publisher.publish(&occurrence).await,
            // All senders are gone, because the agent is stopping.
            None => std::future::pending().await,
        }
    }
}

struct Publisher {
    client: Client,
    reporter: Reporter,
    node: String,
}

impl Publisher {
    fn new(client: Client, node: &str) -> Self {
        let instance = Some(format!("lb-agent-{node}"));
        let reporter = Reporter { controller: "lb-agent".to_owned(), instance };
        Self { client, reporter, node: node.to_owned() }
    }

    async fn publish(&self, occurrence: &Occurrence) {
        let (event, regarding) = (event(occurrence), regarding(occurrence, &self.node));
        // A recorder that has sent an Event would only count another one with the same reason about the same object, for
        // example about a second annotation, and drop its note.
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        let mut pause = PAUSE;
        for attempt in 1..=ATTEMPTS {
            let why = match timeout(PATIENCE, recorder.publish(&event, &regarding)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_elapsed) => "the API server does not answer".to_owned(),
            };
            if attempt == ATTEMPTS {
                warn!(
                    event = event.reason,
                    "cannot send an Event: {why}; check that the API server runs and that the agent's user may create events"
                );
                return;
            }
            debug!(event = event.reason, attempt, "sending the Event again: {why}");
            sleep(pause).await;
            pause *= 2;
        }
    }
}

/// The Kubernetes Event for an occurrence. `Starting` and `FailedToStartServiceHealthcheck` have the types and reasons
/// of the Events that kube-proxy emits.
fn event(occurrence: &Occurrence) -> Event {
    let (type_, reason, action, note) = match occurrence {
        Occurrence::Starting => (EventType::Normal, "Starting", "StartLoadBalancer", None),
        Occurrence::HealthCheckFailed { why, .. } => {
            (EventType::Warning, "FailedToStartServiceHealthcheck", "Listen", Some(shortened(why)))
        }
        Occurrence::EndpointHealth { is_unhealthy: true, note, .. } => {
            (EventType::Warning, "EndpointUnhealthy", "Probe", Some(shortened(note)))
        }
        Occurrence::EndpointHealth { note, .. } => {
            (EventType::Normal, "EndpointHealthy", "Probe", Some(shortened(note)))
        }
        Occurrence::Annotation { reason, note, .. } => {
            (EventType::Warning, *reason, "ReadAnnotation", Some(shortened(note)))
        }
        Occurrence::MapFull { note, .. } => {
            (EventType::Warning, "MapFull", "WriteMaps", Some(shortened(note)))
        }
        Occurrence::Address(Notice { is_warning, reason, note, .. }) => {
            let type_ = if *is_warning { EventType::Warning } else { EventType::Normal };
            (type_, *reason, "AssignAddress", Some(shortened(note)))
        }
        Occurrence::VotersLost(why) => (EventType::Warning, "VotersLost", "Announce", Some(shortened(why))),
    };
    Event { type_, reason: reason.to_owned(), action: action.to_owned(), note, secondary: None }
}

/// The object that the Event is about. As in kube-proxy, the object's name stands for its uid if the uid is unknown.
fn regarding(occurrence: &Occurrence, node: &str) -> ObjectReference {
    let reference = |kind: &str, namespace: Option<&str>, name: &str, uid: String| ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some(kind.to_owned()),
        namespace: namespace.map(str::to_owned),
        name: Some(name.to_owned()),
        uid: Some(uid),
        ..ObjectReference::default()
    };
    match occurrence {
        Occurrence::Starting | Occurrence::VotersLost(_) => reference("Node", None, node, node.to_owned()),
        Occurrence::HealthCheckFailed { service, .. }
        | Occurrence::EndpointHealth { service, .. }
        | Occurrence::Annotation { service, .. }
        | Occurrence::MapFull { service, .. } => {
            reference("Service", Some(&service.namespace), &service.name, service.to_string())
        }
        Occurrence::Address(Notice { service, uid, .. }) => {
            reference("Service", Some(&service.namespace), &service.name, uid.clone())
        }
    }
}

fn shortened(note: &str) -> String {
    note[..note.floor_char_boundary(LONGEST_NOTE)].to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{
        Json, Router,
        extract::{Path, State},
        http::StatusCode,
        routing::post,
    };
    use kube::Config;
    use serde_json::Value;
    use tokio::net::TcpListener;

    use super::*;

    type Told = Arc<Mutex<Vec<(String, Value)>>>;

    /// A mock API server with only the Events endpoint; it fails the first request.
    async fn api_server(told: Told) -> Client {
        let refused = Arc::new(Mutex::new(false));
        let take = move |Path(namespace): Path<String>,
                         State(told): State<Told>,
                         Json(event): Json<Value>| async move {
            if !std::mem::replace(&mut *refused.lock().unwrap(), true) {
                return (StatusCode::INTERNAL_SERVER_ERROR, Json(Value::Null));
            }
            told.lock().unwrap().push((namespace, event.clone()));
            (StatusCode::CREATED, Json(event))
        };
        let router = Router::new()
            .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events", post(take))
            .with_state(told);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Client::try_from(Config::new(format!("http://{address}").parse().unwrap())).unwrap()
    }

    #[tokio::test]
    async fn events_are_those_of_kube_proxy() {
        let told = Told::default();
        let publisher = Publisher::new(api_server(Arc::clone(&told)).await, "node-a");
        publisher.publish(&Occurrence::Starting).await;
        let service = ObjectName::new("shop", "web");
        publisher
            .publish(&Occurrence::HealthCheckFailed { service, why: "port 31000 is taken".into() })
            .await;

        let told = told.lock().unwrap();
        let shown: Vec<_> = told
            .iter()
            .map(|(namespace, event)| {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let about = &event["regarding"];
                let about = format!("{} {}", text(&about["kind"]), text(&about["name"]));
                [namespace.clone(), text(&event["type"]), text(&event["reason"]), about, text(&event["note"])]
            })
            .collect();
        assert_eq!(
            shown,
            [
                ["default", "Normal", "Starting", "Node node-a", ""],
                ["shop", "Warning", "FailedToStartServiceHealthcheck", "Service web", "port 31000 is taken"],
            ]
        );
        assert_eq!(told[0].1["reportingController"], "lb-agent");
        assert_eq!(told[0].1["reportingInstance"], "lb-agent-node-a");
    }

    /// A Recorder that has sent an Event only counts another one with the same reason about the same object, and drops
    /// its note.
    #[tokio::test]
    async fn each_annotation_of_a_service_is_an_event_of_its_own() {
        let told = Told::default();
        let publisher = Publisher::new(api_server(Arc::clone(&told)).await, "node-a");
        for note in ["one", "two"] {
            let service = ObjectName::new("shop", "web");
            let occurrence =
                Occurrence::Annotation { service, reason: "AnnotationIgnored", note: note.into() };
            publisher.publish(&occurrence).await;
        }
        let told = told.lock().unwrap();
        let notes: Vec<&str> = told.iter().filter_map(|(_, event)| event["note"].as_str()).collect();
        assert_eq!(notes, ["one", "two"]);
        assert_ne!(told[0].1["metadata"]["name"], told[1].1["metadata"]["name"]);
    }

    #[test]
    fn emitting_never_waits() {
        Events::default().starting();
        let (events, mut outbox) = Events::channel();
        (0..2 * QUEUE).for_each(|_| events.starting());
        let mut waiting = 0;
        while outbox.0.try_recv().is_ok() {
            waiting += 1;
        }
        assert_eq!(waiting, QUEUE);
    }

    #[test]
    fn long_note_is_cut_at_a_character_boundary() {
        let note = "ü".repeat(LONGEST_NOTE);
        assert_eq!(shortened(&note).len(), LONGEST_NOTE);
        assert_eq!(shortened(&format!("a{note}")).len(), LONGEST_NOTE - 1);
        assert_eq!(shortened("short"), "short");
    }
}
