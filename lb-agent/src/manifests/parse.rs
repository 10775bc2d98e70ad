//! Parses the text of a YAML document into objects.

use std::{borrow::Cow, collections::BTreeMap, fmt, sync::Arc};

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use lb_core::{
    announce::{advertisement::Advertisement, bgp},
    api::{self, DEFAULT_NAMESPACE, ObjectMeta},
    convert::{self, Converted},
    dns::{self, NameChange, NamedSlice, Words},
    load_balancer::{self, Labels, Pool},
    model::{Change, EndpointSlice, ObjectName},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use serde_saphyr::{MessageFormatter, UserMessageFormatter};

use super::{addresses::field_error, bgp as bgp_kinds, condition::FieldError, schema, validate};

/// Maximum number of YAML events that aliases may replay within one document, against exponential growth.
const MAX_REPLAYED_EVENTS: usize = 100_000;

/// The kinds of Kubernetes and MetalLB objects that this source reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Service,
    EndpointSlice,
    Endpoints,
    IpAddressPool,
    L2Advertisement,
    BgpAdvertisement,
    BgpPeer,
    Community,
    BfdProfile,
    Namespace,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Service,
        Self::EndpointSlice,
        Self::Endpoints,
        Self::IpAddressPool,
        Self::L2Advertisement,
        Self::BgpAdvertisement,
        Self::BgpPeer,
        Self::Community,
        Self::BfdProfile,
        Self::Namespace,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Endpoints => "Endpoints",
            Self::IpAddressPool => "IPAddressPool",
            Self::L2Advertisement => "L2Advertisement",
            Self::BgpAdvertisement => "BGPAdvertisement",
            Self::BgpPeer => "BGPPeer",
            Self::Community => "Community",
            Self::BfdProfile => "BFDProfile",
            Self::Namespace => "Namespace",
        }
    }

    const fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Endpoints | Self::Namespace => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::IpAddressPool
            | Self::L2Advertisement
            | Self::BgpAdvertisement
            | Self::Community
            | Self::BfdProfile => "metallb.io/v1beta1",
            Self::BgpPeer => "metallb.io/v1beta2",
        }
    }

    /// Whether an error in an object of this kind may hide a Service or its endpoints.
    pub(super) const fn defines_services(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice | Self::Endpoints)
    }
}

/// Kind and name, which identify an object of the folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: ObjectName,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.as_str();
        match self.kind {
            Kind::Namespace => write!(f, "{kind} {}", self.name.name),
            Kind::Service
            | Kind::EndpointSlice
            | Kind::Endpoints
            | Kind::IpAddressPool
            | Kind::L2Advertisement
            | Kind::BgpAdvertisement
            | Kind::BgpPeer
            | Kind::Community
            | Kind::BfdProfile => {
                write!(f, "{kind} {}", self.name)
            }
        }
    }
}

/// EndpointSlices by name.
pub(super) type Slices = BTreeMap<ObjectName, EndpointSlice>;

/// The parts of EndpointSlices from which DNS names are made, by name; empty unless the source collects names.
pub(super) type NamedSlices = BTreeMap<ObjectName, NamedSlice>;

/// A valid object of the folder.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Resource {
    /// The Service, without annotations of other software. Its addresses and node ports are allocated later, because
    /// they depend on the other Services.
    Service(Box<api::Service>),
    /// An EndpointSlice, or the EndpointSlices that an Endpoints object stands for.
    Slices(Slices, NamedSlices),
    /// A pool of addresses for Services of type LoadBalancer.
    Pool(Pool),
    /// A rule by which addresses are announced at layer 2.
    Advertisement(Advertisement),
    /// An object that configures announcements by BGP.
    Bgp(bgp::Object),
    /// The labels of a namespace, by which pools select it.
    Namespace(Labels),
}

impl Resource {
    pub(super) fn service(&self) -> Option<&api::Service> {
        match self {
            Self::Service(service) => Some(service),
            Self::Slices(..) | Self::Pool(_) | Self::Advertisement(_) | Self::Bgp(_) | Self::Namespace(_) => {
                None
            }
        }
    }

