//! The web pages show the results of endpoints' health checks, with real servers and probes.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering},
};

use lb_tests::browser::Browser;

use super::{SIZES, Served, browser, few_clients, findings, layout, open, shows, until};
use crate::{
    bed::{Bed, vips},
    endpoint_health::{HEALTH, PODS, checked, health_server},
};

const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8088);
/// Annotations with which one success makes an endpoint healthy, and five failures make an endpoint unhealthy: a busy
/// machine may delay some probes.
const QUICK: [(&str, &str); 2] =
    [("lb.dev/health-check-healthy-threshold", "1"), ("lb.dev/health-check-unhealthy-threshold", "5")];

/// Waits until exactly `rows` rows of probed endpoints contain all these texts.
fn probed(browser: &Browser, rows: usize, texts: &[&str]) {
    let has =
        texts.iter().map(|text| format!("row.innerText.includes('{text}')")).collect::<Vec<_>>().join(" && ");
    until(
        browser,
        &format!(
            "return [...document.querySelectorAll('tr.probed')].filter((row) => {has}).length === {rows}"
        ),
    );
}

#[test]
fn unhealthy_endpoints_are_shown_with_the_reason() {
    let mut bed = Bed::with_web(&PODS);
    bed.put("another", vips(20), &["pod3"]);
    let status = health_server(bed.netns("pod2"));
    let _healthy = health_server(bed.netns("pod3"));
    bed.cluster.manifests.put(&checked(&bed, &format!("http://:{HEALTH}/healthz"), &QUICK)).unwrap();
    let _served = Served::start(&bed, &["--listen", &SERVER.to_string()]);
    let traffic = few_clients(&bed);
    let browser = browser(&bed);
    browser.resize(SIZES[1], false).unwrap();

    open(&browser, SERVER, "/services/default/web");
    shows(&browser, "every 300ms: 4 healthy, 0 unhealthy");
    // Each address of each pod has a row, which shows (in UTC) since when the endpoint has been healthy.
    probed(&browser, 4, &["healthy", "Z"]);
    status.store(500, Ordering::Relaxed);
    shows(&browser, "every 300ms: 2 healthy, 2 unhealthy");
    probed(&browser, 1, &["10.244.1.12:9000", "unhealthy", "status 500"]);
    probed(&browser, 1, &["[fd00:10:244:1::12]:9000", "unhealthy", "status 500"]);

    service_is_first_in_the_list(&browser);
    page_says_until_when_a_flapping_endpoint_is_held(&browser, &status);
    page_fits_and_is_accessible(&browser);

    // Without an agent, the page cannot show the results of health checks.
    bed.agent.take().unwrap().kill().unwrap();
    shows(&browser, "No agent answers");
    until(&browser, "return document.querySelector('tr.probed') === null");
    shows(&browser, "pod3");
    drop(traffic);
}

fn service_is_first_in_the_list(browser: &Browser) {
    open(browser, SERVER, "/services");
    shows(browser, "2 with unhealthy endpoints");
    until(
        browser,
        "return [...document.querySelectorAll('tbody .dot')].map((dot) => dot.title).join() === 'unhealthy,unhealthy,up,up'",
    );
    until(browser, "return document.querySelector('tbody tr:not(.gap)').innerText.includes('2 unhealthy')");
}

/// An endpoint flaps if it becomes unhealthy four times within ten minutes. The endpoint keeps failing, so it is
/// unhealthy for the rest of the test, even if the first hold, which lasts a minute, ends earlier.
fn page_says_until_when_a_flapping_endpoint_is_held(browser: &Browser, status: &AtomicU16) {
    open(browser, SERVER, "/services/default/web");
    for _ in 0..3 {
        status.store(200, Ordering::Relaxed);
        shows(browser, "every 300ms: 4 healthy, 0 unhealthy");
        status.store(503, Ordering::Relaxed);
        shows(browser, "every 300ms: 2 healthy, 2 unhealthy");
    }
    probed(browser, 2, &["unhealthy", "status 503", "it flaps: held until 20"]);
}

fn page_fits_and_is_accessible(browser: &Browser) {
    for (size, dark) in [(SIZES[0], true), (SIZES[1], false)] {
        browser.resize(size, dark).unwrap();
        for page in ["/services", "/services/default/web"] {
            open(browser, SERVER, page);
            shows(browser, if page == "/services" { "unhealthy endpoints" } else { "status 503" });
            let (fits, moved) = layout(browser);
            assert!(fits && moved < 0.1, "{page} at {size:?}: fits: {fits}, moves by {moved}");
            let found = findings(browser);
            assert!(found.is_empty(), "{page} at {size:?}: {found:#?}");
        }
    }
}
