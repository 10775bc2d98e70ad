//! Compares `deploy/` with the agent: the flags and paths in `deploy/` must exist, and its roles must grant exactly the
//! permissions that the agent uses. `deploy/lint/check.py` checks the chart with Helm's library.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clap::{CommandFactory as _, Parser as _};
use k8s_openapi::{
    Metadata, Resource,
    api::{
        apps::v1::DaemonSet,
        coordination::v1::Lease,
        core::v1::{ConfigMap, Container, Node, Secret, Service, ServiceAccount},
        discovery::v1::EndpointSlice,
        events::v1::Event,
        networking::v1::ServiceCIDR,
        rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::config::Kubeconfig;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    cli::{Cli, Command, KernelArgs, RunArgs},
    config::{Config, Source},
    daemon::socket,
    kubernetes::{ApiServer, addresses::lease_name, announce::VOTERS},
};

const FILES: [&str; 2] = ["lb-agent.yaml", "kubeadm.yaml"];
/// The chart rendered with the load balancer controller and with announcements.
const CONTROLLER: &str = "lint/controller.yaml";
/// The chart rendered with a load balancer class that no Lease can be named after.
const LEASE: &str = "lint/lease.yaml";

/// The objects that `deploy/README.md` installs to move a cluster from kube-proxy to the agent, node by node.
const MIGRATION: &str = "lint/migration.yaml";
/// The ConfigMap and the DaemonSet that kubeadm creates for kube-proxy.
const OF_KUBEADM: &str = "../lb-agent/src/config/testdata/kubeadm-objects.yaml";

fn deploy(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "deploy", name].iter().collect()
}

/// The Kubernetes objects in a file of `deploy/`, each with its kind.
fn objects(file: &str) -> Vec<(String, Value)> {
    let text = fs::read_to_string(deploy(file)).unwrap();
    text.split("\n---\n")
        .map(|document| {
            let value: Value = serde_saphyr::from_str(document).unwrap();
            (value["kind"].as_str().unwrap().to_owned(), value)
        })
        .collect()
}

/// Parses a Kubernetes object; panics at a field that the API does not have.
fn strictly<T: DeserializeOwned>(value: &Value) -> T {
    let mut unknown = Vec::new();
    let note = |path: serde_ignored::Path<'_>| unknown.push(path.to_string());
    let object = serde_ignored::deserialize(value, note).unwrap();
    assert!(unknown.is_empty(), "unknown fields: {unknown:?}");
    object
}

/// The only object of type `T` in a file of `deploy/`.
fn only<T: DeserializeOwned + Resource>(file: &str) -> T {
    let mut all = every(file);
    assert_eq!(all.len(), 1, "{file}: {}", T::KIND);
    all.remove(0)
}

/// The objects of type `T` in a file of `deploy/`.
fn every<T: DeserializeOwned + Resource>(file: &str) -> Vec<T> {
    let of_kind = objects(file).into_iter().filter(|(kind, _)| kind == T::KIND);
    of_kind
        .map(|(_, object)| {
            assert_eq!(object["apiVersion"], T::API_VERSION);
            strictly(&object)
        })
        .collect()
}

fn name<T: Metadata<Ty = ObjectMeta>>(object: &T) -> &str {
    object.metadata().name.as_deref().unwrap()
}

fn container(daemon_set: &DaemonSet) -> Container {
    container_named(daemon_set, "lb-agent")
}

fn container_named(daemon_set: &DaemonSet, name: &str) -> Container {
    let pod = daemon_set.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
    pod.containers.iter().find(|container| container.name == name).unwrap().clone()
}

