//! Answers and failures of upstream servers. The names of Services are never cached.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hickory_proto::{
    op::{Message, Query as Question, ResponseCode},
    rr::{Name, RData, RecordType},
};
use quick_cache::{Weighter, unsync};

use crate::message::is_truncated;

/// Maximum number of questions in the cache: about as many as CoreDNS keeps by default.
const CAPACITY: usize = 10_000;
/// Maximum number of bytes in the cache.
const BYTES: usize = 16 << 20;
/// About how many bytes an entry takes in addition to its answer and its name.
const OVERHEAD: usize = 256;
/// Maximum time for which an answer with records is fresh; `LONGEST_DENIAL` is the maximum for a negative answer.
const LONGEST: Duration = Duration::from_secs(3600);
const LONGEST_DENIAL: Duration = Duration::from_secs(1800);
/// For how long after its expiry an answer may be served while no upstream server answers (RFC 8767).
const STALE: Duration = Duration::from_secs(3600);
/// TTL of the records of an expired answer.
const STALE_TTL: u32 = 30;
/// How long after a failure of the upstream servers the forwarder uses an expired answer before it asks them again.
const RECHECK: Duration = Duration::from_secs(30);
/// How long a failure is remembered (RFC 9520) if there is no expired answer: at first, and at most. Each further
/// failure doubles the time.
const FIRST_FAILURE: Duration = Duration::from_secs(1);
const LONGEST_FAILURE: Duration = Duration::from_secs(5);

/// The parts of a question that select its entry in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The name that was asked for, in lower case.
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

/// The last answer to a question, the last failure to get one, or both.
#[derive(Clone, Debug, Default)]
struct Entry {
    answer: Option<Answer>,
    failure: Option<Failure>,
}

#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// The encoded answer.
    bytes: Arc<[u8]>,
    stored: Instant,
    lifetime: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Failure {
    /// When to ask again.
    until: Instant,
    pause: Duration,
}

/// What the cache knows about a question.
#[derive(Debug)]
pub(crate) enum Cached {
    Fresh(Message),
    /// The answer has expired, and the forwarder must ask upstream again. If that fails, clients get this answer.
    Expired(Answer),
    /// The answer has expired, and the upstream servers have just failed.
    Stale(Message),
    /// The cache has no answer, and the upstream servers have just failed.
    Failed,
    Unknown,
}

#[derive(Clone, Debug)]
struct Bytes;

impl Weighter<Key, Entry> for Bytes {
    /// The approximate size of an entry in bytes, but at least `BYTES / CAPACITY`, so that the limit on bytes also
    /// limits the number of entries.
    fn weight(&self, key: &Key, entry: &Entry) -> u64 {
        let answer = entry.answer.as_ref().map_or(0, |answer| answer.bytes.len());
        (OVERHEAD + key.name.len() + answer).max(BYTES.div_ceil(CAPACITY)) as u64
    }
}

/// A cache that is bounded in bytes and entries.
#[derive(Debug)]
pub(crate) struct Cache {
    entries: unsync::Cache<Key, Entry, Bytes>,
}

impl Default for Cache {
    fn default() -> Self {
        Self { entries: unsync::Cache::with_weighter(CAPACITY, BYTES as u64, Bytes) }
    }
}

impl Cache {
    pub(crate) fn get(&self, key: &Key, now: Instant) -> Cached {
        let Some(entry) = self.entries.get(key) else { return Cached::Unknown };
        let has_failed = entry.failure.is_some_and(|failure| now < failure.until);
        let answer = entry.answer.as_ref().filter(|answer| answer.age(now) <= answer.lifetime + STALE);
        let known = match (answer, has_failed) {
            (Some(answer), _) if answer.age(now) < answer.lifetime => answer.aged(now).map(Cached::Fresh),
            (Some(answer), true) => answer.stale().map(Cached::Stale),
            (Some(answer), false) => Some(Cached::Expired(answer.clone())),
            (None, true) => Some(Cached::Failed),
            (None, false) => None,
        };
        known.unwrap_or(Cached::Unknown)
    }

