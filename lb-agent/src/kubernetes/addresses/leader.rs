//! The work of the elected agent: it watches pools, Services, namespaces and Nodes, and writes the addresses of
//! Services.

use std::{
    collections::{BTreeMap, BTreeSet},
    future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::{StreamExt as _, stream};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
};
use lb_core::{
    api::IpAddressPool,
    load_balancer::{Controller, GIVEN, Write},
    model::ObjectName,
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use super::{
    AddressOptions, AddressReport, Term,
    kinds::{AnyNode, AnyService, Namespace, ReservedByNode},
    retry::Retries,
    update,
};
use crate::kubernetes::{
    client::KubernetesError,
    conditions::ServerConditions,
    events::Events,
    kind,
    watch::{Watch, at, next, replace},
};

/// Maximum number of writes to the API server that run at the same time.
const PARALLEL: usize = 8;

/// Runs a [`Leader`] during each term in which this agent is elected, forever.
pub(super) async fn serve(
    client: &Client,
    options: &AddressOptions,
    mut term: watch::Receiver<Option<Term>>,
    service_cidrs: watch::Receiver<Vec<IpNet>>,
    events: &Events,
    report: &watch::Sender<AddressReport>,
) -> Result<(), KubernetesError> {
    loop {
        wait_for_term(&mut term).await;
        let leader = Leader::new(client, options, term.clone(), service_cidrs.clone(), events, report);
        tokio::select! {
            result = leader.lead() => result?,
            () = wait_for_end(&mut term) => info!("this agent gives no addresses to load balancers any more"),
        }
        update(report, |report| {
            *report = AddressReport { leader: report.leader.take(), ..AddressReport::default() }
        });
    }
}

async fn wait_for_term(term: &mut watch::Receiver<Option<Term>>) {
    loop {
        let now = *term.borrow_and_update();
        match now {
            Some(now) if now.begin <= Instant::now() && Instant::now() < now.end => return,
            Some(now) if Instant::now() < now.begin => tokio::select! {
                () = sleep_until(now.begin) => {}
                _ = term.changed() => {}
            },
            Some(_) | None => changed(term).await,
        }
    }
}

async fn wait_for_end(term: &mut watch::Receiver<Option<Term>>) {
    loop {
        let now = *term.borrow_and_update();
        let Some(now) = now.filter(|term| Instant::now() < term.end) else { return };
        tokio::select! {
            () = sleep_until(now.end) => {}
            _ = term.changed() => {}
        }
    }
}

async fn changed(term: &mut watch::Receiver<Option<Term>>) {
    if term.changed().await.is_err() {
        future::pending::<()>().await;
    }
}

/// How long the pools must stay unchanged before Services lose addresses. If an administrator replaces pools, the agent
/// receives the changes one by one, and in between an address may be in no pool.
const QUIET: Duration = Duration::from_secs(5);

struct Leader<'a> {
    client: &'a Client,
    options: &'a AddressOptions,
    term: watch::Receiver<Option<Term>>,
    service_cidrs: watch::Receiver<Vec<IpNet>>,
    events: &'a Events,
    report: &'a watch::Sender<AddressReport>,
    controller: Controller,
    server: ServerConditions,
    pools: Watch<IpAddressPool>,
    /// The watch of Services; `None` until there is a pool.
    services: Option<Watch<AnyService>>,
    namespaces: Option<Watch<Namespace>>,
    /// The watch of Nodes, which name their addresses and the networks of their pods.
    nodes: Option<Watch<AnyNode>>,
    /// The addresses of each Node and of its pods.
    node_addresses: BTreeMap<ObjectName, ReservedByNode>,
    /// The zero of the controller's clock.
    start: Instant,
    /// When the pools will have been unchanged for [`QUIET`]; `None` if they have not changed for at least that time.
    quiet_at: Option<Instant>,
    /// The Services whose last write has failed or was put off.
    retries: Retries,
}

impl<'a> Leader<'a> {
    fn new(
        client: &'a Client,
        options: &'a AddressOptions,
        term: watch::Receiver<Option<Term>>,
        service_cidrs: watch::Receiver<Vec<IpNet>>,
        events: &'a Events,
        report: &'a watch::Sender<AddressReport>,
    ) -> Self {
        let pools = Watch::new(client.clone(), kind::all(), SystemTime::UNIX_EPOCH);
        let controller = Controller::new(options.class.as_deref());
        Self {
            client,
            options,
            term,
            service_cidrs,
            events,
            report,
            controller,
            server: ServerConditions::default(),
            pools,
            services: None,
            namespaces: None,
            nodes: None,
            node_addresses: BTreeMap::new(),
            start: Instant::now(),
            quiet_at: None,
            retries: Retries::default(),
        }
    }

