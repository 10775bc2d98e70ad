//! The scenes of the demo.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use lb_tests::agent::Agent;
use lb_tests::client::{Answer, Connection, ask_http, ask_udp};
use lb_tests::cluster::{Cluster, HTTP_PORT};
use lb_tests::manifests::{Port, Service};
use lb_tests::netns::Netns;
use lb_tests::{wait_for, within};

use super::report::{Report, Traffic, say};

/// Number of requests that a client sends to a virtual address in a scene.
const REQUESTS: u32 = 100;

/// Size of a UDP request in bytes, in the range of DNS queries. The answer is a first line and the request, together
/// less than 512 bytes.
const QUESTION: usize = 400;

/// Size of the long download in bytes. The client reads slowly, so that the download still runs when its backend has
/// been removed.
const DOWNLOAD: u64 = 200_000_000;

/// Time limit for a download to start, and for the agent to apply an edit of a manifest.
const PROMPTLY: Duration = Duration::from_secs(1);

const WEB_PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];

/// Virtual addresses that the manifests request. The agent allocates the address of `my-service`.
const WEB: [&str; 2] = ["10.96.0.20:80", "[fd00:10:96::20]:80"];
const DNS: [&str; 2] = ["10.96.0.10:53", "[fd00:10:96::10]:53"];
const EMPTY: [&str; 2] = ["10.96.0.30", "fd00:10:96::30"];

/// Writes the first manifests of the demo.
pub(super) fn write_manifests(cluster: &Cluster) -> Result<()> {
    let files = [
        ("my-service", include_str!("manifests/my-service.yaml")),
        ("dns", include_str!("manifests/dns.yaml")),
        ("empty", include_str!("manifests/empty.yaml")),
    ];
    for (name, yaml) in files {
        cluster.manifests.write(name, yaml)?;
    }
    write_web(cluster, &WEB_PODS)
}

/// Writes the dual-stack Service `web` with these pods.
fn write_web(cluster: &Cluster, pods: &[&str]) -> Result<()> {
    let addresses = WEB.map(str::parse::<SocketAddr>);
    let endpoint = |name: &&str| Some(cluster.pod(name)?.endpoint());
    let web = Service {
        name: "web".to_owned(),
        cluster_ips: addresses
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?
            .iter()
            .map(SocketAddr::ip)
            .collect(),
        ports: vec![Port {
            name: "http",
            protocol: "TCP",
            port: 80,
            target_port: HTTP_PORT,
            node_port: None,
        }],
        endpoints: pods.iter().filter_map(endpoint).collect(),
        ..Service::default()
    };
    Ok(cluster.manifests.put(&web)?)
}

/// Plays all scenes; returns the results, and the agent that replaced `agent`.
pub(super) fn play(cluster: &Cluster, agent: Agent) -> Result<(Report, Agent)> {
    let mut report = Report::default();
    balance(cluster, &agent, &mut report)?;
    reject(cluster, &mut report)?;
    let agent = remove_a_backend_under_a_download(cluster, agent, &mut report)?;
    Ok((report, agent))
}

/// The requests of one client to one virtual address.
struct Scene<'a> {
    service: &'a str,
    to: SocketAddr,
    protocol: &'static str,
    client: &'a str,
    pods: &'a [&'a str],
}

/// Sends HTTP or UDP requests to every virtual address that has pods.
fn balance(cluster: &Cluster, agent: &Agent, report: &mut Report) -> Result<()> {
    let my_service = SocketAddr::new(allocated_address(agent, "my-service")?, 80);
    let mut scenes = vec![Scene {
        service: "default/my-service",
        to: my_service,
        protocol: "TCP",
        client: "client",
        pods: &["pod1", "pod3"],
    }];
    for to in WEB {
        scenes.push(Scene {
            service: "default/web",
            to: to.parse()?,
            protocol: "TCP",
            client: "client",
            pods: &WEB_PODS,
        });
    }
    for to in DNS {
        let pods = &["pod2", "pod3", "pod4"];
        scenes.push(Scene {
            service: "kube-system/dns",
            to: to.parse()?,
            protocol: "UDP",
            client: "client",
            pods,
        });
    }
    // pod1 is also a backend of `web`.
    for to in WEB {
        scenes.push(Scene {
            service: "default/web",
            to: to.parse()?,
            protocol: "TCP",
            client: "pod1",
            pods: &WEB_PODS,
        });
    }
    for scene in scenes {
        say(&format!("{REQUESTS} requests from {} to {} ({})", scene.client, scene.to, scene.protocol));
        report.traffic.push(scene.ask(cluster)?);
    }
    judge_traffic(report);
    Ok(())
}

