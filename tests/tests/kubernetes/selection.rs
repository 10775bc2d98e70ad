//! Label and field selectors, as far as the agent uses them.

use serde_json::Value;

/// Which objects a list or a watch is about.
pub(crate) struct Selection {
    /// Labels that must not be there.
    absent: Vec<String>,
    /// JSON pointer, value, and whether it must be that value or must not.
    field: Option<(String, String, bool)>,
}

impl Selection {
    /// Panics on selectors of any other form than the agent's.
    pub(crate) fn new(labels: &str, field: &str) -> Self {
        let labels = labels.split(',').filter(|label| !label.is_empty());
        let absent = labels.map(|label| label.strip_prefix('!').unwrap().to_owned()).collect();
        let split = |separator, is| field.split_once(separator).map(|(name, value)| (name, value, is));
        let field = split("!=", false).or_else(|| split("=", true));
        let pointer = |name: &str| format!("/{}", name.replace('.', "/"));
        Self { absent, field: field.map(|(name, value, is)| (pointer(name), value.to_owned(), is)) }
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let field = |(pointer, value, is): &(String, String, bool)| {
            (object.pointer(pointer).and_then(Value::as_str).unwrap_or_default() == value) == *is
        };
        self.absent.iter().all(|label| labels.get(label).is_none()) && self.field.as_ref().is_none_or(field)
    }
}
