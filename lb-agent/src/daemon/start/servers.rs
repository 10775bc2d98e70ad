//! Starts the servers of the agent.

use std::{io, net::SocketAddr, sync::Arc};

use axum::Router;
use jiff::Timestamp;
use tokio::sync::watch;

use super::{channels::Channels, opened::Opened};
use crate::{
    config::Config,
    daemon::{
        Pages, bpffs, environment, http, named_files,
        report::{HealthzReport, Listener},
        socket,
        state::State,
        supervisor,
        tasks::Tasks,
    },
    health,
    kubernetes::{Events, NodeInfo},
    metrics,
    zpages::{self, About},
};

/// Spawns the servers of `/healthz`, `/metrics`, the agent's sockets and the health of Services, the task that reports
/// to the supervisor, and the task that watches the BPF file system. `emitted` receives Events about Services whose
/// health cannot be served.
pub(super) fn spawn(
    config: &Config,
    opened: &Opened,
    channels: &Channels,
    emitted: Events,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Opened { datapath, metrics, state, .. } = opened;
    let pins = bpffs::Pins {
        anchor: datapath.anchor()?,
        sockets: datapath.socket_attacher(),
        synchronised: channels.synchronised.receiver.clone(),
    };
    tasks.spawn("BPF file system", bpffs::run(pins, Arc::clone(state), Arc::clone(metrics)));
    spawn_healthz_and_metrics(config, opened, &channels.node_info.receiver, tasks);
    let (bpffs, node_info) = (config.kernel.bpffs.clone(), channels.node_info.receiver.clone());
    tasks.spawn("status socket", socket::serve(bpffs.clone(), Arc::clone(state), node_info));
    supervisor::spawn(Arc::clone(state), tasks);
    tasks.spawn("environment socket", environment::serve(bpffs, channels.environments.sender.clone()));
    let (checks, listen) = (channels.checks.receiver.clone(), channels.listen.receiver.clone());
    let report = health_report(emitted, config, opened);
    tasks.spawn("health checks of Services", health::Servers::new(checks, listen, report).run());
    Ok(())
}

/// Spawns the servers of `/healthz` and `/metrics`, as far as they are configured.
fn spawn_healthz_and_metrics(
    config: &Config,
    opened: &Opened,
    node_info: &watch::Receiver<NodeInfo>,
    tasks: &mut Tasks,
) {
    let Opened { metrics, state, .. } = opened;
    if let Some(address) = config.healthz {
        state.set_healthz(HealthzReport::untried(address));
        let (asked, node_info) = (Arc::clone(state), node_info.clone());
        let eligible = move || node_info.borrow().eligible;
        let router = health::router(move || asked.health(), eligible, Arc::clone(metrics));
        serve("healthz", (Listener::Healthz, address), router, state, tasks);
    }
    if let Some(address) = config.metrics {
        let about = About {
            configz: config.configz(),
            flagz: config.flagz(),
            started: Timestamp::now(),
            metrics: Arc::clone(metrics),
        };
        let router = metrics::router(Arc::clone(metrics)).merge(zpages::router(about));
        serve("metrics", (Listener::Metrics, address), router, state, tasks);
    }
}

/// Spawns the server of the web pages, if it is configured.
pub(super) fn spawn_pages(
    config: &Config,
    pages: Pages,
    state: &Arc<State>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Some(web) = &config.web else { return Ok(()) };
    let router = pages(config.kernel.clone(), named_files::access_to_pages(web)?);
    serve("pages for a browser", (Listener::Web, web.address), router, state, tasks);
    Ok(())
}

/// Spawns the task of an HTTP server. The task records whether the server listens at its address.
fn serve(
    task: &'static str,
    (listener, address): (Listener, SocketAddr),
    router: Router,
    state: &Arc<State>,
    tasks: &mut Tasks,
) {
    let state = Arc::clone(state);
    let attempted = move |attempt: Result<(), &io::Error>| state.record_attempt(listener, address, attempt);
    let served = (router, listener.most_connections());
    tasks.spawn(task, http::serve(listener.served(), address, served, attempted));
}

/// The functions by which the `healthCheckNodePort` servers ask whether the agent is healthy, and report their errors.
fn health_report(events: Events, config: &Config, opened: &Opened) -> health::Report {
    let state = Arc::clone(&opened.state);
    health::Report {
        healthy: Arc::new(move || state.health().healthy),
        failed: Box::new(move |service, why| events.health_check_failed(service.clone(), why)),
        metrics: Arc::clone(&opened.metrics),
        node_name: config.node_name.as_str().into(),
    }
}
