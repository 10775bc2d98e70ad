use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    slice,
    sync::Arc,
};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    advertisement::{Advertised, Advertisement, labels_of},
    bgp::BgpAdvertisement,
    coverage::{Protocols, Uncovered, unannounced, uncovered},
    election::{Candidacy, Candidate, Interfaces, candidacies},
    holders::Holder,
    schedule::due,
};
use crate::{api, family::Families, load_balancer::Pool, model::ObjectName};

fn advertisement(name: &str, spec: Value) -> Result<Advertisement, String> {
    let object = json!({"metadata": {"name": name, "namespace": "metallb-system"}, "spec": spec});
    let object: api::L2Advertisement = serde_json::from_value(object).map_err(|error| error.to_string())?;
    Advertisement::new(&object).map_err(|error| format!("{}: {}", error.field, error.why))
}

fn pool(name: &str, network: &str, labels: &[(&str, &str)]) -> Pool {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Pool { labels, ..Pool::of_networks(name, &[network.parse().unwrap()]) }
}

fn advertised(specs: &[Value]) -> Advertised {
    Advertised {
        advertisements: specs.iter().map(|spec| advertisement("a", spec.clone()).unwrap()).collect(),
        pools: vec![pool("one", "192.0.2.0/28", &[("zone", "a")]), pool("two", "2001:db8::/120", &[])],
        ..Advertised::default()
    }
}

fn nodes(names: &[&str]) -> BTreeMap<Arc<str>, Candidate> {
    let candidate = |name: &&str| Candidate { labels: labels_of(&Arc::from(*name)), devices: None };
    names.iter().map(|name| (Arc::from(*name), candidate(name))).collect()
}

fn holder(addresses: &[&str], nodes: Option<&[&str]>) -> Holder {
    Holder {
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        given: BTreeSet::new(),
        served: if nodes.is_none_or(|nodes| !nodes.is_empty()) { Families::BOTH } else { Families::NONE },
        nodes: nodes.map(|nodes| [(); 2].map(|()| nodes.iter().map(|node| Arc::from(*node)).collect())),
        here: BTreeSet::new(),
    }
}

fn holders(holders: &[Holder]) -> BTreeMap<ObjectName, Holder> {
    let named = |(index, holder): (usize, &Holder)| {
        (ObjectName::new("default", &format!("s{index}")), holder.clone())
    };
    holders.iter().enumerate().map(named).collect()
}

fn on(node: &str) -> Value {
    json!({"matchLabels": {"kubernetes.io/hostname": node}})
}

fn elect(advertised: &Advertised, services: &[Holder]) -> Vec<Candidacy> {
    candidacies(advertised, &holders(services), &nodes(&["n1", "n2", "n3"]), "n1")
}

fn names(candidacy: &Candidacy) -> BTreeSet<&str> {
    candidacy.nodes.iter().map(|node| &**node).collect()
}

#[test]
fn address_without_pool_advertisement_or_endpoint_is_not_announced() {
    let served = holder(&["192.0.2.1"], None);
    assert_eq!(elect(&advertised(&[]), slice::from_ref(&served)), []);
    assert_eq!(elect(&advertised(&[json!({"ipAddressPools": ["two"]})]), slice::from_ref(&served)), []);
    assert_eq!(elect(&advertised(&[json!({})]), &[holder(&["198.51.100.1"], None)]), []);
    let unserved = Holder { served: Families::NONE, ..served.clone() };
    assert_eq!(elect(&advertised(&[json!({})]), &[unserved]), []);
    assert_eq!(elect(&advertised(&[json!({})]), &[served]).len(), 1);
}

