//! Which tests run in a guest.

use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::image::TestBinary;

/// Where the plan is in the guest.
pub(super) const PLAN: &str = "/plan.json";

/// Modules that a node has loaded, or that the first use of something loads there. Whatever else is needed the guest's kernel
/// asks modprobe for.
const MODULES: [&str; 12] = [
    "veth",
    "vrf",
    "bridge",
    "dummy",
    "8021q",
    "tun",
    "sch_ingress",
    "cls_bpf",
    "nf_tables",
    "sctp",
    "ip_vs",
    "udp_diag",
];

/// Binaries in the order in which they run: what fails first says most.
const ORDER: [&str; 5] = ["packet", "datapath", "netns", "cli", "kubernetes"];

/// What runs besides all of `packet` where time is short: each way of attaching once, and what depends on the kernel. Each costs
/// a minute or two under Linux 6.1, emulated, most of it in the verifier. A name stands for all tests that begin with it.
const SHORT: [&str; 12] = [
    "datapath::our_own_qdisc_goes_with_us",
    "datapath::we_come_first_at_ingress_and_last_at_egress",
    "netns::balancing::replies_come_from_the_virtual_address",
    "netns::clock::",
    "netns::devices::vlan_device",
    "netns::ipvs::",
    "netns::kube_ipvs::",
    "netns::agent_restart::cleanup_leaves_nothing_behind",
    "netns::masquerade::masquerade_follows_cluster_cidr_masquerade_all_and_traffic_policies",
    "netns::sctp::",
    "netns::sockets::processes_of_the_node_reach_local_and_remote_backends",
    "netns::xdp::xdp_forwards_external_clients_to_remote_backends_bypassing_the_stack",
];

/// Tests that say nothing in an emulated machine.
const NOT_IN_A_GUEST: [(&str, &str); 1] =
    [("netns::testbed::dropped_cluster_leaves_nothing_behind", "it measures time")];

/// How much of the tests.
pub(super) enum Extent {
    /// All.
    Full,
    /// What fits into the time that CI has.
    Short,
    /// Those with one of these in their names.
    Named(Vec<String>),
}

/// What the guest is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) modules: Vec<String>,
    pub(super) binaries: Vec<Binary>,
}

/// Tests of one binary.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Binary {
    pub(super) name: String,
    /// To be run, in the order in which libtest runs them.
    pub(super) tests: Vec<String>,
    /// Not to be run, and why.
    pub(super) skipped: Vec<(String, String)>,
}

impl Binary {
    /// `netns::sockets::…`; the tests of `packet` have their binary's name already.
    pub(super) fn full_name(&self, test: &str) -> String {
        full_name(&self.name, test)
    }

    /// The first of these that neither runs nor has a reason not to.
    fn first_without<'a>(&self, tests: &'a [String]) -> Option<&'a String> {
        let is_known = |test: &String| {
            self.tests.contains(test) || self.skipped.iter().any(|(skipped, _)| skipped == test)
        };
        tests.iter().find(|test| !is_known(test))
    }
}

fn full_name(binary: &str, test: &str) -> String {
    if test.starts_with(&format!("{binary}::")) { test.to_owned() } else { format!("{binary}::{test}") }
}

/// Asks the binaries for their tests and chooses.
pub(super) fn plan(extent: &Extent, binaries: &[TestBinary]) -> anyhow::Result<Plan> {
    let mut chosen = Vec::new();
    for name in ORDER {
        let binary = binaries.iter().find(|binary| binary.name == name);
        let binary = binary.with_context(|| format!("lb-tests has no test binary {name}"))?;
        let of_binary = choose(extent, name, list(binary, &[])?);
        if let Extent::Short = extent
            && let Some(left_out) = of_binary.first_without(&list(binary, &["--ignored"])?)
        {
            bail!(
                "only guests run {left_out}: name it among the tests of the short list, or nothing runs it"
            );
        }
        chosen.push(of_binary);
    }
    ensure!(binaries.len() == ORDER.len(), "lb-tests has a test binary that {ORDER:?} does not name");
    if let Extent::Short = extent {
        for pattern in SHORT {
            let known = chosen
                .iter()
                .any(|binary| binary.tests.iter().any(|test| binary.full_name(test).starts_with(pattern)));
            ensure!(known, "no test begins with {pattern}");
        }
    }
    chosen.retain(|binary| !binary.tests.is_empty());
    ensure!(!chosen.is_empty(), "no test has such a name");
    Ok(Plan { modules: MODULES.map(str::to_owned).to_vec(), binaries: chosen })
}

fn choose(extent: &Extent, binary: &str, tests: Vec<String>) -> Binary {
    let mut chosen = Binary { name: binary.to_owned(), tests: Vec::new(), skipped: Vec::new() };
    for test in tests {
        let name = full_name(binary, &test);
        let wanted = match extent {
            Extent::Full => true,
            Extent::Short => binary == "packet" || SHORT.iter().any(|short| name.starts_with(short)),
            Extent::Named(parts) => parts.iter().any(|part| name.contains(part.as_str())),
        };
        if !wanted {
            continue;
        }
        match NOT_IN_A_GUEST.iter().find(|(not, _)| name == *not) {
            Some((_, reason)) => chosen.skipped.push((test, (*reason).to_owned())),
            None => chosen.tests.push(test),
        }
    }
    chosen
}

/// What a test binary has, also what is ignored elsewhere; with `--ignored` only that.
fn list(binary: &TestBinary, more: &[&str]) -> anyhow::Result<Vec<String>> {
    let output = Command::new(&binary.path).args(["--list", "--format=terse"]).args(more).output();
    let output = output.with_context(|| format!("cannot start {}", binary.path.display()))?;
    ensure!(output.status.success(), "{} --list failed: {}", binary.path.display(), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(extent: &Extent, binary: &str, tests: &[&str]) -> (Vec<String>, Vec<String>) {
        let chosen = choose(extent, binary, tests.iter().map(|test| (*test).to_owned()).collect());
        (chosen.tests, chosen.skipped.into_iter().map(|(name, _)| name).collect())
    }

    #[test]
    fn what_is_chosen_by_name() {
        let named = Extent::Named(vec!["sctp".to_owned()]);
        let tests = ["packet::sctp::flow", "packet::icmp::ping"];
        assert_eq!(chosen(&named, "packet", &tests), (vec!["packet::sctp::flow".to_owned()], vec![]));
        let tests = ["sctp::a", "testbed::dropped_cluster_leaves_nothing_behind"];
        assert_eq!(chosen(&Extent::Short, "netns", &tests), (vec!["sctp::a".to_owned()], vec![]));
        let (run, skipped) = chosen(&Extent::Full, "netns", &tests);
        assert_eq!((run.len(), skipped.len()), (1, 1));
    }

    #[test]
    fn what_only_guests_run_has_to_be_in_the_short_list() {
        let named = |tests: &[&str]| tests.iter().map(|test| (*test).to_owned()).collect::<Vec<_>>();
        let short = choose(&Extent::Short, "netns", named(&["clock::a", "bed::b"]));
        assert_eq!(short.first_without(&named(&["clock::a"])), None);
        assert_eq!(short.first_without(&named(&["clock::a", "bed::b"])).unwrap(), "bed::b");
    }
}
