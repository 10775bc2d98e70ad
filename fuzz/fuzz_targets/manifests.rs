//! Fuzzes the manifest reader: for any new text of one file in the folder, nothing panics, and the objects of other
//! files stay. If the text cannot be read, the objects that the file had before stay as well, unless the text may
//! contain their names. Writing the old text again restores the file's objects. After the plan for these objects is
//! applied, the next plan is empty.
#![no_main]

use std::collections::BTreeMap;

use lb_agent::manifests::{Content, Edit, Manifests, ManifestsOptions, Severity, Update};
use lb_core::{
    allocate::{DEFAULT_NODE_PORTS, OutsideRanges},
    capacity::Capacity,
    model::{Change, EndpointSlice, ObjectName, Policy, Service},
    plan::Contents,
    reconciler::Reconciler,
};
use libfuzzer_sys::fuzz_target;

/// A file that never changes. Its name sorts before that of the changed file, because the first of two definitions of
/// an object counts.
const GOOD: (&str, &str) = ("a.yaml", include_str!("../corpus/manifests/good.yaml"));
/// The file that changes, with its content at the start and at the end.
const BASE: (&str, &str) = ("b.yaml", include_str!("../corpus/manifests/base.yaml"));

fuzz_target!(|text: &str| {
    let mut folder = Folder::new();
    folder.write(GOOD);
    let good = (folder.services.clone(), folder.slices.clone());
    folder.write(BASE);
    let base = (folder.services.clone(), folder.slices.clone());
    assert!(folder.update.problems.is_empty() && base.0.len() == 2 && base.1.len() == 2);

    folder.write((BASE.0, text));
    assert!(folder.holds(&good), "the other file has not changed");
    // A text that contains the name of an object (perhaps with an escape) may rightly replace that object, even with an
    // object that the agent does not serve.
    let may_name = text.contains("web") || text.contains('\\');
    if folder.has_unreadable_document() && !may_name {
        assert!(base.0.keys().all(|name| folder.services.contains_key(name)), "{:?}", folder.update);
        assert!(base.1.keys().all(|name| folder.slices.contains_key(name)), "{:?}", folder.update);
    }
    folder.plan();
    let problems = folder.update.problems.clone();
    folder.write((BASE.0, text));
    assert_eq!(folder.update, Update { problems, ..Update::default() }, "the same text");
    folder.write(BASE);
    assert_eq!((&folder.services, &folder.slices), (&base.0, &base.1), "mended");
    assert_eq!(folder.update.problems, []);
});

/// The folder, and the objects that a consumer of its changes has.
struct Folder {
    manifests: Manifests,
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, EndpointSlice>,
    update: Update,
    reconciler: Reconciler,
}

impl Folder {
    fn new() -> Self {
        let options = ManifestsOptions {
            dir: "services".into(),
            cluster_ip_ranges: ["10.96.0.0/12", "fd00:10:96::/112"]
                .map(|range| range.parse().expect("a range"))
                .to_vec(),
            other_cluster_ips: OutsideRanges::Accepted,
            pod_networks: Vec::new(),
            load_balancer_pool: Vec::new(),
            load_balancer_class: None,
            has_members: false,
            load_balancer_reassign: false,
            names: None,
            node_port_range: DEFAULT_NODE_PORTS,
        };
        let mut reconciler =
            Reconciler::new(Contents::default(), Capacity::of_arenas(1 << 12, 1 << 17), Policy::default());
        reconciler.set_complete();
        Self {
            manifests: Manifests::new(&options, &Contents::default()),
            services: BTreeMap::new(),
            slices: BTreeMap::new(),
            update: Update::default(),
            reconciler,
        }
    }

    fn write(&mut self, (file, text): (&str, &str)) {
        let edit = Edit { file: file.into(), content: Content::Text(text.to_owned()) };
        self.update = self.manifests.apply(&[edit]);
        self.update.ignored.clear();
        for change in &self.update.changes {
            match change.clone() {
                Change::Service(name, new) => replace(&mut self.services, name, new),
                Change::EndpointSlice(name, new) => replace(&mut self.slices, name, new),
            }
        }
        for problem in &self.update.problems {
            assert!(!problem.message.is_empty() && problem.to_string().contains("services/"), "{problem}");
        }
        self.reconciler.handle(self.update.changes.clone());
    }

    fn holds(
        &self,
        (services, slices): &(BTreeMap<ObjectName, Service>, BTreeMap<ObjectName, EndpointSlice>),
    ) -> bool {
        services.iter().all(|(name, service)| self.services.get(name) == Some(service))
            && slices.iter().all(|(name, slice)| self.slices.get(name) == Some(slice))
    }

    /// Whether the last update reports an error without an object: a document is unreadable, and may define any object.
    fn has_unreadable_document(&self) -> bool {
        let unreadable = |severity, object: &Option<String>| severity == Severity::Error && object.is_none();
        self.update.problems.iter().any(|problem| unreadable(problem.severity, &problem.object))
    }

    /// Plans and applies all steps; the next plan must be empty.
    fn plan(&mut self) {
        for step in self.reconciler.plan().steps {
            self.reconciler.applied(&step);
        }
        assert_eq!(self.reconciler.plan().steps, []);
    }
}

/// Applies a change; panics if it changes nothing.
fn replace<T: PartialEq>(objects: &mut BTreeMap<ObjectName, T>, name: ObjectName, new: Option<T>) {
    assert!(objects.get(&name) != new.as_ref(), "{name} has not changed");
    match new {
        Some(new) => objects.insert(name, new),
        None => objects.remove(&name),
    };
}