/// A dual-stack Service whose endpoints of the two families are on different nodes.
#[test]
fn each_family_is_announced_by_nodes_with_an_endpoint_of_it() {
    let nodes = ["n1", "n2"].map(|node| BTreeSet::from([Arc::from(node)]));
    let split = Holder { nodes: Some(nodes), ..holder(&["192.0.2.1", "2001:db8::1"], Some(&["n1"])) };
    let elected = elect(&advertised(&[json!({})]), slice::from_ref(&split));
    let found: Vec<_> =
        elected.iter().map(|candidacy| (candidacy.address.is_ipv4(), names(candidacy))).collect();
    assert_eq!(found, [(true, BTreeSet::from(["n1"])), (false, BTreeSet::from(["n2"]))]);
    let only_v4 = Holder { served: Families { v4: true, v6: false }, ..split };
    let elected = elect(&advertised(&[json!({})]), &[only_v4]);
    assert_eq!(elected.iter().map(|candidacy| candidacy.address.is_ipv4()).collect::<Vec<_>>(), [true]);
}

#[test]
fn pools_are_chosen_by_name_or_labels() {
    let services = [holder(&["192.0.2.1", "2001:db8::1"], None)];
    let pools = |spec: Value| -> Vec<String> {
        elect(&advertised(&[spec]), &services).iter().map(|candidacy| candidacy.pool.to_string()).collect()
    };
    assert_eq!(pools(json!({})), ["one", "two"]);
    assert_eq!(pools(json!({"ipAddressPools": ["two", "gone"]})), ["two"]);
    assert_eq!(pools(json!({"ipAddressPoolSelectors": [{"matchLabels": {"zone": "a"}}]})), ["one"]);
    let both = json!({"ipAddressPools": ["two"], "ipAddressPoolSelectors": [{"matchLabels": {"zone": "a"}}]});
    assert_eq!(pools(both), ["one", "two"]);
    assert_eq!(pools(json!({"ipAddressPools": ["gone"]})), Vec::<String>::new());
}

#[test]
fn nodes_and_interfaces_of_several_advertisements_unite() {
    let services = [holder(&["192.0.2.1"], None)];
    let first = json!({"nodeSelectors": [on("n1")], "interfaces": ["eth0"]});
    let second = json!({"nodeSelectors": [on("n1"), on("n2")], "interfaces": ["eth1"]});
    let elsewhere = json!({"nodeSelectors": [on("n3")]});
    let named = |names: &[&str]| Interfaces::Named(names.iter().map(|name| (*name).to_owned()).collect());
    for (specs, nodes, interfaces) in [
        (vec![first.clone()], BTreeSet::from(["n1"]), named(&["eth0"])),
        (vec![first.clone(), second.clone()], BTreeSet::from(["n1", "n2"]), named(&["eth0", "eth1"])),
        (vec![first.clone(), elsewhere.clone()], BTreeSet::from(["n1", "n3"]), named(&["eth0"])),
        (vec![elsewhere], BTreeSet::from(["n3"]), named(&[])),
        (vec![first, json!({})], BTreeSet::from(["n1", "n2", "n3"]), Interfaces::All),
    ] {
        let elected = elect(&advertised(&specs), &services);
        assert_eq!((names(&elected[0]), &elected[0].interfaces), (nodes, &interfaces), "{specs:?}");
    }
}

#[test]
fn local_services_are_announced_by_nodes_with_endpoints_of_all_sharers() {
    let all = advertised(&[json!({})]);
    let cluster = holder(&["192.0.2.1"], None);
    let local = |nodes: &[&str]| holder(&["192.0.2.1"], Some(nodes));
    for (services, nodes) in [
        (vec![local(&["n1", "n2"])], vec!["n1", "n2"]),
        (vec![local(&["n1", "n2"]), local(&["n2", "n3"])], vec!["n2"]),
        (vec![local(&["n1", "n2"]), cluster.clone()], vec!["n1", "n2"]),
        // A Service without endpoints does not restrict which nodes announce.
        (vec![local(&["n1"]), local(&[])], vec!["n1"]),
    ] {
        let elected = elect(&all, &services);
        assert_eq!(names(&elected[0]), nodes.into_iter().collect(), "{services:?}");
    }
    for services in [vec![local(&["n1"]), local(&["n2"])], vec![local(&["elsewhere"])]] {
        let elected = elect(&all, &services);
        assert_eq!(elected.len(), 1, "the address counts as one that should be announced");
        assert_eq!(names(&elected[0]), BTreeSet::new(), "{services:?}");
    }
}