#[test]
fn manifests_are_valid_objects_that_refer_to_each_other() {
    for file in FILES {
        let known = ["ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet", "ServiceAccount"];
        assert!(objects(file).iter().all(|(kind, _)| known.contains(&kind.as_str())));
        let daemon_set: DaemonSet = only(file);
        let account: ServiceAccount = only(file);
        let role: ClusterRole = only(file);
        let binding: ClusterRoleBinding = only(file);

        let spec = daemon_set.spec.as_ref().unwrap();
        let labels = spec.template.metadata.as_ref().unwrap().labels.as_ref().unwrap();
        let selector = spec.selector.match_labels.as_ref().unwrap();
        assert!(!selector.is_empty() && selector.iter().all(|(key, value)| labels.get(key) == Some(value)));

        let pod = spec.template.spec.as_ref().unwrap();
        assert_eq!(pod.containers.len(), 1, "optional containers are off");
        assert_eq!(pod.service_account_name.as_deref(), Some(name(&account)));
        assert_eq!(
            (binding.role_ref.kind.as_str(), binding.role_ref.name.as_str()),
            ("ClusterRole", name(&role))
        );
        let subject = &binding.subjects.as_ref().unwrap()[0];
        assert_eq!((subject.kind.as_str(), subject.name.as_str()), ("ServiceAccount", name(&account)));
        assert_eq!(subject.namespace, account.metadata.namespace);
        assert_eq!(subject.namespace, daemon_set.metadata.namespace);

        let volumes = pod.volumes.as_ref().unwrap();
        let mounts = container(&daemon_set).volume_mounts.unwrap();
        assert!(mounts.iter().map(|mount| &mount.name).eq(volumes.iter().map(|volume| &volume.name)));
    }
}

/// A permission in a role: API group, resource, verb.
type Permission = (String, String, String);

fn of<'a>(group: &'a str, resource: &'a str, verbs: &'a [&'a str]) -> impl Iterator<Item = Permission> + 'a {
    verbs.iter().map(move |verb| (group.to_owned(), resource.to_owned(), (*verb).to_owned()))
}

fn granted(rules: &[PolicyRule]) -> BTreeSet<Permission> {
    let mut granted = BTreeSet::new();
    for rule in rules {
        let verbs: Vec<&str> = rule.verbs.iter().map(String::as_str).collect();
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                granted.extend(of(group, resource, &verbs));
            }
        }
    }
    granted
}

/// The permissions that an agent needs without optional settings.
fn needed() -> BTreeSet<Permission> {
    let watched = &["list", "watch"];
    of(Service::GROUP, "services", watched)
        .chain(of(Node::GROUP, "nodes", watched))
        .chain(of(EndpointSlice::GROUP, "endpointslices", watched))
        .chain(of(ServiceCIDR::GROUP, "servicecidrs", watched))
        .chain(of(Event::GROUP, "events", &["create"]))
        .collect()
}

#[test]
fn agent_has_exactly_the_permissions_that_it_uses() {
    for file in FILES {
        let role: ClusterRole = only(file);
        assert_eq!(granted(&role.rules.unwrap()), needed(), "{file}");
    }
}

#[test]
fn controller_and_announcer_have_exactly_the_permissions_that_they_use() {
    let mut everywhere = needed();
    everywhere.extend(of(Service::GROUP, "services/status", &["patch"]));
    everywhere.extend(of(Service::GROUP, "namespaces", &["list", "watch"]));
    everywhere.extend(of("metallb.io", "ipaddresspools", &["list", "watch"]));
    for resource in ["l2advertisements", "bgpadvertisements", "bgppeers", "bfdprofiles", "communities"] {
        everywhere.extend(of("metallb.io", resource, &["list", "watch"]));
    }
    let role: ClusterRole = only(CONTROLLER);
    assert_eq!(granted(&role.rules.unwrap()), everywhere);

    let (roles, bindings): (Vec<Role>, Vec<RoleBinding>) = (every(CONTROLLER), every(CONTROLLER));
    let ([role, of_secret], [binding, to_secret]) = (&roles[..], &bindings[..]) else { panic!("{roles:?}") };
    assert_eq!((binding.role_ref.kind.as_str(), binding.role_ref.name.as_str()), ("Role", name(role)));
    assert_eq!(binding.metadata.namespace, role.metadata.namespace);
    let rules = role.rules.clone().unwrap();
    let here = of(Lease::GROUP, "leases", &["create", "get", "update"]).chain(of(
        ConfigMap::GROUP,
        "configmaps",
        &["create", "list", "watch", "update"],
    ));
    assert_eq!(granted(&rules), here.collect());
    // RBAC cannot limit `create` by name. The other verbs apply only to the Lease of the load balancer class that the
    // chart's values name, and to the ConfigMap with the nodes that vote on announcements.
    let limited = rules.iter().filter(|rule| !rule.verbs.contains(&"create".to_owned()));
    let names: Vec<_> = limited.map(|rule| rule.resource_names.clone().unwrap()).collect();
    assert_eq!(names, [vec![lease_name(Some("example.com/Lb"))], vec![VOTERS.to_owned()]]);

    // The second Role lets the agent read only the Secret that `bgp.passwordSecrets` names.
    assert_eq!(
        (of_secret.metadata.namespace.as_deref(), name(of_secret)),
        (Some("metallb-system"), "lb-agent-tor")
    );
    assert_eq!(
        (to_secret.role_ref.name.as_str(), &to_secret.metadata.namespace),
        (name(of_secret), &of_secret.metadata.namespace)
    );
    let subject = &to_secret.subjects.as_ref().unwrap()[0];
    assert_eq!(subject.namespace, binding.subjects.as_ref().unwrap()[0].namespace);
    let rules = of_secret.rules.clone().unwrap();
    assert_eq!(granted(&rules), of(Secret::GROUP, "secrets", &["get"]).collect());
    assert_eq!(rules[0].resource_names.as_deref(), Some(&["tor".to_owned()][..]));
}

