//! `lb-agent ready`: whether the running agent is ready, or alive. Probes run it instead of requesting `/healthz`,
//! because another process, such as a kube-proxy, may have that port and answer in place of the agent.

use std::path::Path;

use anyhow::{Context as _, bail};

use super::output::print;
use crate::daemon::{
    report::Report,
    socket::{self, FOLDER},
};

/// Runs `ready`. `live`: asks only whether the agent is alive.
///
/// # Errors
/// No agent answers, or it is not ready.
pub fn ready(bpffs: &Path, live: bool) -> anyhow::Result<()> {
    let report = report(bpffs, live).with_context(|| {
        format!("cannot read the agent's report from its socket in {FOLDER}: run this as root; if the agent hangs, restart it")
    })?;
    let Some(report) = report else {
        bail!(
            "no agent of the data plane at {} listens on a socket in {FOLDER}: start it; if it runs, see its log",
            bpffs.display()
        );
    };
    let (state, obstacle) = if live { ("alive", stuck(&report)) } else { ("ready", not_ready(&report)) };
    match obstacle {
        Some(reason) => bail!("the agent, pid {}, is not {state}: {reason}", report.pid),
        None => print(&format!("{state}: pid {}, {} service ports\n", report.pid, report.services)),
    }
}

/// The report of the agent of `bpffs`. With `live`, if no agent of `bpffs` listens but exactly one other agent does,
/// the report of the other agent: it may be the agent that the probe means, after the BPF file system of that agent was
/// unmounted or replaced. If the probe failed in that case, kubelet would restart the agent, and the restart would end
/// the data plane that the agent still holds.
fn report(bpffs: &Path, live: bool) -> anyhow::Result<Option<Report>> {
    match socket::ask(bpffs)? {
        None if live => socket::ask_only_one(),
        found => Ok(found),
    }
}

/// Why the agent is not ready; `None` if it is. Unlike the answer of `/healthz`, the reason does not depend on whether
/// load balancers may send traffic to the node: the agent on a node that is about to be removed still serves Services.
fn not_ready(report: &Report) -> Option<String> {
    stuck(report).or_else(|| unsynchronised(report)).or_else(|| unserved(report))
}

/// Why the agent is not alive; `None` if it is.
fn stuck(report: &Report) -> Option<String> {
    let since = report.pending_since.map_or_else(String::new, |since| format!(" since {since}"));
    (!report.alive).then(|| {
        format!("a change waits{since} to be written into the kernel: `lb-agent status` shows what the kernel rejects")
    })
}

fn unsynchronised(report: &Report) -> Option<String> {
    let reason = "the first synchronisation is not complete: `lb-agent status` and the agent's log show what it waits for";
    (!report.healthy).then(|| reason.to_owned())
}

/// Why the agent does not serve `/healthz`; `None` if it does, or need not.
fn unserved(report: &Report) -> Option<String> {
    let healthz = report.healthz.as_ref().filter(|healthz| !healthz.listens)?;
    let untried = || format!("/healthz: the agent does not listen on {} yet: ask again", healthz.address);
    Some(healthz.problem.clone().unwrap_or_else(untried))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::{report::HealthzReport, state::State};

    const HEALTHZ: &str = "0.0.0.0:10256";

    /// The report of an agent that has written all Services and listens for `/healthz`.
    fn good() -> Report {
        Report { synchronised: true, healthy: true, healthz: healthz(true, None), ..starting() }
    }

    fn starting() -> Report {
        State::new("a".to_owned()).report(true)
    }

    fn healthz(listens: bool, problem: Option<&str>) -> Option<HealthzReport> {
        Some(HealthzReport {
            address: HEALTHZ.parse().unwrap(),
            listens,
            problem: problem.map(str::to_owned),
        })
    }

    #[test]
    fn healthy_agent_that_listens_or_need_not_is_ready() {
        for healthz in [healthz(true, None), None] {
            assert_eq!(not_ready(&Report { healthz, ..good() }), None);
        }
        assert_eq!(not_ready(&Report { node_eligible: false, ..good() }), None);
    }

    #[test]
    fn agent_is_not_ready_before_its_first_synchronisation() {
        let reason = not_ready(&starting()).unwrap();
        assert!(reason.contains("the first synchronisation is not complete"), "{reason}");
        assert_eq!(stuck(&starting()), None, "it is alive");
    }

    #[test]
    fn agent_whose_changes_wait_too_long_is_neither_ready_nor_alive() {
        let since = Some("2026-11-21T02:58:58Z".parse().unwrap());
        let late = Report { healthy: false, alive: false, pending_since: since, ..good() };
        for reason in [not_ready(&late), stuck(&late)] {
            let reason = reason.unwrap();
            assert!(reason.contains("waits since 2026-11-21T02:58:58Z"), "{reason}");
        }
    }

    #[test]
    fn agent_is_not_ready_but_alive_while_another_process_has_its_port() {
        let untried = Report { healthz: healthz(false, None), ..good() };
        assert!(not_ready(&untried).unwrap().contains(HEALTHZ));
        let taken = Report { healthz: healthz(false, Some("taken: stop it")), ..good() };
        assert_eq!(not_ready(&taken).as_deref(), Some("taken: stop it"));
        assert_eq!((stuck(&untried), stuck(&taken)), (None, None));
    }
}
