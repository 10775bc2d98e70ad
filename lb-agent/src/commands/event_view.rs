//! Converts the events that `monitor` shows to text and JSON.

use std::{fmt, net::SocketAddr};

use ipnet::IpNet;
use jiff::Timestamp;
use lb_common::{
    Choice, Event, EventHook, Outcome, Scheduler, Verdict,
    conntrack::{Tuple, flow_flags},
};
use lb_core::plan::ServiceLabels;
use serde::Serialize;

use super::service_view::protocol_name;
use crate::cli::{EventVerdict, ServiceFilter};

/// One event of the data plane. Scripts read the JSON: keys may be added, never renamed or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EventView {
    /// When the program emitted the event, in UTC.
    pub(super) time: Timestamp,
    pub(super) verdict: EventVerdict,
    /// `TCP`, `UDP`, `SCTP`, `ICMP` or `unknown`. `None`, like `client` and `vip`, if the reason is `rewrite_failed`.
    pub(super) protocol: Option<&'static str>,
    /// Address and port of the client. At a system call, the connection has no source yet: the port is 0, and the
    /// address is the node's or, for a socket of another network namespace, in `100::/64`.
    pub(super) client: Option<SocketAddr>,
    /// The virtual address and port that the client uses.
    pub(super) vip: Option<SocketAddr>,
    /// The service port that `vip` belongs to.
    pub(super) service: Option<ServiceView>,
    pub(super) backend: Option<SocketAddr>,
    /// Source address and port that the backend sees, if the connection is masqueraded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) masqueraded_as: Option<SocketAddr>,
    /// Whether the packet reaches the backend's node through a tunnel.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) tunnel: bool,
    /// Why this backend, or no backend, was chosen: a scheduler, a [`Choice`] (`affinity`, `retry` or `peer`), an
    /// outcome as in `lb-agent status`, or `unknown`.
    pub(super) reason: &'static str,
    /// `ingress`, `egress`, `xdp`, `socket` or `unknown`
    pub(super) hook: &'static str,
    /// Name of the interface where the program saw the packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<String>,
    /// Id of the process that made the system call; `None` for packets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) process: Option<u32>,
}

/// Names of a service port: namespace, Service and port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ServiceView {
    pub(super) namespace: String,
    pub(super) name: String,
    /// Name of the port; empty for an unnamed port.
    pub(super) port: String,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl EventView {
    /// Makes the view of an event. `labels` are those of the event's service port; `device` returns the name of the
    /// interface with the given index.
    pub(super) fn new(
        event: &Event,
        time: Timestamp,
        labels: Option<&ServiceLabels>,
        device: impl FnOnce(u32) -> String,
    ) -> Self {
        let outcome = Outcome::ALL.get(usize::from(event.outcome)).copied();
        let verdict = verdict(outcome);
        let is_known = event.from != <Tuple as bytemuck::Zeroable>::zeroed();
        let is_new = verdict == EventVerdict::New;
        let of_socket = event.hook == EventHook::Socket as u8;
        let has_source = is_new && !of_socket;
        let masqueraded_as = event.from.masqueraded_as(&event.to, event.flags).filter(|_| has_source);
        Self {
            time,
            verdict,
            protocol: is_known.then(|| protocol(event.from.protocol)),
            client: is_known.then(|| event.from.source_socket()),
            vip: is_known.then(|| event.from.destination_socket()),
            service: labels.map(ServiceView::new),
            backend: is_new.then(|| event.to.destination_socket()),
            masqueraded_as,
            tunnel: event.flags & flow_flags::TUNNEL != 0,
            reason: reason(event, outcome),
            hook: EventHook::ALL.get(usize::from(event.hook)).map_or("unknown", |hook| hook.as_str()),
            device: (!of_socket).then(|| device(event.origin)),
            process: of_socket.then_some(event.origin),
        }
    }
}

/// The verdict that belongs to an outcome. An unknown outcome, which programs of a newer version may emit, counts as
/// new.
fn verdict(outcome: Option<Outcome>) -> EventVerdict {
    match outcome.map(Outcome::verdict) {
        Some(Verdict::Drop) => EventVerdict::Drop,
        Some(Verdict::Bounce) => EventVerdict::Reject,
        Some(Verdict::Pass | Verdict::Route | Verdict::Hold) | None => EventVerdict::New,
    }
}

fn reason(event: &Event, outcome: Option<Outcome>) -> &'static str {
    match Choice::ALL.get(usize::from(event.choice)) {
        Some(Choice::None) => outcome.map_or("unknown", Outcome::as_str),
        Some(Choice::Scheduler) => Scheduler::try_from(event.scheduler).map_or("unknown", Scheduler::as_str),
        Some(Choice::Affinity) => "affinity",
        Some(Choice::Retry) => "retry",
        Some(Choice::Peer) => "peer",
        None => "unknown",
    }
}