#[test]
fn controller_may_use_the_lease_of_its_class() {
    for file in [CONTROLLER, LEASE] {
        let variables = container(&only(file)).env.unwrap();
        let class = variables.iter().find(|it| it.name == "LB_AGENT_LOAD_BALANCER_CLASS").unwrap();
        let roles: Vec<Role> = every(file);
        let rules = roles.iter().flat_map(|role| role.rules.iter().flatten());
        let of_leases =
            rules.filter(|rule| rule.resources.iter().flatten().any(|resource| resource == "leases"));
        let named: Vec<&String> = of_leases.flat_map(|rule| rule.resource_names.iter().flatten()).collect();
        assert_eq!(named, [&lease_name(class.value.as_deref())], "{file}");
    }
}

#[test]
fn announcer_gets_its_key_and_net_raw() {
    let daemon_set: DaemonSet = only(CONTROLLER);
    let container = container(&daemon_set);
    let capabilities = container.security_context.unwrap().capabilities.unwrap();
    assert_eq!(capabilities.add.unwrap(), ["BPF", "NET_ADMIN", "PERFMON", "NET_RAW"]);
    let mut command = Cli::command();
    command.build();
    let run = command.find_subcommand("run").unwrap();
    let known: Vec<_> = run.get_arguments().filter_map(|argument| argument.get_env()?.to_str()).collect();
    let variables = container.env.unwrap();
    let value = |name: &str| -> &str {
        let variable = variables.iter().find(|variable| variable.name == name && known.contains(&name));
        variable.unwrap().value.as_deref().unwrap()
    };
    assert_eq!((value("LB_AGENT_ANNOUNCE"), value("LB_AGENT_ANNOUNCE_PORT")), ("true", "7947"));
    assert_eq!(value("LB_AGENT_ANNOUNCE_PREFER"), "availability");
    let key = Path::new(value("LB_AGENT_ANNOUNCE_KEY_FILE"));
    let mounts = container.volume_mounts.unwrap();
    let mount = mounts.iter().find(|mount| key.starts_with(&mount.mount_path)).unwrap();
    let volumes = daemon_set.spec.unwrap().template.spec.unwrap().volumes.unwrap();
    let volume = volumes.into_iter().find(|volume| volume.name == mount.name).unwrap();
    assert_eq!(volume.secret.unwrap().secret_name.as_deref(), Some("lb-agent-announce"));
}

#[test]
fn containers_for_bgp_share_table_files_and_sockets_with_the_agent() {
    let daemon_set: DaemonSet = only(CONTROLLER);
    let [agent, fence, bird] = ["lb-agent", "fence", "bird"].map(|name| container_named(&daemon_set, name));
    let variables = agent.env.clone().unwrap();
    let value = |name: &str| variables.iter().find(|it| it.name == name).unwrap().value.clone().unwrap();
    let (table, file) = (value("LB_AGENT_ANNOUNCE_TABLE"), value("LB_AGENT_BIRD_CONFIG"));
    // The container `fence` runs a command of `lb-agent`, with the same routing table as the agent.
    let arguments = fence.args.clone().unwrap();
    Cli::try_parse_from([&["lb-agent".to_owned()], &arguments[..]].concat()).unwrap();
    assert!(arguments.windows(2).any(|pair| pair == ["--announce-table", &table]), "{arguments:?}");
    let start = bird.command.clone().unwrap().concat();
    assert!(start.contains(&format!("-c {file} -s {}", value("LB_AGENT_BIRD_SOCKET"))), "{start}");
    let volume = |container: &Container, path: &str| {
        let mounts = container.volume_mounts.clone().unwrap();
        mounts.into_iter().find(|mount| mount.mount_path == path).map(|mount| mount.name)
    };
    let of_bird = Path::new(&file).parent().unwrap().to_str().unwrap();
    for (path, other) in [(of_bird, &bird), (socket::FOLDER, &fence)] {
        assert!(volume(&agent, path).is_some() && volume(&agent, path) == volume(other, path), "{path}");
    }
}

