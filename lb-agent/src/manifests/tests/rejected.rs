//! Tests of the errors that users see for manifests that the source rejects.

use super::{Folder, service, service_at, slice};

/// The conditions of a folder that has only this text, as `web.yaml`.
fn problems(text: &str) -> Vec<String> {
    Folder::of(&[("web.yaml", text)]).problems()
}

/// The conditions of a Service `default/web` with this spec, without location and name.
fn spec(spec: &str) -> Vec<String> {
    let place = "services/web.yaml, document 1 (line 1), Service default/web: ";
    let text = format!("apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec: {spec}\n");
    problems(&text).iter().map(|problem| problem.strip_prefix(place).unwrap_or(problem).to_owned()).collect()
}

#[test]
fn text_as_port_number_is_rejected() {
    let web = service("web", 80).replace("80", "http");
    let text = format!("# two services\n{}---\n# the second\n{web}", service("a", 80));
    assert_eq!(
        problems(&text),
        [
            "services/web.yaml, document 2 (line 11), Service default/web: spec.ports[0].port: invalid type: string \
          \"http\", expected i32"
        ]
    );
}

#[test]
fn unknown_field_is_rejected() {
    let text = service("web", 80)
        .replace("  ports:", "  prots: [a]\n  ports:")
        .replace("- port: 80", "- port: 80\n    portocol: UDP");
    let folder = Folder::of(&[("web.yaml", &text)]);
    assert_eq!(
        folder.problems(),
        [
            "services/web.yaml, document 1 (line 1), Service default/web: spec.ports[0].portocol: unknown field",
            "services/web.yaml, document 1 (line 1), Service default/web: spec.prots: unknown field",
        ]
    );
    assert_eq!(folder.names(), Vec::<&str>::new());
}

#[test]
fn wrong_indentation_is_reported_with_its_line() {
    let text = format!("{}---\n{}   targetPort: 1\n", service("a", 80), service("web", 80));
    assert_eq!(
        problems(&text),
        [
            "services/web.yaml, document 2 (line 9): invalid YAML: while parsing a block mapping, did not find expected \
          key at line 16, column 4"
        ]
    );
}

#[test]
fn duplicate_key_is_rejected() {
    assert_eq!(
        problems("kind: Service\nkind: Service\n"),
        [
            "services/web.yaml, document 1 (line 1): invalid YAML: duplicate mapping key: kind not allowed here at line \
          2, column 1"
        ]
    );
}

#[test]
fn taken_cluster_ip_is_rejected() {
    let text = format!("{}---\n{}", service_at("a", "10.96.0.10"), service_at("web", "10.96.0.10"));
    assert_eq!(
        problems(&text),
        [
            "services/web.yaml, document 2 (line 10), Service default/web: spec.clusterIPs: Invalid value: \"10.96.0.10\": \
          failed to allocate IP 10.96.0.10: provided IP is already allocated to Service \"default/a\""
        ]
    );
}

#[test]
fn second_definition_of_an_object_is_rejected() {
    let folder = Folder::of(&[
        ("a.yaml", &format!("{}---\n{}", service("x", 1), service("web", 2))),
        ("b.yaml", &service("web", 3)),
    ]);
    assert_eq!(
        folder.problems(),
        [
            "services/b.yaml, document 1 (line 1), Service default/web: is defined already in services/a.yaml, document 2 \
          (line 9); this one is ignored"
        ]
    );
    assert_eq!(folder.ports("web"), [2]);
}

#[test]
fn object_without_kind_version_or_name_is_rejected() {
    let cases = [
        ("apiVersion: v1\n", "kind: Required value"),
        ("kind: Service\n", "apiVersion: Required value"),
        ("apiVersion: v1\nkind: Service\nspec: {}\n", "metadata.name: Required value (Service)"),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: 5}\n",
            "metadata.name: Invalid value: 5: must be a string; quote it (Service)",
        ),
        ("just text\n", "this is no Kubernetes object: apiVersion, kind and metadata are expected"),
        ("- kind: Service\n", "this is no Kubernetes object: apiVersion, kind and metadata are expected"),
        (
            "apiVersion: v1\nkind: EndpointSlice\nmetadata: {name: a}\n",
            "kind: no matches for kind \"EndpointSlice\" in version \"v1\"; apiVersion: discovery.k8s.io/v1, kind: \
             EndpointSlice is meant?",
        ),
        (
            "apiVersion: v1\nkind: service\nmetadata: {name: a}\n",
            "kind: no matches for kind \"service\" in version \"v1\"; apiVersion: v1, kind: Service is meant?",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(problems(text), [format!("services/web.yaml, document 1 (line 1): {expected}")]);
    }
}

