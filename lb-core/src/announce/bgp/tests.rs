use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use ipnet::IpNet;
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    BfdProfile, BgpAdvertisement, Community, Configuration, Peer, configuration, routes, without_passwords,
};
use crate::{
    announce::{
        advertisement::{Advertised, labels_of},
        holders::Holder,
    },
    convert::{ConvertError, object_name},
    load_balancer::{Labels, Pool},
    model::ObjectName,
};

fn n1() -> Arc<str> {
    Arc::from("n1")
}

fn labels() -> Labels {
    labels_of(&n1())
}

fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// Adds an object; the first mistake in it is an error.
fn add(advertised: &mut Advertised, object: &Value) -> Result<Vec<ConvertError>, ConvertError> {
    let of = |kind| object_name(kind, &read(&object["metadata"]));
    let bgp = &mut advertised.bgp;
    match &*read::<String>(&object["kind"]) {
        "IPAddressPool" => {
            let pool = Pool::new(&read(object))?;
            advertised.pools.push(pool);
        }
        "BGPAdvertisement" => {
            let advertisement = BgpAdvertisement::new(&read(object))?;
            bgp.advertisements.insert(of("BGPAdvertisement")?, advertisement);
        }
        "BGPPeer" => {
            let peer = Peer::new(&read(object))?;
            bgp.peers.insert(of("BGPPeer")?, peer);
        }
        "Community" => {
            let names = Community::names(&read(object))?;
            bgp.communities.insert(of("Community")?, names);
        }
        "BFDProfile" => {
            let (profile, ignored) = BfdProfile::new(&read(object))?;
            bgp.profiles.insert(of("BFDProfile")?, profile);
            return Ok(ignored);
        }
        other => panic!("unknown kind {other}"),
    }
    Ok(Vec::new())
}

fn advertised(objects: &[Value]) -> Advertised {
    let mut advertised = Advertised::default();
    objects.iter().for_each(|object| assert_eq!(add(&mut advertised, object).unwrap(), []));
    advertised
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"kind": kind, "metadata": {"name": name, "namespace": "metallb-system"}, "spec": spec})
}

fn pool(name: &str, addresses: &[&str]) -> Value {
    object("IPAddressPool", name, json!({"addresses": addresses}))
}

fn advertisement(name: &str, spec: Value) -> Value {
    object("BGPAdvertisement", name, spec)
}

fn peer(name: &str, address: &str, more: Value) -> Value {
    let mut spec = json!({"myASN": 64500, "peerASN": 64501, "peerAddress": address});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    object("BGPPeer", name, spec)
}

fn refusal(object: &Value) -> String {
    let error = add(&mut Advertised::default(), object).unwrap_err();
    format!("{}: {}", error.field, error.why)
}

fn texts(errors: &[ConvertError]) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/announce/bgp/testdata")
}

/// `UPDATE_EXPECT=1` writes the files.
#[test]
fn bird_configurations_are_the_golden_files() {
    for name in ["empty", "minimal", "communities", "options"] {
        let objects = fs::read_to_string(testdata().join(format!("{name}.yaml"))).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_str(&objects).unwrap();
        let Configuration { text, errors, warnings } = configuration(&advertised(&objects), 1080, &labels());
        assert_eq!((texts(&errors), texts(&warnings)), (Vec::new(), Vec::new()), "{name}");
        let golden = testdata().join(format!("{name}.conf"));
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&golden, &text).unwrap();
        }
        assert_eq!(text, fs::read_to_string(&golden).unwrap(), "{name}");
        assert_is_valid(&golden);
        let reversed: Vec<Value> = objects.into_iter().rev().collect();
        let again = configuration(&advertised(&reversed), 1080, &labels());
        assert_eq!(again.text, text, "{name} depends on the order of the objects");
    }
}

/// BIRD reads the file, if BIRD is installed.
fn assert_is_valid(file: &Path) {
    let checked = Command::new("bird").arg("-p").arg("-c").arg(file).output();
    let Ok(output) = checked else {
        return println!("BIRD is not installed: {} is not checked", file.display());
    };
    let reason = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {reason}", file.display());
}