#[test]
fn daemon_set_runs_on_every_node_with_few_privileges() {
    for file in FILES {
        let daemon_set: DaemonSet = only(file);
        let pod = daemon_set.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
        assert_eq!(pod.host_network, Some(true));
        assert_eq!((pod.host_pid, pod.host_ipc), (None, None));
        assert_eq!(pod.priority_class_name.as_deref(), Some("system-node-critical"));
        let toleration = &pod.tolerations.as_ref().unwrap()[0];
        assert_eq!(
            (toleration.operator.as_deref(), &toleration.key, &toleration.effect),
            (Some("Exists"), &None, &None)
        );

        let security = container(&daemon_set).security_context.unwrap();
        assert_eq!(security.privileged, None);
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        let capabilities = security.capabilities.unwrap();
        assert_eq!(capabilities.drop.unwrap(), ["ALL"]);
        // tests/tests/netns/deploy.rs runs the agent with these capabilities.
        assert_eq!(capabilities.add.unwrap(), ["BPF", "NET_ADMIN", "PERFMON"]);
    }
}

#[test]
fn flags_and_paths_in_the_manifests_exist() {
    let mut command = Cli::command();
    command.build();
    let run = command.find_subcommand("run").unwrap();
    let variables: Vec<_> = run.get_arguments().filter_map(|argument| argument.get_env()?.to_str()).collect();
    for file in FILES {
        let daemon_set: DaemonSet = only(file);
        let container = container(&daemon_set);
        assert_eq!(container.args.unwrap(), ["run"]);
        let mounts: Vec<_> =
            container.volume_mounts.unwrap().into_iter().map(|mount| mount.mount_path).collect();
        for variable in container.env.unwrap() {
            let Some(setting) = variable.name.strip_prefix("LB_AGENT_") else {
                assert!(variable.name.starts_with("KUBERNETES_SERVICE_"), "{}", variable.name);
                continue;
            };
            assert!(variables.contains(&variable.name.as_str()), "{}", variable.name);
            if let Some(path) = variable.value.filter(|_| ["BPFFS", "CGROUP", "CONFIG"].contains(&setting)) {
                assert!(mounts.iter().any(|mount| path.starts_with(mount.as_str())), "{path}");
            }
        }
    }
}

/// The root file system is read-only: every path that the agent writes must be in a writable volume.
#[test]
fn every_path_that_the_agent_writes_is_in_a_writable_volume() {
    for file in FILES {
        let daemon_set: DaemonSet = only(file);
        let pod = daemon_set.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
        let container = container(&daemon_set);
        let variables = container.env.unwrap();
        let bpffs = variables.iter().find(|variable| variable.name == "LB_AGENT_BPFFS").unwrap();
        let written = [
            bpffs.value.as_deref().unwrap(),
            socket::FOLDER,
            // By default, `bugreport` writes its archive to the working directory.
            container.working_dir.as_deref().unwrap_or("/"),
        ];
        let mounts = container.volume_mounts.unwrap();
        for path in written {
            let holders = mounts.iter().filter(|mount| Path::new(path).starts_with(&mount.mount_path));
            let mount = holders.max_by_key(|mount| mount.mount_path.len());
            let mount =
                mount.unwrap_or_else(|| panic!("{file}: {path} is on the read-only root file system"));
            assert_ne!(mount.read_only, Some(true), "{file}: {path}");
            let volume = pod.volumes.iter().flatten().find(|volume| volume.name == mount.name).unwrap();
            // The next Pod needs the pins, and the files that the agent keeps for the next agent.
            assert!(volume.host_path.is_some(), "{file}: {path}");
        }
    }
}