#[test]
fn foreign_kinds_are_ignored_and_logged_once() {
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n";
    let knative = "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: web}\n";
    let mut folder = Folder::new();
    folder.write(&[(
        "web.yaml",
        &format!("{deployment}---\n{knative}---\n{deployment}---\n{}", service("web", 80)),
    )]);
    assert_eq!((folder.problems(), folder.ports("web")), (vec![], vec![80]));
    let ignored: Vec<_> =
        folder.update.ignored.iter().map(|(place, kind)| format!("{place}: {kind}")).collect();
    let expected = [
        "services/web.yaml, document 1 (line 1): apps/v1 Deployment",
        "services/web.yaml, document 2 (line 5): serving.knative.dev/v1 Service",
    ];
    assert_eq!(ignored, expected);
    folder.write(&[("more.yaml", deployment)]);
    assert_eq!(folder.update.ignored, []);
}

#[test]
fn names_are_checked() {
    for name in ["Web", "1web", "web.example", "web_1"] {
        let problems = problems(&service(name, 80));
        let expected = format!(
            "services/web.yaml, document 1 (line 1), Service default/{name}: metadata.name: Invalid value: {name:?}: a \
             DNS-1035 label must consist of"
        );
        assert!(matches!(&problems[..], [only] if only.starts_with(&expected)), "{problems:?}");
    }
    let problems = problems(&service("web", 80).replace("name: web", "name: web\n  namespace: my_team"));
    assert!(
        problems[0].contains("metadata.namespace: Invalid value: \"my_team\": a lowercase RFC 1123 label")
    );
}

#[test]
fn ports_of_a_service_are_checked() {
    let range = "must be between 1 and 65535, inclusive";
    assert_eq!(spec("{ports: []}"), ["spec.ports: Required value"]);
    assert_eq!(
        spec("{ports: [{port: 0}]}"),
        [
            format!("spec.ports[0].port: Invalid value: 0: {range}"),
            format!("spec.ports[0].targetPort: Invalid value: 0: {range}"),
        ]
    );
    assert_eq!(
        spec("{ports: [{port: 65536, targetPort: 1}]}"),
        [format!("spec.ports[0].port: Invalid value: 65536: {range}")]
    );
    assert_eq!(
        spec("{ports: [{port: 80, protocol: tcp}]}"),
        ["spec.ports[0].protocol: Unsupported value: \"tcp\": supported values: \"SCTP\", \"TCP\", \"UDP\""]
    );
    assert_eq!(
        spec("{ports: [{port: 1}, {port: 2, name: b}]}"),
        ["spec.ports[0].name: Required value: each of several ports needs a name"]
    );
    assert_eq!(
        spec("{ports: [{port: 1, name: a}, {port: 2, name: a}]}"),
        ["spec.ports[1].name: Duplicate value: \"a\""]
    );
    assert_eq!(
        spec("{ports: [{port: 1, name: a}, {port: 1, name: b}]}"),
        ["spec.ports[1]: Duplicate value: port 1, protocol TCP"]
    );
    assert_eq!(spec("{ports: [{port: 53, name: a}, {port: 53, name: b, protocol: UDP}]}"), [""; 0]);
    assert_eq!(
        spec("{ports: [{port: 1, targetPort: no_name}]}"),
        [
            "spec.ports[0].targetPort: Invalid value: \"no_name\": must contain only alpha-numeric characters (a-z, 0-9), \
          and hyphens (-)"
        ]
    );
}

#[test]
fn node_ports_are_checked() {
    assert_eq!(
        spec("{ports: [{port: 80, nodePort: 30080}]}"),
        ["spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"]
    );
    assert_eq!(
        spec(
            "{type: NodePort, ports: [{port: 1, name: a, nodePort: 30080}, {port: 2, name: b, nodePort: 30080}]}"
        ),
        ["spec.ports[1].nodePort: Duplicate value: 30080"]
    );
    let out_of_range = spec("{type: NodePort, ports: [{port: 80, nodePort: 80}]}");
    assert!(out_of_range[0].starts_with("spec.ports[0].nodePort: Invalid value: 80: "), "{out_of_range:?}");
    assert!(out_of_range[0].contains("30000-32767"), "{out_of_range:?}");
}

