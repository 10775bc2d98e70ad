use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use ipnet::IpNet;
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    Adopted, AnnouncedAddress, BfdProfile, BgpAdvertisement, Community, Offer, Peer, Unread, announced,
    bird::sessions_of, configuration, routes, without_passwords,
};
use crate::{
    announce::{
        advertisement::{Advertised, labels_of},
        holders::Holder,
    },
    convert::{ConvertError, object_name},
    family::Families,
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

/// Adds an object given as JSON. Returns the first error in it, or an error for each field that has no effect.
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

/// `UPDATE_EXPECT=1` writes the golden files.
#[test]
fn bird_configurations_are_the_golden_files() {
    for name in ["empty", "minimal", "communities", "options"] {
        let objects = fs::read_to_string(testdata().join(format!("{name}.yaml"))).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_str(&objects).unwrap();
        let found = configuration(&advertised(&objects), 1080, &labels());
        assert_eq!((texts(&found.errors), texts(&found.warnings)), (Vec::new(), Vec::new()), "{name}");
        let text = found.text("", true);
        let golden = testdata().join(format!("{name}.conf"));
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&golden, &text).unwrap();
        }
        assert_eq!(text, fs::read_to_string(&golden).unwrap(), "{name}");
        assert_is_valid(&golden);
        let reversed: Vec<Value> = objects.into_iter().rev().collect();
        let again = configuration(&advertised(&reversed), 1080, &labels());
        assert_eq!(again.text("", true), text, "{name} depends on the order of the objects");
    }
}

/// Asserts that BIRD accepts the configuration file, if BIRD is installed.
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

/// The configuration as BIRD's parser sees it: tokens, without the content of texts, symbols and comments. Panics at a
/// character that no statement of the configuration needs.
fn skeleton(text: &str) -> String {
    let mut found = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (end, close) = match first {
            '"' => ('"', "\""),
            '\'' => ('\'', "'"),
            '#' => ('\n', ""),
            _ => {
                assert!(first.is_ascii_alphanumeric() || " \n_{}();:=!~[],.-/".contains(first), "{first:?}");
                found.push(first);
                rest = &rest[1..];
                continue;
            }
        };
        let length = rest[1..].find(end).unwrap();
        assert!(!rest[1..=length].contains('\n'), "{text}");
        found.push(first);
        rest = &rest[1 + length + close.len()..];
    }
    found
}

