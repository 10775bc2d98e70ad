//! Finds chains of kube-proxy in iptables, and the jumps to them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Findings, Invocation, Leftover, ToolError, output_of};

/// Names of the tool that prints rules (`…-save`) and of the one that changes them (`…-restore`).
pub(super) type Tools = (&'static str, &'static str);

/// The tools of both variants of iptables, nft and legacy; a node may have rules of both.
const TOOLS: [Tools; 4] = [
    ("iptables-nft-save", "iptables-nft-restore"),
    ("ip6tables-nft-save", "ip6tables-nft-restore"),
    ("iptables-legacy-save", "iptables-legacy-restore"),
    ("ip6tables-legacy-save", "ip6tables-legacy-restore"),
];
/// The tools of a node with only one variant of iptables.
const PLAIN_TOOLS: [Tools; 2] =
    [("iptables-save", "iptables-restore"), ("ip6tables-save", "ip6tables-restore")];

/// Chains of kube-proxy with fixed names. (KUBE-FIREWALL, KUBE-MARK-DROP, KUBE-KUBELET-CANARY and KUBE-IPTABLES-HINT
/// are kubelet's.)
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

pub(super) fn find(findings: &mut Findings) {
    for (tools, text) in saved() {
        match text {
            Ok(text) => findings.leftovers.extend(leftovers(tools, &text)),
            Err(error) => findings.errors.push(error),
        }
    }
}

/// The installed tools, each with the output of its save command.
pub(super) fn saved() -> Vec<(Tools, Result<String, ToolError>)> {
    let listed = list(&TOOLS);
    if listed.is_empty() { list(&PLAIN_TOOLS) } else { listed }
}

/// Those of `tools` that are installed, each with the output of its save command.
fn list(tools: &[Tools]) -> Vec<(Tools, Result<String, ToolError>)> {
    let text = |tools: &Tools| Some((*tools, output_of(tools.0, &[]).transpose()?));
    tools.iter().filter_map(text).collect()
}

fn leftovers((save, restore): Tools, text: &str) -> Vec<Leftover> {
    let tool = save.trim_end_matches("-save");
    let leftover = |(name, table): (&str, Table<'_>)| {
        let Removal { chains, jumps, input } = removal(name, &table)?;
        Some(Leftover {
            what: format!("{chains} chains of {tool}'s table `{name}` with {jumps} jumps to them"),
            removal: vec![Invocation { input, ..Invocation::new(restore, &["--noflush"]) }],
        })
    };
    tables(text).into_iter().filter_map(leftover).collect()
}

/// A table of iptables in the format of `iptables-save`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Table<'a> {
    /// Names of the table's chains, and whether each is built in.
    chains: BTreeMap<&'a str, bool>,
    /// The table's rules, each as `-A CHAIN …`.
    rules: Vec<&'a str>,
}

/// How to remove kube-proxy's chains from one table, in one transaction.
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

/// Plans the removal of kube-proxy's chains from a table; `None` if the table has no such chain that can be removed.
fn removal(name: &str, table: &Table<'_>) -> Option<Removal> {
    let mut chains: BTreeSet<&str> = table
        .chains
        .iter()
        .filter(|(chain, built_in)| !**built_in && is_kube_proxys(chain))
        .map(|(chain, _)| *chain)
        .collect();
    keep_what_others_use(table, &mut chains);
    let declared = chains.iter().map(|chain| format!(":{chain} - [0:0]\n"));
    let foreign = |rule: &&&str| !chains.contains(chain_of(rule));
    let is_jump = |rule: &&&str| target_of(rule).is_some_and(|target| chains.contains(target));
    let jumps: Vec<String> = table
        .rules
        .iter()
        .filter(foreign)
        .filter(is_jump)
        .map(|rule| format!("-D{}\n", &rule[2..]))
        .collect();
    let deleted = chains.iter().map(|chain| format!("-X {chain}\n"));
    // To `iptables-restore`, a line `:CHAIN` means to empty an existing chain.
    let lines: String = declared.chain(jumps.iter().cloned()).chain(deleted).collect();
    let input = format!("*{name}\n{lines}COMMIT\n");
    (!chains.is_empty()).then_some(Removal { chains: chains.len(), jumps: jumps.len(), input })
}

/// Removes from `chains` (the chains to delete) every chain that user-defined chains of other programs use, directly or
/// through other chains.
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
        rest.len() == HASH && rest.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
    };
    CHAINS.contains(&chain) || PREFIXES.iter().any(|prefix| chain.strip_prefix(prefix).is_some_and(is_hash))
}

/// Name of the chain that contains the rule `-A CHAIN …`.
fn chain_of(rule: &str) -> &str {
    let rest = rule.strip_prefix("-A ").unwrap_or(rule);
    rest.split_once(' ').map_or(rest, |(chain, _)| chain)
}

/// The target of a rule, such as a chain or `ACCEPT`. Skips quoted texts such as comments, which may look like options.
fn target_of(rule: &str) -> Option<&str> {
    let mut words = words(rule).into_iter();
    words.find(|word| ["-j", "-g", "--jump", "--goto"].contains(word))?;
    words.next()
}

/// Splits a rule into words; a quoted text, which may contain spaces, is one word.
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

/// Offset behind the closing quotation mark of a text that begins with a quoted part; a backslash escapes a character.
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
    fn removal_deletes_only_chains_of_kube_proxy_and_jumps_to_them() {
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
    fn chains_that_foreign_chains_use_are_kept() {
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