    pub(super) fn slices(&self) -> Option<&Slices> {
        match self {
            Self::Slices(slices, _) => Some(slices),
            Self::Service(_) | Self::Pool(_) | Self::Advertisement(_) | Self::Bgp(_) | Self::Namespace(_) => {
                None
            }
        }
    }
}

/// The optional parts of objects that the source reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Whether to read what DNS names are made of.
    pub(super) names: bool,
}

/// An object whose kind and name are readable; its other fields may be invalid.
#[derive(Debug, PartialEq)]
pub(super) struct Object {
    pub(super) key: Key,
    pub(super) resource: Result<Arc<Resource>, Vec<FieldError>>,
    pub(super) warnings: Vec<FieldError>,
}

/// The objects and errors of a document.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Parsed {
    pub(super) objects: Vec<Object>,
    /// Errors in parts of the document that may define further objects with unknown names.
    pub(super) errors: Vec<FieldError>,
    /// `apiVersion kind` of objects that this source ignores.
    pub(super) ignored: Vec<String>,
    /// The words of the document, which include the names of the objects that it hides ([`Self::hides_objects`]);
    /// `Some(None)` if a name may be missing from the words. `None` if the document hides no object, or if DNS names
    /// are not wanted.
    pub(super) words: Option<Option<Words>>,
}

impl Parsed {
    /// Whether the document defines, or may define, a Service or endpoints that cannot be read.
    fn hides_objects(&self) -> bool {
        let is_bad = |object: &Object| object.key.kind.defines_services() && object.resource.is_err();
        !self.errors.is_empty() || self.objects.iter().any(is_bad)
    }
}

pub(super) fn parse(text: &str, wanted: Wanted) -> Parsed {
    let mut parsed = Parsed::default();
    match to_value(text) {
        Ok(Value::Null) => {}
        Ok(value) => take(&value, "", &Type::default(), wanted, &mut parsed),
        Err(error) => parsed.errors.push(error),
    }
    if wanted.names && parsed.hides_objects() {
        parsed.words = Some(dns::words(text));
    }
    parsed
}

/// Parses YAML into a JSON value, as kubectl does. Text that begins with `{` is first parsed as JSON, which is much
/// faster.
fn to_value(text: &str) -> Result<Value, FieldError> {
    if text.trim_start().starts_with('{')
        && let Ok(value) = serde_json::from_str(text)
    {
        return Ok(value);
    }
    // A List may contain all objects of the folder, so the limits grow with the text. A text without aliases never
    // exceeds them.
    let defaults = serde_saphyr::Budget::default();
    let budget = serde_saphyr::budget! {
        max_events: defaults.max_events.max(2 * text.len()),
        max_nodes: defaults.max_nodes.max(text.len()),
        max_total_scalar_bytes: defaults.max_total_scalar_bytes.max(text.len()),
    };
    let limits = serde_saphyr::alias_limits! { max_total_replayed_events: MAX_REPLAYED_EVENTS };
    let options = serde_saphyr::options! { budget: budget, alias_limits: limits, with_snippet: false };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let message = UserMessageFormatter.format_message(error.without_snippet()).into_owned();
        let position = error.location().and_then(|location| {
            Some((usize::try_from(location.line()).ok()?, usize::try_from(location.column()).ok()?))
        });
        FieldError { field: String::new(), message: format!("invalid YAML: {message}"), position }
    })
}

/// `apiVersion` and `kind` of an object. An item of a list inherits from the list what it lacks.
#[derive(Clone, Default)]
struct Type {
    api_version: Option<String>,
    kind: Option<String>,
}

impl Type {
    fn of(value: &Value, inherited: &Self) -> Self {
        let text = |field: &str| value.get(field).and_then(Value::as_str).map(str::to_owned);
        Self {
            api_version: text("apiVersion").or_else(|| inherited.api_version.clone()),
            kind: text("kind").or_else(|| inherited.kind.clone()),
        }
    }
}

