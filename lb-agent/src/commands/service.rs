//! The commands `service list` and `service show`.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::bail;
use comfy_table::Table;
use lb_common::{Outcome, Verdict};

use super::{
    output::{Mood, NOTHING, cell, print, print_json, print_table, print_yaml, render, scaled, table},
    service_view::{AnnouncedView, BackendView, Clients, FrontendView, ServiceView, Unserved},
};
use crate::{
    announce::{AnnouncedBy, announcer, means},
    cli::{ServiceOutput, split_name},
    probe::{CheckReport, EndpointReport},
};

/// Prints `services`: all of them, or those of one namespace.
pub(super) fn list(
    mut services: Vec<ServiceView>,
    namespace: Option<&str>,
    output: ServiceOutput,
) -> anyhow::Result<()> {
    services.retain(|service| namespace.is_none_or(|namespace| service.namespace == namespace));
    match output {
        ServiceOutput::Json => print_json(&services),
        ServiceOutput::Yaml => print_yaml(&services),
        ServiceOutput::Table => print_table(&list_table(&services, false)),
        ServiceOutput::Wide => print_table(&list_table(&services, true)),
    }
}

/// Prints the ports of the Service `name` with their backends.
pub(super) fn show(mut services: Vec<ServiceView>, name: &str, output: ServiceOutput) -> anyhow::Result<()> {
    let (namespace, name) = split_name(name);
    services.retain(|service| service.namespace == namespace && service.name == name);
    if services.is_empty() {
        bail!("the kernel has no Service {namespace}/{name}: `lb-agent service list` shows those it has");
    }
    match output {
        ServiceOutput::Json => print_json(&services),
        ServiceOutput::Yaml => print_yaml(&services),
        ServiceOutput::Table => print(&page(&services, false)),
        ServiceOutput::Wide => print(&page(&services, true)),
    }
}

fn list_table(services: &[ServiceView], wide: bool) -> Table {
    let mut heads = vec!["NAMESPACE", "NAME", "PORT", "PORT-NAME", "NODE-PORT", "FRONTENDS", "BACKENDS"];
    if wide {
        heads.extend(["AFFINITY", "SCHEDULER", "ID", "ENDPOINTS"]);
    }
    let mut table = table(&heads);
    for service in services {
        // The narrow table leaves out NodePort frontends: the node port has its own column, and may be served on many
        // addresses.
        let shown = service.frontends.iter().filter(|frontend| wide || frontend.kind != "NodePort");
        let frontends: Vec<_> = shown.map(FrontendView::socket).collect();
        let mut row = vec![
            service.namespace.clone().into(),
            service.name.clone().into(),
            format!("{}/{}", service.port, service.protocol).into(),
            or_nothing(&service.port_name).into(),
            service.node_port.map_or_else(|| NOTHING.to_owned(), |port| port.to_string()).into(),
            or_nothing(&frontends.join(",")).into(),
            backend_count(service),
        ];
        if wide {
            let backends: Vec<_> = service.backends.iter().map(|b| service.weighted(b)).collect();
            row.extend([
                service.affinity().into(),
                service.scheduler.into(),
                service.id.into(),
                or_nothing(&backends.join(",")).into(),
            ]);
        }
        table.add_row(row);
    }
    table
}

/// A table cell with the number of backends, and how many of them are terminating.
fn backend_count(service: &ServiceView) -> comfy_table::Cell {
    let terminating = service.backends.iter().filter(|backend| backend.state == "terminating").count();
    match (service.backends.len(), terminating) {
        (0, _) => cell("0", Mood::Bad),
        (count, 0) => cell(count, Mood::Good),
        (count, terminating) => cell(format!("{count} ({terminating} terminating)"), Mood::Odd),
    }
}

/// The text of `service show`: one paragraph for each port of the Service.
fn page(services: &[ServiceView], wide: bool) -> String {
    let mut text = String::new();
    for service in services {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&heading(service, wide));
        text.push('\n');
        text.push_str(&render(&frontend_table(service, wide)));
        if !service.backends.is_empty() {
            text.push('\n');
            text.push_str(&render(&backend_table(service, wide)));
        }
        let unserved = unserved_text(service);
        if !unserved.is_empty() {
            text.push('\n');
            text.push_str(&unserved);
        }
        if let Some(check) = service.health_check.as_ref().filter(|check| !check.failing.is_empty()) {
            text.push('\n');
            text.push_str(&render(&failing_table(check)));
        }
    }
    text
}