#[test]
fn types_and_policies_are_checked() {
    assert_eq!(
        spec("{type: Nodeport, ports: [{port: 80}]}"),
        ["spec.type: Unsupported value: \"Nodeport\": supported values: \"ClusterIP\", \"ExternalName\", \
          \"LoadBalancer\", \"NodePort\""]
    );
    assert_eq!(spec("{type: ExternalName}"), ["spec.externalName: Required value"]);
    assert_eq!(
        spec("{externalTrafficPolicy: Local, ports: [{port: 80}]}"),
        [
            "spec.externalTrafficPolicy: Invalid value: \"Local\": may only be set for externally-accessible services"
        ]
    );
    assert_eq!(
        spec("{type: LoadBalancer, healthCheckNodePort: 32000, ports: [{port: 80}]}"),
        [
            "spec.healthCheckNodePort: Invalid value: 32000: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        ]
    );
    assert_eq!(
        spec("{internalTrafficPolicy: local, ports: [{port: 80}]}"),
        [
            "spec.internalTrafficPolicy: Unsupported value: \"local\": supported values: \"Cluster\", \"Local\""
        ]
    );
}

#[test]
fn session_affinity_is_checked_and_lasts_three_hours_by_default() {
    assert_eq!(
        spec("{sessionAffinity: Sticky, ports: [{port: 80}]}"),
        ["spec.sessionAffinity: Unsupported value: \"Sticky\": supported values: \"ClientIP\", \"None\""]
    );
    for (seconds, is_valid) in [(0, false), (1, true), (86_400, true), (86_401, false)] {
        let text = format!(
            "{{sessionAffinity: ClientIP, sessionAffinityConfig: {{clientIP: {{timeoutSeconds: {seconds}}}}}, ports: \
             [{{port: 80}}]}}"
        );
        let expected = format!(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: {seconds}: must be greater than 0 and \
             less than 86400"
        );
        assert_eq!(spec(&text), if is_valid { vec![] } else { vec![expected] });
    }
    let folder = Folder::of(&[("a.yaml", &format!("{}  sessionAffinity: ClientIP\n", service("web", 80)))]);
    assert_eq!(folder.service("web").affinity_seconds, Some(10_800));
}

#[test]
fn addresses_of_a_service_are_checked() {
    assert_eq!(
        spec("{clusterIP: 10.96.0.300, ports: [{port: 80}]}"),
        ["spec.clusterIP: Invalid value: \"10.96.0.300\": must be a valid IP address, (e.g. 10.9.8.7 or \
          2001:db8::ffff)"]
    );
    assert_eq!(
        spec("{externalIPs: [127.0.0.1], ports: [{port: 80}]}"),
        [
            "spec.externalIPs[0]: Invalid value: \"127.0.0.1\": may not be in the loopback range (127.0.0.0/8, ::1/128)"
        ]
    );
    assert_eq!(
        spec("{type: NodePort, clusterIP: None, ports: [{port: 80}]}"),
        ["spec.clusterIP: Invalid value: \"None\": may not be set to 'None' for NodePort services"]
    );
    for range in ["10.0.0.0/33", "10.0.0.0/+8"] {
        assert_eq!(
            spec(&format!(
                "{{loadBalancerSourceRanges: [{range}], type: LoadBalancer, ports: [{{port: 80}}]}}"
            )),
            [format!(
                "spec.loadBalancerSourceRanges[0]: Invalid value: \"{range}\": must be a valid CIDR value, (e.g. \
                 10.9.8.0/24 or 2001:db8::/64)"
            )]
        );
    }
}

#[test]
fn every_error_of_an_object_is_reported() {
    assert_eq!(spec("{type: X, sessionAffinity: Z, ports: [{port: 0, targetPort: 1}]}").len(), 3);
}

#[test]
fn addresses_of_endpoints_are_checked() {
    let refused = [
        ("127.0.0.1", "may not be in the loopback range (127.0.0.0/8, ::1/128)"),
        ("169.254.1.1", "may not be in the link-local range (169.254.0.0/16, fe80::/10)"),
        ("224.0.0.1", "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
        ("0.0.0.0", "may not be unspecified (0.0.0.0 or ::)"),
    ];
    for (address, why) in refused {
        let endpoints = format!(
            "apiVersion: v1\nkind: Endpoints\nmetadata: {{name: web}}\nsubsets:\n- addresses: [{{ip: {address}}}]\n"
        );
        assert_eq!(
            problems(&endpoints),
            [format!(
                "services/web.yaml, document 1 (line 1), Endpoints default/web: subsets[0].addresses[0].ip: Invalid value: \
             {address:?}: {why}"
            )]
        );
        assert_eq!(
            problems(&slice("web-1", "web", address)),
            [format!(
                "services/web.yaml, document 1 (line 1), EndpointSlice default/web-1: endpoints[0].addresses[0]: Invalid \
             value: {address:?}: {why}"
            )]
        );
    }
}

#[test]
fn endpoint_slices_are_checked() {
    let place = "services/web.yaml, document 1 (line 1), EndpointSlice default/web-1:";
    let good = slice("web-1", "web", "10.0.0.1");
    assert_eq!(problems(&good), [""; 0]);
    assert_eq!(
        problems(&good.replace("IPv4", "IPv6")),
        [format!(
            "{place} endpoints[0].addresses[0]: Invalid value: \"10.0.0.1\": must be a valid IPv6 address"
        )]
    );
    assert_eq!(
        problems(&good.replace("IPv4", "ipv4")),
        [format!(
            "{place} addressType: Unsupported value: \"ipv4\": supported values: \"FQDN\", \"IPv4\", \"IPv6\""
        )]
    );
    // The folder rejects the whole slice, because its author can correct it. If the slice came from the API server, the
    // agent would leave out only this endpoint.
    assert_eq!(
        problems(&good.replace("[10.0.0.1]", "[10.0.0.1]\n- addresses: [224.0.1.5]")),
        [format!(
            "{place} endpoints[1].addresses[0]: Invalid value: \"224.0.1.5\": may not be a multicast address \
             (224.0.0.0/4, ff00::/8)"
        )]
    );
    assert_eq!(
        problems(&good.replace("[10.0.0.1]", "[]")),
        [format!("{place} endpoints[0].addresses: Required value: must contain at least 1 address")]
    );
    assert_eq!(
        problems(&good.replace("kubernetes.io/service-name", "app")),
        [format!(
            "{place} metadata.labels: label kubernetes.io/service-name is missing: these endpoints belong to no Service"
        )]
    );
    assert_eq!(
        problems(&good.replace("- port: 8080", "- port: 8080\n- port: 8081")),
        [format!("{place} ports[1].name: Duplicate value: \"\"")]
    );
}

#[test]
fn items_of_a_list_are_told_apart() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: \
                [{port: 1}]}}\n- {apiVersion: v1, kind: Service, metadata: {name: b}, spec: {ports: [{port: x}]}}\n";
    let folder = Folder::of(&[("web.yaml", text)]);
    assert_eq!(folder.names(), ["a"]);
    assert_eq!(
        folder.problems(),
        [
            "services/web.yaml, document 1 (line 1), Service default/b: items[1].spec.ports[0].port: invalid type: string \
          \"x\", expected i32"
        ]
    );
}

