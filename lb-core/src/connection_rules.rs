//! Decides which connections the agent ends, by the idle and drain timeouts of Services.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use lb_common::{
    Backend,
    conntrack::{Flow, Phase, Tick},
};

use crate::{
    desired::Port,
    endpoint_key::EndpointKey,
    model::{ConnectionTimeouts, ObjectName},
};

/// Why the agent ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// The connection was idle for the idle timeout.
    Idle,
    /// The Service lost the connection's backend, and the drain timeout has passed since.
    Drained,
}

/// The timeouts for connections of one service port, and its current backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    timeouts: ConnectionTimeouts,
    /// The backends of the service port, including those of weight 0, and the [ready endpoints](Port::ready) that a
    /// traffic policy or a hint keeps from being backends. Connections to all other endpoints drain.
    backends: BTreeSet<EndpointKey>,
}

/// The rules of the service ports that have a timeout, by the id of the port ([`Flow::service`]).
pub type Rules = BTreeMap<u32, Rule>;

/// A change of the [`Rules`]: replaces the rules of one Service.
#[derive(Clone, Debug)]
pub struct RulesChange {
    before: Vec<u32>,
    now: Rules,
}

impl RulesChange {
    /// Replaces the rules of the Service.
    pub fn apply(self, rules: &mut Rules) {
        for id in self.before {
            rules.remove(&id);
        }
        rules.extend(self.now);
    }
}

/// Finds the changes of the rules when Services change.
#[derive(Clone, Debug, Default)]
pub(crate) struct RulesOfServices {
    ids: BTreeMap<ObjectName, Vec<u32>>,
    changes: Vec<RulesChange>,
}

impl RulesOfServices {
    /// Replaces the rules of a Service; `ports` are its service ports with their ids.
    pub(crate) fn set<'a>(&mut self, service: &ObjectName, ports: impl Iterator<Item = (u32, &'a Port)>) {
        let now: Rules = ports
            .filter(|(_, port)| !port.timeouts.is_unset())
            .map(|(id, port)| (id, Rule { timeouts: port.timeouts, backends: backends(port) }))
            .collect();
        let before = self.ids.remove(service).unwrap_or_default();
        if before.is_empty() && now.is_empty() {
            return;
        }
        if !now.is_empty() {
            self.ids.insert(service.clone(), now.keys().copied().collect());
        }
        self.changes.push(RulesChange { before, now });
    }

    /// Returns the changes since the last call, in their order.
    pub(crate) fn take_changes(&mut self) -> Vec<RulesChange> {
        std::mem::take(&mut self.changes)
    }
}

fn backends(port: &Port) -> BTreeSet<EndpointKey> {
    let endpoint = |backend: &Backend| (backend.address, backend.port);
    port.slices.iter().flatten().map(endpoint).chain(port.ready.iter().copied()).collect()
}

/// The backends that Services have lost but that still have connections, each with the time of the pass that first
/// noticed the loss. For a backend that was lost before a restart of the agent, the drain timeout counts from the first
/// pass after the restart.
#[derive(Clone, Debug, Default)]
pub struct Drains(BTreeMap<(u32, EndpointKey), Drain>);

#[derive(Clone, Copy, Debug)]
struct Drain {
    since: Tick,
    /// Time of the last pass that has found a connection to the backend.
    seen: Tick,
}

impl Drains {
    /// Why the connection shall end at `now`; `None` if it may continue. `forward` and `reply` are its flow table
    /// entries; a tunnelled flow has no reverse entry.
    pub fn end(&mut self, rules: &Rules, forward: &Flow, reply: Option<&Flow>, now: Tick) -> Option<End> {
        let idle = now.seconds_since(Phase::of_entry(forward, reply).last_used(forward, reply));
        let endpoint = (forward.to.destination, forward.to.destination_port);
        self.end_of(rules, (forward.service, endpoint), Some(Duration::from_secs(idle.into())), now)
    }

    /// Why a connection of the service port with this id, to this endpoint, shall end at `now`; `None` if it may
    /// continue. `idle` is the time since its last packet, if known.
    pub fn end_of(
        &mut self,
        rules: &Rules,
        (service, endpoint): (u32, EndpointKey),
        idle: Option<Duration>,
        now: Tick,
    ) -> Option<End> {
        let Rule { timeouts, backends } = rules.get(&service)?;
        let is_over =
            |timeout: Option<Duration>, time: Duration| timeout.is_some_and(|timeout| time >= timeout);
        if !backends.contains(&endpoint) {
            let drain = self.0.entry((service, endpoint)).or_insert(Drain { since: now, seen: now });
            drain.seen = now;
            let seconds = now.seconds_since(drain.since);
            if is_over(timeouts.drain, Duration::from_secs(seconds.into())) {
                return Some(End::Drained);
            }
        }
        idle.is_some_and(|idle| is_over(timeouts.idle, idle)).then_some(End::Idle)
    }

