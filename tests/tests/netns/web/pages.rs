//! Every page under real traffic, and its layout on screens of three sizes.

use std::net::SocketAddr;

use lb_tests::{
    browser::Browser,
    client::ask_http,
    http::get,
    manifests::Endpoint,
    traffic::{Kind, Traffic},
    wait_for,
};
use serde_json::json;

use super::{
    DRAWN, HEALTHY, LIMIT, SIZES, Served, browser, few_clients, findings, layout, open, pictures::compare,
    shows, until,
};
use crate::bed::{Bed, WEB, http, vips};

/// A script that is true when the last table of a Service shows why a backend was chosen.
const CHOSEN: &str =
    "return [...document.querySelectorAll('main tbody')].at(-1).innerText.includes('random')";

/// The titles of the plots on the Overview.
const PLOTS: [&str; 4] = [
    "New connections per second",
    "Packets per second",
    "Dropped and rejected packets per second, by reason",
    "Fill of the maps",
];
/// A script that returns the titles of the plots that are drawn.
const DRAWN_PLOTS: &str = "return [...document.querySelectorAll('section')]\
     .filter((one) => one.querySelector('.plot canvas')).map((one) => one.querySelector('h2').textContent)";

/// A Service that serves the same pods as `web`. Its name begins with that of `web`, so a filter that compares only the
/// beginning of the name shows both.
const WEBSHOP: &str = "webshop";

#[test]
fn pages_show_real_traffic() {
    let mut bed = Bed::with_web(&["pod1", "pod2", "pod3"]);
    bed.put("empty", vips(20), &[]);
    let served = Served::start(&bed, &["--listen", "127.0.0.1:8088"]);
    assert!(served.first_line.contains("http://127.0.0.1:8088/"), "{}", served.first_line);
    let server: SocketAddr = "127.0.0.1:8088".parse().unwrap();
    let traffic = bed.traffic();
    let browser = browser(&bed);
    browser.resize(SIZES[1], false).unwrap();

    overview_has_plots_maps_and_programs(&browser, &bed, server);
    overviews_look_as_documented(&browser, server);
    drop(traffic);
    let traffic = few_clients(&bed);
    list_is_sorted(&browser, server);
    list_finds_the_service(&browser);
    service_has_shares_and_choices(&browser, &bed);
    connections_are_filtered_and_exported(&browser, &bed, server);
    explain_ends_at_the_backends(&browser, server);
    live_has_rejected_packets(&browser, &bed, server);
    filters_by_service_exclude_other_services(&browser, &bed, server);
    let errors = browser.errors().unwrap();
    // The server answers an invalid query with an HTTP error, which browsers log.
    assert!(errors.iter().all(|error| error.contains("400 (Bad Request)")), "{errors:#?}");
    every_page_fits_and_is_accessible(&browser, server);

    // The pages need no agent, and say that it is gone.
    open(&browser, server, "/");
    bed.agent.take().unwrap().kill().unwrap();
    shows(&browser, "not running: the data plane works without it");
    drop(traffic);
}

fn overview_has_plots_maps_and_programs(browser: &Browser, bed: &Bed, server: SocketAddr) {
    open(browser, server, "/");
    until(browser, HEALTHY);
    let drawn = || {
        // Without a rejected packet, the page shows a text instead of the plot of these packets.
        drop(ask_http(&bed.cluster.client, http(vips(20)[0])));
        browser.run(DRAWN_PLOTS).ok().filter(|titles| *titles == json!(PLOTS)).map(drop)
    };
    assert!(wait_for(LIMIT, drawn).is_some(), "only these plots are drawn: {:?}", browser.run(DRAWN_PLOTS));
    for text in ["tc_ingress", "FLOWS", "node1", "10.244.1.1"] {
        until(browser, &format!("return document.body.innerHTML.includes('{text}')"));
    }
}

/// A click on a header sorts by its column, a second one in the other order. The key ? shows all keys.
fn list_is_sorted(browser: &Browser, server: SocketAddr) {
    open(browser, server, "/services");
    for (order, first) in [("ascending", "default/empty"), ("descending", "default/web")] {
        browser
            .run("[...document.querySelectorAll('th button')].find((it) => it.innerText === 'Service').click()")
            .unwrap();
        until(
            browser,
            &format!(
                "return document.querySelector('th[aria-sort]').ariaSort === '{order}' && \
                 document.querySelector('tbody tr:not(.gap)').innerText.includes('{first}')"
            ),
        );
    }
    browser.press("?").unwrap();
    until(browser, "return document.querySelector('dialog[open]') !== null");
    browser.run("document.querySelector('dialog').close()").unwrap();
}

