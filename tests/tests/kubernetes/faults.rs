//! Tests with faults of the mock API server. No fault may remove a Service from the kernel, not even for a moment.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::{
    api_server::Fault,
    bed::{A_WHILE, Bed, LIMIT, endpoint},
};

const KINDS: [&str; 4] = ["services", "endpointslices", "nodes", "servicecidrs"];

fn with_a_and_b() -> Bed {
    let bed = Bed::with_faults().with_a_and_b();
    let watched = |bed: &Bed| KINDS.iter().all(|kind| bed.server().counts(kind) == (1, 1));
    bed.wait_until("one list and one watch of each kind", LIMIT, watched);
    bed
}

fn held() -> Fault {
    Fault { held: true, ..Fault::default() }
}

fn status(status: u16) -> Fault {
    Fault { status: Some(status), ..Fault::default() }
}

#[test]
fn selectors_are_those_of_kube_proxy_plus_services_of_other_proxies() {
    let bed = with_a_and_b();
    for request in bed.server().requests() {
        let wanted = match request.plural.as_str() {
            "services" => (None, Some("spec.clusterIP!=None")),
            "endpointslices" => (Some("!service.kubernetes.io/headless"), None),
            "nodes" => (None, Some("metadata.name=a")),
            _ => (None, None),
        };
        let get = |name| request.query.get(name).map(String::as_str);
        assert_eq!((get("labelSelector"), get("fieldSelector")), wanted, "{request:?}");
    }
}

#[test]
fn expired_version_is_followed_by_a_new_list_without_a_gap() {
    let bed = with_a_and_b();
    bed.server().set_fault("endpointslices", held());
    bed.server().unseen(|_| {
        bed.delete("a");
        bed.put("c", 3);
    });
    let steady = |bed: &Bed| {
        let served = bed.served();
        assert!(served.contains(&"b 2".to_owned()), "{served:?}; log:\n{}", bed.log());
        served == ["b 2", "c 3"]
    };
    // The agent lists Services again, although the mock server does not answer the list of EndpointSlices yet.
    bed.wait_until("another list of Services", LIMIT, |bed| {
        steady(bed);
        bed.server().counts("services").0 == 2
    });
    let start = Instant::now();
    while start.elapsed() < A_WHILE {
        steady(&bed);
    }
    bed.server().set_fault("endpointslices", Fault::default());
    bed.wait_until("c instead of a", LIMIT, steady);
    let listed_twice = |bed: &Bed| KINDS.iter().all(|kind| bed.server().counts(kind).0 == 2);
    bed.wait_until("another list of each kind", LIMIT, listed_twice);
    assert!(!bed.log().contains("WARN"), "routine is no warning; log:\n{}", bed.log());
}

#[test]
fn ended_watch_resumes_at_its_version() {
    let bed = with_a_and_b();
    bed.server().end_watches();
    bed.put("c", 3);
    bed.delete("a");
    bed.wait_served("c instead of a", LIMIT, &["b 2", "c 3"]);
    assert_eq!(bed.server().counts("services"), (1, 2), "another watch, and no further list");
}

#[test]
fn watch_from_an_expired_version_causes_one_list() {
    let bed = with_a_and_b();
    for kind in KINDS {
        bed.server().bookmark(kind);
    }
    // Bookmarks have no visible effect, so this gives them time to arrive.
    std::thread::sleep(A_WHILE);
    let fetched = bed.server().counts("services").0;
    bed.server().unseen(|server| KINDS.iter().for_each(|kind| server.bookmark(kind)));
    bed.put("c", 3);
    bed.wait_served("c", LIMIT, &["a 1", "b 2", "c 3"]);
    assert_eq!(bed.server().counts("services").0, fetched + 1, "the history after the bookmark is dropped");
}

#[test]
fn watch_that_breaks_off_within_an_object_loses_nothing() {
    let bed = with_a_and_b();
    bed.server().put_and_cut(bed.slice("a", 7));
    bed.server().put_and_cut(bed.service("c", 3));
    bed.server().put(bed.slice("c", 3));
    bed.wait_served("both objects", LIMIT, &["a 1 7", "b 2", "c 3"]);
    assert!(!bed.log().contains("WARN"), "routine is no warning; log:\n{}", bed.log());
}

