//! The upstream servers, and which of them lead back to this server.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use hickory_proto::{
    op::Query as Question,
    rr::{Name, RecordType},
};
use tokio::{task::JoinSet, time::timeout};
use tracing::warn;

use crate::{
    lock,
    upstream::{Ask, exchange},
};

/// How long a probe may take to come back.
const PATIENCE: Duration = Duration::from_secs(2);

/// The upstream servers.
#[derive(Debug, Default)]
pub struct Servers {
    state: Mutex<State>,
    /// Queries that find forwarding loops, each with the server that it was sent to.
    probes: Mutex<Vec<Probe>>,
}

#[derive(Debug, Default)]
struct State {
    all: Arc<[SocketAddr]>,
    /// The upstream servers that have led a probe back to this server.
    loops: Vec<SocketAddr>,
    usable: Arc<[SocketAddr]>,
}

/// A question with a random name, for which no client asks. If it comes back, the upstream server that got it leads
/// back to this server.
#[derive(Debug)]
struct Probe {
    name: Name,
    server: SocketAddr,
    has_returned: bool,
}

impl Servers {
    /// Replaces the servers. Leaves out those among `own`, the addresses that this server listens at.
    pub fn set(&self, servers: &[SocketAddr], own: &[SocketAddr]) {
        let (ours, others): (Vec<_>, Vec<_>) = servers.iter().partition(|server| own.contains(server));
        for server in ours {
            warn!("the upstream DNS server {server} is this agent itself; it is not used");
        }
        let mut state = lock(&self.state);
        state.all = others.into();
        state.update();
    }

    /// The servers in use.
    pub fn usable(&self) -> Arc<[SocketAddr]> {
        Arc::clone(&lock(&self.state).usable)
    }

    /// Sends each upstream server a probe. The probe comes back only if that server forwards it to this server,
    /// directly or through other servers. Returns the upstream servers whose probe came back: they are not in use until
    /// the next call.
    pub async fn find_loops(&self) -> Vec<SocketAddr> {
        let all = Arc::clone(&lock(&self.state).all);
        let mut asked = JoinSet::new();
        for server in all.iter().copied() {
            let [one, other]: [u64; 2] = rand::random();
            let Ok(name) = Name::from_ascii(format!("{one:016x}.{other:016x}.")) else { continue };
            lock(&self.probes).push(Probe { name: name.clone(), server, has_returned: false });
            let question = Question::query(name, RecordType::HINFO);
            let ask = Ask { question, dnssec_ok: false, checking_disabled: false };
            // The answer does not matter, only whether the question comes back.
            asked.spawn(async move { drop(timeout(PATIENCE, exchange(server, &ask)).await) });
        }
        asked.join_all().await;
        let probes = std::mem::take(&mut *lock(&self.probes));
        let loops: Vec<_> =
            probes.iter().filter(|probe| probe.has_returned).map(|probe| probe.server).collect();
        let mut state = lock(&self.state);
        state.loops.clone_from(&loops);
        state.update();
        loops
    }

    /// Whether the question is one of the probes; if so, records that it has come back.
    pub(crate) fn is_probe(&self, question: &Question) -> bool {
        if question.query_type != RecordType::HINFO {
            return false;
        }
        let mut probes = lock(&self.probes);
        let probe = probes.iter_mut().find(|probe| probe.name == question.name);
        probe.map(|probe| probe.has_returned = true).is_some()
    }
}

impl State {
    fn update(&mut self) {
        self.usable = self.all.iter().filter(|server| !self.loops.contains(server)).copied().collect();
    }
}
