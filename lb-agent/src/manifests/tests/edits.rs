//! Tests of edits of the folder of manifests.

use std::net::IpAddr;

use lb_common::{Address, FrontendKind, ServiceKey};
use lb_core::{
    model::{ObjectName, Protocol, Service, ServicePortName},
    plan::{Contents, ServiceLabels},
};

use super::{Content, Folder, edit, options, service, service_at, slice};

fn documents(documents: &[&str]) -> String {
    documents.join("---\n")
}

#[test]
fn only_changes_are_emitted() {
    let (a, b) = (service("a", 1), service("b", 2));
    let mut folder = Folder::of(&[("all.yaml", &documents(&[&a, &b]))]);
    assert_eq!(folder.update.changes.len(), 2);
    folder.write(&[("all.yaml", &documents(&[&a, &b]))]);
    assert_eq!(folder.update.changes, []);
    folder.write(&[("all.yaml", &documents(&[&a, &service("b", 3)]))]);
    assert_eq!((folder.update.changes.len(), folder.ports("b")), (1, vec![3]));
    folder.write(&[("all.yaml", &documents(&["# moved\n", &service("b", 3), &a]))]);
    assert_eq!(folder.update.changes, []);
}

#[test]
fn removing_a_document_or_file_removes_its_objects() {
    let mut folder = Folder::of(&[
        ("ab.yaml", &documents(&[&service("a", 1), &service("b", 2)])),
        ("c.yaml", &service("c", 3)),
    ]);
    folder.write(&[("ab.yaml", &service("b", 2))]);
    assert_eq!(folder.names(), ["b", "c"]);
    folder.remove("c.yaml");
    assert_eq!(folder.names(), ["b"]);
    folder.remove("never-was.yaml");
    assert_eq!(folder.update.changes, []);
}

/// A tool first writes the file that loses the object, and a moment later the file that gets the object.
#[test]
fn object_that_moves_to_a_file_that_is_read_later_stays() {
    let mut folder = Folder::of(&[("ab.yaml", &documents(&[&service("a", 1), &service("b", 2)]))]);
    folder.manifests.set_awaits_moves(true);
    folder.write(&[("ab.yaml", &service("b", 2))]);
    assert_eq!((folder.update.changes.len(), folder.names()), (0, vec!["a", "b"]));
    folder.manifests.set_awaits_moves(false);
    folder.write(&[("c.yaml", &service("a", 1))]);
    assert_eq!((folder.update.changes.len(), folder.names()), (0, vec!["a", "b"]));
    folder.manifests.set_awaits_moves(true);
    folder.write(&[("c.yaml", "")]);
    folder.manifests.set_awaits_moves(false);
    folder.write(&[("d.yaml", &service("d", 4))]);
    assert_eq!(folder.names(), ["b", "d"], "no file has the object");
}

#[test]
fn object_with_a_bad_field_keeps_its_last_good_state() {
    let mut folder = Folder::of(&[("all.yaml", &documents(&[&service("a", 1), &service("b", 2)]))]);
    folder.write(&[("all.yaml", &documents(&[&service("a", 0), &service("b", 3)]))]);
    assert_eq!((folder.ports("a"), folder.ports("b"), folder.problems().len()), (vec![1], vec![3], 2));
    folder.write(&[("all.yaml", &documents(&[&service("a", 4), &service("b", 3)]))]);
    assert_eq!((folder.ports("a"), folder.problems().len()), (vec![4], 0));
}

#[test]
fn broken_document_keeps_the_objects_of_its_file() {
    let (a, b, c) = (service("a", 1), service("b", 2), service("c", 3));
    let mut folder = Folder::of(&[("all.yaml", &documents(&[&a, &b, &c])), ("d.yaml", &service("d", 4))]);
    let broken = b.replace("spec:", "spec: {");
    folder.write(&[("all.yaml", &documents(&[&service("a", 5), &broken, &service("c", 6)]))]);
    assert_eq!((folder.ports("a"), folder.ports("b"), folder.ports("c")), (vec![5], vec![2], vec![6]));
    assert_eq!(folder.problems().len(), 1);
    folder.remove("d.yaml");
    assert_eq!(folder.names(), ["a", "b", "c"], "objects of other files are removed");
    folder.write(&[("all.yaml", &documents(&[&a, &c]))]);
    assert_eq!(folder.names(), ["a", "c"], "the broken document is gone, and with it its object");
}

#[test]
fn broken_document_at_startup_affects_no_other() {
    let folder =
        Folder::of(&[("all.yaml", &documents(&["a: [\n", &service("a", 1), "\tb\n", &service("b", 2)]))]);
    assert_eq!((folder.names(), folder.problems().len()), (vec!["a", "b"], 2));
}