/// Parses an object, or the items of a list; `prefix` is the path of `value` within the document.
fn take(value: &Value, prefix: &str, inherited: &Type, wanted: Wanted, parsed: &mut Parsed) {
    if !value.is_object() {
        let field = prefix.trim_end_matches('.');
        parsed.errors.push(FieldError::new(
            field,
            "this is no Kubernetes object: apiVersion, kind and metadata are expected",
        ));
        return;
    }
    let Type { api_version: Some(api_version), kind: Some(kind) } = Type::of(value, inherited) else {
        let missing = if Type::of(value, inherited).kind.is_none() { "kind" } else { "apiVersion" };
        parsed.errors.push(FieldError::new(format_args!("{prefix}{missing}"), "Required value"));
        return;
    };
    if let Some(item_kind) = list_of(&kind) {
        let item_type = item_kind.map_or_else(Type::default, |kind| Type {
            api_version: Some(api_version),
            kind: Some(kind.as_str().to_owned()),
        });
        let items = value.get("items").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        for (index, item) in items.iter().enumerate() {
            take(item, &format!("{prefix}items[{index}]."), &item_type, wanted, parsed);
        }
        return;
    }
    match recognise(&api_version, &kind) {
        Recognised::Ours(kind) => take_object(kind, value, prefix, wanted, parsed),
        Recognised::Ignored => parsed.ignored.push(format!("{api_version} {kind}")),
        Recognised::Mistaken(meant) => parsed.errors.push(FieldError::new(
            format_args!("{prefix}kind"),
            format_args!(
                "no matches for kind {kind:?} in version {api_version:?}; apiVersion: {}, kind: {} is meant?",
                meant.api_version(),
                meant.as_str()
            ),
        )),
    }
}

/// Returns `None` if `kind` is no list of objects that this source reads. Otherwise returns the kind of the items, or
/// `Some(None)` for the kind `List`, whose items name their own kinds.
fn list_of(kind: &str) -> Option<Option<Kind>> {
    let item = kind.strip_suffix("List")?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.as_str() == item);
    (item.is_empty() || kind.is_some()).then_some(kind)
}

enum Recognised {
    Ours(Kind),
    Ignored,
    Mistaken(Kind),
}

/// Recognises the kind of an object. A supported kind must have the right capitals, group and version. Otherwise it is
/// an error if `apiVersion` has no group, the group of some supported kind, or `core`. Under any other group the source
/// ignores the object, such as Knative's Service.
fn recognise(api_version: &str, kind: &str) -> Recognised {
    let Some(known) = Kind::ALL.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(kind)) else {
        return Recognised::Ignored;
    };
    if known.as_str() == kind && known.api_version() == api_version {
        return Recognised::Ours(known);
    }
    match api_version.split_once('/') {
        None | Some(("discovery.k8s.io" | "core" | "metallb.io", _)) => Recognised::Mistaken(known),
        Some(_) => Recognised::Ignored,
    }
}

