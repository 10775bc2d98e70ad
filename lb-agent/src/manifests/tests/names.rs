//! Tests of the DNS names of Services in the folder.

use std::sync::Arc;

use lb_core::dns::{Answer, Index, Kind, Zone};
use lb_dns::Names;

use super::*;

const OBJECTS: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, annotations: {service.alpha.kubernetes.io/tolerate-unready-endpoints: \"true\"}}
spec: {clusterIP: None}
---
apiVersion: v1
kind: Endpoints
metadata: {name: db}
subsets: [{addresses: [{ip: 10.0.0.1, hostname: one}], notReadyAddresses: [{ip: 10.0.0.2}]}]
---
apiVersion: v1
kind: Service
metadata: {name: other, labels: {service.kubernetes.io/service-proxy-name: x}}
spec: {type: ExternalName, externalName: example.com}
---
apiVersion: v1
kind: Namespace
metadata: {name: bare}
";

/// The answer to a DNS question for `name`, as text: the records, or why there are none.
fn lookup(index: &Index, name: &str) -> String {
    let name = format!("{name}.cluster.local");
    let labels: Vec<&[u8]> = name.split('.').map(str::as_bytes).collect();
    let answer = index.lookup(&labels, Kind::A);
    if let Answer::Found(found) = answer { format!("{:?}", found.records) } else { format!("{answer:?}") }
}

#[test]
fn names_follow_the_objects_of_the_folder() {
    let zone = || Zone::new("cluster.local", 5).unwrap();
    let options = ManifestsOptions { names: Some(Arc::new(Names::new(zone()))), ..options() };
    let mut folder = Folder::with(options, &Contents::default());
    let mut index = Index::new(zone());
    let mut write = |folder: &mut Folder, files: &[(&str, &str)]| {
        folder.write(files);
        std::mem::take(&mut folder.update.names).into_iter().for_each(|change| index.apply(change));
        ["web.default.svc", "db.default.svc", "one.db.default.svc", "other.default.svc", "bare.svc"]
            .map(|name| lookup(&index, name))
    };
    let all = write(&mut folder, &[("a.yaml", OBJECTS)]);
    let web = format!("[A({})]", folder_ip(&folder, "web"));
    let no_data = "NoData(\"cluster.local\")";
    let unknown = "NxDomain(\"cluster.local\")";
    let alias = "Alias(\"example.com\")";
    assert_eq!(all, [&*web, "[A(10.0.0.1), A(10.0.0.2)]", "[A(10.0.0.1)]", alias, no_data]);
    let changed = OBJECTS.replace("hostname: one", "hostname: two");
    assert_eq!(write(&mut folder, &[("a.yaml", &changed)])[2], unknown);
    assert_eq!(write(&mut folder, &[("a.yaml", "")]), [unknown; 5]);
}

#[test]
fn names_in_bad_documents_are_unknown() {
    let zone = || Zone::new("cluster.local", 5).unwrap();
    let options = ManifestsOptions { names: Some(Arc::new(Names::new(zone()))), ..options() };
    let mut folder = Folder::with(options, &Contents::default());
    let mut index = Index::new(zone());
    let mut write = |files: &[(&str, &str)]| {
        folder.write(files);
        std::mem::take(&mut folder.update.names).into_iter().for_each(|change| index.apply(change));
        index.set_unread(folder.update.unread.clone());
        ["web.default.svc", "one.db.default.svc", "x.other.svc", "bare.svc", "com.default.svc"]
            .map(|name| lookup(&index, name))
    };
    let (unknown, denied) = ("Unknown", "NxDomain(\"cluster.local\")");
    let web = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: many}]}\n";
    assert_eq!(write(&[("a.yaml", web)]), [unknown, denied, denied, denied, denied], "a bad field");
    let db = "kind: Service\nmetadata: {name: db, annotations: {example.com/a: b}}\n---\nmetadata: {namespace: other, name: x";
    assert_eq!(write(&[("a.yaml", db)]), [denied, unknown, unknown, denied, denied], "no YAML");
    let escaped = "kind: Service\nmetadata: {name: \"\\x77eb\"}\n";
    assert_eq!(write(&[("a.yaml", escaped)]), [unknown; 5], "the name is not in the text");
    assert_eq!(write(&[("a.yaml", "")]), [denied; 5]);
    folder.apply(&[edit("b.yaml", Content::Unreadable("no".to_owned()))]);
    index.set_unread(folder.update.unread.clone());
    assert_eq!(lookup(&index, "com.default.svc"), unknown, "an unreadable file");
}

#[test]
fn names_are_not_collected_without_a_dns_server() {
    assert_eq!(Folder::of(&[("a.yaml", OBJECTS)]).update.names, []);
}

/// The cluster IP that the folder has allocated to a Service.
fn folder_ip(folder: &Folder, name: &str) -> IpAddr {
    folder.service(name).cluster_ips[0]
}
