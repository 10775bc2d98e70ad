//! Tests that unused fields of API objects never change how the agent reads an object, whatever they contain.

use std::fmt::Debug;

use lb_core::{
    api::{EndpointSlice, Node, Service, ServiceCidr},
    model::ObjectName,
};
use proptest::{prelude::*, sample};
use serde_json::{Value, json};

use super::{kind::Kind, watched::Watched};

/// A valid object with many fields, and the paths of the fields that the agent uses.
struct Complete {
    object: Value,
    used: &'static [&'static str],
}

/// Metadata as an API server returns it, with these labels and annotations.
fn metadata(labels: &Value, annotations: &Value) -> Value {
    json!({
        "name": "web", "namespace": "shop", "uid": "u", "resourceVersion": "7", "generation": 3,
        "generateName": "web-", "selfLink": "/x", "creationTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 30, "finalizers": ["a/b"], "labels": labels, "annotations": annotations,
        "ownerReferences": [{
            "apiVersion": "v1", "kind": "Service", "name": "web", "uid": "u", "controller": true,
            "blockOwnerDeletion": true,
        }],
        "managedFields": [{
            "manager": "m", "operation": "Apply", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {}}, "subresource": "status",
        }],
    })
}

fn condition() -> Value {
    json!({
        "type": "Ready", "status": "True", "observedGeneration": 3, "reason": "R", "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    })
}

fn service() -> Complete {
    let object = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": metadata(&json!({"app": "web"}), &json!({"lb.dev/scheduler": "rr", "note": "n"})),
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
            "ports": [{
                "name": "http", "protocol": "TCP", "port": 80, "targetPort": "http", "nodePort": 30_080,
                "appProtocol": "http",
            }],
            "selector": {"app": "web"}, "externalIPs": ["203.0.113.1"], "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}, "loadBalancerIP": "203.0.113.9",
            "loadBalancerSourceRanges": ["198.51.100.0/24"], "externalName": "e", "externalTrafficPolicy": "Local",
            "internalTrafficPolicy": "Local", "healthCheckNodePort": 30_090, "publishNotReadyAddresses": true,
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "allocateLoadBalancerNodePorts": true,
            "loadBalancerClass": "c", "trafficDistribution": "PreferClose",
        },
        "status": {
            "loadBalancer": {"ingress": [{
                "ip": "203.0.113.2", "ipMode": "VIP", "hostname": "h",
                "ports": [{"port": 80, "protocol": "TCP", "error": "e"}],
            }]},
            "conditions": [condition()],
        },
    });
    let used = &[
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "metadata.resourceVersion",
        "metadata.annotations.lb.dev/scheduler",
        "spec.type",
        "spec.clusterIP",
        "spec.clusterIPs",
        "spec.ports[].name",
        "spec.ports[].protocol",
        "spec.ports[].port",
        "spec.ports[].nodePort",
        "spec.externalIPs",
        "spec.sessionAffinity",
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
        "spec.loadBalancerSourceRanges",
        "spec.externalTrafficPolicy",
        "spec.internalTrafficPolicy",
        "spec.healthCheckNodePort",
        "status.loadBalancer.ingress[].ip",
        "status.loadBalancer.ingress[].ipMode",
    ];
    Complete { object, used }
}

fn endpoint_slice() -> Complete {
    let labels = json!({"kubernetes.io/service-name": "web", "app": "web"});
    let annotations =
        json!({"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z", "note": "n"});
    let object = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata(&labels, &annotations),
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080, "appProtocol": "http"}],
        "endpoints": [{
            "addresses": ["10.0.0.1", "10.0.0.2"],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "hostname": "h", "nodeName": "a", "zone": "z", "deprecatedTopology": {"x": "y"},
            "targetRef": {
                "kind": "Pod", "name": "web-0", "namespace": "shop", "uid": "u", "apiVersion": "v1",
                "resourceVersion": "1", "fieldPath": "f",
            },
            "hints": {"forZones": [{"name": "z"}], "forNodes": [{"name": "a"}]},
        }],
    });
    let used = &[
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "metadata.resourceVersion",
        "metadata.labels.kubernetes.io/service-name",
        "metadata.annotations.endpoints.kubernetes.io/last-change-trigger-time",
        "addressType",
        "ports[].name",
        "ports[].protocol",
        "ports[].port",
        "endpoints[].addresses[0]",
        "endpoints[].conditions.ready",
        "endpoints[].conditions.serving",
        "endpoints[].conditions.terminating",
        "endpoints[].nodeName",
        "endpoints[].zone",
        "endpoints[].targetRef.kind",
        "endpoints[].targetRef.name",
        "endpoints[].hints.forZones[].name",
        "endpoints[].hints.forNodes[].name",
    ];
    Complete { object, used }
}

