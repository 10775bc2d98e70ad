//! The members (nodes that share announced addresses) and the authenticated messages between them.

use std::{collections::BTreeMap, fmt, fs, net::SocketAddr, path::Path, str::FromStr, sync::Arc};

use anyhow::{Context as _, bail};
use lb_core::announce::lease::{Answer, Ask, Prefer};
use ring::{
    hmac,
    rand::{self, SystemRandom},
};
use serde::{Deserialize, Serialize};

/// The nodes that share announced addresses, and how they exchange messages.
#[derive(Clone, Debug)]
pub struct Members {
    /// Which nodes are members, and at which UDP addresses.
    pub who: Who,
    /// The key that authenticates messages between members.
    pub key: Key,
    /// Whether two members that receive no message from each other both announce, or neither.
    pub prefer: Prefer,
}

/// How the members, which share announced addresses, are determined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// UDP address of each member, this node included, by node name. All of them vote.
    Configured(BTreeMap<Arc<str>, SocketAddr>),
    /// The Nodes of the cluster; each receives messages at this UDP port of its addresses.
    Nodes(u16),
}

/// A member as `--announce-member` names it: `NAME=ADDRESS:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name of the member's node.
    pub name: Arc<str>,
    /// UDP address at which the member receives messages.
    pub address: SocketAddr,
}

impl FromStr for Member {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
        let Some((name, Ok(address))) = parts.map(|(name, address)| (name, address.parse())) else {
            return Err("NAME=ADDRESS:PORT is expected, such as node-1=192.0.2.1:7947".to_owned());
        };
        Ok(Self { name: name.into(), address })
    }
}

/// Minimal length of a key, in bytes.
const SHORTEST_KEY: usize = 16;
/// Length of a message's authentication code, in bytes: HMAC-SHA256.
const TAG: usize = 32;

/// The HMAC-SHA256 key that all members share.
#[derive(Clone)]
pub struct Key(hmac::Key);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// Reads the key from a file, without leading and trailing white space.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or the key is too short.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read the key {}", path.display()))?;
        let key = bytes.trim_ascii();
        if key.len() < SHORTEST_KEY {
            bail!(
                "the key in {} has {} bytes: give at least {SHORTEST_KEY}, for example those of `openssl rand -base64 32`",
                path.display(),
                key.len()
            );
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, key)))
    }

    /// Encodes a message: the authentication code, then the JSON.
    pub(super) fn seal(&self, message: &Message) -> Vec<u8> {
        // Never fails: `serde_json` fails only for maps with non-text keys, and a `Message` contains no map.
        let text = serde_json::to_vec(message).unwrap_or_default();
        [hmac::sign(&self.0, &text).as_ref(), &text].concat()
    }

    /// Decodes a message; `None` if the authentication code or the JSON is invalid.
    pub(super) fn open(&self, bytes: &[u8]) -> Option<Message> {
        let (tag, text) = bytes.split_at_checked(TAG)?;
        hmac::verify(&self.0, text, tag).ok()?;
        serde_json::from_slice(text).ok()
    }
}

/// A random number for this run of the agent: the incarnation in a
/// [`RequestId`](lb_core::announce::freshness::RequestId).
pub(super) fn incarnation() -> anyhow::Result<u64> {
    let random = rand::generate(&SystemRandom::new());
    let random = random.ok().context("cannot read random numbers of the kernel (getrandom)")?;
    Ok(u64::from_ne_bytes(random.expose()))
}

/// A message from one member to another. It names both members, so a third member ignores a duplicate of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) body: Body,
}

