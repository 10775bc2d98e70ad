//! The way to the API server does not depend on what the API server says in a bad moment.

use crate::{
    family::Family,
    model::{EndpointSlice, ObjectName},
};

/// The EndpointSlices of `default/kubernetes` when it last had a usable endpoint, for each family. The agent may reach
/// the API server through this very Service: without its endpoints it would never learn of new ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastGood {
    slices: [Vec<EndpointSlice>; 2],
}

impl LastGood {
    /// Whether this is the Service of the API servers.
    pub(crate) fn concerns(name: &ObjectName) -> bool {
        (&*name.namespace, &*name.name) == ("default", "kubernetes")
    }

    /// The slices to use: those that there are, but in a family in which no endpoint is usable those of before.
    pub(crate) fn choose<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a EndpointSlice> + Clone,
    ) -> Vec<EndpointSlice> {
        let mut chosen = Vec::new();
        for (family, kept) in Family::ALL.into_iter().zip(&mut self.slices) {
            let of_family = slices.clone().filter_map(|slice| of_family(slice, family));
            let now: Vec<EndpointSlice> = of_family.collect();
            if now.iter().any(is_usable) {
                kept.clone_from(&now);
            }
            chosen.extend(kept.iter().cloned());
        }
        chosen
    }
}

fn of_family(slice: &EndpointSlice, family: Family) -> Option<EndpointSlice> {
    let endpoints = slice.endpoints.iter().filter(|endpoint| Family::of(endpoint.address) == family);
    let slice = EndpointSlice {
        service: slice.service.clone(),
        ports: slice.ports.clone(),
        endpoints: endpoints.cloned().collect(),
    };
    (!slice.endpoints.is_empty()).then_some(slice)
}

fn is_usable(slice: &EndpointSlice) -> bool {
    let usable =
        |endpoint: &crate::model::Endpoint| endpoint.ready || endpoint.serving && endpoint.terminating;
    !slice.ports.is_empty() && slice.endpoints.iter().any(usable)
}