/// A node that serves one of two Services with the same address announces the address, like a node that serves one of
/// two ports.
#[test]
fn address_is_served_here_if_the_kernel_has_one_of_its_services() {
    let here =
        |address: &str| Holder { here: [address.parse().unwrap()].into(), ..holder(&["192.0.2.1"], None) };
    let (nowhere, there) = (holder(&["192.0.2.1"], None), here("192.0.2.1"));
    for (services, expected) in [
        (vec![nowhere.clone()], false),
        (vec![here("192.0.2.2")], false),
        (vec![there.clone()], true),
        (vec![nowhere, there], true),
    ] {
        let elected = elect(&advertised(&[json!({})]), &services);
        assert_eq!(elected[0].is_served_here, expected, "{services:?}");
        assert_eq!(names(&elected[0]), BTreeSet::from(["n1", "n2", "n3"]), "all nodes rank the same nodes");
    }
}

#[test]
fn node_without_a_device_that_the_advertisement_names_is_no_candidate() {
    let holders = holders(&[holder(&["192.0.2.1"], None)]);
    let on_eth1 = json!({"interfaces": ["eth1"]});
    let only_n1 = json!({"nodeSelectors": [on("n1")]});
    let mut nodes = nodes(&["n1", "n2", "n3"]);
    let mut state = |name: &str, devices: &[&str]| {
        let devices = devices.iter().map(|device| (*device).to_owned()).collect();
        nodes.get_mut(name).unwrap().devices = Some(devices);
        nodes.clone()
    };
    let eligible = |specs: &[Value], nodes: &BTreeMap<Arc<str>, Candidate>| -> Vec<String> {
        let elected = candidacies(&advertised(specs), &holders, nodes, "n1");
        elected[0].nodes.iter().map(ToString::to_string).collect()
    };
    let first = state("n2", &["eth0"]);
    assert_eq!(eligible(slice::from_ref(&on_eth1), &first), ["n1", "n3"], "others have not stated theirs");
    let second = state("n3", &["eth0", "eth1"]);
    assert_eq!(eligible(slice::from_ref(&on_eth1), &second), ["n1", "n3"]);
    let third = state("n1", &[]);
    assert_eq!(eligible(slice::from_ref(&on_eth1), &third), ["n3"]);
    assert_eq!(eligible(&[on_eth1.clone(), only_n1], &third), ["n1", "n3"], "one that names no device");
    assert_eq!(eligible(&[json!({})], &third), ["n2", "n1", "n3"]);
    let none = state("n3", &["eth0"]);
    assert_eq!(eligible(&[on_eth1], &none), Vec::<String>::new(), "it counts as not announced");
}

#[test]
fn invalid_and_unsupported_fields_are_refused_by_name() {
    for (spec, field) in [
        (
            json!({"nodeSelectors": [{}, {"matchExpressions": [{"key": "a", "operator": "Is"}]}]}),
            "spec.nodeSelectors[1].matchExpressions[0].operator",
        ),
        (json!({"serviceSelectors": [{}]}), "spec.serviceSelectors"),
        (json!({"preferredNodeSelectors": [{}]}), "spec.preferredNodeSelectors"),
    ] {
        let error = advertisement("a", spec).unwrap_err();
        assert!(error.starts_with(field), "{error}");
    }
}

