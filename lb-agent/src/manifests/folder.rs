//! The state of the folder of manifests: the objects that it defines, its conditions, and its changes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::{OsStr, OsString},
    path::PathBuf,
    sync::Arc,
};

use lb_core::{
    announce::{
        advertisement::{Advertised, Advertisement},
        bgp,
    },
    api,
    dns::{self, NameChange, Unread, Words},
    load_balancer::{Namespaces, PoolError, PoolUsage},
    model::{Change, ObjectName, Service},
    plan::Contents,
};

use super::{
    addresses::{Addresses, Assigned},
    condition::{Condition, FieldError, Location, Severity},
    file::{Difference, Document, File, Text, parse_all},
    options::ManifestsOptions,
    parse::{Key, Kind, Parsed, Resource, Slices, Wanted},
};

/// A change of one file in the folder of manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The file's name within the folder.
    pub file: OsString,
    /// The file's new content.
    pub content: Content,
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The file has this text.
    Text(String),
    /// The file has this text, but is still open for writing, so more text may follow.
    Draft(String),
    /// The file exists but cannot be read, for this reason.
    Unreadable(String),
    /// The file does not exist.
    Gone,
}

/// The changes that edits of the folder cause, and the folder's conditions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Changes of Services and EndpointSlices, for the writer.
    pub changes: Vec<Change>,
    /// Changes of the objects that DNS names are made of; empty if no names are collected.
    pub names: Vec<NameChange>,
    /// Objects that may have DNS names although they cannot be read; empty if no names are collected.
    pub unread: Unread,
    /// All current conditions of the folder, sorted by file and document.
    pub problems: Vec<Condition>,
    /// Locations and kinds of objects that this source ignores. Each kind appears only once, in the first update that
    /// has it.
    pub ignored: Vec<(Location, String)>,
}

/// The state of a folder of manifests. Does no IO.
#[derive(Debug)]
pub struct Manifests {
    dir: PathBuf,
    files: BTreeMap<Arc<OsStr>, File>,
    next_id: u64,
    /// The documents that define each object. If several define the same object, the first one is in force, and the
    /// others are reported.
    claims: HashMap<Key, Vec<Claim>>,
    objects: BTreeMap<Key, LastGood>,
    addresses: Addresses,
    /// Whether `addresses` may still hold addresses that an earlier run gave to Services which no longer exist.
    remembers: bool,
    /// Why the folder itself cannot be read now; `None` if it can.
    unreadable: Option<String>,
    /// Whether some files of the folder have not been read yet.
    expects_more: bool,
    /// Whether a file that has not been read yet may define an object that has just disappeared from another file.
    awaits_moves: bool,
    /// Services that are invalid, or whose addresses or ports cannot be allocated, with the reason.
    refused: BTreeMap<Key, FieldError>,
    /// Services of type LoadBalancer with a problem of their addresses, each with the reason: no address or too few,
    /// another address than the requested one, an address that the Service should not have, or an address that other
    /// members may assign differently.
    waiting: BTreeMap<Key, FieldError>,
    advertisements: BTreeMap<Key, Advertisement>,
    bgp: bgp::Objects,
    /// The value of [`Addresses::changes`] when the requests of waiting Services were last repeated.
    asked_at: u64,
    /// Services of type LoadBalancer whose requests must be repeated when an address may have become free: all of them
    /// after a change of the pools, otherwise those with fewer addresses than families.
    ask_again: BTreeSet<Key>,
    /// Whether every pool of the folder was readable when the pools were last replaced.
    reads_all_pools: bool,
    /// Pools that cannot be used, for example because they overlap others, with the reason.
    unused_pools: BTreeMap<Key, PoolError>,
    /// Objects that more than one document defines.
    disputed: BTreeSet<Key>,
    /// Objects that no document defines any more, but that stay in force: they may be defined in a file that has not
    /// been read yet, or in a part of their own file that is unreadable or still being written.
    missing: BTreeSet<Key>,
    ignored_kinds: BTreeSet<String>,
    wanted: Wanted,
    /// Changes for the DNS names, until [`Self::apply`] returns them.
    names: Vec<NameChange>,
}

/// Points to a document that defines an object.
#[derive(Debug)]
struct Claim {
    file: Arc<OsStr>,
    document: u64,
    parsed: Arc<Parsed>,
    /// Index of the object among the objects of the document.
    index: usize,
}

impl Claim {
    fn resource(&self) -> Option<&Arc<Resource>> {
        self.parsed.objects.get(self.index)?.resource.as_ref().ok()
    }
}

