//! The agent as systemd runs it: what it reports to `NOTIFY_SOCKET`, with the capabilities of the packaged unit.

use std::{fs, io, os::unix::net::UnixDatagram, path::Path, time::Duration};

use lb_tests::{
    agent::{self, Agent},
    client::{ask_http, ask_http_by_first_syn},
    cluster::ClientLink,
    one_of_three,
    stopwatch::Stopwatch,
};

use crate::bed::{Bed, WEB, ask_briefly, http};

/// `WATCHDOG_USEC` of the tests: 2 s. The agent sends a heartbeat after half of that time, so every second.
const WATCHDOG: &str = "2000000";
const LIMIT: Duration = Duration::from_secs(30);

/// A supervisor that agents report to.
struct Supervisor {
    socket: UnixDatagram,
    address: String,
}

impl Supervisor {
    fn new(bed: &Bed) -> Self {
        let path = bed.cluster.folder().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self { socket, address: path.display().to_string() }
    }

    /// Starts node1's agent as a service of this supervisor, with the capabilities of the unit. Returns before the
    /// agent is ready.
    fn start(&self, bed: &Bed) -> Agent {
        let variables = [format!("NOTIFY_SOCKET={}", self.address), format!("WATCHDOG_USEC={WATCHDOG}")];
        let bounds = format!("--bounding-set=-all{}", capabilities());
        let starter = ["setpriv", "--no-new-privs", "--inh-caps=-all", &bounds, "env"].map(str::to_owned);
        let starter = [starter.to_vec(), variables.to_vec()].concat();
        Agent::spawn_by(&bed.cluster.node1, bed.cluster.agent_settings(1), &starter).unwrap()
    }

    /// The next message.
    fn next(&self) -> io::Result<String> {
        let mut buffer = [0; 4096];
        let length = self.socket.recv(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned())
    }
}

/// The capabilities that the packaged unit grants, as a list for setpriv.
pub(crate) fn capabilities() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd/lb-agent.service");
    let unit = fs::read_to_string(path).unwrap();
    let names = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let names: Vec<_> =
        names.split(' ').map(|name| name.strip_prefix("CAP_").unwrap().to_lowercase()).collect();
    names.iter().map(|name| format!(",+{name}")).collect()
}

/// A cluster without a running agent, with a mounted bpffs, as systemd mounts it.
fn bed() -> Bed {
    let bed = Bed::without_agent(ClientLink::Ethernet, &["pod2", "pod3"]);
    let bpffs = bed.cluster.bpffs(1);
    fs::create_dir_all(&bpffs).unwrap();
    let mut mount = std::process::Command::new("mount");
    agent::run(mount.args(["-t", "bpf", "-o", "mode=0700", "none"]).arg(&bpffs)).unwrap();
    bed
}

#[test]
fn agent_is_ready_once_its_services_answer_and_says_when_it_stops() {
    let bed = bed();
    let client = bed.cluster.client.clone();
    assert!(WEB.iter().all(|&vip| ask_briefly(&client, vip).is_none()), "no agent runs yet");
    let supervisor = Supervisor::new(&bed);
    let agent = supervisor.start(&bed);
    assert_eq!(supervisor.next().unwrap(), "READY=1");
    // Each client makes one attempt, and the external client sends one SYN: an agent that reports too early fails here.
    for vip in WEB {
        ask_http_by_first_syn(&client, http(vip)).unwrap();
        ask_http(bed.netns("pod1"), http(vip)).unwrap();
        ask_http(&bed.cluster.node1, http(vip)).unwrap();
    }
    assert!(agent::is_healthy(&bed.cluster.node1).unwrap());

    // systemd kills an agent that sends no heartbeat for `WATCHDOG_USEC`, which is 2 s in this test. So three
    // heartbeats may take 6 s at most.
    let three_heartbeats = || {
        let stopwatch = Stopwatch::start();
        for _ in 0..3 {
            assert_eq!(supervisor.next().unwrap(), "WATCHDOG=1");
        }
        stopwatch.elapsed()
    };
    one_of_three(three_heartbeats, |took| *took < Duration::from_secs(6));

    assert!(agent.terminate().unwrap().success());
    let stopping = loop {
        match supervisor.next().unwrap().as_str() {
            "WATCHDOG=1" => {}
            other => break other.to_owned(),
        }
    };
    assert_eq!(stopping, "STOPPING=1");
    supervisor.socket.set_nonblocking(true).unwrap();
    assert_eq!(supervisor.next().unwrap_err().kind(), io::ErrorKind::WouldBlock, "nothing follows");
    // The data plane stays.
    ask_http_by_first_syn(&client, http(WEB[0])).unwrap();
}
