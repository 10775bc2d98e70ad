//! What each address is called, counted over all Services that use it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{model::ObjectName, plan::EndpointLabels};

/// The labels of every address that is a backend of some Service. An address has one place in the kernel; where
/// Services say different things about it, as pods that share their node's address do, the greatest labels win, so
/// that any order of events gives the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddressLabels {
    claims: BTreeMap<IpAddr, Vec<Claim>>,
    by_service: BTreeMap<ObjectName, Box<[(IpAddr, EndpointLabels)]>>,
    dirty: BTreeSet<IpAddr>,
}

/// Labels and the number of Services that claim them.
#[derive(Clone, Debug)]
struct Claim {
    labels: EndpointLabels,
    count: u32,
}

impl AddressLabels {
    /// Replaces what a Service says: addresses in order, each once.
    pub(crate) fn set(&mut self, service: &ObjectName, after: Vec<(IpAddr, EndpointLabels)>) {
        let before = self.by_service.get(service).map_or(&[][..], |before| before);
        if before == after {
            return;
        }
        let before = self.by_service.remove(service).unwrap_or_default();
        for (address, labels) in &after {
            self.add(*address, labels);
        }
        for (address, labels) in &before {
            self.remove(*address, labels);
        }
        if !after.is_empty() {
            self.by_service.insert(service.clone(), after.into());
        }
    }

    /// The labels an address should have.
    pub(crate) fn wanted(&self, address: IpAddr) -> Option<&EndpointLabels> {
        self.claims.get(&address)?.iter().map(|claim| &claim.labels).max()
    }

    /// Asks for an address to be looked at.
    pub(crate) fn mark_dirty(&mut self, address: IpAddr) {
        self.dirty.insert(address);
    }

    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The addresses whose labels may have changed, each once.
    pub(crate) fn take_dirty(&mut self) -> BTreeSet<IpAddr> {
        std::mem::take(&mut self.dirty)
    }

    fn add(&mut self, address: IpAddr, labels: &EndpointLabels) {
        let claims = self.claims.entry(address).or_insert_with(|| Vec::with_capacity(1));
        match claims.iter_mut().find(|claim| claim.labels == *labels) {
            Some(claim) => claim.count += 1,
            None => {
                claims.push(Claim { labels: labels.clone(), count: 1 });
                self.dirty.insert(address);
            }
        }
    }

    fn remove(&mut self, address: IpAddr, labels: &EndpointLabels) {
        let Some(claims) = self.claims.get_mut(&address) else { return };
        let Some(index) = claims.iter().position(|claim| claim.labels == *labels) else { return };
        claims[index].count -= 1;
        if claims[index].count == 0 {
            claims.swap_remove(index);
            self.dirty.insert(address);
        }
        if claims.is_empty() {
            self.claims.remove(&address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> ObjectName {
        ObjectName::new("ns", name)
    }

    fn pod(last: u8, pod: &str) -> (IpAddr, EndpointLabels) {
        ([10, 0, 0, last].into(), EndpointLabels { pod: Some(pod.into()), ..EndpointLabels::default() })
    }

    #[test]
    fn an_address_is_labelled_until_the_last_service_lets_it_go() {
        let (address, labels) = pod(1, "a");
        let mut all = AddressLabels::default();
        all.set(&service("x"), vec![pod(1, "a")]);
        assert_eq!(all.take_dirty().len(), 1);
        all.set(&service("y"), vec![pod(1, "a")]);
        assert!(!all.is_dirty());
        all.set(&service("x"), Vec::new());
        assert!(!all.is_dirty());
        assert_eq!(all.wanted(address), Some(&labels));
        all.set(&service("y"), Vec::new());
        assert!(all.is_dirty());
        assert_eq!(all.wanted(address), None);
        assert!(all.claims.is_empty() && all.by_service.is_empty());
    }

    #[test]
    fn different_labels_of_one_address_have_one_winner_in_any_order() {
        let (address, greatest) = pod(1, "b");
        for order in [["a", "b"], ["b", "a"]] {
            let mut all = AddressLabels::default();
            order.iter().for_each(|name| all.set(&service(name), vec![pod(1, name)]));
            assert_eq!(all.wanted(address), Some(&greatest));
        }
    }
}
