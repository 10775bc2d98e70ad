//! Chains of kube-proxy in iptables, and the jumps to them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use super::{Leftover, Order, output_of};

/// Tools of both kinds of iptables; a node may have rules of both.
const TOOLS: [(&str, &str); 4] = [
    ("iptables-nft-save", "iptables-nft-restore"),
    ("ip6tables-nft-save", "ip6tables-nft-restore"),
    ("iptables-legacy-save", "iptables-legacy-restore"),
    ("ip6tables-legacy-save", "ip6tables-legacy-restore"),
];
/// Tools of a node with one kind only.
const PLAIN_TOOLS: [(&str, &str); 2] =
    [("iptables-save", "iptables-restore"), ("ip6tables-save", "ip6tables-restore")];

/// Chains that kube-proxy creates once. (KUBE-FIREWALL, KUBE-MARK-DROP, KUBE-KUBELET-CANARY and KUBE-IPTABLES-HINT are
/// kubelet's.)
const CHAINS: [&str; 13] = [
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-FORWARD",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-LOAD-BALANCER",
    "KUBE-MARK-MASQ",
    "KUBE-NODE-PORT",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-PROXY-CANARY",
    "KUBE-PROXY-FIREWALL",
    "KUBE-SERVICES",
    "KUBE-SOURCE-RANGES-FIREWALL",
];
/// Prefixes of chains for a service port or an endpoint; 16 characters of a hash follow.
const PREFIXES: [&str; 6] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"];
const HASH: usize = 16;

pub(super) fn find() -> Vec<Leftover> {
    let has_kinds = TOOLS.iter().any(|(save, _)| output_of(save, &[]).is_some());
    let tools = if has_kinds { &TOOLS[..] } else { &PLAIN_TOOLS[..] };
    let mut found = Vec::new();
    for (save, restore) in tools {
        let text = output_of(save, &[]).unwrap_or_default();
        for (table, removal) in
            tables(&text).into_iter().filter_map(|(name, table)| Some((name, removal(name, &table)?)))
        {
            let Removal { chains, jumps, input } = removal;
            let order = Order { input, ..Order::new(restore, &["--noflush"]) };
            let tool = save.trim_end_matches("-save");
            found.push(Leftover {
                what: format!("{chains} chains of {tool}'s table `{table}` with {jumps} jumps to them"),
                orders: vec![order],
            });
        }
    }
    found
}

/// A table as `iptables-save` prints it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Table<'a> {
    /// Names of the chains, and whether each is built in.
    chains: BTreeMap<&'a str, bool>,
    /// The rules, as `-A CHAIN …`.
    rules: Vec<&'a str>,
}

/// The removal of kube-proxy's chains from a table, in one transaction.
#[derive(Debug, PartialEq, Eq)]
struct Removal {
    chains: usize,
    jumps: usize,
    input: String,
}

fn tables(text: &str) -> Vec<(&str, Table<'_>)> {
    let mut tables: Vec<(&str, Table<'_>)> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            tables.push((name, Table::default()));
            continue;
        }
        let Some((_, table)) = tables.last_mut() else { continue };
        if let Some((chain, rest)) = line.strip_prefix(':').and_then(|chain| chain.split_once(' ')) {
            table.chains.insert(chain, !rest.starts_with('-'));
        } else if line.starts_with("-A ") {
            table.rules.push(line);
        }
    }
    tables
}

/// The removal of kube-proxy's chains from a table; `None` without such chains.
fn removal(name: &str, table: &Table<'_>) -> Option<Removal> {
    let mut chains: BTreeSet<&str> = table
        .chains
        .iter()
        .filter(|(chain, built_in)| !**built_in && is_kube_proxys(chain))
        .map(|(chain, _)| *chain)
        .collect();
    keep_what_others_use(table, &mut chains);
    let (mut jumps, mut input) = (0, format!("*{name}\n"));
    // Writing to a String never fails. A declaration empties an existing chain.
    chains.iter().for_each(|chain| writeln!(input, ":{chain} - [0:0]").unwrap_or_default());
    for rule in &table.rules {
        if !chains.contains(chain_of(rule)) && target_of(rule).is_some_and(|target| chains.contains(target)) {
            writeln!(input, "-D{}", &rule[2..]).unwrap_or_default();
            jumps += 1;
        }
    }
    chains.iter().for_each(|chain| writeln!(input, "-X {chain}").unwrap_or_default());
    input.push_str("COMMIT\n");
    (!chains.is_empty()).then_some(Removal { chains: chains.len(), jumps, input })
}