/// Compares the order with that of MetalLB 0.16 (`sha256(node + "#" + address)` in internal/layer2 and
/// speaker/layer2_controller.go), computed with `printf 'n1#192.0.2.1' | sha256sum`.
#[test]
fn order_is_that_of_metallb() {
    let order = |address: &str| -> Vec<String> {
        let elected = elect(&advertised(&[json!({})]), &[holder(&[address], None)]);
        elected[0].nodes.iter().map(ToString::to_string).collect()
    };
    assert_eq!(order("192.0.2.1"), ["n2", "n1", "n3"]);
    assert_eq!(order("2001:db8::1"), ["n2", "n3", "n1"]);
}

#[test]
fn announcements_follow_the_schedule() {
    const SECOND: u64 = 1_000_000_000;
    for (elapsed, number) in [
        (0, 1),
        (SECOND, 1),
        (SECOND * 2, 2),
        (SECOND * 4, 4),
        (SECOND * 5, 5),
        (SECOND * 64, 5),
        (SECOND * 65, 6),
    ] {
        assert_eq!(due(elapsed), number, "{elapsed}");
    }
}

#[test]
fn address_in_a_pool_without_advertisement_is_named_once_there_is_an_advertisement() {
    let by_bgp = |spec: Value| {
        let object = json!({"metadata": {"name": "b", "namespace": "metallb-system"}, "spec": spec});
        let it = BgpAdvertisement::new(&serde_json::from_value(object).unwrap()).unwrap();
        let mut advertised = advertised(&[]);
        advertised.bgp.advertisements.insert(it.name.clone(), it);
        advertised
    };
    let services = holders(&[
        holder(&["192.0.2.1", "198.51.100.1"], None),
        holder(&["2001:db8::1"], Some(&[])),
        holder(&["192.0.2.1"], None),
    ]);
    let texts = |layer_2: Option<&Advertised>, bgp: Option<&Advertised>| -> Vec<String> {
        let found = uncovered(Protocols { layer_2, bgp }, &services);
        found.iter().map(ToString::to_string).collect()
    };
    let without = |layer_2: Option<&Advertised>| -> Vec<(String, Option<String>)> {
        let found = unannounced(Protocols { layer_2, bgp: None }, &services);
        found.iter().map(|it| (it.address.to_string(), it.pool.as_deref().map(str::to_owned))).collect()
    };
    let (none, all) = (advertised(&[]), advertised(&[json!({})]));
    let row = |address: &str, pool: Option<&str>| (address.to_owned(), pool.map(str::to_owned));
    let elsewhere = row("198.51.100.1", None);
    let in_pools = [row("192.0.2.1", Some("one")), elsewhere.clone(), row("2001:db8::1", Some("two"))];
    assert_eq!(without(Some(&none)), in_pools);
    assert_eq!(without(Some(&all)), [elsewhere]);
    assert_eq!(without(None), [], "another controller may announce them");
    let (one, two) = (
        advertised(&[json!({"ipAddressPools": ["one"]})]),
        advertised(&[json!({"ipAddressPools": ["two"]})]),
    );
    let (bgp_none, bgp_one) = (advertised(&[]), by_bgp(json!({"ipAddressPools": ["one"]})));
    for nothing in [
        texts(None, None),
        texts(Some(&none), None),
        texts(Some(&all), None),
        texts(Some(&none), Some(&bgp_none)),
        texts(Some(&two), Some(&bgp_one)),
    ] {
        assert_eq!(nothing, [""; 0]);
    }
    let advice = "name the pool in an advertisement, unless routers have routes to it";
    let of_two = format!("so no node with these settings announces 2001:db8::1 (default/s1): {advice}");
    assert_eq!(texts(Some(&one), None), [format!("pool \"two\": no L2Advertisement covers it, {of_two}")]);
    assert_eq!(
        texts(None, Some(&bgp_one)),
        [format!("pool \"two\": no BGPAdvertisement covers it, {of_two}")]
    );
    let of_one =
        format!("so no node with these settings announces 192.0.2.1 (default/s0, default/s2): {advice}");
    let neither = "no L2Advertisement and no BGPAdvertisement covers it";
    assert_eq!(texts(Some(&two), Some(&bgp_none)), [format!("pool \"one\": {neither}, {of_one}")]);
    // A route that would be wider than the pool is refused, so nothing announces the pool.
    let too_wide = by_bgp(json!({"aggregationLength": 24, "ipAddressPools": ["one"]}));
    assert_eq!(texts(Some(&two), Some(&too_wide)), [format!("pool \"one\": {neither}, {of_one}")]);
    // The objects for BGP have not been read yet: they may cover the pool.
    assert_eq!(texts(Some(&two), Some(&Advertised::default())), [""; 0]);
}