#[test]
fn passwords_are_hidden() {
    let text = "  password \"correct horse\";\n  next;\n";
    assert_eq!(without_passwords(text), "  password \"...\"; # hidden\n  next;\n");
    let objects = [peer("a", "10.0.0.1", json!({"password": "correct horse"}))];
    assert!(!format!("{:?}", advertised(&objects)).contains("horse"));
}

#[test]
fn invalid_peers_are_refused_with_their_field() {
    for (more, field) in [
        (json!({"myASN": 0}), "spec.myASN"),
        (json!({"peerASN": 4_294_967_296_i64}), "spec.peerASN"),
        (json!({"peerASN": null}), "spec.peerASN"),
        (json!({"dynamicASN": "external"}), "spec.peerASN"),
        (json!({"peerASN": 0, "dynamicASN": "both"}), "spec.dynamicASN"),
        (json!({"peerAddress": "router"}), "spec.peerAddress"),
        (json!({"interface": "eth0"}), "spec.interface"),
        (json!({"sourceAddress": "2001:db8::1"}), "spec.sourceAddress"),
        (json!({"peerPort": 0}), "spec.peerPort"),
        (json!({"holdTime": "2s"}), "spec.holdTime"),
        (json!({"holdTime": "1.5s"}), "spec.holdTime"),
        (json!({"keepaliveTime": "500ms"}), "spec.keepaliveTime"),
        (json!({"holdTime": "9s", "keepaliveTime": "10s"}), "spec.keepaliveTime"),
        (json!({"routerID": "node"}), "spec.routerID"),
        (json!({"passwordSecret": {"name": "key"}}), "spec.passwordSecret"),
        (json!({"password": "\"; quit"}), "spec.password"),
        (json!({"vrf": "a-name-that-is-too-long"}), "spec.vrf"),
        (json!({"peerASN": 64500, "ebgpMultiHop": true}), "spec.ebgpMultiHop"),
        (
            json!({"nodeSelectors": [{"matchExpressions": [{"key": "a", "operator": "Is"}]}]}),
            "spec.nodeSelectors[0].matchExpressions[0].operator",
        ),
    ] {
        let why = refusal(&peer("a", "10.0.0.1", more));
        assert!(why.starts_with(&format!("{field}:")), "{why}");
        assert!(!why.contains("quit"), "{why}");
    }
    assert!(refusal(&peer(&"a".repeat(60), "10.0.0.1", json!({}))).starts_with("metadata.name:"));
}

#[test]
fn other_invalid_objects_are_refused_with_their_field() {
    let alias = |name: &str, value: &str| json!({"communities": [{"name": "x", "value": "1:1"}, {"name": name, "value": value}]});
    for (of, field) in [
        (advertisement("a", json!({"aggregationLength": 33})), "spec.aggregationLength"),
        (advertisement("a", json!({"aggregationLengthV6": 0})), "spec.aggregationLengthV6"),
        (advertisement("a", json!({"localPref": -1})), "spec.localPref"),
        (advertisement("a", json!({"serviceSelectors": [{}]})), "spec.serviceSelectors"),
        (object("Community", "a", alias("y", "99999999:1")), "spec.communities[1].value"),
        (object("Community", "a", alias("y", "lar:1:2:3")), "spec.communities[1].value"),
        (object("Community", "a", alias("y", "large:1:2")), "spec.communities[1].value"),
        (object("Community", "a", alias("x", "1:2")), "spec.communities[1].name"),
        (object("Community", "a", alias("", "1:2")), "spec.communities[1].name"),
        (object("BFDProfile", "a", json!({"receiveInterval": 5})), "spec.receiveInterval"),
        (object("BFDProfile", "a", json!({"detectMultiplier": 256})), "spec.detectMultiplier"),
    ] {
        let why = refusal(&of);
        assert!(why.starts_with(&format!("{field}:")), "{why}");
    }
    let ignored = object("BFDProfile", "a", json!({"echoMode": true, "minimumTtl": 10}));
    let ignored = add(&mut Advertised::default(), &ignored).unwrap();
    assert_eq!(ignored.iter().map(|it| &*it.field).collect::<Vec<_>>(), ["spec.echoMode", "spec.minimumTtl"]);
}

