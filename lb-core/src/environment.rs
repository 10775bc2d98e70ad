//! The environment variables by which processes find Services, as kubelet gives them to containers
//! (`pkg/kubelet/envvars/envvars.go`).

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    net::IpAddr,
};

use crate::{
    api::DEFAULT_NAMESPACE,
    model::{ObjectName, Service, ServicePort},
};

/// Namespace and name of the API server's Service. Processes of every namespace get its variables, unless the namespace
/// has a Service of this name.
pub const MASTER: (&str, &str) = (DEFAULT_NAMESPACE, "kubernetes");

/// The environment variables for a process, in the order in which they are printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// Names and values, each name once. A name begins with a digit if the Service's name does.
    pub variables: Vec<(String, String)>,
    /// The variables that two Services define with different values.
    pub collisions: Vec<Collision>,
}

/// A variable that two Services define with different values; the value of the Service that comes first in
/// [`environment`] counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collision {
    /// Name of the variable.
    pub variable: String,
    /// Name of the Service whose value the variable has.
    pub kept: String,
    /// Name of the Service whose value is ignored.
    pub ignored: String,
}

impl fmt::Display for Collision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { variable, kept, ignored } = self;
        write!(f, "Services {kept} and {ignored} both define {variable}: it has the value of {kept}")
    }
}

/// The variables of the Services in `namespace`, and of `default/kubernetes` unless `namespace` has a Service
/// `kubernetes`. The variables of the Service `kubernetes` come first, then those of the other Services by name; the
/// variables of one Service are in kubelet's order.
///
/// `services` may contain Services of other namespaces. A Service without port or cluster IP has no variables.
pub fn environment<'a>(
    services: impl Iterator<Item = (&'a ObjectName, &'a Service)>,
    namespace: &str,
) -> Environment {
    let (master_namespace, master) = MASTER;
    let mut by_name = BTreeMap::new();
    for (name, service) in services {
        if *name.namespace == *namespace {
            by_name.insert(&*name.name, service);
        } else if (&*name.namespace, &*name.name) == (master_namespace, master) {
            by_name.entry(master).or_insert(service);
        }
    }
    let mut builder = Builder::default();
    let first = by_name.remove_entry(master);
    for (name, service) in first.into_iter().chain(by_name) {
        for (variable, value) in variables(name, service) {
            builder.add(name, variable, value);
        }
    }
    builder.environment
}

/// Collects variables, and remembers which Service has defined each.
#[derive(Default)]
struct Builder<'a> {
    environment: Environment,
    /// For each variable: the Service that has defined it, and the variable's index in `environment.variables`.
    defined: BTreeMap<String, (&'a str, usize)>,
}

impl<'a> Builder<'a> {
    fn add(&mut self, service: &'a str, variable: String, value: String) {
        let Environment { variables, collisions } = &mut self.environment;
        match self.defined.entry(variable.clone()) {
            Entry::Vacant(entry) => {
                entry.insert((service, variables.len()));
                variables.push((variable, value));
            }
            // If two ports of a Service define the same variable, kubelet uses the last one's value.
            Entry::Occupied(entry) if entry.get().0 == service => variables[entry.get().1].1 = value,
            Entry::Occupied(entry) => {
                let (kept, position) = *entry.get();
                if variables[position].1 != value {
                    let (kept, ignored) = (kept.to_owned(), service.to_owned());
                    collisions.push(Collision { variable, kept, ignored });
                }
            }
        }
    }
}

/// The variables that one Service defines.
fn variables(name: &str, service: &Service) -> Vec<(String, String)> {
    let (Some(ip), Some(first)) = (service.cluster_ips.first(), service.ports.first()) else {
        return Vec::new();
    };
    let prefix = upper(name);
    let mut variables = vec![
        (format!("{prefix}_SERVICE_HOST"), ip.to_string()),
        (format!("{prefix}_SERVICE_PORT"), first.port.to_string()),
    ];
    let named = service.ports.iter().filter(|port| !port.name.is_empty());
    variables.extend(
        named.map(|port| (format!("{prefix}_SERVICE_PORT_{}", upper(&port.name)), port.port.to_string())),
    );
    variables.push((format!("{prefix}_PORT"), url(*ip, first)));
    for port in &service.ports {
        let protocol = port.protocol.as_str();
        let prefix = format!("{prefix}_PORT_{}_{}", port.port, protocol.to_uppercase());
        variables.extend([
            (format!("{prefix}_PROTO"), protocol.to_lowercase()),
            (format!("{prefix}_PORT"), port.port.to_string()),
            (format!("{prefix}_ADDR"), ip.to_string()),
        ]);
        let position = variables.len() - 3;
        variables.insert(position, (prefix, url(*ip, port)));
    }
    variables
}

