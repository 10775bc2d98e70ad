//! Objects that cannot be read: the index neither finds nor denies their names.

use std::collections::BTreeSet;

use super::index::DEFAULT_NAMESPACE;
use crate::model::ObjectName;

/// The names that unreadable objects have or may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Whether there may be an object of any name, for example in a file that cannot be read.
    pub anything: bool,
    /// Services that cannot be read, or that have another unreadable object, such as an EndpointSlice.
    pub services: BTreeSet<ObjectName>,
    /// Words of manifests that define objects of unknown names. An object's name and namespace are among the words of
    /// its manifest.
    pub words: Words,
}

/// Words that may be names of objects or namespaces.
pub type Words = BTreeSet<Box<str>>;

/// The words of a manifest that may be names; `None` if the manifest may spell names in a way that hides them.
pub fn words(manifest: &str) -> Option<Words> {
    /// Texts that may hide names: escapes of YAML and JSON that spell a letter or join two words, and the tag of
    /// base64.
    const HIDING: [&str; 6] = ["\\x", "\\u", "\\U", "\\\n", "\\\r", "!binary"];
    if HIDING.iter().any(|hiding| manifest.contains(hiding)) {
        return None;
    }
    // A word with a dot, an underscore or a slash is no name, but an address, a path, or a key such as
    // app.kubernetes.io/name.
    let is_part = |character: char| character.is_ascii_alphanumeric() || "-._/".contains(character);
    let is_label = |word: &&str| {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=63).contains(&word.len()) && word.bytes().all(allowed)
    };
    Some(manifest.split(|character| !is_part(character)).filter(is_label).map(Box::from).collect())
}

impl Unread {
    /// Whether there is no unread object.
    pub fn is_empty(&self) -> bool {
        !self.anything && self.services.is_empty() && self.words.is_empty()
    }

    /// Whether an unread object may have the name that these labels form below the cluster domain, or a name below
    /// that.
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
