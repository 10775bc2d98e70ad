//! Tests with an API server that has some CRDs of MetalLB and lacks others.

use std::{fs, net::SocketAddr, thread};

use lb_tests::http;

use crate::{
    api_server::Fault,
    bed::{A_WHILE, Bed, LIMIT},
};

const ALL: [&str; 6] =
    ["bgpadvertisements", "bgppeers", "communities", "bfdprofiles", "l2advertisements", "ipaddresspools"];
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 10249);
const LACKS: &str = "the API server lacks the CRD";

impl Bed {
    /// Makes the API server answer as if it lacked these CRDs, and had the others of [`ALL`].
    fn lack(&self, missing: &[&str]) {
        for plural in ALL {
            let status = missing.contains(&plural).then_some(404);
            self.server().set_fault(plural, Fault { status, ..Fault::default() });
        }
    }

    /// The value of `lb_conditions` with this label `about`.
    fn conditions(&self, about: &str) -> Option<u64> {
        let metrics = http::get(&self.netns, METRICS, "/metrics").ok()?;
        metrics.metric(&format!("lb_conditions{{about=\"{about}\"}}"))
    }
}

#[test]
fn missing_crds_are_a_condition_only_while_others_exist() {
    let mut bed = Bed::with_faults();
    let key = bed.bpffs().with_file_name("key");
    fs::write(&key, "a key of more than sixteen bytes\n").unwrap();
    bed.lack(&ALL);
    let key_file = format!("--announce-key-file={}", key.display());
    bed.start_agent_with(&["--announce-table=1080", "--announce", &key_file]);
    bed.wait_until("a request for each kind", LIMIT, |bed| {
        ALL.iter().all(|plural| bed.server().counts(plural).0 > 0)
    });
    bed.wait_until("the metric", LIMIT, |bed| bed.conditions("layer2").is_some());
    thread::sleep(A_WHILE);
    assert!(!bed.problems().contains(LACKS), "{}", bed.problems());
    assert_eq!(bed.conditions("layer2"), Some(0));

    bed.lack(&["communities", "l2advertisements"]);
    for (missing, present, effect) in [
        ("communities.metallb.io (v1beta1)", "bgppeers.metallb.io", "no route by BGP"),
        ("l2advertisements.metallb.io (v1beta1)", "ipaddresspools.metallb.io", "no address at layer 2"),
    ] {
        bed.wait_until(missing, LIMIT, |bed| {
            let problems = bed.problems();
            [&format!("{LACKS} {missing} but has"), present, effect]
                .iter()
                .all(|text| problems.contains(*text))
        });
    }
    assert_eq!(bed.conditions("layer2"), Some(1));

    bed.lack(&[]);
    bed.wait_until("no such condition", LIMIT, |bed| !bed.problems().contains(LACKS));
    assert_eq!(bed.conditions("layer2"), Some(0));
}