/// An object as it is in force: in its last valid version.
#[derive(Debug)]
struct LastGood {
    /// Name of the file that defines the object.
    file: Arc<OsStr>,
    resource: Arc<Resource>,
    /// A Service with its allocated addresses and node ports; `None` for a Service without virtual addresses, and for
    /// all other objects.
    service: Option<Service>,
}

/// The decision about an object that may have changed.
enum Fate {
    Keep,
    Remove,
    Set(Arc<OsStr>, Arc<Resource>),
}

impl Manifests {
    /// Creates the state of an empty folder. `contents` is the state of the kernel from an earlier run: Services keep
    /// the addresses and node ports that they have there, unless their manifests request others.
    pub fn new(options: &ManifestsOptions, contents: &Contents) -> Self {
        Self {
            dir: options.dir.clone(),
            files: BTreeMap::new(),
            next_id: 0,
            claims: HashMap::new(),
            objects: BTreeMap::new(),
            addresses: Addresses::new(options, contents),
            remembers: true,
            unreadable: None,
            expects_more: false,
            awaits_moves: false,
            refused: BTreeMap::new(),
            waiting: BTreeMap::new(),
            advertisements: BTreeMap::new(),
            bgp: bgp::Objects::default(),
            ask_again: BTreeSet::new(),
            reads_all_pools: false,
            unused_pools: BTreeMap::new(),
            asked_at: 0,
            disputed: BTreeSet::new(),
            missing: BTreeSet::new(),
            ignored_kinds: BTreeSet::new(),
            wanted: Wanted { names: options.names.is_some() },
            names: Vec::new(),
        }
    }

    /// Names of the files that the state knows.
    pub fn files(&self) -> impl Iterator<Item = &OsStr> {
        self.files.keys().map(AsRef::as_ref)
    }

    /// Sets why the folder cannot be read, or `None`. While it cannot be read, all objects keep their state.
    pub fn set_unreadable(&mut self, why: Option<String>) {
        self.unreadable = why;
    }

    /// Sets whether some files have not been read yet, so that later edits will bring their content.
    pub fn set_expects_more(&mut self, more: bool) {
        self.expects_more = more;
    }

    /// Sets whether an object that has disappeared from its file stays, because a file that has not been read yet may
    /// define the object now.
    pub fn set_awaits_moves(&mut self, awaits: bool) {
        self.awaits_moves = awaits;
    }

    /// How many addresses of each pool are in use.
    pub fn pool_usage(&self) -> Vec<PoolUsage> {
        self.addresses.pool_usage()
    }

    /// The advertisements of the folder, at layer 2 and by BGP, and its usable pools.
    pub fn advertised(&self) -> Advertised {
        let advertisements = self.advertisements.values().cloned().collect();
        let (bgp, pools) = (self.bgp.clone(), self.addresses.pools().to_vec());
        Advertised { advertisements, bgp, pools }
    }

    /// Applies edits, at most one for each file; returns what they have changed.
    pub fn apply(&mut self, edits: &[Edit]) -> Update {
        let mut touched = self.take_edits(edits);
        touched.extend(self.refused.keys().cloned());
        touched.append(&mut self.missing);
        self.release_earlier_addresses();
        let (services, others): (BTreeSet<Key>, BTreeSet<Key>) =
            touched.into_iter().partition(|key| key.kind == Kind::Service);
        // `others` (objects other than Services) come first, because they include the pools from which Services get
        // addresses.
        let mut changes = self.settle(&others);
        changes.extend(self.settle_services(&services));
        let names = std::mem::take(&mut self.names);
        let unread = if self.wanted.names { self.unread() } else { Unread::default() };
        Update { changes, names, unread, problems: self.problems(), ignored: self.newly_ignored() }
    }

    /// The objects that the folder has, or may have, but that cannot be read or used now.
    fn unread(&self) -> Unread {
        let anything = self.unreadable.is_some() || self.expects_more;
        let services = self.refused.keys().map(|key| key.name.clone()).collect();
        let mut unread = Unread { anything, services, words: Words::new() };
        for file in self.files.values() {
            unread.anything |= file.unreadable.is_some() || file.is_draft;
            for words in file.documents.iter().filter_map(|document| document.parsed.words.as_ref()) {
                match words {
                    Some(words) => unread.words.extend(words.iter().cloned()),
                    None => unread.anything = true,
                }
            }
        }
        unread
    }

