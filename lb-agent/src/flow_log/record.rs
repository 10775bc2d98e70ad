//! The schema of the flow log. `docs/flow-log.md` describes it; a test compares the two.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Version of the schema. A new field keeps the version; a field that changes its meaning or disappears increases it.
pub const VERSION: u32 = 1;

/// One line of the flow log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum LogLine<'a> {
    /// An intermediate line for a connection that has not ended, with its traffic so far.
    #[serde(borrow)]
    Open(Box<Record<'a>>),
    /// The last line of a connection.
    #[serde(borrow)]
    End(Box<Record<'a>>),
    /// Statistics about the log itself: how complete it is.
    #[serde(borrow)]
    Stats(StatsRecord<'a>),
}

/// A line about one connection or UDP flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record<'a> {
    /// The schema's [`VERSION`].
    pub version: u32,
    /// When the agent created the line.
    pub time: Timestamp,
    /// Name of the node whose agent created the line.
    #[serde(borrow)]
    pub node: Cow<'a, str>,
    /// Id of the connection, the same in all its lines: 16 hexadecimal digits.
    #[serde(borrow)]
    pub flow: Cow<'a, str>,
    /// `TCP`, `UDP` or `SCTP`
    #[serde(borrow)]
    pub protocol: Cow<'a, str>,
    /// The client's address.
    pub client: IpAddr,
    /// The source port of the client's packets, before any translation.
    pub client_port: u16,
    /// The virtual address.
    pub vip: IpAddr,
    /// The port at the virtual address.
    pub vip_port: u16,
    /// Namespace of the Service; `None` if the Service was deleted before the agent saw the connection.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub namespace: Option<Cow<'a, str>>,
    /// Name of the Service; `None` if `namespace` is `None`.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub service: Option<Cow<'a, str>>,
    /// Name of the Service port, empty for an unnamed port; `None` if `namespace` is `None`.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub port: Option<Cow<'a, str>>,
    /// The backend's address.
    pub backend: IpAddr,
    /// The backend's port.
    pub backend_port: u16,
    /// Name of the backend's pod; `None` if unknown.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub pod: Option<Cow<'a, str>>,
    /// Name of the backend's node; `None` if unknown.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub backend_node: Option<Cow<'a, str>>,
    /// Source address and port that the backend sees, if the client is masqueraded.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub masqueraded_as: Option<SocketAddr>,
    /// Whether packets reach the backend through a tunnel, so that replies bypass this node and are not counted.
    #[serde(skip_serializing_if = "is_false", default)]
    pub tunnel: bool,
    /// The [`Outcome`](lb_common::Outcome) under which the programs count the client's packets.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub verdict: Option<Cow<'a, str>>,
    /// Why the backend was chosen: a scheduler, `affinity`, `retry` or `peer`; `None` if the connection is older than
    /// the log, or the event of its start was lost.
    #[serde(borrow, skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<Cow<'a, str>>,
    /// When the connection began; `None` if it is older than the log, or the event of its start was lost.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start: Option<Timestamp>,
    /// Seconds from `start` to the packet that closed the connection, or else to the last packet; in an intermediate
    /// line, to `time`. `None` if `start` is `None`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub duration: Option<f64>,
    /// Why the connection has ended; `None` in an intermediate line.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub end: Option<EndReason>,
    /// Traffic since the connection's start; if the connection is older than the log, since the first GC pass of the
    /// log.
    #[serde(flatten)]
    pub total: Volume,
    /// Traffic since the previous line of this connection; `None` in its first line.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub since_last: Option<Volume>,
}

/// Packets in both directions, and their bytes including IP headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Number of packets that the client has sent.
    pub packets_sent: u64,
    /// Bytes that the client has sent.
    pub bytes_sent: u64,
    /// Number of packets that the backend has sent.
    pub packets_answered: u64,
    /// Bytes that the backend has sent.
    pub bytes_answered: u64,
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndReason {
    /// Both ends have sent FIN, or an SCTP SHUTDOWN. For a tunnelled flow, that of the client is enough, because this
    /// node does not see the replies.
    Closed,
    /// One end has sent a RST, or an SCTP ABORT.
    Reset,
    /// The flow expired: no packet was seen for the timeout of its phase.
    Expired,
    /// Evicted before it expired, because the flow table was full or nearly full.
    Evicted,
    /// Replaced by a new connection from the same client port, or by one that needed the same source port towards the
    /// backend.
    Replaced,
    /// Deleted by a command or the agent: for example by `conntrack flush`, after a timeout that its Service sets, or
    /// because the endpoint of a UDP flow was removed.
    Deleted,
}

impl EndReason {
    /// The reason's name in the flow log.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Expired => "expired",
            Self::Evicted => "evicted",
            Self::Replaced => "replaced",
            Self::Deleted => "deleted",
        }
    }
}

