//! Who wants which frontend, and who has it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use lb_common::ServiceKey;

use crate::{
    desired::Port,
    model::{ObjectName, Protocol, ServicePortName},
};

/// Every frontend that some service port claims. The smallest name owns it, whoever came first, so that any order
/// of events gives the same owner.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claims {
    claims: BTreeSet<Claim>,
    by_service: BTreeMap<ObjectName, Box<[Claim]>>,
}

type Claim = (ServiceKey, ServicePortName);

impl Claims {
    /// Replaces the claims of a Service; the other Services whose frontends may have another owner now.
    pub(crate) fn set(&mut self, service: &ObjectName, ports: &[Port]) -> BTreeSet<ObjectName> {
        let after = of_ports(ports);
        let before = self.by_service.remove(service).unwrap_or_default();
        let gone: Vec<&Claim> = before.iter().filter(|claim| after.binary_search(claim).is_err()).collect();
        let new: Vec<&Claim> = after.iter().filter(|claim| before.binary_search(claim).is_err()).collect();
        gone.iter().for_each(|claim| {
            self.claims.remove(claim);
        });
        self.claims.extend(new.iter().copied().cloned());
        let changed = gone.into_iter().chain(new).map(|(key, _)| *key);
        let others = changed.flat_map(|key| self.claimants(key)).map(|name| &name.service);
        let others = others.filter(|other| *other != service).cloned().collect();
        if !after.is_empty() {
            self.by_service.insert(service.clone(), after.into());
        }
        others
    }

    /// The service port that has the frontend.
    pub(crate) fn owner(&self, key: ServiceKey) -> Option<&ServicePortName> {
        self.claimants(key).next()
    }

    fn claimants(&self, key: ServiceKey) -> impl Iterator<Item = &ServicePortName> {
        let service = ObjectName { namespace: Arc::default(), name: Arc::default() };
        let first = (key, ServicePortName { service, port: Arc::default(), protocol: Protocol::Tcp });
        self.claims.range(first..).take_while(move |(claimed, _)| *claimed == key).map(|(_, name)| name)
    }
}

fn of_ports(ports: &[Port]) -> Vec<Claim> {
    let frontends =
        |port: &Port| port.groups.iter().flat_map(|g| &g.frontends).map(|f| f.key).collect::<Vec<_>>();
    let mut claims: Vec<Claim> = ports
        .iter()
        .flat_map(|port| frontends(port).into_iter().map(|key| (key, port.labels.name.clone())))
        .collect();
    claims.sort_unstable();
    claims.dedup();
    claims
}
