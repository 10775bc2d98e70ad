//! Attributes of netlink messages that no crate describes.

use netlink_packet_core::{DecodeError, Emitable as _, Nla, NlasIterator};

/// An attribute: its type, and the bytes of its value.
#[derive(Clone, Debug)]
pub(crate) struct Attribute {
    pub(crate) kind: u16,
    pub(crate) value: Vec<u8>,
}

impl Attribute {
    pub(crate) fn new(kind: u16, value: &[u8]) -> Self {
        Self { kind, value: value.to_vec() }
    }

    /// A nested attribute: its value consists of the attributes `parts`.
    pub(crate) fn containing(kind: u16, parts: &[Self]) -> Self {
        let mut value = vec![0; parts.buffer_len()];
        parts.emit(&mut value);
        Self { kind, value }
    }
}

impl Nla for Attribute {
    fn value_len(&self) -> usize {
        self.value.len()
    }

    fn kind(&self) -> u16 {
        self.kind
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.value);
    }
}

/// Parses attributes that follow each other.
pub(crate) fn attributes(bytes: &[u8]) -> Result<Vec<Attribute>, DecodeError> {
    NlasIterator::new(bytes)
        .map(|attribute| attribute.map(|found| Attribute::new(found.kind(), found.value())))
        .collect()
}

/// The value of the attribute of type `kind`; `None` if the attribute is missing or the value has another length.
pub(crate) fn value<const LENGTH: usize>(attributes: &[Attribute], kind: u16) -> Option<[u8; LENGTH]> {
    let found = attributes.iter().find(|attribute| attribute.kind == kind)?;
    found.value.as_slice().try_into().ok()
}