fn take_object(kind: Kind, value: &Value, prefix: &str, wanted: Wanted, parsed: &mut Parsed) {
    let metadata = |field: &str| value.get("metadata").and_then(|metadata| metadata.get(field));
    let Some(name) = metadata("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
        let why = match metadata("name") {
            None | Some(Value::Null) => "Required value".to_owned(),
            Some(Value::String(_)) => "Required value: not empty".to_owned(),
            Some(other) => format!("Invalid value: {other}: must be a string; quote it"),
        };
        parsed.errors.push(FieldError::new(
            format_args!("{prefix}metadata.name"),
            format_args!("{why} ({})", kind.as_str()),
        ));
        return;
    };
    let namespace = metadata("namespace").and_then(Value::as_str).filter(|namespace| !namespace.is_empty());
    // A Namespace object is cluster-scoped.
    let namespace = if kind == Kind::Namespace { "" } else { namespace.unwrap_or(DEFAULT_NAMESPACE) };
    let key = Key { kind, name: ObjectName::new(namespace, name) };
    let mut warnings = Vec::new();
    let value = &*with_texts(value, &mut warnings);
    let resource = match kind {
        Kind::Service => service(value),
        Kind::EndpointSlice => endpoint_slice(value, wanted, &mut warnings),
        Kind::Endpoints => endpoints(value, wanted),
        Kind::IpAddressPool => pool(value),
        Kind::L2Advertisement => advertisement(value),
        Kind::BgpAdvertisement => bgp_kinds::advertisement(value),
        Kind::BgpPeer => bgp_kinds::peer(value),
        Kind::Community => bgp_kinds::communities(value),
        Kind::BfdProfile => bgp_kinds::profile(value, &mut warnings),
        Kind::Namespace => namespace_labels(value),
    };
    let resource = resource.map(Arc::new).map_err(|errors| under(prefix, errors));
    parsed.objects.push(Object { key, resource, warnings: under(prefix, warnings) });
}

/// Converts booleans and numbers among the values of an object's labels and annotations to strings, and adds a warning
/// for each. The API server rejects such values, but examples in the documentation of Kubernetes have them.
fn with_texts<'a>(value: &'a Value, warnings: &mut Vec<FieldError>) -> Cow<'a, Value> {
    let mut result = Cow::Borrowed(value);
    for field in ["labels", "annotations"] {
        let path = format!("/metadata/{field}");
        let values = value.pointer(&path).and_then(Value::as_object).into_iter().flatten();
        for (name, scalar) in values.filter(|(_, value)| value.is_boolean() || value.is_number()) {
            let text = scalar.to_string();
            warnings.push(FieldError::new(
                format_args!("metadata.{field}.{name}"),
                format_args!("{text} is no string, and is read as {text:?}: quote it"),
            ));
            if let Some(values) = result.to_mut().pointer_mut(&path).and_then(Value::as_object_mut) {
                values.insert(name.clone(), text.into());
            }
        }
    }
    result
}

fn service(value: &Value) -> Result<Resource, Vec<FieldError>> {
    let mut service: api::Service = typed::<core::Service, _>(value)?;
    validate::service(&service)?;
    // Drops annotations of other software: the agent does not use them, and they may be larger than the rest.
    let ObjectMeta { name, namespace, labels, annotations, .. } = service.metadata;
    let ours = |(name, _): &(String, String)| {
        name.starts_with(convert::ANNOTATION_PREFIX)
            || [convert::ACCESS_LOG, convert::ACCESS_LOG_INTERVAL].contains(&name.as_str())
            || load_balancer::is_relevant(name)
            || convert::is_of_cloud(name)
            || name == dns::TOLERATE_UNREADY
    };
    let annotations = annotations.map(|all| all.into_iter().filter(ours).collect());
    service.metadata = ObjectMeta { name, namespace, labels, annotations, ..ObjectMeta::default() };
    Ok(Resource::Service(Box::new(service)))
}

fn endpoint_slice(
    value: &Value,
    wanted: Wanted,
    warnings: &mut Vec<FieldError>,
) -> Result<Resource, Vec<FieldError>> {
    let mut slice: api::EndpointSlice = typed::<discovery::EndpointSlice, _>(value)?;
    // An unset port name becomes the empty one, as in the API server; kube-proxy ignores a port whose name is unset.
    slice.ports.iter_mut().flatten().for_each(|port| _ = port.name.get_or_insert_default());
    validate::endpoint_slice(&slice, warnings)?;
    let refuse = |error| vec![field_error(error)];
    let slices = match convert::endpoint_slice(&slice).and_then(Converted::whole).map_err(refuse)? {
        Change::EndpointSlice(name, Some(slice)) => Slices::from([(name, slice)]),
        Change::EndpointSlice(_, None) | Change::Service(..) => Slices::new(),
    };
    let names = wanted.names.then(|| dns::endpoint_slice(&slice)).transpose().map_err(refuse)?;
    let names = match names {
        Some(NameChange::Slice(name, Some(slice))) => NamedSlices::from([(name, slice)]),
        Some(_) | None => NamedSlices::new(),
    };
    Ok(Resource::Slices(slices, names))
}

