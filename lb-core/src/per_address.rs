//! Values of IP addresses for the maps `VIPS` and `ENDPOINT_NAMES`. Several Services may set the value of one address.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
};

use crate::{compact, model::ObjectName};

/// The value of each address, as Services set it. A map holds one value for an address. If Services set different
/// values for an address (for example, for pods that share their node's address), the map holds the greatest of these
/// values, so that the order of events does not matter.
#[derive(Clone, Debug)]
pub(crate) struct PerAddress<V> {
    claims: BTreeMap<IpAddr, Claims<V>>,
    by_service: BTreeMap<ObjectName, Box<[(IpAddr, V)]>>,
    /// Addresses whose value may have changed.
    dirty: BTreeSet<IpAddr>,
    /// Whether addresses that are in the map, but that no Service sets, count as dirty.
    unclaimed_are_dirty: bool,
    /// Whether [`Self::changes`] currently keeps addresses that no Service sets.
    keeps_unclaimed: bool,
    /// Addresses that the last plan changes; empty once the plan was applied or has failed.
    in_flight: Vec<IpAddr>,
}

/// The different values that Services set for one address; usually one.
#[derive(Clone, Debug)]
enum Claims<V> {
    One(Claim<V>),
    #[expect(clippy::box_collection, reason = "a Vec would make the entry of every address larger")]
    Several(Box<Vec<Claim<V>>>),
}

/// A value, and the number of Services that set it.
#[derive(Clone, Debug)]
struct Claim<V> {
    value: V,
    count: u32,
}

impl<V: Clone + Ord> Claims<V> {
    fn all(&self) -> &[Claim<V>] {
        match self {
            Self::One(claim) => std::slice::from_ref(claim),
            Self::Several(claims) => claims,
        }
    }

    /// Adds the claim of a Service; returns whether the value is new.
    fn add(&mut self, value: &V) -> bool {
        let claims = match self {
            Self::One(claim) => std::slice::from_mut(claim),
            Self::Several(claims) => claims,
        };
        if let Some(claim) = claims.iter_mut().find(|claim| claim.value == *value) {
            claim.count += 1;
            return false;
        }
        let new = Claim { value: value.clone(), count: 1 };
        match self {
            Self::One(claim) => *self = Self::Several(Box::new(vec![claim.clone(), new])),
            Self::Several(claims) => claims.push(new),
        }
        true
    }

    /// Removes the claim of a Service; returns whether no Service sets the value any more.
    fn remove(&mut self, value: &V) -> bool {
        let claims = match self {
            Self::One(claim) => std::slice::from_mut(claim),
            Self::Several(claims) => claims,
        };
        let Some(index) = claims.iter().position(|claim| claim.value == *value) else { return false };
        claims[index].count -= 1;
        if claims[index].count > 0 {
            return false;
        }
        match self {
            Self::One(_) => *self = Self::Several(Box::default()),
            Self::Several(claims) => {
                claims.swap_remove(index);
                if claims.len() == 1
                    && let Some(last) = claims.pop()
                {
                    *self = Self::One(last);
                }
            }
        }
        true
    }
}

impl<V> Default for PerAddress<V> {
    fn default() -> Self {
        Self {
            claims: BTreeMap::new(),
            by_service: BTreeMap::new(),
            dirty: BTreeSet::new(),
            unclaimed_are_dirty: false,
            keeps_unclaimed: false,
            in_flight: Vec::new(),
        }
    }
}

impl<V: Clone + Ord> PerAddress<V> {
    /// Replaces the values that a Service sets: `after` has each address once, in ascending order.
    pub(crate) fn set(&mut self, service: &ObjectName, after: Vec<(IpAddr, V)>) {
        if self.of(service) == after {
            return;
        }
        let after: Box<[(IpAddr, V)]> = after.into();
        let before = self.by_service.remove(service).unwrap_or_default();
        for (address, value) in &after {
            self.add(*address, value);
        }
        for (address, value) in &before {
            self.remove(*address, value);
        }
        if !after.is_empty() {
            self.by_service.insert(service.clone(), after);
        }
    }

    /// The values that a Service sets: each address once, in ascending order.
    pub(crate) fn of(&self, service: &ObjectName) -> &[(IpAddr, V)] {
        self.by_service.get(service).map_or(&[], |values| values)
    }

