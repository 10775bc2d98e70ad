//! The data that the pages show, read from the pinned maps and the agent's status socket.
//!
//! Each reading opens the pins again: an upgrade may have moved the pins to another folder, and a starting agent may
//! have created them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use clap::Parser as _;
use jiff::Timestamp;
use lb_common::Outcome;
use lb_core::{probe::EndpointHealth, traffic::Tally};
use lb_web::{
    Connections, EventFilter as Filter, EventReader, Fill, Query, ServicePort, ServicePorts, ServiceReader,
    Source, SourceError, Status,
};
use serde_json::Value;
use tracing::debug;

use super::{
    super::{
        conntrack,
        event_view::{EventFilter, EventView},
        explain,
        service_view::{self, ServiceView},
        status,
    },
    events::Events,
};
use crate::{
    cli::{Cli, Command, ConntrackCommand, MonitorArgs},
    config::{ConfigError, KernelPaths},
    daemon::{report::Report, socket},
    leftovers::{self, Findings},
    probe::EndpointReport,
};
use lb_datapath::{Ledger, MapFill, Pinned};

/// How long the pages reuse a list of kube-proxy's leftovers, because each search for them runs other programs.
const LEFTOVERS_AGE: Duration = Duration::from_secs(60);

/// Reads what the pages show: the data plane of this node, and cached leftovers of kube-proxy.
pub(super) struct Data {
    paths: KernelPaths,
    leftovers: Mutex<Option<(Instant, Arc<Findings>)>>,
}

impl Data {
    pub(super) fn new(paths: KernelPaths) -> Self {
        Self { paths, leftovers: Mutex::default() }
    }

    fn open(&self) -> anyhow::Result<Pinned> {
        Ok(Pinned::open(&self.paths.bpffs)?)
    }

    fn leftovers(&self) -> Arc<Findings> {
        let mut known = self.leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, findings)) = known.as_ref().filter(|(found, _)| found.elapsed() < LEFTOVERS_AGE) {
            return Arc::clone(findings);
        }
        let findings = Arc::new(leftovers::find());
        *known = Some((Instant::now(), Arc::clone(&findings)));
        findings
    }
}

impl Source for Data {
    type Event = EventView;

    fn packets(&self) -> anyhow::Result<[u64; Outcome::COUNT]> {
        Ok(self.open()?.stats().read()?)
    }

    fn fill(&self) -> anyhow::Result<Vec<Fill>> {
        let fill = |MapFill { name, entries, capacity }| Fill {
            name,
            entries: entries as u64,
            capacity: u64::from(capacity),
        };
        Ok(self.open()?.fill()?.into_iter().map(fill).collect())
    }

    fn services(&self) -> Box<dyn ServiceReader> {
        Box::new(Reader { bpffs: self.paths.bpffs.clone(), ledger: Ledger::default() })
    }

    fn status(&self) -> anyhow::Result<Status> {
        let status = status::look_beside(&self.paths, &self.open()?, &self.leftovers())?;
        let problems = status::problems(&status, Timestamp::now());
        Ok(Status { problems, status: serde_json::to_value(status)? })
    }

    fn service(&self, namespace: &str, name: &str) -> anyhow::Result<ServicePorts> {
        let mut services = service_view::services(&self.open()?.maps().contents()?);
        services.retain(|service| service.namespace == namespace && service.name == name);
        let report = report(&self.paths.bpffs);
        if let Some(report) = &report {
            service_view::name_announcers(&mut services, &report.announcements);
            service_view::add_health(&mut services, &report.health_checks);
        }
        let ports = services.into_iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
        Ok(ServicePorts { ports, agent_answers: report.is_some() })
    }

    fn connections(&self, query: &Query, limit: usize) -> Result<Connections, SourceError> {
        let flags = ["client", "vip", "backend", "protocol", "service", "phase"];
        let Command::Conntrack(ConntrackCommand::List { filter, .. }) =
            command(&["conntrack", "list"], &flags, query)?
        else {
            return Ok(Connections::default());
        };
        let read = || -> anyhow::Result<Connections> {
            let pinned = self.open()?;
            let labels = pinned.maps().contents()?.service_labels;
            let name =
                |(id, labels): (u32, lb_core::plan::ServiceLabels)| (id, labels.name.service.to_string());
            let names: BTreeMap<u32, String> = labels.into_iter().map(name).collect();
            let (matched, shown) = conntrack::some(pinned.conntrack(), &names, &filter, limit)?;
            let shown = shown.iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
            Ok(Connections { matched, shown })
        };
        Ok(read()?)
    }

