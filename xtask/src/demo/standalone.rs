//! `cargo xtask demo standalone`: one machine without Kubernetes. A name leads to a Service with two nginx containers,
//! one of which fails its health check.
//!
//! ```text
//!  client ─── machine: lb-agent, DNS ─┬─ one: nginx
//!  192.168.7.2  192.168.7.1           └─ two: nginx, whose /healthz fails
//! ```

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};
use lb_tests::{
    agent::{Agent, Settings},
    cleanup::{self, Cleanup, Resource},
    daemon::Daemon,
    http,
    netns::Netns,
    wait_for,
};
use serde_json::Value;

use super::{
    ensure_not_up,
    report::{Report, Traffic, say},
    show,
};

const PREFIX: &str = "lb-alone";
const FOLDER: &str = "/run/lb-alone";
const CLIENT: &str = "192.168.7.2";
const MACHINE: &str = "192.168.7.1";
/// The name of each container, its address, and the machine's address towards it.
const CONTAINERS: [(&str, &str, &str); 2] =
    [("one", "10.88.1.2", "10.88.1.1"), ("two", "10.88.2.2", "10.88.2.1")];
const NAME: &str = "web.default.svc.cluster.local";
const REQUESTS: u32 = 20;
const PATIENCE: Duration = Duration::from_secs(30);

const SERVICE: &str = include_str!("manifests/standalone.yaml");

/// Arguments of `demo standalone`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print the results to standard output as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the demo; fails if one of its checks fails.
pub(super) fn run(args: &Args) -> Result<()> {
    ensure_not_up(PREFIX, FOLDER)?;
    cleanup::on_interrupt();
    say("creating namespaces for a client, a machine and two containers");
    let _folder = Cleanup::of(Resource::Folder(FOLDER.into()));
    let manifests = Path::new(FOLDER).join("services");
    fs::create_dir_all(&manifests)?;
    let machine = Machine::create()?;
    say("starting nginx in both containers");
    let _servers = machine.start_servers()?;
    fs::write(manifests.join("web.yaml"), SERVICE)?;
    say("starting lb-agent on the machine, with its DNS server");
    let agent = machine.start_agent(&manifests)?;
    let report = play(&machine, &agent).with_context(|| format!("the agent has logged:\n{}", agent.log()))?;
    say("removing everything");
    drop(agent);
    show(&report, args.json)?;
    report.verdict()
}

/// The client, the machine and its containers.
struct Machine {
    client: Netns,
    host: Netns,
    containers: Vec<Netns>,
}

impl Machine {
    fn create() -> Result<Self> {
        let namespace = |name: &str| Netns::create(&format!("{PREFIX}-{name}"));
        let (client, host) = (namespace("client")?, namespace("host")?);
        connect(&host, "client", &client, (MACHINE, CLIENT))?;
        client.ip(&format!("route add default via {MACHINE}\n"))?;
        let mut containers = Vec::new();
        for (name, address, gateway) in CONTAINERS {
            let container = namespace(name)?;
            connect(&host, name, &container, (gateway, address))?;
            container.ip(&format!("route add default via {gateway}\n"))?;
            containers.push(container);
        }
        host.sysctl("ipv4/ip_forward", "1")?;
        Ok(Self { client, host, containers })
    }

    /// Starts nginx in each container. Each nginx expects a PROXY protocol header and logs the address in it. The nginx
    /// in the second container fails its health check.
    fn start_servers(&self) -> Result<Vec<Daemon>> {
        let answers = ["200 ok", "503 'the database is away'"];
        let servers = self.containers.iter().zip(CONTAINERS).zip(answers);
        servers.map(|((container, (name, ..)), health)| serve(container, name, health)).collect()
    }

    fn start_agent(&self, manifests: &Path) -> Result<Agent> {
        let folder = Path::new(FOLDER);
        let arguments = ["--cluster-cidr", "10.88.0.0/16", "--detect-local-mode", "ClusterCIDR"];
        let dns = ["--dns-bind-address", MACHINE];
        Agent::start(
            &self.host,
            Settings {
                node_name: "machine".to_owned(),
                manifests: manifests.to_owned(),
                bpffs: folder.join("bpffs"),
                cgroup: None,
                log: folder.join("agent.log"),
                arguments: arguments.into_iter().chain(dns).map(str::to_owned).collect(),
                binary: None,
            },
        )
    }
}

