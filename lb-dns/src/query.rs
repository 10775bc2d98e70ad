//! Parses queries. Drops responses, and messages that are shorter than a header. Answers malformed messages, opcodes
//! other than QUERY, classes other than IN, zone transfers and unknown EDNS versions with an error, for any name.

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query as Question, ResponseCode},
    rr::{DNSClass, Name, RecordType},
};

/// The largest UDP message that is not fragmented on any usual path, as the DNS flag day 2020 chose it.
pub(crate) const UDP_LIMIT: u16 = 1232;
/// The UDP limit of clients without EDNS.
const PLAIN_LIMIT: u16 = 512;
/// Size of a message's header in bytes.
pub(crate) const HEADER: u8 = 12;

/// A query with one question.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    pub(crate) id: u16,
    pub(crate) question: Question,
    pub(crate) recursion_desired: bool,
    pub(crate) authentic_data: bool,
    pub(crate) checking_disabled: bool,
    pub(crate) edns: Option<ClientEdns>,
}

/// What the client's OPT record says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientEdns {
    size: u16,
    pub(crate) dnssec_ok: bool,
}

/// How the server refuses a message that is no valid query.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// An answer would help an attacker, or no client waits for one.
    Drop,
    /// Sends this error.
    Reply(Box<Message>),
}

impl Query {
    pub(crate) const fn name(&self) -> &Name {
        &self.question.name
    }

    pub(crate) fn dnssec_ok(&self) -> bool {
        self.edns.is_some_and(|edns| edns.dnssec_ok)
    }

    /// The size of the largest answer over UDP.
    pub(crate) fn udp_limit(&self) -> u16 {
        self.edns.map_or(PLAIN_LIMIT, |edns| edns.size.clamp(PLAIN_LIMIT, UDP_LIMIT))
    }

    /// An answer without records.
    pub(crate) fn reply(&self, code: ResponseCode) -> Message {
        let mut reply = Message::response(self.id, OpCode::Query);
        reply.metadata.response_code = code;
        reply.metadata.recursion_desired = self.recursion_desired;
        reply.metadata.recursion_available = true;
        reply.metadata.checking_disabled = self.checking_disabled;
        reply.add_query(self.question.clone());
        if self.edns.is_some() {
            reply.set_edns(our_edns(self.dnssec_ok()));
        }
        reply
    }
}

/// The OPT record of this server's answers, and of its queries to upstream servers.
pub(crate) fn our_edns(dnssec_ok: bool) -> Edns {
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_LIMIT).set_version(0).set_dnssec_ok(dnssec_ok);
    edns
}

/// Reads a query.
pub(crate) fn read(bytes: &[u8]) -> Result<Query, Refusal> {
    let Some(header) = bytes.first_chunk::<{ HEADER as usize }>() else { return Err(Refusal::Drop) };
    let [id_high, id_low, flags, _, count_high, count_low, ..] = *header;
    let id = u16::from_be_bytes([id_high, id_low]);
    if flags & 0x80 != 0 {
        return Err(Refusal::Drop);
    }
    let code = OpCode::from_u8((flags >> 3) & 15);
    let refuse = |why| Refusal::Reply(Box::new(Message::error_msg(id, code, why)));
    if code != OpCode::Query {
        return Err(refuse(ResponseCode::NotImp));
    }
    if [count_high, count_low] != [0, 1] {
        return Err(refuse(ResponseCode::FormErr));
    }
    let message = Message::from_vec(bytes).map_err(|_malformed| refuse(ResponseCode::FormErr))?;
    check(message)
}

/// Refuses what no zone answers: classes other than IN, transfers, and versions of EDNS that do not exist yet.
fn check(message: Message) -> Result<Query, Refusal> {
    let Message { metadata, queries, edns, .. } = message;
    let Some(question) = queries.into_iter().next() else { return Err(Refusal::Drop) };
    if metadata.message_type != MessageType::Query {
        return Err(Refusal::Drop);
    }
    let version = edns.as_ref().map_or(0, Edns::version);
    let edns = edns.map(|edns| ClientEdns { size: edns.max_payload(), dnssec_ok: edns.flags().dnssec_ok });
    let query = Query {
        id: metadata.id,
        question,
        recursion_desired: metadata.recursion_desired,
        authentic_data: metadata.authentic_data,
        checking_disabled: metadata.checking_disabled,
        edns,
    };
    let is_transfer = [RecordType::AXFR, RecordType::IXFR].contains(&query.question.query_type);
    let refusal = if version > 0 {
        ResponseCode::BADVERS
    } else if query.question.query_class != DNSClass::IN || is_transfer {
        ResponseCode::Refused
    } else {
        return Ok(query);
    };
    Err(Refusal::Reply(Box::new(query.reply(refusal))))
}
