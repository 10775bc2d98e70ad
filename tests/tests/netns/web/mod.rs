//! The pages of `lb-agent web` and `--web-bind-address` in a real browser, with real traffic.
//!
//! ```text
//! pages     every page under traffic, on screens of three sizes
//! health    health checks of endpoints
//! announce  the node that announces an address
//! pictures  comparison with the pictures of docs/web.md
//! ```

mod announce;
mod health;
mod pages;
mod pictures;

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, Stdio},
    time::Duration,
};

use lb_tests::{
    agent::{self, Agent, Settings},
    browser::{AXE, Browser},
    http::get,
    netns::Netns,
    traffic::{Kind, Traffic},
    wait_for,
};
use serde_json::{Value, json};

use crate::bed::{Bed, WEB, http, udp};

const LIMIT: Duration = Duration::from_secs(20);
/// The address and port at which the agent serves the pages in these tests.
const OF_AGENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8087);
/// Sizes of the page in pixels: on a phone, on a laptop, and on a wall display.
const SIZES: [(u32, u32); 3] = [(360, 740), (1280, 860), (3840, 2160)];
/// A script that is true when the page shows data.
const DRAWN: &str = "return document.querySelector('.pulse.ok') !== null";

/// A script that is true when the page shows that nothing fails.
const HEALTHY: &str = "return document.querySelector('.problems, .fine .up') !== null && document.querySelector('.dot.error') === null";
/// A running `lb-agent web`.
struct Served {
    child: Child,
    first_line: String,
}

impl Served {
    fn start(bed: &Bed, arguments: &[&str]) -> Self {
        let mut command = bed.cluster.node1.command(agent::binary());
        command.arg("web").args(arguments).arg("--bpffs").arg(bed.cluster.bpffs(1));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut first_line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
        Self { child, first_line }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).map(drop).unwrap_or_default();
    }
}

/// Traffic that keeps the pages changing, of only a few clients: beside a browser, clients of all kinds would use up
/// the CPUs of a busy machine.
fn few_clients(bed: &Bed) -> Traffic {
    let client = &bed.cluster.client;
    let clients = [
        (client, Kind::Connection, http(WEB[0])),
        (client, Kind::Requests, http(WEB[0])),
        (client, Kind::Questions, udp(WEB[1])),
    ];
    Traffic::start(clients).unwrap()
}

/// A browser on node1.
fn browser(bed: &Bed) -> Browser {
    Browser::start(&bed.cluster.node1, bed.cluster.folder()).unwrap()
}

/// Waits until the script returns true; panics with the text of the page if it does not.
fn until(browser: &Browser, script: &str) {
    let is_true = || browser.run(script).ok().filter(|value| *value == true).map(drop);
    if wait_for(LIMIT, is_true).is_none() {
        let text = browser.run("return document.body.innerText").unwrap();
        panic!("never true: {script}\n{}\n{:?}", text.as_str().unwrap_or_default(), browser.errors());
    }
}

/// Waits until the text is on the page.
fn shows(browser: &Browser, text: &str) {
    until(browser, &format!("return document.body.innerText.includes({})", json!(text)));
}

/// Opens a page and waits until it has read its data.
fn open(browser: &Browser, server: SocketAddr, path: &str) {
    browser.open(&format!("http://{server}{path}")).unwrap();
    until(browser, DRAWN);
}

/// Serious and critical findings of axe-core. First removes all but twenty rows of each table from the page: rows are
/// alike, and a thousand take minutes.
fn findings(browser: &Browser) -> Vec<String> {
    let path = ebpf_build::cache_dir().join(AXE).join("axe.min.js");
    let axe = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}: `cargo xtask setup` downloads it", path.display()));
    let ask = "return axe.run(document, { resultTypes: ['violations'] }).then((found) => found.violations\
               .filter((one) => ['serious', 'critical'].includes(one.impact))\
               .map((one) => one.id + ': ' + one.nodes.map((node) => node.html + ' ' + node.failureSummary).slice(0, 3).join(' ')))";
    let few = "document.querySelectorAll('tbody tr:nth-child(n+21)').forEach((row) => row.remove());";
    let found = browser.run(&format!("{few}\n{axe}\n{ask}")).unwrap();
    found.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// Whether the page fits the width of its window, and how much its layout has moved by itself.
