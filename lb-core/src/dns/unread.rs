//! Objects that cannot be read: their names are neither found nor denied.

use std::collections::BTreeSet;

use super::index::DEFAULT_NAMESPACE;
use crate::model::ObjectName;

/// What is known about objects that exist, or may exist, and cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Whether there may be an object of any name, for example in a file that cannot be read.
    pub anything: bool,
    /// Services with an object that cannot be read.
    pub services: BTreeSet<ObjectName>,
    /// Words of manifests that define objects of unknown names. An object's name and namespace are words of its
    /// manifest.
    pub words: Words,
}

/// Words that may be names.
pub type Words = BTreeSet<Box<str>>;

/// The words of a manifest that may be names; `None` if it may contain names that are spelled in another way.
pub fn words(manifest: &str) -> Option<Words> {
    /// Escapes of YAML and JSON that can spell a letter or join two words, and the tag of base64.
    const HIDING: [&str; 6] = ["\\x", "\\u", "\\U", "\\\n", "\\\r", "!binary"];
    if HIDING.iter().any(|hiding| manifest.contains(hiding)) {
        return None;
    }
    // A word with a dot, an underscore or a slash is an address, a path or a key such as app.kubernetes.io/name, and no
    // name.
    let is_part = |character: char| character.is_ascii_alphanumeric() || "-._/".contains(character);
    let is_label = |word: &&str| {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=63).contains(&word.len()) && word.bytes().all(allowed)
    };
    Some(manifest.split(|character| !is_part(character)).filter(is_label).map(Box::from).collect())
}

impl Unread {
    /// Whether everything has been read.
    pub fn is_empty(&self) -> bool {
        !self.anything && self.services.is_empty() && self.words.is_empty()
    }

    /// Whether an object that cannot be read may have the name with these labels below the cluster domain, or a name
    /// below it.
    pub(super) fn may_have(&self, labels: &[&str]) -> bool {
        match labels {
            [.., service, namespace, "svc"] => self.may_have_service(namespace, service),
            [namespace, "svc" | "pod"] | [_, namespace, "pod"] => self.may_have_namespace(namespace),
            _ => false,
        }
    }

    fn may_have_service(&self, namespace: &str, service: &str) -> bool {
        let is_default = namespace == DEFAULT_NAMESPACE;
        self.anything
            || (!self.services.is_empty() && self.services.contains(&ObjectName::new(namespace, service)))
            || (self.words.contains(service) && (is_default || self.words.contains(namespace)))
    }

    fn may_have_namespace(&self, namespace: &str) -> bool {
        let has = |name: &ObjectName| *name.namespace == *namespace;
        self.anything || self.words.contains(namespace) || self.services.iter().any(has)
    }
}
