//! A form of [`EndpointSlice`] that takes less memory, because a large cluster has a million endpoints.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use crate::{
    model::{Endpoint, EndpointPort, EndpointSlice, Hints, ObjectName},
    plan::EndpointLabels,
};

/// The labels that the map `ENDPOINT_NAMES` has, by address.
pub(super) type Labels = BTreeMap<IpAddr, Arc<EndpointLabels>>;

/// A form of [`EndpointSlice`] that takes less memory and does not have the name of the Service.
#[derive(Clone, Debug)]
pub(super) struct StoredSlice {
    pub(super) name: ObjectName,
    ports: Box<[EndpointPort]>,
    endpoints: Box<[StoredEndpoint]>,
}

/// A form of [`Endpoint`] that takes less memory: it shares the names that `ENDPOINT_NAMES` has for its address (see
/// [`Labels`]), if they equal the endpoint's own names. (The two differ, for example, if a name is too long for the map
/// and is truncated there.)
#[derive(Clone, Debug)]
struct StoredEndpoint {
    address: IpAddr,
    ready: bool,
    serving: bool,
    terminating: bool,
    names: Arc<EndpointLabels>,
    hints: Option<Arc<Hints>>,
}

const _: () = assert!(size_of::<StoredEndpoint>() == 40);

impl StoredSlice {
    /// Converts a slice. To save memory, an endpoint shares the names that `known` has for the endpoint's address, if
    /// they equal the endpoint's own names.
    pub(super) fn new(name: ObjectName, slice: EndpointSlice, known: &Labels) -> Self {
        let endpoints = slice.endpoints.into_iter().map(|endpoint| StoredEndpoint::new(endpoint, known));
        Self { name, ports: slice.ports.into(), endpoints: endpoints.collect() }
    }

    /// Converts back to an [`EndpointSlice`], which belongs to the Service `service`.
    pub(super) fn read(&self, service: &ObjectName) -> EndpointSlice {
        EndpointSlice {
            service: service.clone(),
            ports: self.ports.to_vec(),
            endpoints: self.endpoints.iter().map(StoredEndpoint::read).collect(),
        }
    }

    /// To save memory, replaces each of the `labels`, which are sorted by address, by those of this slice's endpoint at
    /// the same address, if both are equal.
    pub(super) fn share_labels(&self, labels: &mut [(IpAddr, Arc<EndpointLabels>)]) {
        for StoredEndpoint { address, names, .. } in &self.endpoints {
            let Ok(place) = labels.binary_search_by_key(address, |(address, _)| *address) else { continue };
            if labels[place].1 == *names {
                labels[place].1.clone_from(names);
            }
        }
    }
}

impl StoredEndpoint {
    fn new(endpoint: Endpoint, known: &Labels) -> Self {
        let Endpoint { address, ready, serving, terminating, node, zone, pod, hints } = endpoint;
        let names = EndpointLabels { node, zone, pod };
        let known = known.get(&address).filter(|known| ***known == names);
        let names = known.cloned().unwrap_or_else(|| Arc::new(names));
        Self { address, ready, serving, terminating, names, hints }
    }

    fn read(&self) -> Endpoint {
        let Self { address, ready, serving, terminating, ref names, ref hints } = *self;
        let EndpointLabels { node, zone, pod } = EndpointLabels::clone(names);
        Endpoint { address, ready, serving, terminating, node, zone, pod, hints: hints.clone() }
    }
}