fn protocol(number: u8) -> &'static str {
    match number {
        lb_common::protocol::ICMP | lb_common::protocol::ICMPV6 => "ICMP",
        number => protocol_name(number),
    }
}

impl ServiceView {
    fn new(labels: &ServiceLabels) -> Self {
        let name = &labels.name;
        Self {
            namespace: name.service.namespace.to_string(),
            name: name.service.name.to_string(),
            port: name.port.to_string(),
        }
    }
}

impl fmt::Display for ServiceView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, name, port } = self;
        let separator = if port.is_empty() { "" } else { ":" };
        write!(f, "{namespace}/{name}{separator}{port}")
    }
}

/// Whether [`line()`] prints the verdict in colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    /// With escape sequences for colours, for a terminal.
    Coloured,
}

/// The event as one line of text.
pub(super) fn line(view: &EventView, style: Style) -> String {
    let (word, colour) = match view.verdict {
        EventVerdict::New => ("new", 32),
        EventVerdict::Reject => ("reject", 33),
        EventVerdict::Drop => ("drop", 31),
    };
    let word = match style {
        Style::Plain => format!("{word:6}"),
        Style::Coloured => format!("\x1b[{colour}m{word:6}\x1b[0m"),
    };
    // Cuts `12:34:56.789` out of `2026-11-21T12:34:56.789Z`.
    let time = format!("{:.3}", view.time);
    let time = time.split_once('T').map_or(&*time, |(_, time)| time.trim_end_matches('Z'));
    format!("{time} {word} {}: {}", way(view), why(view))
}

/// The path of the packet: `TCP 192.0.2.1:40000 → 10.96.0.10:80 (default/web:http) → 10.1.0.5:8080`
fn way(view: &EventView) -> String {
    let (Some(protocol), Some(client), Some(vip)) = (view.protocol, view.client, view.vip) else {
        return "a packet".to_owned();
    };
    let client = match (view.process, client.port()) {
        (Some(process), _) => format!("process {process}"),
        (None, 0) => client.ip().to_string(),
        (None, _) => client.to_string(),
    };
    let vip = if vip.port() == 0 { vip.ip().to_string() } else { vip.to_string() };
    let service = view.service.as_ref().map_or_else(String::new, |service| format!(" ({service})"));
    let backend = view.backend.map_or_else(String::new, |backend| format!(" → {backend}"));
    let masquerade = view.masqueraded_as.map_or_else(String::new, |node| format!(" as {node}"));
    let tunnel = if view.tunnel { " in a tunnel" } else { "" };
    format!("{protocol:4} {client} → {vip}{service}{backend}{masquerade}{tunnel}")
}

fn why(view: &EventView) -> String {
    let device = view.device.as_deref().map_or_else(String::new, |device| format!(", on {device}"));
    format!("{}{device}{}", view.reason, if view.hook == "xdp" { " at XDP" } else { "" })
}

/// The conditions of `monitor`: an event is shown if it meets every condition that is given.
#[derive(Clone, Debug, Default)]
pub(super) struct EventFilter {
    pub(super) service: Option<ServiceFilter>,
    pub(super) client: Option<IpNet>,
    pub(super) verdict: Option<EventVerdict>,
}

impl EventFilter {
    pub(super) fn lets_through(&self, view: &EventView) -> bool {
        let Self { service, client, verdict } = self;
        service.as_ref().is_none_or(|service| is_of(service, view))
            && client.is_none_or(|net| view.client.is_some_and(|client| net.contains(&client.ip())))
            && verdict.is_none_or(|verdict| verdict == view.verdict)
    }
}