    async fn lead(mut self) -> Result<(), KubernetesError> {
        const ENDED: KubernetesError = KubernetesError::Ended;
        self.reserve();
        loop {
            tokio::select! {
                changes = self.pools.next() => {
                    for (name, pool) in changes.ok_or(ENDED)? {
                        self.quiet_at = Some(Instant::now() + QUIET);
                        self.controller.set_pool(name, pool);
                    }
                    self.watch_services();
                }
                changes = next(&mut self.services) => {
                    for (name, service) in changes.ok_or(ENDED)? {
                        self.retries.service_changed(&name);
                        self.controller.set_service(name, service.as_deref());
                    }
                }
                changes = next(&mut self.namespaces) => {
                    for (name, labels) in changes.ok_or(ENDED)? {
                        self.controller.set_namespace(&name.name, labels);
                    }
                }
                changes = next(&mut self.nodes) => {
                    replace(&mut self.node_addresses, changes.ok_or(ENDED)?);
                    self.reserve();
                }
                Ok(()) = self.service_cidrs.changed() => self.reserve(),
                () = at(self.quiet_at) => self.quiet_at = None,
                () = at(self.retries.next_due()), if self.knows_all() => {}
                () = at(self.controller.next_expiry().map(|time| self.start + time)) => {}
            }
            self.controller.set_time(self.start.elapsed());
            if self.knows_all() {
                let may_reassign = self.quiet_at.is_none() && self.reads_all();
                self.controller.set_reassign(self.options.reassign, may_reassign);
                self.pass().await;
            }
            self.publish();
        }
    }

    /// Tells the controller the networks (cluster IPs, pods) that no pool may overlap, and the addresses of Nodes.
    fn reserve(&mut self) {
        let cidrs = self.service_cidrs.borrow_and_update().clone();
        let pods = self.node_addresses.values().flat_map(|node| &node.pods);
        let reserved = cidrs.iter().chain(&self.options.reserved).chain(pods);
        let reserved = reserved.map(|net| (*net).into()).collect();
        self.controller.set_reserved(reserved);
        let addresses = |(name, node): (&ObjectName, &ReservedByNode)| {
            let name = Arc::clone(&name.name);
            node.own.clone().into_iter().map(move |ip| (ip, Arc::clone(&name)))
        };
        self.controller.set_nodes(self.node_addresses.iter().flat_map(addresses).collect());
    }

    /// Begins to watch Services, namespaces and Nodes once there is a pool. Clusters without pools need no such
    /// watches.
    fn watch_services(&mut self) {
        if self.services.is_none() && self.controller.has_pools() {
            let beginning = SystemTime::UNIX_EPOCH;
            self.services = Some(Watch::new(self.client.clone(), kind::all(), beginning));
            self.namespaces = Some(Watch::new(self.client.clone(), kind::all(), beginning));
            self.nodes = Some(Watch::new(self.client.clone(), kind::all(), beginning));
        }
    }

    /// Whether the controller has all pools and Services, and the API server has listed, or has refused to list,
    /// namespaces and Nodes. An unreadable Service may have an address, so the controller assigns no address until
    /// every Service has been readable once.
    fn knows_all(&self) -> bool {
        let services =
            self.services.as_ref().is_some_and(|watch| watch.is_listed() && watch.unread().is_empty());
        let namespaces = self.namespaces.as_ref().is_some_and(Watch::is_settled);
        let nodes = self.nodes.as_ref().is_some_and(Watch::is_settled);
        self.pools.is_listed() && services && namespaces && nodes
    }

    /// Whether every pool and every namespace is known and valid. Otherwise Services keep addresses that no valid pool
    /// gives them: the address may be in an invalid pool, or a pool may select the namespace by labels that are not
    /// known yet.
    fn reads_all(&self) -> bool {
        let knows = |watch: &Watch<Namespace>| watch.is_listed() && watch.problems().next().is_none();
        self.pools.problems().next().is_none() && self.namespaces.as_ref().is_some_and(knows)
    }