fn netns<'a>(cluster: &'a Cluster, name: &str) -> Result<&'a Netns> {
    if name == "client" {
        return Ok(&cluster.client);
    }
    Ok(&cluster.pod(name).with_context(|| format!("there is no {name}"))?.netns)
}

impl Scene<'_> {
    fn ask(&self, cluster: &Cluster) -> Result<Traffic> {
        let from = netns(cluster, self.client)?;
        let mut traffic = Traffic {
            service: self.service.to_owned(),
            address: self.to,
            protocol: self.protocol,
            client: self.client.to_owned(),
            requests: REQUESTS,
            answers: self.pods.iter().map(|pod| ((*pod).to_owned(), 0)).collect(),
            failures: BTreeMap::new(),
            address_changed: 0,
        };
        for _ in 0..REQUESTS {
            let answer = if self.protocol == "UDP" {
                ask_udp(from, self.to, QUESTION)
            } else {
                ask_http(from, self.to)
            };
            match answer {
                Ok(answer) => traffic.count(&answer),
                Err(error) => *traffic.failures.entry(error.to_string()).or_default() += 1,
            }
        }
        Ok(traffic)
    }
}

impl Traffic {
    fn count(&mut self, answer: &Answer) {
        *self.answers.entry(answer.server.clone()).or_default() += 1;
        // A pod that reaches itself gets requests with another source address than its own: otherwise its answers would
        // never leave the pod. (The port may also differ: the programs replace it if the client has just used it for
        // the same backend through another Service.)
        if answer.server != self.client && answer.seen.ip() != answer.local.ip() {
            self.address_changed += 1;
        }
    }

    fn answered(&self) -> u32 {
        self.answers.values().sum()
    }

    /// Whether each pod has its share, within six standard deviations: less than one false alarm in 10⁶ runs.
    fn is_even(&self) -> bool {
        let (requests, share) = (f64::from(self.requests), 1.0 / self.answers.len() as f64);
        let tolerance = 6.0 * (requests * share * (1.0 - share)).sqrt();
        let evenly =
            |answers: &u32| *answers > 0 && (f64::from(*answers) - requests * share).abs() <= tolerance;
        self.answers.values().all(evenly)
    }
}

fn judge_traffic(report: &mut Report) {
    let asked: u32 = report.traffic.iter().map(|traffic| traffic.requests).sum();
    let answered: u32 = report.traffic.iter().map(Traffic::answered).sum();
    let failures: Vec<String> = report
        .traffic
        .iter()
        .flat_map(|traffic| {
            traffic.failures.iter().map(|(why, times)| format!("{}: {times} × {why}", traffic.address))
        })
        .collect();
    let seen = if failures.is_empty() { format!("{answered} of {asked}") } else { failures.join(", ") };
    report.check(
        "every request through a virtual address is answered, TCP and UDP, IPv4 and IPv6",
        answered == asked,
        seen,
    );

    let uneven: Vec<String> = report
        .traffic
        .iter()
        .filter(|traffic| !traffic.is_even())
        .map(|traffic| traffic.address.to_string())
        .collect();
    let seen =
        if uneven.is_empty() { "see the table".to_owned() } else { format!("not at {}", uneven.join(", ")) };
    report.check("every backend gets its share", uneven.is_empty(), seen);

    let changed: u32 = report.traffic.iter().map(|traffic| traffic.address_changed).sum();
    report.check(
        "backends see the client's own address",
        changed == 0,
        format!("{changed} of {answered} saw another"),
    );

    let itself: u32 = report.traffic.iter().filter_map(|traffic| traffic.answers.get(&traffic.client)).sum();
    report.check(
        "a pod reaches itself through its own service",
        itself > 0,
        format!("pod1 did {itself} times"),
    );
}

/// The address that the agent allocated to a Service of the namespace `default`.
fn allocated_address(agent: &Agent, service: &str) -> Result<IpAddr> {
    let output = agent.ask(&["service", "list", "-o", "json"])?;
    let list: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("reading `lb-agent service list -o json`")?;
    let mut entries = list.as_array().into_iter().flatten();
    let entry = entries
        .find(|entry| entry["namespace"] == "default" && entry["name"] == service)
        .with_context(|| format!("`lb-agent service list` has no default/{service}: {list}"))?;
    let address = entry["frontends"][0]["address"].as_str();
    address.with_context(|| format!("no frontend in {entry}"))?.parse().with_context(|| format!("in {entry}"))
}

