use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher as _},
    num::NonZeroU64,
    time::SystemTime,
};

use kube::runtime::watcher::Event;
use lb_core::{
    api::ObjectMeta,
    compact,
    convert::{ConvertError, Converted, object_name},
    model::{ObjectName, Trigger},
    strings::Strings,
};
use tracing::warn;

use super::{kind::Kind, watched::Watched};
use crate::log_few::warn_few;

/// The known objects of one kind; turns the events of a watch into changes.
///
/// A list takes effect when it is complete: its changes come together, followed by the deletion of the objects that it
/// lacks. An unreadable object stays in its last readable state, if it had one; if only a part of an object is bad, the
/// rest is served.
#[derive(Debug)]
pub(super) struct Objects<K: Kind> {
    known: BTreeMap<ObjectName, KnownObject>,
    /// Objects whose newest version is unreadable, or readable only in part.
    rejected: BTreeMap<ObjectName, Rejected>,
    /// Sequence number of the newest list that has begun.
    list: u64,
    /// Whether the API server has sent a complete list.
    listed: bool,
    /// Changes that [`Self::handle`] has not returned yet: those of a list wait for its end.
    changes: Vec<K::Change>,
    /// Triggers of changes, until [`Self::take_triggered`] returns them; none is from before `beginning`.
    triggered: Vec<Trigger>,
    beginning: SystemTime,
    /// Strings that objects have in common, each stored once. An object shares them as soon as it is read: if it did so
    /// only after a long list, the freed duplicates would leave holes in the heap.
    strings: Strings,
    /// Conditions of objects, until [`Self::handle`] logs them.
    unlogged: Vec<String>,
}

/// An object that exists, readable or not.
#[derive(Clone, Copy, Debug)]
struct KnownObject {
    /// A [`digest`] of uid and version; `None` without a version.
    version: Option<NonZeroU64>,
    /// Sequence number of the list that was the newest when the API server last sent the object.
    list: u64,
    /// A [`digest`] of the trigger of the object's newest readable version.
    triggered: Option<NonZeroU64>,
}

const _: () = assert!(size_of::<KnownObject>() == 24);

#[derive(Debug)]
struct Rejected {
    why: String,
    /// Whether every version of the object so far was unreadable.
    unread: bool,
    /// The Service whose data are incomplete without the object.
    service: Option<ObjectName>,
}

impl<K: Kind> Objects<K> {
    /// Creates an empty set of objects, which will ignore triggers from before `beginning`.
    pub(super) fn new(beginning: SystemTime) -> Self {
        Self {
            known: BTreeMap::new(),
            rejected: BTreeMap::new(),
            list: 0,
            listed: false,
            changes: Vec::new(),
            triggered: Vec::new(),
            beginning,
            strings: Strings::default(),
            unlogged: Vec::new(),
        }
    }

    /// Handles an event of the watch; returns the changes that take effect with this event.
    pub(super) fn handle(&mut self, event: Event<Watched<K>>) -> Vec<K::Change> {
        match event {
            Event::Init => {
                // Changes of an interrupted list stay queued. The next list does not repeat them, because their
                // versions count as known.
                self.list += 1;
                return Vec::new();
            }
            Event::InitApply(object) => {
                self.take(object);
                return Vec::new();
            }
            Event::InitDone => {
                self.listed = true;
                self.delete_unlisted();
            }
            Event::Apply(object) => self.take(object),
            Event::Delete(object) => {
                if let Some(name) = name_of::<K>(&object.metadata) {
                    self.delete(name);
                }
            }
        }
        warn_few(self.unlogged.drain(..));
        std::mem::take(&mut self.changes)
    }

    /// Returns and removes the triggers of the changes since the last call.
    pub(super) fn take_triggered(&mut self) -> Vec<Trigger> {
        std::mem::take(&mut self.triggered)
    }

    /// Whether the API server has sent a complete list.
    pub(super) const fn is_listed(&self) -> bool {
        self.listed
    }

    /// Whether no object of this kind exists, as far as the API server has reported.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The Services whose data are incomplete because one of their objects was never readable. The kernel may have
    /// these Services from an earlier run.
    pub(super) fn unread(&self) -> BTreeSet<ObjectName> {
        let unread = self.rejected.values().filter(|bad| bad.unread);
        unread.filter_map(|bad| bad.service.clone()).collect()
    }

    /// Names of the objects of which no version was readable. An earlier agent may know their last good state.
    pub(super) fn unread_names(&self) -> BTreeSet<ObjectName> {
        let unread = self.rejected.iter().filter(|(_, bad)| bad.unread);
        unread.map(|(name, _)| name.clone()).collect()
    }

