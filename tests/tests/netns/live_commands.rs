//! `lb-agent monitor` and `lb-agent top` in a terminal, and traffic counters of services.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::UnixListener,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use lb_tests::{
    agent,
    cleanup::agent_file,
    client::{ask_http, ask_udp},
    cluster::CLIENT,
    http::get,
    netns::Netns,
    terminal::Terminal,
    wait_for,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::bed::{Bed, WEB, http, udp, vips};

const LIMIT: Duration = Duration::from_secs(10);

/// A command of the agent on node 1, for a shell.
fn command(bed: &Bed, arguments: &str) -> String {
    format!("{} {arguments} --bpffs {}", agent::binary().display(), bed.cluster.bpffs(1).display())
}

fn start(bed: &Bed, size: (u16, u16), arguments: &str) -> Terminal {
    Terminal::start(&bed.cluster.node1, bed.cluster.folder(), size, &command(bed, arguments)).unwrap()
}

/// Waits until one line of the screen contains all these words, and returns the screen; calls `again` before each
/// attempt.
#[track_caller]
fn screen_with(terminal: &Terminal, words: &[&str], mut again: impl FnMut()) -> String {
    let mut last = String::new();
    let has_all = |line: &str| words.iter().all(|word| line.contains(word));
    let seen = wait_for(LIMIT, || {
        again();
        last = terminal.screen().ok()?;
        last.lines().any(has_all).then_some(())
    });
    assert!(seen.is_some(), "{words:?} is on no line of\n{last}");
    last
}

#[test]
fn monitor_shows_new_and_rejected_flows_in_a_terminal() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("empty", vips(20), &[]);
    let terminal = start(&bed, (130, 12), "monitor");
    let backend = bed.cluster.pod("pod2").unwrap().http(WEB[0]).to_string();
    let ask = || drop(ask_http(&bed.cluster.client, http(WEB[0])));
    screen_with(&terminal, &["new", "10.96.0.10:80 (default/web:http)", &backend, "random"], ask);
    let refuse = || drop(ask_http(&bed.cluster.client, http(vips(20)[0])));
    screen_with(&terminal, &["reject", "10.96.0.20:80 (default/empty:http)", "reject_tcp"], refuse);
    let of_node = || drop(ask_http(&bed.cluster.node1, http(WEB[1])));
    let screen = screen_with(&terminal, &["new", "process", "(default/web:http)"], of_node);
    eprintln!("{screen}");

    let settings = bed.cluster.agent_settings(1);
    let second = agent::ask(&bed.cluster.node1, &settings.bpffs, &["monitor"]).unwrap_err().to_string();
    assert!(second.contains("another monitor (pid "), "{second}");
    terminal.press(&["C-c"]).unwrap();
    assert!(terminal.ends_within(LIMIT));
}

/// `lb-agent monitor` with its output in a pipe; killed when dropped.
struct Piped(Child);

impl Piped {
    fn start(bed: &Bed, arguments: &[&str]) -> Self {
        let mut command = bed.cluster.node1.command(agent::binary());
        command.args(["monitor", "-o", "json", "--bpffs"]).arg(bed.cluster.bpffs(1)).args(arguments);
        Self(command.stdout(Stdio::piped()).spawn().unwrap())
    }

    /// The first line of the monitor's output; calls `again` until the line arrives. Kills the process if no line
    /// arrives within `LIMIT`.
    fn first(&mut self, again: impl Fn() + Sync) -> Value {
        let stdout = self.0.stdout.take().unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let arrived = wait_for(LIMIT, || {
                    again();
                    done.load(std::sync::atomic::Ordering::Relaxed).then_some(())
                });
                if arrived.is_none() {
                    self.0.kill().unwrap();
                }
            });
            let line = BufReader::new(stdout).lines().next().unwrap().unwrap();
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            serde_json::from_str(&line).unwrap()
        })
    }
}

#[test]
fn monitor_whose_output_is_closed_ends_although_no_event_passes_its_filter() {
    let bed = Bed::with_web(&["pod2"]);
    let mut monitor = Piped::start(&bed, &["--client", "203.0.113.99"]);
    drop(monitor.0.stdout.take());
    let ended = wait_for(LIMIT, || monitor.0.try_wait().unwrap());
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}