    /// Once every file is readable, releases the addresses that an earlier run gave to Services that no document
    /// defines any more.
    fn release_earlier_addresses(&mut self) {
        if self.remembers && self.can_read_all_files() {
            let key = |name: &ObjectName| Key { kind: Kind::Service, name: name.clone() };
            self.addresses.retain(|name| self.claims.contains_key(&key(name)));
            self.remembers = false;
        }
    }

    /// Updates files and claims by the edits; returns the objects that may have changed.
    fn take_edits(&mut self, edits: &[Edit]) -> BTreeSet<Key> {
        let texts: Vec<_> = edits
            .iter()
            .filter_map(|edit| match &edit.content {
                Content::Text(text) => Some((&edit.file, Text::new(text), false)),
                Content::Draft(text) => Some((&edit.file, Text::new(text), true)),
                Content::Unreadable(_) | Content::Gone => None,
            })
            .collect();
        let old = |file: &OsString| self.files.get(file.as_os_str());
        let news: Vec<_> = texts.iter().flat_map(|(file, text, _)| text.news(old(file))).collect();
        let parsed = parse_all(&news, self.wanted);
        let mut touched = BTreeSet::new();
        for (name, text, is_draft) in &texts {
            let name: Arc<OsStr> = name.as_os_str().into();
            let file = self.files.entry(name.clone()).or_default();
            file.is_draft = *is_draft;
            let difference = file.update(text, &parsed, &mut self.next_id, self.wanted);
            self.reclaim(&name, &difference, &mut touched);
        }
        for edit in edits {
            match &edit.content {
                Content::Text(_) | Content::Draft(_) => {}
                Content::Unreadable(why) => {
                    let file = self.files.entry(edit.file.as_os_str().into()).or_default();
                    (file.unreadable, file.is_draft) = (Some(why.clone()), false);
                }
                Content::Gone => self.remove_file(&edit.file, &mut touched),
            }
        }
        touched
    }

    fn remove_file(&mut self, file: &OsStr, touched: &mut BTreeSet<Key>) {
        if let Some((name, file)) = self.files.remove_entry(file) {
            let difference = Difference { removed: file.documents, ..Difference::default() };
            self.reclaim(&name, &difference, touched);
        }
    }

    /// Updates the claims of one file by the difference of its documents; adds the affected objects to `touched`.
    fn reclaim(&mut self, name: &Arc<OsStr>, difference: &Difference, touched: &mut BTreeSet<Key>) {
        for document in &difference.removed {
            for object in &document.parsed.objects {
                touched.insert(object.key.clone());
                if let Some(claims) = self.claims.get_mut(&object.key) {
                    claims.retain(|claim| claim.document != document.id);
                }
            }
        }
        let Some(file) = self.files.get(name) else { return };
        let changed: BTreeSet<u64> = difference.added.iter().chain(&difference.moved).copied().collect();
        let added: BTreeSet<u64> = difference.added.iter().copied().collect();
        for document in file.documents.iter().filter(|document| changed.contains(&document.id)) {
            for (index, object) in document.parsed.objects.iter().enumerate() {
                touched.insert(object.key.clone());
                if added.contains(&document.id) {
                    let (file, parsed) = (name.clone(), document.parsed.clone());
                    let claim = Claim { file, document: document.id, parsed, index };
                    self.claims.entry(object.key.clone()).or_default().push(claim);
                }
            }
        }
    }

