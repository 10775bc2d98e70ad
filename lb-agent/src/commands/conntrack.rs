//! The commands `conntrack list` and `conntrack flush`.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use comfy_table::Table;
use lb_common::conntrack::{Phase, Tick, Tuple, seconds_left};
use serde::Serialize;

use super::{
    output::{NOTHING, print, print_json, print_table, table},
    service_view::protocol_name,
};
use crate::cli::{FlowFilter, TableOrJson, split_name};
use lb_datapath::{Connection, Conntrack, DatapathError};

/// One tracked flow, as `conntrack list` shows it. Scripts read the JSON: keys may be added, never renamed or removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FlowView {
    /// `TCP`, `UDP` or `SCTP`
    protocol: &'static str,
    client: SocketAddr,
    /// Virtual address and port. For a connection that the node itself opens to a backend, the same address as
    /// `backend`.
    vip: SocketAddr,
    backend: SocketAddr,
    /// Source address and port that the backend sees, if the connection is masqueraded.
    #[serde(skip_serializing_if = "Option::is_none")]
    masqueraded_as: Option<SocketAddr>,
    phase: &'static str,
    /// Seconds since the last packet that kept the flow from expiring. Until the handshake is complete, and in a
    /// tunnelled flow, only packets of the client count; else packets of both directions.
    idle_seconds: u32,
    /// Seconds until the flow expires if no further packet arrives.
    seconds_left: u32,
    /// `namespace/name` of the Service; `None` if it was deleted, and for a connection that the node itself opens to a
    /// backend.
    service: Option<String>,
    /// Whether packets reach the backend's node through a tunnel; such a flow has no reverse entry.
    tunnelled: bool,
    /// Whether the flow lacks its reverse entry (a tunnelled flow needs none). The agent's GC restores it if there is
    /// room.
    half: bool,
}

impl FlowView {
    /// The phase of the flow, such as `established`.
    pub(super) const fn phase(&self) -> &'static str {
        self.phase
    }

    /// `namespace/name` of the Service; `None` if it was deleted, and for a connection that the node itself opens to a
    /// backend.
    pub(super) fn service(&self) -> Option<&str> {
        self.service.as_deref()
    }
}

/// The flows that meet `filter`, in the order of `connections`. `services` maps ids of service ports to
/// `namespace/name` of their Services.
pub(super) fn flows(
    connections: &[Connection],
    services: &BTreeMap<u32, String>,
    filter: &FlowFilter,
    now: Tick,
) -> Vec<FlowView> {
    let flows = connections.iter().map(|connection| flow(connection, services, now));
    flows.filter(|flow| filter.lets_through(flow)).collect()
}

/// How many flows meet `filter`, and the views of at most `limit` of them: those that the walk of the flow table finds
/// first, sorted by client.
///
/// # Errors
/// The flow table cannot be read.
pub(super) fn some(
    conntrack: &Conntrack,
    services: &BTreeMap<u32, String>,
    filter: &FlowFilter,
    limit: usize,
) -> Result<(usize, Vec<FlowView>), DatapathError> {
    let now = Conntrack::now();
    let (mut matched, mut views) = (0, Vec::new());
    conntrack.for_each_connection(|connection| {
        let view = flow(&connection, services, now);
        if filter.lets_through(&view) {
            matched += 1;
            if views.len() < limit {
                views.push(view);
            }
        }
    })?;
    views.sort_by_key(|view| (view.client, view.vip, view.backend));
    Ok((matched, views))
}

fn flow(
    Connection { from, forward, reply, masqueraded }: &Connection,
    services: &BTreeMap<u32, String>,
    now: Tick,
) -> FlowView {
    let reply = reply.as_ref();
    let phase = Phase::of_entry(forward, reply);
    FlowView {
        protocol: protocol_name(from.protocol),
        client: from.source_socket(),
        vip: from.destination_socket(),
        backend: forward.to.destination_socket(),
        masqueraded_as: masqueraded.as_ref().map(Tuple::source_socket),
        phase: phase.as_str(),
        idle_seconds: now.seconds_since(phase.last_used(forward, reply)),
        seconds_left: seconds_left(forward, reply, now),
        service: services.get(&forward.service).cloned(),
        tunnelled: forward.is_tunnelled(),
        half: forward.is_half(reply),
    }
}

impl FlowFilter {
    fn lets_through(&self, flow: &FlowView) -> bool {
        let Self { client, vip, backend, protocol, service, phase } = self;
        let is =
            |wanted: &Option<IpAddr>, found: SocketAddr| wanted.is_none_or(|wanted| wanted == found.ip());
        let service = service.as_deref().map(|name| {
            let (namespace, name) = split_name(name);
            format!("{namespace}/{name}")
        });
        is(client, flow.client)
            && is(vip, flow.vip)
            && is(backend, flow.backend)
            && protocol.is_none_or(|protocol| protocol.as_str() == flow.protocol)
            && (service.is_none() || service == flow.service)
            && phase.is_none_or(|phase| phase.as_str() == flow.phase)
    }
}

pub(super) fn list(flows: &[FlowView], output: TableOrJson) -> anyhow::Result<()> {
    match output {
        TableOrJson::Table => print_table(&flow_table(flows)),
        TableOrJson::Json => print_json(&flows),
    }
}