fn layout(browser: &Browser) -> (bool, f64) {
    let fits = "const page = document.scrollingElement; return page.scrollWidth <= page.clientWidth";
    let moved = "return new Promise((tell) => { let sum = 0; const observer = new PerformanceObserver((list) => \
                 { for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value; }); \
                 observer.observe({ type: 'layout-shift', buffered: true }); setTimeout(() => tell(sum), 50); })";
    (browser.run(fits).unwrap() == true, browser.run(moved).unwrap().as_f64().unwrap())
}

#[test]
fn open_page_survives_the_agent_that_serves_it() {
    let mut bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &["pod1"]);
    let address = OF_AGENT.to_string();
    bed.start_agent_with(&["--web-bind-address", &address]);
    let browser = browser(&bed);
    open(&browser, OF_AGENT, "/");
    until(&browser, HEALTHY);
    bed.agent.take().unwrap().kill().unwrap();
    shows(&browser, "no answer");
    shows(&browser, "This server does not answer");
    // The agent restarts, and the page shows its data again without a reload.
    bed.start_agent_with(&["--web-bind-address", &address]);
    until(&browser, DRAWN);
    until(&browser, HEALTHY);
}

#[test]
fn ten_thousand_services_are_drawn_at_once() {
    const SERVICES: usize = 10_000;
    let mut bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &["pod1"]);
    let mut manifest = String::new();
    for number in 0..SERVICES {
        write!(
            manifest,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{ name: s{number:05} }}\n\
             spec: {{ clusterIP: 10.97.{}.{}, ports: [{{ port: 80 }}] }}\n",
            number / 250,
            number % 250 + 1
        )
        .unwrap();
    }
    bed.cluster.manifests.write("many", &manifest).unwrap();
    bed.start_agent_with(&["--web-bind-address", &OF_AGENT.to_string()]);
    let browser = browser(&bed);
    browser.resize(SIZES[1], false).unwrap();
    open(&browser, OF_AGENT, "/services");
    shows(&browser, "10,002 service ports");
    rows_are_painted_at_once(&bed, &browser);
    let mut rows_named = 0.0;
    // The median, because single frames may wait for other processes.
    let plain = || frame_of_plain_table(&browser);
    let median = best_of_three("half of the frames", (50.0, 3.0), plain, || {
        open(&browser, OF_AGENT, "/services");
        shows(&browser, "s00000");
        let [longest, median, named] = scroll(&browser);
        eprintln!("while the list scrolls, a frame takes {median:.0} ms (median), at most {longest:.0} ms");
        rows_named += named;
        median
    });
    eprintln!("median frame {median:.0} ms");
    assert!(rows_named > 0.0, "rows beyond the first request come only when the list stands still");
    let rows = "return document.querySelectorAll('tbody tr').length";
    let to_the_end =
        "const list = document.querySelector('.list'); list.scrollTop = list.scrollHeight; return true";
    browser.run(to_the_end).unwrap();
    shows(&browser, "web:http");
    let held = browser.run(rows).unwrap().as_u64().unwrap();
    assert!(held < 150, "the page holds {held} of 10,002 rows");
    browser.press("/s09999").unwrap();
    until(&browser, "return document.querySelectorAll('tbody tr:not(.gap)').length === 1");
    shows(&browser, "s09999");
}

/// Fails if the first rows of the list are painted later than the limit. The reference is a page with a line of text.
fn rows_are_painted_at_once(bed: &Bed, browser: &Browser) {
    let line_of_text = || {
        let pod = bed.cluster.pod("pod1").unwrap();
        browser.open(&format!("http://{}/", pod.http(WEB[0]))).unwrap();
        first_paint(browser)
    };
    let painted = best_of_three("first rows", (1000.0, 10.0), line_of_text, || {
        // The second load counts: the browser has the files in its cache, as it usually has for a user of the page.
        open(browser, OF_AGENT, "/services");
        open(browser, OF_AGENT, "/services");
        rows_painted(browser)
    });
    eprintln!("first rows painted after {painted:.0} ms");
}

/// Scrolls the list by about four rows in each of 240 frames. Returns the longest and the median time between two
/// frames, in milliseconds, and the number of frames that showed rows which the page lacked at first.
fn scroll(browser: &Browser) -> [f64; 3] {
    const SCRIPT: &str = "return new Promise(done => {
        const list = document.querySelector('.list'), times = [];
        let named = 0, before = performance.now();
        const isNamed = () => {
            const [rows, top] = [[...list.querySelectorAll('tbody tr:not(.gap)')], list.getBoundingClientRect().top + 100];
            const row = rows.find(row => row.getBoundingClientRect().bottom > top);
            return list.scrollTop > 200 * 34 && row?.querySelector('a');
        };
        const next = now => {
            times.push(now - before);
            before = now;
            if (isNamed()) named += 1;
            list.scrollTop += 128;
            if (times.length < 240) return requestAnimationFrame(next);
            times.sort((one, other) => other - one);
            done([times[0], times[120], named]);
        };
        requestAnimationFrame(next);
    })";
    serde_json::from_value(browser.run(SCRIPT).unwrap()).unwrap()
}