    /// Applies the changes of the `touched` objects, none of which is a Service.
    fn settle(&mut self, touched: &BTreeSet<Key>) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut pools_changed = false;
        for key in touched {
            self.order_claims(key);
            let fate = self.judge(key);
            let is_of_pools = matches!(key.kind, Kind::IpAddressPool | Kind::Namespace);
            pools_changed |= is_of_pools && !matches!(fate, Fate::Keep);
            match fate {
                Fate::Keep => {}
                Fate::Remove => self.remove(key, &mut changes),
                Fate::Set(file, resource) => {
                    self.set(key, LastGood { file, resource, service: None }, &mut changes);
                }
            }
        }
        let reassigns = self.addresses.reassigns();
        if pools_changed || (reassigns && self.reads_all_pools != self.can_read_all_pools()) {
            self.set_pools();
        }
        changes
    }

    /// Whether all files, all pools, and all namespaces (which pools may select) are readable.
    fn can_read_all_pools(&self) -> bool {
        let documents = self.files.values().flat_map(|file| &file.documents);
        let objects = documents.flat_map(|document| &document.parsed.objects);
        let mut needed = objects.filter(|it| matches!(it.key.kind, Kind::IpAddressPool | Kind::Namespace));
        self.can_read_all_files() && needed.all(|object| object.resource.is_ok())
    }

    /// Whether every file is complete and readable, so that the folder has no other object than the known ones.
    fn can_read_all_files(&self) -> bool {
        let can_list = self.unreadable.is_none() && !self.expects_more;
        can_list && !self.files.values().any(File::is_obscure)
    }

    /// Applies the changes of the `touched` Services. Repeats the requests of waiting Services as long as an address
    /// may have become free.
    fn settle_services(&mut self, touched: &BTreeSet<Key>) -> Vec<Change> {
        let mut changes = self.settle_once(touched, false);
        while self.asked_at != self.addresses.changes() {
            self.asked_at = self.addresses.changes();
            let mut again = std::mem::take(&mut self.ask_again);
            again.extend(std::mem::take(&mut self.waiting).into_keys());
            changes.extend(self.settle_once(&again, true));
        }
        changes
    }

    /// Applies the changes of the `touched` Services; with `ask_again`, also repeats the requests of those `touched`
    /// Services that are unchanged. Releases addresses before it allocates new ones.
    fn settle_once(&mut self, touched: &BTreeSet<Key>, ask_again: bool) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut services = Vec::new();
        for key in touched {
            self.order_claims(key);
            self.refused.remove(key);
            match self.judge(key) {
                Fate::Keep if ask_again => {
                    let known =
                        self.objects.get(key).map(|known| (known.file.clone(), known.resource.clone()));
                    services.extend(known.map(|(file, resource)| (key, file, resource)));
                }
                Fate::Keep => {}
                Fate::Remove => self.remove(key, &mut changes),
                Fate::Set(file, resource) => services.push((key, file, resource)),
            }
        }
        let requests = services.iter().filter_map(|(_, _, resource)| resource.service());
        let outcomes = self.addresses.assign(&requests.collect::<Vec<_>>());
        for ((key, file, resource), outcome) in services.into_iter().zip(outcomes) {
            match outcome {
                Ok(Assigned { service, waits }) => {
                    self.waiting.remove(key);
                    self.waiting.extend(waits.warning.map(|warning| (key.clone(), warning)));
                    if waits.for_more {
                        self.ask_again.insert(key.clone());
                    }
                    self.set(key, LastGood { file, resource, service }, &mut changes);
                }
                Err(error) => {
                    self.refused.insert(key.clone(), error);
                }
            }
        }
        changes
    }

    /// Replaces the pools, in the order of namespace and name, and the labels of namespaces. Marks all Services of type
    /// LoadBalancer, so that their requests are repeated, because each may now get another address.
    fn set_pools(&mut self) {
        let (mut keys, mut pools, mut namespaces) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (key, known) in &self.objects {
            match &*known.resource {
                Resource::Pool(pool) => {
                    keys.push(key.clone());
                    pools.push(pool.clone());
                }
                Resource::Namespace(labels) => {
                    namespaces.insert(key.name.name.to_string(), labels.clone());
                }
                Resource::Service(service)
                    if service.spec.as_ref().is_some_and(api::ServiceSpec::is_load_balancer) =>
                {
                    self.ask_again.insert(key.clone());
                }
                Resource::Service(_)
                | Resource::Slices(..)
                | Resource::Advertisement(_)
                | Resource::Bgp(_) => {}
            }
        }
        self.reads_all_pools = self.can_read_all_pools();
        let unused = self.addresses.set_pools(pools, Namespaces(namespaces), self.reads_all_pools);
        let with_key = |(index, error): (usize, PoolError)| Some((keys.get(index)?.clone(), error));
        self.unused_pools = unused.into_iter().filter_map(with_key).collect();
    }

    /// Sorts the claims for an object by file and document, so that the first one is in force.
    fn order_claims(&mut self, key: &Key) {
        let Some(claims) = self.claims.get_mut(key) else { return };
        if claims.is_empty() {
            self.claims.remove(key);
            self.disputed.remove(key);
        } else if claims.len() == 1 {
            self.disputed.remove(key);
        } else {
            let files = &self.files;
            claims.sort_by_cached_key(|claim| (claim.file.clone(), position(files, claim), claim.index));
            self.disputed.insert(key.clone());
        }
    }

    fn judge(&mut self, key: &Key) -> Fate {
        let known = self.objects.get_mut(key);
        let Some(claim) = self.claims.get(key).and_then(|claims| claims.first()) else {
            // The object may be defined now in a file that has not been read yet, or in a part of the object's own file
            // that is unreadable or still being written.
            let may_be_defined = |known: &mut LastGood| {
                self.awaits_moves || self.files.get(&known.file).is_some_and(File::is_obscure)
            };
            if known.is_some_and(may_be_defined) {
                self.missing.insert(key.clone());
                return Fate::Keep;
            }
            return Fate::Remove;
        };
        let resource = claim.resource();
        match known {
            Some(known) if resource.is_none_or(|resource| *resource == known.resource) => {
                known.file = claim.file.clone();
                Fate::Keep
            }
            Some(_) | None => match resource {
                Some(resource) => Fate::Set(claim.file.clone(), resource.clone()),
                None => Fate::Keep,
            },
        }
    }

    fn remove(&mut self, key: &Key, changes: &mut Vec<Change>) {
        let known = self.objects.remove(key);
        if known.is_none() && key.kind == Kind::Service && !self.remembers {
            // The Service may have addresses from an earlier run, although this run has accepted no version of it.
            self.addresses.release(&key.name);
        }
        let Some(known) = known else { return };
        self.remove_names(key, &known.resource);
        match &*known.resource {
            Resource::Service(_) => {
                self.addresses.release(&key.name);
                self.waiting.remove(key);
                self.ask_again.remove(key);
                if known.service.is_some() {
                    changes.push(Change::Service(key.name.clone(), None));
                }
            }
            Resource::Slices(slices, _) => {
                changes.extend(slices.keys().map(|name| Change::EndpointSlice(name.clone(), None)));
            }
            Resource::Advertisement(_) => {
                self.advertisements.remove(key);
            }
            Resource::Bgp(object) => self.bgp.remove(&key.name, object),
            Resource::Pool(_) | Resource::Namespace(_) => {}
        }
    }

    fn set(&mut self, key: &Key, known: LastGood, changes: &mut Vec<Change>) {
        self.set_names(key, &known);
        let old = self.objects.get(key);
        match &*known.resource {
            Resource::Service(_) => {
                if known.service.as_ref() != old.and_then(|old| old.service.as_ref()) {
                    changes.push(Change::Service(key.name.clone(), known.service.clone()));
                }
            }
            Resource::Slices(slices, _) => {
                let old = old.map(|old| &*old.resource).and_then(Resource::slices);
                changes.extend(slice_changes(old.unwrap_or(&BTreeMap::new()), slices));
            }
            Resource::Advertisement(advertisement) => {
                self.advertisements.insert(key.clone(), advertisement.clone());
            }
            Resource::Bgp(object) => self.bgp.set(&key.name, object.clone()),
            Resource::Pool(_) | Resource::Namespace(_) => {}
        }
        self.objects.insert(key.clone(), known);
    }

    /// Records the change of an object's DNS names; must be called before the object replaces its old state.
    fn set_names(&mut self, key: &Key, known: &LastGood) {
        if !self.wanted.names {
            return;
        }
        match &*known.resource {
            Resource::Service(service) => {
                let ips = known.service.as_ref().map(|service| service.cluster_ips.as_slice());
                // `dns::service` fails only for an object without a name, and every object of the folder has a name.
                self.names.extend(dns::service(service, ips));
            }
            Resource::Slices(_, slices) => {
                let old = self.objects.get(key).map(|old| Arc::clone(&old.resource));
                if let Some(Resource::Slices(_, old)) = old.as_deref() {
                    let gone = old.keys().filter(|name| !slices.contains_key(name));
                    self.names.extend(gone.map(|name| NameChange::Slice(name.clone(), None)));
                }
                let set = slices.iter().map(|(name, slice)| (name.clone(), Some(slice.clone())));
                self.names.extend(set.map(|(name, slice)| NameChange::Slice(name, slice)));
            }
            Resource::Namespace(_) => self.names.push(NameChange::Namespace(key.name.clone(), true)),
            Resource::Advertisement(_) | Resource::Bgp(_) | Resource::Pool(_) => {}
        }
    }

    fn remove_names(&mut self, key: &Key, resource: &Resource) {
        if !self.wanted.names {
            return;
        }
        match resource {
            Resource::Service(_) => self.names.push(NameChange::Service(key.name.clone(), None)),
            Resource::Slices(_, slices) => {
                self.names.extend(slices.keys().map(|name| NameChange::Slice(name.clone(), None)));
            }
            Resource::Namespace(_) => self.names.push(NameChange::Namespace(key.name.clone(), false)),
            Resource::Advertisement(_) | Resource::Bgp(_) | Resource::Pool(_) => {}
        }
    }

    /// All conditions of the folder, sorted by file and document.
    fn problems(&self) -> Vec<Condition> {
        let mut problems = Vec::new();
        let unreadable = |file, why: &String| Condition::of_file(Severity::Error, file, why.clone());
        problems.extend(self.unreadable.as_ref().map(|why| unreadable(self.dir.clone(), why)));
        for (name, file) in &self.files {
            problems.extend(file.unreadable.as_ref().map(|why| unreadable(self.dir.join(&**name), why)));
            problems.extend(file.is_draft.then(|| draft(self.dir.join(&**name))));
            for (index, document) in file.documents.iter().enumerate() {
                self.problems_of(name, index, document, &mut problems);
            }
        }
        problems
    }

    fn problems_of(
        &self,
        name: &Arc<OsStr>,
        index: usize,
        document: &Document,
        problems: &mut Vec<Condition>,
    ) {
        let mut report = |severity, object: Option<&Key>, error: &FieldError| {
            let location = self.location(name, index);
            // For an object that defines no Service or endpoints, an error becomes a warning, because it hides no
            // Service.
            let hides_service = object.is_none_or(|key| key.kind.defines_services());
            let severity = if hides_service { severity } else { Severity::Warning };
            let (object, field) = (object.map(Key::to_string), error.field.clone());
            let message = error.message_at(document.first_line);
            problems.push(Condition { severity, location, object, field, message });
        };
        for error in &document.parsed.errors {
            report(Severity::Error, None, error);
        }
        for (index, object) in document.parsed.objects.iter().enumerate() {
            let key = &object.key;
            if self.disputed.contains(key)
                && let Some(first) = self.claims.get(key).and_then(|claims| claims.first())
                && (first.document, first.index) != (document.id, index)
            {
                let location = self.location(&first.file, position(&self.files, first));
                let error = FieldError::new(
                    "",
                    format_args!("is defined already in {location}; this one is ignored"),
                );
                report(Severity::Error, Some(key), &error);
                continue;
            }
            let errors = object.resource.as_ref().err().into_iter().flatten();
            for error in errors.chain(self.refused.get(key)) {
                report(Severity::Error, Some(key), error);
            }
            for error in object.warnings.iter().chain(self.waiting.get(key)) {
                report(Severity::Warning, Some(key), error);
            }
            if let Some(error) = self.unused_pools.get(key) {
                report(Severity::Error, Some(key), &FieldError::new("spec.addresses", error));
            }
        }
    }

    /// Locations of ignored objects whose kind has not been reported before.
    fn newly_ignored(&mut self) -> Vec<(Location, String)> {
        let mut found = Vec::new();
        for (name, file) in &self.files {
            for (index, document) in file.documents.iter().enumerate() {
                for kind in &document.parsed.ignored {
                    if self.ignored_kinds.insert(kind.clone()) {
                        found.push((self.location(name, index), kind.clone()));
                    }
                }
            }
        }
        found
    }

    fn location(&self, file: &Arc<OsStr>, document: usize) -> Location {
        let location = self.files.get(file).map(|file| file.location(document));
        Location { file: self.dir.join(&**file), document: location }
    }
}

/// The warning about a file that is open for writing. Objects that it no longer defines stay in force.
fn draft(file: PathBuf) -> Condition {
    let message = "is open for writing; objects that it no longer defines stay in force until it is closed";
    Condition::of_file(Severity::Warning, file, message.to_owned())
}

/// The position of a claim's document among the documents of its file.
fn position(files: &BTreeMap<Arc<OsStr>, File>, claim: &Claim) -> usize {
    let documents = files.get(&claim.file).map_or(&[][..], |file| &file.documents);
    documents.iter().position(|document| document.id == claim.document).unwrap_or(usize::MAX)
}

fn slice_changes(old: &Slices, new: &Slices) -> Vec<Change> {
    let gone = old.keys().filter(|name| !new.contains_key(name));
    let gone = gone.map(|name| Change::EndpointSlice(name.clone(), None));
    let set = new.iter().filter(|(name, slice)| old.get(name) != Some(slice));
    let set = set.map(|(name, slice)| Change::EndpointSlice(name.clone(), Some(slice.clone())));
    gone.chain(set).collect()
}