#[test]
fn configuration_is_accepted_and_its_port_is_declared() {
    let map: ConfigMap = only("lb-agent.yaml");
    let daemon_set: DaemonSet = only("lb-agent.yaml");
    let (key, text) = map.data.as_ref().unwrap().first_key_value().unwrap();
    let variables = container(&daemon_set).env.unwrap();
    let path = variables.iter().find(|variable| variable.name == "LB_AGENT_CONFIG").unwrap();
    assert_eq!(path.value.as_deref(), Some(format!("/etc/lb-agent/{key}").as_str()));

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(key), text).unwrap();
    let kernel = KernelArgs { config: Some(dir.path().join(key)), ..KernelArgs::default() };
    let run = RunArgs { manifests: Some("/".into()), ..RunArgs::default() };
    let config = Config::new(kernel, run).unwrap();
    assert_declares(&daemon_set, config.healthz.unwrap().port());
}

/// The agent's Pod reads the ConfigMap that kubeadm made for kube-proxy: the configuration under the key that the
/// manifest names, and the kubeconfig that the configuration names.
#[test]
fn config_map_of_kubeadm_has_the_files_that_the_pod_reads() {
    let map: ConfigMap = only(OF_KUBEADM);
    let data = map.data.as_ref().unwrap();
    for file in ["kubeadm.yaml", MIGRATION] {
        let daemon_set: DaemonSet = only(file);
        assert_eq!(daemon_set.metadata.namespace, map.metadata.namespace);
        let pod = daemon_set.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
        let volumes = pod.volumes.iter().flatten();
        let volume = volumes.clone().find(|volume| volume.config_map.is_some()).unwrap();
        assert_eq!(volume.config_map.as_ref().unwrap().name, name(&map));
        let container = container(&daemon_set);
        let mount = container.volume_mounts.iter().flatten().find(|mount| mount.name == volume.name).unwrap();
        let variables = container.env.unwrap();
        let path = variables.iter().find(|variable| variable.name == "LB_AGENT_CONFIG").unwrap();

        // A temporary folder replaces the mount path, in the environment variable and in the files.
        let dir = tempfile::tempdir().unwrap();
        let here = |text: &str| text.replace(&mount.mount_path, dir.path().to_str().unwrap());
        data.iter().for_each(|(key, text)| fs::write(dir.path().join(key), here(text)).unwrap());
        let kernel =
            KernelArgs { config: Some(here(path.value.as_ref().unwrap()).into()), ..KernelArgs::default() };
        let run = RunArgs { node_name: Some("a".to_owned()), ..RunArgs::default() };
        let config = Config::new(kernel, run).unwrap();
        assert_eq!(config.without_effect, [""; 0]);
        assert_declares(&daemon_set, config.healthz.unwrap().port());
        let Source::ApiServer(ApiServer::Kubeconfig(kubeconfig)) = config.source else { panic!("{file}") };
        let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
        let token = kubeconfig.auth_infos[0].auth_info.as_ref().unwrap().token_file.as_deref();
        // Kubernetes mounts this file by default, because the Pod does not set `automountServiceAccountToken`.
        assert_eq!(token, Some("/var/run/secrets/kubernetes.io/serviceaccount/token"));
        assert_eq!(pod.automount_service_account_token, None, "{file}");
    }
}

fn assert_declares(daemon_set: &DaemonSet, healthz: u16) {
    let ports = container(daemon_set).ports.unwrap();
    assert_eq!(ports[0].container_port, i32::from(healthz));
}

/// Probes run `lb-agent ready`, because an HTTP probe could reach another process that has the agent's port.
#[test]
fn probes_ask_the_agent_of_the_container() {
    for file in FILES {
        let container = container(&only(file));
        let live = [(&container.startup_probe, true), (&container.liveness_probe, true)];
        for (probe, live) in live.into_iter().chain([(&container.readiness_probe, false)]) {
            let probe = probe.as_ref().unwrap();
            assert_eq!((&probe.http_get, &probe.tcp_socket, &probe.grpc), (&None, &None, &None), "{file}");
            let words = probe.exec.as_ref().unwrap().command.as_ref().unwrap();
            let Cli { kernel, command } = Cli::try_parse_from(words).unwrap();
            let Command::Ready(ready) = command else { panic!("{file}: parsed as {command:?}") };
            assert_eq!((words[0].as_str(), ready.live), ("/usr/local/bin/lb-agent", live), "{file}");
            // If neither a flag nor the environment names the BPF file system, the command reads the file of --config,
            // and a mistake in that file would make the probe fail.
            let variables = container.env.as_ref().unwrap();
            assert!(
                kernel.bpffs.is_some() || variables.iter().any(|variable| variable.name == "LB_AGENT_BPFFS")
            );
            // The command itself waits for the agent up to 2 s.
            assert!(probe.timeout_seconds.is_some_and(|seconds| seconds >= 5), "{file}");
        }
    }
}

