//! The label and field selectors that the mock API server supports: those that the agent and its plugin use.

use serde_json::Value;

/// The criteria of a list or watch, by which objects are selected.
pub(crate) struct Selection {
    /// Names of labels that a selected object does not have.
    absent: Vec<String>,
    /// Labels, with their values, that a selected object has.
    equal: Vec<(String, String)>,
    /// Criterion on a field: JSON pointer, value, and whether the field must (true) or must not (false) have the value.
    field: Option<(String, String, bool)>,
}

impl Selection {
    /// Parses selectors. Panics at label selectors of other forms than `!LABEL` and `LABEL=VALUE`, the only ones in
    /// use.
    pub(crate) fn new(labels: &str, field: &str) -> Self {
        let (mut absent, mut equal) = (Vec::new(), Vec::new());
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            match (label.strip_prefix('!'), label.split_once('=')) {
                (Some(name), _) => absent.push(name.to_owned()),
                (None, Some((name, value))) => equal.push((name.to_owned(), value.to_owned())),
                (None, None) => panic!("the selector {label} is of another form"),
            }
        }
        let split = |separator, is| field.split_once(separator).map(|(name, value)| (name, value, is));
        let field = split("!=", false).or_else(|| split("=", true));
        let pointer = |name: &str| format!("/{}", name.replace('.', "/"));
        Self { absent, equal, field: field.map(|(name, value, is)| (pointer(name), value.to_owned(), is)) }
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let field = |(pointer, value, is): &(String, String, bool)| {
            (object.pointer(pointer).and_then(Value::as_str).unwrap_or_default() == value) == *is
        };
        self.absent.iter().all(|label| labels.get(label).is_none())
            && self.equal.iter().all(|(label, value)| labels[label] == **value)
            && self.field.as_ref().is_none_or(field)
    }
}
