//! Errors in manifests, warnings about them, and where they are.

use std::{fmt, path::PathBuf};

use lb_core::rules;

/// How severe a [`Condition`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// The manifest has no effect, or perhaps not the intended one. Errors in an object that defines neither a Service
    /// nor endpoints also have this severity.
    Warning,
    /// The manifest, or a part of it, is rejected; the last good state, if there is one, stays in force.
    Error,
}

/// An error in the folder, or a warning about it; `lb-agent status` lists it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Condition {
    /// Whether the condition is a warning or an error.
    pub severity: Severity,
    /// The file and document that the condition is about.
    pub location: Location,
    /// The object that the condition is about, such as `Service default/web`; `None` if it is unknown.
    pub object: Option<String>,
    /// Path of the field within the object, such as `spec.ports[0].port`; empty for the whole object.
    pub field: String,
    /// The text of the error or warning; for a rule of the API server usually the API server's text.
    pub message: String,
}

impl Condition {
    /// A condition about a whole file, or about the folder.
    pub(super) fn of_file(severity: Severity, file: PathBuf, message: String) -> Self {
        let location = Location { file, document: None };
        Self { severity, location, object: None, field: String::new(), message }
    }
}

/// The folder, file or document of a file that a condition refers to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// Path of the file, or of the folder itself.
    pub file: PathBuf,
    /// The document within the file; `None` for the whole file.
    pub document: Option<DocumentLocation>,
}

/// Where a document is within its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DocumentLocation {
    /// Number of the document, counted from 1, without documents that are empty.
    pub number: usize,
    /// Number of the line on which the document's content starts, from 1.
    pub line: usize,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        match self.document {
            Some(DocumentLocation { number, line }) => write!(f, ", document {number} (line {line})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.location)?;
        if let Some(object) = &self.object {
            write!(f, ", {object}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

/// An error in one field of a document, before it is known where in the file the document is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FieldError {
    /// Path of the field within the document; empty for the whole document.
    pub(super) field: String,
    /// The text of the error.
    pub(super) message: String,
    /// Line and column of a syntax error, counted from 1 within the document's text.
    pub(super) position: Option<(usize, usize)>,
}

impl FieldError {
    pub(super) fn new(field: impl fmt::Display, message: impl fmt::Display) -> Self {
        Self { field: field.to_string(), message: message.to_string(), position: None }
    }

    /// The message of the error, with its line in the file and its column if the error has a position. `first_line` is
    /// the line of the file on which the document's text starts.
    pub(super) fn message_at(&self, first_line: usize) -> String {
        match self.position {
            Some((line, column)) => {
                format!("{} at line {}, column {column}", self.message, first_line + line - 1)
            }
            None => self.message.clone(),
        }
    }
}

/// The errors of one object, with the texts of the API server (`k8s.io/apimachinery/pkg/util/validation/field`).
#[derive(Debug, Default)]
pub(super) struct FieldErrors(pub(super) Vec<FieldError>);

impl FieldErrors {
    pub(super) fn invalid(
        &mut self,
        field: impl fmt::Display,
        value: impl fmt::Debug,
        why: impl fmt::Display,
    ) {
        self.push(field, rules::invalid(value, why));
    }

    pub(super) fn required(&mut self, field: impl fmt::Display, why: &str) {
        self.push(field, rules::required(why));
    }

    pub(super) fn forbidden(&mut self, field: impl fmt::Display, why: impl fmt::Display) {
        self.push(field, rules::forbidden(why));
    }

    pub(super) fn too_many(&mut self, field: impl fmt::Display, count: usize, limit: usize) {
        self.push(field, rules::too_many(count, limit));
    }

    pub(super) fn extend(&mut self, errors: Vec<rules::FieldError>) {
        let errors = errors.into_iter().map(|rules::FieldError { field, why }| FieldError::new(field, why));
        self.0.extend(errors);
    }

    pub(super) fn push(&mut self, field: impl fmt::Display, message: String) {
        self.0.push(FieldError::new(field, message));
    }
}