#[test]
fn paged_list_starts_again_when_a_page_has_expired() {
    let mut bed = Bed::with_faults();
    let expired = Fault { expired_pages: true, ..Fault::default() };
    bed.server().set_fault("endpointslices", expired);
    (0..250).for_each(|n| bed.put(&format!("s-{n:03}"), n));
    bed.start_agent();
    bed.wait_until("lists", LIMIT, |bed| bed.server().counts("endpointslices").0 >= 2);
    assert_eq!(bed.served().len(), 0, "an incomplete list is not used");
    bed.server().set_fault("endpointslices", Fault::default());
    bed.wait_until("all pages", LIMIT, |bed| bed.served().len() == 250);
    assert!(!bed.log().contains("WARN"), "routine is no warning; log:\n{}", bed.log());
}

#[test]
fn malformed_object_affects_no_other_service() {
    let mut bed = with_a_and_b();
    let mut malformed = bed.service("a", 9);
    malformed["spec"]["ports"] = "eighty".into();
    bed.server().put(malformed);
    bed.put("c", 3);
    bed.wait_served("c, and a as before", LIMIT, &["a 1", "b 2", "c 3"]);
    let problems = bed.problems();
    assert!(problems.contains("default/a") && problems.contains("last good state"), "{problems}");

    // An agent that has read no valid version of a Service keeps the Service in the kernel as it is, but removes all
    // other stale Services.
    bed.kill_agent();
    bed.delete("b");
    bed.start_agent();
    bed.wait_until("the problem", LIMIT, |bed| bed.problems().contains("it is left out"));
    bed.put("d", 4);
    bed.wait_served("d, and a as before", LIMIT, &["a 1", "c 3", "d 4"]);

    bed.server().put(bed.service("a", 1));
    bed.wait_until("no problem", LIMIT, |bed| bed.problems() == "[]");
    bed.assert_stays(&["a 1", "c 3", "d 4"], Duration::from_millis(300));
}

#[test]
fn invalid_address_affects_no_other_address() {
    let mut bed = with_a_and_b();
    let odd = json!({"addresses": ["127.0.0.1"], "conditions": {"ready": true}});
    bed.server().put(bed.slice_of("a", "a", &[endpoint(7), odd.clone()]));
    bed.wait_served("the other endpoint", LIMIT, &["a 1 7", "b 2"]);
    bed.server().put(bed.slice_of("a", "a", &[endpoint(8), odd, endpoint(9)]));
    bed.wait_served("the slice is followed", LIMIT, &["a 1 8 9", "b 2"]);
    let mut service = bed.service("b", 2);
    service["spec"]["externalIPs"] = json!(["198.51.100.300"]);
    bed.server().put(service);
    let problems =
        ["EndpointSlice \\\"default/a\\\"", "127.0.0.1", "Service \\\"default/b\\\"", "198.51.100.300"];
    let names = |bed: &Bed| problems.iter().all(|part| bed.problems().contains(part));
    bed.wait_until("both problems", LIMIT, names);
    assert_eq!(bed.log().matches("may not be in the loopback range").count(), 1, "log:\n{}", bed.log());

    bed.kill_agent();
    bed.start_agent();
    bed.wait_until("both problems again", LIMIT, names);
    bed.assert_stays(&["a 1 8 9", "b 2"], Duration::from_millis(300));
    bed.server().put(bed.slice("a", 8));
    bed.server().put(bed.service("b", 2));
    bed.wait_until("no problem", LIMIT, |bed| bed.problems() == "[]");
}

#[test]
fn deleted_malformed_object_removes_its_service() {
    let mut bed = with_a_and_b();
    bed.kill_agent();
    let mut malformed = bed.slice("a", 1);
    malformed["endpoints"] = "many".into();
    bed.server().put(malformed.clone());
    bed.server().delete(&bed.service("a", 1));
    bed.start_agent();
    bed.wait_until("the problem", LIMIT, |bed| bed.problems().contains("EndpointSlice"));
    bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(1));
    bed.server().delete(&malformed);
    bed.wait_served("nothing is left of a", LIMIT, &["b 2"]);
}