    /// All current conditions of objects.
    pub(super) fn problems(&self) -> impl Iterator<Item = &str> {
        self.rejected.values().map(|bad| bad.why.as_str())
    }

    fn take(&mut self, Watched { metadata, object, .. }: Watched<K>) {
        let Some(name) = name_of::<K>(&metadata) else { return };
        let name = self.strings.share_namespace(name);
        let now = KnownObject { version: version(&metadata), list: self.list, triggered: None };
        if let Some(known) = self.known.get_mut(&name) {
            known.list = now.list;
            if now.version.is_some() && known.version == now.version {
                return;
            }
        }
        match changed(&object, &name) {
            Ok((Converted { mut value, left_out }, triggered)) => {
                K::share(&mut value, &mut self.strings);
                self.note_left_out(&name, &left_out);
                self.note_trigger(&name, triggered);
                self.known.insert(name, KnownObject { triggered: triggered.map(of_trigger), ..now });
                self.changes.push(value);
            }
            Err(why) => self.reject(name, now, why, &metadata),
        }
    }

    /// Records which parts of a readable object are left out.
    fn note_left_out(&mut self, name: &ObjectName, left_out: &[ConvertError]) {
        let Some(why) = left_out_text(left_out) else {
            self.rejected.remove(name);
            return;
        };
        if self.rejected.get(name).is_none_or(|bad| bad.why != why) {
            self.unlogged.push(why.clone());
        }
        self.rejected.insert(name.clone(), Rejected { why, unread: false, service: None });
    }

    /// Records the trigger of a change. If the object's previous version has the same trigger, records nothing, because
    /// the change has another cause. Ignores triggers from before `beginning`.
    fn note_trigger(&mut self, name: &ObjectName, triggered: Option<Trigger>) {
        let before = self.known.get(name).and_then(|known| known.triggered);
        let is_new = |trigger: &Trigger| before != Some(of_trigger(*trigger));
        let news = triggered.filter(|trigger| trigger.time > self.beginning && is_new(trigger));
        self.triggered.extend(news);
    }

    fn reject(&mut self, name: ObjectName, now: KnownObject, why: String, metadata: &ObjectMeta) {
        let unread = self.rejected.get(&name).map_or(!self.known.contains_key(&name), |bad| bad.unread);
        let service = K::service(&name, metadata);
        let stays = match (unread, &service) {
            (true, _) => K::AFTER_RESTART.to_owned(),
            // For the proxy this also holds after a restart, because the agent then reads that state from the kernel.
            // After a restart, queries for DNS names of an unreadable object get SERVFAIL, and the load balancer
            // controller assigns no address until the object is readable.
            (false, Some(_)) => "its last good state stays in force".to_owned(),
            (false, None) => {
                let then = K::AFTER_RESTART;
                format!("its last good state stays in force until the agent restarts; then {then}")
            }
        };
        let why = format!("{why}; {stays}");
        self.unlogged.push(why.clone());
        let triggered = self.known.get(&name).and_then(|known| known.triggered);
        self.known.insert(name.clone(), KnownObject { triggered, ..now });
        self.rejected.insert(name, Rejected { why, unread, service });
    }

    fn delete_unlisted(&mut self) {
        let list = self.list;
        // Deletions follow the changes of the list: an interrupted list may have returned an object that has been
        // deleted since.
        let gone = self.known.extract_if(.., |_, known| known.list != list);
        for (name, _) in gone {
            self.rejected.remove(&name);
            self.changes.push(K::gone(name));
        }
        compact::map(&mut self.known);
    }

    fn delete(&mut self, name: ObjectName) {
        self.rejected.remove(&name);
        if self.known.remove(&name).is_some() {
            self.changes.push(K::gone(name));
        }
    }
}

/// Converts an object to its change and trigger, or returns why it is unreadable.
fn changed<K: Kind>(
    object: &Result<K, String>,
    name: &ObjectName,
) -> Result<(Converted<K::Change>, Option<Trigger>), String> {
    let object = object.as_ref().map_err(|why| {
        let shown = if K::NAMESPACED { name.to_string() } else { name.name.to_string() };
        format!("{} \"{shown}\" cannot be read: {why}", K::NAME)
    })?;
    let change = object.change(name).map_err(|error| error.to_string())?;
    Ok((change, object.triggered()))
}

