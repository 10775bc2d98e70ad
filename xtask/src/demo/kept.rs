//! The cluster that `--keep` leaves behind, and its removal.

use std::env::current_exe;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use lb_tests::client::ask_http;
use lb_tests::cluster::{CLIENT, Cluster, serve as serve_pod};
use lb_tests::netns::Netns;
use lb_tests::{agent, cleanup, wait_for};

use super::report::say;

/// Namespaces are called `lb-demo-client`, `lb-demo-node1` and so on.
pub(super) const PREFIX: &str = "lb-demo";

/// The folder of manifests, logs and the mounted bpffs.
pub(super) const FOLDER: &str = "/run/lb-demo";

/// How long the servers may take to start.
const SERVERS_LIMIT: Duration = Duration::from_secs(60);

const PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];

/// Moves the pods' servers to a process that stays, and prints commands to explore the cluster.
pub(super) fn keep(cluster: &mut Cluster) -> Result<()> {
    cluster.pods.iter_mut().for_each(lb_tests::cluster::Pod::stop_serving);
    let log = File::create(Path::new(FOLDER).join("servers.log"))?;
    // The process runs in node2's namespace, where `remove` finds it; its sockets are in the namespaces of the pods.
    let mut servers = cluster.node2.command(current_exe().context("finding this program")?);
    servers.args(["demo", "--serve"]).process_group(0);
    servers.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    cleanup::Cleanup::spawn(&mut servers).context("starting the pods' servers")?.1.disarm();
    let serving = || {
        cluster.pods.iter().all(|pod| ask_http(&cluster.client, pod.http(CLIENT[0])).is_ok()).then_some(())
    };
    wait_for(SERVERS_LIMIT, serving).with_context(|| format!("see {FOLDER}/servers.log"))?;
    cleanup::keep_everything();
    print_tour();
    Ok(())
}

fn print_tour() {
    let client = format!("nsenter --net=/run/netns/{PREFIX}-client");
    let lb_agent = format!("nsenter --net=/run/netns/{PREFIX}-node1 {}", agent::binary().display());
    let bpffs = format!("--bpffs {FOLDER}/bpffs1");
    eprintln!(
        "
The namespaces {PREFIX}-client, {PREFIX}-node1 (with the agent), {PREFIX}-node2 and {PREFIX}-pod1 to -pod4 stay.
Send requests as the client:
  {client} curl http://10.96.0.20/
  {client} curl 'http://[fd00:10:96::20]/'
  {client} curl -o /dev/null http://10.96.0.20/download/100000000/5000000
Show what the kernel holds:
  {lb_agent} service list {bpffs}
  {lb_agent} conntrack list {bpffs}
  {lb_agent} status {bpffs}
Edit the manifests; the agent applies every change:
  ls {FOLDER}/manifests
  tail -f {FOLDER}/agent1.log
Remove it:
  cargo xtask demo --remove"
    );
}

/// Runs the servers in the pods of a kept demo until it is killed.
pub(super) fn serve() -> Result<()> {
    let mut servers = Vec::new();
    for pod in PODS {
        servers.extend(serve_pod(&Netns::open(&format!("{PREFIX}-{pod}"))?, pod)?);
    }
    loop {
        thread::park();
    }
}

/// Removes a kept demo, or the remains of a killed one.
pub(super) fn remove() -> Result<()> {
    let names = fs::read_dir("/run/netns").into_iter().flatten().filter_map(Result::ok);
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names: Vec<String> = names.filter(|name| name.starts_with(&format!("{PREFIX}-"))).collect();
    let folder = Path::new(FOLDER);
    if names.is_empty() && !folder.exists() {
        bail!("no demo is running, and none has left anything to remove");
    }
    for name in &names {
        cleanup::remove_namespace_and_processes(name)?;
    }
    cleanup::remove_folder_and_mounts(folder)?;
    say(&format!("removed {} namespaces and {FOLDER}", names.len()));
    Ok(())
}
