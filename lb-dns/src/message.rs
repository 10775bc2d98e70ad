//! Encodes answers, at most as long as the client accepts.

use hickory_proto::{
    ProtoError,
    op::Message,
    serialize::binary::{BinEncodable as _, BinEncoder},
};

/// Encodes the message in at most `limit` bytes. Leaves out additional records first, which is no truncation (RFC 2181);
/// then as many answers as it must, and sets TC.
pub(crate) fn encode(mut message: Message, limit: u16) -> Result<Vec<u8>, ProtoError> {
    let whole = limited(&message, limit)?;
    if !is_truncated(&whole) || message.additionals.is_empty() {
        return Ok(whole);
    }
    message.additionals.clear();
    limited(&message, limit)
}

fn limited(message: &Message, limit: u16) -> Result<Vec<u8>, ProtoError> {
    let mut bytes = Vec::with_capacity(512);
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(limit);
    message.emit(&mut encoder)?;
    Ok(bytes)
}

fn is_truncated(bytes: &[u8]) -> bool {
    bytes.get(2).is_some_and(|flags| flags & 2 != 0)
}