#[test]
fn unreachable_server_changes_nothing_and_is_logged_once() {
    let mut bed = with_a_and_b();
    bed.server_mut().stop();
    bed.wait_until("a problem", LIMIT, |bed| bed.problems().contains("cannot ask the API server"));
    bed.put("c", 3);
    bed.delete("a");
    bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(4));
    let warnings = bed.log().lines().filter(|line| line.contains("WARN")).count();
    assert_eq!(warnings, 1, "log:\n{}", bed.log());
    bed.server_mut().listen();
    bed.wait_served("c instead of a", LIMIT, &["b 2", "c 3"]);
}

/// Simulates an hour without the server: the server's history is too short, and most objects have changed. The outage
/// itself takes seconds; a longer one would only lengthen the agent's pauses between attempts, to at most a minute.
#[test]
fn agent_catches_up_when_the_version_of_its_watch_has_expired() {
    let mut bed = with_a_and_b();
    bed.server_mut().stop();
    bed.wait_until("a problem", LIMIT, |bed| bed.problems().contains("cannot ask the API server"));
    (0..250).for_each(|n| bed.put(&format!("s-{n:03}"), n));
    (0..240).for_each(|n| bed.delete(&format!("s-{n:03}")));
    bed.delete("a");
    bed.server().put(bed.slice("b", 7));
    bed.server().drop_history();
    bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(5));
    bed.server_mut().listen();
    bed.wait_until("the changes", LIMIT, |bed| {
        let served = bed.served();
        assert!(served.iter().any(|service| service.starts_with("b 2")), "{served:?}");
        served.len() == 11 && served[0] == "b 2 7"
    });
    bed.wait_until("no problem", LIMIT, |bed| bed.problems() == "[]");
}

#[test]
fn nothing_is_written_before_both_kinds_are_listed() {
    for broken in ["endpointslices", "services"] {
        let mut bed = with_a_and_b();
        bed.kill_agent();
        bed.delete("a");
        bed.put("c", 3);
        bed.server().set_fault(broken, status(500));
        let lists = bed.server().counts(broken).0;
        bed.start_agent();
        bed.wait_until("lists", LIMIT, |bed| bed.server().counts(broken).0 >= lists + 2);
        bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(1));
        bed.server().set_fault(broken, Fault::default());
        bed.wait_served("c instead of a", LIMIT, &["b 2", "c 3"]);
    }
}

#[test]
fn services_are_served_without_nodes_and_service_cidrs() {
    for (fault, problem) in
        [(status(403), "refuses Nodes"), (status(500), "cannot ask the API server for Nodes")]
    {
        let mut bed = Bed::with_faults();
        bed.server().set_fault("nodes", fault);
        bed.server().set_fault("servicecidrs", status(404));
        bed.put("a", 1);
        bed.start_agent();
        bed.wait_served("a", LIMIT, &["a 1"]);
        bed.wait_until(problem, LIMIT, |bed| bed.problems().contains(problem));
        assert!(
            !bed.problems().contains("ServiceCIDR"),
            "old servers have no ServiceCIDR: {}",
            bed.problems()
        );
        bed.server().set_fault("nodes", Fault::default());
        bed.wait_until("no problem", LIMIT, |bed| bed.problems() == "[]");
    }
}

#[test]
fn first_write_waits_for_the_node_for_a_limited_time() {
    let mut bed = Bed::with_faults();
    bed.server().set_fault("nodes", held());
    bed.put("a", 1);
    bed.start_agent();
    bed.wait_served("a", LIMIT, &["a 1"]);
    let requests = bed.server().requests();
    let listed = requests.iter().find(|request| request.plural == "endpointslices").unwrap();
    assert!(
        listed.time.elapsed() > Duration::from_secs(2),
        "{:?}; log:\
{}",
        listed.time.elapsed(),
        bed.log()
    );
    assert_eq!(bed.server().counts("nodes").0, 1, "the first list of Nodes is still unanswered");
}