impl Drop for Piped {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).map(drop).unwrap_or_default();
    }
}

#[test]
fn monitor_filters_and_prints_json() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("empty", vips(20), &[]);
    let all = || {
        for vip in [WEB[0], WEB[1], vips(20)[0]] {
            drop(ask_http(&bed.cluster.client, http(vip)));
            drop(ask_udp(&bed.cluster.client, udp(vip), 64));
        }
    };
    let of_v6 = Piped::start(&bed, &["--service", "web:echo", "--client", &CLIENT[1].to_string()]).first(all);
    assert_eq!(of_v6["vip"], udp(WEB[1]).to_string().as_str(), "{of_v6:#}");
    assert_eq!((&of_v6["protocol"], &of_v6["verdict"]), (&"UDP".into(), &"new".into()), "{of_v6:#}");
    assert_eq!(of_v6["backend"], bed.cluster.pod("pod2").unwrap().udp(WEB[1]).to_string().as_str());
    // The first monitor was killed, which released its lock.
    let refused = Piped::start(&bed, &["--verdict", "reject", "--service", "10.96.0.20:53"]).first(all);
    assert_eq!(
        (&refused["protocol"], &refused["reason"]),
        (&"UDP".into(), &"reject_udp".into()),
        "{refused:#}"
    );
    assert_eq!((&refused["backend"], &refused["service"]["name"]), (&Value::Null, &"empty".into()));
}

#[test]
fn top_shows_traffic_by_service_and_backend_in_a_terminal() {
    let mut bed = Bed::with_web(&["pod2"]);
    let terminal = start(&bed, (78, 8), "top --interval 0.5");
    let work = || drop(ask_http(&bed.cluster.client, http(WEB[0])));
    screen_with(&terminal, &["default/web:echo", " 0"], || ());
    let busy = wait_for(LIMIT, || {
        (0..20).for_each(|_| work());
        let screen = terminal.screen().unwrap();
        let line = screen.lines().find(|line| line.starts_with("default/web:http"))?.to_owned();
        let columns: Vec<&str> = line.split_whitespace().collect();
        (columns.len() == 5 && columns[1..].iter().all(|column| *column != "0")).then_some(screen)
    });
    eprintln!("{}", busy.unwrap());
    terminal.press(&["/", "h", "t", "t", "p", "Enter", "Enter"]).unwrap();
    let pod = bed.cluster.pod("pod2").unwrap().http(WEB[0]).to_string();
    let screen = screen_with(&terminal, &[&pod], work);
    assert!(screen.starts_with("Backends of default/web:http"), "{screen}");
    eprintln!("{screen}");
    terminal.press(&["q"]).unwrap();
    assert!(terminal.ends_within(LIMIT));

    // `top` needs no agent.
    bed.agent.take().unwrap().kill().unwrap();
    let settings = bed.cluster.agent_settings(1);
    let ask = |arguments: &[&str]| agent::ask(&bed.cluster.node1, &settings.bpffs, arguments).unwrap().stdout;
    let table = String::from_utf8(ask(&["top", "--once", "--interval", "0.1"])).unwrap();
    assert!(table.starts_with("SERVICE") && table.contains("\ndefault/web:http/TCP "), "{table}");
    let page: Value = serde_json::from_slice(&ask(&["top", "-o", "json", "--interval", "0.1"])).unwrap();
    let web =
        page.as_array().unwrap().iter().find(|service| service["name"] == "default/web:http/TCP").unwrap();
    assert!(
        web["backends"].as_array().unwrap().iter().any(|backend| backend["name"] == pod.as_str()),
        "{page:#}"
    );
}

