//! An EndpointSlice in less memory than the model's: a large cluster has a million endpoints.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use crate::{
    model::{Endpoint, EndpointPort, EndpointSlice, Hints, ObjectName},
    plan::EndpointLabels,
};

/// The labels that the map `ENDPOINT_NAMES` has, by address.
pub(super) type Labels = BTreeMap<IpAddr, Arc<EndpointLabels>>;

/// An EndpointSlice in less memory, without the name of its Service.
#[derive(Clone, Debug)]
pub(super) struct StoredSlice {
    pub(super) name: ObjectName,
    ports: Box<[EndpointPort]>,
    endpoints: Box<[StoredEndpoint]>,
}

/// An [`Endpoint`] in less memory: it shares its names with the contents of `ENDPOINT_NAMES` if these are equal (they
/// differ, for example, if a name is too long for the map and is truncated there).
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
    /// Converts a slice; endpoints share equal names with `known`.
    pub(super) fn new(name: ObjectName, slice: EndpointSlice, known: &Labels) -> Self {
        let endpoints = slice.endpoints.into_iter().map(|endpoint| StoredEndpoint::new(endpoint, known));
        Self { name, ports: slice.ports.into(), endpoints: endpoints.collect() }
    }

    /// Converts back to the model's slice, which belongs to the Service `service`.
    pub(super) fn read(&self, service: &ObjectName) -> EndpointSlice {
        EndpointSlice {
            service: service.clone(),
            ports: self.ports.to_vec(),
            endpoints: self.endpoints.iter().map(StoredEndpoint::read).collect(),
        }
    }

    /// Lets `labels` share memory with equal ones of this slice's endpoints at the same addresses. `labels` are sorted
    /// by address.
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
