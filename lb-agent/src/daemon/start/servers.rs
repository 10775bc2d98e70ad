//! Starts the servers of the agent.

use std::{fs, io, net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::Context as _;
use jiff::Timestamp;
use lb_web::{Access, Token};
use tokio::sync::watch;

use super::opened::Opened;
use crate::{
    config::{Config, WebConfig},
    daemon::{
        Pages, bpffs, http, socket,
        state::{HealthzReport, Listener, State},
        supervisor,
        tasks::Tasks,
    },
    health,
    kubernetes::{Events, NodeInfo},
    metrics,
    zpages::{self, About},
};

/// Spawns the servers of `/healthz`, `/metrics` and the status socket, the reports to the supervisor, and the watch
/// over the BPF file system.
pub(super) fn spawn(
    config: &Config,
    opened: &Opened,
    node_info: watch::Receiver<NodeInfo>,
    synchronised: watch::Receiver<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Opened { datapath, metrics, state, .. } = opened;
    let pins = bpffs::Pins { anchor: datapath.anchor()?, sockets: datapath.socket_attacher(), synchronised };
    tasks.spawn("BPF file system", bpffs::run(pins, Arc::clone(state), Arc::clone(metrics)));
    if let Some(address) = config.healthz {
        state.set_healthz(HealthzReport::untried(address));
        let (reported, state, node_info) = (Arc::clone(state), Arc::clone(state), node_info.clone());
        let attempted = move |result: Result<(), &io::Error>| {
            reported.set_healthz(HealthzReport::after(address, result));
        };
        let eligible = move || node_info.borrow().eligible;
        let router = health::router(move || state.health(), eligible, Arc::clone(metrics));
        tasks.spawn("healthz", http::serve("/healthz", address, router, attempted));
    }
    if let Some(address) = config.metrics {
        let about = About {
            configz: config.configz(),
            flagz: config.flagz(),
            started: Timestamp::now(),
            metrics: Arc::clone(metrics),
        };
        let router = metrics::router(Arc::clone(metrics)).merge(zpages::router(about));
        let attempted = attempts_of(Listener::Metrics, address, state);
        tasks.spawn("metrics", http::serve("/metrics", address, router, attempted));
    }
    let socket = socket::serve(config.kernel.bpffs.clone(), Arc::clone(state), node_info);
    tasks.spawn("status socket", socket);
    supervisor::spawn(Arc::clone(state), tasks);
    Ok(())
}

/// Spawns the server of the web pages, if it is configured.
pub(super) fn spawn_pages(
    config: &Config,
    pages: Pages,
    state: &Arc<State>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Some(WebConfig { address, token_file }) = &config.web else { return Ok(()) };
    let read = |file: &PathBuf| -> anyhow::Result<Token> {
        let text = fs::read_to_string(file)
            .with_context(|| format!("cannot read the file of --web-token-file, {}", file.display()))?;
        Token::new(&text).with_context(|| format!("--web-token-file {}", file.display()))
    };
    let token = token_file.as_ref().map(read).transpose()?;
    let access = Access::new(*address, token)
        .with_context(|| format!("--web-bind-address {address} needs --web-token-file"))?;
    let router = pages(config.kernel.clone(), access);
    let attempted = attempts_of(Listener::Web, *address, state);
    tasks.spawn("pages for a browser", http::serve("the pages for a browser", *address, router, attempted));
    Ok(())
}

/// A function that takes the result of each attempt of a server to listen.
fn attempts_of(
    listener: Listener,
    address: SocketAddr,
    state: &Arc<State>,
) -> impl Fn(Result<(), &io::Error>) + use<> {
    let state = Arc::clone(state);
    move |attempt| state.record_attempt(listener, address, attempt)
}

/// The functions by which the `healthCheckNodePort` servers ask whether the agent is healthy, and report their errors.
pub(super) fn health_report(events: Events, config: &Config, opened: &Opened) -> health::Report {
    let state = Arc::clone(&opened.state);
    health::Report {
        healthy: Arc::new(move || state.health().healthy),
        failed: Box::new(move |service, why| events.health_check_failed(service.clone(), why)),
        metrics: Arc::clone(&opened.metrics),
        node_name: config.node_name.as_str().into(),
    }
}