fn heading(service: &ServiceView, wide: bool) -> String {
    let ServiceView { namespace, name, port, port_name, protocol, node_port, scheduler, id, .. } = service;
    let port_name = if port_name.is_empty() { String::new() } else { format!(" ({port_name})") };
    let node_port = node_port.map_or_else(String::new, |port| format!(", node port {port}"));
    let mut lines = vec![
        ("Service", format!("{namespace}/{name}")),
        ("Port", format!("{port}/{protocol}{port_name}{node_port}")),
        ("Affinity", service.affinity()),
        ("Scheduler", (*scheduler).to_owned()),
    ];
    if let Some(policy) = service.external_traffic_policy {
        let mode = service.north_south_mode.map_or_else(String::new, |mode| format!(", {mode}"));
        lines.push(("External", format!("traffic policy {policy}{mode}")));
    }
    if let Some(version) = service.proxy_protocol {
        lines.push(("Header", format!("backends get a PROXY protocol header, {version}")));
    }
    for (limit, of) in
        [(&service.max_connections, "all clients"), (&service.max_connections_per_client, "each client")]
    {
        if let Some(limit) = limit {
            lines.push(("Limit", format!("{limit} new connections of {of} on this node")));
        }
    }
    if !service.source_ranges.is_empty() {
        lines.push(("Allowed", format!("sources {}", service.source_ranges.join(", "))));
    }
    if let Some(check) = &service.health_check {
        lines.push(("Health", health(check)));
    }
    for frontend in &service.frontends {
        let FrontendView { address, announced, announced_by_bgp, .. } = frontend;
        for (view, by) in [(announced, AnnouncedBy::Layer2), (announced_by_bgp, AnnouncedBy::Bgp)] {
            let Some(AnnouncedView { node, here, since, advertisements }) = view else { continue };
            let (name, means) = (announcer(node.as_deref(), *here, *since), means(by, advertisements));
            let text = match (node, by) {
                (None, AnnouncedBy::Bgp) => format!("{address} not by this node {means}; other nodes may"),
                _ => format!("{address} by {name} {means}"),
            };
            lines.push(("Announced", text));
        }
    }
    if wide {
        lines.push(("Id", id.to_string()));
    }
    lines.into_iter().map(|(label, value)| format!("{label:<10} {value}\n")).collect()
}

/// One line on a health check: what it probes, how often, and how many targets (endpoint and port) have which health.
fn health(check: &CheckReport) -> String {
    let CheckReport { healthy, unhealthy, unknown, .. } = check;
    let interval = Duration::from_millis(check.interval_milliseconds);
    let unknown = if *unknown == 0 { String::new() } else { format!(", {unknown} without a result yet") };
    format!("{} every {interval:?}: {healthy} healthy, {unhealthy} unhealthy{unknown}", check.check)
}

/// A table of the targets (endpoint and port) that are unhealthy, or whose last probe has failed. The Service does not
/// use unhealthy endpoints as backends. If all endpoints are unhealthy, the Service uses them after all, except with
/// the annotation `lb.dev/fail-closed: true`.
fn failing_table(check: &CheckReport) -> Table {
    let mut table = table(&["PROBED", "HEALTH", "SINCE", "LAST-FAILURE"]);
    for EndpointReport { address, port, verdict, since, held_until, reason } in &check.failing {
        let mood = if verdict == "unhealthy" { Mood::Bad } else { Mood::Odd };
        let held = held_until.map_or_else(String::new, |until| format!("; it flaps: held until {until}"));
        table.add_row(vec![
            SocketAddr::new(*address, *port).to_string().into(),
            cell(verdict, mood),
            since.to_string().into(),
            format!("{reason}{held}").into(),
        ]);
    }
    table
}