/// The time from the request for the page until the browser has painted the first part of it, in milliseconds.
fn first_paint(browser: &Browser) -> f64 {
    let paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null";
    wait_for(LIMIT, || browser.run(paint).ok()?.as_f64()).expect("the browser paints the page")
}

/// The time from the request for the page until the browser has painted the first rows of the list, in milliseconds. The
/// script of the page marks this moment, because the browser itself only knows when it has painted the header.
fn rows_painted(browser: &Browser) -> f64 {
    const SCRIPT: &str = "const [mark] = performance.getEntriesByName('rows-painted');
        const answer = performance.getEntriesByType('resource').find((one) => one.name.includes('/api/services'));
        const row = document.querySelector('tbody tr:not(.gap) a');
        return mark && answer && row ? [mark.startTime, answer.responseStart] : null";
    let times = || serde_json::from_value::<[f64; 2]>(browser.run(SCRIPT).ok()?).ok();
    let [painted, answered] = wait_for(LIMIT, times).expect("the page marks the first rows");
    assert!(
        painted > answered,
        "rows were painted at {painted:.0} ms, before the answer at {answered:.0} ms"
    );
    painted
}

/// The median time, in milliseconds, between two frames of a page that needs no server. In each of 240 frames, the page
/// replaces 20 rows of a table.
fn frame_of_plain_table(browser: &Browser) -> f64 {
    const SCRIPT: &str = "return new Promise(done => {
        const table = document.body.appendChild(document.createElement('table')), times = [];
        let before = performance.now();
        const row = (_, number) => {
            const row = document.createElement('tr');
            for (let cell = 0; cell < 9; cell += 1) row.insertCell().textContent = times.length + number + cell;
            return row;
        };
        const next = now => {
            times.push(now - before);
            before = now;
            table.replaceChildren(...Array.from({ length: 20 }, row));
            if (times.length < 240) return requestAnimationFrame(next);
            times.sort((one, other) => other - one);
            done(times[120]);
        };
        requestAnimationFrame(next);
    })";
    browser.open("about:blank").unwrap();
    browser.run(SCRIPT).unwrap().as_f64().unwrap()
}

/// Measures up to three times, because other tests may need the CPUs at the same time. Returns the first result, in
/// milliseconds, that is below its limit; panics if none is. The limit is the maximum of `idle`, for a machine that is
/// not busy, and of `times` multiplied by the time that the same browser has just needed for the `reference`.
fn best_of_three(
    what: &str,
    (idle, times): (f64, f64),
    mut reference: impl FnMut() -> f64,
    mut measure: impl FnMut() -> f64,
) -> f64 {
    let mut results = Vec::new();
    for _ in 0..3 {
        let (reference, measured) = (reference(), measure());
        if measured < idle.max(times * reference) {
            return measured;
        }
        results.push((measured, reference));
    }
    panic!("{what}: {results:.0?} ms, each with its reference");
}

#[test]
fn pages_off_loopback_are_behind_a_token() {
    let bed = Bed::with_web(&["pod1"]);
    let served = Served::start(&bed, &["--listen", "172.18.0.1:8088"]);
    let (_, token) = served.first_line.split_once("Log in with the token ").unwrap();
    let token = token.split('.').next().unwrap();
    let server: SocketAddr = "172.18.0.1:8088".parse().unwrap();
    // Another node reaches the page, but not the data.
    let refused = get(&bed.cluster.node2, server, "/api/overview").unwrap();
    assert_eq!(refused.code, 401, "{refused:?}");
    let browser = browser(&bed);
    browser.open(&format!("http://{server}/services")).unwrap();
    until(&browser, "return location.pathname === '/login'");
    let found = findings(&browser);
    assert!(found.is_empty(), "{found:#?}");
    let log_in = |token: &str| {
        let script = format!(
            "document.querySelector('input').value = '{token}'; document.querySelector('button').click()"
        );
        browser.run(&script).unwrap();
    };
    log_in("this is not the token");
    shows(&browser, "This is not the token");
    log_in(token);
    until(&browser, "return location.pathname === '/'");
    until(&browser, DRAWN);
    assert_eq!(
        browser.run("return document.cookie").unwrap(),
        Value::from(""),
        "scripts cannot read the cookie"
    );
    // Other nodes do not reach a server that listens on a loopback address.
    let _local = Served::start(&bed, &["--listen", "127.0.0.1:8089"]);
    let elsewhere: SocketAddr = "172.18.0.1:8089".parse().unwrap();
    let reached = bed.cluster.node2.run(|| TcpStream::connect_timeout(&elsewhere, Duration::from_secs(1)));
    assert!(reached.is_err());
}