    /// The value that the map should have for an address; `None` for no entry.
    pub(crate) fn wanted(&self, address: IpAddr) -> Option<&V> {
        self.claims.get(&address)?.all().iter().map(|claim| &claim.value).max()
    }

    /// Sets whether [`Self::changes`] keeps the entries of addresses that no Service claims.
    pub(crate) const fn keep_unclaimed(&mut self, keep: bool) {
        self.keeps_unclaimed = keep;
    }

    /// How many addresses the map, whose content is `known`, will have once [`Self::changes`] is applied.
    pub(crate) fn size_after_changes(&self, known: &BTreeMap<IpAddr, V>) -> usize {
        let is_wanted = |address: &&IpAddr| self.claims.contains_key(address);
        let new = self.dirty.iter().filter(is_wanted).filter(|address| !known.contains_key(address)).count();
        let gone = if self.keeps_unclaimed {
            0
        } else if self.unclaimed_are_dirty {
            known.keys().filter(|address| !is_wanted(address)).count()
        } else {
            let gone = self.dirty.iter().filter(|address| !is_wanted(address));
            gone.filter(|address| known.contains_key(address)).count()
        };
        known.len() + new - gone
    }

    /// How many addresses [`Self::set`] with these values would add to the map, and how many it would remove.
    pub(crate) fn growth(
        &self,
        service: &ObjectName,
        after: &[(IpAddr, V)],
        known: &BTreeMap<IpAddr, V>,
    ) -> (usize, usize) {
        let before = self.of(service);
        let has = |all: &[(IpAddr, V)], address: &IpAddr| all.iter().any(|(other, _)| other == address);
        let is_dirty = |address: &IpAddr| self.unclaimed_are_dirty || self.dirty.contains(address);
        let stays =
            |address: &IpAddr| known.contains_key(address) && (self.keeps_unclaimed || !is_dirty(address));
        let is_new = |address: &IpAddr| !self.claims.contains_key(address) && !stays(address);
        let has_one_claim = |address: &IpAddr| matches!(self.claims.get(address), Some(Claims::One(claim)) if claim.count == 1);
        let new = after.iter().filter(|(address, _)| is_new(address)).count();
        let is_gone =
            |address: &IpAddr| !self.keeps_unclaimed && !has(after, address) && has_one_claim(address);
        (new, before.iter().filter(|(address, _)| is_gone(address)).count())
    }

    /// Number of addresses that Services set.
    pub(crate) fn len(&self) -> usize {
        self.claims.len()
    }

    /// Frees memory that is allocated but unused.
    pub(crate) fn compact(&mut self) {
        compact::map(&mut self.claims);
        compact::map(&mut self.by_service);
    }

    /// Makes [`Self::changes`] remove every address that no Service sets, the next time that it does not keep such
    /// addresses ([`Self::keep_unclaimed`]).
    pub(crate) const fn remove_unclaimed(&mut self) {
        self.unclaimed_are_dirty = true;
    }

    /// Whether [`Self::changes`] will remove every address that no Service sets, now or in a later part of the plan.
    pub(crate) const fn removes_unclaimed(&self) -> bool {
        self.unclaimed_are_dirty
    }

    /// Whether [`Self::changes`] may return changes.
    pub(crate) fn is_dirty(&self) -> bool {
        self.unclaimed_are_dirty || !self.dirty.is_empty()
    }

    /// The changes that turn `known`, the map's content, into the wanted values. Computed only for addresses whose
    /// value may have changed; `None` removes an address.
    pub(crate) fn changes(
        &mut self,
        known: &BTreeMap<IpAddr, V>,
    ) -> impl Iterator<Item = (IpAddr, Option<V>)> {
        let is_claimed = |address: &IpAddr| self.claims.contains_key(address);
        let mut due = std::mem::take(&mut self.dirty);
        if self.keeps_unclaimed {
            self.dirty = due.extract_if(.., |address| !is_claimed(address)).collect();
        } else if std::mem::take(&mut self.unclaimed_are_dirty) {
            due.extend(known.keys().filter(|address| !is_claimed(address)));
        }
        self.in_flight =
            due.into_iter().filter(|address| self.wanted(*address) != known.get(address)).collect();
        self.in_flight.iter().map(|address| (*address, self.wanted(*address).cloned()))
    }

