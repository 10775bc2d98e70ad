//! Encodes answers, at most as long as the client accepts.

use std::iter;

use hickory_proto::{
    ProtoError,
    op::{Header, HeaderCounts, Message, ResponseCode},
    rr::{Name, Record},
    serialize::binary::{BinEncodable, BinEncoder},
};

use crate::query::HEADER;

/// The length of the shortest record: a compressed owner, type, class, TTL, and data of no bytes.
const SHORTEST_RECORD: usize = 12;
/// The first two bits of a pointer to a name; the other 14 bits are the offset.
const POINTER: u16 = 0xc000;

/// Upper bound of the number of records in a message of `limit` bytes.
pub(crate) fn most_records(limit: u16) -> usize {
    usize::from(limit) / SHORTEST_RECORD
}

/// Whether TC is set.
pub(crate) fn is_truncated(bytes: &[u8]) -> bool {
    bytes.get(2).is_some_and(|flags| flags & 2 != 0)
}

/// Encodes the message in at most `limit` bytes; `limit` is at least 512. Leaves out whole records that do not fit, but
/// never the OPT record. Sets TC if it leaves out a record of the answer section. If the message has no answers or is
/// NXDOMAIN, also sets TC if it leaves out a record of the authority section. Includes either all additional records or
/// none (RFC 2181, section 9).
pub(crate) fn encode(message: &Message, limit: u16) -> Result<Vec<u8>, ProtoError> {
    let opt = opt(message);
    let reserved = opt.as_ref().map_or(Ok(0), |opt| opt.to_bytes().map(|bytes| bytes.len()))?;
    let mut bytes = Vec::with_capacity(512);
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(limit.saturating_sub(u16::try_from(reserved).unwrap_or(limit)));
    let header = encoder.place::<Header>()?;
    for question in &message.queries {
        question.emit(&mut encoder)?;
    }
    let mut owner = message.queries.first().map(|question| (question.name(), POINTER | u16::from(HEADER)));
    let answers = section(&mut encoder, &message.answers, &mut owner)?;
    let authorities = section(&mut encoder, &message.authorities, &mut owner)?;
    encoder.set_max_size(limit);
    encoder.emit_all(opt.iter())?;
    let before = encoder.offset();
    let mut additionals = section(&mut encoder, &message.additionals, &mut owner)?;
    if additionals < message.additionals.len() {
        encoder.set_offset(before);
        additionals = 0;
    }
    let is_denial = message.answers.is_empty() || message.metadata.response_code == ResponseCode::NXDomain;
    let lacks_proof = is_denial && authorities < message.authorities.len();
    let mut metadata = message.metadata;
    metadata.truncation |= answers < message.answers.len() || lacks_proof;
    let counts = HeaderCounts {
        queries: count(message.queries.len())?,
        answers: count(answers)?,
        authorities: count(authorities)?,
        additionals: count(additionals + usize::from(opt.is_some()))?,
    };
    header.replace(&mut encoder, Header { metadata, counts })?;
    let length = encoder.offset();
    bytes.truncate(length);
    Ok(bytes)
}

/// The OPT record, with the part of the response code that the header has no room for.
fn opt(message: &Message) -> Option<Record> {
    let mut edns = message.edns.clone()?;
    edns.set_rcode_high(message.metadata.response_code.high());
    Some(Record::from(&edns))
}

fn count(records: usize) -> Result<u16, ProtoError> {
    u16::try_from(records).map_err(|_many| ProtoError::Message("more records than a message can count"))
}

/// Encodes the records that fit; returns how many. `owner` is the last owner name written in full, with its pointer.
fn section<'a>(
    encoder: &mut BinEncoder<'_>,
    records: &'a [Record],
    owner: &mut Option<(&'a Name, u16)>,
) -> Result<usize, ProtoError> {
    for (written, record) in records.iter().enumerate() {
        let pointer = owner.filter(|(name, _)| name.eq_case(&record.name)).map(|(_, pointer)| pointer);
        let start = u16::try_from(encoder.offset()).ok().filter(|offset| *offset < POINTER >> 2);
        match encoder.emit_all(iter::once(&Pointed { record, pointer })) {
            Ok(_) => {}
            Err(ProtoError::NotAllRecordsWritten { .. }) => return Ok(written),
            Err(error) => return Err(error),
        }
        if let (None, Some(start)) = (pointer, start) {
            *owner = Some((&record.name, POINTER | start));
        }
    }
    Ok(records.len())
}

/// A record whose owner is written as a pointer, if there is one. `BinEncoder` itself compresses only the first names
/// of a message.
struct Pointed<'a> {
    record: &'a Record,
    pointer: Option<u16>,
}

impl BinEncodable for Pointed<'_> {
    fn emit(&self, encoder: &mut BinEncoder<'_>) -> Result<(), ProtoError> {
        let Self { record, pointer } = self;
        let Some(pointer) = pointer else { return record.emit(encoder) };
        encoder.emit_u16(*pointer)?;
        record.record_type().emit(encoder)?;
        record.dns_class.emit(encoder)?;
        encoder.emit_u32(record.ttl)?;
        let length = encoder.place::<u16>()?;
        record.data.emit(encoder)?;
        let written = encoder.len_since_place(&length);
        length.replace(encoder, count(written)?)
    }
}