/// A URL such as `tcp://10.96.0.1:443`; IPv6 addresses are in brackets.
fn url(ip: IpAddr, port: &ServicePort) -> String {
    let address = std::net::SocketAddr::from((ip, port.port));
    format!("{}://{address}", port.protocol.as_str().to_lowercase())
}

/// The name of a Service or port in the form that variables' names contain: capitals and underscores.
fn upper(name: &str) -> String {
    name.to_uppercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Protocol;

    fn service(ips: &[&str], ports: &[(&str, Protocol, u16)]) -> Service {
        let port = |(name, protocol, port): &(&str, Protocol, u16)| ServicePort {
            name: (*name).into(),
            protocol: *protocol,
            port: *port,
            node_port: None,
        };
        Service {
            cluster_ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
            ports: ports.iter().map(port).collect(),
            ..Service::default()
        }
    }

    fn environment_of(services: &[(&str, Service)], namespace: &str) -> Environment {
        let services: Vec<_> = services
            .iter()
            .map(|(name, service)| {
                let (namespace, name) = name.split_once('/').unwrap();
                (ObjectName::new(namespace, name), service)
            })
            .collect();
        environment(services.iter().map(|(name, service)| (name, *service)), namespace)
    }

    fn lines(environment: &Environment) -> Vec<String> {
        environment.variables.iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    #[test]
    fn variables_of_an_unnamed_port_are_those_of_kubelet() {
        let redis = service(&["10.0.0.11"], &[("", Protocol::Tcp, 6379)]);
        let found = environment_of(&[("a/redis-master", redis)], "a");
        let expected = [
            "REDIS_MASTER_SERVICE_HOST=10.0.0.11",
            "REDIS_MASTER_SERVICE_PORT=6379",
            "REDIS_MASTER_PORT=tcp://10.0.0.11:6379",
            "REDIS_MASTER_PORT_6379_TCP=tcp://10.0.0.11:6379",
            "REDIS_MASTER_PORT_6379_TCP_PROTO=tcp",
            "REDIS_MASTER_PORT_6379_TCP_PORT=6379",
            "REDIS_MASTER_PORT_6379_TCP_ADDR=10.0.0.11",
        ];
        assert_eq!(lines(&found), expected);
    }

    #[test]
    fn named_ports_and_the_first_port_are_those_of_kubelet() {
        let ports = [("u-d-p", Protocol::Udp, 8081), ("t-c-p", Protocol::Tcp, 8081)];
        let found = environment_of(&[("a/abc-123", service(&["5.6.7.8"], &ports))], "a");
        let expected = [
            "ABC_123_SERVICE_HOST=5.6.7.8",
            "ABC_123_SERVICE_PORT=8081",
            "ABC_123_SERVICE_PORT_U_D_P=8081",
            "ABC_123_SERVICE_PORT_T_C_P=8081",
            "ABC_123_PORT=udp://5.6.7.8:8081",
            "ABC_123_PORT_8081_UDP=udp://5.6.7.8:8081",
            "ABC_123_PORT_8081_UDP_PROTO=udp",
            "ABC_123_PORT_8081_UDP_PORT=8081",
            "ABC_123_PORT_8081_UDP_ADDR=5.6.7.8",
            "ABC_123_PORT_8081_TCP=tcp://5.6.7.8:8081",
            "ABC_123_PORT_8081_TCP_PROTO=tcp",
            "ABC_123_PORT_8081_TCP_PORT=8081",
            "ABC_123_PORT_8081_TCP_ADDR=5.6.7.8",
        ];
        assert_eq!(lines(&found), expected);
    }

    #[test]
    fn only_urls_have_ipv6_addresses_in_brackets_and_only_the_first_family_counts() {
        let dual = service(&["2001:db8::", "10.0.0.1"], &[("", Protocol::Tcp, 8084)]);
        let found = lines(&environment_of(&[("a/super-ipv6", dual)], "a"));
        assert_eq!(found[0], "SUPER_IPV6_SERVICE_HOST=2001:db8::");
        assert_eq!(found[2], "SUPER_IPV6_PORT=tcp://[2001:db8::]:8084");
        assert_eq!(found[6], "SUPER_IPV6_PORT_8084_TCP_ADDR=2001:db8::");
        assert_eq!(found.len(), 7);
    }

    #[test]
    fn sctp_is_named_like_the_other_protocols() {
        let found = environment_of(&[("a/s", service(&["1.2.3.4"], &[("", Protocol::Sctp, 777)]))], "a");
        assert_eq!(lines(&found)[3], "S_PORT_777_SCTP=sctp://1.2.3.4:777");
    }

    #[test]
    fn services_without_cluster_ip_or_port_have_no_variables() {
        let without_ip = service(&[], &[("", Protocol::Tcp, 80)]);
        let without_port = service(&["10.0.0.1"], &[]);
        assert_eq!(
            environment_of(&[("a/b", without_ip), ("a/c", without_port)], "a"),
            Environment::default()
        );
    }

    #[test]
    fn api_server_comes_first_in_each_namespace_and_other_namespaces_do_not_come() {
        let of = |ip: &str| service(&[ip], &[("", Protocol::Tcp, 80)]);
        let services =
            [("a/api", of("10.0.0.2")), ("b/web", of("10.0.0.3")), ("default/kubernetes", of("10.0.0.1"))];
        let hosts = |namespace| -> Vec<String> {
            let found = environment_of(&services, namespace);
            lines(&found).into_iter().filter(|line| line.contains("_SERVICE_HOST=")).collect()
        };
        assert_eq!(hosts("a"), ["KUBERNETES_SERVICE_HOST=10.0.0.1", "API_SERVICE_HOST=10.0.0.2"]);
        assert_eq!(hosts("default"), ["KUBERNETES_SERVICE_HOST=10.0.0.1"]);
        assert_eq!(hosts("c"), ["KUBERNETES_SERVICE_HOST=10.0.0.1"]);
    }

    #[test]
    fn service_called_kubernetes_replaces_the_api_server_in_its_namespace() {
        let of = |ip: &str| service(&[ip], &[("", Protocol::Tcp, 80)]);
        let services = [("a/kubernetes", of("10.0.0.2")), ("default/kubernetes", of("10.0.0.1"))];
        for services in [&services[..], &[services[1].clone(), services[0].clone()]] {
            assert_eq!(lines(&environment_of(services, "a"))[0], "KUBERNETES_SERVICE_HOST=10.0.0.2");
        }
    }

    #[test]
    fn first_service_wins_a_variable_and_the_other_is_named() {
        let of = |ip: &str| service(&[ip], &[("", Protocol::Tcp, 80)]);
        let found = environment_of(&[("a/foo-service", of("10.0.0.2")), ("a/foo", of("10.0.0.1"))], "a");
        assert!(lines(&found).contains(&"FOO_SERVICE_PORT=80".to_owned()));
        let collision = Collision {
            variable: "FOO_SERVICE_PORT".into(),
            kept: "foo".into(),
            ignored: "foo-service".into(),
        };
        assert_eq!(found.collisions, [collision]);
        let names: Vec<_> = found.variables.iter().map(|(name, _)| name).collect();
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }

    #[test]
    fn last_port_with_a_number_and_protocol_wins_within_a_service() {
        let ports = [("a", Protocol::Tcp, 80), ("b", Protocol::Tcp, 80), ("a-b", Protocol::Udp, 1)];
        let found = environment_of(&[("a/x", service(&["10.0.0.1"], &ports))], "a");
        assert_eq!(found.collisions, []);
        assert_eq!(lines(&found).iter().filter(|line| line.starts_with("X_PORT_80_TCP=")).count(), 1);
    }
}