    async fn pass(&mut self) {
        let pass = self.controller.pass();
        for notice in pass.notices {
            self.events.of_address(notice);
        }
        let now = Instant::now();
        let (due, later): (Vec<Write>, Vec<Write>) =
            pass.writes.into_iter().partition(|write| self.retries.is_due(&write.service, now));
        let due_services: BTreeSet<&ObjectName> = due.iter().map(|write| &write.service).collect();
        self.retries.forget_unwanted(|service| due_services.contains(service), now);
        later.iter().for_each(|write| self.controller.failed(&write.service));
        self.send_all(due).await;
    }

    async fn send_all(&mut self, writes: Vec<Write>) {
        let (client, term, limit) = (self.client, &self.term, self.options.timing.request);
        let sending = stream::iter(writes).map(|write| async move {
            let result = send(client, term, limit, &write).await;
            (write, result)
        });
        let mut written = sending.buffer_unordered(PARALLEL);
        let mut is_news = false;
        while let Some((write, result)) = written.next().await {
            match result {
                Ok(()) => {
                    self.controller.written(&write);
                    if self.retries.succeeded(&write.service) {
                        info!("the API server accepts the addresses of Services again");
                    }
                    write.notices.into_iter().for_each(|notice| self.events.of_address(notice));
                }
                Err(NotWritten::TermEnds) => {
                    self.controller.failed(&write.service);
                    self.retries.put_off(&write.service, Instant::now());
                }
                Err(NotWritten::Failed(why)) => {
                    debug!(service = %write.service, "cannot write the addresses of a Service: {why}");
                    self.controller.failed(&write.service);
                    is_news |= self.retries.failed(&write.service, why, Instant::now());
                }
            }
        }
        if is_news {
            self.retries.conditions().for_each(|condition| warn!("{condition}"));
        }
    }

    fn publish(&mut self) {
        let Self { pools, services, namespaces, nodes, .. } = self;
        let failures = [
            pools.failure(),
            services.as_ref().and_then(Watch::failure),
            namespaces.as_ref().and_then(Watch::failure),
            nodes.as_ref().and_then(Watch::failure),
        ];
        let problems = pools.problems().chain(services.iter().flat_map(Watch::problems));
        let mut conditions = self.server.update(failures.into_iter().flatten(), problems);
        conditions.extend(self.controller.conditions());
        conditions.extend(self.retries.conditions());
        let usage = self.controller.usage();
        update(self.report, |report| {
            (report.is_here, report.conditions, report.pools) = (true, conditions, usage);
        });
    }
}

/// Why a write has not succeeded.
enum NotWritten {
    /// The agent has not sent the write: the term may end before the write's time limit.
    TermEnds,
    /// The API server has rejected the write, or the request has failed; the text says why.
    Failed(String),
}

/// Writes one Service to the API server, unless the term may end before the write's time limit.
async fn send(
    client: &Client,
    term: &watch::Receiver<Option<Term>>,
    limit: Duration,
    write: &Write,
) -> Result<(), NotWritten> {
    let end = term.borrow().map(|term| term.end);
    if end.is_none_or(|end| end < Instant::now() + limit) {
        return Err(NotWritten::TermEnds);
    }
    // Decodes only the metadata of the Service in the API server's response.
    let api: Api<PartialObjectMeta<Service>> = Api::namespaced(client.clone(), &write.service.namespace);
    let patch = Patch::Merge(body(write));
    match timeout(limit, api.patch_status(&write.service.name, &PatchParams::default(), &patch)).await {
        Ok(Ok(_written)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) => {
            Err(NotWritten::Failed(format!("{} {}: {}", status.code, status.reason, status.message)))
        }
        Ok(Err(error)) => Err(NotWritten::Failed(error.to_string())),
        Err(_elapsed) => Err(NotWritten::Failed("the API server does not answer".to_owned())),
    }
}

/// The merge patch that carries out a write. The API server rejects it with 409 unless the Service still has the
/// `resourceVersion` in the patch.
fn body(write: &Write) -> Value {
    let metadata = json!({"resourceVersion": write.version, "annotations": {GIVEN: write.given}});
    let Some(ingress) = &write.ingress else { return json!({"metadata": metadata}) };
    let ingress: Vec<Value> = ingress.iter().map(|ip| json!({"ip": ip, "ipMode": "VIP"})).collect();
    json!({"metadata": metadata, "status": {"loadBalancer": {"ingress": ingress}}})
}