    /// Records that no upstream server has given a usable answer. If there is an expired answer, [`Self::get`] returns
    /// it for [`RECHECK`], and the forwarder asks no server meanwhile.
    pub(crate) fn failed(&mut self, key: &Key, now: Instant) {
        let mut entry = self.entries.get(key).cloned().unwrap_or_default();
        entry.answer = entry.answer.filter(|answer| answer.age(now) <= answer.lifetime + STALE);
        let before = entry.failure.map(|failure| failure.pause);
        let pause = match before {
            _ if entry.answer.is_some() => RECHECK,
            Some(before) => (before * 2).clamp(FIRST_FAILURE, LONGEST_FAILURE),
            None => FIRST_FAILURE,
        };
        entry.failure = Some(Failure { until: now + pause, pause });
        self.entries.insert(key.clone(), entry);
    }

    /// Stores an answer, if it has a [`lifetime`] and can be encoded whole. Otherwise removes what the cache has about
    /// the question.
    pub(crate) fn insert(&mut self, key: Key, message: &Message, now: Instant) {
        let lifetime = lifetime(message, key.record_type);
        let mut message = message.clone();
        message.edns = None;
        let bytes = message.to_vec();
        // An encoder that leaves out records sets TC.
        let whole = bytes.ok().filter(|bytes| !is_truncated(bytes));
        let Some((bytes, lifetime)) = whole.zip(lifetime) else {
            self.entries.remove(&key);
            return;
        };
        let answer = Answer { bytes: bytes.into(), stored: now, lifetime };
        self.entries.insert(key, Entry { answer: Some(answer), failure: None });
    }
}

impl Answer {
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.stored)
    }

    /// The answer with the TTLs that are left.
    fn aged(&self, now: Instant) -> Option<Message> {
        let seconds = u32::try_from(self.age(now).as_secs()).unwrap_or(u32::MAX);
        self.with_ttl(|ttl| ttl.saturating_sub(seconds))
    }

    /// The answer with [`STALE_TTL`].
    pub(crate) fn stale(&self) -> Option<Message> {
        self.with_ttl(|_| STALE_TTL)
    }

    fn with_ttl(&self, ttl: impl Fn(u32) -> u32) -> Option<Message> {
        let mut message = Message::from_vec(&self.bytes).ok()?;
        let Message { answers, authorities, additionals, .. } = &mut message;
        for record in answers.iter_mut().chain(authorities).chain(additionals) {
            record.ttl = ttl(record.ttl);
        }
        Some(message)
    }
}