/// Random texts, mostly of characters that have a meaning to BIRD.
fn hostile() -> impl Strategy<Value = String> {
    prop_oneof!["[ab1.-]{1,6}", "[ab \\n\\r\"';{}#/*\\\\.-]{1,6}", any::<String>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn no_text_of_an_object_changes_what_bird_reads(
        namespace in hostile(),
        names in prop::array::uniform4(hostile()),
        password in hostile(),
        vrf in hostile(),
        alias in hostile(),
    ) {
        let (password, vrf) = (format!("x{password}"), format!("x{vrf}"));
        let [of_peer, of_advertisement, of_profile, of_community] = names;
        let of = |namespace: &str, names: [&str; 4], password: &str, vrf: &str, alias: &str| -> Option<String> {
            let [of_peer, of_advertisement, of_profile, of_community] = names;
            let object = |kind: &str, name: &str, spec: Value| {
                json!({"kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec})
            };
            let aliases = json!({"communities": [{"name": alias, "value": "64500:1"}]});
            let objects = [
                pool("one", &["203.0.113.0/28"]),
                object("BFDProfile", of_profile, json!({})),
                object("Community", of_community, aliases),
                object("BGPAdvertisement", of_advertisement, json!({"communities": [alias], "peers": [of_peer]})),
                object("BGPPeer", of_peer, json!({
                    "myASN": 64500, "peerASN": 64501, "peerAddress": "10.0.0.1", "sourceAddress": "10.0.0.2",
                    "password": password, "vrf": vrf, "bfdProfile": of_profile,
                })),
            ];
            let mut advertised = Advertised::default();
            objects.iter().try_for_each(|object| add(&mut advertised, object).map(drop)).ok()?;
            Some(configuration(&advertised, 1080, &labels()).text("", true))
        };
        let plain = of("a", ["b", "c", "d", "e"], "f", "g", "h").unwrap();
        let names = [&*of_peer, &of_advertisement, &of_profile, &of_community];
        if let Some(text) = of(&namespace, names, &password, &vrf, &alias) {
            prop_assert_eq!(skeleton(&text), skeleton(&plain));
        }
        // Tests each text alone, so that few runs are wasted on objects that are refused.
        for (index, name) in names.into_iter().enumerate() {
            let mut others = ["b", "c", "d", "e"];
            others[index] = name;
            if let Some(text) = of("a", others, &password, "g", &alias) {
                prop_assert_eq!(skeleton(&text), skeleton(&plain));
            }
        }
        for (namespace, vrf) in [(&*namespace, "g"), ("a", &*vrf)] {
            if let Some(text) = of(namespace, ["b", "c", "d", "e"], "f", vrf, "h") {
                prop_assert_eq!(skeleton(&text), skeleton(&plain));
            }
        }
    }
}

#[test]
fn names_that_no_api_server_accepts_are_refused() {
    for name in ["a\nb", "a'b", "a\"b", "A", "a_b", "a;"] {
        let in_namespace = |object: Value| {
            let mut object = object;
            object["metadata"]["namespace"] = json!(name);
            object
        };
        let advertisement = advertisement(name, json!({}));
        for object in [peer(name, "10.0.0.1", json!({})), object("BFDProfile", name, json!({}))] {
            assert!(refusal(&object).starts_with("metadata.name: Invalid value"), "{name:?}");
        }
        assert!(refusal(&advertisement).starts_with("metadata.name: Invalid value"), "{name:?}");
        assert!(refusal(&in_namespace(peer("r", "10.0.0.1", json!({})))).starts_with("metadata.namespace:"));
    }
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
        (json!({"peerAddress": "0.0.0.0"}), "spec.peerAddress"),
        (json!({"peerAddress": "::"}), "spec.peerAddress"),
        (json!({"peerAddress": "169.254.1.1"}), "spec.peerAddress"),
        (json!({"peerAddress": "fe80::1"}), "spec.peerAddress"),
        (json!({"peerAddress": "224.0.0.5"}), "spec.peerAddress"),
        (json!({"peerAddress": "239.1.1.1"}), "spec.peerAddress"),
        (json!({"peerAddress": "ff0e::1"}), "spec.peerAddress"),
        (json!({"peerAddress": "::ffff:10.0.0.1"}), "spec.peerAddress"),
        (json!({"sourceAddress": "169.254.1.1"}), "spec.sourceAddress"),
        (json!({"interface": "eth0"}), "spec.interface"),
        (json!({"sourceAddress": "2001:db8::1"}), "spec.sourceAddress"),
        (json!({"peerPort": 0}), "spec.peerPort"),
        (json!({"holdTime": "2s"}), "spec.holdTime"),
        (json!({"holdTime": "1.5s"}), "spec.holdTime"),
        (json!({"keepaliveTime": "500ms"}), "spec.keepaliveTime"),
        (json!({"holdTime": "9s", "keepaliveTime": "10s"}), "spec.keepaliveTime"),
        (json!({"routerID": "node"}), "spec.routerID"),
        (json!({"password": "quit", "passwordSecret": {"name": "key"}}), "spec.passwordSecret"),
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
fn secret_of_a_password_is_in_the_namespace_of_the_peer_by_default() {
    let secret = |more| Peer::new(&read(&peer("a", "10.0.0.1", more))).unwrap().password_secret;
    let its = secret(json!({"passwordSecret": {"name": "key"}})).unwrap();
    assert_eq!((&*its.namespace, &*its.name), ("metallb-system", "key"));
    let others = secret(json!({"passwordSecret": {"name": "key", "namespace": "net"}})).unwrap();
    assert_eq!(others.to_string(), "net/key");
    for none in [json!({}), json!({"passwordSecret": null}), json!({"passwordSecret": {"name": ""}})] {
        assert_eq!(secret(none), None);
    }
}

#[test]
fn durations_of_a_peer_have_the_forms_of_go() {
    let hold =
        |text: &str| Peer::new(&read(&peer("a", "10.0.0.1", json!({"holdTime": text})))).map(|it| it.hold);
    for (text, seconds) in [
        ("0", 0),
        ("0s", 0),
        ("90s", 90),
        ("+90s", 90),
        ("1m30s", 90),
        ("1.5m", 90),
        (".5m", 30),
        ("1.m", 60),
        ("0.025h", 90),
        ("89s1000ms", 90),
        ("4000000us", 4),
        ("3999999\u{b5}s1000ns", 4),
    ] {
        assert_eq!(hold(text).unwrap(), seconds, "{text}");
    }
    for text in [
        "",
        "90",
        "00",
        ".s",
        "s",
        "-90s",
        "++90s",
        "+",
        "1.5.0m",
        "1 m",
        "1d",
        "1.0001m",
        "9999999999999999999h",
    ] {
        assert!(hold(text).is_err(), "{text:?}");
    }
}

#[test]
fn invalid_password_of_a_secret_is_refused() {
    let mut with_secret =
        Peer::new(&read(&peer("a", "10.0.0.1", json!({"passwordSecret": {"name": "key"}})))).unwrap();
    with_secret.set_password("pass word").unwrap();
    for invalid in ["", "a\nb", "a\"b", &"a".repeat(81)] {
        let error = with_secret.set_password(invalid).unwrap_err();
        assert!(error.starts_with("must have 1 to 80 bytes"), "{error}");
    }
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

#[test]
fn object_with_an_error_holds_back_its_peers_only() {
    let sound = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("a", json!({})),
        peer("r", "10.0.0.1", json!({})),
        peer("s", "10.0.0.2", json!({"password": "correct horse"})),
    ];
    let find = |objects: &[Value]| configuration(&advertised(objects), 1080, &labels());
    let last = find(&sound).text("", true);
    for (broken, error, held_back) in [
        (
            advertisement("b", json!({"communities": ["1:1", "gold"], "peers": ["s"]})),
            "spec.communities[1]: Invalid value: \"gold\"",
            vec!["s"],
        ),
        (
            advertisement("a", json!({"aggregationLength": 27})),
            "spec.aggregationLength: Invalid value: \"the routes are wider",
            vec!["r", "s"],
        ),
        (
            peer("s", "10.0.0.2", json!({"bfdProfile": "fast"})),
            "spec.bfdProfile: Invalid value: \"fast\"",
            vec!["s"],
        ),
        (peer("s", "10.0.0.1", json!({})), "spec.peerAddress: Invalid value", vec!["s"]),
        (peer("t", "10.0.0.1", json!({})), "spec.peerAddress: Invalid value", vec!["t"]),
    ] {
        // Meanwhile the other peer changes, and a third peer is added.
        let more =
            [broken, peer("r", "10.0.0.1", json!({"holdTime": "9s"})), peer("u", "10.0.0.4", json!({}))];
        let found = find(&[&sound[..], &more].concat());
        let errors = texts(&found.errors);
        let error = error.replace("Invalid value: \"the", "Invalid value: the");
        assert!(errors.len() == 1 && errors[0].contains(&error) && found.warnings.is_empty(), "{errors:?}");
        let names: Vec<&str> =
            found.held_back.iter().map(|name| &*name.name).filter(|name| *name != "u").collect();
        assert_eq!(names, held_back, "{error}");
        let (text, before) = (found.text(&last, true), sessions_of(&last));
        let now = sessions_of(&text);
        assert_eq!(now["metallb-system/s"], before["metallb-system/s"], "{error}");
        let is_new = now["metallb-system/r"].contains("hold time 9;");
        assert_eq!(is_new, !held_back.contains(&"r"), "{error}");
        assert!(now.contains_key("metallb-system/u") && !now.contains_key("metallb-system/t"), "{error}");
        // After a restart, `last` is the text that the agent reads back from BIRD's file: it must stay the same.
        assert_eq!(found.text(&text, true), text, "{error}");
    }
}

#[test]
fn held_back_session_keeps_its_bfd_and_the_router_id() {
    let profile = object("BFDProfile", "fast", json!({}));
    let router = peer("r", "10.0.0.1", json!({"bfdProfile": "fast", "routerID": "10.0.0.9"}));
    let last = configuration(&advertised(&[profile, router.clone()]), 1080, &labels()).text("", true);
    let found = configuration(&advertised(&[router]), 1080, &labels());
    assert!(texts(&found.errors)[0].contains("spec.bfdProfile"), "{:?}", found.errors);
    assert_eq!(found.text(&last, true), last);
    let first = found.text("", true);
    assert!(!first.contains("protocol bgp") && !first.contains("protocol bfd"), "{first}");
    // Until every object has been read, a missing peer keeps its session. Afterwards it counts as deleted and has none.
    assert_eq!(configuration(&advertised(&[]), 1080, &labels()).text(&last, false), last);
    let gone = configuration(&advertised(&[]), 1080, &labels()).text(&last, true);
    assert!(!gone.contains("protocol bgp") && !gone.contains("protocol bfd"), "{gone}");
}

#[test]
fn session_stays_while_an_object_that_it_was_made_from_is_unread() {
    let objects = |hold: &str| {
        [
            pool("one", &["203.0.113.0/28"]),
            advertisement("a", json!({"peers": ["r"]})),
            advertisement("b", json!({})),
            peer("r", "10.0.0.1", json!({"holdTime": hold, "routerID": "10.0.0.9"})),
            peer("s", "10.0.0.2", json!({"holdTime": hold})),
        ]
    };
    let found = |objects: &[Value], unread: &Unread| {
        let mut advertised = advertised(objects);
        advertised.bgp.unread = unread.clone();
        configuration(&advertised, 1080, &labels())
    };
    let last = found(&objects("90s"), &Unread::default()).text("", true);
    let before = sessions_of(&last);
    let names = |name: &str| BTreeSet::from([ObjectName::new("metallb-system", name)]);
    for (name, unread, stay, routes) in [
        ("a", Unread { advertisements: names("a"), ..Unread::default() }, vec!["r"], true),
        ("one", Unread { pools: names("one"), ..Unread::default() }, vec!["r", "s"], true),
        ("r", Unread { peers: names("r"), ..Unread::default() }, vec!["r"], false),
    ] {
        // The agent restarts while the object is invalid. Meanwhile the peers have changed.
        let left: Vec<Value> =
            objects("9s").into_iter().filter(|object| object["metadata"]["name"] != name).collect();
        let text = found(&left, &unread).text(&last, true);
        let now = sessions_of(&text);
        for peer in ["metallb-system/r", "metallb-system/s"] {
            let is_kept = stay.iter().any(|name| peer.ends_with(name));
            assert_eq!(now.get(peer) == before.get(peer), is_kept, "{name}: {text}");
        }
        assert!(text.contains("router id 10.0.0.9;"), "{name}: {text}");
        assert_eq!(unread.may_ask_for_routes(), routes, "{name}");
        // After a restart, `last` is the text that the agent reads back from BIRD's file: it must stay the same.
        assert_eq!(found(&left, &unread).text(&text, true), text, "{name}");
        let gone = found(&left, &Unread::default()).text(&last, true);
        assert_ne!(sessions_of(&gone).get("metallb-system/r"), before.get("metallb-system/r"), "{name}");
    }
    // An object that was invalid from the start holds back no session.
    let other = Unread { advertisements: names("other"), peers: names("other"), pools: names("other") };
    let text = found(&objects("9s"), &other).text(&last, true);
    assert_eq!(text, found(&objects("9s"), &Unread::default()).text("", true));
}

#[test]
fn name_that_nothing_has_is_a_warning() {
    let sound =
        [pool("one", &["203.0.113.0/28"]), advertisement("a", json!({})), peer("r", "10.0.0.1", json!({}))];
    let whole = configuration(&advertised(&sound), 1080, &labels()).text("", true);
    for (spec, warning) in [
        (json!({"peers": ["nobody"]}), "spec.peers: Invalid value: \"nobody\""),
        (json!({"ipAddressPools": ["nothing"]}), "spec.ipAddressPools: Invalid value: \"nothing\""),
    ] {
        let all = [&sound[..], &[advertisement("b", spec)]].concat();
        let found = configuration(&advertised(&all), 1080, &labels());
        let warnings = texts(&found.warnings);
        assert!(
            warnings.len() == 1 && warnings[0].contains(warning) && found.errors.is_empty(),
            "{:?} {warnings:?}",
            found.errors
        );
        assert_eq!(found.text("", true), whole, "{warning}");
    }
}

#[test]
fn aggregate_with_addresses_of_a_pool_out_of_scope_is_refused() {
    // The second /28 begins with addresses of pool `one`, and ends with addresses of pool `two`.
    let pools = [pool("one", &["203.0.113.0-203.0.113.20"]), pool("two", &["203.0.113.21-203.0.113.63"])];
    let all =
        |spec: Value| [&pools[..], &[advertisement("a", spec), peer("r", "10.0.0.1", json!({}))]].concat();
    let service = holder(&["203.0.113.1", "203.0.113.20"], None);
    let of = |spec: Value| {
        let found = configuration(&advertised(&all(spec.clone())), 1080, &labels());
        (self::found(&all(spec), std::slice::from_ref(&service)), texts(&found.errors), found.text("", true))
    };
    let (routes, errors, text) = of(json!({"aggregationLength": 28, "ipAddressPools": ["one"]}));
    assert_eq!(routes, "");
    let why = "the route 203.0.113.16/28 has addresses of IPAddressPool two, which is not announced";
    assert!(errors.len() == 1 && errors[0].contains(why), "{errors:?}");
    assert!(text.contains("export none;") && !text.contains("export filter"), "{text}");
    let (routes, errors, _) = of(json!({"aggregationLength": 28}));
    assert_eq!(
        (&*routes, errors),
        ("203.0.113.0/28 203.0.113.16/28", Vec::new()),
        "both pools are announced"
    );
    let (routes, errors, _) = of(json!({"aggregationLength": 30, "ipAddressPools": ["one"]}));
    assert_eq!(routes, "", "203.0.113.20/30 has addresses of both");
    assert_eq!(errors.len(), 1);
    let (routes, errors, _) = of(json!({"aggregationLength": 32, "ipAddressPools": ["one"]}));
    assert_eq!((&*routes, errors), ("203.0.113.1/32 203.0.113.20/32", Vec::new()));
}

#[test]
fn session_stays_while_its_password_is_unknown() {
    let with_secret = |port: u16| -> Peer {
        let spec = json!({"passwordSecret": {"name": "key"}, "peerPort": port});
        Peer::new(&read(&peer("r", "10.0.0.1", spec))).unwrap()
    };
    let text = |peer: Peer, last: &str| {
        let mut advertised = Advertised::default();
        advertised.bgp.peers.insert(peer.name.clone(), peer);
        configuration(&advertised, 1080, &labels()).text(last, true)
    };
    let mut known = with_secret(179);
    known.set_password("sesame").unwrap();
    let last = text(known, "");
    assert!(last.contains("password \"sesame\""), "{last}");
    let unknown = with_secret(1790);
    assert_eq!(text(unknown.clone(), &last), last);
    assert!(!text(unknown, "").contains("neighbor"), "no session begins without the password");
}

#[test]
fn one_router_id_counts_for_a_node() {
    let peers = [
        peer("a", "10.0.0.1", json!({"routerID": "10.0.0.9"})),
        peer("b", "10.0.0.2", json!({})),
        peer("c", "10.0.0.3", json!({"routerID": "10.0.0.8"})),
    ];
    let found = configuration(&advertised(&peers), 1080, &labels());
    let (errors, text) = (&found.errors, found.text("", true));
    assert!(texts(errors)[0].contains("spec.routerID"), "{errors:?}");
    assert!(text.contains("router id 10.0.0.9;") && text.contains("'metallb-system.b'"), "{text}");
    assert!(!text.contains("'metallb-system.c'"), "{text}");
}

#[test]
fn node_without_ipv4_gets_a_router_id_of_its_own() {
    let id = |peer: Value, node: &str| {
        let found = configuration(&advertised(&[peer]), 1080, &labels()).with_derived_id(node);
        let text = found.text("", true);
        let id = text.lines().find_map(|line| line.strip_prefix("router id ")).unwrap();
        id.trim_end_matches(';').parse::<Ipv4Addr>().unwrap()
    };
    let plain = || peer("a", "2001:db8::1", json!({}));
    assert_eq!(id(plain(), "n1"), id(plain(), "n1"));
    assert_ne!(id(plain(), "n1"), id(plain(), "n2"));
    for number in 0..200 {
        let id = id(plain(), &format!("worker-{number}"));
        assert!((128..192).contains(&id.octets()[0]), "{id} must be a unicast address");
    }
    let with_id = peer("a", "2001:db8::1", json!({"routerID": "10.0.0.9"}));
    assert_eq!(id(with_id, "n1"), Ipv4Addr::new(10, 0, 0, 9));
    let text = configuration(&advertised(&[plain()]), 1080, &labels()).text("", true);
    assert!(!text.contains("router id"), "BIRD finds the address of the node: {text}");
}

#[test]
fn higher_local_preference_wins_and_is_reported() {
    let objects = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("a", json!({"localPref": 300})),
        advertisement("b", json!({"localPref": 200})),
        peer("r", "10.0.0.1", json!({})),
    ];
    let found = configuration(&advertised(&objects), 1080, &labels());
    let (warnings, text) = (found.warnings.clone(), found.text("", true));
    assert!(
        text.find("bgp_local_pref = 200").unwrap() < text.find("bgp_local_pref = 300").unwrap(),
        "{text}"
    );
    assert!(texts(&warnings)[0].contains("spec.localPref"), "{warnings:?}");
}

/// The text of the session with the peer `name`, in the configuration for these objects.
fn session(objects: &[Value], name: &str) -> String {
    let found = configuration(&advertised(objects), 1080, &labels());
    assert_eq!((texts(&found.errors), texts(&found.warnings)), (Vec::new(), Vec::new()));
    sessions_of(&found.text("", true))[&*format!("metallb-system/{name}")].to_owned()
}

#[test]
fn each_peer_gets_the_local_preference_of_its_own_advertisement() {
    let objects = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("a", json!({"localPref": 300, "peers": ["r"]})),
        advertisement("b", json!({"localPref": 200, "peers": ["s"]})),
        peer("r", "10.0.0.1", json!({})),
        peer("s", "10.0.0.2", json!({})),
    ];
    for (name, its, others) in [("r", 300, 200), ("s", 200, 300)] {
        let text = session(&objects, name);
        assert!(text.contains(&format!("bgp_local_pref = {its};")), "{text}");
        assert!(!text.contains(&format!("bgp_local_pref = {others};")), "{text}");
    }
}

#[test]
fn communities_of_two_advertisements_of_one_route_unite() {
    let objects = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("a", json!({"communities": ["64500:1", "64500:2"]})),
        advertisement("b", json!({"communities": ["64500:2", "large:64500:3:4"]})),
        peer("r", "10.0.0.1", json!({})),
    ];
    let text = session(&objects, "r");
    let added = ["community.add((64500,1))", "community.add((64500,2))", "community.add((64500,3,4))"];
    assert!(added.iter().all(|one| text.contains(one)), "{text}");
    assert_eq!(text.matches("if net ~ [ 203.0.113.0/28{32,32} ]").count(), 2, "{text}");
    assert_eq!(text.matches("accept;").count(), 1, "a route takes the communities of both: {text}");
}

#[test]
fn name_of_a_community_comes_before_its_value_and_must_be_unique() {
    let named = |object: &str, value: &str| {
        let spec = json!({"communities": [{"name": "64500:1", "value": value}]});
        self::object("Community", object, spec)
    };
    let objects = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("a", json!({"communities": ["64500:1"]})),
        peer("r", "10.0.0.1", json!({})),
    ];
    assert!(session(&objects, "r").contains("bgp_community.add((64500,1));"));
    let with_name = [&objects[..], &[named("x", "64500:2")]].concat();
    let text = session(&with_name, "r");
    assert!(text.contains("(64500,2)") && !text.contains("(64500,1)"), "{text}");
    let twice = [&with_name[..], &[named("y", "64500:2")]].concat();
    let errors = texts(&configuration(&advertised(&twice), 1080, &labels()).errors);
    let why = "several Community objects have this name";
    assert!(matches!(&errors[..], [one] if one.contains(why)), "{errors:?}");
}