/// The entries of all connections are gone at the end of the interval.
#[test]
fn top_counts_connections_that_end_within_a_long_interval() {
    const SECONDS: u8 = 20;
    let bed = Bed::with_web(&["pod2"]);
    let page = thread::scope(|scope| {
        let top = scope.spawn(|| bed.json(&["top", "--interval", &SECONDS.to_string()]));
        for _ in 0..16 {
            ask_http(&bed.cluster.client, http(WEB[0])).unwrap();
            thread::sleep(Duration::from_millis(500));
        }
        bed.agent.as_ref().unwrap().ask(&["conntrack", "flush"]).unwrap();
        top.join().unwrap()
    });
    let services = page.as_array().unwrap();
    let web = services.iter().find(|service| service["name"] == "default/web:http/TCP").unwrap();
    let begun = web["newFlows"].as_f64().unwrap() * f64::from(SECONDS);
    // Connections that begin before the first walk through the flow table, or after the last walk before the flush, do
    // not count.
    assert!(begun > 4.0, "about 10 of 16 connections count: {web:#}");
}

/// A monitor of the maps that `cleanup` has removed would wait for ever.
#[test]
fn monitor_ends_when_the_maps_were_made_anew() {
    let mut bed = Bed::with_web(&["pod2"]);
    let mut monitor = Piped::start(&bed, &[]);
    bed.agent.take().unwrap().kill().unwrap();
    let bpffs = bed.cluster.bpffs(1);
    // `cleanup` removes the maps, and cannot unmount the BPF file system while the monitor has a folder of it open.
    let cleanup = agent::ask(&bed.cluster.node1, &bpffs, &["cleanup"]).unwrap_err().to_string();
    assert!(cleanup.contains("cannot unmount"), "{cleanup}");
    bed.start_agent();
    let ended = wait_for(LIMIT, || monitor.0.try_wait().unwrap());
    assert!(ended.is_some_and(|status| !status.success()), "{ended:?}");
}

/// A way to end `top`.
#[derive(Clone, Copy, Debug)]
enum End {
    Key(&'static str),
    Signal(Signal),
}

#[test]
fn top_restores_the_terminal_on_every_exit() {
    let bed = Bed::with_web(&["pod2"]);
    // The shell outlives `top`.
    let size = (100, 20);
    let shell = Terminal::start(&bed.cluster.node1, bed.cluster.folder(), size, "PS1='prompt> ' sh").unwrap();
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT].map(End::Signal);
    for end in [End::Key("q"), End::Key("C-c")].into_iter().chain(signals) {
        let empty = wait_for(LIMIT, || (shell.screen().ok()? == "prompt>").then_some(()));
        assert!(empty.is_some(), "before {end:?}: {:?}", shell.screen());
        top_gives_the_terminal_back(&bed, &shell, end);
        shell.press(&["clear", "Enter"]).unwrap();
    }
}

fn top_gives_the_terminal_back(bed: &Bed, terminal: &Terminal, end: End) {
    let pid = bed.cluster.folder().join("top.pid");
    let top = format!("sh -c 'echo $$ > {}; exec {}'", pid.display(), command(bed, "top"));
    terminal.press(&[&top, "Enter"]).unwrap();
    screen_with(terminal, &["default/web:http", " 0"], || ());
    assert_eq!(terminal.state("#{alternate_on} #{cursor_flag}").unwrap(), "1 0");
    match end {
        End::Key(key) => terminal.press(&[key]).unwrap(),
        End::Signal(signal) => {
            let pid = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
            kill(Pid::from_raw(pid), signal).unwrap();
        }
    }
    let left = || (terminal.state("#{alternate_on} #{cursor_flag}").ok()? == "0 1").then_some(());
    let seen = terminal.screen();
    assert!(wait_for(LIMIT, left).is_some(), "{end:?} leaves the screen as it was: {seen:?}");
    // Keys typed before the prompt would appear in front of it.
    let prompts = || terminal.screen().ok()?.trim_end().ends_with("prompt>").then_some(());
    assert!(wait_for(LIMIT, prompts).is_some(), "{end:?}: {:?}", terminal.screen());
    terminal.press(&["stty -a", "Enter"]).unwrap();
    let screen = screen_with(terminal, &["isig icanon iexten echo "], || ());
    assert!(screen.contains("prompt> stty -a"), "{end:?}: {screen}");
}

