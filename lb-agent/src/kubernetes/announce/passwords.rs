//! The passwords of BGP sessions, from the Secrets that BGPPeers name.
//!
//! The agent reads these Secrets one by one, and may read no others.

use std::{
    collections::{BTreeMap, BTreeSet},
    str,
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use kube::{Api, Client};
use lb_core::{announce::bgp::Peer, model::ObjectName};
use tokio::time::{Instant, timeout};
use tracing::warn;

/// Interval at which the Secrets are read again.
const REREAD: Duration = Duration::from_secs(60);
/// Time after which the Secrets are read again if one of them could not be read.
const RETRY: Duration = Duration::from_secs(10);
/// Time limit of a request.
const REQUEST: Duration = Duration::from_secs(3);
/// The key of the password in a Secret of the type `kubernetes.io/basic-auth`.
const PASSWORD: &str = "password";

/// The Secrets that peers name, as they were last read.
pub(super) struct Passwords {
    client: Client,
    secrets: BTreeMap<ObjectName, Found>,
    again: Option<Instant>,
}

#[derive(Default)]
struct Found {
    /// The last password that the Secret had; `None` if it was never read.
    password: Option<String>,
    /// Why the last attempt to read the Secret failed.
    error: Option<String>,
}

impl Passwords {
    pub(super) const fn new(client: Client) -> Self {
        Self { client, secrets: BTreeMap::new(), again: None }
    }

    /// When the Secrets are to be read again; `None` if no peer names a Secret.
    pub(super) const fn due(&self) -> Option<Instant> {
        self.again
    }

    /// Reads the Secrets of these peers: a new one at once, the others if they are due. Removes those that no peer
    /// names.
    pub(super) async fn read(&mut self, peers: &BTreeMap<ObjectName, Peer>) {
        let named: BTreeSet<&ObjectName> =
            peers.values().filter_map(|peer| peer.password_secret.as_ref()).collect();
        self.secrets.retain(|secret, _| named.contains(secret));
        let is_due = self.again.is_some_and(|again| again <= Instant::now());
        for secret in named {
            if is_due || !self.secrets.contains_key(secret) {
                let read = self.request(secret).await;
                self.note(secret, read);
            }
        }
        let has_failed = self.secrets.values().any(|found| found.error.is_some());
        let next = Instant::now() + if has_failed { RETRY } else { REREAD };
        let planned = self.again.filter(|_| !is_due);
        self.again = (!self.secrets.is_empty()).then(|| planned.map_or(next, |planned| planned.min(next)));
    }

    async fn request(&self, secret: &ObjectName) -> Result<String, String> {
        let api: Api<core::Secret> = Api::namespaced(self.client.clone(), &secret.namespace);
        let object = match timeout(REQUEST, api.get(&secret.name)).await {
            Ok(read) => read.map_err(|error| error.to_string())?,
            Err(_elapsed) => return Err("the API server does not answer".to_owned()),
        };
        let data = object.data.unwrap_or_default();
        let password = data.get(PASSWORD).ok_or_else(|| format!("it has no key `{PASSWORD}`"))?;
        let text = str::from_utf8(&password.0).ok().ok_or("its password is no UTF-8 text")?;
        Ok(text.to_owned())
    }

    /// Records the result of a request. A Secret that cannot be read keeps its last password.
    fn note(&mut self, secret: &ObjectName, read: Result<String, String>) {
        let found = self.secrets.entry(secret.clone()).or_default();
        match read {
            Ok(password) => *found = Found { password: Some(password), error: None },
            Err(error) => {
                if found.error.as_ref() != Some(&error) {
                    warn!("cannot read the Secret {secret}: {error}");
                }
                found.error = Some(error);
            }
        }
    }

    /// Gives the peers their passwords, as far as these are known and valid. Returns a sentence for each peer whose
    /// Secret could not be read or has an invalid password.
    pub(super) fn fill(&self, peers: &mut BTreeMap<ObjectName, Peer>) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, peer) in peers {
            let Some(secret) = peer.password_secret.clone() else { continue };
            let Some(Found { password, error }) = self.secrets.get(&secret) else { continue };
            let taken = password.as_ref().map(|password| peer.set_password(password));
            let unknown = "so a session with that router stays as it is, and a new one does not begin";
            let (effect, why) = match (taken, error) {
                (Some(Ok(())), None) => continue,
                (Some(Ok(())), Some(error)) => ("so its last password stays in use", error.clone()),
                (Some(Err(why)), _) => (unknown, format!("its password is invalid: {why}")),
                (None, error) => (unknown, error.clone().unwrap_or_default()),
            };
            problems.push(format!(
                "the Secret {secret} of the BGPPeer {name} cannot be used, {effect}: {why}; with the chart, \
                 `bgp.passwordSecrets` must list it"
            ));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use lb_core::api;
    use serde_json::json;

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
        passwords.note(&secret, Err("forbidden".to_owned()));
        let (has_password, problem) = fill(&passwords);
        assert!(!has_password);
        assert!(problem.contains("metallb-system/key") && problem.contains("forbidden"), "{problem}");
        passwords.note(&secret, Ok("pass".to_owned()));
        assert_eq!(fill(&passwords), (true, String::new()));
        passwords.note(&secret, Err("away".to_owned()));
        let (has_password, problem) = fill(&passwords);
        assert!(has_password && problem.contains("last password stays in use: away"), "{problem}");
        passwords.note(&secret, Ok("two\nlines".to_owned()));
        let (has_password, problem) = fill(&passwords);
        assert!(!has_password && problem.contains("control characters"), "{problem}");
        assert!(!problem.contains("two"), "{problem}");
    }
}