fn node() -> Complete {
    let object = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": metadata(&json!({"topology.kubernetes.io/zone": "z", "app": "web"}), &json!({"note": "n"})),
        "spec": {
            "podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"], "providerID": "p", "unschedulable": false,
            "taints": [{"key": "k", "value": "v", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}],
            "configSource": {"configMap": {"name": "n"}}, "externalID": "e",
        },
        "status": {
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}], "capacity": {"cpu": "4"},
            "allocatable": {"cpu": "4"}, "phase": "Running", "conditions": [condition()],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10_250}},
            "nodeInfo": {"machineID": "m", "kernelVersion": "6.12", "swap": {"capacity": 1}},
            "images": [{"names": ["i"], "sizeBytes": 1}], "volumesInUse": ["v"],
            "volumesAttached": [{"name": "v", "devicePath": "/d"}], "config": {"error": "e"},
            "runtimeHandlers": [{"name": "r", "features": {"userNamespaces": true}}],
            "features": {"supplementalGroupsPolicy": true}, "declaredFeatures": ["f"],
        },
    });
    let used = &[
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "metadata.resourceVersion",
        "metadata.deletionTimestamp",
        "metadata.labels.topology.kubernetes.io/zone",
        "spec.podCIDR",
        "spec.podCIDRs",
        "spec.taints[].key",
        "status.addresses[].type",
        "status.addresses[].address",
    ];
    Complete { object, used }
}

fn service_cidr() -> Complete {
    let object = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": metadata(&json!({}), &json!({})),
        "spec": {"cidrs": ["10.96.0.0/12"]}, "status": {"conditions": [condition()]},
    });
    let used =
        &["metadata.name", "metadata.namespace", "metadata.uid", "metadata.resourceVersion", "spec.cidrs"];
    Complete { object, used }
}

/// A field of an object: its JSON pointer, and its path in the form of [`Complete::used`].
#[derive(Clone, Debug)]
struct Field {
    pointer: String,
    path: String,
    is_map: bool,
}

