//! Selects the tests that run in a guest.

use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::binaries::TestBinary;

/// Path of the plan in the guest.
pub(super) const PLAN: &str = "/plan.json";

/// Modules to load at boot: those of a node, and those that a node loads on first use. The guest's kernel calls
/// modprobe for all others.
const MODULES: [&str; 14] = [
    "virtio_pci",
    "virtio_net",
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

/// Test binaries in the order of their runs, those with the most specific failures first.
const ORDER: [&str; 5] = ["packet", "datapath", "netns", "cli", "kubernetes"];

/// The tests of a short run in addition to `packet`: each attach mode once, and tests that depend on the kernel.
/// Each takes a minute or two under emulated Linux 6.1, most of it in the verifier. A name stands for all tests that
/// begin with it.
const SHORT: [&str; 14] = [
    "datapath::attachment::clsact_qdisc_is_removed_unless_others_use_it",
    "datapath::attachment::tcx_programs_run_first_at_ingress_and_last_at_egress",
    "netns::announce::address_on_a_bond",
    "netns::announce::lone_node_answers_for_the_addresses_of_its_services_only",
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

/// Tests of `packet` that a short run leaves out: in an emulated machine they take half a minute to five minutes, and
/// what they check does not depend on the kernel. A name stands for all tests that begin with it.
const LONG: [&str; 5] = [
    "packet::explain::explain_agrees_with_the_programs",
    "packet::full::flow_without_a_free_source_port_is_dropped",
    "packet::full::full_conntrack_drops_new_flows_and_keeps_existing_ones",
    "packet::life::unanswered_syn_tries_another_backend",
    "packet::random::random_flows_are_translated_in_both_directions",
];

/// If a run shares the tests of a short run between two kernels, the oldest kernel runs these: tests of the verifier,
/// and of what the programs do with the kernel's helpers. The other kernel runs the rest. A name stands for all tests
/// that begin with it.
const OF_THE_OLDEST: [&str; 15] = [
    "packet::decapsulate::",
    "packet::early::",
    "packet::events::",
    "packet::filter::",
    "packet::fragments::",
    "packet::headers::",
    "packet::icmp::",
    "packet::link_layer::",
    "packet::next_hop::",
    "packet::proxy_protocol::",
    "packet::reject::",
    "packet::tunnel::",
    "packet::verifier::",
    "packet::xdp::",
    "datapath::attachment::clsact_qdisc_is_removed_unless_others_use_it",
];

/// The namespace tests of a run that shares its tests between two kernels. In CI such a run has the debug build of the
/// agent, which is too slow for other namespace tests in an emulated machine. A name stands for all tests that begin
/// with it.
const SHARED_WITH_AGENT: &str = "netns::balancing::";

/// Tests that only guests run, and only if a run is full or names them: they take minutes in an emulated machine. Their
/// guests have [network cards](super::wire).
const WITH_CARDS: &str = "netns::virtio::";

/// Tests that never run in a guest, and why. A name stands for all tests that begin with it.
const NOT_IN_A_GUEST: [(&str, &str); 4] = [
    ("netns::attack_rates::", "it measures time"),
    ("netns::flow_log::throughput", "it measures time"),
    ("netns::testbed::dropped_cluster_leaves_nothing_behind", "it measures time"),
    ("netns::web::", "a browser would take minutes to start"),
];

/// The tests to run. Tests of [`NOT_IN_A_GUEST`] are skipped in any case.
pub(super) enum Extent {
    /// The guest runs all tests.
    Full,
    /// `packet` without [`LONG`], and [`SHORT`].
    Short,
    /// The guest runs the tests whose names contain one of these texts.
    Named(Vec<String>),
}

/// The modules and tests of a guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) modules: Vec<String>,
    pub(super) binaries: Vec<Binary>,
}

impl Plan {
    /// The part of the plan for one kernel of a run that shares its tests between two kernels: for the oldest kernel if
    /// `is_oldest`, else for the other one.
    pub(super) fn share(&self, is_oldest: bool) -> Self {
        let mut share = self.clone();
        for Binary { name, tests, skipped } in &mut share.binaries {
            let is_shared = |test: &str| {
                let name = full_name(name, test);
                let is_of_the_oldest = OF_THE_OLDEST.iter().any(|begin| name.starts_with(begin));
                let is_fast = !name.starts_with("netns::") || name.starts_with(SHARED_WITH_AGENT);
                is_fast && is_of_the_oldest == is_oldest
            };
            tests.retain(|test| is_shared(test));
            skipped.retain(|(test, _)| is_shared(test));
        }
        share.binaries.retain(|binary| !binary.tests.is_empty());
        share
    }

    /// Whether a test of the plan uses the guest's network cards.
    pub(super) fn needs_cards(&self) -> bool {
        let mut binaries = self.binaries.iter();
        binaries.any(|binary| binary.tests.iter().any(|test| binary.full_name(test).starts_with(WITH_CARDS)))
    }
}

/// The tests of one test program that the guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Binary {
    pub(super) name: String,
    /// Tests to run, in the order of libtest.
    pub(super) tests: Vec<String>,
    /// Tests that are skipped, and why.
    pub(super) skipped: Vec<(String, String)>,
}

