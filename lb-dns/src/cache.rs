//! Answers of upstream servers. The names of Services are never cached.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use hickory_proto::{
    op::{Message, Query as Question, ResponseCode},
    rr::{Name, RData, RecordType},
};

/// Answers that the cache holds: as many as CoreDNS.
const CAPACITY: usize = 10_000;
/// How long an answer is kept at most: with records, and without.
const LONGEST: Duration = Duration::from_secs(3600);
const LONGEST_DENIAL: Duration = Duration::from_secs(1800);
/// How long an expired answer serves while no upstream server answers (RFC 8767).
const STALE: Duration = Duration::from_secs(3600);
/// TTL of the records of an expired answer.
const STALE_TTL: u32 = 30;
/// How long an expired answer serves without asking upstream, after an upstream has failed.
const RECHECK: Duration = Duration::from_secs(30);

/// A question as the cache tells questions apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// In lower case.
    name: Name,
    record_type: RecordType,
    dnssec_ok: bool,
    checking_disabled: bool,
}

impl Key {
    pub(crate) fn new(question: &Question, dnssec_ok: bool, checking_disabled: bool) -> Self {
        let (name, record_type) = (question.name.to_lowercase(), question.query_type);
        Self { name, record_type, dnssec_ok, checking_disabled }
    }
}

#[derive(Debug)]
struct Entry {
    message: Message,
    stored: Instant,
    lifetime: Duration,
    /// While no upstream server answers: when to ask again.
    recheck: Option<Instant>,
}

/// What the cache knows about a question.
#[derive(Debug)]
pub(crate) enum Cached {
    Fresh(Message),
    /// The answer has expired, and it is time to ask upstream again.
    Expired,
    /// The answer has expired, and an upstream has just failed.
    Stale(Message),
    Unknown,
}

/// A bounded cache, which forgets the oldest answers first.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    entries: HashMap<Key, Entry>,
    /// Keys in the order in which they were first stored.
    order: VecDeque<Key>,
}

impl Cache {
    pub(crate) fn get(&self, key: &Key, now: Instant) -> Cached {
        let Some(entry) = self.entries.get(key) else { return Cached::Unknown };
        let age = now.saturating_duration_since(entry.stored);
        if age < entry.lifetime {
            return Cached::Fresh(aged(entry, age));
        }
        match entry.recheck {
            _ if age > entry.lifetime + STALE => Cached::Unknown,
            Some(recheck) if now < recheck => Cached::Stale(stale(entry)),
            Some(_) | None => Cached::Expired,
        }
    }

    /// The expired answer to serve because no upstream server answers; the next ones follow without asking.
    pub(crate) fn failed(&mut self, key: &Key, now: Instant) -> Option<Message> {
        let entry = self.entries.get_mut(key)?;
        let age = now.saturating_duration_since(entry.stored);
        if age > entry.lifetime + STALE {
            return None;
        }
        entry.recheck = Some(now + RECHECK);
        Some(stale(entry))
    }

    /// Stores an answer, if answers like it may be stored.
    pub(crate) fn insert(&mut self, key: Key, message: &Message, now: Instant) {
        let Some(lifetime) = lifetime(message) else { return };
        let mut message = message.clone();
        message.edns = None;
        let entry = Entry { message, stored: now, lifetime, recheck: None };
        if self.entries.insert(key.clone(), entry).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > CAPACITY {
            if let Some(oldest) = self.order.pop_front() {
                self.entries.remove(&oldest);
            }
        }
    }
}

/// How long the answer may be stored; `None` for one that is truncated, failed, or a denial without SOA.
fn lifetime(message: &Message) -> Option<Duration> {
    let code = message.metadata.response_code;
    let is_known = [ResponseCode::NoError, ResponseCode::NXDomain].contains(&code);
    if message.metadata.truncation || !is_known {
        return None;
    }
    let is_denial = code == ResponseCode::NXDomain || message.answers.is_empty();
    let records = message.answers.iter().chain(&message.authorities);
    let ttl = records.map(|record| record.ttl).min()?;
    let (ttl, longest) = if is_denial {
        let soa = message.authorities.iter().find_map(|record| {
            let RData::SOA(soa) = &record.data else { return None };
            Some(soa.minimum)
        });
        (ttl.min(soa?), LONGEST_DENIAL)
    } else {
        (ttl, LONGEST)
    };
    Some(Duration::from_secs(ttl.into()).min(longest)).filter(|lifetime| !lifetime.is_zero())
}

