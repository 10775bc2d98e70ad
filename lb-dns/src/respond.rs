//! Answers a query given as bytes, without sockets, for tests and fuzz targets.

use hickory_proto::op::{Message, ResponseCode};

use crate::{
    local::{self, Local},
    message::encode,
    names::Names,
    query::{self, Query, Refusal},
    server::append,
    upstream,
};

/// The answer over UDP to the bytes of a query; `None` for bytes that get no answer. `upstream` is the message that an
/// upstream server sends if the name is outside of this server's zones; without `upstream`, or if that message is
/// malformed, the answer is SERVFAIL.
pub fn respond(names: &Names, query: &[u8], upstream: Option<&[u8]>) -> Option<Vec<u8>> {
    let read = query::read(query);
    let limit = read.as_ref().map_or(u16::MAX, Query::udp_limit);
    let reply = match read {
        Ok(query) => complete(names, &query, upstream, limit),
        Err(Refusal::Reply(reply)) => *reply,
        Err(Refusal::Drop) => return None,
    };
    encode(&reply, limit).ok()
}

fn complete(names: &Names, query: &Query, answer: Option<&[u8]>, limit: u16) -> Message {
    match local::answer(names, query, limit) {
        Local::Done(reply) => reply,
        Local::Outside(mut reply, _) => {
            let answer = answer.and_then(upstream::read);
            let Some(answer) = answer else { return query.reply(ResponseCode::ServFail) };
            append(&mut reply, query, answer);
            reply
        }
    }
}