/// Requests the URL from a namespace, with a token if there is one; returns the code of the answer, and its content.
fn fetch(netns: &Netns, url: &str, token: Option<&str>) -> (String, String) {
    let mut command = netns.command("curl");
    command.args(["--silent", "--globoff", "--max-time", "10", "--write-out", "\n%{http_code}", url]);
    command.args(
        token.iter().flat_map(|token| ["--header".to_owned(), format!("Authorization: Bearer {token}")]),
    );
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (content, code) = text.rsplit_once('\n').unwrap();
    (code.to_owned(), content.to_owned())
}

#[test]
fn agent_serves_pages_off_loopback_to_users_with_the_token_only() {
    const TOKEN: &str = "a token of more than sixteen characters";
    let mut bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &["pod1"]);
    let file = bed.cluster.folder().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    bed.start_agent_with(&["--web-bind-address", "0.0.0.0:8087", "--web-token-file", file.to_str().unwrap()]);
    let node2 = &bed.cluster.node2;
    // `0.0.0.0` stands for the addresses of both families.
    for host in ["172.18.0.1", "[fd00:172:18::1]"] {
        let url = |path: &str| format!("http://{host}:8087{path}");
        let of = |path: &str, token| fetch(node2, &url(path), token);
        let answered = || (of("/api/overview", None).0 != "000").then_some(());
        wait_for(LIMIT, answered).expect("the agent listens");
        for wrong in [None, Some(""), Some("another token of many characters")] {
            let (code, content) = of("/api/overview", wrong);
            assert_eq!((&*code, &*content), ("401", "log in at /login first"), "{host}: {wrong:?}");
            assert_eq!(of("/services", wrong), ("303".to_owned(), String::new()), "a browser has to log in");
        }
        let (code, content) = of("/api/overview", Some(TOKEN));
        let overview: Value = serde_json::from_str(&content).unwrap();
        assert!(code == "200" && overview.is_object(), "{code} {content}");
        let (code, content) = of("/api/service/default/web", Some(TOKEN));
        assert!(code == "200" && content.contains("10.96.0.10"), "{code} {content}");
        assert_eq!(of("/services", Some(TOKEN)).0, "200");
    }
    let (code, _) = fetch(&bed.cluster.node1, "http://127.0.0.1:8087/api/overview", None);
    assert_eq!(code, "401", "processes of the node need the token as well");
}

#[test]
fn agent_refuses_to_serve_pages_off_loopback_without_a_token() {
    let bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &["pod1"]);
    let short = bed.cluster.folder().join("short");
    fs::write(&short, "short\n").unwrap();
    let missing = bed.cluster.folder().join("missing");
    let refused = |flags: &[&str]| {
        let settings = bed.cluster.agent_settings(1);
        let settings = Settings { arguments: flags.iter().map(ToString::to_string).collect(), ..settings };
        let log = settings.log.clone();
        fs::write(&log, "").unwrap();
        let status = Agent::spawn(&bed.cluster.node1, settings).unwrap().wait().unwrap();
        assert!(!status.success(), "{flags:?}");
        fs::read_to_string(log).unwrap()
    };
    let why = "give --web-token-file, or a loopback address";
    for address in ["0.0.0.0:8087", "172.18.0.1:8087", "[::]:8087"] {
        let log = refused(&["--web-bind-address", address]);
        assert!(log.contains("--web-bind-address") && log.contains(address) && log.contains(why), "{log}");
    }
    let address = ["--web-bind-address", "0.0.0.0:8087", "--web-token-file"];
    let log = refused(&[&address[..], &[short.to_str().unwrap()]].concat());
    assert!(log.contains("the token has 5 characters: it needs at least"), "{log}");
    let log = refused(&[&address[..], &[missing.to_str().unwrap()]].concat());
    for part in ["--web-token-file", missing.to_str().unwrap(), "cannot read it: No such file"] {
        assert!(log.contains(part), "{log}");
    }
}