/// The first few errors of an object whose invalid parts are left out, as text.
fn left_out_text(left_out: &[ConvertError]) -> Option<String> {
    const FEW: usize = 3;
    let (first, others) = left_out.split_first()?;
    let mut text = first.to_string();
    for ConvertError { field, why, .. } in others.iter().take(FEW - 1) {
        text.push_str(&format!("; {field}: {why}"));
    }
    text.push_str(&match (others.len(), left_out.len().saturating_sub(FEW)) {
        (0, _) => "; this is left out, the rest is served".to_owned(),
        (_, 0) => "; these are left out, the rest is served".to_owned(),
        (_, more) => format!("; and {more} more; these are left out, the rest is served"),
    });
    Some(text)
}

/// The name of an object; `None` for an object without a name, which is left out with a warning.
fn name_of<K: Kind>(metadata: &ObjectMeta) -> Option<ObjectName> {
    object_name(K::NAME, metadata).inspect_err(|error| warn!("{error}; it is left out")).ok()
}

/// A digest of an object's uid and resource version; `None` without a version.
fn version(metadata: &ObjectMeta) -> Option<NonZeroU64> {
    let version = metadata.resource_version.as_ref().filter(|version| !version.is_empty())?;
    Some(digest((&metadata.uid, version)))
}

fn of_trigger(trigger: Trigger) -> NonZeroU64 {
    digest((trigger.family as u8, trigger.time))
}

/// A 64-bit hash of a value, to find out whether a later value differs. It takes less memory than most values.
fn digest(value: impl Hash) -> NonZeroU64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    NonZeroU64::new(hasher.finish()).unwrap_or(NonZeroU64::MAX)
}

#[cfg(test)]
mod tests {
    use lb_core::{
        api::{BgpAdvertisement, EndpointSlice, L2Advertisement, Service},
        family::Family,
        model::Change,
    };
    use serde_json::{Value, json};

    use super::*;

    type Object = Watched<Service>;

    fn value(name: &str, version: u32, ip: &str) -> Value {
        json!({
            "metadata": {"namespace": "n", "name": name, "uid": name, "resourceVersion": version.to_string()},
            "spec": {"clusterIP": ip, "ports": [{"port": 80}]},
        })
    }

    fn object(value: Value) -> Object {
        serde_json::from_value(value).unwrap()
    }

    fn service(name: &str, version: u32, ip: &str) -> Object {
        object(value(name, version, ip))
    }

    /// A Service whose field `ports` is no list, so that it cannot be decoded.
    fn malformed(name: &str, version: u32) -> Object {
        let mut value = value(name, version, "10.96.0.1");
        value["spec"]["ports"] = json!("eighty");
        object(value)
    }

    /// A Service that can be decoded, but that every API server would reject.
    fn invalid(name: &str, version: u32) -> Object {
        let mut value = value(name, version, "10.96.0.1");
        value["spec"]["ports"][0]["port"] = json!(70_000);
        object(value)
    }

    /// The changes as text: `+name` with the first cluster IP of a Service, or `-name` for a deletion.
    fn texts(changes: Vec<Change>) -> Vec<String> {
        let text = |change| match change {
            Change::Service(name, Some(service)) => format!("+{} {}", name.name, service.cluster_ips[0]),
            Change::Service(name, None) | Change::EndpointSlice(name, None) => format!("-{}", name.name),
            Change::EndpointSlice(name, Some(_)) => format!("+{}", name.name),
        };
        changes.into_iter().map(text).collect()
    }

    fn handle(objects: &mut Objects<Service>, event: Event<Object>) -> Vec<String> {
        texts(objects.handle(event))
    }

    /// Sends a complete list; asserts that it causes no change before its end. Returns the changes at the end.
    fn list(objects: &mut Objects<Service>, listed: Vec<Object>) -> Vec<String> {
        assert_eq!(handle(objects, Event::Init), [""; 0]);
        for object in listed {
            assert_eq!(handle(objects, Event::InitApply(object)), [""; 0]);
        }
        handle(objects, Event::InitDone)
    }

    fn with_a_and_b() -> Objects<Service> {
        let mut objects = Objects::new(SystemTime::UNIX_EPOCH);
        assert!(!objects.is_listed());
        let changes = list(&mut objects, vec![service("a", 1, "10.96.0.1"), service("b", 2, "10.96.0.2")]);
        assert_eq!(changes, ["+a 10.96.0.1", "+b 10.96.0.2"]);
        assert!(objects.is_listed() && objects.unread().is_empty());
        objects
    }