#[test]
fn flows_packets_and_bytes_are_counted_by_service_and_backend() {
    let mut bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &["pod2"]);
    bed.start_agent_with(&["--service-metrics", "backend"]);
    for vip in WEB {
        (0..5).for_each(|_| drop(ask_http(&bed.cluster.client, http(vip)).unwrap()));
        (0..3).for_each(|_| drop(ask_udp(&bed.cluster.client, udp(vip), 100).unwrap()));
    }
    let settings = bed.cluster.agent_settings(1);
    let shown = agent::ask(&bed.cluster.node1, &settings.bpffs, &["service", "show", "web", "-o", "json"]);
    let page: Value = serde_json::from_slice(&shown.unwrap().stdout).unwrap();
    let echo = page.as_array().unwrap().iter().find(|port| port["portName"] == "echo").unwrap();
    let traffic = &echo["backends"][0]["traffic"];
    // The client has sent three datagrams of 100 bytes, each behind headers of 28 bytes.
    assert_eq!((&traffic["packetsSent"], &traffic["bytesSent"]), (&3.into(), &(3 * 128).into()), "{page:#}");
    // The server adds a line before each datagram.
    assert!(traffic["bytesAnswered"].as_u64().unwrap() > 3 * 128, "{page:#}");

    let pod = bed.cluster.pod("pod2").unwrap();
    let of_echo = r#"namespace="default",service="web",port="echo",protocol="UDP""#;
    let wanted = [
        r#"lb_service_new_flows_total{namespace="default",service="web",port="http",protocol="TCP"} 10"#
            .to_owned(),
        format!("lb_service_new_flows_total{{{of_echo}}} 6"),
        format!(r#"lb_service_packets_total{{{of_echo},direction="answered"}} 6"#),
        format!(r#"lb_service_bytes_total{{{of_echo},direction="sent"}} {}"#, 3 * (128 + 148)),
        format!(
            r#"lb_backend_bytes_total{{{of_echo},backend="{}",direction="sent"}} {}"#,
            pod.udp(WEB[1]),
            3 * 148
        ),
    ];
    let metrics = SocketAddr::from((Ipv4Addr::LOCALHOST, 10249));
    let mut last = String::new();
    let counted = wait_for(LIMIT, || {
        last = get(&bed.cluster.node1, metrics, "/metrics").ok()?.body;
        wanted.iter().all(|line| last.lines().any(|found| found == line)).then_some(())
    });
    let ours: Vec<&str> = last.lines().filter(|line| line.contains("web")).collect();
    assert!(counted.is_some(), "{wanted:#?} is not in {ours:#?}");
}

/// The test replaces the agent by a server that answers on the status socket with something other than a report, as an
/// agent of another version may.
#[test]
fn command_warns_if_it_cannot_read_the_report_of_the_agent() {
    let mut bed = Bed::with_web(&["pod2"]);
    let (node1, bpffs) = (bed.cluster.node1.clone(), bed.cluster.bpffs(1));
    let [to, client] = [http(WEB[0]), SocketAddr::new(CLIENT[0], 40_000)].map(|socket| socket.to_string());
    let commands = [&["explain", "--from", &client, "--to", &to][..], &["service", "show", "default/web"]];
    let warnings = || commands.map(|command| stderr_of(&node1, &bpffs, command));
    assert_eq!(warnings(), ["", ""], "the agent answers");
    bed.agent.take().unwrap().kill().unwrap();
    assert_eq!(warnings(), ["", ""], "no agent runs");

    let path = agent_file(&bpffs, ".sock");
    fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let answering = thread::spawn(move || {
        for _ in 0..2 {
            listener.accept().unwrap().0.write_all(b"not now").unwrap();
        }
    });
    for warning in warnings() {
        assert!(warning.contains("cannot read the report of the agent"), "{warning}");
    }
    answering.join().unwrap();
    fs::remove_file(&path).unwrap();
}

/// The text that a successful command prints on standard error.
fn stderr_of(netns: &Netns, bpffs: &Path, command: &[&str]) -> String {
    String::from_utf8(agent::ask(netns, bpffs, command).unwrap().stderr).unwrap()
}
