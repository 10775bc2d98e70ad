//! The controller of a cluster: keeps `status.loadBalancer.ingress` of Services in line with the pools.
//!
//! The Services are the source of truth. [`Controller::pass`] first takes over the addresses that Services have, also
//! those that another controller gave, and only then assigns new addresses, so that neither a restart nor a new leader
//! changes the addresses of a Service. The pass returns writes. Each write names the version of the Service that it
//! replaces; if a write fails, the next pass computes it again from the newest version.

mod conflicts;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use self::conflicts::{Conflict, Conflicts};
use super::{
    AddressError, AddressRange, AddressRequest, Labels, LoadBalancers, Namespaces, Pool, PoolError,
    PoolUsage, Trouble, Withdrawal,
};
use crate::{api, convert::ConvertError, model::ObjectName};

/// Annotation in which the controller lists the addresses that it has given to a Service, separated by commas. With
/// this list, the controller recognises its addresses even after their pool is gone.
pub const GIVEN: &str = "lb.dev/given-addresses";

/// The controller's state: pools, and the load balancer Services of the cluster with their addresses.
#[derive(Debug, Default)]
pub struct Controller {
    /// The `loadBalancerClass` of the Services that get addresses; `None` for Services without a class.
    class: Option<String>,
    balancers: LoadBalancers,
    services: BTreeMap<ObjectName, Known>,
    /// The pools, each with its `metadata.creationTimestamp`.
    pools: BTreeMap<ObjectName, (Option<String>, Pool)>,
    unused_pools: Vec<PoolError>,
    namespaces: Namespaces,
    /// Networks of cluster IPs and pods, which no pool may overlap.
    reserved: Vec<AddressRange>,
    pools_changed: bool,
    /// The arguments of [`Controller::set_reassign`]: whether Services lose addresses that the pools no longer allow,
    /// and whether they may lose them now.
    reassign: (bool, bool),
    /// Services that have changed since the last pass, or whose state must be computed again.
    changed: BTreeSet<ObjectName>,
    /// The value of [`LoadBalancers::changes`] when the waiting Services last repeated their requests.
    asked_at: u64,
    /// The time of [`Controller::set_time`].
    now: Duration,
    conflicts: Conflicts,
}

/// A Service, and the controller's state for it.
#[derive(Debug)]
struct Known {
    seen: Seen,
    /// The Service's addresses before the last write. If a watch still delivers a version of the Service with these
    /// addresses, that version is out of date.
    replaced: Option<Vec<IpAddr>>,
    refused: Option<AddressError>,
    /// The problem with the Service's addresses that an Event has reported; `None` if the last pass for this Service
    /// found no problem.
    told: Option<String>,
}

/// What the controller reads from a version of a Service.
#[derive(Debug)]
struct Seen {
    version: String,
    uid: String,
    request: Result<Option<AddressRequest>, ConvertError>,
    /// Whether the Service is of the type LoadBalancer, of whatever class.
    is_load_balancer: bool,
    /// The IP addresses in `status.loadBalancer.ingress`.
    has: Vec<IpAddr>,
    /// Whether `status.loadBalancer.ingress` has no items. (If its items have only host names, `has` is empty but this
    /// is false.)
    is_bare: bool,
    /// The addresses in the annotation [`GIVEN`]; `None` without the annotation.
    given: Option<Vec<IpAddr>>,
}

/// How the controller treats a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The controller gives addresses to the Service.
    Serves,
    /// The Service's request is invalid, so the Service keeps the addresses that it has.
    Invalid,
    /// The Service is no longer of type LoadBalancer, so the controller takes back the addresses that it gave.
    Leaves,
    /// The controller leaves the Service alone, because the Service is not of type LoadBalancer, has another class, or
    /// has addresses of another controller.
    Foreign,
}

/// A write of a Service's addresses, which the API server accepts only if the Service still has `version`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Name of the Service to write.
    pub service: ObjectName,
    /// `metadata.resourceVersion` of the version of the Service that the write replaces.
    pub version: String,
    /// The addresses to write to `status.loadBalancer.ingress`; `None` to leave that unchanged.
    pub ingress: Option<Vec<IpAddr>>,
    /// The value to write to the annotation [`GIVEN`]; `None` to remove the annotation.
    pub given: Option<String>,
    /// The Events to emit once the write has succeeded.
    pub notices: Vec<Notice>,
}