    #[test]
    fn watch_events_take_effect_at_once() {
        let mut objects = with_a_and_b();
        assert_eq!(handle(&mut objects, Event::Apply(service("c", 3, "10.96.0.3"))), ["+c 10.96.0.3"]);
        assert_eq!(handle(&mut objects, Event::Apply(service("a", 4, "10.96.0.4"))), ["+a 10.96.0.4"]);
        assert_eq!(handle(&mut objects, Event::Delete(service("a", 5, "10.96.0.4"))), ["-a"]);
        assert_eq!(handle(&mut objects, Event::Delete(service("a", 5, "10.96.0.4"))), [""; 0]);
    }

    #[test]
    fn list_of_known_objects_changes_nothing() {
        let mut objects = with_a_and_b();
        let listed = vec![service("b", 2, "10.96.0.2"), service("a", 1, "10.96.0.1")];
        assert_eq!(list(&mut objects, listed), [""; 0]);
    }

    #[test]
    fn list_deletes_missing_objects_when_complete() {
        let mut objects = with_a_and_b();
        let listed = vec![service("b", 7, "10.96.0.9"), service("c", 8, "10.96.0.1")];
        assert_eq!(list(&mut objects, listed), ["+b 10.96.0.9", "+c 10.96.0.1", "-a"]);
    }

    #[test]
    fn list_deletes_objects_seen_by_watch() {
        let mut objects = with_a_and_b();
        handle(&mut objects, Event::Apply(service("c", 3, "10.96.0.3")));
        let listed = vec![service("a", 1, "10.96.0.1"), service("b", 2, "10.96.0.2")];
        assert_eq!(list(&mut objects, listed), ["-c"]);
    }

    #[test]
    fn interrupted_list_deletes_and_loses_nothing() {
        let mut objects = with_a_and_b();
        handle(&mut objects, Event::Init);
        handle(&mut objects, Event::InitApply(service("b", 3, "10.96.0.3")));
        handle(&mut objects, Event::InitApply(service("c", 4, "10.96.0.4")));
        let listed = vec![service("a", 1, "10.96.0.1"), service("b", 3, "10.96.0.3")];
        assert_eq!(list(&mut objects, listed), ["+b 10.96.0.3", "+c 10.96.0.4", "-c"]);
    }

    #[test]
    fn recreated_object_takes_effect_even_with_an_old_version() {
        let mut objects = with_a_and_b();
        let mut anew = value("a", 1, "10.96.0.7");
        anew["metadata"]["uid"] = json!("another");
        assert_eq!(handle(&mut objects, Event::Apply(object(anew))), ["+a 10.96.0.7"]);
    }

    #[test]
    fn object_that_becomes_unreadable_keeps_its_last_good_state() {
        for bad in [malformed("a", 3), invalid("a", 3)] {
            let mut objects = with_a_and_b();
            assert_eq!(handle(&mut objects, Event::Apply(bad.clone())), [""; 0]);
            let problem = objects.problems().next().unwrap().to_owned();
            assert!(problem.contains("n/a") && problem.contains("last good state"), "{problem}");
            assert!(objects.unread().is_empty());
            assert_eq!(list(&mut objects, vec![bad, service("b", 2, "10.96.0.2")]), [""; 0]);
            assert_eq!(handle(&mut objects, Event::Apply(service("a", 4, "10.96.0.4"))), ["+a 10.96.0.4"]);
            assert_eq!(objects.problems().next(), None);
        }
    }

    #[test]
    fn unreadable_object_is_left_out_until_deleted() {
        let mut objects = Objects::new(SystemTime::UNIX_EPOCH);
        let changes = list(&mut objects, vec![malformed("a", 1), service("b", 2, "10.96.0.2")]);
        assert_eq!(changes, ["+b 10.96.0.2"]);
        let unread = [ObjectName::new("n", "a")].into();
        assert_eq!(objects.unread(), unread, "no version of it was readable");
        assert_eq!(handle(&mut objects, Event::Apply(invalid("a", 3))), [""; 0]);
        assert_eq!(objects.unread(), unread);
        assert_eq!(handle(&mut objects, Event::Delete(malformed("a", 4))), ["-a"]);
        assert!(objects.unread().is_empty());
        assert_eq!(objects.problems().next(), None);
    }