/// The widest network within 203.0.113.1-203.0.113.20 is 203.0.113.8/29.
#[test]
fn aggregate_of_a_range_may_be_as_wide_as_its_widest_network() {
    for (length, fits) in [(28, false), (29, true), (32, true)] {
        let objects = [
            pool("one", &["203.0.113.1-203.0.113.20"]),
            advertisement("a", json!({"aggregationLength": length})),
            peer("r", "10.0.0.1", json!({})),
        ];
        let errors = texts(&configuration(&advertised(&objects), 1080, &labels()).errors);
        let why = "the routes are wider than 203.0.113.1-203.0.113.20 of IPAddressPool one";
        assert_eq!(errors.iter().filter(|error| error.contains(why)).count(), usize::from(!fits), "{length}");
        assert_eq!(errors.is_empty(), fits, "{errors:?}");
    }
}

fn holder(addresses: &[&str], nodes: Option<&[&str]>) -> Holder {
    let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    Holder {
        here: addresses.iter().copied().collect(),
        given: BTreeSet::new(),
        addresses,
        served: Families::BOTH,
        nodes: nodes.map(|nodes| [(); 2].map(|()| nodes.iter().map(|node| Arc::from(*node)).collect())),
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
    // A pool that overlaps an older pool, and that the advertisement does not name, takes no route away.
    let overlapping = |spec: Value| {
        vec![pool("one", &["203.0.113.0/28"]), pool("other", &["203.0.113.8/29"]), advertisement("a", spec)]
    };
    assert_eq!(of(&overlapping(json!({"ipAddressPools": ["one"]})), &service), "203.0.113.1/32");
    let aggregated = overlapping(json!({"ipAddressPools": ["other"], "aggregationLength": 28}));
    assert_eq!(of(&aggregated, &holder(&["203.0.113.9"], None)), "", "the route has addresses of pool one");
    let too_wide = with(json!({"aggregationLength": 27}));
    assert_eq!(of(&too_wide, &service), "", "no part of a pool that a route would exceed is announced");
    // The node offers no route to an address that belongs to no pool any more, or whose Service has no endpoint.
    assert_eq!(of(&with(json!({})), &holder(&["192.0.2.1"], None)), "");
    assert_eq!(of(&with(json!({})), &Holder { served: Families::NONE, ..service.clone() }), "");
    // The kernel serves the Service at only one of its addresses.
    let partly = Holder { here: BTreeSet::from(["2001:db8::1".parse().unwrap()]), ..service };
    assert_eq!(of(&with(json!({})), &partly), "2001:db8::1/128");
    let local = |nodes: &[&str]| holder(&["203.0.113.1"], Some(nodes));
    assert_eq!(of(&with(json!({})), &local(&["n2"])), "");
    assert_eq!(of(&with(json!({})), &local(&["n1", "n2"])), "203.0.113.1/32");
    // The aggregate route stays as long as this node serves one of its addresses.
    assert_eq!(found(&aggregate, &[local(&["n2"]), holder(&["203.0.113.9"], None)]), "203.0.113.0/28");
}

#[test]
fn announced_address_has_its_services_routes_and_advertisements() {
    let objects = [
        pool("one", &["203.0.113.0/28"]),
        advertisement("host", json!({})),
        advertisement("net", json!({"aggregationLength": 28})),
    ];
    let service = |address: &str| holder(&[address], None);
    let name = |name: &str| ObjectName::new("default", name);
    let services = [("a", "203.0.113.1"), ("b", "203.0.113.1"), ("c", "203.0.113.2"), ("d", "192.0.2.1")];
    let holders = services.map(|(of, address)| (name(of), service(address))).into();
    let routes = routes(&advertised(&objects), &holders, &n1(), &labels());
    let services_of_net = routes[&"203.0.113.0/28".parse().unwrap()].services().into_iter().cloned();
    assert_eq!(services_of_net.collect::<Vec<_>>(), ["a", "b", "c"].map(name));
    let found = announced(&routes);
    let expected = |services: &[&str], host: &str| AnnouncedAddress {
        services: services.iter().copied().map(name).collect(),
        routes: [host, "203.0.113.0/28"].map(|net| net.parse().unwrap()).into(),
        advertisements: ["host", "net"].map(|name| ObjectName::new("metallb-system", name)).into(),
    };
    let expected = [
        ("203.0.113.1".parse().unwrap(), expected(&["a", "b"], "203.0.113.1/32")),
        ("203.0.113.2".parse().unwrap(), expected(&["c"], "203.0.113.2/32")),
    ];
    assert_eq!(found, expected.into());
}

#[test]
fn routes_of_an_earlier_agent_stay_until_their_objects_are_known() {
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let found = ["203.0.113.0/28", "203.0.113.1/32", "203.0.113.2/32", "203.0.113.3/32", "203.0.113.4/32"];
    let found: BTreeSet<IpNet> = found.into_iter().map(net).collect();
    let after = |adopted: &mut Adopted, wanted: &[&str], services: &[Holder], complete: bool| {
        let wanted = wanted.iter().map(|text| (net(text), Offer::default())).collect();
        let named =
            |(index, holder): (usize, &Holder)| (ObjectName::new("a", &index.to_string()), holder.clone());
        adopted.settle(&wanted, &services.iter().enumerate().map(named).collect(), &n1(), complete);
        adopted.routes().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let mut adopted = Adopted::new(found);
    // 203.0.113.1/32 is wanted, 203.0.113.2/32 leads to a Service without an endpoint on this node, and 203.0.113.3/32
    // to a Service whose advertisement is unknown.
    let services = [holder(&["203.0.113.2"], Some(&["n2"])), holder(&["203.0.113.3"], None)];
    let left = after(&mut adopted, &["203.0.113.1/32"], &services, false);
    assert_eq!(left, "203.0.113.0/28 203.0.113.3/32 203.0.113.4/32");
    assert_eq!(
        after(&mut adopted, &[], &services, false),
        left,
        "a route that was wanted is no longer adopted"
    );
    assert_eq!(after(&mut adopted, &[], &services, true), "");
}

proptest! {
    /// Each served address is within a route, each route covers a served address, and BIRD's filter passes the route.
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
                let served = if *is_served { Families::BOTH } else { Families::NONE };
                (ObjectName::new("default", &format!("s{index}")), Holder { served, ..holder })
            })
            .collect();
        let served: BTreeSet<_> = holders
            .values()
            .filter(|holder| holder.served == Families::BOTH)
            .filter(|holder| holder.nodes.as_ref().is_none_or(|[v4, _]| v4.contains("n1")))
            .flat_map(|holder| holder.addresses.clone())
            .filter(|address| advertised.pool_of(*address).is_some())
            .collect();
        let routes = routes(&advertised, &holders, &n1(), &labels());
        let fitting: Vec<&BgpAdvertisement> = advertised
            .bgp
            .advertisements
            .values()
            .filter(|advertisement| advertisement.announces(&advertised.pools[0], &advertised.pools))
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
