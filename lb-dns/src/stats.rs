//! Counters of the server.

use hickory_proto::op::ResponseCode;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    by: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Via {
    transport: &'static str,
}

/// Counters of the server.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    queries: Family<Via, Counter>,
    answers: Family<Answered, Counter>,
    pub(crate) dropped: Counter,
    pub(crate) truncated: Counter,
    pub(crate) upstream_failures: Counter,
    pub(crate) cache_hits: Counter,
    pub(crate) stale_answers: Counter,
    pub(crate) failure_hits: Counter,
    pub(crate) merged: Counter,
    pub(crate) refused_clients: Counter,
    pub(crate) rate_limited: Counter,
}

impl Stats {
    /// Registers all counters; the registry adds the prefix `lb_`. The counters of queries and of `NOERROR` answers
    /// begin at 0, so that the first increase is visible; the counter of answers with any other code begins with the
    /// first such answer.
    pub fn register(&self, registry: &mut Registry) {
        for transport in ["udp", "tcp"] {
            drop(self.queries.get_or_create(&Via { transport }));
        }
        for by in ["local", "upstream", "refusal"] {
            drop(self.answers.get_or_create(&Answered { by, code: name(ResponseCode::NoError) }));
        }
        let help = "Messages that arrived at the DNS server";
        registry.register("dns_queries", help, self.queries.clone());
        let help = "Answers of the DNS server, by response code and by source (local, upstream or refusal)";
        registry.register("dns_answers", help, self.answers.clone());
        let help = "Messages that the DNS server dropped without an answer";
        registry.register("dns_dropped", help, self.dropped.clone());
        let help = "Answers that were too long for the client, which asks again over TCP";
        registry.register("dns_truncated", help, self.truncated.clone());
        let help = "Forwarded questions that no upstream DNS server answered";
        registry.register("dns_upstream_failures", help, self.upstream_failures.clone());
        let help = "Forwarded questions that the cache answered";
        registry.register("dns_cache_hits", help, self.cache_hits.clone());
        let help = "Forwarded questions that the cache answered with expired records, because no upstream did or too many questions \
                    were waiting";
        registry.register("dns_stale_answers", help, self.stale_answers.clone());
        let help = "Forwarded questions that failed at once, because no upstream answered them a moment ago";
        registry.register("dns_failure_cache_hits", help, self.failure_hits.clone());
        let help = "Forwarded questions that wait for the answer to an equal question";
        registry.register("dns_merged_questions", help, self.merged.clone());
        let help = "Queries and TCP connections of clients outside of the networks of --dns-allow";
        registry.register("dns_refused_clients", help, self.refused_clients.clone());
        let help = "UDP queries over --dns-rate-limit, and TCP connections over the limit of their source";
        registry.register("dns_rate_limited", help, self.rate_limited.clone());
    }

    pub(crate) fn count_query(&self, transport: &'static str) {
        self.queries.get_or_create(&Via { transport }).inc();
    }

    pub(crate) fn count_answer(&self, by: &'static str, code: ResponseCode) {
        let code = name(code);
        self.answers.get_or_create(&Answered { by, code }).inc();
    }
}

/// The name of the code in RFC 2136 or RFC 6891; `OTHER` for a code that this server does not set itself.
fn name(code: ResponseCode) -> &'static str {
    const NAMES: [(ResponseCode, &str); 7] = [
        (ResponseCode::NoError, "NOERROR"),
        (ResponseCode::FormErr, "FORMERR"),
        (ResponseCode::ServFail, "SERVFAIL"),
        (ResponseCode::NXDomain, "NXDOMAIN"),
        (ResponseCode::NotImp, "NOTIMP"),
        (ResponseCode::Refused, "REFUSED"),
        (ResponseCode::BADVERS, "BADVERS"),
    ];
    NAMES.iter().find(|(known, _)| *known == code).map_or("OTHER", |(_, name)| *name)
}