    #[test]
    fn advertisement_that_becomes_unsupported_is_said_to_last_until_the_agent_restarts() {
        let object = |spec: Value, version: &str| -> Watched<L2Advertisement> {
            let metadata = json!({"namespace": "n", "name": "a", "uid": "a", "resourceVersion": version});
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let unsupported = || object(json!({"serviceSelectors": [{}]}), "2");
        let mut objects = Objects::new(SystemTime::UNIX_EPOCH);
        assert_eq!(objects.handle(Event::Apply(object(json!({}), "1"))).len(), 1);
        assert_eq!(objects.handle(Event::Apply(unsupported())).len(), 0, "it keeps its last good state");
        let problem = |objects: &Objects<L2Advertisement>| objects.problems().next().unwrap().to_owned();
        let text = problem(&objects);
        assert!(
            text.contains("spec.serviceSelectors") && text.contains("until the agent restarts"),
            "{text}"
        );
        let mut restarted = Objects::new(SystemTime::UNIX_EPOCH);
        assert_eq!(restarted.handle(Event::Apply(unsupported())).len(), 0);
        assert!(problem(&restarted).ends_with("not supported; it is left out"), "{}", problem(&restarted));
    }

    #[test]
    fn invalid_object_is_unread_unless_its_last_good_state_is_known() {
        let object = |version: &str, length: u32| -> Watched<BgpAdvertisement> {
            let metadata = json!({"namespace": "n", "name": "a", "uid": "a", "resourceVersion": version});
            serde_json::from_value(json!({"metadata": metadata, "spec": {"aggregationLength": length}}))
                .unwrap()
        };
        let unread = BTreeSet::from([ObjectName::new("n", "a")]);
        let mut objects = Objects::new(SystemTime::UNIX_EPOCH);
        objects.handle(Event::Apply(object("1", 99)));
        assert_eq!(objects.unread_names(), unread);
        objects.handle(Event::Apply(object("2", 32)));
        assert_eq!(objects.unread_names(), BTreeSet::new());
        objects.handle(Event::Apply(object("3", 99)));
        assert_eq!(objects.unread_names(), BTreeSet::new(), "its last good state is known");
        let problem = objects.problems().next().unwrap();
        assert!(
            problem.ends_with("until the agent restarts; then it is left out, but routes and BGP sessions that an earlier agent made from it stay"),
            "{problem}"
        );
        let mut restarted = Objects::new(SystemTime::UNIX_EPOCH);
        restarted.handle(Event::Apply(object("3", 99)));
        assert_eq!(restarted.unread_names(), unread);
        restarted.handle(Event::Delete(object("4", 99)));
        assert_eq!(restarted.unread_names(), BTreeSet::new());
    }

    #[test]
    fn object_without_a_name_is_left_out() {
        let mut objects = with_a_and_b();
        let mut nameless = value("", 9, "10.96.0.9");
        nameless["metadata"]["name"] = Value::Null;
        assert_eq!(handle(&mut objects, Event::Apply(object(nameless))), [""; 0]);
    }

    #[test]
    fn service_without_address_is_deleted() {
        let mut objects = with_a_and_b();
        assert_eq!(handle(&mut objects, Event::Apply(service("a", 3, "None"))), ["-a"]);
    }

    fn slice_value(version: u32, triggered: &str) -> Value {
        json!({
            "metadata": {
                "namespace": "n", "name": "a-1", "resourceVersion": version.to_string(),
                "labels": {"kubernetes.io/service-name": "a"},
                "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": triggered},
            },
            "addressType": "IPv4", "endpoints": [],
        })
    }

    fn slice(version: u32, triggered: &str) -> Watched<EndpointSlice> {
        serde_json::from_value(slice_value(version, triggered)).unwrap()
    }

    #[test]
    fn slices_are_listed_and_deleted_like_services() {
        let mut objects = Objects::new(SystemTime::UNIX_EPOCH);
        objects.handle(Event::Init);
        objects.handle(Event::InitApply(slice(1, "")));
        assert_eq!(texts(objects.handle(Event::InitDone)), ["+a-1"]);
        assert_eq!(texts(objects.handle(Event::Delete(slice(2, "")))), ["-a-1"]);
    }

    #[test]
    fn unreadable_slice_is_reported_for_its_service() {
        let mut value = slice_value(1, "");
        value["endpoints"] = json!(7);
        let mut objects: Objects<EndpointSlice> = Objects::new(SystemTime::UNIX_EPOCH);
        objects.handle(Event::Apply(serde_json::from_value(value.clone()).unwrap()));
        assert_eq!(objects.unread(), [ObjectName::new("n", "a")].into());
        value["metadata"]["labels"] = json!({});
        value["metadata"]["resourceVersion"] = json!("2");
        objects.handle(Event::Apply(serde_json::from_value(value).unwrap()));
        assert!(objects.unread().is_empty(), "it is of no Service");
        assert_eq!(objects.problems().count(), 1);
    }