#[test]
fn items_of_a_service_list_need_no_kind() {
    let text = r#"{"apiVersion": "v1", "kind": "ServiceList", "items": [{"metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}]}}]}"#;
    let folder = Folder::of(&[("web.json", text)]);
    assert_eq!((folder.names(), folder.problems()), (vec!["a"], vec![]));
}

#[test]
fn alias_bomb_is_rejected() {
    let mut text = "a: &a [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for (letter, previous) in "bcdefghi".chars().zip("abcdefgh".chars()) {
        let aliases = vec![format!("*{previous}"); 9].join(",");
        text += &format!("{letter}: &{letter} [{aliases}]\n");
    }
    let problems = problems(&text);
    assert!(
        matches!(&problems[..], [only] if only.contains("document 1 (line 1): invalid YAML: ")),
        "{problems:?}"
    );
}

#[test]
fn unknown_field_keeps_the_last_endpoints() {
    let endpoints = "apiVersion: v1\nkind: Endpoints\nmetadata: {name: web}\n\
                     subsets: [{addresses: [{ip: 192.0.2.1}], ports: [{port: 80}]}]\n";
    let web = service("web", 80);
    let mut folder = Folder::of(&[("web.yaml", &format!("{web}---\n{endpoints}"))]);
    let before = folder.endpoints("web");
    assert_eq!(before.len(), 1);
    folder.write(&[("web.yaml", &format!("{web}---\n{}", endpoints.replace("subsets", "subset")))]);
    assert_eq!(folder.problems().len(), 1);
    assert_eq!(folder.endpoints("web"), before);
}
