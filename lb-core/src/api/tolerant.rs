//! Deserializers for fields of API objects. JSON `null` reads as the zero value, as in the Go types of the API server.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;

/// Deserializes a field whose type is no `Option`: `null` reads as the zero value of the type.
pub(super) fn value<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Deserializes a string that error messages must never contain, such as a password.
pub(super) fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text)),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            Err(serde::de::Error::custom("has another type than expected; quote a text of digits"))
        }
    }
}

/// Deserializes a list: `null` is no list, and a `null` item is the zero value of its type.
pub(super) fn list<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    let items: Option<Vec<Option<T>>> = Option::deserialize(deserializer)?;
    Ok(items.map(|items| items.into_iter().map(Option::unwrap_or_default).collect()))
}

/// Deserializes a list of strings of which only some matter: an item of another type becomes an empty string.
pub(super) fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let items: Option<Vec<Value>> = Option::deserialize(deserializer)?;
    let text = |item| if let Value::String(text) = item { text } else { String::new() };
    Ok(items.into_iter().flatten().map(text).collect())
}

/// Deserializes a field in which a value of an unexpected type counts as absent, so that it does not make the whole
/// object unreadable.
pub(super) fn lenient<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    Ok(serde_json::from_value(Value::deserialize(deserializer)?).ok())
}

/// Deserializes a map of strings, such as labels: a value `null` is the empty string, as in Go; values of other types
/// are left out. Anything but a map counts as absent.
pub(super) fn text_map<'de, D>(deserializer: D) -> Result<Option<BTreeMap<String, String>>, D::Error>
where
    D: Deserializer<'de>,
{
    let Value::Object(map) = Value::deserialize(deserializer)? else { return Ok(None) };
    let text = |(key, value)| match value {
        Value::String(text) => Some((key, text)),
        Value::Null => Some((key, String::new())),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => None,
    };
    Ok(Some(map.into_iter().filter_map(text).collect()))
}

/// Deserializes to true if the field has any value other than `null`.
pub(super) fn is_present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(!Value::deserialize(deserializer)?.is_null())
}
