//! The servers under test, each a process in a namespace.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use lb_tests::{
    agent::{self, Agent, Settings, run},
    bench::Resident,
    cleanup::Cleanup,
    manifests::Manifests,
    netns::Netns,
    wait_for,
};

use crate::workload::{Kind, Workload, ZONE};

/// Address of the agent's DNS server.
pub(crate) const AGENT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);
/// Address of unbound.
pub(crate) const UNBOUND: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 5353);
/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause before a server's memory is read.
const SETTLE: Duration = Duration::from_secs(2);

/// Arguments that enable the agent's DNS server. Nothing answers at the upstream server's address.
const WITH_DNS: [&str; 4] = ["--dns-bind-address", "127.0.0.1", "--dns-upstream", "127.0.0.9"];

/// Starts the agent with the Services, with or without its DNS server.
pub(crate) fn start_agent(netns: &Netns, folder: &Path, workload: Workload, has_dns: bool) -> Result<Agent> {
    fs::create_dir_all(folder)?;
    let manifests = Manifests::create(folder.join("manifests"))?;
    for (name, text) in workload.manifests() {
        manifests.write(&name, &text)?;
    }
    let arguments = if has_dns { &WITH_DNS[..] } else { &[] };
    let settings = Settings {
        node_name: "bench".to_owned(),
        manifests: manifests.folder().to_owned(),
        bpffs: folder.join("bpffs"),
        cgroup: None,
        log: folder.join("log"),
        arguments: arguments.iter().map(ToString::to_string).collect(),
        binary: Some(agent::binary()),
    };
    let agent = Agent::start(netns, settings)?;
    if has_dns {
        wait_until_answers(netns, AGENT, workload)
            .with_context(|| format!("log of the agent:\n{}", agent.log()))?;
    }
    Ok(agent)
}

/// A running unbound, which is killed when this is dropped.
pub(crate) struct Unbound {
    child: Child,
    _cleanup: Cleanup,
}

impl Unbound {
    /// Starts unbound with the names of the Services as a zone that it serves itself.
    pub(crate) fn start(netns: &Netns, folder: &Path, workload: Workload) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let (zone, conf) = (folder.join("zone"), folder.join("unbound.conf"));
        fs::write(&zone, workload.zone_file())?;
        fs::write(&conf, configuration(&zone))?;
        let log = folder.join("unbound.log");
        let file = fs::File::create(&log)?;
        let mut command = netns.command("unbound");
        command.arg("-d").arg("-c").arg(&conf).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let (child, cleanup) = Cleanup::spawn(&mut command).context("starting unbound")?;
        let unbound = Self { child, _cleanup: cleanup };
        wait_until_answers(netns, UNBOUND, workload)
            .with_context(|| format!("unbound: {}", fs::read_to_string(&log).unwrap_or_default()))?;
        Ok(unbound)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Unbound {
    fn drop(&mut self) {
        // Ignores errors: unbound may have ended already.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The configuration of unbound. It sets one thread, because the agent also processes the queries to one address
/// sequentially.
fn configuration(zone: &Path) -> String {
    let (ip, port) = (UNBOUND.ip(), UNBOUND.port());
    let zone = zone.display();
    format!(
        "server:\n interface: {ip}@{port}\n num-threads: 1\n do-daemonize: no\n use-syslog: no\n logfile: \"\"\n pidfile: \
         \"\"\n username: \"\"\n chroot: \"\"\n so-rcvbuf: 4m\n access-control: 127.0.0.0/8 allow\n module-config: \
         \"iterator\"\n\nauth-zone:\n name: \"{ZONE}\"\n zonefile: \"{zone}\"\n for-downstream: yes\n for-upstream: \
         no\n\nremote-control:\n control-enable: no\n"
    )
}

/// Waits until the server answers for the last Service.
fn wait_until_answers(netns: &Netns, server: SocketAddr, workload: Workload) -> Result<()> {
    let kind = if workload.services % 2 == 1 { Kind::ClusterIp } else { Kind::Headless };
    let name = kind.name(workload.services - 1);
    let answers = || dig(netns, server, &name, kind.record()).is_ok_and(|lines| !lines.is_empty());
    match wait_for(PATIENCE, || answers().then_some(())) {
        Some(()) => Ok(()),
        None => bail!("{server} does not answer for {name}"),
    }
}

/// The data of the answer's records, sorted.
pub(crate) fn dig(netns: &Netns, server: SocketAddr, name: &str, record: &str) -> Result<Vec<String>> {
    let (at, port) = (format!("@{}", server.ip()), server.port().to_string());
    let mut command: Command = netns.command("dig");
    command.args(["+short", "+tries=1", "+time=1", &at, "-p", &port, name, record]);
    let text = String::from_utf8(run(&mut command)?.stdout)?;
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    Ok(lines)
}

/// The resident memory of a process in bytes, read after a pause of [`SETTLE`].
pub(crate) fn settled_memory(pid: u32) -> Result<f64> {
    sleep(SETTLE);
    Ok(Resident::of(pid)?.now as f64)
}

/// Path of a folder for a server's files.
pub(crate) fn folder(parent: &Path, name: &str) -> PathBuf {
    parent.join(name)
}