/// How long the answer to a question for this type may be stored; `None` for a truncated answer, an answer that reports
/// a failure, a negative answer without SOA record, and an answer with a TTL of 0. An answer with only aliases is also
/// negative.
fn lifetime(message: &Message, asked: RecordType) -> Option<Duration> {
    let code = message.metadata.response_code;
    let is_known = [ResponseCode::NoError, ResponseCode::NXDomain].contains(&code);
    if message.metadata.truncation || !is_known {
        return None;
    }
    let is_asked = |found: RecordType| asked == RecordType::ANY || found == asked;
    let is_denial = code == ResponseCode::NXDomain
        || !message.answers.iter().any(|record| is_asked(record.record_type()));
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

#[cfg(test)]
mod tests {
    use hickory_proto::{
        op::OpCode,
        rr::{
            Record,
            rdata::{A, CNAME, SOA},
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
        assert!(matches!(cache.get(&key("a.example."), after(start, 60)), Cached::Expired(_)));
    }

    #[test]
    fn expired_answer_serves_while_upstreams_fail_and_is_rechecked() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        let key = key("a.example.");
        cache.insert(key.clone(), &found(60), start);
        cache.failed(&key, after(start, 100));
        let Cached::Stale(message) = cache.get(&key, after(start, 120)) else { panic!() };
        assert_eq!(message.answers[0].ttl, STALE_TTL);
        let Cached::Expired(answer) = cache.get(&key, after(start, 131)) else { panic!() };
        assert_eq!(answer.stale().unwrap().answers[0].ttl, STALE_TTL);
        assert!(matches!(cache.get(&key, after(start, 60 + 3601)), Cached::Unknown));
        cache.failed(&key, after(start, 60 + 3601));
        assert!(matches!(cache.get(&key, after(start, 60 + 3601)), Cached::Failed));
    }

    #[test]
    fn questions_with_other_flags_have_answers_of_their_own() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        cache.insert(key("a.example."), &found(60), start);
        let asked = Question::query(Name::from_ascii("a.example.").unwrap(), RecordType::A);
        for (dnssec_ok, checking_disabled) in [(true, false), (false, true), (true, true)] {
            let other = Key::new(&asked, dnssec_ok, checking_disabled);
            assert!(matches!(cache.get(&other, start), Cached::Unknown), "{other:?}");
        }
    }

    #[test]
    fn only_whole_answers_and_denials_with_soa_are_stored() {
        let mut truncated = found(60);
        truncated.metadata.truncation = true;
        let mut failed = found(60);
        failed.metadata.response_code = ResponseCode::ServFail;
        let empty = Message::response(1, OpCode::Query);
        for message in [truncated, failed, empty.clone(), found(0)] {
            assert_eq!(lifetime(&message, RecordType::A), None);
        }
        let root = Name::root();
        let soa = SOA::new(root.clone(), root.clone(), 1, 1, 1, 1, 7);
        let mut denial = empty;
        let [www, target] = ["www.example.", "cdn.example."].map(|name| Name::from_ascii(name).unwrap());
        let alias = Record::from_rdata(www, 3600, RData::CNAME(CNAME(target)));
        let mut only_alias = denial.clone();
        only_alias.add_answer(alias.clone());
        assert_eq!(lifetime(&only_alias, RecordType::A), None, "no address, and no SOA record");
        assert_eq!(lifetime(&only_alias, RecordType::CNAME), Some(Duration::from_secs(3600)));
        denial.add_authority(Record::from_rdata(root, 900, RData::SOA(soa)));
        assert_eq!(lifetime(&denial, RecordType::A), Some(Duration::from_secs(7)));
        denial.add_answer(alias);
        assert_eq!(
            lifetime(&denial, RecordType::A),
            Some(Duration::from_secs(7)),
            "an alias without address"
        );
        assert_eq!(lifetime(&found(90_000), RecordType::A), Some(LONGEST));
    }

    #[test]
    fn failure_is_remembered_for_longer_each_time_and_ends_with_an_answer() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        let key = key("a.example.");
        let mut now = start;
        for seconds in [1, 2, 4, 5, 5] {
            assert!(matches!(cache.get(&key, now), Cached::Unknown));
            cache.failed(&key, now);
            let end = after(now, seconds);
            assert!(matches!(cache.get(&key, end - Duration::from_millis(1)), Cached::Failed));
            now = end;
        }
        cache.insert(key.clone(), &found(60), now);
        assert!(matches!(cache.get(&key, now), Cached::Fresh(_)));
        cache.failed(&key, after(now, 60 + 3601));
        assert!(matches!(cache.get(&key, after(now, 60 + 3601)), Cached::Failed), "too old to serve");
    }

    #[test]
    fn cache_is_bounded_in_entries() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        for number in 0..CAPACITY + 100 {
            cache.insert(key(&format!("n{number}.example.")), &found(60), start);
            cache.failed(&key(&format!("f{number}.example.")), start);
        }
        assert!(cache.entries.len() <= CAPACITY, "{}", cache.entries.len());
    }

    #[test]
    fn cache_is_bounded_in_bytes() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        let record = found(60).answers.remove(0);
        let mut large = Message::response(1, OpCode::Query);
        large.add_answers(std::iter::repeat_n(record, 2000));
        let bytes = large.to_vec().unwrap().len();
        for number in 0..2000 {
            cache.insert(key(&format!("n{number}.example.")), &large, start);
        }
        let held = cache.entries.iter().filter_map(|(_, entry)| Some(entry.answer.as_ref()?.bytes.len()));
        let held: usize = held.sum();
        assert!(held > BYTES / 2 && held <= BYTES, "{held} bytes in answers of {bytes}");
        assert!(matches!(cache.get(&key("n1999.example."), start), Cached::Fresh(_)));
    }
}