/// The rest of the configuration stays as it is.
#[test]
fn reference_to_what_does_not_exist_is_an_error_of_its_object_only() {
    let sound =
        [pool("one", &["203.0.113.0/28"]), advertisement("a", json!({})), peer("r", "10.0.0.1", json!({}))];
    let whole = configuration(&advertised(&sound), 1080, &labels()).text;
    for (more, error) in [
        (
            advertisement("b", json!({"communities": ["1:1", "gold"]})),
            "spec.communities[1]: Invalid value: \"gold\"",
        ),
        (
            advertisement("b", json!({"aggregationLength": 27})),
            "spec.aggregationLength: Invalid value: the routes are wider",
        ),
        (peer("s", "10.0.0.2", json!({"bfdProfile": "fast"})), "spec.bfdProfile: Invalid value: \"fast\""),
        (peer("s", "10.0.0.1", json!({})), "spec.peerAddress: Invalid value"),
    ] {
        let all = [&sound[..], &[more]].concat();
        let Configuration { text, errors, warnings } = configuration(&advertised(&all), 1080, &labels());
        let (errors, warnings) = (texts(&errors), texts(&warnings));
        assert!(
            errors.len() == 1 && errors[0].contains(error) && warnings.is_empty(),
            "{errors:?} {warnings:?}"
        );
        assert_eq!(text, whole, "{error}");
    }
    for (spec, warning) in [
        (json!({"peers": ["nobody"]}), "spec.peers: Invalid value: \"nobody\""),
        (json!({"ipAddressPools": ["nothing"]}), "spec.ipAddressPools: Invalid value: \"nothing\""),
    ] {
        let all = [&sound[..], &[advertisement("b", spec)]].concat();
        let Configuration { text, errors, warnings } = configuration(&advertised(&all), 1080, &labels());
        let (errors, warnings) = (texts(&errors), texts(&warnings));
        assert!(
            warnings.len() == 1 && warnings[0].contains(warning) && errors.is_empty(),
            "{errors:?} {warnings:?}"
        );
        assert_eq!(text, whole, "{warning}");
    }
}

#[test]
fn one_router_id_counts_for_a_node() {
    let peers = [
        peer("a", "10.0.0.1", json!({"routerID": "10.0.0.9"})),
        peer("b", "10.0.0.2", json!({})),
        peer("c", "10.0.0.3", json!({"routerID": "10.0.0.8"})),
    ];
    let Configuration { text, errors, .. } = configuration(&advertised(&peers), 1080, &labels());
    assert!(texts(&errors)[0].contains("spec.routerID"), "{errors:?}");
    assert!(text.contains("router id 10.0.0.9;") && text.contains("'metallb-system.b'"), "{text}");
    assert!(!text.contains("'metallb-system.c'"), "{text}");
}

#[test]
fn higher_local_preference_wins_and_is_reported() {
    let objects = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("a", json!({"localPref": 300})),
        advertisement("b", json!({"localPref": 200})),
        peer("r", "10.0.0.1", json!({})),
    ];
    let Configuration { text, warnings, .. } = configuration(&advertised(&objects), 1080, &labels());
    assert!(
        text.find("bgp_local_pref = 200").unwrap() < text.find("bgp_local_pref = 300").unwrap(),
        "{text}"
    );
    assert!(texts(&warnings)[0].contains("spec.localPref"), "{warnings:?}");
}

fn holder(addresses: &[&str], nodes: Option<&[&str]>) -> Holder {
    Holder {
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        is_served: true,
        nodes: nodes.map(|nodes| nodes.iter().map(|node| Arc::from(*node)).collect()),
    }
}

