//! Tests of manifests that configure announcements by BGP.

use super::Folder;
use crate::manifests::Severity;

const SOUND: &str = "apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: a, namespace: metallb-system}
spec: {communities: [gold], peers: [router], aggregationLength: 32}
---
apiVersion: metallb.io/v1beta1
kind: Community
metadata: {name: names, namespace: metallb-system}
spec: {communities: [{name: gold, value: '64500:1'}]}
---
apiVersion: metallb.io/v1beta1
kind: BFDProfile
metadata: {name: fast, namespace: metallb-system}
spec: {receiveInterval: 100, minimumTtl: 10}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 10.0.0.1, holdTime: 9s, bfdProfile: fast}
";

#[test]
fn objects_keep_their_last_good_state_and_go_with_their_documents() {
    let mut folder = Folder::of(&[("bgp.yaml", SOUND)]);
    let sound = folder.manifests.advertised().bgp;
    let counts =
        (sound.advertisements.len(), sound.peers.len(), sound.communities.len(), sound.profiles.len());
    assert_eq!(counts, (1, 1, 1, 1), "{:?}", folder.problems());
    assert_eq!(folder.problems().len(), 1, "{:?}", folder.problems());
    assert!(folder.problems()[0].contains("spec.minimumTtl: ignored"), "{:?}", folder.problems());

    for (from, to, field) in [
        ("10.0.0.1", "router", "spec.peerAddress"),
        ("64500:1", "64500", "spec.communities[0].value"),
        ("aggregationLength: 32", "aggregationLength: 64", "spec.aggregationLength"),
        ("receiveInterval: 100", "receiveInterval: 1", "spec.receiveInterval"),
        ("holdTime: 9s", "holdtime: 9s", "spec.holdtime"),
        ("v1beta2", "v1beta1", "kind"),
    ] {
        folder.write(&[("bgp.yaml", &SOUND.replace(from, to))]);
        let mistake = folder.update.problems.iter().find(|problem| problem.field == field);
        assert!(mistake.is_some(), "{from} → {to}: {:?}", folder.problems());
        let expected = if field == "kind" { Severity::Error } else { Severity::Warning };
        assert_eq!(mistake.map(|mistake| mistake.severity), Some(expected), "{field}");
        if field != "kind" {
            assert_eq!(folder.manifests.advertised().bgp, sound, "{from} → {to}");
        }
    }
    folder.write(&[("bgp.yaml", SOUND)]);
    assert_eq!(folder.manifests.advertised().bgp, sound);
    folder.remove("bgp.yaml");
    assert_eq!(folder.manifests.advertised().bgp, Default::default());
}

#[test]
fn password_never_appears_in_an_error() {
    for (from, to) in [
        ("holdTime: 9s", "password: 12345678"),
        ("holdTime: 9s", "password: [12345678]"),
        ("holdTime: 9s", "password: {a: 12345678}"),
        ("holdTime: 9s", "password: \"12345678\\\"\""),
        ("holdTime: 9s", "passwordSecret: 12345678"),
        (
            "spec: {myASN: 64500, peerASN: 64501, peerAddress: 10.0.0.1, holdTime: 9s, bfdProfile: fast}",
            "spec: 12345678",
        ),
    ] {
        let text = SOUND.replace(from, to);
        assert_ne!(text, SOUND, "{from}");
        let folder = Folder::of(&[("bgp.yaml", &text)]);
        let problems = folder.problems();
        assert!(problems.iter().any(|problem| problem.contains("spec")), "{to}: {problems:?}");
        assert!(problems.iter().all(|problem| !problem.contains("12345678")), "{to}: {problems:?}");
    }
}
