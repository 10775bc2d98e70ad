//! Checks that the dashboard, the alerts and docs/metrics.md name only metrics that the agent has.
//! (`deploy/lint/check.py` checks that their expressions are valid.)

use std::collections::{BTreeMap, BTreeSet};

use lb_common::{Outcome, Verdict};
use serde_json::Value;

use super::{Described, all_described};

const RULES: &str = include_str!("../../../../deploy/alerts/lb-agent.rules.yaml");
const DASHBOARD: &str = include_str!("../../../../deploy/grafana/lb-agent.json");
const PAGE: &str = include_str!("../../../../docs/metrics.md");

/// Prefixes of the names of the agent's metrics.
const OURS: [&str; 3] = ["lb_", "kubeproxy_", "kubernetes_"];

/// Every PromQL expression in the alerts and the dashboard.
fn expressions() -> Vec<String> {
    let rules: Value = serde_saphyr::from_str(RULES).unwrap();
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let of = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let rules = of(&rules["groups"]).into_iter().flat_map(|group| of(&group["rules"]));
    let mut expressions: Vec<String> = rules.map(|rule| text(&rule["expr"])).collect();
    let panels = of(&dashboard["panels"]).into_iter().flat_map(|panel| of(&panel["targets"]));
    expressions.extend(panels.map(|target| text(&target["expr"])));
    expressions.extend(
        of(&dashboard["templating"]["list"])
            .iter()
            .filter_map(|variable| variable["query"]["query"].as_str().map(str::to_owned)),
    );
    expressions
}

/// The words of an expression. Each may be the name of a metric, a function or a label.
fn words(expression: &str) -> impl Iterator<Item = &str> {
    expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The metric with this name. The name may also be that of a histogram, followed by a suffix that histograms add.
fn find<'a>(metrics: &'a BTreeMap<String, Described>, name: &str) -> Option<&'a Described> {
    let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
    let histogram = histogram.and_then(|name| metrics.get(name)).filter(|metric| metric.kind == "histogram");
    metrics.get(name).or(histogram)
}

#[test]
fn alerts_and_dashboard_use_existing_metrics() {
    let metrics = all_described();
    let mut used = BTreeSet::new();
    let expressions = expressions();
    for expression in &expressions {
        for name in words(expression).filter(|word| OURS.iter().any(|start| word.starts_with(start))) {
            let metric = find(&metrics, name).unwrap_or_else(|| panic!("no metric {name}: {expression}"));
            let is_counter = metric.kind != "gauge";
            let rated = expression.contains("rate(") || expression.contains("increase(");
            assert_eq!(is_counter, is_counter && rated, "{name} is a {}: {expression}", metric.kind);
            used.insert(name.to_owned());
        }
    }
    assert!(expressions.len() > 30 && used.len() > 15, "{} expressions with {used:?}", expressions.len());
}

/// For each matcher on the label `outcome` in an expression: the outcomes that it names.
fn outcomes(expression: &str) -> Vec<BTreeSet<&str>> {
    let matchers = expression.match_indices("outcome=");
    matchers
        .map(|(at, _)| {
            let quoted = expression[at..].split('"').nth(1).unwrap();
            quoted.split('|').collect()
        })
        .collect()
}

#[test]
fn alerts_and_dashboard_name_known_outcomes_and_show_every_drop() {
    let known: BTreeSet<&str> = Outcome::ALL.into_iter().map(Outcome::as_str).collect();
    let drops: BTreeSet<&str> =
        Outcome::ALL.into_iter().filter(|o| o.verdict() == Verdict::Drop).map(Outcome::as_str).collect();
    let expressions = expressions();
    let named: Vec<BTreeSet<&str>> = expressions.iter().flat_map(|text| outcomes(text)).collect();
    for set in &named {
        assert!(set.is_subset(&known), "unknown: {:?}", set.difference(&known));
    }
    assert!(named.contains(&drops), "the dashboard does not show all of {drops:?}");
}

/// The advice in docs/metrics.md: for each paragraph the metrics that it is about, and its text. `lb_x_*` stands for
/// every metric with that prefix which has no paragraph of its own.
fn advice() -> Vec<(Vec<&'static str>, &'static str)> {
    let (_, advice) = PAGE.split_once("\n## When one moves\n").expect("the chapter of advice");
    let lines = advice.lines().filter_map(|line| line.strip_prefix("- `"));
    lines
        .map(|line| line.split_once("`: ").unwrap_or_else(|| panic!("not metrics and their advice: {line}")))
        .map(|(names, text)| (names.split("`, `").collect(), text))
        .collect()
}

fn is_about(pattern: &str, metric: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == metric, |start| metric.starts_with(start))
}

#[test]
fn metrics_page_has_advice_for_every_metric() {
    let (advice, metrics) = (advice(), all_described());
    for metric in metrics.keys() {
        let of = |exactly: bool| {
            let patterns = advice.iter().flat_map(|(patterns, _)| patterns);
            patterns.filter(|p| is_about(p, metric) && (**p == metric) == exactly).count()
        };
        assert!(of(true) == 1 || (of(true), of(false)) == (0, 1), "advice about {metric}");
    }
    for (patterns, text) in &advice {
        assert!(text.len() > 20, "{patterns:?}: {text}");
        let about = |pattern: &&str| metrics.keys().any(|metric| is_about(pattern, metric));
        assert!(patterns.iter().any(about), "advice about no metric: {patterns:?}");
    }
}