fn frontend_table(service: &ServiceView, wide: bool) -> Table {
    let mut heads = vec!["FRONTEND", "KIND"];
    if wide {
        heads.extend(["SLOTS", "SLOTS-INTERNAL", "MASQUERADE", "WITHOUT-BACKENDS"]);
    }
    let mut table = table(&heads);
    for frontend in &service.frontends {
        let mut row = vec![frontend.socket(), frontend.kind.to_owned()];
        if wide {
            row.push(slot_range(frontend.slot, frontend.slots));
            row.push(slot_range(frontend.internal_slot.unwrap_or(0), frontend.internal_slots.unwrap_or(0)));
            // Scripts read the JSON, so the JSON keeps the old word `outsiders`; the table shows `external`.
            let masquerade =
                if frontend.masquerade == "outsiders" { "external" } else { frontend.masquerade };
            row.extend([masquerade.to_owned(), frontend.without_backends.to_owned()]);
        }
        table.add_row(row);
    }
    table
}

fn backend_table(service: &ServiceView, wide: bool) -> Table {
    let mut heads = vec!["BACKEND", "STATE", "NODE", "ZONE", "POD"];
    if wide {
        heads.push("WEIGHT");
    }
    heads.extend(["FLOWS", "PACKETS", "BYTES"]);
    let mut table = table(&heads);
    for backend in &service.backends {
        let label = |label: &Option<String>| or_nothing(label.as_deref().unwrap_or("")).to_owned();
        let mood = if backend.state == "active" { Mood::Good } else { Mood::Odd };
        let mut row = vec![
            backend.socket().into(),
            cell(backend.state, mood),
            label(&backend.node).into(),
            label(&backend.zone).into(),
            label(&backend.pod).into(),
        ];
        if wide {
            row.push(service.weight(backend).into());
        }
        let traffic = backend.traffic.as_ref();
        let shown = |value: Option<u64>| value.map_or_else(|| NOTHING.to_owned(), scaled);
        row.extend([
            shown(backend.flows).into(),
            shown(traffic.map(|traffic| traffic.packets_sent + traffic.packets_answered)).into(),
            shown(traffic.map(|traffic| traffic.bytes_sent + traffic.bytes_answered)).into(),
        ]);
        table.add_row(row);
    }
    table
}

/// A line for each group of clients that have no backend, and what happens to their new connections.
fn unserved_text(service: &ServiceView) -> String {
    let mut groups: BTreeMap<Unserved, Vec<String>> = BTreeMap::new();
    for frontend in &service.frontends {
        for unserved in &frontend.unserved {
            groups.entry(*unserved).or_default().push(frontend.socket());
        }
    }
    let line = |(Unserved { clients, outcome }, sockets): (Unserved, Vec<String>)| {
        let are_all = sockets.len() == service.frontends.len();
        let of = if are_all { String::new() } else { format!(" of {}", sockets.join(", ")) };
        let of = match clients {
            Clients::All if are_all => of,
            Clients::All => format!(" for clients{of}"),
            Clients::External => format!(" for external clients{of}"),
            Clients::Internal => format!(" for internal clients{of}"),
        };
        let place = if outcome == Outcome::NoLocalBackend { " on this node" } else { "" };
        let verb = if outcome.verdict() == Verdict::Drop { "dropped" } else { "refused" };
        format!("No backends{place}{of}: new connections are {verb}.\n")
    };
    groups.into_iter().map(line).collect()
}

pub(super) fn or_nothing(text: &str) -> &str {
    if text.is_empty() { NOTHING } else { text }
}

impl ServiceView {
    fn weight(&self, backend: &BackendView) -> u32 {
        self.weights.get(&SocketAddr::new(backend.address, backend.port)).copied().unwrap_or(1)
    }

    /// Text of a backend: its address, followed by its weight if that is not 1.
    fn weighted(&self, backend: &BackendView) -> String {
        match self.weight(backend) {
            1 => backend.socket(),
            weight => format!("{}={weight}", backend.socket()),
        }
    }

    fn affinity(&self) -> String {
        match self.session_affinity_seconds {
            Some(seconds) => format!("{} ({seconds} s)", self.session_affinity),
            None => self.session_affinity.to_owned(),
        }
    }
}

impl FrontendView {
    fn socket(&self) -> String {
        SocketAddr::new(self.address, self.port).to_string()
    }
}

