//! The parts of BIRD's configuration that come from names and texts of objects. BIRD has no escapes, so these types
//! hold no character that could end their token.

use std::fmt;

use crate::model::ObjectName;

/// A text that BIRD can read between quotation marks; shown with them.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Quoted(String);

impl Quoted {
    /// `None` for a text with a quotation mark or a control character, such as the end of a line.
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

/// The name of an object within a comment or a symbol. Any character but letters, digits and dots is written as a
/// hyphen, which changes no valid name.
pub(super) struct Word<'a>(pub(super) &'a str);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let safe = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        self.0.chars().map(safe).try_for_each(|c| fmt::Write::write_char(f, c))
    }
}

/// `namespace/name` for a comment.
pub(super) fn comment(name: &ObjectName) -> String {
    format!("{}/{}", Word(&name.namespace), Word(&name.name))
}

/// The name of a peer's protocol in BIRD's configuration. A namespace has no dots, so different peers have different symbols.
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
