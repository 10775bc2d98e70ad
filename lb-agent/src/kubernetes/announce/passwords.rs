//! The passwords of BGP sessions, from the Secrets that BGPPeers name.
//!
//! The agent reads each of these Secrets by its name. It needs no permission to read other Secrets.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, str,
    time::Duration,
};

use futures_util::future::join_all;
use k8s_openapi::api::core::v1 as core;
use kube::{Api, Client};
use lb_core::{announce::bgp::Peer, model::ObjectName};
use tokio::time::{Instant, timeout};
use tracing::warn;

/// Interval at which a Secret is read again.
const REREAD: Duration = Duration::from_secs(60);
/// Pause before the next attempt to read a Secret that could not be read.
const RETRY: Duration = Duration::from_secs(10);
/// Longest pause between attempts to read a Secret that the API server forbids the agent to read. Each pause is twice
/// as long as the last one, beginning with [`RETRY`].
const LONGEST_RETRY: Duration = Duration::from_secs(600);
/// Time limit of a request.
const REQUEST: Duration = Duration::from_secs(3);
/// The key of the password in a Secret of the type `kubernetes.io/basic-auth`.
const PASSWORD: &str = "password";

/// The Secrets that peers name, as they were last read.
pub(super) struct Passwords {
    client: Client,
    secrets: BTreeMap<ObjectName, Found>,
}

/// A Secret after the last attempt to read it: its password, and when to read the Secret again.
struct Found {
    /// The last password that the Secret had; `None` if it was never read.
    password: Option<String>,
    /// Why the last attempt failed.
    error: Option<ReadError>,
    /// The pause until the next attempt.
    pause: Duration,
    /// When to read the Secret again.
    due: Instant,
}

/// Why a Secret could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ReadError {
    /// The API server forbids it (403).
    Forbidden(String),
    Other(String),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Forbidden(why) | Self::Other(why)) = self;
        f.write_str(why)
    }
}

impl From<kube::Error> for ReadError {
    fn from(error: kube::Error) -> Self {
        let is_forbidden = matches!(&error, kube::Error::Api(status) if status.code == 403);
        let why = error.to_string();
        if is_forbidden { Self::Forbidden(why) } else { Self::Other(why) }
    }
}

impl Passwords {
    pub(super) const fn new(client: Client) -> Self {
        Self { client, secrets: BTreeMap::new() }
    }

    /// When the next Secret is to be read again; `None` if no peer names a Secret.
    pub(super) fn due(&self) -> Option<Instant> {
        self.secrets.values().map(|found| found.due).min()
    }

    /// Reads the Secrets that these peers name: a new Secret at once, a known one if it is due. Removes the Secrets
    /// that no peer names any more.
    pub(super) async fn read(&mut self, peers: &BTreeMap<ObjectName, Peer>) {
        let named: BTreeSet<&ObjectName> =
            peers.values().filter_map(|peer| peer.password_secret.as_ref()).collect();
        self.secrets.retain(|secret, _| named.contains(secret));
        let now = Instant::now();
        let is_due = |secret: &&ObjectName| self.secrets.get(secret).is_none_or(|found| found.due <= now);
        let due: Vec<&ObjectName> = named.into_iter().filter(is_due).collect();
        // Sends all requests at once, so that an API server that does not answer delays the caller only by the time
        // limit of one request.
        let reads = join_all(due.iter().map(|secret| self.request(secret))).await;
        due.into_iter().zip(reads).for_each(|(secret, read)| self.note(secret, read));
    }

    async fn request(&self, secret: &ObjectName) -> Result<String, ReadError> {
        let api: Api<core::Secret> = Api::namespaced(self.client.clone(), &secret.namespace);
        let Ok(read) = timeout(REQUEST, api.get(&secret.name)).await else {
            return Err(ReadError::Other("the API server does not answer".to_owned()));
        };
        password(&read?).map_err(ReadError::Other)
    }