fn endpoints(value: &Value, wanted: Wanted) -> Result<Resource, Vec<FieldError>> {
    let endpoints: api::Endpoints = typed::<core::Endpoints, _>(value)?;
    validate::endpoints(&endpoints)?;
    let refuse = |error| vec![field_error(error)];
    let slices = convert::endpoints(&endpoints).map_err(refuse)?;
    let names = wanted.names.then(|| dns::endpoints(&endpoints)).transpose().map_err(refuse)?;
    Ok(Resource::Slices(slices.into_iter().collect(), names.into_iter().flatten().collect()))
}

fn pool(value: &Value) -> Result<Resource, Vec<FieldError>> {
    let pool: api::IpAddressPool = typed::<schema::IpAddressPool, _>(value)?;
    Pool::new(&pool).map(Resource::Pool).map_err(|error| vec![field_error(error)])
}

fn advertisement(value: &Value) -> Result<Resource, Vec<FieldError>> {
    let advertisement: api::L2Advertisement = typed::<schema::L2Advertisement, _>(value)?;
    Advertisement::new(&advertisement).map(Resource::Advertisement).map_err(|error| vec![field_error(error)])
}

/// The labels of a Namespace. The rest of the object does not matter here, so it is not checked.
fn namespace_labels(value: &Value) -> Result<Resource, Vec<FieldError>> {
    #[derive(Deserialize)]
    struct Namespace {
        metadata: ObjectMeta,
    }
    let namespace = Namespace::deserialize(value).map_err(|error| vec![FieldError::new("", error)])?;
    Ok(Resource::Namespace(namespace.metadata.labels.unwrap_or_default()))
}

/// Puts `prefix`, the object's path in the document, before the field of each error.
fn under(prefix: &str, mut errors: Vec<FieldError>) -> Vec<FieldError> {
    if !prefix.is_empty() {
        for error in &mut errors {
            error.field = format!("{prefix}{}", error.field);
        }
    }
    errors
}

/// Reads the object as a `T`, after checking the whole of it against `Schema`, which has all fields of the kind. An
/// unknown field is an error, as for `kubectl apply`: a typo must not count as an absent field, because a Service
/// without endpoints would be the result.
pub(super) fn typed<Schema: DeserializeOwned, T: DeserializeOwned>(
    value: &Value,
) -> Result<T, Vec<FieldError>> {
    let mut track = serde_path_to_error::Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(value, &mut track);
    let mut unknown = Vec::new();
    let note =
        |path: serde_ignored::Path<'_>| unknown.push(FieldError::new(FieldPath(&path), "unknown field"));
    let checked: Result<Schema, _> = serde_ignored::deserialize(deserializer, note);
    checked.map_err(|error| {
        let field = track.path().to_string();
        vec![FieldError::new(if field == "." { "" } else { &field }, error)]
    })?;
    if unknown.is_empty() {
        T::deserialize(value).map_err(|error| vec![FieldError::new("", error)])
    } else {
        Err(unknown)
    }
}

/// Displays a path as Kubernetes writes it, such as `spec.ports[0].port`.
struct FieldPath<'a>(&'a serde_ignored::Path<'a>);

impl fmt::Display for FieldPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use serde_ignored::Path;
        match self.0 {
            Path::Root => Ok(()),
            Path::Seq { parent, index } => write!(f, "{}[{index}]", FieldPath(parent)),
            Path::Map { parent, key } => {
                let parent = FieldPath(parent).to_string();
                let dot = if parent.is_empty() { "" } else { "." };
                write!(f, "{parent}{dot}{key}")
            }
            Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
                FieldPath(parent).fmt(f)
            }
        }
    }
}