    /// Ends a pass over all connections: drops the backends to which the pass found no connection, and the backends
    /// that their Service has again.
    pub fn end_pass(&mut self, now: Tick) {
        self.0.retain(|_, drain| drain.seen == now);
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use lb_common::{
        Address,
        conntrack::{Tuple, seen},
        protocol,
    };

    use super::*;

    const START: Tick = Tick(1000);

    fn ip(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn endpoint(last: u8) -> EndpointKey {
        (Address::from_v4([10, 1, 0, last]), 8080)
    }

    /// The flow table entries of an established connection of service port 1, last used at `START`.
    fn connection(backend: u8) -> (Flow, Flow) {
        let from = Tuple::new(ip("192.0.2.1"), ip("10.96.0.1"), 5000, 80, protocol::TCP);
        let (destination, destination_port) = endpoint(backend);
        let to = Tuple { destination, destination_port, ..from };
        let seen = seen::PACKET | seen::SYN | seen::ACK;
        let entry = |from: &Tuple, to: &Tuple| Flow { seen, ..Flow::new(from, to, 1, 0, START) };
        (entry(&from, &to), entry(&to.reversed(), &from.reversed()))
    }

    fn rules(timeouts: ConnectionTimeouts, backends: &[u8]) -> Rules {
        let backends = backends.iter().map(|last| endpoint(*last)).collect();
        Rules::from([(1, Rule { timeouts, backends })])
    }

    fn after(seconds: u32) -> Tick {
        Tick(START.0 + Tick::ticks_in(seconds))
    }

    #[test]
    fn idle_connection_ends_whichever_direction_was_the_last() {
        let rules = rules(ConnectionTimeouts { idle: Some(Duration::from_mins(1)), drain: None }, &[2]);
        let (forward, mut reply) = connection(2);
        let mut drains = Drains::default();
        let mut end = |reply: &Flow, at| drains.end(&rules, &forward, Some(reply), at);
        assert_eq!((end(&reply, after(50)), end(&reply, after(60))), (None, Some(End::Idle)));
        reply.last_seen = after(30);
        assert_eq!((end(&reply, after(60)), end(&reply, after(91))), (None, Some(End::Idle)));
    }

    #[test]
    fn connection_to_a_lost_backend_ends_after_the_drain_timeout() {
        let timeouts = ConnectionTimeouts { idle: None, drain: Some(Duration::from_secs(20)) };
        let (with, without) = (rules(timeouts, &[2, 3]), rules(timeouts, &[3]));
        let (forward, reply) = connection(2);
        let mut drains = Drains::default();
        let mut pass = |rules: &Rules, seconds| {
            let end = drains.end(rules, &forward, Some(&reply), after(seconds));
            drains.end_pass(after(seconds));
            end
        };
        assert_eq!([pass(&with, 0), pass(&with, 100)], [None, None]);
        assert_eq!([pass(&without, 105), pass(&without, 120)], [None, None]);
        assert_eq!(pass(&with, 122), None, "the backend comes back");
        assert_eq!(
            [pass(&without, 130), pass(&without, 145)],
            [None, None],
            "it counts from the start again"
        );
        assert_eq!(pass(&without, 151), Some(End::Drained));
    }

    #[test]
    fn connection_of_unknown_idle_time_ends_by_the_drain_timeout_only() {
        let timeouts =
            ConnectionTimeouts { idle: Some(Duration::from_secs(2)), drain: Some(Duration::from_secs(9)) };
        let mut drains = Drains::default();
        let mut end = |backends: &[u8], idle, seconds| {
            drains.end_of(&rules(timeouts, backends), (1, endpoint(2)), idle, after(seconds))
        };
        assert_eq!(end(&[2], None, 0), None);
        assert_eq!(end(&[2], Some(Duration::from_secs(2)), 1), Some(End::Idle));
        assert_eq!([end(&[], None, 10), end(&[], None, 15)], [None, None]);
        assert_eq!(end(&[], None, 20), Some(End::Drained));
    }

    #[test]
    fn connections_of_other_services_go_on() {
        let (forward, reply) = connection(2);
        let mut drains = Drains::default();
        assert_eq!(drains.end(&Rules::new(), &forward, Some(&reply), after(1_000_000)), None);
        let timeouts = ConnectionTimeouts { idle: None, drain: Some(Duration::ZERO) };
        let other = Flow { service: 2, ..forward };
        assert_eq!(drains.end(&rules(timeouts, &[]), &other, Some(&reply), after(1)), None);
        assert_eq!(drains.end(&rules(timeouts, &[]), &forward, Some(&reply), after(1)), Some(End::Drained));
    }
}