/// Sends requests to a Service without endpoints.
fn reject(cluster: &Cluster, report: &mut Report) -> Result<()> {
    say("sending requests to a Service without endpoints");
    let mut slowest = Duration::ZERO;
    let mut wrong = Vec::new();
    for address in EMPTY {
        let address: IpAddr = address.parse()?;
        for (protocol, port) in [("TCP", 80), ("UDP", 53)] {
            let to = SocketAddr::new(address, port);
            let start = Instant::now();
            let result = if protocol == "TCP" {
                ask_http(&cluster.client, to)
            } else {
                ask_udp(&cluster.client, to, 1)
            };
            slowest = slowest.max(start.elapsed());
            if let Some(why) = not_refused(result) {
                wrong.push(format!("{to}/{protocol}: {why}"));
            }
        }
    }
    let kept = wrong.is_empty() && slowest < Duration::from_secs(1);
    let seen =
        if kept { format!("after {:.1} ms at most", slowest.as_secs_f64() * 1e3) } else { wrong.join(", ") };
    report.check("a service without endpoints refuses at once", kept, seen);
    Ok(())
}

fn not_refused(result: io::Result<Answer>) -> Option<String> {
    match result {
        Ok(answer) => Some(format!("{} answered", answer.server)),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => None,
        Err(error) => Some(error.to_string()),
    }
}

/// Removes the backend of a running download, then kills and restarts the agent.
fn remove_a_backend_under_a_download(cluster: &Cluster, agent: Agent, report: &mut Report) -> Result<Agent> {
    let web: SocketAddr = WEB[0].parse()?;
    let mut connection = Connection::open(&cluster.client, web).context("connecting to web")?;
    let server = connection.ask()?.server;
    say(&format!(
        "downloading {} MB from {server}, and removing {server} from the Service meanwhile",
        DOWNLOAD / 1_000_000
    ));
    let transfer = connection.download_slowly(DOWNLOAD);
    if wait_for(PROMPTLY, || (transfer.received() > 0).then_some(())).is_none() {
        bail!("the download from {server} does not start");
    }
    remove_backend(cluster, web, &server, report)?;
    let agent = restart_agent(cluster, web, agent, report)?;

    let (at, running) = (transfer.received(), !transfer.is_finished());
    say("waiting for the end of the download");
    let result = transfer.join();
    let kept = running && result.as_ref().is_ok_and(|name| *name == server);
    let seen = match result {
        Ok(_) if !running => "the download ended too early".to_owned(),
        Ok(name) => format!("it was at {at} bytes; all {DOWNLOAD} came from {name} and are correct"),
        Err(error) => error.to_string(),
    };
    report.check("the running download survives both", kept, seen);
    Ok(agent)
}

/// Removes a backend from `web`: new connections must avoid it within [`PROMPTLY`].
fn remove_backend(cluster: &Cluster, web: SocketAddr, server: &str, report: &mut Report) -> Result<()> {
    let others: Vec<&str> = WEB_PODS.into_iter().filter(|pod| *pod != server).collect();
    let start = Instant::now();
    write_web(cluster, &others)?;
    // The removed pod would get about a quarter of these connections.
    let avoided =
        within(PROMPTLY, || (!answers(cluster, web, 60).contains_key(server)).then(|| start.elapsed()));
    let after = answers(cluster, web, REQUESTS);
    let others_answer: u32 = after.iter().filter(|(pod, _)| *pod != server).map(|(_, count)| count).sum();
    let soon =
        avoided.map_or("never".to_owned(), |after| format!("after {:.0} ms", after.as_secs_f64() * 1e3));
    report.check(
        "new connections avoid a backend that was removed",
        avoided.is_some() && others_answer == REQUESTS,
        format!("{soon}; then {others_answer} of {REQUESTS} to the others"),
    );
    Ok(())
}

/// Kills the agent, sends requests without it, and starts it again.
fn restart_agent(cluster: &Cluster, web: SocketAddr, agent: Agent, report: &mut Report) -> Result<Agent> {
    say("killing the agent (kill -9) and restarting it");
    agent.kill()?;
    let without: u32 = answers(cluster, web, REQUESTS).values().sum();
    report.check(
        "the data plane works without the agent",
        without == REQUESTS,
        format!("{without} of {REQUESTS} answered"),
    );
    cluster.start_agent(1)
}

/// Answers by pod to this number of new connections. Failures are not counted.
fn answers(cluster: &Cluster, to: SocketAddr, requests: u32) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for answer in (0..requests).filter_map(|_| ask_http(&cluster.client, to).ok()) {
        *counts.entry(answer.server).or_default() += 1;
    }
    counts
}