/// A Kubernetes Event about a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Name of the Service that the Event is about.
    pub service: ObjectName,
    /// `metadata.uid` of the Service.
    pub uid: String,
    /// Whether the Event's type is Warning instead of Normal.
    pub is_warning: bool,
    /// The Event's `reason`, in CamelCase.
    pub reason: &'static str,
    /// The Event's `note`, a text for people.
    pub note: String,
}

/// The result of a [`Controller::pass`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The Services to write.
    pub writes: Vec<Write>,
    /// Events to emit now, independent of writes.
    pub notices: Vec<Notice>,
}

impl Controller {
    /// Creates a controller without objects. The controller serves the Services of this class or, with `None`, the
    /// Services without a class.
    pub fn new(class: Option<&str>) -> Self {
        Self { class: class.map(str::to_owned), pools_changed: true, ..Self::default() }
    }

    /// Updates a Service; `None` means that it was deleted.
    pub fn set_service(&mut self, name: ObjectName, service: Option<&api::Service>) {
        let Some(service) = service else {
            self.services.remove(&name);
            self.balancers.release(&name);
            self.conflicts.remove(&name);
            return;
        };
        let seen = Seen::new(service, self.class.as_deref());
        self.changed.insert(name.clone());
        match self.services.get_mut(&name) {
            // The uid shows that this is the same Service, not a new Service with the name of a deleted one, so only
            // `seen` changes.
            Some(known) if known.seen.uid == seen.uid => known.seen = seen,
            Some(_) | None => {
                self.balancers.release(&name);
                self.conflicts.remove(&name);
                self.services.insert(name, Known { seen, replaced: None, refused: None, told: None });
            }
        }
    }

    /// Updates a pool, given with its `metadata.creationTimestamp`; `None` means that it was deleted.
    pub fn set_pool(&mut self, name: ObjectName, pool: Option<(Option<String>, Pool)>) {
        match pool {
            Some(pool) => self.pools.insert(name, pool),
            None => self.pools.remove(&name),
        };
        self.pools_changed = true;
    }

