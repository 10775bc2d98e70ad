//! Kubernetes' label selectors.

use std::collections::BTreeMap;

use crate::api;

/// The labels of an object.
pub type Labels = BTreeMap<String, String>;

/// A label selector: which objects it selects. Without requirements it selects all.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    DoesNotExist(String),
}

impl Selector {
    /// Converts a selector of the API; the error has the name of an invalid field, and why it is invalid.
    pub(crate) fn new(selector: &api::LabelSelector) -> Result<Self, (String, String)> {
        let labels = selector.match_labels.iter().flatten();
        let mut all: Vec<Requirement> =
            labels.map(|(key, value)| Requirement::In(key.clone(), vec![value.clone()])).collect();
        for (index, expression) in selector.match_expressions.iter().flatten().enumerate() {
            let requirement = Requirement::new(expression);
            all.push(
                requirement.map_err(|(field, why)| (format!("matchExpressions[{index}].{field}"), why))?,
            );
        }
        Ok(Self(all))
    }

    /// Whether the selector selects an object with these labels.
    pub fn selects(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    fn new(expression: &api::LabelSelectorRequirement) -> Result<Self, (&'static str, String)> {
        const OPERATORS: [&str; 4] = ["DoesNotExist", "Exists", "In", "NotIn"];
        let key = expression.key.clone();
        let values = expression.values.clone().unwrap_or_default();
        let takes_values = matches!(expression.operator.as_str(), "In" | "NotIn");
        if !OPERATORS.contains(&expression.operator.as_str()) {
            return Err(("operator", crate::rules::unsupported(&expression.operator, &OPERATORS)));
        }
        if takes_values == values.is_empty() {
            let must = if takes_values { "must be specified" } else { "may not be specified" };
            return Err(("values", format!("{must} when `operator` is '{}'", expression.operator)));
        }
        Ok(match expression.operator.as_str() {
            "In" => Self::In(key, values),
            "NotIn" => Self::NotIn(key, values),
            "Exists" => Self::Exists(key),
            _ => Self::DoesNotExist(key),
        })
    }

    fn holds(&self, labels: &Labels) -> bool {
        match self {
            Self::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Self::Exists(key) => labels.contains_key(key),
            Self::DoesNotExist(key) => !labels.contains_key(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> api::LabelSelector {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn selector_selects_by_all_of_its_requirements() {
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        let labels = Labels::from([("app".to_owned(), "web".to_owned()), ("tier".to_owned(), String::new())]);
        for (of, selects) in [
            (json!({}), true),
            (json!({"matchLabels": {"app": "web"}}), true),
            (json!({"matchLabels": {"app": "web", "tier": "x"}}), false),
            (expression("app", "In", &["db", "web"]), true),
            (expression("zone", "In", &["a"]), false),
            (expression("zone", "NotIn", &["a"]), true),
            (expression("app", "NotIn", &["web"]), false),
            (expression("tier", "Exists", &[]), true),
            (expression("zone", "Exists", &[]), false),
            (expression("zone", "DoesNotExist", &[]), true),
            (expression("app", "DoesNotExist", &[]), false),
        ] {
            assert_eq!(Selector::new(&read(of.clone())).unwrap().selects(&labels), selects, "{of}");
        }
    }

    #[test]
    fn invalid_expressions_are_refused_with_their_field() {
        for (of, field) in [
            (json!({"matchExpressions": [{"key": "a", "operator": "Is"}]}), "matchExpressions[0].operator"),
            (json!({"matchExpressions": [{"key": "a", "operator": "In"}]}), "matchExpressions[0].values"),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}),
                "matchExpressions[0].values",
            ),
        ] {
            assert_eq!(Selector::new(&read(of)).unwrap_err().0, field);
        }
    }
}
