//! Finds netfilter rules that are meant for packets to Services and never match them: the programs translate these
//! packets before any netfilter hook, and the kernel's conntrack has no entry for the translation.
//!
//! The search is conservative: it names a rule only if the rule seems to be meant for such packets alone. It ignores a
//! missing tool, and reports a tool that fails.

mod iptables;
mod nftables;

use std::{fmt, ops::RangeInclusive};

use lb_datapath::{Probe, ProbeResult};

use crate::leftovers::{self, ToolError};

/// The range of node ports that an API server uses by default.
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// A netfilter rule of the host, and why it never matches the packets that it is meant for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HostRule {
    /// The rule: for iptables as `iptables-save` prints it, for nftables its table, chain and handle.
    rule: String,
    flaw: Flaw,
}

/// A property by which a rule selects packets. Packets to Services never have this property in netfilter, because the
/// programs have translated them before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// A node port as destination port. The rule never matches, because the programs replace the port before netfilter
    /// sees the packet.
    NodePort,
    /// A local destination address: the rule is meant to mark packets to node ports, but their destination is already
    /// an endpoint.
    LocalDestination,
    /// The DNAT state of a connection in the kernel's conntrack. No connection to a Service has this state, because
    /// conntrack does not see the programs' translation.
    Dnat,
}

impl Flaw {
    const fn text(self) -> &'static str {
        match self {
            Self::NodePort => {
                "packets to node ports are translated before netfilter, so it never matches them: use --deny-source, or \
                 match the endpoint's address and port, or serve clients at a load balancer's address with \
                 loadBalancerSourceRanges"
            }
            Self::LocalDestination => {
                "packets to node ports have an endpoint as destination here, so it never marks them: route replies by \
                 rules for the pods' addresses (ip rule from POD)"
            }
            Self::Dnat => {
                "packets to Services are not translated by the kernel's conntrack, so it never accepts them: accept the \
                 pods' networks as source and destination"
            }
        }
    }
}

impl fmt::Display for HostRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.flaw.text())
    }
}

/// The result of a search.
#[derive(Debug, Default, PartialEq, Eq)]
struct Findings {
    rules: Vec<HostRule>,
    /// One line for each tool that failed, or whose output is unreadable, so that its rules are unknown.
    errors: Vec<String>,
}

impl Findings {
    /// Judges the outputs of the save commands of iptables, and of `nft -j list ruleset`.
    fn of(saved: Vec<(&str, Result<String, ToolError>)>, ruleset: Result<Option<String>, ToolError>) -> Self {
        let mut findings = Self::default();
        let mut has_iptables_nft = false;
        for (tool, text) in saved {
            match text {
                Ok(text) => {
                    has_iptables_nft |= tool.contains("nft");
                    findings.rules.extend(iptables::flawed(tool.trim_end_matches("-save"), &text));
                }
                Err(ToolError { command, reason }) => findings.errors.push(unknown(&command, &reason)),
            }
        }
        match ruleset.map(|text| nftables::flawed(&text.unwrap_or_default(), has_iptables_nft)) {
            Ok(Ok(rules)) => findings.rules.extend(rules),
            Ok(Err(reason)) => findings.errors.push(unknown("nft -j list ruleset", &reason)),
            Err(ToolError { command, reason }) => findings.errors.push(unknown(&command, &reason)),
        }
        findings
    }

    fn lines(&self) -> Vec<String> {
        self.rules.iter().map(ToString::to_string).chain(self.errors.iter().cloned()).collect()
    }

    fn probe(&self) -> Probe {
        let lines = self.lines();
        let (result, detail, advice) = if lines.is_empty() {
            (ProbeResult::Ok, "none that expects untranslated packets to Services".to_owned(), "")
        } else {
            let advice = "see docs/limits.md, \"Rules of the host\"";
            (ProbeResult::Degraded, lines.join("\n"), advice)
        };
        Probe { name: "netfilter rules", result, detail, advice }
    }
}

fn unknown(command: &str, reason: &str) -> String {
    format!(
        "cannot tell whether rules of the host match packets to Services: `{command}` fails: {reason}; run it by hand"
    )
}

fn search() -> Findings {
    Findings::of(leftovers::saved_rules(), leftovers::nft_ruleset())
}

/// Describes each rule of this network namespace that is meant for packets to Services and never matches them, and each
/// tool that cannot list its rules.
pub fn find() -> Vec<String> {
    search().lines()
}

/// Runs the search as a probe of `lb-agent check`.
pub fn probe() -> Probe {
    search().probe()
}

fn are_node_ports(ports: &RangeInclusive<u16>) -> bool {
    NODE_PORTS.contains(ports.start()) && NODE_PORTS.contains(ports.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(command: &str) -> ToolError {
        ToolError { command: command.to_owned(), reason: "exit status: 4: Permission denied".to_owned() }
    }

    #[test]
    fn tool_that_fails_degrades_the_probe_and_hides_no_rules_of_others() {
        let none = Findings::of(vec![("iptables-save", Ok(String::new()))], Ok(None));
        assert_eq!(none.probe().result, ProbeResult::Ok, "nft is not installed");

        let without_nft = Findings::of(Vec::new(), Err(failed("nft -j list ruleset"))).probe();
        assert_eq!(without_nft.result, ProbeResult::Degraded);
        assert!(
            without_nft.detail.contains("`nft -j list ruleset` fails: exit status: 4: Permission denied"),
            "{without_nft:?}"
        );

        let garbled = Findings::of(Vec::new(), Ok(Some("Error: JSON support not compiled-in".to_owned())));
        assert_eq!(garbled.probe().result, ProbeResult::Degraded);
        assert!(garbled.errors[0].contains("no JSON"), "{garbled:?}");

        let rules = "*raw\n-A PREROUTING -p tcp --dport 30080 -j DROP\nCOMMIT\n".to_owned();
        let saved = vec![("ip6tables-save", Err(failed("ip6tables-save"))), ("iptables-save", Ok(rules))];
        let partly = Findings::of(saved, Ok(None));
        assert_eq!((partly.rules.len(), partly.errors.len()), (1, 1), "{partly:?}");
    }
}
