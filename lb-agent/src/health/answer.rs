//! The response of a `healthCheckNodePort` server.

use axum::{
    http::{HeaderName, StatusCode, header},
    response::IntoResponse,
};
use lb_core::model::ObjectName;

/// Header with the number of endpoints on this node, which some load balancers use as the node's weight.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// The response: 200 if this node has endpoints and the agent is healthy, else 503. The body is byte for byte what
/// kube-proxy sends.
pub(super) fn answer(
    service: &ObjectName,
    local_endpoints: usize,
    healthy: bool,
) -> impl IntoResponse + use<> {
    let code = if local_endpoints > 0 && healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (WEIGHT, local_endpoints.to_string()),
    ];
    (code, headers, body(service, local_endpoints, healthy))
}

fn body(service: &ObjectName, local_endpoints: usize, healthy: bool) -> String {
    let ObjectName { namespace, name } = service;
    format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace:?},\n\t\t\"name\": {name:?}\n\t}},\n\
         \t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_is_byte_for_byte_that_of_kube_proxy() {
        let expected = "\
{
	\"service\": {
		\"namespace\": \"ns\",
		\"name\": \"svc\"
	},
	\"localEndpoints\": 1,
	\"serviceProxyHealthy\": true
}";
        assert_eq!(body(&ObjectName::new("ns", "svc"), 1, true), expected);
    }

    #[test]
    fn code_200_needs_endpoints_and_health() {
        let code = |endpoints, healthy| {
            answer(&ObjectName::new("ns", "svc"), endpoints, healthy).into_response().status().as_u16()
        };
        assert_eq!(
            [code(1, true), code(18, true), code(0, true), code(1, false), code(0, false)],
            [200, 200, 503, 503, 503]
        );
    }
}