/// A range of slots as text, by its first and last slot.
fn slot_range(first: u32, slots: u32) -> String {
    match slots {
        0 => NOTHING.to_owned(),
        slots => format!("{first}-{}", first.saturating_add(slots - 1)),
    }
}

impl BackendView {
    fn socket(&self) -> String {
        SocketAddr::new(self.address, self.port).to_string()
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{FrontendKind, Service, service_flags};

    use super::*;
    use crate::{
        announce::AnnouncementReport,
        commands::service_view::{self, testdata},
    };

    #[test]
    fn service_table_has_one_line_per_port() {
        let services = service_view::services(&testdata::contents());
        let expected = "\
NAMESPACE    NAME  PORT    PORT-NAME  NODE-PORT  FRONTENDS                         BACKENDS
default      web   80/TCP  http       30080      10.96.0.10:80,[fd00:10:96::a]:80  3 (1 terminating)
kube-system  dns   53/UDP  -          -          10.96.0.53:53                     0
";
        assert_eq!(render(&list_table(&services, false)), expected);
    }

    #[test]
    fn page_shows_frontends_and_backends_of_a_service() {
        let mut services = service_view::services(&testdata::contents());
        let mut flow = testdata::flow();
        flow.forward.count_packet(1000);
        flow.reply.iter_mut().for_each(|reply| reply.count_packet(1500));
        service_view::count_flows(&mut services, &[flow], &BTreeMap::new());
        let expected = "\
Service    default/web
Port       80/TCP (http), node port 30080
Affinity   ClientIP (10800 s)
Scheduler  random
Id         7

FRONTEND            KIND       SLOTS  SLOTS-INTERNAL  MASQUERADE  WITHOUT-BACKENDS
10.96.0.10:80       ClusterIP  64-65  -               none        reject
[fd00:10:96::a]:80  ClusterIP  80-80  -               none        reject

BACKEND         STATE        NODE  ZONE  POD    WEIGHT  FLOWS  PACKETS  BYTES
10.1.0.5:8080   active       a     z1    web-0  1       1      2        2.5k
10.1.0.6:8080   terminating  -     -     -      1       0      0        0
[fd00::5]:8080  active       -     -     -      1       0      0        0
";
        assert_eq!(page(&services[..1], true), expected);
    }

    #[test]
    fn page_shows_external_policy_and_allowed_sources() {
        let expected = "\
Service    default/web
Port       80/TCP (http), node port 30080
Affinity   None
Scheduler  random
External   traffic policy Local
Allowed    sources 192.0.2.0/24, 2001:db8::/32
Id         7

FRONTEND         KIND          SLOTS  SLOTS-INTERNAL  MASQUERADE  WITHOUT-BACKENDS
10.96.0.10:80    ClusterIP     64-64  -               external    reject
192.0.2.1:30080  NodePort      64-64  65-66           none        drop
198.51.100.1:80  LoadBalancer  64-64  65-66           none        drop
203.0.113.7:80   ExternalIP    64-64  65-66           none        drop

BACKEND        STATE   NODE  ZONE  POD  WEIGHT  FLOWS  PACKETS  BYTES
10.1.0.5:8080  active  -     -     -    1       -      -        -
10.1.0.6:8080  active  -     -     -    1       -      -        -
";
        assert_eq!(page(&service_view::services(&testdata::exposed()), true), expected);
    }

    #[test]
    fn page_shows_unhealthy_endpoints_and_their_last_failure() {
        let endpoint = |last: u8, verdict: &str, reason: &str| EndpointReport {
            address: [10, 1, 0, last].into(),
            port: 8080,
            verdict: verdict.to_owned(),
            since: "2026-11-25T23:00:00Z".parse().unwrap(),
            held_until: (last == 8).then(|| "2026-11-25T23:02:00Z".parse().unwrap()),
            reason: reason.to_owned(),
        };
        let check = CheckReport {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            check: "http://:8080/healthz".to_owned(),
            interval_milliseconds: 10_000,
            timeout_milliseconds: 5_000,
            healthy_threshold: 2,
            unhealthy_threshold: 3,
            healthy: 2,
            unhealthy: 1,
            unknown: 1,
            failing: vec![
                endpoint(5, "healthy", "no answer in 5s"),
                endpoint(7, "unhealthy", "status 500"),
                endpoint(8, "unhealthy", "status 503"),
            ],
            passing: Vec::new(),
        };
        let mut services = service_view::services(&testdata::contents());
        service_view::add_health(&mut services, &[check]);
        assert_eq!(services[1].health_check, None);
        let text = page(&services[..1], false);
        let line =
            "Health     http://:8080/healthz every 10s: 2 healthy, 1 unhealthy, 1 without a result yet\n";
        assert!(text.contains(line), "{text}");
        let expected = "
PROBED         HEALTH     SINCE                 LAST-FAILURE
10.1.0.5:8080  healthy    2026-11-25T23:00:00Z  no answer in 5s
10.1.0.7:8080  unhealthy  2026-11-25T23:00:00Z  status 500
10.1.0.8:8080  unhealthy  2026-11-25T23:00:00Z  status 503; it flaps: held until 2026-11-25T23:02:00Z
";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn announcers_of_an_address_are_named_with_their_advertisements() {
        let mut services = service_view::services(&testdata::contents());
        let announcement = |by, node: &str, advertisement: &str| AnnouncementReport {
            address: services[0].frontends[0].address,
            pool: "a".to_owned(),
            services: vec!["default/web".to_owned()],
            by,
            advertisements: vec![advertisement.to_owned()],
            node: Some(node.to_owned()),
            here: by == AnnouncedBy::Bgp,
            interfaces: Vec::new(),
            since: None,
            expires_in_ms: None,
            answers: 0,
            conflicts: 0,
            conflict_mac: None,
        };
        let layer_2 = announcement(AnnouncedBy::Layer2, "n2", "m/l2");
        let bgp = announcement(AnnouncedBy::Bgp, "n1", "m/bgp");
        let address = layer_2.address;
        service_view::name_announcers(&mut services, &[layer_2, bgp]);
        let text = page(&services[..1], false);
        for line in [
            format!("Announced  {address} by n2 at layer 2 (m/l2)\n"),
            format!("Announced  {address} by n1 (this node) by BGP (m/bgp)\n"),
        ] {
            assert!(text.contains(&line), "{line}: {text}");
        }
        let json = serde_json::to_value(&services[0].frontends[0]).unwrap();
        assert_eq!(
            (&json["announced"]["node"], &json["announcedByBgp"]["node"]),
            (&"n2".into(), &"n1".into())
        );
    }

    #[test]
    fn service_without_backends_says_that_connections_are_refused() {
        let services = service_view::services(&testdata::contents());
        assert!(page(&services[1..], false).ends_with("\n\nNo backends: new connections are refused.\n"));
    }

    #[test]
    fn local_policy_without_local_backends_says_that_connections_are_dropped() {
        let mut contents = testdata::contents();
        contents
            .frontends
            .values_mut()
            .for_each(|record| record.flags = service_flags::DROP_WITHOUT_BACKENDS);
        let text = page(&service_view::services(&contents)[1..], false);
        assert!(text.ends_with("\n\nNo backends on this node: new connections are dropped.\n"), "{text}");
    }

    #[test]
    fn frontends_without_backends_are_named_if_other_frontends_or_clients_have_some() {
        let mut contents = testdata::exposed();
        let external = |record: &&mut Service| record.kind != FrontendKind::ClusterIp as u8;
        contents.frontends.values_mut().filter(external).for_each(|record| record.backends_count = 0);
        let text = page(&service_view::services(&contents), false);
        let expected = "\n
No backends on this node for external clients of 192.0.2.1:30080, 198.51.100.1:80, 203.0.113.7:80: new connections are dropped.
";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn each_family_without_backends_says_what_happens_to_its_connections() {
        let mut contents = testdata::contents();
        for (key, record) in &mut contents.frontends {
            record.backends_count = 0;
            record.flags = if key.address.is_v4() { service_flags::DROP_WITHOUT_BACKENDS } else { 0 };
        }
        let text = page(&service_view::services(&contents)[..1], false);
        let expected = "\n
No backends for clients of [fd00:10:96::a]:80: new connections are refused.
No backends on this node for clients of 10.96.0.10:80: new connections are dropped.
";
        assert!(text.ends_with(expected), "{text}");
    }
}