fn found(objects: &[Value], services: &[Holder]) -> String {
    let named = |(index, holder): (usize, &Holder)| {
        (ObjectName::new("default", &format!("s{index}")), holder.clone())
    };
    let holders = services.iter().enumerate().map(named).collect();
    let routes = routes(&advertised(objects), &holders, &n1(), &labels());
    routes.keys().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn served_addresses_of_advertised_pools_are_routes() {
    let pools =
        || vec![pool("one", &["203.0.113.0/28", "2001:db8::/120"]), pool("two", &["198.51.100.0/24"])];
    let with = |spec: Value| [pools(), vec![advertisement("a", spec)]].concat();
    let service = holder(&["203.0.113.1", "2001:db8::1"], None);
    let of = |objects: &[Value], holder: &Holder| found(objects, std::slice::from_ref(holder));
    assert_eq!(of(&with(json!({})), &service), "203.0.113.1/32 2001:db8::1/128");
    assert_eq!(of(&pools(), &service), "", "no advertisement");
    assert_eq!(of(&with(json!({"ipAddressPools": ["two"]})), &service), "");
    let on = |node: &str| with(json!({"nodeSelectors": [{"matchLabels": {"kubernetes.io/hostname": node}}]}));
    assert_eq!(of(&on("n1"), &service), "203.0.113.1/32 2001:db8::1/128");
    assert_eq!(of(&on("n2"), &service), "");
    let aggregate = with(json!({"aggregationLength": 28, "aggregationLengthV6": 120}));
    assert_eq!(of(&aggregate, &service), "203.0.113.0/28 2001:db8::/120");
    let too_wide = with(json!({"aggregationLength": 27}));
    assert_eq!(of(&too_wide, &service), "", "no part of a pool that a route would exceed is announced");
    // An address that no pool has any more, and one whose Service has no endpoint.
    assert_eq!(of(&with(json!({})), &holder(&["192.0.2.1"], None)), "");
    assert_eq!(of(&with(json!({})), &Holder { is_served: false, ..service }), "");
    let local = |nodes: &[&str]| holder(&["203.0.113.1"], Some(nodes));
    assert_eq!(of(&with(json!({})), &local(&["n2"])), "");
    assert_eq!(of(&with(json!({})), &local(&["n1", "n2"])), "203.0.113.1/32");
    // The aggregate stays as long as one of its addresses is served here.
    assert_eq!(found(&aggregate, &[local(&["n2"]), holder(&["203.0.113.9"], None)]), "203.0.113.0/28");
}

proptest! {
    /// Each served address is within a route, each route has a served address, and BIRD's filter lets the route pass.
    #[test]
    fn routes_are_those_of_served_addresses(
        services in prop::collection::vec((0_u8..64, any::<bool>(), prop::option::of(any::<bool>())), 0..12),
        lengths in prop::collection::vec(26_u8..=32, 1..3),
        first in 0_u8..8,
        last in 8_u8..64,
    ) {
        let mut objects = vec![pool("one", &[&format!("192.0.2.{first}-192.0.2.{last}")])];
        let lengths: Vec<u8> = lengths;
        for (index, length) in lengths.iter().enumerate() {
            objects.push(advertisement(&format!("a{index}"), json!({"aggregationLength": length})));
        }
        let advertised = advertised(&objects);
        let holders: BTreeMap<ObjectName, Holder> = services
            .iter()
            .enumerate()
            .map(|(index, (byte, is_served, local))| {
                let nodes = local.map(|here| [if here { "n1" } else { "n2" }]);
                let address = format!("192.0.2.{byte}");
                let holder = holder(&[&address], nodes.as_ref().map(|nodes| &nodes[..]));
                (ObjectName::new("default", &format!("s{index}")), Holder { is_served: *is_served, ..holder })
            })
            .collect();
        let served: BTreeSet<_> = holders
            .values()
            .filter(|holder| holder.is_served && holder.nodes.as_ref().is_none_or(|nodes| nodes.contains("n1")))
            .flat_map(|holder| holder.addresses.clone())
            .filter(|address| advertised.pool_of(*address).is_some())
            .collect();
        let routes = routes(&advertised, &holders, &n1(), &labels());
        let fitting: Vec<&BgpAdvertisement> = advertised
            .bgp
            .advertisements
            .values()
            .filter(|advertisement| advertisement.announces(&advertised.pools[0]))
            .collect();
        let expected: BTreeSet<IpNet> = served
            .iter()
            .flat_map(|address| fitting.iter().map(|advertisement| advertisement.route(*address)))
            .collect();
        prop_assert_eq!(routes.keys().copied().collect::<BTreeSet<_>>(), expected);
        let sets: BTreeSet<_> = fitting.iter().flat_map(|it| it.route_sets(&advertised.pools[0])).collect();
        for route in routes.keys() {
            let passes = sets.iter().any(|set| set.length == route.prefix_len() && set.network.contains(route));
            prop_assert!(passes, "{} passes none of {:?}", route, sets);
        }
    }
}