/// Whether the event belongs to the Service or virtual address that `filter` names.
fn is_of(filter: &ServiceFilter, view: &EventView) -> bool {
    match filter {
        ServiceFilter::Vip(address) => view.vip.is_some_and(|vip| vip.ip() == *address),
        ServiceFilter::Socket(socket) => view.vip == Some(*socket),
        ServiceFilter::Named { namespace, name, port } => view.service.as_ref().is_some_and(|service| {
            let number = view.vip.map(|vip| vip.port().to_string());
            service.namespace == *namespace
                && service.name == *name
                && (port.is_none() || *port == number || port.as_ref() == Some(&service.port))
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use bytemuck::Zeroable as _;
    use lb_common::{Address, protocol};
    use lb_core::model::{ObjectName, Protocol, ServicePortName};

    use super::*;

    fn new_flow() -> Event {
        let from = Tuple::new(ip("192.0.2.1"), ip("10.96.0.10"), 40_000, 80, protocol::TCP);
        let to = Tuple { destination: ip("10.1.0.5"), destination_port: 8080, ..from };
        Event {
            from,
            to,
            service: 7,
            origin: 3,
            outcome: Outcome::NewFlow as u8,
            choice: Choice::Scheduler as u8,
            ..Event::zeroed()
        }
    }

    fn refused(outcome: Outcome) -> Event {
        let Event { from, .. } = new_flow();
        Event { from, outcome: outcome as u8, origin: 3, ..Event::zeroed() }
    }

    fn ip(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn view(event: &Event) -> EventView {
        let labels = ServiceLabels {
            name: ServicePortName {
                service: ObjectName::new("default", "web"),
                port: "http".into(),
                protocol: Protocol::Tcp,
            },
            node_port: None,
        };
        let time = "2026-11-21T12:34:56.789012Z".parse().unwrap();
        EventView::new(event, time, Some(&labels), |index| format!("eth{index}"))
    }

    fn shown(event: &Event) -> String {
        line(&view(event), Style::Plain)
    }

    #[test]
    fn line_of_a_new_flow() {
        let flow = new_flow();
        let begin =
            "12:34:56.789 new    TCP  192.0.2.1:40000 → 10.96.0.10:80 (default/web:http) → 10.1.0.5:8080";
        assert_eq!(shown(&flow), format!("{begin}: random, on eth3"));
        let sticky = Event { choice: Choice::Affinity as u8, hook: EventHook::Xdp as u8, ..flow };
        assert_eq!(shown(&sticky), format!("{begin}: affinity, on eth3 at XDP"));
        let mut masqueraded = flow;
        (masqueraded.to.source, masqueraded.to.source_port) = (ip("172.18.0.1"), 10_017);
        assert_eq!(shown(&masqueraded), format!("{begin} as 172.18.0.1:10017: random, on eth3"));
        masqueraded.flags = flow_flags::ROUTED | flow_flags::TUNNEL;
        assert_eq!(shown(&masqueraded), format!("{begin} in a tunnel: random, on eth3"));
    }

    #[test]
    fn line_of_a_system_call() {
        let mut event = Event { origin: 4711, hook: EventHook::Socket as u8, ..new_flow() };
        event.scheduler = Scheduler::Maglev as u8;
        assert_eq!(
            shown(&event),
            "12:34:56.789 new    TCP  process 4711 → 10.96.0.10:80 (default/web:http) → 10.1.0.5:8080: mh"
        );
    }

    #[test]
    fn line_of_a_dropped_or_rejected_packet() {
        let of = "TCP  192.0.2.1:40000 → 10.96.0.10:80 (default/web:http)";
        let drop = shown(&refused(Outcome::NoSourcePort));
        assert_eq!(drop, format!("12:34:56.789 drop   {of}: no_source_port, on eth3"));
        let reject = shown(&refused(Outcome::RejectTcp));
        assert_eq!(reject, format!("12:34:56.789 reject {of}: reject_tcp, on eth3"));
        let half = Event { from: Tuple::zeroed(), ..refused(Outcome::RewriteFailed) };
        assert_eq!(shown(&half), "12:34:56.789 drop   a packet: rewrite_failed, on eth3");
    }

    #[test]
    fn only_the_verdict_is_coloured() {
        let text = line(&view(&refused(Outcome::NoSourcePort)), Style::Coloured);
        assert!(text.starts_with("12:34:56.789 \x1b[31mdrop  \x1b[0m TCP "), "{text}");
    }

    #[test]
    fn json_of_an_event() {
        let expected = serde_json::json!({
            "time": "2026-11-21T12:34:56.789012Z", "verdict": "new", "protocol": "TCP", "client": "192.0.2.1:40000",
            "vip": "10.96.0.10:80", "service": { "namespace": "default", "name": "web", "port": "http" },
            "backend": "10.1.0.5:8080", "reason": "random", "hook": "ingress", "device": "eth3",
        });
        assert_eq!(serde_json::to_value(view(&new_flow())).unwrap(), expected);
    }

    fn network(text: &str) -> IpNet {
        text.parse().unwrap_or_else(|_| text.parse::<IpAddr>().unwrap().into())
    }

    #[test]
    fn every_condition_of_a_filter_must_hold() {
        let view = view(&new_flow());
        let lets = |service: &str, client: &str, verdict| {
            let service = (!service.is_empty()).then(|| service.parse().unwrap());
            let client = (!client.is_empty()).then(|| network(client));
            EventFilter { service, client, verdict }.lets_through(&view)
        };
        for service in [
            "",
            "web",
            "default/web",
            "web:http",
            "web:80",
            "10.96.0.10",
            "10.96.0.10:80",
            "::ffff:10.96.0.10",
        ] {
            let is_mapped = service.starts_with("::");
            assert_eq!(lets(service, "192.0.2.0/24", Some(EventVerdict::New)), !is_mapped, "{service}");
        }
        for service in ["shop/web", "dns", "web:81", "10.96.0.11", "10.96.0.10:81"] {
            assert!(!lets(service, "", None), "{service}");
        }
        assert!(
            lets("", "192.0.2.1", None) && !lets("", "192.0.2.2", None) && !lets("", "2001:db8::/32", None)
        );
        assert!(!lets("", "", Some(EventVerdict::Drop)));
    }
}