/// The content of a message between members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Body {
    Ask(Ask),
    Answer(Answer),
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, net::IpAddr};

    use lb_core::announce::{
        freshness::RequestId,
        lease::{Leases, Timing},
        voters::Voters,
    };

    use super::*;

    fn key(text: &str) -> anyhow::Result<Key> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), text)?;
        Key::read(file.path())
    }

    fn message() -> Message {
        let body = Body::Ask(Ask {
            id: RequestId { incarnation: 3, number: 7 },
            echo: Some(5),
            wants: vec!["192.0.2.1".parse().unwrap()],
            leaves: Vec::new(),
            declines: vec!["192.0.2.2".parse().unwrap()],
            generation: 0,
            retires: false,
            devices: None,
        });
        Message { from: "a".into(), to: "b".into(), body }
    }

    #[test]
    fn message_opens_with_its_key_only() {
        let (ours, same, other) = (
            key("0123456789abcdef").unwrap(),
            key(" 0123456789abcdef\n").unwrap(),
            key("0123456789abcdeF").unwrap(),
        );
        let sealed = ours.seal(&message());
        assert_eq!(same.open(&sealed), Some(message()));
        assert_eq!(other.open(&sealed), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert_eq!(ours.open(&changed), None, "byte {at} changed");
        }
        (0..sealed.len()).for_each(|length| assert_eq!(ours.open(&sealed[..length]), None));
    }

    #[test]
    fn short_key_is_refused() {
        let error = key("short\n").unwrap_err().to_string();
        assert!(error.contains("has 5 bytes"), "{error}");
    }

    #[test]
    fn requests_and_answers_about_a_thousand_addresses_fit_into_packets() {
        let (ours, name) = (key("0123456789abcdef").unwrap(), "n".repeat(63));
        let names: BTreeSet<Arc<str>> =
            (0..100).map(|number| format!("{number:03}{}", "n".repeat(60)).into()).collect();
        let fits = |body: Body| {
            let sealed = ours.seal(&Message { from: name.clone(), to: name.clone(), body });
            assert!(sealed.len() <= 1_232, "{} bytes", sealed.len());
        };
        let member = |name: &str, generation| {
            let voters = Voters { generation, names: names.clone() };
            let mut member =
                Leases::new(name.into(), voters, Prefer::Single, Timing::DEFAULT, (0, u64::MAX / 2));
            member.set_members([Arc::from("a"), Arc::from("b")]);
            member
        };
        let (mut asks, mut answers) = (member("a", Voters::LAST - 1), member("b", Voters::LAST));
        let address = |number: u16| {
            IpAddr::V6([0x2001, 0xdb8, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xf000 + number].into())
        };
        asks.set_candidates((0..1_000).map(|number| (address(number), vec![Arc::from("a")])).collect(), 0);
        // Member `a` requests half of the addresses, and declines the others.
        asks.set_unserved((500..1_000).map(address).collect());
        asks.set_devices(Some((0..11).map(|number| format!("enp{number:012}")).collect()));
        let from: Arc<str> = "a".into();
        let mut kinds = BTreeSet::new();
        for _ in 0..2 {
            for ask in asks.tick(1) {
                let ask = asks.addressed(&ask, "b");
                fits(Body::Ask(ask.clone()));
                for answer in answers.asked(&from, &ask, 2) {
                    asks.answered(&"b".into(), &answer, 3);
                    kinds.insert((answer.challenge.is_some(), answer.voters.is_some()));
                    // Answers of the maximum length: as if the voter had granted every address.
                    let grants = ask.wants.iter().filter(|_| answer.voters.is_none()).copied().collect();
                    fits(Body::Answer(Answer { grants, ..answer }));
                }
            }
        }
        assert_eq!(kinds.len(), 3, "a challenge, grants, and parts of the voters");
        assert_eq!(asks.voters().generation, Voters::LAST);
    }

    #[test]
    fn members_are_named_with_their_addresses() {
        let member: Member = "node-1=192.0.2.1:7947".parse().unwrap();
        assert_eq!((&*member.name, member.address), ("node-1", "192.0.2.1:7947".parse().unwrap()));
        for text in ["", "node-1", "=192.0.2.1:1", "a=192.0.2.1", "a=b:1"] {
            assert!(text.parse::<Member>().unwrap_err().contains("NAME=ADDRESS:PORT"), "{text}");
        }
    }
}