fn serve(container: &Netns, name: &str, health: &str) -> Result<Daemon> {
    let config = format!(
        "daemon off; master_process off; pid {FOLDER}/{name}.pid; error_log {FOLDER}/{name}.error; events {{}}\n\
         http {{ log_format proxy '$realip_remote_addr says $proxy_protocol_addr: $request';\n\
         server {{ listen 8080 proxy_protocol; access_log off;\n\
         location = /healthz {{ return {health}; }}\n\
         location / {{ access_log {FOLDER}/{name}.log proxy; return 200 '{name}'; }} }} }}\n",
    );
    let path = format!("{FOLDER}/{name}.conf");
    fs::write(&path, config)?;
    let mut nginx = container.command("nginx");
    nginx.args(["-c", &path, "-p", FOLDER, "-e", &format!("{FOLDER}/{name}.error")]);
    Daemon::start(&mut nginx)
}

/// Connects the machine to another namespace, whose device is `eth0`. `addresses` are those of the machine and of that
/// device.
fn connect(host: &Netns, name: &str, other: &Netns, addresses: (&str, &str)) -> Result<()> {
    let (here, there) = addresses;
    host.ip(&format!(
        "link add {name} type veth peer name eth0 netns {}\nlink set {name} up\naddress add {here}/24 dev {name}\n",
        other.name()
    ))?;
    other.ip(&format!("link set eth0 up\naddress add {there}/24 dev eth0\n"))
}

fn play(machine: &Machine, agent: &Agent) -> Result<Report> {
    let mut report = Report::default();
    let names = resolve(machine)?;
    let address: IpAddr = names.first().context("the name has no address")?.parse()?;
    report.check(
        &format!("the client finds the Service as {NAME}"),
        names.len() == 1,
        format!("{} from the agent's DNS server", names.join(", ")),
    );
    say("waiting for the health check to find the container that is sick");
    let sick = wait_for(PATIENCE, || sick(agent).ok().flatten()).context("no container fails its check")?;
    let expected = CONTAINERS[1].1;
    report.check(
        "the container that is sick is named, with its reason",
        sick.0 == expected,
        format!("{}: {}", sick.0, sick.1),
    );
    say(&format!("sending {REQUESTS} requests"));
    let vip = SocketAddr::new(address, 80);
    let traffic = requests(machine, vip);
    let healthy = traffic.answers.get("one").copied().unwrap_or(0);
    report.check(
        "every request is answered by the healthy container",
        healthy == REQUESTS,
        format!("{healthy} of {REQUESTS}"),
    );
    let log = fs::read_to_string(format!("{FOLDER}/one.log")).context("reading nginx's log")?;
    let expected = format!("says {CLIENT}: GET / HTTP/1.1");
    let lines = log.lines().filter(|line| line.ends_with(&expected)).count();
    report.check(
        "nginx's log has the client's address, from the PROXY protocol header",
        lines == REQUESTS as usize,
        format!("{:?}", log.lines().next().unwrap_or_default()),
    );
    report.traffic.push(traffic);
    Ok(report)
}

/// The addresses that the client gets for the name, with `dig`.
fn resolve(machine: &Machine) -> Result<Vec<String>> {
    let mut dig = machine.client.command("dig");
    dig.args(["+short", "+tries=1", "+time=3", &format!("@{MACHINE}"), NAME, "A"]);
    let answers = || {
        let output = dig.output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let lines: Vec<String> =
            text.lines().filter(|line| !line.starts_with(';')).map(str::to_owned).collect();
        (!lines.is_empty()).then_some(lines)
    };
    wait_for(PATIENCE, answers).with_context(|| format!("dig {NAME} @{MACHINE} finds no address"))
}

/// The address of a container that the agent considers unhealthy, and the reason.
fn sick(agent: &Agent) -> Result<Option<(String, String)>> {
    let shown = agent.ask(&["service", "show", "web", "-o", "json"])?;
    let shown: Value = serde_json::from_slice(&shown.stdout)?;
    let failing = shown[0]["healthCheck"]["failing"].as_array().into_iter().flatten();
    let text = |endpoint: &Value, field: &str| endpoint[field].as_str().unwrap_or_default().to_owned();
    let mut unhealthy = failing.filter(|endpoint| endpoint["verdict"] == "unhealthy");
    Ok(unhealthy.next().map(|endpoint| (text(endpoint, "address"), text(endpoint, "reason"))))
}

fn requests(machine: &Machine, vip: SocketAddr) -> Traffic {
    let mut traffic = Traffic {
        service: "default/web".to_owned(),
        address: vip,
        protocol: "TCP",
        client: "client".to_owned(),
        requests: REQUESTS,
        answers: CONTAINERS.iter().map(|(name, ..)| ((*name).to_owned(), 0)).collect(),
        failures: BTreeMap::new(),
        address_changed: 0,
    };
    for _ in 0..REQUESTS {
        match http::get(&machine.client, vip, "/") {
            Ok(answer) => *traffic.answers.entry(answer.body).or_default() += 1,
            Err(error) => *traffic.failures.entry(error.to_string()).or_default() += 1,
        }
    }
    traffic
}
