//! Creates numbered Services and endpoints as they are in the maps, and the plan steps that write them there.

use std::net::IpAddr;

use bytemuck::Zeroable as _;
use lb_common::{Address, Backend, Service, ServiceKey, protocol};
use lb_core::{
    model::{ObjectName, Protocol, ServicePortName},
    plan::{Contents, EndpointLabels, ServiceLabels, Step},
};

pub(crate) fn key(number: u32) -> ServiceKey {
    ServiceKey::new(Address::from(IpAddr::from((0x0a60_0000 + number).to_be_bytes())), 80, protocol::TCP)
}

pub(crate) fn backend(number: u32) -> Backend {
    let address = Address::from(IpAddr::from((0x0af4_0000 + number).to_be_bytes()));
    Backend { address, port: 8080, flags: 0, weight: 1, active_flows_slot: 0 }
}

pub(crate) fn endpoint(number: u32) -> IpAddr {
    backend(number).address.into()
}

pub(crate) fn service(id: u32, base: u32, count: u32) -> Service {
    Service { id, backends_base: base, backends_count: count, ..Service::zeroed() }.sealed(&key(id))
}

pub(crate) fn service_labels(id: u32) -> ServiceLabels {
    ServiceLabels {
        name: ServicePortName {
            service: ObjectName::new("default", &format!("service-{id}")),
            port: "http".into(),
            protocol: Protocol::Tcp,
        },
        node_port: id.is_multiple_of(2).then_some(30_000),
    }
}

pub(crate) fn endpoint_labels(number: u32) -> EndpointLabels {
    EndpointLabels { node: Some("a".into()), zone: None, pod: Some(format!("pod-{number}").into()) }
}

/// Steps that create `services` Services with `size` endpoints each, and the contents of the maps after these steps.
pub(crate) fn steps(services: u32, size: u32) -> (Vec<Step>, Contents) {
    let (mut steps, mut contents) = (Vec::new(), Contents::default());
    let ids = 1..=services;
    let slice =
        |id: u32| ((id - 1) * (size + 3), (id * size..(id + 1) * size).map(backend).collect::<Vec<_>>());
    for id in ids.clone() {
        let (base, backends) = slice(id);
        contents.backends.extend((base..).zip(backends.iter().copied()));
        steps.push(Step::WriteBackends { base, backends });
    }
    for id in ids.clone() {
        contents.service_labels.insert(id, service_labels(id));
        steps.push(Step::PutServiceLabels(id, Box::new(service_labels(id))));
    }
    for number in size..(services + 1) * size {
        contents.endpoint_labels.insert(endpoint(number), endpoint_labels(number).into());
        steps.push(Step::PutEndpointLabels(endpoint(number), endpoint_labels(number).into()));
    }
    for id in ids {
        let record = service(id, slice(id).0, size);
        contents.frontends.insert(key(id), record);
        steps.push(Step::PutFrontend(key(id), Box::new(record)));
    }
    (steps, contents)
}