fn flow_table(flows: &[FlowView]) -> Table {
    let mut table = table(&["PROTOCOL", "CLIENT", "VIP", "BACKEND", "PHASE", "IDLE", "LEFT", "SERVICE"]);
    for flow in flows {
        table.add_row([
            flow.protocol.to_owned(),
            flow.masqueraded_as
                .map_or_else(|| flow.client.to_string(), |node| format!("{} as {node}", flow.client)),
            flow.vip.to_string(),
            format!("{}{}", flow.backend, if flow.tunnelled { " (tunnel)" } else { "" }),
            format!("{}{}", flow.phase, if flow.half { " (half)" } else { "" }),
            duration(flow.idle_seconds),
            duration(flow.seconds_left),
            flow.service.clone().unwrap_or_else(|| NOTHING.to_owned()),
        ]);
    }
    table
}

/// Seconds as text in at most two units, such as `23h59m`.
fn duration(seconds: u32) -> String {
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (hours, minutes, _) => format!("{hours}h{minutes:02}m"),
    }
}

/// Prints how many entries `conntrack flush` has deleted.
pub(super) fn flushed(entries: usize, output: TableOrJson) -> anyhow::Result<()> {
    match output {
        TableOrJson::Table => print(&format!(
            "Deleted {entries} entries: four for each connection that was masqueraded through the stack, one for each \
                 tunnelled one, two for any other.\n"
        )),
        TableOrJson::Json => print_json(&serde_json::json!({ "entries": entries })),
    }
}

#[cfg(test)]
mod tests {
    use lb_common::conntrack::flow_flags;

    use super::*;
    use crate::commands::{output::render, service_view::testdata};

    fn names() -> BTreeMap<u32, String> {
        BTreeMap::from([(7, "default/web".to_owned())])
    }

    fn all(connection: Connection) -> Vec<FlowView> {
        flows(&[connection], &names(), &FlowFilter::default(), Tick(100))
    }

    #[test]
    fn flow_table_has_one_line_for_each_flow() {
        let expected = "\
PROTOCOL  CLIENT           VIP            BACKEND        PHASE        IDLE  LEFT    SERVICE
TCP       192.0.2.1:40000  10.96.0.10:80  10.1.0.5:8080  established  39s   23h59m  default/web
";
        assert_eq!(render(&flow_table(&all(testdata::flow()))), expected);
    }

    #[test]
    fn json_of_a_flow() {
        let expected = serde_json::json!([{
            "protocol": "TCP", "client": "192.0.2.1:40000", "vip": "10.96.0.10:80", "backend": "10.1.0.5:8080",
            "phase": "established", "idleSeconds": 39, "secondsLeft": 86361, "service": "default/web", "tunnelled": false,
            "half": false,
        }]);
        assert_eq!(serde_json::to_value(all(testdata::flow())).unwrap(), expected);
    }

    #[test]
    fn masqueraded_flow_shows_the_source_that_the_backend_sees() {
        let flow = testdata::flow();
        let node = lb_common::Address::from_v4([172, 18, 0, 1]);
        let masqueraded = Some(Tuple { source: node, source_port: 10_017, ..flow.forward.to });
        let shown = all(Connection { masqueraded, ..flow });
        assert!(render(&flow_table(&shown)).contains(" 192.0.2.1:40000 as 172.18.0.1:10017 "));
        assert_eq!(serde_json::to_value(&shown).unwrap()[0]["masqueradedAs"], "172.18.0.1:10017");
    }

    #[test]
    fn flow_without_reverse_entry_is_shown_as_the_next_gc_pass_restores_it() {
        let lost = Connection { reply: None, ..testdata::flow() };
        assert_eq!((all(lost)[0].phase, all(lost)[0].half), ("established", true));
    }

    #[test]
    fn tunnelled_flow_is_not_half() {
        let mut flow = Connection { reply: None, ..testdata::flow() };
        flow.forward.flags = flow_flags::ROUTED | flow_flags::TUNNEL;
        let shown = all(flow);
        assert!(render(&flow_table(&shown)).contains(" 10.1.0.5:8080 (tunnel)  established "));
        assert_eq!((shown[0].tunnelled, shown[0].half), (true, false));
    }

    #[test]
    fn every_condition_of_a_filter_must_hold() {
        let shown = |filter: FlowFilter| flows(&[testdata::flow()], &names(), &filter, Tick(100)).len();
        let address = |text: &str| Some(text.parse().unwrap());
        assert_eq!(
            shown(FlowFilter { client: address("192.0.2.1"), service: Some("web".into()), ..<_>::default() }),
            1
        );
        assert_eq!(
            shown(FlowFilter { client: address("192.0.2.2"), service: Some("web".into()), ..<_>::default() }),
            0
        );
        assert_eq!(
            shown(FlowFilter {
                client: address("192.0.2.1"),
                service: Some("x/web".into()),
                ..<_>::default()
            }),
            0
        );
        assert_eq!(shown(FlowFilter { protocol: Some(lb_core::model::Protocol::Udp), ..<_>::default() }), 0);
        assert_eq!(shown(FlowFilter { phase: Some(Phase::Established), ..<_>::default() }), 1);
        assert_eq!(shown(FlowFilter { phase: Some(Phase::Closed), ..<_>::default() }), 0);
        assert_eq!(
            shown(FlowFilter { vip: address("10.96.0.10"), backend: address("10.1.0.5"), ..<_>::default() }),
            1
        );
    }

    #[test]
    fn durations_are_short() {
        assert_eq!([5, 65, 3600, 86399].map(duration), ["5s", "1m05s", "1h00m", "23h59m"]);
    }
}
