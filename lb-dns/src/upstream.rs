//! One question to one upstream server.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query as Question, ResponseCode},
    rr::{Name, RecordType},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
};

use crate::query::our_edns;

/// A question that another server answers.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) question: Question,
    pub(crate) dnssec_ok: bool,
    pub(crate) checking_disabled: bool,
}

/// Asks over UDP; again over TCP if the answer does not fit; and again without EDNS if the server answers FORMERR, as a
/// server that does not implement EDNS must (RFC 6891 §7).
pub(crate) async fn exchange(server: SocketAddr, ask: &Ask) -> io::Result<Message> {
    let answer = exchange_as(server, ask, Form::Edns).await?;
    if answer.metadata.response_code == ResponseCode::FormErr {
        return exchange_as(server, ask, Form::Plain).await;
    }
    Ok(answer)
}

async fn exchange_as(server: SocketAddr, ask: &Ask, form: Form) -> io::Result<Message> {
    let answer = over_udp(&connect(server).await?, ask, form).await?;
    if answer.metadata.truncation { over_tcp(server, ask, form).await } else { Ok(answer) }
}

/// Whether a query has an OPT record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Edns,
    Plain,
}

/// The response code of a DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerCode {
    /// Whether the server answers questions: the code is neither SERVFAIL nor REFUSED.
    pub is_usable: bool,
    /// The name of the code.
    pub text: String,
}

/// For health checks: asks a server over UDP for an address of `name`, or, if `name` is empty, for the name servers of
/// the root.
///
/// # Errors
/// An invalid name, and errors of the socket. The caller must limit the time: this function has no timeout.
pub async fn response_code(server: SocketAddr, name: &str) -> io::Result<ServerCode> {
    code_over(&connect(server).await?, name).await
}

/// As [`response_code`], through a socket that is connected to the server.
pub(crate) async fn code_over(socket: &UdpSocket, name: &str) -> io::Result<ServerCode> {
    let of_root = name.is_empty();
    let mut name = Name::from_ascii(name).map_err(io::Error::other)?;
    name.set_fqdn(true);
    let question = Question::query(name, if of_root { RecordType::NS } else { RecordType::A });
    let ask = Ask { question, dnssec_ok: false, checking_disabled: false };
    let code = over_udp(socket, &ask, Form::Edns).await?.metadata.response_code;
    let is_usable = !matches!(code, ResponseCode::ServFail | ResponseCode::Refused);
    Ok(ServerCode { is_usable, text: code.to_string() })
}

/// A socket for one question. Every question has its own port and a random ID, which an attacker would have to guess
/// (RFC 5452).
pub(crate) async fn connect(server: SocketAddr) -> io::Result<UdpSocket> {
    let any: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    Ok(socket)
}

async fn over_udp(socket: &UdpSocket, ask: &Ask, form: Form) -> io::Result<Message> {
    let id = rand::random();
    socket.send(&encode(ask, id, form)?).await?;
    let mut buffer = vec![0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..length).and_then(|bytes| accept(bytes, id, ask));
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
}

async fn over_tcp(server: SocketAddr, ask: &Ask, form: Form) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server).await?;
    let id = rand::random();
    let query = encode(ask, id, form)?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], &query].concat()).await?;
    let mut answer = vec![0; stream.read_u16().await?.into()];
    stream.read_exact(&mut answer).await?;
    accept(&answer, id, ask).ok_or_else(|| io::Error::other("the answer is not one to our question"))
}

fn encode(ask: &Ask, id: u16, form: Form) -> io::Result<Vec<u8>> {
    let mut query = Message::new(id, MessageType::Query, OpCode::Query);
    query.metadata.recursion_desired = true;
    query.metadata.checking_disabled = ask.checking_disabled;
    // Asks whether the answer is authentic (RFC 6840 §5.7). Only clients that set AD or DO receive the result.
    query.metadata.authentic_data = true;
    query.add_query(ask.question.clone());
    if form == Form::Edns {
        query.set_edns(our_edns(ask.dnssec_ok));
    }
    query.to_vec().map_err(io::Error::other)
}

/// The message, if it is a response to a query. Responses to other operations are useless to clients. Responses to
/// updates may even contain records without data (RFC 2136), which responses to queries never have.
pub(crate) fn read(bytes: &[u8]) -> Option<Message> {
    let message = Message::from_vec(bytes).ok()?;
    let is_answer = message.metadata.message_type == MessageType::Response;
    (is_answer && message.metadata.op_code == OpCode::Query).then_some(message)
}

/// The message, if it answers `ask` and has this ID. A server that cannot read the question (FORMERR) or does not
/// implement the operation (NOTIMP) may leave the question out.
fn accept(bytes: &[u8], id: u16, ask: &Ask) -> Option<Message> {
    let message = read(bytes)?;
    let code = message.metadata.response_code;
    let is_same = match &message.queries[..] {
        [question] => {
            question.name.eq_case(&ask.question.name)
                && question.query_type == ask.question.query_type
                && question.query_class == ask.question.query_class
        }
        [] => matches!(code, ResponseCode::FormErr | ResponseCode::NotImp),
        _ => false,
    };
    (message.metadata.id == id && is_same).then_some(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(name: &str) -> Ask {
        let question = Question::query(Name::from_ascii(name).unwrap(), RecordType::A);
        Ask { question, dnssec_ok: false, checking_disabled: false }
    }

    #[test]
    fn only_the_answer_to_the_question_is_accepted() {
        let mut answer = Message::response(7, OpCode::Query);
        answer.add_query(ask("A.example.").question);
        let bytes = answer.to_vec().unwrap();
        assert!(accept(&bytes, 7, &ask("A.example.")).is_some());
        assert!(accept(&bytes, 8, &ask("A.example.")).is_none(), "another ID");
        assert!(accept(&bytes, 7, &ask("a.example.")).is_none(), "another case");
        let query = encode(&ask("A.example."), 7, Form::Edns).unwrap();
        assert!(accept(&query, 7, &ask("A.example.")).is_none(), "a query");
        let mut header = Message::response(7, OpCode::Query);
        for (code, is_accepted) in
            [(ResponseCode::NoError, false), (ResponseCode::FormErr, true), (ResponseCode::NotImp, true)]
        {
            header.metadata.response_code = code;
            let bytes = header.to_vec().unwrap();
            assert_eq!(
                accept(&bytes, 7, &ask("A.example.")).is_some(),
                is_accepted,
                "without question: {code}"
            );
        }
        assert!(accept(&bytes[..10], 7, &ask("A.example.")).is_none(), "half of it");
        let mut update = bytes.clone();
        update[2] |= 5 << 3;
        assert!(accept(&update, 7, &ask("A.example.")).is_none(), "the answer to an update");
    }
}
