//! Tests with the examples in the Kubernetes documentation of Services, verbatim.

use std::time::Duration;

use lb_core::{
    model::{ConnectionTimeouts, Protocol},
    plan::Contents,
};

use super::{Folder, options, options_with};

const WITH_SELECTOR: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  selector:
    app: MyApp
  ports:
    - protocol: TCP
      port: 80
      targetPort: 9376
";

const WITHOUT_SELECTOR: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  ports:
    - protocol: TCP
      port: 80
      targetPort: 9376
";

const ENDPOINTS: &str = "\
apiVersion: v1
kind: Endpoints
metadata:
  name: my-service
subsets:
  - addresses:
      - ip: 192.0.2.42
    ports:
      - port: 9376
";

const TWO_PORTS: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  selector:
    app: MyApp
  ports:
    - name: http
      protocol: TCP
      port: 80
      targetPort: 9376
    - name: https
      protocol: TCP
      port: 443
      targetPort: 9377
";

const LOAD_BALANCER: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  selector:
    app: MyApp
  ports:
    - protocol: TCP
      port: 80
      targetPort: 9376
  clusterIP: 10.0.171.239
  type: LoadBalancer
status:
  loadBalancer:
    ingress:
    - ip: 192.0.2.127
";

const EXTERNAL_NAME: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
  namespace: prod
spec:
  type: ExternalName
  externalName: my.database.example.com
";

const EXTERNAL_IPS: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  selector:
    app: MyApp
  ports:
    - name: http
      protocol: TCP
      port: 80
      targetPort: 9376
  externalIPs:
    - 80.11.12.10
";

const LOAD_BALANCER_IP: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  selector:
    app: MyApp
  ports:
  - protocol: TCP
    port: 80
    targetPort: 9376
  clusterIP: 10.0.171.239
  loadBalancerIP: 78.11.24.19
  type: LoadBalancer
status:
  loadBalancer:
    ingress:
    - ip: 146.148.47.155
";

#[test]
fn service_gets_a_cluster_ip_and_the_default_namespace() {
    for example in [WITH_SELECTOR, WITHOUT_SELECTOR] {
        let folder = Folder::of(&[("a.yaml", example)]);
        let service = folder.service("my-service");
        assert!(matches!(service.cluster_ips[..], [ip] if ip.is_ipv4()), "{service:?}");
        assert_eq!(folder.ports("my-service"), [80]);
        assert_eq!((service.ports[0].protocol, &*service.ports[0].name), (Protocol::Tcp, ""));
        assert_eq!((service.ports[0].node_port, service.affinity_seconds), (None, None));
        assert_eq!(folder.problems(), [""; 0]);
    }
}

#[test]
fn service_without_selector_uses_the_endpoints_of_its_name() {
    let together = format!("{WITHOUT_SELECTOR}---\n{ENDPOINTS}");
    for files in [
        &[("all.yaml", &*together)][..],
        &[("endpoints.yaml", ENDPOINTS), ("service.yaml", WITHOUT_SELECTOR)],
    ] {
        let folder = Folder::of(files);
        assert_eq!(folder.ports("my-service"), [80]);
        assert_eq!(folder.endpoints("my-service"), ["192.0.2.42:9376"]);
        assert_eq!(folder.problems(), [""; 0]);
    }
}

#[test]
fn service_can_have_several_named_ports() {
    let folder = Folder::of(&[("a.yaml", TWO_PORTS)]);
    let ports: Vec<_> =
        folder.service("my-service").ports.iter().map(|port| (&*port.name, port.port)).collect();
    assert_eq!(ports, [("http", 80), ("https", 443)]);
}

#[test]
fn cluster_ip_is_assigned_as_requested() {
    let own_range = options_with("10.0.0.0/16");
    for (options, example) in
        [(options(), LOAD_BALANCER), (options(), LOAD_BALANCER_IP), (own_range, LOAD_BALANCER)]
    {
        let mut folder = Folder::with(options, &Contents::default());
        folder.write(&[("lb.yaml", example)]);
        let service = folder.service("my-service");
        assert_eq!(service.cluster_ips, ["10.0.171.239".parse::<std::net::IpAddr>().unwrap()]);
        assert!(
            service.ports[0].node_port.is_some_and(|port| (30_000..=32_767).contains(&port)),
            "{service:?}"
        );
        assert_eq!(folder.problems(), [""; 0]);
    }
}

#[test]
fn cluster_ip_outside_a_range_that_is_set_is_rejected() {
    for example in [LOAD_BALANCER, LOAD_BALANCER_IP] {
        let mut folder = Folder::with(options_with("10.96.0.0/12"), &Contents::default());
        folder.write(&[("lb.yaml", example)]);
        assert_eq!(folder.names(), [""; 0]);
        assert_eq!(
            folder.problems(),
            [
                "services/lb.yaml, document 1 (line 1), Service default/my-service: spec.clusterIPs: Invalid value: \
              \"10.0.171.239\": failed to allocate IP 10.0.171.239: the provided IP is not in the valid range \
              10.96.0.0/12 (10.96.0.1 to 10.111.255.254)"
            ]
        );
    }
}

#[test]
fn external_name_service_has_no_addresses() {
    let folder = Folder::of(&[("a.yaml", EXTERNAL_NAME)]);
    assert_eq!((folder.update.changes.len(), folder.problems()), (0, vec![]));
}

#[test]
fn external_ips_are_accepted() {
    let folder = Folder::of(&[("a.yaml", EXTERNAL_IPS)]);
    assert_eq!(folder.ports("my-service"), [80]);
    assert_eq!(folder.problems(), [""; 0]);
}