    /// Updates the labels of a namespace; `None` means that it was deleted.
    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) {
        match labels {
            Some(labels) => self.namespaces.0.insert(name.to_owned(), labels),
            None => self.namespaces.0.remove(name),
        };
        self.pools_changed = true;
    }

    /// Sets the networks of cluster IPs and pods, which no pool may overlap.
    pub fn set_reserved(&mut self, reserved: Vec<AddressRange>) {
        self.pools_changed |= self.reserved != reserved;
        self.reserved = reserved;
    }

    /// Sets the addresses of nodes, each with the name of its node ([`LoadBalancers::set_nodes`]).
    pub fn set_nodes(&mut self, nodes: BTreeMap<IpAddr, Arc<str>>) {
        self.balancers.set_nodes(nodes);
    }

    /// Sets whether Services lose addresses that the pools no longer allow, and whether they may lose them now
    /// ([`LoadBalancers::set_reassign`]).
    pub fn set_reassign(&mut self, reassign: bool, may_reassign: bool) {
        let now = (reassign, may_reassign);
        self.pools_changed |= self.reassign != now;
        self.reassign = now;
    }

    /// Sets the time, by a monotonic clock. A conflict between Services is listed in [`conditions`](Self::conditions)
    /// for 10 minutes after a pass last found it.
    pub fn set_time(&mut self, now: Duration) {
        self.now = now;
        self.conflicts.expire(now);
    }

    /// The earliest time at which [`set_time`](Self::set_time) removes a condition; `None` if there is no condition to
    /// remove.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.conflicts.next_expiry()
    }

    /// Whether there is any pool, even one that cannot be used.
    pub fn has_pools(&self) -> bool {
        !self.pools.is_empty()
    }

    /// Computes the writes and Events that are due. Must be called only when all pools and Services are known, and all
    /// namespaces that the agent may list.
    pub fn pass(&mut self) -> Pass {
        self.use_pools();
        let mut due = std::mem::take(&mut self.changed);
        due.iter().for_each(|name| self.take_over(name));
        let mut asking = due.clone();
        loop {
            self.assign(&asking);
            if self.asked_at == self.balancers.changes() {
                break;
            }
            self.asked_at = self.balancers.changes();
            asking = self
                .services
                .iter()
                .filter(|(name, known)| self.repeats_request(name, known))
                .map(|(name, _)| name.clone())
                .collect();
            due.extend(asking.iter().cloned());
        }
        let mut pass = Pass::default();
        for name in &due {
            self.conclude(name, &mut pass);
        }
        let (now, later) = self.in_order(pass.writes);
        later.iter().for_each(|write| self.failed(&write.service));
        Pass { writes: now, ..pass }
    }

    /// Splits the writes into those to send now, and those to send once the former have succeeded. If an address goes
    /// from one Service to another, the write that takes the address away is sent first: if it were sent later and
    /// failed, both Services would have the address. If Services exchange addresses, their writes are all sent now,
    /// together with the writes that wait for one of these writes.
    fn in_order(&self, writes: Vec<Write>) -> (Vec<Write>, Vec<Write>) {
        let has = |service: &ObjectName| self.services.get(service).map_or(&[][..], |known| &known.seen.has);
        let mut leavers: BTreeMap<IpAddr, Vec<ObjectName>> = BTreeMap::new();
        for Write { service, ingress, .. } in &writes {
            let Some(ingress) = ingress else { continue };
            for ip in has(service).iter().filter(|ip| !ingress.contains(ip)) {
                leavers.entry(*ip).or_default().push(service.clone());
            }
        }
        let waits_for = |write: &Write| {
            let new = write.ingress.iter().flatten().filter(|ip| !has(&write.service).contains(ip));
            let others: BTreeSet<ObjectName> =
                new.filter_map(|ip| leavers.get(ip)).flatten().cloned().collect();
            (!others.is_empty()).then(|| (write.service.clone(), others))
        };
        let waiting: BTreeMap<ObjectName, BTreeSet<ObjectName>> =
            writes.iter().filter_map(waits_for).collect();
        // The Services whose writes wait only for writes that are sent before them.
        let mut later: BTreeSet<ObjectName> = BTreeSet::new();
        let is_ready = |others: &BTreeSet<ObjectName>, later: &BTreeSet<ObjectName>| {
            others.iter().all(|other| later.contains(other) || !waiting.contains_key(other))
        };
        while let Some((next, _)) =
            waiting.iter().find(|(service, others)| !later.contains(*service) && is_ready(others, &later))
        {
            later.insert(next.clone());
        }
        writes.into_iter().partition(|write| !later.contains(&write.service))
    }

    /// Records that a write has succeeded.
    pub fn written(&mut self, write: &Write) {
        let Some(known) = self.services.get_mut(&write.service) else { return };
        known.seen.given = write.given.as_deref().map(addresses_of);
        if let Some(ingress) = &write.ingress {
            known.replaced = Some(std::mem::replace(&mut known.seen.has, ingress.clone()));
            known.seen.is_bare = ingress.is_empty();
        }
    }

    /// Records that a write was not sent, has failed or has had no answer, so that the next pass writes the same
    /// addresses again. Because the write may nevertheless have succeeded, the controller reserves the addresses for
    /// the Service as long as the status of the Service is empty or the same as before the write.
    pub fn failed(&mut self, service: &ObjectName) {
        if let Some(known) = self.services.get_mut(service) {
            known.replaced = Some(known.seen.has.clone());
            self.changed.insert(service.clone());
        }
    }

    /// The problems of pools and Services, as sentences for `lb-agent status`.
    pub fn conditions(&self) -> Vec<String> {
        let pools = self.unused_pools.iter().map(ToString::to_string);
        let with_nodes = self.balancers.pools_with_nodes();
        let pools = pools.chain(with_nodes.iter().map(ToString::to_string));
        let services = self.services.iter().filter_map(|(name, known)| {
            let trouble = known.told.as_ref()?;
            Some(format!("Service {name}: {trouble}"))
        });
        pools.chain(services).chain(self.conflicts.texts()).collect()
    }

    /// How many addresses of each usable pool are in use.
    pub fn usage(&self) -> Vec<PoolUsage> {
        self.balancers.usage()
    }

    /// If the pools or their settings have changed, passes the pools to [`LoadBalancers`], and marks every Service as
    /// changed. Older pools come first, so that they stay usable if a new pool overlaps them.
    fn use_pools(&mut self) {
        if !std::mem::take(&mut self.pools_changed) {
            return;
        }
        let mut pools: Vec<_> =
            self.pools.iter().map(|(name, (created, pool))| (created, name, pool)).collect();
        pools.sort_by_key(|(created, name, _)| (*created, *name));
        let pools = pools.into_iter().map(|(_, _, pool)| pool.clone()).collect();
        let (reassign, may_reassign) = self.reassign;
        self.balancers.set_reassign(reassign, may_reassign);
        self.balancers.set_namespaces(self.namespaces.clone());
        let unused = self.balancers.set_pools(pools, &self.reserved);
        self.unused_pools = unused.into_iter().map(|(_, error)| error).collect();
        self.changed.extend(self.services.keys().cloned());
    }

    fn role(&self, known: &Known) -> Role {
        let Seen { request, is_load_balancer, has, is_bare, given, .. } = &known.seen;
        let is_ours = |ip: &IpAddr| self.is_ours(known, *ip);
        match request {
            // A Service of another class may have its addresses from the controller of that class. (The API server does
            // not let a Service of type LoadBalancer change its class.)
            Ok(None) if given.is_some() && !is_load_balancer => Role::Leaves,
            Ok(None) => Role::Foreign,
            // If this controller has a class, no other controller serves the Service. If it has none, addresses that it
            // did not give and that are in no pool come from a cloud's controller.
            Ok(Some(_)) | Err(_) if self.class.is_none() && !is_bare && !has.iter().any(is_ours) => {
                Role::Foreign
            }
            Ok(Some(_)) => Role::Serves,
            Err(_) => Role::Invalid,
        }
    }

    /// Whether this controller gave the address to the Service, or a pool contains the address.
    fn is_ours(&self, known: &Known, ip: IpAddr) -> bool {
        known.seen.is_given(ip) || self.balancers.pool_of(ip).is_some()
    }

    /// Adopts the addresses in the newest version of a Service, unless the controller has given the Service newer
    /// addresses.
    fn take_over(&mut self, name: &ObjectName) {
        let Some(known) = self.services.get(name) else { return };
        let has = &known.seen.has;
        let knows = self.balancers.addresses(name);
        let is_served = matches!(self.role(known), Role::Serves | Role::Invalid);
        let adopted: Vec<IpAddr> = if has.is_empty() && is_served {
            // The version is stale, or something has emptied the status. The Service gets what this controller has
            // given it, and no address of another controller.
            knows.iter().copied().filter(|ip| self.is_ours(known, *ip)).collect()
        } else if is_served && known.replaced.as_ref() == Some(has) {
            return;
        } else {
            has.clone()
        };
        if adopted == knows {
            return;
        }
        if adopted.is_empty() {
            self.balancers.release(name);
        } else {
            self.balancers.remember(name, &adopted);
        }
    }

    fn assign(&mut self, asking: &BTreeSet<ObjectName>) {
        // Without pools the cluster does not use this controller.
        if self.balancers.pools().is_empty() {
            return;
        }
        let known = asking.iter().filter_map(|name| self.services.get(name));
        let serves = known.filter(|known| self.role(known) == Role::Serves);
        let requests: Vec<AddressRequest> =
            serves.filter_map(|known| known.seen.request.as_ref().ok()?.clone()).collect();
        let errors = self.balancers.assign_all(&requests);
        for (request, error) in requests.iter().zip(errors) {
            if let Some(known) = self.services.get_mut(&request.service) {
                known.refused = error;
            }
        }
    }

    /// Whether a Service repeats its request when an address may have become free.
    fn repeats_request(&self, name: &ObjectName, known: &Known) -> bool {
        let request = known.seen.request.as_ref().ok().and_then(Option::as_ref);
        let lacks =
            request.is_some_and(|request| self.balancers.addresses(name).len() < request.families.len());
        (known.refused.is_some() || lacks) && self.role(known) == Role::Serves
    }

    /// Adds the write of a Service, and the Events about it, to the pass.
    fn conclude(&mut self, name: &ObjectName, pass: &mut Pass) {
        let Some(known) = self.services.get(name) else { return };
        match self.role(known) {
            Role::Serves => {
                pass.writes.extend(self.write(name, known));
                let conflicts = self.conflicts(name, known);
                pass.notices.extend(conflicts.iter().flat_map(|conflict| self.notices(conflict)));
                self.conflicts.found(conflicts, self.now);
            }
            Role::Leaves => pass.writes.push(leaving(name, known)),
            Role::Invalid | Role::Foreign => {}
        }
        let trouble = self.trouble(name, known);
        let (reason, note) = trouble.map(|(reason, text)| (reason, Some(text))).unwrap_or_default();
        let uid = known.seen.uid.clone();
        let Some(known) = self.services.get_mut(name) else { return };
        if note != known.told {
            known.told.clone_from(&note);
            let notice = |note| Notice { service: name.clone(), uid, is_warning: true, reason, note };
            pass.notices.extend(note.map(notice));
        }
    }

    /// The write that gives a Service its addresses; `None` if the Service already has them in its status and in the
    /// annotation [`GIVEN`].
    fn write(&self, name: &ObjectName, known: &Known) -> Option<Write> {
        let wanted = self.balancers.addresses(name);
        let Seen { version, uid, has, given, .. } = &known.seen;
        // A Service may have addresses that another controller gave it.
        let is_ours = |ip: &IpAddr| self.is_ours(known, *ip) || !has.contains(ip);
        let ours: Vec<IpAddr> = wanted.iter().copied().filter(is_ours).collect();
        if has == wanted && given.as_deref().unwrap_or_default() == ours {
            return None;
        }
        let text = |addresses: &[IpAddr], separator: &str| {
            addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
        };
        let all = text(wanted, " and ");
        let notice = |reason, note| Notice {
            service: name.clone(),
            uid: uid.clone(),
            is_warning: false,
            reason,
            note,
        };
        // The Event recorder merges Events of one reason and keeps the first note, so this note also has the new
        // addresses.
        let instead = if wanted.is_empty() { String::new() } else { format!("; now {all}") };
        let lost = self.withdrawn(name, known);
        let lost = lost.map(|(ip, why)| notice("ClearAssignment", format!("took {ip} away: {why}{instead}")));
        let is_new = wanted.iter().any(|ip| !has.contains(ip));
        let pool = wanted.first().and_then(|ip| self.balancers.pool_of(*ip)).filter(|_| is_new);
        let assigned = |pool: &Pool| format!("assigned {all} from pool {:?}", &*pool.name);
        let got = pool.map(|pool| notice("IPAllocated", assigned(pool)));
        Some(Write {
            service: name.clone(),
            version: version.clone(),
            ingress: (has != wanted).then(|| wanted.to_vec()),
            given: (!ours.is_empty()).then(|| text(&ours, ",")),
            notices: lost.chain(got).collect(),
        })
    }

    /// The addresses that a Service loses because the pools no longer allow them, with the reasons.
    fn withdrawn(&self, name: &ObjectName, known: &Known) -> impl Iterator<Item = (IpAddr, Withdrawal)> {
        let wanted = self.balancers.addresses(name);
        let lost = known.seen.has.iter().filter(move |ip| !wanted.contains(ip));
        let request = known.seen.request.as_ref().ok().and_then(Option::as_ref);
        lost.filter_map(move |ip| Some((*ip, self.balancers.withdrawal(request?, *ip)?)))
    }

    /// The conflicts in which a Service loses an address to another Service: both had the address before the pass, and
    /// may not share it.
    fn conflicts(&self, name: &ObjectName, known: &Known) -> Vec<Conflict> {
        let Ok(Some(request)) = &known.seen.request else { return Vec::new() };
        let wanted = self.balancers.addresses(name);
        let withdrawn: Vec<IpAddr> = self.withdrawn(name, known).map(|(ip, _)| ip).collect();
        let is_lost = |ip: &&IpAddr| !wanted.contains(ip) && !withdrawn.contains(ip);
        let with_keeper = |ip: &IpAddr| {
            let (keeper, _) = self.balancers.opponent(request, *ip)?;
            let had = self.services.get(keeper).is_some_and(|keeper| keeper.seen.has.contains(ip));
            had.then(|| Conflict { ip: *ip, keeper: keeper.clone(), loser: name.clone() })
        };
        known.seen.has.iter().filter(is_lost).filter_map(with_keeper).collect()
    }

    /// The Events about a conflict, one on each of the two Services.
    fn notices(&self, Conflict { ip, keeper, loser }: &Conflict) -> impl Iterator<Item = Notice> {
        let lost = format!(
            "{ip} is also an address of Service {keeper}, and the two cannot share it; this Service loses it"
        );
        let kept = format!("{ip} was also an address of Service {loser}; this Service keeps it");
        [(loser, lost), (keeper, kept)].into_iter().filter_map(|(service, note)| {
            let uid = self.services.get(service)?.seen.uid.clone();
            let (service, reason) = (service.clone(), "AddressConflict");
            Some(Notice { service, uid, is_warning: true, reason, note })
        })
    }

    /// The problem with a Service's addresses, as `reason` and `note` of an Event; `None` without a problem.
    fn trouble(&self, name: &ObjectName, known: &Known) -> Option<(&'static str, String)> {
        let trouble = match (self.role(known), &known.seen.request) {
            (Role::Serves, Ok(Some(request))) => self.balancers.trouble(request, known.refused.as_ref())?,
            (Role::Invalid, Err(error)) => {
                let (why, has) = (format!("{}: {}", error.field, error.why), self.balancers.addresses(name));
                Trouble::Refused { why, keeps: !has.is_empty() }
            }
            (Role::Serves | Role::Invalid | Role::Leaves | Role::Foreign, _) => return None,
        };
        Some((trouble.reason(), trouble.to_string()))
    }
}