/// The keys g and s lead to the list of Services. A link in the list leads to the page of a Service.
fn list_finds_the_service(browser: &Browser) {
    browser.press("gs").unwrap();
    shows(browser, "default/web:http");
    until(browser, "return document.querySelector('tbody .dot').title === 'down'");
    shows(browser, "2 without ready backends");
    until(
        browser,
        "return [...document.querySelectorAll('tbody tr')].some((row) => \
         row.innerText.includes('web:http') && /[1-9]/.test(row.querySelectorAll('td.num')[3].innerText))",
    );
    browser.press("/echo").unwrap();
    until(
        browser,
        "return location.search === '?q=echo' && document.querySelectorAll('tbody tr:not(.gap)').length === 2",
    );
    browser.run("[...document.querySelectorAll('tbody a')].find((link) => link.innerText.includes('web')).click()").unwrap();
    until(browser, "return location.pathname === '/services/default/web'");
}

fn service_has_shares_and_choices(browser: &Browser, bed: &Bed) {
    shows(browser, "pod2");
    until(browser, "return document.querySelectorAll('.picture .flow:not(.idle)').length >= 3");
    compare(browser, "service");
    browser.run("document.querySelector('button:not(.plain)').click()").unwrap();
    let chosen = || {
        drop(ask_http(&bed.cluster.client, http(WEB[0])));
        browser.run(CHOSEN).ok().filter(|is| *is == true).map(drop)
    };
    assert!(wait_for(LIMIT, chosen).is_some(), "{:?}", browser.run("return document.body.innerText"));
}

fn connections_are_filtered_and_exported(browser: &Browser, bed: &Bed, server: SocketAddr) {
    open(browser, server, "/connections?service=web&phase=established");
    shows(browser, "10.96.0.10:80");
    until(
        browser,
        "return document.querySelectorAll('tbody tr').length > 0 && \
         [...document.querySelectorAll('tbody tr')].every((row) => row.innerText.includes('established'))",
    );
    let csv = get(&bed.cluster.node1, server, "/api/connections.csv?protocol=udp").unwrap().body;
    assert!(csv.contains("\r\nUDP,"), "{csv}");
    assert!(!csv.contains("TCP,"), "{csv}");
    // Selects the client's connections in the form; the export link must then return only these.
    browser
        .run(
            "const form = document.querySelector('form'); form.reset(); form.client.value = '198.51.100.2'; \
              form.phase.value = ''; form.service.value = ''; form.querySelector('button').click()",
        )
        .unwrap();
    until(
        browser,
        "const rows = [...document.querySelectorAll('tbody tr')]; \
         return location.search.includes('client=198.51.100.2') && rows.length > 0 && \
         rows.every((row) => row.innerText.includes('198.51.100.2:'))",
    );
    let exported =
        browser.run("return fetch(document.querySelector('#export').href).then((it) => it.text())");
    let exported = exported.unwrap();
    let lines: Vec<&str> = exported.as_str().unwrap().trim_end().lines().collect();
    assert!(lines.len() > 1 && lines[1..].iter().all(|line| line.contains("198.51.100.2")), "{lines:?}");
}

fn explain_ends_at_the_backends(browser: &Browser, server: SocketAddr) {
    open(browser, server, "/explain?from=198.51.100.2&to=10.96.0.10:80");
    shows(browser, "default/web:http");
    until(
        browser,
        "return document.querySelector('.path li.end .verdict').innerText.startsWith('sent to one of 3')",
    );
    compare(browser, "explain");
    // Explains the same packet by means of the form.
    open(browser, server, "/explain");
    browser
        .run(
            "const form = document.querySelector('form'); form.from.value = '198.51.100.2'; \
              form.to.value = '10.96.0.10:80'; form.querySelector('button').click()",
        )
        .unwrap();
    shows(browser, "sent to one of 3 backends");
    step_leads_to_its_section(browser);
    open(browser, server, "/explain?from=198.51.100.2&to=here");
    shows(browser, "invalid value 'here' for '--to <ADDR:PORT[/PROTO]>'");
}