    /// Records the result of a request. A Secret that cannot be read keeps its last password.
    fn note(&mut self, secret: &ObjectName, read: Result<String, ReadError>) {
        let known = self.secrets.remove(secret);
        let (last_password, last_error, last_pause) =
            known.map_or((None, None, REREAD), |known| (known.password, known.error, known.pause));
        let (password, error) = match read {
            Ok(password) => (Some(password), None),
            Err(error) => {
                if last_error.as_ref() != Some(&error) {
                    warn!("cannot read the Secret {secret}: {error}");
                }
                (last_password, Some(error))
            }
        };
        let pause = match (&error, last_error) {
            (None, _) => REREAD,
            (Some(ReadError::Forbidden(_)), Some(ReadError::Forbidden(_))) => {
                LONGEST_RETRY.min(last_pause * 2)
            }
            (Some(_), _) => RETRY,
        };
        self.secrets.insert(secret.clone(), Found { password, error, pause, due: Instant::now() + pause });
    }

    /// Gives the peers their passwords, as far as these are known and valid. Returns a sentence for each peer whose
    /// Secret could not be read or has an invalid password, and one sentence for all Secrets that the API server
    /// forbids the agent to read.
    pub(super) fn fill(&self, peers: &mut BTreeMap<ObjectName, Peer>) -> Vec<String> {
        let (mut problems, mut forbidden) = (Vec::new(), BTreeSet::new());
        for (name, peer) in peers {
            let Some(secret) = peer.password_secret.clone() else { continue };
            let Some(Found { password, error, .. }) = self.secrets.get(&secret) else { continue };
            let taken = password.as_ref().map(|password| peer.set_password(password));
            if matches!(error, Some(ReadError::Forbidden(_))) && !matches!(taken, Some(Err(_))) {
                forbidden.insert(secret.to_string());
                continue;
            }
            let unknown = "so a session with that router stays as it is, and a new one does not begin";
            let (effect, why) = match (taken, error) {
                (Some(Ok(())), None) => continue,
                (Some(Ok(())), Some(error)) => ("so its last password stays in use", error.to_string()),
                (Some(Err(why)), _) => (unknown, format!("its password is invalid: {why}")),
                (None, error) => (unknown, error.as_ref().map(ToString::to_string).unwrap_or_default()),
            };
            problems
                .push(format!("the Secret {secret} of the BGPPeer {name} cannot be used, {effect}: {why}"));
        }
        problems.extend((!forbidden.is_empty()).then(|| forbidden_text(&forbidden)));
        problems
    }
}

/// The password in a Secret.
fn password(secret: &core::Secret) -> Result<String, String> {
    let data = secret.data.as_ref().and_then(|data| data.get(PASSWORD));
    let password = data.ok_or_else(|| format!("it has no key `{PASSWORD}`"))?;
    let text = str::from_utf8(&password.0).ok().ok_or("its password is no UTF-8 text")?;
    Ok(text.to_owned())
}

fn forbidden_text(secrets: &BTreeSet<String>) -> String {
    let secrets = secrets.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    format!(
        "the API server forbids the agent to read Secrets that BGPPeers name ({secrets}), so their last passwords stay in use, \
         and sessions without one do not begin: allow the agent's user to `get` these Secrets; with the chart, \
         `bgp.passwordSecrets` must list them. The agent tries again after {} minutes at most",
        LONGEST_RETRY.as_secs() / 60
    )
}

#[cfg(test)]
mod tests {
    use lb_core::api;
    use serde_json::json;
    use tokio::net::TcpListener;

    use super::*;

    fn peer(name: &str, secret: &str) -> (ObjectName, Peer) {
        let peer: api::BgpPeer = serde_json::from_value(json!({
            "metadata": {"namespace": "metallb-system", "name": name},
            "spec": {
                "myASN": 64500, "peerASN": 64501, "peerAddress": "192.0.2.250",
                "passwordSecret": {"name": secret},
            },
        }))
        .unwrap();
        (ObjectName::new("metallb-system", name), Peer::new(&peer).unwrap())
    }

    fn passwords() -> Passwords {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        Passwords::new(Client::try_from(config).unwrap())
    }

