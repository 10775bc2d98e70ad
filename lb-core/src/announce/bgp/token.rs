//! Types for the parts of BIRD's configuration that come from texts and names of objects. BIRD has no escapes, so these
//! types display no character that could end their token.

use std::fmt;

use crate::model::ObjectName;

/// A text that BIRD can read between quotation marks; displayed with them.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Quoted(String);

impl Quoted {
    /// `None` for a text with a quotation mark or a control character (such as a line break), which BIRD cannot quote.
    pub(super) fn new(text: &str) -> Option<Self> {
        let is_safe = !text.chars().any(|c| c == '"' || c.is_control());
        is_safe.then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for Quoted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// The name of an object, for a comment or a symbol. Displays every character except letters, digits and dots as a
/// hyphen, which changes no valid name.
pub(super) struct Word<'a>(pub(super) &'a str);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let safe = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        self.0.chars().map(safe).try_for_each(|c| fmt::Write::write_char(f, c))
    }
}

/// `namespace/name` of an object, for a comment.
pub(super) fn comment(name: &ObjectName) -> String {
    format!("{}/{}", Word(&name.namespace), Word(&name.name))
}

/// The name of BIRD's protocol for a peer. A namespace contains no dots, so different peers have different names.
pub(super) fn symbol(name: &ObjectName) -> String {
    format!("'{}.{}'", Word(&name.namespace), Word(&name.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_contain_nothing_that_ends_them() {
        let name = ObjectName::new("a\n}", "b'\"c;#.d-1");
        assert_eq!(comment(&name), "a--/b--c--.d-1");
        assert_eq!(symbol(&name), "'a--.b--c--.d-1'");
        assert_eq!(Quoted::new("a b'#;}").unwrap().to_string(), "\"a b'#;}\"");
        for text in ["\"", "a\n", "a\r", "\0", "\u{85}"] {
            assert!(Quoted::new(text).is_none(), "{text:?}");
        }
    }
}