/// The annotations of all examples for clouds, without the one whose key is spelt with a full-width colon.
const ANNOTATIONS: &str = r#"
metadata:
      name: my-service
      annotations:
        cloud.google.com/load-balancer-type: "Internal"
        service.beta.kubernetes.io/aws-load-balancer-internal: 0.0.0.0/0
        service.beta.kubernetes.io/azure-load-balancer-internal: "true"
        service.beta.kubernetes.io/openstack-internal-load-balancer: "true"
        service.beta.kubernetes.io/cce-load-balancer-internal-vpc: "true"
        service.kubernetes.io/qcloud-loadbalancer-internal-subnetid: subnet-xxxxx
        service.beta.kubernetes.io/aws-load-balancer-ssl-cert: arn:aws:acm:us-east-1:123456789012:certificate/12345678-1234-1234-1234-123456789012
        service.beta.kubernetes.io/aws-load-balancer-backend-protocol: (https|http|ssl|tcp)
        service.beta.kubernetes.io/aws-load-balancer-ssl-ports: "443,8443"
        service.beta.kubernetes.io/aws-load-balancer-ssl-negotiation-policy: "ELBSecurityPolicy-TLS-1-2-2017-01"
        service.beta.kubernetes.io/aws-load-balancer-proxy-protocol: "*"
        service.beta.kubernetes.io/aws-load-balancer-access-log-enabled: "true"
        # Specifies whether access logs are enabled for the load balancer
        service.beta.kubernetes.io/aws-load-balancer-access-log-emit-interval: "60"
        service.beta.kubernetes.io/aws-load-balancer-access-log-s3-bucket-name: "my-bucket"
        service.beta.kubernetes.io/aws-load-balancer-access-log-s3-bucket-prefix: "my-bucket-prefix/prod"
        service.beta.kubernetes.io/aws-load-balancer-connection-draining-enabled: "true"
        service.beta.kubernetes.io/aws-load-balancer-connection-draining-timeout: "60"
        service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout: "60"
        service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled: "true"
        service.beta.kubernetes.io/aws-load-balancer-additional-resource-tags: "environment=prod,owner=devops"
        service.beta.kubernetes.io/aws-load-balancer-healthcheck-healthy-threshold: ""
        service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold: "3"
        service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval: "20"
        service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout: "5"
        service.beta.kubernetes.io/aws-load-balancer-extra-security-groups: "sg-53fae93f,sg-42efd82e"
        service.beta.kubernetes.io/aws-load-balancer-type: "nlb"
        service.kubernetes.io/qcloud-loadbalancer-backends-label: key in (value1, value2)
        service.kubernetes.io/service.extensiveParameters: ""
        service.kubernetes.io/service.listenerParameters: ""
        service.kubernetes.io/loadbalance-type: xxxxx
        service.kubernetes.io/qcloud-loadbalancer-internet-charge-type: xxxxxx
        service.kubernetes.io/qcloud-loadbalancer-internet-max-bandwidth-out: "10"
        service.kubernetes.io/local-svc-only-bind-node-with-pod: true
spec:
  type: LoadBalancer
  ports: [{port: 80}]
"#;

#[test]
fn annotations_of_clouds_are_read_as_the_documentation_writes_them() {
    let folder = Folder::of(&[("lb.yaml", &format!("apiVersion: v1\nkind: Service{ANNOTATIONS}"))]);
    assert_eq!(
        folder.problems(),
        ["services/lb.yaml, document 1 (line 1), Service default/my-service: \
             metadata.annotations.service.kubernetes.io/local-svc-only-bind-node-with-pod: true is no string, and is \
             read as \"true\": quote it"]
    );
    let settings = folder.service("my-service").settings.clone().unwrap();
    assert_eq!(settings.annotation_errors, []);
    assert!(settings.proxy_protocol && settings.check.is_some());
    let minute = Some(Duration::from_mins(1));
    assert_eq!(settings.timeouts, ConnectionTimeouts { idle: minute, drain: minute });
    let ignored: Vec<_> = settings.ignored.iter().map(|it| (&*it.annotation, &*it.value)).collect();
    assert!(ignored.contains(&("service.kubernetes.io/local-svc-only-bind-node-with-pod", "true")));
}

#[test]
fn labels_and_annotations_may_be_booleans_and_numbers() {
    let metadata = "{name: web, labels: {a: true}, annotations: {lb.dev/drain-timeout: 60, \
                    lb.dev/fail-closed: true, lb.dev/scheduler: rr}}";
    let text =
        format!("apiVersion: v1\nkind: Service\nmetadata: {metadata}\nspec: {{ports: [{{port: 80}}]}}\n");
    let folder = Folder::of(&[("a.yaml", &text)]);
    let settings = folder.service("web").settings.clone().unwrap();
    assert!(settings.fail_closed);
    assert_eq!(settings.timeouts.drain, Some(Duration::from_mins(1)));
    let problems = folder.problems();
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems.iter().all(|problem| problem.ends_with(": quote it")), "{problems:?}");
    let list = text.replace("lb.dev/drain-timeout: 60", "lb.dev/drain-timeout: [60]");
    let folder = Folder::of(&[("a.yaml", &list)]);
    assert_eq!(folder.names(), [""; 0], "a list is rejected");
}

#[test]
fn target_port_can_be_a_name() {
    let folder = Folder::of(&[("a.yaml", &WITH_SELECTOR.replace("9376", "http-web-svc"))]);
    assert_eq!(folder.ports("my-service"), [80]);
    assert_eq!(folder.problems(), [""; 0]);
}
