//! The running agent: tasks around one writer.
//!
//! ```text
//! source ─────events──▶ writer ──steps──▶ SERVICES, BACKENDS, …      conntrack: expiry, stale UDP flows
//!     │                 ▲  └──stale UDP frontends──▶ conntrack       devices: programs on devices, INSIDE_DEVICES
//!     ├──Node object──▶ node ──▶ SETTINGS     node ◀──addresses── devices
//!     └──conditions──▶ State  ◀── healthz, status socket
//! ```
//!
//! If one task fails, the agent ends with that task's error. The programs and maps stay in the kernel and keep serving.

mod addresses;
mod announced;
mod bpffs;
mod config_file;
mod conntrack;
mod devices;
mod dns;
mod ends;
pub mod environment;
mod fill;
mod http;
mod ipsec;
pub mod logging;
mod memory;
pub(crate) mod named_files;
mod node;
mod open_files;
mod published;
pub mod report;
mod routes;
pub mod shortage;
mod shortage_watch;
pub mod socket;
mod start;
pub mod state;
mod supervisor;
mod sync_log;
mod tasks;
mod traffic;
mod waiting;
mod writer;

use std::{thread, time::Duration};

use anyhow::{Context as _, anyhow};
use tokio::{runtime, sync::watch, time::timeout};
use tracing::{info, warn};

pub use self::config_file::ConfigFile;
use self::tasks::{StopSignals, Tasks};
use crate::{
    announce::bgp,
    config::{Config, KernelPaths},
    host_rules, leftovers,
};

/// Threads of the Tokio runtime. Tasks mostly wait; a second thread lets `/healthz` answer while the writer works.
const THREADS: usize = 2;
/// How long a stopping agent waits for its tasks to hand over their roles in the cluster (announcer, leader). A task
/// that has handed over drops its receiver of `stop`.
const HANDOVER: Duration = Duration::from_secs(3);
/// How long blocking threads may take to finish after the tasks have ended.
const LAST_MOMENT: Duration = Duration::from_secs(2);

/// Makes the HTTP routes of the web pages. The caller passes this function in, because the pages depend on the
/// commands, and the commands depend on this module.
pub type Pages = fn(KernelPaths, lb_web::Access) -> axum::Router;

/// Runs the agent until a signal or an error stops it. The data plane stays in place. `pages` makes the web
/// pages of `--web-bind-address`.
///
/// # Errors
/// The agent cannot start, a task has failed, the configuration file has changed, or the kernel refuses to remove a
/// route that the agent announced by BGP.
pub fn run(config: Config, file: ConfigFile, pages: Pages) -> anyhow::Result<()> {
    memory::use_one_heap();
    open_files::raise();
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .context("cannot start the threads of the agent")?;
    let result = runtime.block_on(serve(config, file, pages));
    runtime.shutdown_timeout(LAST_MOMENT);
    result
}

async fn serve(config: Config, file: ConfigFile, pages: Pages) -> anyhow::Result<()> {
    info!(version = env!("CARGO_PKG_VERSION"), node = config.node_name, "starting");
    if !config.without_effect.is_empty() {
        let fields = config.without_effect.join(", ");
        warn!("these fields of the KubeProxyConfiguration have no effect: {fields}");
    }
    let mut signals = StopSignals::listen()?;
    let mut tasks = Tasks::default();
    let bpffs = config.kernel.bpffs.clone();
    let (stop, _) = watch::channel(false);
    start::start(config.clone(), pages, &stop, &mut tasks)?;
    // In the background, because reading all rules takes long and no task needs the result. After the start, because
    // the verifier needs the CPUs during the start.
    thread::spawn(|| {
        for line in leftovers::find().report().into_iter().chain(host_rules::find()) {
            warn!("{line}");
        }
    });
    let result = tokio::select! {
        name = signals.next() => {
            info!("{name}: stopping; the data plane stays in place");
            Ok(())
        }
        path = file.changed(&config) => {
            Err(anyhow!("{} has changed: start the agent again; the data plane stays in place", path.display()))
        }
        error = tasks.failure() => Err(error),
    };
    supervisor::stopping();
    stop.send_replace(true);
    if timeout(HANDOVER, stop.closed()).await.is_err() {
        warn!("not all that this node announces or leads is handed over: the others wait until it expires");
    }
    socket::unbind(&bpffs);
    result?;
    tasks.stop().await;
    bgp::stop(config.bgp.as_ref())
}
