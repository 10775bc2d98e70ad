//! Reads and writes the Lease by which one agent is elected; [`Election`] decides what to write.

use std::{convert::Infallible, future, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1 as coordination,
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use lb_core::{
    lease::{Bid, Election, Lease, Release, Timing},
    rules::names::dns_1123_subdomain,
};
use ring::digest;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{AddressOptions, AddressReport, Term, update};
use crate::stop;

/// Name of the Lease of the controller for Services without a `loadBalancerClass`.
const LEASE: &str = "lb-agent-addresses";

/// Name of the Lease by which the controller for this class is elected. The name contains the class in lower case, with
/// `.` in place of `/`; or a hash of the class, if the name would be invalid otherwise. The chart computes the same
/// name (`lb-agent.lease`).
pub(crate) fn lease_name(class: Option<&str>) -> String {
    let Some(class) = class else { return LEASE.to_owned() };
    let name = format!("{LEASE}-{}", class.replace('/', ".").to_lowercase());
    match dns_1123_subdomain(&name) {
        None => name,
        Some(_why) => format!("{LEASE}-{}", short_hash(class)),
    }
}

/// The first 16 hexadecimal digits of the SHA-256 of a text.
fn short_hash(text: &str) -> String {
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    let bytes: &[u8] = hash.as_ref();
    bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Takes part in the election, and publishes the term of this agent after each attempt. Once `stop` is true, releases
/// the Lease and drops `stop`. Never returns.
pub(super) async fn stand(
    client: Client,
    namespace: &str,
    options: &AddressOptions,
    term: watch::Sender<Option<Term>>,
    report: &watch::Sender<AddressReport>,
    mut stop: watch::Receiver<bool>,
) -> Infallible {
    let name = lease_name(options.class.as_deref());
    let me = identity(&options.node_name);
    let api = Api::namespaced(client, namespace);
    let election = Election::new(&me, options.timing);
    let mut candidate = Candidate { api, name, me, timing: options.timing, start: Instant::now(), election };
    let mut failing = false;
    loop {
        let result = candidate.turn().await;
        let now = candidate.now();
        match &result {
            Err(why) if !failing => warn!(
                lease = candidate.name,
                namespace,
                "cannot use the Lease that elects the agent which gives addresses to load balancers: {why}; the agent retries: \
                 check that its user may create, get and update leases there"
            ),
            Ok(()) if failing => info!(lease = candidate.name, "the Lease is usable again"),
            Ok(()) | Err(_) => {}
        }
        failing = result.is_err();
        let at = |then: Duration| candidate.start + then;
        let mine = candidate.election.term().map(|mine| Term { begin: at(mine.start), end: at(mine.end) });
        term.send_replace(mine);
        let leader = candidate.election.holder().map(node_of);
        update(report, |report| report.leader = leader);
        tokio::select! {
            () = sleep(candidate.election.pause(now)) => {}
            () = stop::requested(&mut stop) => break,
        }
    }
    // Without a term, the leader stops its work.
    term.send_replace(None);
    if let Err(why) = candidate.release().await {
        warn!(
            lease = candidate.name,
            namespace, "cannot release the Lease: {why}; the next leader waits until it ends"
        );
    }
    drop(stop);
    future::pending().await
}

/// The holder identity of this process in the Lease. A restarted agent on the same node gets another identity.
fn identity(node: &str) -> String {
    let started = Timestamp::now().as_microsecond();
    format!("{node}_{}-{started:x}", std::process::id())
}

/// The node's name in an [`identity`]: the part before the first underscore.
fn node_of(identity: &str) -> String {
    identity.split('_').next().unwrap_or_default().to_owned()
}

struct Candidate {
    api: Api<coordination::Lease>,
    name: String,
    me: String,
    timing: Timing,
    /// The instant from which the election counts time.
    start: Instant,
    election: Election,
}

impl Candidate {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Reads the Lease, and acquires or renews it if that is due.
    async fn turn(&mut self) -> Result<(), String> {
        let limit = self.timing.request;
        let found = within(limit, self.api.get_opt(&self.name)).await?;
        self.election.read(found.as_ref().map(known), self.now());
        let sent = self.now();
        let Some(bid) = self.election.bid(sent) else { return Ok(()) };
        let object = self.object(&bid, found.as_ref());
        let parameters = PostParams::default();
        let write = async {
            if bid.replaces.is_some() {
                self.api.replace(&self.name, &parameters, &object).await
            } else {
                self.api.create(&parameters, &object).await
            }
        };
        match timeout(limit, write).await {
            Ok(Ok(stored)) => {
                if !bid.is_renewal {
                    info!(lease = self.name, "this agent gives addresses to load balancers now");
                }
                self.election.accepted(&bid, &known(&stored).version, sent);
                Ok(())
            }
            // Another agent has written the Lease since it was read.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_elapsed) => Err("the API server does not answer".to_owned()),
        }
    }

    /// Gives the Lease up, if this agent holds it.
    async fn release(&mut self) -> Result<(), String> {
        let now = self.now();
        let Some(Release { replaces, lasts, transitions }) = self.election.release(now) else {
            return Ok(());
        };
        let spec = coordination::LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(seconds(lasts)),
            renew_time: Some(MicroTime(Timestamp::now())),
            lease_transitions: Some(transitions),
            ..coordination::LeaseSpec::default()
        };
        let metadata = ObjectMeta {
            name: Some(self.name.clone()),
            resource_version: Some(replaces),
            ..ObjectMeta::default()
        };
        let object = coordination::Lease { metadata, spec: Some(spec) };
        let parameters = PostParams::default();
        within(self.timing.request, self.api.replace(&self.name, &parameters, &object)).await?;
        info!(lease = self.name, "another agent may give addresses to load balancers now");
        Ok(())
    }

    fn object(&self, bid: &Bid, found: Option<&coordination::Lease>) -> coordination::Lease {
        let now = MicroTime(Timestamp::now());
        let before = found.and_then(|lease| lease.spec.as_ref());
        let acquired = before.and_then(|spec| spec.acquire_time.clone()).filter(|_| bid.is_renewal);
        coordination::Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                resource_version: bid.replaces.clone(),
                ..ObjectMeta::default()
            },
            spec: Some(coordination::LeaseSpec {
                holder_identity: Some(self.me.clone()),
                lease_duration_seconds: Some(seconds(self.timing.lease)),
                acquire_time: acquired.or_else(|| Some(now.clone())),
                renew_time: Some(now),
                lease_transitions: Some(bid.transitions),
                ..coordination::LeaseSpec::default()
            }),
        }
    }
}

