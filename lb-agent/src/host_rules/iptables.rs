//! Reads iptables rules in the format of `iptables-save`.

use std::ops::RangeInclusive;

use super::{Flaw, HostRule, are_node_ports};

/// The rules in the output of `iptables-save` that are meant for packets to Services and never match them.
pub(super) fn flawed(tool: &str, text: &str) -> Vec<HostRule> {
    let mut table = "";
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        } else if let Some(flaw) = flaw(table, line) {
            found.push(HostRule { rule: format!("{tool} -t {table} {line}"), flaw });
        }
    }
    found
}

fn flaw(table: &str, line: &str) -> Option<Flaw> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let chain = words.strip_prefix(&["-A"])?.first()?;
    // These chains belong to kube-proxy or kubelet; [leftovers](crate::leftovers) reports those of kube-proxy.
    if chain.starts_with("KUBE-") {
        return None;
    }
    let value = |option: &str| {
        let at = words.iter().position(|word| *word == option)?;
        let negated = at > 0 && words[at - 1] == "!";
        words.get(at + 1).copied().filter(|_| !negated)
    };
    let target = value("-j").unwrap_or_default();
    match table {
        "raw" | "mangle" if !["OUTPUT", "FORWARD", "POSTROUTING"].contains(chain) => {
            let ports = value("--dport").or_else(|| value("--dports"));
            if ports.is_some_and(|ports| ports.split(',').all(is_node_port)) {
                return Some(Flaw::NodePort);
            }
            let marks = matches!(target, "MARK" | "CONNMARK");
            (marks && value("--dst-type") == Some("LOCAL")).then_some(Flaw::LocalDestination)
        }
        "filter" if target == "ACCEPT" => {
            let states = value("--ctstate")?;
            states.split(',').all(|state| state == "DNAT").then_some(Flaw::Dnat)
        }
        _ => None,
    }
}

/// Whether all ports of a match, `PORT` or `FIRST:LAST`, are in the default range of node ports.
fn is_node_port(text: &str) -> bool {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    let range = || Some(RangeInclusive::new(first.parse().ok()?, last.parse().ok()?));
    range().is_some_and(|range| are_node_ports(&range))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_expect_untranslated_packets_are_named() {
        for (table, line, expected) in [
            ("mangle", "-A PREROUTING -p tcp -m tcp --dport 30080 -j DROP", Some(Flaw::NodePort)),
            ("raw", "-A blocked -p udp -m udp --dport 30000:30010 -j DROP", Some(Flaw::NodePort)),
            (
                "raw",
                "-A PREROUTING -p tcp -m multiport --dports 30001,30003:30005 -j DROP",
                Some(Flaw::NodePort),
            ),
            ("raw", "-A PREROUTING -p tcp -m multiport --dports 80,30001 -j DROP", None),
            ("raw", "-A PREROUTING -p tcp -m tcp ! --dport 30080 -j DROP", None),
            ("raw", "-A PREROUTING -p tcp -m tcp --dport 1024:65535 -j DROP", None),
            ("raw", "-A OUTPUT -p tcp -m tcp --dport 30080 -j DROP", None),
            ("filter", "-A INPUT -p tcp -m tcp --dport 30080 -j DROP", None),
            ("nat", "-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-X", None),
            ("filter", "-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT", Some(Flaw::Dnat)),
            ("filter", "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", None),
            ("filter", "-A FORWARD -m conntrack ! --ctstate DNAT -j ACCEPT", None),
            (
                "mangle",
                "-A PREROUTING -i eth0 -m comment --comment \"AWS, primary ENI\" -m addrtype --dst-type LOCAL \
                 --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80",
                Some(Flaw::LocalDestination),
            ),
            ("mangle", "-A PREROUTING -i eni+ -j CONNMARK --restore-mark", None),
            ("mangle", ":PREROUTING ACCEPT [0:0]", None),
            ("mangle", "-A", None),
        ] {
            assert_eq!(flaw(table, line), expected, "{table}: {line}");
        }
    }

    #[test]
    fn rule_is_named_with_tool_and_table() {
        let text = "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp --dport 30080 -j DROP\nCOMMIT\n";
        let rule = "iptables-nft -t raw -A PREROUTING -p tcp --dport 30080 -j DROP".to_owned();
        assert_eq!(flawed("iptables-nft", text), [HostRule { rule, flaw: Flaw::NodePort }]);
    }
}