/// A line about how complete the log is. All counts are since the start of the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatsRecord<'a> {
    /// The schema's [`VERSION`].
    pub version: u32,
    /// When the agent created the line.
    pub time: Timestamp,
    /// Name of the node whose agent created the line.
    #[serde(borrow)]
    pub node: Cow<'a, str>,
    /// Number of lines written, without lines of statistics.
    pub lines: u64,
    /// Number of lines dropped because the file, pipe or socket was too slow or failed.
    pub dropped_lines: u64,
    /// Number of events of the BPF programs that were lost, because the agent read them too slowly. If an event was
    /// lost, the lines of its connection may lack `start`, and an evicted connection may lack its last line.
    pub lost_events: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn record() -> Record<'static> {
        Record {
            version: VERSION,
            time: "2026-11-25T12:34:56.789Z".parse().unwrap(),
            node: "node-a".into(),
            flow: "00f1a2b3c4d5e6f7".into(),
            protocol: "TCP".into(),
            client: "192.0.2.1".parse().unwrap(),
            client_port: 40_000,
            vip: "10.96.0.10".parse().unwrap(),
            vip_port: 80,
            namespace: Some("default".into()),
            service: Some("web".into()),
            port: Some("http".into()),
            backend: "10.1.0.5".parse().unwrap(),
            backend_port: 8080,
            pod: Some("web-0".into()),
            backend_node: Some("node-b".into()),
            masqueraded_as: Some("172.18.0.1:10017".parse().unwrap()),
            tunnel: true,
            verdict: Some("tunnelled".into()),
            reason: Some("random".into()),
            start: Some("2026-11-25T12:33:56.5Z".parse().unwrap()),
            duration: Some(60.25),
            end: Some(EndReason::Closed),
            total: Volume { packets_sent: 7, bytes_sent: 700, packets_answered: 6, bytes_answered: 6000 },
            since_last: Some(Volume { packets_sent: 1, bytes_sent: 100, ..Volume::default() }),
        }
    }

    #[test]
    fn line_of_a_connection_survives_a_round_trip() {
        for line in [LogLine::End(record().into()), LogLine::Open(record().into())] {
            let text = serde_json::to_string(&line).unwrap();
            assert_eq!(serde_json::from_str::<LogLine<'_>>(&text).unwrap(), line, "{text}");
        }
    }

    #[test]
    fn names_of_fields_are_stable() {
        let text = serde_json::to_string(&LogLine::End(record().into())).unwrap();
        let expected = concat!(
            r#"{"event":"end","version":1,"time":"2026-11-25T12:34:56.789Z","node":"node-a","flow":"00f1a2b3c4d5e6f7","#,
            r#""protocol":"TCP","client":"192.0.2.1","client_port":40000,"vip":"10.96.0.10","vip_port":80,"#,
            r#""namespace":"default","service":"web","port":"http","backend":"10.1.0.5","backend_port":8080,"#,
            r#""pod":"web-0","backend_node":"node-b","masqueraded_as":"172.18.0.1:10017","tunnel":true,"verdict":"tunnelled","#,
            r#""reason":"random","start":"2026-11-25T12:33:56.5Z","duration":60.25,"end":"closed","#,
            r#""packets_sent":7,"bytes_sent":700,"packets_answered":6,"bytes_answered":6000,"#,
            r#""since_last":{"packets_sent":1,"bytes_sent":100,"packets_answered":0,"bytes_answered":0}}"#,
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn docs_describe_every_field() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/flow-log.md");
        let page = std::fs::read_to_string(path).unwrap();
        let stats = LogLine::Stats(StatsRecord {
            version: VERSION,
            time: record().time,
            node: "a".into(),
            lines: 1,
            dropped_lines: 0,
            lost_events: 0,
        });
        for line in [LogLine::End(record().into()), stats] {
            let serde_json::Value::Object(fields) = serde_json::to_value(line).unwrap() else {
                panic!("a line is an object")
            };
            for field in fields.keys() {
                assert!(page.contains(&format!("`{field}`")), "{field} has no row in docs/flow-log.md");
            }
        }
        for reason in [
            EndReason::Closed,
            EndReason::Reset,
            EndReason::Expired,
            EndReason::Evicted,
            EndReason::Replaced,
            EndReason::Deleted,
        ] {
            assert!(page.contains(&format!("`{}`", reason.as_str())), "{reason:?}");
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }
}
