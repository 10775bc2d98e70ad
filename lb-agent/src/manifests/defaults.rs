//! The defaults of the API server (`pkg/apis/core/v1/defaults.go`, `pkg/apis/discovery/v1/defaults.go`).

use lb_core::api::{self, IntOrString, ObjectMeta};

const AFFINITY_TIMEOUT_SECONDS: i32 = 10800;

/// Fills in what a Service leaves open, except its addresses and node ports.
pub(super) fn service(service: &mut api::Service) {
    metadata(&mut service.metadata);
    let spec = service.spec.get_or_insert_default();
    text(&mut spec.type_, "ClusterIP");
    text(&mut spec.session_affinity, "None");
    session_affinity(spec);
    for port in spec.ports.iter_mut().flatten() {
        text(&mut port.protocol, "TCP");
        let unset = match &port.target_port {
            None | Some(IntOrString::Int(0)) => true,
            Some(IntOrString::String(name)) => name.is_empty(),
            Some(IntOrString::Int(_)) => false,
        };
        if unset {
            port.target_port = Some(IntOrString::Int(port.port));
        }
    }
}

/// The timeout belongs to `ClientIP`; under `None` the API server drops it.
fn session_affinity(spec: &mut api::ServiceSpec) {
    match spec.session_affinity.as_deref() {
        Some("ClientIP") => {
            let client_ip =
                spec.session_affinity_config.get_or_insert_default().client_ip.get_or_insert_default();
            client_ip.timeout_seconds.get_or_insert(AFFINITY_TIMEOUT_SECONDS);
        }
        Some("None") => spec.session_affinity_config = None,
        _ => {}
    }
}

/// Fills in what an EndpointSlice leaves open.
pub(super) fn endpoint_slice(slice: &mut api::EndpointSlice) {
    metadata(&mut slice.metadata);
    for port in slice.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
        text(&mut port.protocol, "TCP");
    }
}

/// Fills in what Endpoints leave open.
pub(super) fn endpoints(endpoints: &mut api::Endpoints) {
    metadata(&mut endpoints.metadata);
    for port in endpoints.subsets.iter_mut().flatten().flat_map(|subset| subset.ports.iter_mut().flatten()) {
        text(&mut port.protocol, "TCP");
    }
}

fn metadata(metadata: &mut ObjectMeta) {
    text(&mut metadata.namespace, "default");
}

/// An empty text is the same as none.
fn text(field: &mut Option<String>, default: &str) {
    if field.as_ref().is_none_or(String::is_empty) {
        *field = Some(default.to_owned());
    }
}
