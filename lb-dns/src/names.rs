//! The index of names, shared between the source of objects, which writes it, and the sockets, which read it.

use std::{
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use ipnet::IpNet;
use lb_core::{
    dns::{ClusterDns, Index, NameChange, Unread, Zone},
    model::ObjectName,
};

/// The names of Services. Every change is visible to the next question.
#[derive(Debug)]
pub struct Names {
    index: RwLock<Index>,
    synchronised: AtomicBool,
    serial: AtomicU32,
}

impl Names {
    /// Names for `zone`, where no Service has a name yet.
    pub fn new(zone: Zone) -> Self {
        let index = RwLock::new(Index::new(zone));
        Self { index, synchronised: AtomicBool::new(false), serial: AtomicU32::new(1) }
    }

    /// Applies changes of objects. The time of the change becomes the serial of the zone.
    pub fn apply(&self, changes: impl IntoIterator<Item = NameChange>) {
        let mut changes = changes.into_iter().peekable();
        if changes.peek().is_none() {
            return;
        }
        let mut index = self.write();
        changes.for_each(|change| index.apply(change));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Serials are 32 bits, and compare modulo 2^32.
        let serial = u32::try_from(now.as_secs() & u64::from(u32::MAX)).unwrap_or_default();
        self.serial.store(serial, Ordering::Relaxed);
    }

    /// Replaces the ranges of cluster IPs, for whose reverse names this server answers.
    pub fn set_ranges(&self, ranges: Vec<IpNet>) {
        self.write().zone_mut().set_ranges(ranges);
    }

    /// Replaces the names that unreadable objects have or may have. Queries for such names get SERVFAIL, unless another
    /// object has the name.
    pub fn set_unread(&self, unread: Unread) {
        self.write().set_unread(unread);
    }

    /// Records that all objects have been applied once. Before that, every query for a name in this server's zones gets
    /// SERVFAIL.
    pub fn set_synchronised(&self) {
        self.synchronised.store(true, Ordering::Release);
    }

    /// Cluster IPs and endpoints of this Service, the DNS server of the cluster.
    pub fn cluster_dns(&self, service: &ObjectName) -> ClusterDns {
        self.read().cluster_dns(service)
    }

    /// Whether all objects have been applied once.
    pub fn is_synchronised(&self) -> bool {
        self.synchronised.load(Ordering::Acquire)
    }

    pub(crate) fn serial(&self) -> u32 {
        self.serial.load(Ordering::Relaxed)
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}
