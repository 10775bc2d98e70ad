//! A package's life in a guest. The other host reaches the Service of Kubernetes' documentation by name, until the
//! package is removed.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::network::OtherHost;
use super::shell::Shell;
use super::{PACKAGE, done};

/// The Service and its endpoint, as Kubernetes' documentation of Services has them.
const SERVICE: &str = include_str!("my-service.yaml");
/// Settings that the administrator adds to those of the package.
const SETTINGS: &str = "dnsBindAddress: [10.1.0.1]\n";
/// The override of the unit that a DNS server at port 53 needs, by docs/package.md.
const OVERRIDE: &str = "[Service]\nCapabilityBoundingSet=CAP_NET_BIND_SERVICE\n";
/// The page that the endpoint of the Service serves.
const ANSWER: &str = "the endpoint of my-service";

/// Plays a package's life: installation, start, crash, hang, upgrade, removal.
pub(super) fn play(guest: &mut Shell, other_host: &OtherHost) -> anyhow::Result<()> {
    other_host.run(&["ip", "route", "add", "10.96.0.0/12", "via", "10.1.0.1"])?;
    guest.run("ip address add 192.0.2.42/32 dev lo")?;
    guest.run(&format!(
        "mkdir -p /srv/www && echo {ANSWER} > /srv/www/index.html && busybox httpd -p 192.0.2.42:9376 -h /srv/www"
    ))?;
    install(guest)?;
    let service = start(guest, other_host)?;
    // Names need the agent; the Service's address does not.
    let under_requests = |what: fn(&mut Shell) -> anyhow::Result<()>, guest: &mut Shell| {
        other_host.request_while(&service, ANSWER, || what(guest))
    };
    let requests = under_requests(crash, guest)?;
    done(&format!("a killed agent fails none of {requests} requests, and systemd starts another one"));
    let requests = under_requests(hang, guest)?;
    done(&format!("a hung agent fails none of {requests} requests, and systemd's watchdog replaces it"));
    let requests = under_requests(upgrade, guest)?;
    done(&format!(
        "an upgrade replaces the agent, fails none of {requests} requests, and keeps the settings"
    ));
    other_host.reach_by_name(ANSWER)?;
    remove(guest)?;
    other_host.expect_no_answer(&service)?;
    done("a removal ends the Service, and leaves nothing in the kernel");
    purge(guest)
}

fn install(guest: &mut Shell) -> anyhow::Result<()> {
    guest.run(&format!("dpkg --install {PACKAGE}"))?;
    for (question, expected) in [("is-enabled", "disabled"), ("is-active", "inactive")] {
        let answer = guest.output(&format!("systemctl {question} lb-agent || true"))?;
        ensure!(answer == expected, "after the installation the unit is {answer}, not {expected}");
    }
    done("the installation starts and enables nothing");
    Ok(())
}

/// Starts the unit. The Service must answer from the moment that `systemctl start` returns. Returns the Service's
/// address.
fn start(guest: &mut Shell, other_host: &OtherHost) -> anyhow::Result<String> {
    guest.write("/etc/lb-agent/services/my-service.yaml", SERVICE)?;
    guest.run(&format!("cat >> /etc/lb-agent/config.yaml <<'END'\n{SETTINGS}END"))?;
    guest.write("/etc/systemd/system/lb-agent.service.d/override.conf", OVERRIDE)?;
    guest.run("systemctl daemon-reload")?;
    let began = Instant::now();
    guest.run("systemctl enable --now lb-agent")?;
    let took = began.elapsed().as_secs();
    let service = other_host.reach_by_name(ANSWER)?;
    done(&format!("`systemctl start` returns after {took} s; another host reaches the Service by name"));
    let status = guest.output("lb-agent status")?;
    ensure!(
        status.lines().any(|line| line.split_whitespace().eq(["Problems", "none"])),
        "`lb-agent status` prints:\n{status}"
    );
    done("`lb-agent status` finds no problem");
    Ok(service)
}

/// Kills the agent, and waits until systemd has started another one.
fn crash(guest: &mut Shell) -> anyhow::Result<()> {
    guest.run("systemctl kill --signal=KILL lb-agent")?;
    restarted(guest, 1)
}

/// Stops the agent's process, as if it hung, and waits until the watchdog has replaced it.
fn hang(guest: &mut Shell) -> anyhow::Result<()> {
    guest.run("systemctl kill --signal=STOP lb-agent")?;
    restarted(guest, 2)
}

/// Waits until systemd has started the unit again `times` times, and the new agent is ready.
fn restarted(guest: &mut Shell, times: u32) -> anyhow::Result<()> {
    let state = format!("NRestarts={times} ActiveState=active SubState=running");
    let question = "systemctl show lb-agent --property=NRestarts,ActiveState,SubState | xargs";
    guest.wait_for(question, &state, Duration::from_secs(300))
}

/// Installs the package over itself: the agent is replaced, and the changed settings stay.
fn upgrade(guest: &mut Shell) -> anyhow::Result<()> {
    let agent = "systemctl show lb-agent --property=MainPID";
    let before = guest.output(agent)?;
    guest.run(&format!("dpkg --install {PACKAGE}"))?;
    guest.wait_for("systemctl is-active lb-agent", "active", Duration::from_secs(300))?;
    ensure!(guest.output(agent)? != before, "the upgrade has not replaced the agent");
    guest.run("grep --quiet dnsBindAddress /etc/lb-agent/config.yaml")
}

/// Removes the package: nothing of it stays in the kernel.
fn remove(guest: &mut Shell) -> anyhow::Result<()> {
    guest.run("dpkg --remove lb-agent")?;
    for (what, question) in [
        ("pins", "ls -A /sys/fs/bpf"),
        ("routes", "ip route show proto 108; ip -6 route show proto 108"),
        ("devices", "ip -oneline link show type bridge"),
        ("qdiscs", "tc qdisc show | grep clsact || true"),
    ] {
        let left = guest.output(question)?;
        ensure!(left.is_empty(), "the removal leaves {what}: {left}");
    }
    guest.run("test -e /etc/lb-agent/config.yaml && ! test -e /usr/bin/lb-agent")
}

/// Purges the package: the settings go, and the manifests stay.
fn purge(guest: &mut Shell) -> anyhow::Result<()> {
    guest.run("dpkg --purge lb-agent")?;
    guest.run("test -e /etc/lb-agent/services/my-service.yaml && ! test -e /etc/lb-agent/config.yaml")?;
    done("a purge removes the settings, and keeps the manifests");
    Ok(())
}