impl Seen {
    fn new(service: &api::Service, class: Option<&str>) -> Self {
        let metadata = &service.metadata;
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
        Self {
            version: metadata.resource_version.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            request: AddressRequest::of(service, class),
            is_load_balancer: service.spec.as_ref().is_some_and(api::ServiceSpec::is_load_balancer),
            has: ingress.iter().filter_map(|ingress| ingress.ip.as_deref()?.parse().ok()).collect(),
            is_bare: ingress.is_empty(),
            given: given_addresses(metadata),
        }
    }

    /// Whether the controller gave the address to the Service, by the annotation [`GIVEN`].
    fn is_given(&self, ip: IpAddr) -> bool {
        self.given.as_ref().is_some_and(|given| given.contains(&ip))
    }
}

/// The write that removes the controller's addresses from a Service that the controller no longer serves.
fn leaving(name: &ObjectName, known: &Known) -> Write {
    let Seen { version, has, .. } = &known.seen;
    let rest: Vec<IpAddr> = has.iter().copied().filter(|ip| !known.seen.is_given(*ip)).collect();
    Write {
        service: name.clone(),
        version: version.clone(),
        ingress: (rest.len() < has.len()).then_some(rest),
        given: None,
        notices: Vec::new(),
    }
}

/// The addresses in the annotation [`GIVEN`]; `None` without the annotation.
pub(crate) fn given_addresses(metadata: &api::ObjectMeta) -> Option<Vec<IpAddr>> {
    metadata.annotation(GIVEN).map(addresses_of)
}

/// Parses a value of the annotation [`GIVEN`].
fn addresses_of(text: &str) -> Vec<IpAddr> {
    text.split(',').filter_map(|part| part.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests;