/// Every step links to the documentation. The link of the step `masquerade` leads to the section about masquerading.
/// The browser then goes back.
fn step_leads_to_its_section(browser: &Browser) {
    until(
        browser,
        "const steps = [...document.querySelectorAll('.path > li')]; \
         return steps.length > 3 && steps.every((step) => step.querySelector('a[href^=\"/docs/\"]'))",
    );
    browser
        .run("[...document.querySelectorAll('.path a')].find((link) => link.innerText === 'masquerade').click()")
        .unwrap();
    until(
        browser,
        "return location.pathname + location.hash === '/docs/datapath#masqueraded-through-the-stack'",
    );
    shows(browser, "Masqueraded through the stack");
    until(
        browser,
        "const top = document.querySelector(':target').getBoundingClientRect().top; \
         return top >= 0 && top < innerHeight",
    );
    browser.run("history.back()").unwrap();
    shows(browser, "sent to one of 3 backends");
}

fn live_has_rejected_packets(browser: &Browser, bed: &Bed, server: SocketAddr) {
    open(browser, server, "/live?verdict=reject");
    let rejected = || {
        drop(ask_http(&bed.cluster.client, http(vips(20)[0])));
        let rows = browser
            .run("return [...document.querySelectorAll('tbody tr')].map((row) => row.innerText)")
            .ok()?;
        rows.as_array().filter(|rows| !rows.is_empty()).cloned()
    };
    let rows = wait_for(LIMIT, rejected).unwrap();
    assert!(rows.iter().all(|row| row.as_str().unwrap().contains("reject_tcp")), "{rows:?}");
    browser.press("p").unwrap();
    shows(browser, "Go on");
    // While the page pauses, events wait; then they are added.
    let count =
        || browser.run("return document.querySelectorAll('tbody tr').length").unwrap().as_u64().unwrap();
    let before = count();
    let waiting = || {
        drop(ask_http(&bed.cluster.client, http(vips(20)[0])));
        let waits = "return /paused with [1-9]/.test(document.querySelector('.head .muted').innerText)";
        browser.run(waits).ok().filter(|is| *is == true).map(drop)
    };
    wait_for(LIMIT, waiting).unwrap();
    assert_eq!(count(), before);
    browser.press("p").unwrap();
    shows(browser, "Pause");
    assert!(count() > before, "{before}");
}

fn filters_by_service_exclude_other_services(browser: &Browser, bed: &Bed, server: SocketAddr) {
    let clients = clients_of_webshop(bed);
    connections_are_of_one_service(browser, server);
    live_events_are_of_one_service(browser, server);
    drop(clients);
}

/// Clients that connect to [`WEBSHOP`] all the time; one connection stays established.
fn clients_of_webshop(bed: &Bed) -> Traffic {
    bed.put(WEBSHOP, vips(21), &["pod1", "pod2", "pod3"]);
    let known = || {
        let shown = bed.agent.as_ref().unwrap().ask(&["service", "show", WEBSHOP]).ok()?;
        shown.status.success().then_some(())
    };
    wait_for(LIMIT, known).unwrap();
    let to = http(vips(21)[0]);
    Traffic::start([Kind::Connection, Kind::Requests].map(|kind| (&bed.cluster.client, kind, to))).unwrap()
}

/// A JavaScript expression: the names of the Services in this column of the table, each once.
fn services_in(column: usize) -> String {
    format!(
        "[...new Set([...document.querySelectorAll('tbody tr')]\
         .map((row) => row.cells[{column}]?.innerText.split(':')[0]))]"
    )
}

/// Waits until the column of the table names both Services: then a filter has something to exclude.
fn shows_both_services(browser: &Browser, column: usize) {
    let services = services_in(column);
    for name in ["web", WEBSHOP] {
        until(browser, &format!("return {services}.includes('default/{name}')"));
    }
}

fn connections_are_of_one_service(browser: &Browser, server: SocketAddr) {
    const SERVICE: usize = 7;
    // The page shows at most 1,000 connections, but few are established: it shows all of these.
    open(browser, server, "/connections?phase=established");
    shows_both_services(browser, SERVICE);
    let services = services_in(SERVICE);
    for name in ["web", WEBSHOP] {
        open(browser, server, &format!("/connections?service={name}&phase=established"));
        until(browser, &format!("return {services}.join() === 'default/{name}'"));
    }
}