#[test]
fn object_of_a_broken_file_can_move_to_another_file() {
    let mut folder = Folder::of(&[("a.yaml", &service("a", 1))]);
    folder.write(&[("a.yaml", "{")]);
    folder.write(&[("b.yaml", &service("a", 2))]);
    assert_eq!(folder.ports("a"), [2]);
    folder.remove("a.yaml");
    assert_eq!(folder.ports("a"), [2]);
}

#[test]
fn unreadable_file_keeps_its_objects() {
    let mut folder = Folder::of(&[("a.yaml", &service("a", 1))]);
    folder.apply(&[edit("a.yaml", Content::Unreadable("cannot be read: why not".into()))]);
    assert_eq!(
        (folder.names(), folder.problems()),
        (vec!["a"], vec!["services/a.yaml: cannot be read: why not".into()])
    );
    folder.write(&[("a.yaml", "")]);
    assert_eq!((folder.names().len(), folder.problems().len()), (0, 0));
}

#[test]
fn first_of_two_definitions_by_file_and_document_wins() {
    let mut folder = Folder::of(&[
        ("b.yaml", &documents(&[&service("x", 1), &service("x", 2)])),
        ("c.yaml", &service("x", 3)),
    ]);
    assert_eq!((folder.ports("x"), folder.problems().len()), (vec![1], 2));
    folder.write(&[("a.yaml", &service("x", 4))]);
    assert_eq!((folder.ports("x"), folder.problems().len()), (vec![4], 3));
    folder.remove("a.yaml");
    folder.write(&[("b.yaml", &documents(&[&service("x", 2), &service("x", 1)]))]);
    assert_eq!(folder.ports("x"), [2]);
    folder.remove("b.yaml");
    assert_eq!((folder.ports("x"), folder.problems().len()), (vec![3], 0));
}

#[test]
fn condition_names_the_current_line_of_the_document() {
    let (a, bad) = (service("a", 1), service("b", 0));
    let mut folder = Folder::of(&[("all.yaml", &documents(&[&a, &bad, "x: [\n"]))]);
    assert!(folder.problems()[0].contains("document 2 (line 9)"), "{:?}", folder.problems());
    let before = folder.problems()[2].clone();
    folder.write(&[("all.yaml", &documents(&["# one\n# two\n", &a, &bad, "x: [\n"]))]);
    assert!(folder.problems()[0].contains("document 2 (line 12)"), "{:?}", folder.problems());
    let line = |problem: &str| {
        problem.rsplit("line ").next().unwrap().split(',').next().unwrap().parse::<usize>().unwrap()
    };
    assert_eq!(line(&folder.problems()[2]), line(&before) + 3);
}

#[test]
fn service_with_a_taken_address_keeps_its_last_good_state_until_the_address_is_free() {
    let mut folder =
        Folder::of(&[("a.yaml", &service_at("a", "10.96.0.1")), ("b.yaml", &service_at("b", "10.96.0.2"))]);
    folder.write(&[("b.yaml", &service_at("b", "10.96.0.1"))]);
    let ip = |text: &str| vec![text.parse::<IpAddr>().unwrap()];
    assert_eq!((folder.problems().len(), &folder.service("b").cluster_ips), (1, &ip("10.96.0.2")));
    folder.remove("a.yaml");
    assert_eq!((folder.problems().len(), &folder.service("b").cluster_ips), (0, &ip("10.96.0.1")));
}

#[test]
fn two_services_may_swap_their_addresses() {
    let both = |a: &str, b: &str| documents(&[&service_at("a", a), &service_at("b", b)]);
    let mut folder = Folder::of(&[("all.yaml", &both("10.96.0.1", "10.96.0.2"))]);
    folder.write(&[("all.yaml", &both("10.96.0.2", "10.96.0.1"))]);
    assert_eq!(folder.problems(), [""; 0]);
    assert_eq!(folder.service("a").cluster_ips, ["10.96.0.2".parse::<IpAddr>().unwrap()]);
}

#[test]
fn allocated_address_stays_while_the_service_changes() {
    let mut folder = Folder::of(&[("a.yaml", &service("a", 1))]);
    let before = folder.service("a").cluster_ips.clone();
    folder.write(&[("a.yaml", &service("a", 2)), ("b.yaml", &service("b", 2))]);
    assert_eq!((&folder.service("a").cluster_ips, folder.ports("a")), (&before, vec![2]));
    assert_ne!(folder.service("b").cluster_ips, before);
}