/// The arguments of the agent in the packaged systemd unit, and the text of the unit.
fn unit() -> (Vec<String>, String) {
    let text = fs::read_to_string(deploy("systemd/lb-agent.service")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/")).unwrap();
    (line.split(' ').map(str::to_owned).collect(), text)
}

#[test]
fn packaged_unit_and_configuration_serve_the_packaged_folder() {
    let (words, _) = unit();
    let Cli { mut kernel, command } = Cli::try_parse_from(&words).unwrap();
    assert_eq!(kernel.config.as_deref(), Some(Path::new("/etc/lb-agent/config.yaml")));
    let Command::Run(run) = command else { panic!("parsed as {command:?}") };

    // The agent rejects a folder that does not exist, and the package may not be installed on this machine.
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(deploy("debian/config.yaml")).unwrap();
    assert!(text.contains("\nmanifests: /etc/lb-agent/services\n"));
    let file = dir.path().join("config.yaml");
    fs::write(&file, text.replace("/etc/lb-agent/services", dir.path().to_str().unwrap())).unwrap();
    kernel.config = Some(file);
    let config = Config::new(kernel, *run).unwrap();
    assert!(matches!(&config.source, Source::Manifests(folder) if folder == dir.path()));
    assert_eq!(config.without_effect, [""; 0]);
}

#[test]
fn packaged_unit_lets_the_agent_write_only_what_it_writes() {
    let (_, text) = unit();
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap();
    // The capabilities are the same as in the DaemonSet.
    assert_eq!(value("CapabilityBoundingSet"), "CAP_BPF CAP_NET_ADMIN CAP_PERFMON");
    assert_eq!(value("ProtectSystem"), "strict");
    assert_eq!(Path::new("/run").join(value("RuntimeDirectory")), Path::new(socket::FOLDER));
    assert_eq!(value("ReadWritePaths"), "/sys/fs/bpf /proc/sys/net");
    assert_eq!((value("Type"), value("Restart")), ("notify", "always"));
    let hidden = u32::from_str_radix(value("UMask"), 8).unwrap();
    assert_eq!(crate::flow_log::MODE & !hidden, crate::flow_log::MODE, "the group of a flow log may read it");
    assert_eq!(hidden & 0o007, 0o007, "others read nothing");
}

/// The context of the Docker build contains every member of the workspace, because Cargo builds nothing if a member is
/// missing, and every folder from which a source includes files.
#[test]
fn docker_build_gets_every_folder_that_it_reads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = ")).unwrap();
    let members: Vec<&str> = members.split('"').skip(1).step_by(2).collect();
    assert!(members.contains(&"lb-agent"), "{members:?}");
    let context = fs::read_to_string(deploy("Dockerfile.dockerignore")).unwrap();
    let is_in_context = |folder: &str| context.lines().any(|line| line == format!("!{folder}"));
    let mut included = 0;
    for member in members {
        let folder = member.split('/').next().unwrap();
        assert!(is_in_context(folder), "{folder} is not in the context");
        for source in sources(&root.join(member).join("src")) {
            let text = fs::read_to_string(&source).unwrap();
            // Tests are not part of the build, so the context may lack the files that they include.
            let text = text.split("#[cfg(test)]").next().unwrap();
            for path in included_paths(text) {
                let Ok(path) = source.with_file_name(path).canonicalize() else { continue };
                let path = path.strip_prefix(root.canonicalize().unwrap()).unwrap();
                let folder = path.iter().next().unwrap().to_str().unwrap();
                assert!(is_in_context(folder), "{folder}, of which {} includes files", source.display());
                included += usize::from(folder == "docs");
            }
        }
    }
    assert!(included > 0, "the web pages include those of docs");
}

/// The paths in `include_str!("PATH")`, also if they are the first part of a `concat!`.
fn included_paths(text: &str) -> impl Iterator<Item = &str> {
    let after = |start| text.split(start).skip(1).filter_map(|after| after.split('"').next());
    after("include_str!(\"").chain(after("include_str!(concat!(\"")).chain(after("include_bytes!(\""))
}

/// All Rust sources below a folder, without those of tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let entries = entries.filter(|path| path.file_name().is_none_or(|name| name != "tests"));
    entries
        .flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] })
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.ends_with(".rs") && !name.ends_with("test.rs") && !name.ends_with("tests.rs")
        })
        .collect()
}