    fn explain(&self, query: &Query) -> Result<Value, SourceError> {
        // The form always sends the parameter `protocol`. This function ignores the parameter if `to` contains a
        // protocol.
        let names_protocol = query.iter().any(|(name, value)| name == "to" && value.contains('/'));
        let protocol = (!names_protocol).then_some("protocol");
        let flags: Vec<&str> = ["from", "to", "at", "device"].into_iter().chain(protocol).collect();
        let Command::Explain(args) = command(&["explain"], &flags, query)? else { return Ok(Value::Null) };
        let asked_wrong = |error: anyhow::Error| match error.downcast::<ConfigError>() {
            Ok(error) => SourceError::Question(error.to_string()),
            Err(error) => error.into(),
        };
        explain::json(&self.paths, &args).map_err(asked_wrong)
    }

    fn event_filter(&self, query: &Query) -> Result<Filter<EventView>, SourceError> {
        let Command::Monitor(args) = command(&["monitor"], &["service", "client", "verdict"], query)? else {
            return Ok(Box::new(|_| false));
        };
        let MonitorArgs { service, client, verdict, .. } = args;
        let filter = EventFilter { service, client, verdict };
        Ok(Box::new(move |event| filter.lets_through(event)))
    }

    fn events(&self) -> anyhow::Result<Box<dyn EventReader<EventView>>> {
        let pinned = self.open()?;
        Ok(Box::new(Events::new(pinned.maps().clone(), pinned.monitor()?)))
    }
}

/// Parses the parameters of a request as flags of a command line: both have the same names, values and errors. Ignores
/// empty parameters, and those that are not in `flags`.
fn command(command: &[&str], flags: &[&str], query: &Query) -> Result<Command, SourceError> {
    let given = query.iter().filter(|(flag, value)| flags.contains(&flag.as_str()) && !value.is_empty());
    let words = ["lb-agent"].iter().chain(command).map(|word| (*word).to_owned());
    let words = words.chain(given.map(|(flag, value)| format!("--{flag}={value}")));
    Cli::try_parse_from(words).map(|cli| cli.command).map_err(|error| {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        let lines: Vec<&str> = first.lines().map(str::trim).collect();
        SourceError::Question(lines.join(" ").trim_start_matches("error: ").to_owned())
    })
}

/// The report of the agent; `None` if no agent sends one. This is no error, because the maps contain most of what the
/// pages show.
fn report(bpffs: &Path) -> Option<Report> {
    socket::ask(bpffs).unwrap_or_else(|error| {
        debug!("cannot ask the agent for its report: {error:#}");
        None
    })
}

/// Reads all Services, and sums the traffic of each backend across readings.
struct Reader {
    bpffs: PathBuf,
    ledger: Ledger,
}

impl ServiceReader for Reader {
    fn read(&mut self) -> anyhow::Result<Vec<ServicePort>> {
        let pinned = Pinned::open(&self.bpffs)?;
        pinned.conntrack().tally(&mut self.ledger)?;
        let mut traffic: BTreeMap<u32, BTreeMap<SocketAddr, Tally>> = BTreeMap::new();
        for (endpoint, tally) in self.ledger.backends() {
            let socket = SocketAddr::new(endpoint.address.into(), endpoint.port);
            traffic.entry(endpoint.service).or_default().insert(socket, *tally);
        }
        let mut services = service_view::services(&pinned.maps().contents()?);
        if let Some(report) = report(&self.bpffs) {
            service_view::add_health(&mut services, &report.health_checks);
        }
        let of_services = services.chunk_by(|a, b| (&a.namespace, &a.name) == (&b.namespace, &b.name));
        let unhealthy: Vec<usize> = of_services.flat_map(unhealthy).collect();
        let ports = services.into_iter().zip(unhealthy);
        Ok(ports.map(|(view, unhealthy)| port(view, unhealthy, &mut traffic)).collect())
    }
}

/// The number of unhealthy targets of the health check for each of `ports`, which are all ports of one Service; 0 if
/// the check does not cover the port, or no agent runs.
fn unhealthy(ports: &[ServiceView]) -> Vec<usize> {
    ports.iter().map(|view| unhealthy_targets(view, ports)).collect()
}

/// The number of unhealthy targets of `view`, one of `ports`. The agent does not report which service port a target
/// serves. If the check does not name the port to probe, an unhealthy target counts for `view` unless only backends of
/// other service ports have the port of the target.
fn unhealthy_targets(view: &ServiceView, ports: &[ServiceView]) -> usize {
    let Some(check) = view.health_check.as_ref().filter(|check| check.covers(view.protocol)) else {
        return 0;
    };
    if check.names_port() {
        return check.unhealthy;
    }
    let covered = ports.iter().filter(|other| check.covers(other.protocol));
    let (all, own): (BTreeSet<u16>, _) = (covered.flat_map(backend_ports).collect(), backend_ports(view));
    let is_unhealthy = |target: &&EndpointReport| target.verdict == EndpointHealth::Unhealthy.as_str();
    let is_of_other = |port: &u16| all.contains(port) && !own.contains(port);
    check.failing.iter().filter(is_unhealthy).filter(|target| !is_of_other(&target.port)).count()
}