#[test]
fn address_that_an_agent_gave_and_no_pool_contains_is_named_once_there_is_an_advertisement() {
    let given = |address: &str| Holder {
        given: [address.parse().unwrap()].into(),
        ..holder(&[address, "203.0.113.1"], None)
    };
    let services = holders(&[given("198.51.100.1"), given("192.0.2.1")]);
    let texts = |layer_2: Option<&Advertised>, bgp: Option<&Advertised>| -> Vec<String> {
        let found = uncovered(Protocols { layer_2, bgp }, &services);
        found.iter().map(ToString::to_string).collect()
    };
    let (none, all) = (advertised(&[]), advertised(&[json!({})]));
    let gone = "addresses in no pool: no advertisement covers them, so no node with these settings announces 198.51.100.1 \
                (default/s0): restore their pool, unless routers have routes to them";
    assert_eq!(texts(None, None), [""; 0]);
    assert_eq!(texts(Some(&none), None), [""; 0]);
    assert_eq!(texts(Some(&all), None), [gone]);
    // The objects for BGP have not been read yet, but the pools for layer 2 have.
    assert_eq!(texts(Some(&all), Some(&Advertised::default())), [gone]);
    // The last pool is also gone.
    let no_pools = Advertised { pools: Vec::new(), ..all.clone() };
    let found = uncovered(Protocols { layer_2: Some(&no_pools), bgp: None }, &services);
    let [Uncovered { pool: None, addresses, .. }] = &found[..] else { panic!("{found:?}") };
    let named: Vec<String> = addresses.keys().map(ToString::to_string).collect();
    assert_eq!(named, ["192.0.2.1", "198.51.100.1"]);
    let restored = Advertised {
        pools: vec![pool("one", "192.0.2.0/28", &[]), pool("old", "198.51.100.0/24", &[])],
        ..all
    };
    assert_eq!(texts(Some(&restored), None), [""; 0]);
}

proptest! {
    /// When a node joins or leaves, no address moves between two other nodes.
    #[test]
    fn only_addresses_of_a_lost_node_move(count in 2usize..20, lost in any::<prop::sample::Index>(), last in 1u8..15) {
        let all: Vec<String> = (0..count).map(|index| format!("node-{index}")).collect();
        let names: Vec<&str> = all.iter().map(String::as_str).collect();
        let lost = names[lost.index(count)];
        let left: Vec<&str> = names.iter().copied().filter(|name| *name != lost).collect();
        let address: IpAddr = [192, 0, 2, last].into();
        let services = holders(&[holder(&[&address.to_string()], None)]);
        let advertised = advertised(&[json!({})]);
        let best = |names: &[&str]| candidacies(&advertised, &services, &nodes(names), names[0])[0].nodes[0].clone();
        let (before, after) = (best(&names), best(&left));
        prop_assert!(&*before == lost || before == after);
    }

    /// Every node computes the same order of candidates.
    #[test]
    fn nodes_agree(last in 1u8..15, a in 0usize..3, b in 0usize..3) {
        let names = ["n1", "n2", "n3"];
        let address: IpAddr = [192, 0, 2, last].into();
        let services = holders(&[holder(&[&address.to_string()], None)]);
        let order = |this| candidacies(&advertised(&[json!({})]), &services, &nodes(&names), this)[0].nodes.clone();
        prop_assert_eq!(order(names[a]), order(names[b]));
    }
}
