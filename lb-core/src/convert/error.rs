//! Errors in an object, and the part of it that can still be served.

use std::{fmt::Debug, net::IpAddr};

use crate::{
    model::{ObjectName, Protocol},
    rules,
};

/// An error in a field of an object: the field is invalid, or the agent does not support it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} \"{object}\" is invalid: {field}: {why}")]
pub struct ConvertError {
    /// Kind of the object.
    pub kind: &'static str,
    /// `namespace/name` of the object.
    pub object: String,
    /// Path of the field, such as `spec.ports[0].port`.
    pub field: String,
    /// Why the field is invalid or unsupported, in the format of the API server's errors.
    pub why: String,
}

/// The part of an object that can be served. As in kube-proxy, invalid parts such as an address are left out and the
/// rest of the object is served. A source whose user can correct the object calls [`whole`](Self::whole), which rejects
/// an object with invalid parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted<T> {
    /// The part of the object that can be served.
    pub value: T,
    /// The errors in the fields that were left out.
    pub left_out: Vec<ConvertError>,
}

impl<T> Converted<T> {
    /// Applies a function to the value.
    pub fn map<U>(self, into: impl FnOnce(T) -> U) -> Converted<U> {
        Converted { value: into(self.value), left_out: self.left_out }
    }

    /// The object, if nothing of it was left out.
    ///
    /// # Errors
    ///
    /// The first error of the fields that were left out.
    pub fn whole(self) -> Result<T, ConvertError> {
        self.left_out.into_iter().next().map_or(Ok(self.value), Err)
    }
}

impl<T> From<T> for Converted<T> {
    fn from(value: T) -> Self {
        Self { value, left_out: Vec::new() }
    }
}

/// Kind and name of an object, to build errors about its fields.
pub(crate) struct Object {
    kind: &'static str,
    name: String,
}

impl Object {
    pub(crate) fn new(kind: &'static str, name: &ObjectName) -> Self {
        Self { kind, name: name.to_string() }
    }

    pub(crate) fn invalid(&self, field: impl Into<String>, value: impl Debug, why: &str) -> ConvertError {
        self.error(field, rules::invalid(value, why))
    }

    pub(crate) fn required(&self, field: impl Into<String>, why: &str) -> ConvertError {
        self.error(field, rules::required(why))
    }

    pub(crate) fn duplicate(&self, field: impl Into<String>, value: impl Debug) -> ConvertError {
        self.error(field, rules::duplicate(value))
    }

    pub(crate) fn unsupported(&self, field: impl Into<String>, value: &str, known: &[&str]) -> ConvertError {
        self.error(field, rules::unsupported(value, known))
    }

    pub(crate) fn error(&self, field: impl Into<String>, why: String) -> ConvertError {
        ConvertError { kind: self.kind, object: self.name.clone(), field: field.into(), why }
    }

    pub(crate) fn port(&self, field: String, value: i32) -> Result<u16, ConvertError> {
        rules::port_number(value).map_err(|why| self.invalid(field, value, why))
    }

    pub(crate) fn ip(&self, field: String, text: &str) -> Result<IpAddr, ConvertError> {
        rules::stored_ip(text).map_err(|why| self.invalid(field, text, why))
    }

    pub(crate) fn endpoint_ip(&self, field: String, text: &str) -> Result<IpAddr, ConvertError> {
        let ip = self.ip(field.clone(), text)?;
        rules::endpoint_ip(ip).map_err(|why| self.invalid(field, text, why))?;
        Ok(ip)
    }

    pub(crate) fn protocol(&self, field: String, name: &str) -> Result<Protocol, ConvertError> {
        rules::protocol(name).ok_or_else(|| self.unsupported(field, name, &rules::PROTOCOLS))
    }
}

/// The items of a list that are set and valid; adds the errors of the invalid items to `left_out`.
pub(super) fn readable<T>(
    parts: impl Iterator<Item = Result<Option<T>, ConvertError>>,
    left_out: &mut Vec<ConvertError>,
) -> Vec<T> {
    let mut found = Vec::new();
    for part in parts {
        match part {
            Ok(part) => found.extend(part),
            Err(error) => left_out.push(error),
        }
    }
    found
}