fn live_events_are_of_one_service(browser: &Browser, server: SocketAddr) {
    const SERVICE: usize = 5;
    open(browser, server, "/live");
    shows_both_services(browser, SERVICE);
    let services = services_in(SERVICE);
    for name in ["web", WEBSHOP] {
        // The page keeps the rows of the filter before.
        let select = format!(
            "const form = document.querySelector('form'); form.service.value = '{name}'; \
             form.querySelector('button').click(); document.querySelector('#clear').click()"
        );
        browser.run(&select).unwrap();
        // Both Services get new connections all the time: without a filter, twenty events are not all of one Service.
        until(
            browser,
            &format!(
                "return location.search === '?service={name}' && \
                 document.querySelectorAll('tbody tr').length >= 20 && {services}.join() === 'default/{name}'"
            ),
        );
    }
}

/// The page says what changes the choice of a backend: weights and affinity; and which backends only drain.
#[test]
fn page_of_a_service_shows_weights_affinity_and_draining() {
    let bed = Bed::with_web(&["pod1"]);
    let mut cart = bed.service("cart", vips(21), &["pod1", "pod2"]);
    cart.annotations = vec![("lb.dev/weights", r#"{"pod1": 3}"#.to_owned())];
    cart.exposure.affinity = Some(600);
    bed.cluster.manifests.put(&cart).unwrap();
    // A terminating endpoint gets new connections only if the Service has no other.
    let mut leaving = bed.service("leaving", vips(22), &["pod2"]);
    leaving.endpoints = leaving.endpoints.into_iter().map(Endpoint::terminating).collect();
    bed.cluster.manifests.put(&leaving).unwrap();
    let served = Served::start(&bed, &["--listen", "127.0.0.1:8088"]);
    let server: SocketAddr = "127.0.0.1:8088".parse().unwrap();
    let browser = browser(&bed);
    browser.resize(SIZES[1], false).unwrap();
    for (name, texts) in [("cart", ["ClientIP 600 s", "weight 3"]), ("leaving", ["no affinity", "ending"])] {
        let known = || {
            let shown = bed.agent.as_ref().unwrap().ask(&["service", "show", name]).ok()?;
            shown.status.success().then_some(())
        };
        wait_for(LIMIT, known).unwrap();
        open(&browser, server, &format!("/services/default/{name}"));
        for text in texts {
            until(
                &browser,
                &format!("return document.querySelector('.picture').textContent.includes('{text}')"),
            );
        }
    }
    shows(&browser, "ending");
    until(&browser, "return document.querySelector('.picture .draining') !== null");
    drop(served);
}

fn every_page_fits_and_is_accessible(browser: &Browser, server: SocketAddr) {
    let pages = [
        "/",
        "/services",
        "/services/default/web",
        "/connections",
        "/explain?from=198.51.100.2&to=10.96.0.10:80",
        // Shows only dropped packets, which are few: each new event moves the rows below it, which the browser would
        // count as a layout shift.
        "/live?verdict=drop",
        "/docs/datapath",
        "/docs/metrics",
    ];
    for (size, dark) in [(SIZES[0], true), (SIZES[1], false), (SIZES[2], false)] {
        browser.resize(size, dark).unwrap();
        for page in pages {
            if page.starts_with("/docs/") {
                browser.open(&format!("http://{server}{page}")).unwrap();
            } else {
                open(browser, server, page);
            }
            let (fits, moved) = layout(browser);
            assert!(fits, "{page} is wider than {size:?}");
            assert!(moved < 0.1, "{page} moves by {moved} at {size:?}");
            if size != SIZES[2] {
                let found = findings(browser);
                assert!(found.is_empty(), "{page} at {size:?}: {found:#?}");
            }
        }
    }
}

fn overviews_look_as_documented(browser: &Browser, server: SocketAddr) {
    for (size, dark, name) in [(SIZES[0], true, "phone"), (SIZES[1], false, "overview")] {
        browser.resize(size, dark).unwrap();
        open(browser, server, "/");
        until(browser, HEALTHY);
        until(browser, DRAWN);
        compare(browser, name);
    }
}
