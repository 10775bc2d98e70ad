//! Finds netfilter rules that are meant for packets to Services and never match them: the programs translate these
//! packets before any netfilter hook, and the kernel's conntrack has no entry for the translation.
//!
//! The search is conservative: it names a rule only if the rule seems to be meant for such packets alone. It ignores a
//! missing tool; the search for [leftovers](crate::leftovers) reports a tool that fails.

mod iptables;
mod nftables;

use std::{fmt, ops::RangeInclusive};

use lb_datapath::{Probe, ProbeResult};

use crate::leftovers;

/// The range of node ports that an API server uses by default.
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// A netfilter rule of the host, and why it never matches the packets that it is meant for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HostRule {
    /// The rule as its tool shows it.
    rule: String,
    flaw: Flaw,
}

/// What a rule matches on: a property that packets to Services do not have any more when they reach netfilter, because
/// the programs have translated them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// A node port as destination port: the programs have replaced it.
    NodePort,
    /// A local destination address, by which the rule marks packets to node ports.
    LocalDestination,
    /// The DNAT state of a connection in the kernel's conntrack, which does not see the programs' translation.
    Dnat,
}

impl Flaw {
    const fn text(self) -> &'static str {
        match self {
            Self::NodePort => {
                "packets to node ports are translated before netfilter, so it never matches them: use --deny-source or \
                 loadBalancerSourceRanges, or match the endpoint's address and port"
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

/// Describes each rule of this network namespace that is meant for packets to Services and never matches them.
pub fn find() -> Vec<String> {
    let saved = leftovers::saved_rules();
    let has_iptables_nft = saved.iter().any(|(tool, _)| tool.contains("nft"));
    let mut rules: Vec<HostRule> = saved
        .iter()
        .flat_map(|(tool, text)| iptables::flawed(tool.trim_end_matches("-save"), text))
        .collect();
    if let Some(text) = leftovers::nft_ruleset() {
        rules.extend(nftables::flawed(&text, has_iptables_nft));
    }
    rules.iter().map(ToString::to_string).collect()
}

/// Runs the search as a probe of `lb-agent check`.
pub fn probe() -> Probe {
    let lines = find();
    let (result, detail, advice) = if lines.is_empty() {
        (ProbeResult::Ok, "none that expects untranslated packets to Services".to_owned(), "")
    } else {
        let advice = "see docs/limits.md, \"Rules of the host\"";
        (ProbeResult::Degraded, lines.join("\n"), advice)
    };
    Probe { name: "netfilter rules", result, detail, advice }
}

fn are_node_ports(ports: &RangeInclusive<u16>) -> bool {
    NODE_PORTS.contains(ports.start()) && NODE_PORTS.contains(ports.end())
}
