//! The values of unset fields: the defaults of the API server (for Services, `pkg/apis/core/v1/defaults.go`). An object
//! from a manifest has not passed an API server, so its unset fields lack these defaults. An empty string counts as
//! unset.

use super::{EndpointPort, IntOrString, ObjectMeta, ServicePort, ServiceSpec};

/// The namespace of an object that names none.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Default of `timeoutSeconds` of `ClientIP` affinity, in seconds: three hours.
const AFFINITY_SECONDS: i32 = 10_800;

impl ObjectMeta {
    /// `metadata.namespace`; `default` if unset.
    pub fn namespace_or_default(&self) -> &str {
        or(&self.namespace, DEFAULT_NAMESPACE)
    }
}

impl ServiceSpec {
    /// `spec.type`; `ClusterIP` if unset.
    pub fn service_type(&self) -> &str {
        or(&self.type_, "ClusterIP")
    }

    /// Whether the Service is of type `LoadBalancer`.
    pub fn is_load_balancer(&self) -> bool {
        self.service_type() == "LoadBalancer"
    }

    /// Whether the Service is of type `ExternalName`, which has no addresses.
    pub fn is_external_name(&self) -> bool {
        self.service_type() == "ExternalName"
    }

    /// Whether Services of this type can have node ports.
    pub fn has_node_ports(&self) -> bool {
        matches!(self.service_type(), "NodePort" | "LoadBalancer")
    }

    /// Whether every port of the Service gets a node port.
    pub fn wants_node_ports(&self) -> bool {
        match self.service_type() {
            "NodePort" => true,
            "LoadBalancer" => self.allocate_load_balancer_node_ports != Some(false),
            _ => false,
        }
    }

    /// Whether the Service has a `healthCheckNodePort`: a Service of type `LoadBalancer` under
    /// `externalTrafficPolicy: Local` has one.
    pub fn has_health_check_port(&self) -> bool {
        self.is_load_balancer() && self.external_traffic_policy.as_deref() == Some("Local")
    }

    /// The items of `clusterIPs` that are not empty, or `clusterIP` if there are none.
    pub fn requested_ips(&self) -> Vec<&str> {
        let list = self.cluster_ips.iter().flatten().map(String::as_str);
        let list: Vec<&str> = list.filter(|ip| !ip.is_empty()).collect();
        match self.cluster_ip.as_deref() {
            Some(ip) if list.is_empty() && !ip.is_empty() => vec![ip],
            Some(_) | None => list,
        }
    }

    /// Whether the Service is headless: its first [`requested_ips`](Self::requested_ips) is `None`.
    pub fn is_headless(&self) -> bool {
        self.requested_ips().first() == Some(&"None")
    }

    /// `externalName` without the dot that may end it; empty if unset.
    pub fn external_name(&self) -> &str {
        let name = self.external_name.as_deref().unwrap_or_default();
        name.strip_suffix('.').unwrap_or(name)
    }

    /// `sessionAffinity`; `"None"` if unset.
    pub fn affinity(&self) -> &str {
        or(&self.session_affinity, "None")
    }

    /// `sessionAffinityConfig.clientIP.timeoutSeconds`; three hours if unset.
    pub fn affinity_seconds(&self) -> i32 {
        let client_ip = self.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
        client_ip.and_then(|config| config.timeout_seconds).unwrap_or(AFFINITY_SECONDS)
    }
}

impl ServicePort {
    /// `protocol`; `TCP` if unset.
    pub fn protocol_or_default(&self) -> &str {
        or(&self.protocol, "TCP")
    }

    /// `targetPort`; the port's own number if unset or 0.
    pub fn target(&self) -> IntOrString {
        match &self.target_port {
            None | Some(IntOrString::Int(0)) => IntOrString::Int(self.port),
            Some(IntOrString::String(name)) if name.is_empty() => IntOrString::Int(self.port),
            Some(target) => target.clone(),
        }
    }
}

impl EndpointPort {
    /// `protocol`; `TCP` if unset.
    pub fn protocol_or_default(&self) -> &str {
        or(&self.protocol, "TCP")
    }
}

fn or<'a>(field: &'a Option<String>, default: &'a str) -> &'a str {
    field.as_deref().filter(|text| !text.is_empty()).unwrap_or(default)
}