impl Binary {
    /// The full name of a test: `netns::sockets::…`
    pub(super) fn full_name(&self, test: &str) -> String {
        full_name(&self.name, test)
    }

    /// The first of these tests that the guest does not run, except tests of [`NOT_IN_A_GUEST`] and [`WITH_CARDS`].
    fn first_without<'a>(&self, tests: &'a [String]) -> Option<&'a String> {
        let is_known = |test: &String| {
            let name = self.full_name(test);
            name.starts_with(WITH_CARDS) || reason_to_skip(&name).is_some() || self.tests.contains(test)
        };
        tests.iter().find(|test| !is_known(test))
    }
}

fn full_name(binary: &str, test: &str) -> String {
    format!("{binary}::{test}")
}

/// Lists the tests of the binaries and selects those to run.
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
                "only guests run {left_out}, and no short run does: add it to the short list in xtask/src/vm/plan.rs"
            );
        }
        chosen.push(of_binary);
    }
    ensure!(binaries.len() == ORDER.len(), "lb-tests has a test binary that is not among {ORDER:?}");
    if let Extent::Short = extent {
        for pattern in SHORT {
            let known = chosen
                .iter()
                .any(|binary| binary.tests.iter().any(|test| binary.full_name(test).starts_with(pattern)));
            ensure!(known, "no test begins with {pattern}");
        }
    }
    chosen.retain(|binary| !binary.tests.is_empty());
    ensure!(!chosen.is_empty(), "no test name contains what --test asks for");
    Ok(Plan { modules: MODULES.map(str::to_owned).to_vec(), binaries: chosen })
}

fn choose(extent: &Extent, binary: &str, tests: Vec<String>) -> Binary {
    let mut chosen = Binary { name: binary.to_owned(), tests: Vec::new(), skipped: Vec::new() };
    for test in tests {
        let name = full_name(binary, &test);
        let wanted = match extent {
            Extent::Full => true,
            Extent::Short => is_short(binary, &name),
            Extent::Named(parts) => parts.iter().any(|part| name.contains(part.as_str())),
        };
        if !wanted {
            continue;
        }
        match reason_to_skip(&name) {
            Some(reason) => chosen.skipped.push((test, reason.to_owned())),
            None => chosen.tests.push(test),
        }
    }
    chosen
}

fn is_short(binary: &str, full_name: &str) -> bool {
    let is_one_of = |names: &[&str]| names.iter().any(|name| full_name.starts_with(name));
    binary == "packet" && !is_one_of(&LONG) || is_one_of(&SHORT)
}

/// Why a test never runs in a guest; `None` if it can run.
fn reason_to_skip(full_name: &str) -> Option<&'static str> {
    NOT_IN_A_GUEST.iter().find(|(not, _)| full_name.starts_with(not)).map(|(_, reason)| *reason)
}