    #[tokio::test]
    async fn peer_gets_the_last_valid_password_of_its_secret() {
        let mut passwords = passwords();
        let secret = ObjectName::new("metallb-system", "key");
        let fill = |passwords: &Passwords| {
            let mut peers = BTreeMap::from([peer("tor", "key")]);
            let problems = passwords.fill(&mut peers);
            (peers.values().all(|peer| !peer.lacks_password()), problems.join(""))
        };
        assert_eq!(fill(&passwords), (false, String::new()), "not read yet");
        let refuse = |why: &str| Err(ReadError::Other(why.to_owned()));
        passwords.note(&secret, refuse("no key"));
        let (has_password, problem) = fill(&passwords);
        assert!(!has_password);
        assert!(problem.contains("metallb-system/key") && problem.contains("no key"), "{problem}");
        passwords.note(&secret, Ok("pass".to_owned()));
        assert_eq!(fill(&passwords), (true, String::new()));
        passwords.note(&secret, refuse("away"));
        let (has_password, problem) = fill(&passwords);
        assert!(has_password && problem.contains("last password stays in use: away"), "{problem}");
        passwords.note(&secret, Ok("two\nlines".to_owned()));
        let (has_password, problem) = fill(&passwords);
        assert!(!has_password && problem.contains("control characters"), "{problem}");
        assert!(!problem.contains("two"), "{problem}");
    }

    #[tokio::test]
    async fn secrets_are_requested_without_waiting_for_each_other() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = kube::Config::new(format!("http://{}", server.local_addr().unwrap()).parse().unwrap());
        let mut passwords = Passwords::new(Client::try_from(config).unwrap());
        let peers = BTreeMap::from([peer("one", "a"), peer("two", "b"), peer("three", "c")]);
        let mut connections = Vec::new();
        // The server answers nothing. If the requests were sent one after the other, the last one would begin only
        // after two time limits.
        let all_arrive = async {
            while connections.len() < peers.len() {
                connections.push(server.accept().await.unwrap());
            }
        };
        tokio::select! {
            () = all_arrive => {}
            () = passwords.read(&peers) => panic!("the first requests ended before the last one began"),
        }
    }

    #[tokio::test]
    async fn forbidden_secret_is_asked_for_less_and_less_often() {
        let (mut passwords, secret) = (passwords(), ObjectName::new("metallb-system", "key"));
        let mut pause = |read| {
            passwords.note(&secret, read);
            let left = passwords.due().unwrap().duration_since(Instant::now());
            (left + Duration::from_millis(500)).as_secs()
        };
        let forbidden = || Err(ReadError::Forbidden("no right".to_owned()));
        let pauses: Vec<u64> = (0..9).map(|_| pause(forbidden())).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 600, 600, 600]);
        assert_eq!(pause(Err(ReadError::Other("away".to_owned()))), 10);
        assert_eq!(pause(forbidden()), 10);
        assert_eq!(pause(Ok("pass".to_owned())), 60);
    }

    #[tokio::test]
    async fn forbidden_secrets_are_one_condition_that_says_what_to_grant() {
        let mut passwords = passwords();
        for (name, read) in [("a", None), ("b", Some("pass"))] {
            let secret = ObjectName::new("metallb-system", name);
            read.into_iter().for_each(|password| passwords.note(&secret, Ok(password.to_owned())));
            passwords.note(&secret, Err(ReadError::Forbidden("no right".to_owned())));
        }
        let mut peers = BTreeMap::from([peer("one", "a"), peer("two", "a"), peer("three", "b")]);
        let problems = passwords.fill(&mut peers);
        assert_eq!(problems.len(), 1, "{problems:?}");
        for part in ["(metallb-system/a, metallb-system/b)", "`get`", "bgp.passwordSecrets"] {
            assert!(problems[0].contains(part), "{problems:?}");
        }
        assert_eq!(peers.values().filter(|peer| !peer.lacks_password()).count(), 1, "the last password of b");
    }

    #[test]
    fn only_the_status_403_means_that_a_secret_is_forbidden() {
        for (code, is_forbidden) in [(403, true), (404, false), (500, false)] {
            let status = kube::core::Status::failure("no", "reason").with_code(code);
            let error = ReadError::from(kube::Error::Api(Box::new(status)));
            assert_eq!(matches!(error, ReadError::Forbidden(_)), is_forbidden, "{code}");
        }
    }
}
