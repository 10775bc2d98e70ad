//! Small random worlds, and what should come out of them, said in the simplest way.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use lb_common::{Address, Backend, ServiceKey, backend_flags};
use lb_core::model::{
    Change, Endpoint, EndpointPort, EndpointSlice, ObjectName, Protocol, Service, ServicePort,
    ServicePortName,
};
use proptest::{collection, prelude::*, sample};

use crate::kernel::Resolved;

/// The objects that exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, EndpointSlice>,
}

impl World {
    pub(crate) fn apply(&mut self, change: &Change) {
        match change.clone() {
            Change::Service(name, Some(service)) => {
                self.services.insert(name, service);
            }
            Change::Service(name, None) => {
                self.services.remove(&name);
            }
            Change::EndpointSlice(name, Some(slice)) => {
                self.slices.insert(name, slice);
            }
            Change::EndpointSlice(name, None) => {
                self.slices.remove(&name);
            }
        }
    }

    /// Everything as the events that a source sends when it starts.
    pub(crate) fn changes(&self) -> Vec<Change> {
        let services = self.services.iter().map(|(name, s)| Change::Service(name.clone(), Some(s.clone())));
        let slices = self.slices.iter().map(|(name, s)| Change::EndpointSlice(name.clone(), Some(s.clone())));
        services.chain(slices).collect()
    }

    pub(crate) fn removal(&self) -> Vec<Change> {
        let services = self.services.keys().map(|name| Change::Service(name.clone(), None));
        services.chain(self.slices.keys().map(|name| Change::EndpointSlice(name.clone(), None))).collect()
    }

    /// Which frontend should lead where: straight from the rules, with no regard for speed.
    pub(crate) fn expected(&self) -> Resolved {
        let mut owners: BTreeMap<ServiceKey, ServicePortName> = BTreeMap::new();
        let mut expected = Resolved::new();
        for (name, service) in &self.services {
            for port in &service.ports {
                let full = ServicePortName {
                    service: name.clone(),
                    port: port.name.clone(),
                    protocol: port.protocol,
                };
                for ip in &service.cluster_ips {
                    let key = ServiceKey::new(Address::from(*ip), port.port, port.protocol.number());
                    if owners.get(&key).is_none_or(|owner| full < *owner) {
                        owners.insert(key, full.clone());
                        expected.insert(key, self.backends(name, port, *ip));
                    }
                }
            }
        }
        expected
    }

    fn backends(&self, service: &ObjectName, port: &ServicePort, ip: IpAddr) -> Vec<Backend> {
        let mut all: BTreeMap<(Address, u16), Vec<&Endpoint>> = BTreeMap::new();
        for slice in self.slices.values().filter(|slice| slice.service == *service) {
            for number in slice.ports.iter().filter(|p| p.name == port.name && p.protocol == port.protocol) {
                for endpoint in slice.endpoints.iter().filter(|e| e.address.is_ipv4() == ip.is_ipv4()) {
                    all.entry((Address::from(endpoint.address), number.port)).or_default().push(endpoint);
                }
            }
        }
        // Of several that speak about one address, only those that run count, where there is one.
        for versions in all.values_mut() {
            if versions.iter().any(|e| !e.terminating) {
                versions.retain(|e| !e.terminating);
            }
        }
        let with = |usable: &dyn Fn(&Endpoint) -> bool, flags| -> Vec<Backend> {
            let chosen = all.iter().filter(|(_, versions)| versions.iter().any(|e| usable(e)));
            chosen
                .map(|((address, port), _)| Backend { address: *address, port: *port, flags, weight: 1 })
                .collect()
        };
        let ready = with(&|e| e.ready, 0);
        if ready.is_empty() {
            with(&|e| e.serving && e.terminating, backend_flags::TERMINATING)
        } else {
            ready
        }
    }
}

fn name(text: String) -> ObjectName {
    ObjectName::new("ns", &text)
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)]
}

fn port_name() -> impl Strategy<Value = &'static str> {
    sample::select(vec!["", "http", "dns"])
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    (port_name(), protocol(), 80..82_u16, prop::option::of(30_000..30_002_u16)).prop_map(
        |(name, protocol, port, node_port)| ServicePort { name: name.into(), protocol, port, node_port },
    )
}

fn service() -> impl Strategy<Value = Service> {
    let v4 = prop::option::of((1..4_u8).prop_map(|last| IpAddr::from([10, 96, 0, last])));
    let v6 = prop::option::of((1..3_u16).prop_map(|last| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last])));
    let ports = collection::vec(service_port(), 1..3).prop_map(|mut ports: Vec<ServicePort>| {
        let mut seen = BTreeSet::new();
        ports.retain(|port| seen.insert((port.name.clone(), port.protocol)));
        ports
    });
    (v4, v6, ports, prop::option::of(1..3_u32)).prop_map(|(v4, v6, ports, affinity_seconds)| Service {
        cluster_ips: v4.into_iter().chain(v6).collect(),
        ports,
        affinity_seconds,
        ..Service::default()
    })
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let flags = (prop::bool::weighted(0.6), any::<bool>(), prop::bool::weighted(0.3));
    let label = || prop::option::of(sample::select(vec!["x", "y"]).prop_map(Into::into));
    (any::<bool>(), 1..6_u8, flags, label(), label()).prop_map(
        |(v4, last, (ready, serving, terminating), node, pod)| {
            let address = if v4 {
                IpAddr::from([10, 0, 0, last])
            } else {
                IpAddr::from([0xfd01, 0, 0, 0, 0, 0, 0, last.into()])
            };
            Endpoint { address, ready, serving, terminating, node, zone: None, pod, hints: None }
        },
    )
}

fn endpoint_port() -> impl Strategy<Value = EndpointPort> {
    (port_name(), protocol(), 8080..8082_u16).prop_map(|(name, protocol, port)| EndpointPort {
        name: name.into(),
        protocol,
        port,
    })
}

fn slice() -> impl Strategy<Value = EndpointSlice> {
    let service = sample::select(vec!["a", "b", "c", "d"]);
    (service, collection::vec(endpoint_port(), 0..3), collection::vec(endpoint(), 0..6)).prop_map(
        |(service, ports, endpoints)| EndpointSlice { service: name(service.to_owned()), ports, endpoints },
    )
}

/// One thing that happens to an object.
pub(crate) fn change() -> impl Strategy<Value = Change> {
    let services = sample::select(vec!["a", "b", "c"]);
    let service_change = (services, prop::option::weighted(0.8, service()))
        .prop_map(|(of, service)| Change::Service(name(of.to_owned()), service));
    let slice_change = (0..5_u8, prop::option::weighted(0.8, slice()))
        .prop_map(|(number, slice)| Change::EndpointSlice(name(format!("slice-{number}")), slice));
    prop_oneof![2 => service_change, 3 => slice_change]
}