    /// An EndpointSlice with one endpoint for each address.
    fn slice_with(version: u32, addresses: &[&str]) -> Watched<EndpointSlice> {
        let mut value = slice_value(version, "");
        value["ports"] = json!([{"name": "", "port": 8080}]);
        let endpoint = |address: &&str| json!({"addresses": [address], "conditions": {}});
        value["endpoints"] = addresses.iter().map(endpoint).collect();
        serde_json::from_value(value).unwrap()
    }

    /// The addresses in the only slice that the changes contain.
    fn addresses(changes: &[Change]) -> Vec<String> {
        let [Change::EndpointSlice(_, Some(slice))] = changes else { panic!("{changes:?}") };
        slice.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
    }

    #[test]
    fn bad_address_is_left_out_and_reported_until_gone() {
        let mut objects: Objects<EndpointSlice> = Objects::new(SystemTime::UNIX_EPOCH);
        let changes = objects.handle(Event::Apply(slice_with(1, &["10.0.0.1", "127.0.0.1"])));
        assert_eq!(addresses(&changes), ["10.0.0.1"]);
        assert!(objects.unread().is_empty(), "the rest of it is known");
        let problems: Vec<&str> = objects.problems().collect();
        assert_eq!(
            problems,
            [
                "EndpointSlice \"n/a-1\" is invalid: endpoints[1].addresses[0]: Invalid value: \"127.0.0.1\": may not be in \
              the loopback range (127.0.0.0/8, ::1/128); this is left out, the rest is served"
            ]
        );
        let changes = objects.handle(Event::Apply(slice_with(2, &["10.0.0.2", "127.0.0.1", "10.0.0.3"])));
        assert_eq!(addresses(&changes), ["10.0.0.2", "10.0.0.3"], "the slice is followed");
        let odd = ["10.0.0.2", "::1", "10.0.0", "0.0.0.0", "127.0.0.1"];
        assert_eq!(addresses(&objects.handle(Event::Apply(slice_with(3, &odd)))), ["10.0.0.2"]);
        let problem = objects.problems().next().unwrap().to_owned();
        for part in ["endpoints[1]", "\"10.0.0\"", "endpoints[3]", "and 1 more; these are left out"] {
            assert!(problem.contains(part), "{part}: {problem}");
        }
        objects.handle(Event::Apply(slice_with(4, &["10.0.0.2"])));
        assert_eq!(objects.problems().next(), None);
        objects.handle(Event::Apply(slice_with(5, &["127.0.0.1"])));
        objects.handle(Event::Delete(slice_with(6, &["127.0.0.1"])));
        assert_eq!(objects.problems().next(), None);
    }

    #[test]
    fn partly_bad_object_that_becomes_unreadable_keeps_its_last_good_state() {
        let mut objects: Objects<EndpointSlice> = Objects::new(SystemTime::UNIX_EPOCH);
        objects.handle(Event::Apply(slice_with(1, &["10.0.0.1", "127.0.0.1"])));
        let mut bad = slice_value(2, "");
        bad["endpoints"] = json!(7);
        assert_eq!(objects.handle(Event::Apply(serde_json::from_value(bad).unwrap())), []);
        let problems: Vec<&str> = objects.problems().collect();
        assert!(problems.len() == 1 && problems[0].contains("last good state"), "{problems:?}");
        assert!(objects.unread().is_empty());
    }

    #[test]
    fn trigger_counts_once_and_only_since_the_beginning() {
        let time = |text: &str| SystemTime::from(text.parse::<jiff::Timestamp>().unwrap());
        let beginning = "2026-01-01T00:00:00Z";
        let mut objects = Objects::new(time(beginning));
        let mut triggered = |version, text: &str| {
            objects.handle(Event::Apply(slice(version, text)));
            objects.take_triggered()
        };
        assert_eq!(triggered(1, beginning), []);
        let (first, second) = ("2026-01-01T00:00:01.5Z", "2026-01-01T00:00:02Z");
        let trigger = |text| Trigger { family: Family::V4, time: time(text) };
        assert_eq!(triggered(2, first), [trigger(first)]);
        assert_eq!(triggered(3, first), [], "something else of the slice has changed");
        assert_eq!(triggered(4, "nonsense"), []);
        assert_eq!(triggered(5, second), [trigger(second)]);
    }
}