/// The answer with the TTLs that are left.
fn aged(entry: &Entry, age: Duration) -> Message {
    let seconds = u32::try_from(age.as_secs()).unwrap_or(u32::MAX);
    with_ttl(entry, |ttl| ttl.saturating_sub(seconds))
}

fn stale(entry: &Entry) -> Message {
    with_ttl(entry, |_| STALE_TTL)
}

fn with_ttl(entry: &Entry, ttl: impl Fn(u32) -> u32) -> Message {
    let mut message = entry.message.clone();
    let Message { answers, authorities, additionals, .. } = &mut message;
    for record in answers.iter_mut().chain(authorities).chain(additionals) {
        record.ttl = ttl(record.ttl);
    }
    message
}

#[cfg(test)]
mod tests {
    use hickory_proto::{
        op::OpCode,
        rr::{
            Record,
            rdata::{A, SOA},
        },
    };

    use super::*;

    fn key(name: &str) -> Key {
        Key::new(&Question::query(Name::from_ascii(name).unwrap(), RecordType::A), false, false)
    }

    fn found(ttl: u32) -> Message {
        let mut message = Message::response(1, OpCode::Query);
        let name = Name::from_ascii("a.example.").unwrap();
        message.add_answer(Record::from_rdata(name, ttl, RData::A(A([192, 0, 2, 1].into()))));
        message
    }

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn ttl_counts_down_and_case_does_not_matter() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        cache.insert(key("a.example."), &found(60), start);
        let Cached::Fresh(message) = cache.get(&key("A.Example."), after(start, 20)) else { panic!() };
        assert_eq!(message.answers[0].ttl, 40);
        assert!(matches!(cache.get(&key("a.example."), after(start, 60)), Cached::Expired));
    }

    #[test]
    fn expired_answer_serves_while_upstreams_fail_and_is_rechecked() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        let key = key("a.example.");
        cache.insert(key.clone(), &found(60), start);
        assert_eq!(cache.failed(&key, after(start, 100)).unwrap().answers[0].ttl, STALE_TTL);
        assert!(matches!(cache.get(&key, after(start, 120)), Cached::Stale(_)));
        assert!(matches!(cache.get(&key, after(start, 131)), Cached::Expired));
        assert!(cache.failed(&key, after(start, 60 + 3601)).is_none());
    }

    #[test]
    fn questions_with_other_flags_have_answers_of_their_own() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        cache.insert(key("a.example."), &found(60), start);
        let other = Key { dnssec_ok: true, ..key("a.example.") };
        assert!(matches!(cache.get(&other, start), Cached::Unknown));
    }

    #[test]
    fn only_whole_answers_and_denials_with_soa_are_stored() {
        let mut truncated = found(60);
        truncated.metadata.truncation = true;
        let mut failed = found(60);
        failed.metadata.response_code = ResponseCode::ServFail;
        let empty = Message::response(1, OpCode::Query);
        for message in [truncated, failed, empty.clone(), found(0)] {
            assert_eq!(lifetime(&message), None);
        }
        let root = Name::root();
        let soa = SOA::new(root.clone(), root.clone(), 1, 1, 1, 1, 7);
        let mut denial = empty;
        denial.add_authority(Record::from_rdata(root, 900, RData::SOA(soa)));
        assert_eq!(lifetime(&denial), Some(Duration::from_secs(7)));
        assert_eq!(lifetime(&found(90_000)), Some(LONGEST));
    }

    #[test]
    fn cache_is_bounded() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        for number in 0..CAPACITY + 10 {
            cache.insert(key(&format!("n{number}.example.")), &found(60), start);
        }
        assert_eq!((cache.entries.len(), cache.order.len()), (CAPACITY, CAPACITY));
        assert!(matches!(cache.get(&key("n0.example."), start), Cached::Unknown));
    }
}