#[test]
fn addresses_and_node_ports_survive_a_restart() {
    let node_port = service("a", 80).replace("spec:", "spec:\n  type: NodePort");
    let mut contents = Contents::default();
    let name = ServicePortName {
        service: ObjectName::new("default", "a"),
        port: "".into(),
        protocol: Protocol::Tcp,
    };
    contents.service_labels.insert(7, ServiceLabels { name, node_port: Some(31_234) });
    let address = Address::from_v4([10, 99, 1, 2]);
    let key = ServiceKey::new(address, 80, lb_common::protocol::TCP);
    let record =
        lb_common::Service { id: 7, kind: FrontendKind::ClusterIp as u8, ..bytemuck::Zeroable::zeroed() };
    contents.frontends.insert(key, record.sealed(&key));
    for broken in ["", "---\n{"] {
        let mut folder = Folder::with(options(), &contents);
        folder.write(&[("a.yaml", &format!("{}{broken}", service("a", 0)))]);
        assert_eq!(folder.names().len(), 0, "the manifest was already broken at startup");
        folder.write(&[("a.yaml", &node_port)]);
        let service = folder.service("a");
        assert_eq!(service.cluster_ips, [IpAddr::from([10, 99, 1, 2])]);
        assert_eq!(service.ports[0].node_port, Some(31_234));
    }
}

/// Contents of the maps in which the Service with that name has this node port.
fn with_node_port(service: &str, node_port: u16) -> Contents {
    let mut contents = Contents::default();
    let name = ServicePortName {
        service: ObjectName::new("default", service),
        port: "".into(),
        protocol: Protocol::Tcp,
    };
    contents.service_labels.insert(7, ServiceLabels { name, node_port: Some(node_port) });
    contents
}

#[test]
fn file_being_written_at_startup_loses_no_node_port() {
    let mut folder = Folder::with(options(), &with_node_port("late", 31_234));
    folder.manifests.set_expects_more(true);
    folder.write(&[("a.yaml", &service("a", 80))]);
    folder.manifests.set_expects_more(false);
    folder.write(&[("late.yaml", &service("late", 80).replace("spec:", "spec:\n  type: NodePort"))]);
    assert_eq!(folder.service("late").ports[0].node_port, Some(31_234));
}

#[test]
fn address_of_an_earlier_run_is_freed_once_its_service_is_known_to_be_deleted() {
    let mut folder = Folder::with(options(), &with_node_port("gone", 31_234));
    let wanted = service("a", 80)
        .replace("spec:", "spec:\n  type: NodePort")
        .replace("port: 80", "port: 80\n    nodePort: 31234");
    folder.write(&[("a.yaml", &wanted), ("b.yaml", "{")]);
    assert_eq!(folder.names().len(), 0, "the Service may be in the broken file");
    folder.write(&[("b.yaml", "")]);
    assert_eq!(folder.service("a").ports[0].node_port, Some(31_234));
}

#[test]
fn changed_endpoint_is_one_change() {
    let mut folder =
        Folder::of(&[("all.yaml", &documents(&[&service("a", 1), &slice("a-1", "a", "10.0.0.1")]))]);
    folder.write(&[("all.yaml", &documents(&[&service("a", 1), &slice("a-1", "a", "10.0.0.2")]))]);
    assert_eq!((folder.update.changes.len(), folder.endpoints("a")), (1, vec!["10.0.0.2:8080".to_owned()]));
}

#[test]
fn endpoints_that_lose_a_family_lose_its_slice() {
    let endpoints = |addresses: &str| {
        format!(
            "apiVersion: v1\nkind: Endpoints\nmetadata: {{name: a}}\nsubsets:\n- addresses: [{addresses}]\n  ports: [{{port: 1}}]\n"
        )
    };
    let mut folder = Folder::of(&[("a.yaml", &endpoints("{ip: 10.0.0.1}, {ip: '2001:db8::1'}"))]);
    assert_eq!(folder.endpoints("a").len(), 2);
    folder.write(&[("a.yaml", &endpoints("{ip: '2001:db8::1'}"))]);
    assert_eq!((folder.update.changes.len(), folder.endpoints("a")), (1, vec!["2001:db8::1:1".to_owned()]));
}

#[test]
fn service_of_another_proxy_keeps_only_its_cluster_ip() {
    let labelled = service("a", 80)
        .replace("name: a", "name: a\n  labels: {service.kubernetes.io/service-proxy-name: b}");
    let mut folder = Folder::of(&[("a.yaml", &labelled)]);
    let cluster_ips = folder.service("a").cluster_ips.clone();
    assert_eq!(cluster_ips.len(), 1, "an address is assigned");
    assert_eq!(
        *folder.service("a"),
        Service { cluster_ips: cluster_ips.clone(), is_foreign: true, ..Service::default() }
    );
    folder.write(&[("a.yaml", &service("a", 80))]);
    assert_eq!((&folder.service("a").cluster_ips, folder.ports("a")), (&cluster_ips, vec![80]));
}
