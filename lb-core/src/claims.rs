//! Which service ports claim a frontend, and which service port owns it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use lb_common::{FrontendKind, ServiceKey};

use crate::{
    desired::{Frontend, Port},
    model::{ObjectName, Protocol, ServicePortName},
};

/// All claims of frontends by service ports. The service port whose claim is of the strongest kind owns a frontend; if
/// several claims are of that kind, the service port with the smallest name. So the owner does not depend on the order
/// of events, unless a map is full: a Service that waits for room claims only the frontends that it already has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claims {
    claims: BTreeSet<Claim>,
    by_service: BTreeMap<ObjectName, Box<[Claim]>>,
}

type Claim = (ServiceKey, Strength, ServicePortName);

/// How strong a claim is, by the kind of the frontend: a smaller number wins. A cluster IP was allocated to one
/// Service, so another Service cannot take it by listing it as an external IP.
type Strength = u8;

const fn strength(kind: FrontendKind) -> Strength {
    match kind {
        FrontendKind::ClusterIp => 0,
        FrontendKind::LoadBalancer => 1,
        FrontendKind::ExternalIp => 2,
        FrontendKind::NodePort => 3,
    }
}

impl Claims {
    /// Replaces the claims of a Service; returns other Services that may have gained or lost a frontend.
    pub(crate) fn set(&mut self, service: &ObjectName, ports: &[Port]) -> BTreeSet<ObjectName> {
        self.replace(service, of_ports(ports))
    }

    /// Drops the claims of a Service, except the claims of frontends for which `stays` returns true; returns other
    /// Services that may have gained a frontend.
    pub(crate) fn retain(
        &mut self,
        service: &ObjectName,
        stays: impl Fn(&ServiceKey) -> bool,
    ) -> BTreeSet<ObjectName> {
        let claims = self.by_service.get(service).map_or(&[][..], |claims| claims);
        let left = claims.iter().filter(|(key, ..)| stays(key)).cloned().collect();
        self.replace(service, left)
    }

    fn replace(&mut self, service: &ObjectName, after: Vec<Claim>) -> BTreeSet<ObjectName> {
        let before = self.by_service.remove(service).unwrap_or_default();
        let gone: Vec<&Claim> = before.iter().filter(|claim| after.binary_search(claim).is_err()).collect();
        let new: Vec<&Claim> = after.iter().filter(|claim| before.binary_search(claim).is_err()).collect();
        gone.iter().for_each(|claim| {
            self.claims.remove(claim);
        });
        self.claims.extend(new.iter().copied().cloned());
        let changed = gone.into_iter().chain(new).map(|(key, ..)| *key);
        let others = changed.flat_map(|key| self.claimants(key)).map(|name| &name.service);
        let others = others.filter(|other| *other != service).cloned().collect();
        if !after.is_empty() {
            self.by_service.insert(service.clone(), after.into());
        }
        others
    }

    /// The service port that owns the frontend; `None` if none claims it.
    pub(crate) fn owner(&self, key: ServiceKey) -> Option<&ServicePortName> {
        self.claimants(key).next()
    }

    fn claimants(&self, key: ServiceKey) -> impl Iterator<Item = &ServicePortName> {
        let service = ObjectName { namespace: Arc::default(), name: Arc::default() };
        let first = (key, 0, ServicePortName { service, port: Arc::default(), protocol: Protocol::Tcp });
        self.claims.range(first..).take_while(move |(claimed, ..)| *claimed == key).map(|(.., name)| name)
    }
}

fn of_ports(ports: &[Port]) -> Vec<Claim> {
    let of_port = |port: &Port| {
        let claim = |f: &Frontend| (f.key, strength(f.kind), port.labels.name.clone());
        port.frontends.iter().map(claim).collect::<Vec<_>>()
    };
    let mut claims: Vec<Claim> = ports.iter().flat_map(of_port).collect();
    claims.sort_unstable();
    claims.dedup();
    claims
}