fn backend_ports(view: &ServiceView) -> BTreeSet<u16> {
    view.backends.iter().map(|backend| backend.port).collect()
}

fn port(
    view: ServiceView,
    unhealthy: usize,
    traffic: &mut BTreeMap<u32, BTreeMap<SocketAddr, Tally>>,
) -> ServicePort {
    let terminating = view.backends.iter().filter(|backend| backend.state == "terminating").count();
    ServicePort {
        id: view.id,
        frontends: view.frontends.iter().map(|frontend| (frontend.address, frontend.port).into()).collect(),
        ready: view.backends.len() - terminating,
        terminating,
        unhealthy,
        traffic: traffic.remove(&view.id).unwrap_or_default(),
        namespace: view.namespace,
        name: view.name,
        port: view.port,
        port_name: view.port_name,
        protocol: view.protocol,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{commands::service_view::testdata, probe::CheckReport};

    fn question(words: &[&str], flags: &[&str], query: &[(&str, &str)]) -> Result<Command, String> {
        let query = query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        command(words, flags, &query).map_err(|error| error.to_string())
    }

    #[test]
    fn parameters_are_flags_of_the_command() {
        let flags = ["from", "to"];
        let asked = |query: &[(&str, &str)]| question(&["explain"], &flags, query);
        let Ok(Command::Explain(args)) =
            asked(&[("from", "192.0.2.1"), ("to", "10.96.0.10:80"), ("output", "json"), ("config", "/x")])
        else {
            panic!("no explanation");
        };
        assert_eq!(
            (args.from.to_string(), args.to.socket.to_string()),
            ("192.0.2.1".into(), "10.96.0.10:80".into())
        );
        let error = asked(&[("from", "here"), ("to", "10.96.0.10:80")]).unwrap_err();
        assert_eq!(
            error,
            "invalid value 'here' for '--from <ADDR[:PORT]>': expected ADDR, ADDR:PORT or [ADDR]:PORT"
        );
        let error = asked(&[("from", "192.0.2.1"), ("to", "")]).unwrap_err();
        assert_eq!(error, "the following required arguments were not provided: --to <ADDR:PORT[/PROTO]>");
        assert!(asked(&[("from", "-h"), ("to", "--help")]).is_err());
    }

    #[test]
    fn row_counts_backends_by_state() {
        let views = service_view::services(&testdata::contents());
        let mut traffic =
            BTreeMap::from([(7, BTreeMap::from([(([10, 1, 0, 5], 8080).into(), Tally::default())]))]);
        let row = port(views[0].clone(), 3, &mut traffic);
        assert_eq!((row.id, row.ready, row.terminating, row.unhealthy), (7, 2, 1, 3));
        assert_eq!(row.traffic.len(), 1);
        assert_eq!(row.frontends[0].to_string(), "10.96.0.10:80");
    }

    /// A health check, with an unhealthy target at each of these ports.
    fn check(text: &str, ports: &[u16]) -> CheckReport {
        let target = |port: &u16| EndpointReport {
            address: [10, 1, 0, 9].into(),
            port: *port,
            verdict: "unhealthy".to_owned(),
            since: Timestamp::UNIX_EPOCH,
            held_until: None,
            reason: "refused".to_owned(),
        };
        CheckReport {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            check: text.to_owned(),
            interval_milliseconds: 10_000,
            timeout_milliseconds: 5_000,
            healthy_threshold: 2,
            unhealthy_threshold: 3,
            healthy: 0,
            unhealthy: ports.len(),
            unknown: 0,
            failing: ports.iter().map(target).collect(),
            passing: Vec::new(),
        }
    }

    #[test]
    fn unhealthy_targets_count_for_the_service_port_whose_backends_have_their_port() {
        let served_at = |port, protocol| {
            let mut view = service_view::services(&testdata::contents()).remove(0);
            view.backends.iter_mut().for_each(|backend| backend.port = port);
            ServiceView { protocol, ..view }
        };
        let counts = |text: &str, failing: &[u16]| {
            let mut ports = [(8080, "TCP"), (9090, "TCP"), (5353, "UDP")].map(|(at, of)| served_at(at, of));
            service_view::add_health(&mut ports, &[check(text, failing)]);
            unhealthy(&ports)
        };
        assert_eq!(counts("http:///healthz", &[9090]), [0, 1, 0]);
        assert_eq!(counts("http:///healthz", &[8080, 9090, 9090]), [1, 2, 0]);
        assert_eq!(counts("http:///healthz", &[7070, 5353]), [2, 2, 0], "TCP ports without a backend");
        assert_eq!(counts("http://:9090/healthz", &[9090]), [1, 1, 1], "a port for all service ports");
    }
}
