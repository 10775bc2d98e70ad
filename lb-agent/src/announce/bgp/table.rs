//! The routes of this agent in the kernel's routing table for announced routes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
    sync::Arc,
};

use ipnet::IpNet;
use lb_core::{
    announce::{
        bgp::{Adopted, Offer},
        holders::Holder,
    },
    model::ObjectName,
};
use lb_datapath::{AnnouncedRoutes, DatapathError, Range, RouteUpdate};
use tracing::{info, warn};

/// The kernel's routing table that the agent writes announced routes to.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) number: u32,
    routes: AnnouncedRoutes,
    /// Routes of an earlier agent that stay for now, because objects that this agent has not read yet may call for
    /// them; `None` until the table is first read.
    adopted: Option<Adopted>,
    /// The announced routes in the table at the last update that could list them.
    present: BTreeSet<Range>,
}

/// The routes that the agent wants, and the facts that decide whether routes of an earlier agent stay.
pub(super) struct Known<'a> {
    pub(super) wanted: &'a BTreeMap<IpNet, Offer>,
    pub(super) holders: &'a BTreeMap<ObjectName, Holder>,
    pub(super) node: &'a Arc<str>,
    /// True if the agent has read every object, or if this node may not announce. In both cases the update removes the
    /// unwanted routes of an earlier agent.
    pub(super) is_complete: bool,
}

impl Table {
    pub(super) const fn new(number: u32) -> Self {
        Self { number, routes: AnnouncedRoutes::new(number), adopted: None, present: BTreeSet::new() }
    }

    /// Brings the table up to date; adds routes only if `may_add`. Returns the conditions for `status`.
    pub(super) fn update(&mut self, known: &Known<'_>, may_add: bool) -> Vec<String> {
        match self.try_update(known, may_add) {
            Ok(conditions) => conditions,
            Err(error) => vec![error.to_string()],
        }
    }

    /// Whether the table has the route, as of the last update.
    pub(super) fn has(&self, net: &IpNet) -> bool {
        self.present.contains(&(net.addr(), net.prefix_len()))
    }

    fn try_update(&mut self, known: &Known<'_>, may_add: bool) -> Result<Vec<String>, DatapathError> {
        let adopted = match &mut self.adopted {
            Some(adopted) => adopted,
            None => {
                let found = self.routes.present()?;
                self.adopted.insert(Adopted::new(found.into_iter().filter_map(network).collect()))
            }
        };
        adopted.settle(known.wanted, known.holders, known.node, known.is_complete);
        let wanted: BTreeSet<Range> = known.wanted.keys().map(|net| (net.addr(), net.prefix_len())).collect();
        let is_kept = |range: &Range| {
            wanted.contains(range) || network(*range).is_some_and(|net| adopted.routes().contains(&net))
        };
        // `guard` adds its rule before `update` adds the first route: once routers send packets to this node, the
        // kernel must not forward packets that no program has translated.
        self.routes.guard()?;
        let none = BTreeSet::new();
        let RouteUpdate { added, removed, present, refused } =
            self.routes.update(if may_add { &wanted } else { &none }, is_kept)?;
        self.present = present;
        if (added, removed) != (0, 0) {
            info!(added, removed, table = self.number, "updated the announced routes");
        }
        let refused = refused.into_iter().map(|((ip, length), why)| format!("route {ip}/{length}: {why}"));
        let unknown = adopted.routes().iter().map(|net| {
            format!("route {net}: stays as an earlier agent left it, until all objects are valid")
        });
        Ok(refused.chain(unknown).collect())
    }
}

fn network((ip, length): Range) -> Option<IpNet> {
    IpNet::new(ip, length).ok()
}

/// Removes the routes of the earlier agent of the same data plane if they are in another table than `table`. `record`
/// is the file with the number of the earlier agent's table. Then writes `table` to the file, or removes the file if
/// there is no table.
///
/// # Errors
/// The kernel refuses to list or to remove a route.
pub(super) fn leave(record: &PathBuf, table: Option<u32>) -> anyhow::Result<()> {
    let earlier = fs::read_to_string(record).ok().and_then(|text| text.trim().parse::<u32>().ok());
    if let Some(earlier) = earlier.filter(|earlier| Some(*earlier) != table) {
        let removed = AnnouncedRoutes::new(earlier).release()?;
        info!(removed, table = earlier, "removed the routes in the table of the earlier agent");
    }
    let recorded = match table {
        Some(table) => fs::write(record, format!("{table}\n")),
        None => fs::remove_file(record),
    };
    match recorded {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!(file = %record.display(), %error, "cannot record the table of the announced routes: \
                  if --announce-table changes, the routes in the present table stay");
        }
        Ok(()) | Err(_) => {}
    }
    Ok(())
}
