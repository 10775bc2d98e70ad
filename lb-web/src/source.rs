//! The trait by which the pages read the data that they show. lb-agent reads it from the pinned maps and from the
//! running agent; tests make it up.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use lb_common::Outcome;
use lb_core::traffic::Tally;
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

/// The parameters of a request, by name: the flags of the `lb-agent` command that gives the same answer.
pub type Query = BTreeMap<String, String>;

/// Why a request has no answer.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The request is malformed; the text says what to change.
    #[error("{0}")]
    Question(String),
    /// The data plane cannot be read.
    #[error("{0:#}")]
    Failed(#[from] anyhow::Error),
}

/// Whether an event meets the conditions of a reader.
pub type EventFilter<E> = Box<dyn Fn(&E) -> bool + Send + Sync>;

/// A node's data plane. All methods may block. Only [`Self::events`] changes anything: it makes the programs emit
/// events.
pub trait Source: Send + Sync + 'static {
    /// A new flow, or a dropped or rejected packet.
    type Event: Serialize + Send + Sync + 'static;

    /// The counters of packets and system calls, by [`Outcome`]. Must be cheap: called every few seconds, even while no
    /// browser shows them.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    fn packets(&self) -> anyhow::Result<[u64; Outcome::COUNT]>;

    /// How full the maps are.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    fn fill(&self) -> anyhow::Result<Vec<Fill>>;

    /// A reader of all Services. The traffic that it returns is counted from its first reading.
    fn services(&self) -> Box<dyn ServiceReader>;

    /// The state of the agent and of the kernel.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    fn status(&self) -> anyhow::Result<Status>;

    /// The ports of one Service; none if the kernel has no such Service.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    fn service(&self, namespace: &str, name: &str) -> anyhow::Result<ServicePorts>;

    /// The connections that meet the conditions of `query` (the flags of `lb-agent conntrack list`), at most `limit`.
    ///
    /// # Errors
    /// A condition is malformed, or the data plane cannot be read.
    fn connections(&self, query: &Query, limit: usize) -> Result<Connections, SourceError>;

    /// The answer of `lb-agent explain -o json` to the flags in `query`.
    ///
    /// # Errors
    /// A flag is missing or malformed, or the data plane cannot be read.
    fn explain(&self, query: &Query) -> Result<Value, SourceError>;

    /// The filter of the conditions in `query`, which are the flags of `lb-agent monitor`.
    ///
    /// # Errors
    /// A condition is malformed.
    fn event_filter(&self, query: &Query) -> Result<EventFilter<Self::Event>, SourceError>;

    /// Makes the programs emit events until the reader is dropped.
    ///
    /// # Errors
    /// There is no data plane, it cannot be read, or another program reads the events, such as `lb-agent monitor`.
    fn events(&self) -> anyhow::Result<Box<dyn EventReader<Self::Event>>>;
}

/// Reads all Services repeatedly.
pub trait ServiceReader: Send {
    /// The service ports and their traffic since the first reading.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    fn read(&mut self) -> anyhow::Result<Vec<ServicePort>>;
}

/// Reads the events of the programs as they happen.
pub trait EventReader<E>: Send {
    /// Waits for events for `patience` at most. Returns the events that have arrived, oldest first, and the number of
    /// events that were lost because they came faster than the reader read them.
    ///
    /// # Errors
    /// The data plane cannot be read.
    fn read(&mut self, patience: Duration) -> anyhow::Result<(Vec<E>, u64)>;
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// The name of the map.
    pub name: &'static str,
    /// How many elements the map has.
    pub entries: u64,
    /// Maximum number of elements.
    pub capacity: u64,
}

/// A service port, as the pages show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Id of the service port in the maps.
    pub id: u32,
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
    /// `spec.ports[].port`
    pub port: u16,
    /// `spec.ports[].name`; empty for an unnamed port.
    pub port_name: String,
    /// `TCP`, `UDP` or `SCTP`
    pub protocol: &'static str,
    /// The virtual addresses of the service port.
    pub frontends: Vec<SocketAddr>,
    /// Backends whose endpoint is ready.
    pub ready: usize,
    /// Backends whose endpoint terminates but still serves. They get new connections only while no endpoint that the
    /// traffic policy allows is ready.
    pub terminating: usize,
    /// Number of unhealthy targets (endpoints with the probed port) in the Service's health check. If the check names
    /// no port to probe, a target counts unless only backends of the Service's other ports have the port of the target.
    /// 0 if the check does not cover this port, or no agent runs.
    pub unhealthy: usize,
    /// Traffic by backend, of backends that had a flow recently.
    pub traffic: BTreeMap<SocketAddr, Tally>,
}

/// The ports of one Service.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePorts {
    /// The ports, as `lb-agent service show -o json` prints them.
    pub ports: Vec<Value>,
    /// Whether an agent answers. Otherwise the results of health checks and the announcing nodes are unknown.
    pub agent_answers: bool,
}

/// The state of the agent and of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// The conditions of the node, worst first.
    pub problems: Vec<Problem>,
    /// The output of `lb-agent status -o json`.
    pub status: Value,
}

/// A condition of the node that the pages list: something is wrong, or worth knowing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// How bad the condition is.
    pub severity: Severity,
    /// What the condition is about, such as `Missing`.
    pub topic: &'static str,
    /// The condition as a text for users, with advice if there is something to do.
    pub text: String,
}

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Connections fail, or will.
    Error,
    /// Something does not work as configured.
    Warning,
    /// The reader may want to know the condition, but need do nothing.
    Note,
}

/// Connections that meet the conditions of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Connections {
    /// How many connections meet the conditions; `shown` may have fewer.
    pub matched: usize,
    /// At most `limit` of the matched connections, as `lb-agent conntrack list -o json` prints them: the connections
    /// that the walk of the flow table finds first, sorted by client.
    pub shown: Vec<Value>,
}
