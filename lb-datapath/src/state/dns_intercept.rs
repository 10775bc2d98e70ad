//! The map `DNS_INTERCEPT`: which queries go to the DNS server of the agent.

use std::{collections::BTreeMap, sync::Arc};

use lb_common::{DnsIntercept, ServiceKey, filter::Mark};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    state::filter::Filter,
};

/// The map `DNS_INTERCEPT`. Only one instance may be used at a time.
#[derive(Debug)]
pub struct DnsIntercepts {
    map: Table<ServiceKey, DnsIntercept>,
    filter: Arc<Filter>,
}

impl DnsIntercepts {
    pub(crate) fn open(folder: &Folder, filter: &Arc<Filter>) -> Result<Self, DatapathError> {
        let map = Table::open(&layout::DNS_INTERCEPT, &folder.map("DNS_INTERCEPT"))?;
        Ok(Self { map, filter: Arc::clone(filter) })
    }

    /// Makes the map contain exactly these entries. Writes entries for answers before entries for queries: otherwise
    /// the agent's server might receive a query while answers would still leave with the server's own address.
    ///
    /// # Errors
    ///
    /// The kernel refuses to read or write the map; part of the entries may be written.
    pub fn set(&self, entries: &BTreeMap<ServiceKey, DnsIntercept>) -> Result<(), DatapathError> {
        let present = self.map.entries()?;
        let gone: Vec<ServiceKey> = present.into_keys().filter(|key| !entries.contains_key(key)).collect();
        let (answers, queries): (Vec<_>, Vec<_>) =
            entries.iter().map(|(key, value)| (*key, *value)).partition(|(_, value)| value.is_of_answers());
        let marks = entries.keys().flat_map(Mark::of_intercept);
        self.filter.insert_after(marks, || {
            for entries in [answers, queries] {
                let (keys, values): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
                self.map.update_all(&keys, &values)?;
            }
            self.map.delete_all(&gone)
        })
    }
}