/// Keeps chains that chains of other programs jump to, and all chains that these jump to in turn.
fn keep_what_others_use<'a>(table: &Table<'a>, chains: &mut BTreeSet<&'a str>) {
    loop {
        let is_used = |rule: &&&'a str| {
            let from = chain_of(rule);
            !chains.contains(from) && table.chains.get(from) == Some(&false)
        };
        let used: Vec<&str> = table
            .rules
            .iter()
            .filter(is_used)
            .filter_map(|rule| target_of(rule))
            .filter(|target| chains.contains(*target))
            .collect();
        if used.is_empty() {
            return;
        }
        used.iter().for_each(|chain| {
            chains.remove(*chain);
        });
    }
}

fn is_kube_proxys(chain: &str) -> bool {
    let is_hash = |rest: &str| {
        rest.len() == HASH && rest.bytes().all(|octet| octet.is_ascii_uppercase() || octet.is_ascii_digit())
    };
    CHAINS.contains(&chain) || PREFIXES.iter().any(|prefix| chain.strip_prefix(prefix).is_some_and(is_hash))
}

/// The chain that a rule is in.
fn chain_of(rule: &str) -> &str {
    rule.split(' ').nth(1).unwrap_or_default()
}

/// The target of a rule. Quoted words, such as those of a comment, are skipped.
fn target_of(rule: &str) -> Option<&str> {
    let mut words = words(rule).into_iter();
    words.find(|word| ["-j", "-g", "--jump", "--goto"].contains(word))?;
    words.next()
}

/// The words of a rule; a quoted text, perhaps with spaces, is one word.
fn words(rule: &str) -> Vec<&str> {
    let (mut words, mut rest) = (Vec::new(), rest_of(rule));
    while !rest.is_empty() {
        let end =
            if rest.starts_with('"') { end_of_quoted(rest) } else { rest.find(' ').unwrap_or(rest.len()) };
        words.push(&rest[..end]);
        rest = rest_of(&rest[end..]);
    }
    words
}

fn rest_of(text: &str) -> &str {
    text.trim_start_matches(' ')
}

/// The offset after the closing quotation mark of a quoted text; a backslash escapes the next character.
fn end_of_quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = r#"# Generated by iptables-nft-save
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [1:60]
:CNI-HOSTPORT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POD-FW-ABCDEFGHIJKLMNOP - [0:0]
:KUBE-SEP-ABCDEFGHIJKLMNO1 - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ABCDEFGHIJKLMNO2 - [0:0]
-A PREROUTING -m comment --comment "kubernetes \"service\" portals -j CNI-HOSTPORT" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "mine, not -j KUBE-SERVICES" -j CNI-HOSTPORT
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A CNI-HOSTPORT -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.2:80
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-ABCDEFGHIJKLMNO2
-A KUBE-SVC-ABCDEFGHIJKLMNO2 -j KUBE-SEP-ABCDEFGHIJKLMNO1
-A KUBE-SEP-ABCDEFGHIJKLMNO1 -s 10.1.0.9/32 -j KUBE-MARK-MASQ
COMMIT
*mangle
:PREROUTING ACCEPT [0:0]
:KUBE-IPTABLES-HINT - [0:0]
COMMIT
"#;

    #[test]
    fn chains_of_kube_proxy_go_with_the_jumps_to_them_and_nothing_else_does() {
        let tables = tables(SAVED);
        let [(nat, of_nat), (mangle, of_mangle)] = &tables[..] else { panic!("{tables:?}") };
        let removal = removal(nat, of_nat).unwrap();
        assert_eq!((removal.chains, removal.jumps), (4, 2));
        let expected = r#"*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-SEP-ABCDEFGHIJKLMNO1 - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ABCDEFGHIJKLMNO2 - [0:0]
-D PREROUTING -m comment --comment "kubernetes \"service\" portals -j CNI-HOSTPORT" -j KUBE-SERVICES
-D OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-X KUBE-MARK-MASQ
-X KUBE-SEP-ABCDEFGHIJKLMNO1
-X KUBE-SERVICES
-X KUBE-SVC-ABCDEFGHIJKLMNO2
COMMIT
"#;
        assert_eq!(removal.input, expected);
        assert_eq!(super::removal(mangle, of_mangle), None);
    }

    #[test]
    fn a_chain_that_a_chain_of_others_leads_to_stays_with_what_it_leads_to() {
        let used = SAVED.replace(
            "-A CNI-HOSTPORT -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.2:80",
            "-A CNI-HOSTPORT -g KUBE-SVC-ABCDEFGHIJKLMNO2",
        );
        let tables = tables(&used);
        let removal = removal("nat", &tables[0].1).unwrap();
        assert_eq!((removal.chains, removal.jumps), (1, 2), "{}", removal.input);
        assert!(removal.input.contains("-X KUBE-SERVICES"), "{}", removal.input);
    }
}
