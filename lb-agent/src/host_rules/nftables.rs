//! Reads nftables rules in the format of `nft -j list ruleset` (libnftables-json(5)).

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Flaw, HostRule, are_node_ports};

/// Names of tables that iptables-nft creates; `iptables-save` shows their rules in full.
const OF_IPTABLES: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];
/// Name of kube-proxy's table, which [leftovers](crate::leftovers) reports as a whole.
const OF_KUBE_PROXY: &str = "kube-proxy";

/// The rules in a ruleset that are meant for packets to Services and never match them. `without_iptables` leaves out
/// tables of iptables-nft.
///
/// # Errors
/// The text is no ruleset; the error says why. An empty text is the ruleset of a kernel without nftables.
pub(super) fn flawed(text: &str, without_iptables: bool) -> Result<Vec<HostRule>, String> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let ruleset: Value =
        serde_json::from_str(text).map_err(|error| format!("its output is no JSON: {error}"))?;
    let objects = ruleset["nftables"].as_array().ok_or("its output has no list `nftables`")?;
    let objects = || objects.iter();
    let text = |object: &Value, field: &str| object[field].as_str().unwrap_or_default().to_owned();
    let chain_of =
        |object: &Value, name: &str| (text(object, "family"), text(object, "table"), text(object, name));
    let hooks: BTreeMap<_, _> = objects()
        .filter_map(|object| object.get("chain"))
        .map(|chain| (chain_of(chain, "name"), text(chain, "hook")))
        .collect();
    let mut found = Vec::new();
    for rule in objects().filter_map(|object| object.get("rule")) {
        let key = chain_of(rule, "chain");
        let (family, table, chain) = &key;
        let is_iptables = without_iptables && OF_IPTABLES.contains(&&**table) && family.starts_with("ip");
        if is_iptables || table == OF_KUBE_PROXY {
            continue;
        }
        // A chain without a hook may be the target of a jump from any hook, so the search treats it as a chain of
        // every hook.
        let hook = hooks.get(&key).map_or("", String::as_str);
        if let Some(flaw) = flaw(hook, rule["expr"].as_array().map_or(&[], Vec::as_slice)) {
            let rule = format!("nft {family} {table} {chain}, rule with handle {}", rule["handle"]);
            found.push(HostRule { rule, flaw });
        }
    }
    Ok(found)
}

fn flaw(hook: &str, statements: &[Value]) -> Option<Flaw> {
    let has = |name: &str| statements.iter().any(|statement| statement.get(name).is_some());
    let matches = |test: &dyn Fn(&Value, &Value) -> bool| {
        let positive = |compare: &&Value| matches!(compare["op"].as_str(), Some("==" | "in"));
        let compares = statements.iter().filter_map(|statement| statement.get("match"));
        compares.filter(positive).any(|compare| test(&compare["left"], &compare["right"]))
    };
    if matches!(hook, "" | "ingress" | "prerouting") {
        let is_port = |left: &Value| left["payload"]["field"] == "dport";
        let acts = has("drop") || has("reject") || has("mangle") || has("limit");
        if acts && matches(&|left, right| is_port(left) && is_node_port(right)) {
            return Some(Flaw::NodePort);
        }
        let is_type = |left: &Value| {
            left["fib"]["result"] == "type"
                && left["fib"]["flags"].as_array().is_some_and(|flags| flags.contains(&"daddr".into()))
        };
        if has("mangle") && matches(&|left, right| is_type(left) && right == "local") {
            return Some(Flaw::LocalDestination);
        }
    }
    let is_status = |left: &Value| left["ct"]["key"] == "status";
    let is_dnat = matches!(hook, "" | "forward")
        && has("accept")
        && matches(&|left, right| {
            is_status(left) && (right == "dnat" || *right == Value::from(vec!["dnat"]))
        });
    is_dnat.then_some(Flaw::Dnat)
}

/// Whether all ports of a match (port, range or set) are in the default range of node ports. False for a named set,
/// whose elements the rule does not show.
fn is_node_port(right: &Value) -> bool {
    let port = |value: &Value| u16::try_from(value.as_u64()?).ok();
    if let Some(port) = port(right) {
        return are_node_ports(&(port..=port));
    }
    if let Some([first, last]) = right["range"].as_array().map(Vec::as_slice) {
        return matches!((port(first), port(last)), (Some(first), Some(last)) if are_node_ports(&(first..=last)));
    }
    right["set"].as_array().is_some_and(|set| !set.is_empty() && set.iter().all(is_node_port))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The JSON of a ruleset with one rule, in a chain with this hook.
    fn ruleset(hook: &str, expr: &str) -> String {
        format!(
            r#"{{"nftables": [{{"metainfo": {{}}}}, {{"chain": {{"family": "inet", "table": "t", "name": "c", "hook": "{hook}"}}}},
            {{"rule": {{"family": "inet", "table": "t", "chain": "c", "handle": 7, "expr": [{expr}]}}}}]}}"#
        )
    }

    #[test]
    fn rules_that_expect_untranslated_packets_are_named() {
        let compare = |left: &str, op: &str, right: &str, verdict: &str| {
            format!(
                r#"{{"match": {{"op": "{op}", "left": {left}, "right": {right}}}}}, {{"{verdict}": null}}"#
            )
        };
        let port = r#"{"payload": {"protocol": "tcp", "field": "dport"}}"#;
        let status = r#"{"ct": {"key": "status"}}"#;
        let local = r#"{"fib": {"result": "type", "flags": ["daddr"]}}"#;
        for (hook, expr, expected) in [
            ("prerouting", compare(port, "==", "30080", "drop"), Some(Flaw::NodePort)),
            ("ingress", compare(port, "==", r#"{"range": [30000, 30010]}"#, "drop"), Some(Flaw::NodePort)),
            (
                "",
                compare(port, "==", r#"{"set": [30080, {"range": [31000, 31005]}]}"#, "reject"),
                Some(Flaw::NodePort),
            ),
            ("prerouting", compare(port, "==", r#"{"set": [80, 30080]}"#, "drop"), None),
            ("prerouting", compare(port, "!=", "30080", "drop"), None),
            ("prerouting", compare(port, "==", r#""@blocked""#, "drop"), None),
            ("prerouting", compare(port, "==", "30080", "accept"), None),
            ("input", compare(port, "==", "30080", "drop"), None),
            ("forward", compare(status, "in", r#""dnat""#, "accept"), Some(Flaw::Dnat)),
            ("forward", compare(status, "in", r#"["dnat"]"#, "accept"), Some(Flaw::Dnat)),
            ("forward", compare(status, "in", r#"["dnat", "snat"]"#, "accept"), None),
            ("postrouting", compare(status, "in", r#""dnat""#, "accept"), None),
            ("prerouting", compare(local, "==", r#""local""#, "mangle"), Some(Flaw::LocalDestination)),
            ("prerouting", compare(local, "==", r#""local""#, "accept"), None),
        ] {
            let found = flawed(&ruleset(hook, &expr), true).unwrap();
            assert_eq!(found.first().map(|rule| rule.flaw), expected, "{hook}: {expr}");
            let rule = "nft inet t c, rule with handle 7";
            assert!(found.iter().all(|found| found.rule == rule), "{found:?}");
        }
    }

    #[test]
    fn text_that_is_no_ruleset_is_an_error() {
        assert_eq!(flawed("", true), Ok(Vec::new()), "a kernel without nftables");
        for (text, expected) in [
            ("table inet t {}", "no JSON"),
            (r#"{"nftables": ["#, "no JSON"),
            (r#"{"tables": []}"#, "no list"),
        ] {
            let error = flawed(text, true).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