/// All tests of a binary, including those marked `#[ignore]`; if `more` contains `--ignored`, only the marked ones.
fn list(binary: &TestBinary, more: &[&str]) -> anyhow::Result<Vec<String>> {
    let output = Command::new(&binary.path).args(["--list", "--format=terse"]).args(more).output();
    let output = output.with_context(|| format!("cannot start {}", binary.path.display()))?;
    ensure!(output.status.success(), "{} --list failed: {}", binary.path.display(), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn chosen(extent: &Extent, binary: &str, tests: &[&str]) -> (Vec<String>, Vec<String>) {
        let chosen = choose(extent, binary, tests.iter().map(|test| (*test).to_owned()).collect());
        (chosen.tests, chosen.skipped.into_iter().map(|(name, _)| name).collect())
    }

    #[test]
    fn named_tests_are_chosen() {
        let named = Extent::Named(vec!["sctp".to_owned()]);
        let tests = ["sctp::flow", "icmp::ping"];
        assert_eq!(chosen(&named, "packet", &tests), (vec!["sctp::flow".to_owned()], vec![]));
        let tests = ["sctp::a", "testbed::dropped_cluster_leaves_nothing_behind"];
        assert_eq!(chosen(&Extent::Short, "netns", &tests), (vec!["sctp::a".to_owned()], vec![]));
        let tests_of_packets = ["full::full_conntrack_drops_new_flows_and_keeps_existing_ones", "icmp::ping"];
        assert_eq!(
            chosen(&Extent::Short, "packet", &tests_of_packets),
            (vec!["icmp::ping".to_owned()], vec![])
        );
        let (run, skipped) = chosen(&Extent::Full, "netns", &tests);
        assert_eq!((run.len(), skipped.len()), (1, 1));
    }

    #[test]
    fn shared_tests_run_on_one_kernel() {
        let tests = SHORT.into_iter().chain(["packet::icmp::ping", "packet::life::begin"]);
        let names = tests.map(|test| test.split_once("::").unwrap());
        let binaries = names.map(|(binary, test)| choose(&Extent::Full, binary, vec![test.to_owned()]));
        let plan = Plan { modules: Vec::new(), binaries: binaries.collect() };
        let [oldest, others] = [true, false].map(|is_oldest| plan.share(is_oldest).binaries);
        assert!(!oldest.is_empty() && !others.is_empty());
        let shared = |binary: &&Binary| binary.name != "netns" || binary.tests[0].starts_with("balancing");
        assert_eq!(oldest.len() + others.len(), plan.binaries.iter().filter(shared).count());
        assert!(others.iter().all(|binary| !oldest.contains(binary)));
    }

    #[test]
    fn modules_of_the_oldest_kernel_have_tests() {
        let folder = ebpf_build::workspace_root().join("tests/tests/packet");
        for module in OF_THE_OLDEST.iter().filter_map(|name| name.strip_prefix("packet::")) {
            let module = module.trim_end_matches(':');
            let files = [format!("{module}.rs"), format!("{module}/mod.rs")];
            let text: String =
                files.iter().flat_map(|file| std::fs::read_to_string(folder.join(file))).collect();
            assert!(text.contains("#[test]"), "{module}");
        }
    }

    /// Without this check, a renamed test would be noticed only when a guest runs.
    #[test]
    fn listed_tests_exist() {
        let folder = ebpf_build::workspace_root().join("tests/tests");
        for name in SHORT.into_iter().chain(LONG).chain(NOT_IN_A_GUEST.map(|(name, _)| name)) {
            let mut parts = name.split("::");
            let [binary, module, test] = [(); 3].map(|()| parts.next().unwrap_or_default());
            let of_module = |end: &str| folder.join(binary).join(format!("{module}{end}"));
            let files = [".rs", "/mod.rs"].map(|end| std::fs::read_to_string(of_module(end)));
            let text: String = files.into_iter().flatten().collect();
            assert!(text.contains("#[test]"), "{name}: its module has no tests");
            assert!(test.is_empty() || text.contains(&format!("fn {test}")), "{name}: not in its module");
        }
    }

    #[test]
    fn tests_that_only_guests_run_must_be_in_the_short_list() {
        let named = |tests: &[&str]| tests.iter().map(|test| (*test).to_owned()).collect::<Vec<_>>();
        let short = choose(&Extent::Short, "netns", named(&["clock::a", "bed::b"]));
        assert_eq!(short.first_without(&named(&["clock::a"])), None);
        assert_eq!(short.first_without(&named(&["clock::a", "bed::b"])).unwrap(), "bed::b");
        assert_eq!(short.first_without(&named(&["flow_log::throughput"])), None, "no guest runs it");
    }

    /// The tests marked `#[ignore]` in this file, or in the files below this folder. Their names begin with `module`.
    fn ignored(path: &Path, module: &str) -> Vec<String> {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
            let below = |path: PathBuf| {
                let stem = path.file_stem().unwrap().to_str().unwrap();
                let is_of_module = ["main", "mod"].contains(&stem);
                let module = if is_of_module { module.to_owned() } else { format!("{module}{stem}::") };
                ignored(&path, &module)
            };
            return entries.flat_map(below).collect();
        }
        let text = std::fs::read_to_string(path).unwrap();
        let name = |part: &str| Some(part.split_once("fn ")?.1.split_once('(')?.0.to_owned());
        let names = text.split("#[ignore").skip(1).map(|part| name(part).unwrap());
        names.map(|name| format!("{module}{name}")).collect()
    }

    #[test]
    fn ignored_tests_are_found_in_subfolders() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, test: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("#[test]\n#[ignore = \"slow\"]\nfn {test}() {{}}\n")).unwrap();
        };
        write("main.rs", "a");
        write("web/mod.rs", "b");
        write("web/pages.rs", "c");
        let mut found = ignored(folder.path(), "");
        found.sort();
        assert_eq!(found, ["a", "web::b", "web::pages::c"]);
    }

    /// Without this check, an ignored test that is not listed would be noticed only after all tests of a CI run.
    #[test]
    fn each_ignored_test_is_listed() {
        let folder = ebpf_build::workspace_root().join("tests/tests");
        let mut count = 0;
        for binary in ORDER {
            let file = folder.join(format!("{binary}.rs"));
            let source = if file.exists() { file } else { folder.join(binary) };
            let tests = ignored(&source, "");
            let short = choose(&Extent::Short, binary, tests.clone());
            assert_eq!(short.first_without(&tests), None, "of {binary}");
            count += tests.len();
        }
        assert!(count > 0, "no test is marked #[ignore]");
    }
}