/// A duration in whole seconds, the unit of the Lease's fields. Rounds up, so that followers never take the lease to be
/// shorter than it is.
fn seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis().div_ceil(1000)).unwrap_or(i32::MAX)
}

async fn within<T>(limit: Duration, request: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match timeout(limit, request).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_elapsed) => Err("the API server does not answer".to_owned()),
    }
}

/// The fields of the Lease object that the election uses.
fn known(lease: &coordination::Lease) -> Lease {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    Lease {
        holder: spec.holder_identity,
        lasts: seconds.map_or(Timing::default().lease, Duration::from_secs),
        transitions: spec.lease_transitions.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_of_every_class_has_a_valid_name() {
        let longest = format!("{}/b", "c".repeat(232));
        let of_longest = format!("lb-agent-addresses-{}.b", "c".repeat(232));
        let too_long = format!("{}/b", "c".repeat(233));
        for (class, name) in [
            ("example.com/lb", "lb-agent-addresses-example.com.lb"),
            ("example.com/Lb", "lb-agent-addresses-example.com.lb"),
            ("internal", "lb-agent-addresses-internal"),
            ("example.com/my_lb", "lb-agent-addresses-ea0a7a6dd6678504"),
            ("example.com/a.-b", "lb-agent-addresses-c56f977cfcf10a09"),
            (longest.as_str(), of_longest.as_str()),
            (too_long.as_str(), "lb-agent-addresses-0ad62ef3303f69d3"),
        ] {
            assert_eq!(lease_name(Some(class)), name);
            assert_eq!(dns_1123_subdomain(&lease_name(Some(class))), None, "{class}");
        }
        assert_eq!(lease_name(None), "lb-agent-addresses");
    }
}