/// Collects every field of the object, including nested ones.
fn fields(value: &Value, pointer: &str, path: &str, found: &mut Vec<Field>) {
    found.push(Field { pointer: pointer.to_owned(), path: path.to_owned(), is_map: value.is_object() });
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let escaped = key.replace('~', "~0").replace('/', "~1");
                let dot = if path.is_empty() { "" } else { "." };
                fields(value, &format!("{pointer}/{escaped}"), &format!("{path}{dot}{key}"), found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                // Keeps the index of an endpoint's address, because the agent uses only the first one.
                let shown = if path.ends_with("addresses") && value.is_string() {
                    index.to_string()
                } else {
                    String::new()
                };
                fields(value, &format!("{pointer}/{index}"), &format!("{path}[{shown}]"), found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

impl Complete {
    fn fields(&self) -> Vec<Field> {
        let mut found = Vec::new();
        fields(&self.object, "", "", &mut found);
        found
    }

    /// Whether the agent uses neither the field nor anything nested in it.
    fn is_unused(&self, field: &Field) -> bool {
        let within = |inner: &str, outer: &str| {
            outer.is_empty()
                || inner
                    .strip_prefix(outer)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        !self.used.iter().any(|used| within(used, &field.path) || within(&field.path, used))
    }

    fn unused(&self) -> Vec<Field> {
        let unused: Vec<Field> = self.fields().into_iter().filter(|field| self.is_unused(field)).collect();
        assert!(unused.len() > 15, "{unused:?}");
        unused
    }
}

/// JSON values of every type, to be put into fields of other types.
fn odd_values() -> Vec<Value> {
    vec![
        Value::Null,
        json!(true),
        json!(-7),
        json!(1.5),
        json!("unknown"),
        json!([]),
        json!({}),
        json!([null]),
        json!({"x": null}),
        json!(["x", 1]),
    ]
}

/// The result of reading an object, as text to compare.
fn read<K: Kind>(object: &Value) -> String
where
    K::Change: Debug,
{
    let watched: Watched<K> = serde_json::from_value(object.clone()).unwrap();
    let name = ObjectName::new("shop", "web");
    let read = watched.object.map(|object| (object.change(&name), object.triggered()));
    format!("{:?} {read:?}", (watched.metadata.name, watched.metadata.resource_version))
}

fn set(object: &mut Value, pointer: &str, value: Value) {
    *object.pointer_mut(pointer).unwrap() = value;
}

#[track_caller]
fn odd_value_in_each_unused_field_changes_nothing<K: Kind>(complete: &Complete)
where
    K::Change: Debug,
{
    let expected = read::<K>(&complete.object);
    assert!(!expected.contains("Err(") && expected.contains("left_out: []"), "{expected}");
    for field in complete.unused() {
        for value in odd_values() {
            let mut object = complete.object.clone();
            set(&mut object, &field.pointer, value.clone());
            assert_eq!(read::<K>(&object), expected, "{} = {value}", field.path);
        }
    }
}

#[track_caller]
fn null_anywhere_never_makes_it_unreadable<K: Kind>(complete: &Complete)
where
    K::Change: Debug,
{
    // Leaves out the fields that hold the name: an object without a name is skipped with a warning, because nothing
    // identifies it.
    let names = ["", "metadata", "metadata.name"];
    for field in complete.fields().iter().filter(|field| !names.contains(&&*field.path)) {
        let mut object = complete.object.clone();
        set(&mut object, &field.pointer, Value::Null);
        let read = read::<K>(&object);
        assert!(!read.contains("Err("), "{} is null: {read}", field.path);
    }
}

#[test]
fn unused_fields_never_change_how_an_object_is_read() {
    odd_value_in_each_unused_field_changes_nothing::<Service>(&service());
    odd_value_in_each_unused_field_changes_nothing::<EndpointSlice>(&endpoint_slice());
    odd_value_in_each_unused_field_changes_nothing::<Node>(&node());
    odd_value_in_each_unused_field_changes_nothing::<ServiceCidr>(&service_cidr());
}

#[test]
fn null_never_makes_an_object_unreadable() {
    null_anywhere_never_makes_it_unreadable::<Service>(&service());
    null_anywhere_never_makes_it_unreadable::<EndpointSlice>(&endpoint_slice());
    null_anywhere_never_makes_it_unreadable::<Node>(&node());
    null_anywhere_never_makes_it_unreadable::<ServiceCidr>(&service_cidr());
}

/// Variants of an object in which unused fields have odd values, and maps have unknown fields.
fn damaged(complete: Complete) -> impl Strategy<Value = Value> {
    let maps: Vec<Field> = complete.fields().into_iter().filter(|field| field.is_map).collect();
    let value = sample::select(odd_values());
    let replaced = prop::collection::vec((sample::select(complete.unused()), value.clone()), 0..8);
    let added = prop::collection::vec((sample::select(maps), "new[A-Z][a-z]{0,3}", value), 0..4);
    (replaced, added).prop_map(move |(replaced, added)| {
        let mut object = complete.object.clone();
        for (map, key, value) in added {
            object.pointer_mut(&map.pointer).unwrap()[key] = value;
        }
        for (field, value) in replaced {
            // The field may be gone, because an earlier step replaced the field that contained it.
            if let Some(field) = object.pointer_mut(&field.pointer) {
                *field = value;
            }
        }
        object
    })
}

proptest! {
    #[test]
    fn any_damage_to_unused_fields_of_a_service_is_harmless(object in damaged(service())) {
        prop_assert_eq!(read::<Service>(&object), read::<Service>(&service().object));
    }

    #[test]
    fn any_damage_to_unused_fields_of_a_slice_is_harmless(object in damaged(endpoint_slice())) {
        prop_assert_eq!(read::<EndpointSlice>(&object), read::<EndpointSlice>(&endpoint_slice().object));
    }

    #[test]
    fn any_damage_to_unused_fields_of_a_node_is_harmless(object in damaged(node())) {
        prop_assert_eq!(read::<Node>(&object), read::<Node>(&node().object));
    }

    #[test]
    fn any_damage_to_unused_fields_of_a_service_cidr_is_harmless(object in damaged(service_cidr())) {
        prop_assert_eq!(read::<ServiceCidr>(&object), read::<ServiceCidr>(&service_cidr().object));
    }
}