    /// Lets [`Self::changes`] skip the addresses for which `known`, the map's content, has the wanted value.
    pub(crate) fn skip_unchanged(&mut self, known: &BTreeMap<IpAddr, V>) {
        let dirty = std::mem::take(&mut self.dirty);
        self.dirty =
            dirty.into_iter().filter(|address| self.wanted(*address) != known.get(address)).collect();
    }

    /// Records that all changes are in the map.
    pub(crate) fn applied(&mut self) {
        self.in_flight = Vec::new();
    }

    /// Records that some changes have failed: the next call of [`Self::changes`] returns again the changes that `known`
    /// lacks.
    pub(crate) fn failed(&mut self) {
        self.dirty.extend(std::mem::take(&mut self.in_flight));
    }

    fn add(&mut self, address: IpAddr, value: &V) {
        let is_new = match self.claims.entry(address) {
            Entry::Vacant(entry) => {
                entry.insert(Claims::One(Claim { value: value.clone(), count: 1 }));
                true
            }
            Entry::Occupied(mut entry) => entry.get_mut().add(value),
        };
        if is_new {
            self.dirty.insert(address);
        }
    }

    fn remove(&mut self, address: IpAddr, value: &V) {
        let Entry::Occupied(mut entry) = self.claims.entry(address) else { return };
        let gone = entry.get_mut().remove(value);
        if entry.get().all().is_empty() {
            entry.remove();
        }
        if gone {
            self.dirty.insert(address);
        }
    }
}

/// The value for an address, among values in ascending order of their addresses.
pub(crate) fn find<V>(values: &[(IpAddr, V)], address: IpAddr) -> Option<&V> {
    let index = values.binary_search_by_key(&address, |(address, _)| *address).ok()?;
    Some(&values[index].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> ObjectName {
        ObjectName::new("ns", name)
    }

    fn at(last: u8, value: &str) -> (IpAddr, String) {
        ([10, 0, 0, last].into(), value.to_owned())
    }

    #[test]
    fn address_keeps_its_value_until_its_last_service_is_removed() {
        let (address, value) = at(1, "a");
        let mut all = PerAddress::default();
        all.set(&service("x"), vec![at(1, "a")]);
        assert!(all.changes(&BTreeMap::new()).eq([(address, Some(value.clone()))]));
        all.applied();
        let known = BTreeMap::from([(address, value.clone())]);
        all.set(&service("y"), vec![at(1, "a")]);
        assert!(!all.is_dirty());
        all.set(&service("x"), Vec::new());
        assert!(!all.is_dirty());
        assert_eq!(all.wanted(address), Some(&value));
        all.set(&service("y"), Vec::new());
        assert!(all.is_dirty());
        assert!(all.changes(&known).eq([(address, None)]));
        assert!(all.claims.is_empty() && all.by_service.is_empty());
    }

    #[test]
    fn different_values_of_one_address_have_one_winner_in_any_order() {
        let (address, greatest) = at(1, "b");
        for order in [["a", "b"], ["b", "a"]] {
            let mut all = PerAddress::default();
            order.iter().for_each(|name| all.set(&service(name), vec![at(1, name)]));
            assert_eq!(all.wanted(address), Some(&greatest));
        }
    }

    #[test]
    fn an_address_falls_back_to_the_value_that_is_left() {
        let (address, value) = at(1, "a");
        let mut all = PerAddress::default();
        for (name, value) in [("x", "a"), ("y", "b"), ("z", "c")] {
            all.set(&service(name), vec![at(1, value)]);
        }
        all.set(&service("z"), Vec::new());
        all.set(&service("y"), Vec::new());
        assert_eq!(all.wanted(address), Some(&value));
        all.set(&service("x"), Vec::new());
        assert!(all.wanted(address).is_none() && all.claims.is_empty());
    }

    #[test]
    fn unapplied_changes_are_reported_again() {
        let (address, value) = at(1, "a");
        let mut all = PerAddress::default();
        all.set(&service("x"), vec![at(1, "a"), at(2, "a")]);
        assert_eq!(all.changes(&BTreeMap::new()).count(), 2);
        all.failed();
        let known = BTreeMap::from([(address, value)]);
        assert!(all.changes(&known).eq([(at(2, "").0, Some("a".to_owned()))]));
    }
}
