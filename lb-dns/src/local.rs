//! Answers from the index of names.

use hickory_proto::{
    ProtoError,
    op::{Message, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME, HINFO, NS, PTR, SOA, SRV, TXT},
    },
};
use lb_core::dns::{Answer, Data, Found, Index, Kind, Zone};

use crate::{message::most_records, names::Names, query::Query};

/// Maximum number of links in a chain of ExternalNames, as in CoreDNS.
const MAX_LINKS: usize = 10;

/// How far the index answers a query.
#[derive(Debug)]
pub(crate) enum Local {
    /// The answer is complete.
    Done(Message),
    /// Another server has to answer for this name; the caller has to append that server's records to the records of the
    /// message.
    Outside(Message, Name),
}

/// Answers a query from the index. The message may have more records than fit into `limit` bytes, but their number is
/// bounded; encoding the message leaves out the rest. If the query leads to a name outside of this server's zones, the
/// message has no records except the aliases that lead to that name.
pub(crate) fn answer(names: &Names, query: &Query, limit: u16) -> Local {
    match follow(names, query, limit) {
        Ok(local) => local,
        // A name that cannot be written: an ExternalName that is no domain name.
        Err(_) => Local::Done(query.reply(ResponseCode::ServFail)),
    }
}

fn follow(names: &Names, query: &Query, limit: u16) -> Result<Local, ProtoError> {
    let index = names.read();
    // One more record than can fit, so that encoding sets TC if there are too many.
    let most = most_records(limit) + 1;
    let writer = Writer { zone: index.zone(), serial: names.serial(), most };
    let kind = kind(query.question.query_type);
    let mut reply = query.reply(ResponseCode::NoError);
    let mut name = query.name().clone();
    for _ in 0..=MAX_LINKS {
        let answer = lookup(&index, &name, kind);
        if !matches!(answer, Answer::NotOurs) {
            if !names.is_synchronised() {
                return Ok(Local::Done(query.reply(ResponseCode::ServFail)));
            }
            reply.metadata.authoritative = true;
        }
        match answer {
            Answer::NotOurs => return Ok(Local::Outside(reply, name)),
            Answer::Found(found) => {
                writer.found(&mut reply, &name, &found)?;
                return Ok(Local::Done(reply));
            }
            Answer::Unknown => return Ok(Local::Done(query.reply(ResponseCode::ServFail))),
            Answer::NoData(zone) => {
                reply.add_authority(writer.soa(&zone)?);
                return Ok(Local::Done(reply));
            }
            Answer::NxDomain(zone) => {
                reply.metadata.response_code = ResponseCode::NXDomain;
                reply.add_authority(writer.soa(&zone)?);
                return Ok(Local::Done(reply));
            }
            Answer::Alias(target) => {
                let target = absolute(&target)?;
                let data = RData::CNAME(CNAME(target.clone()));
                reply.add_answer(Record::from_rdata(name, index.zone().ttl(), data));
                name = target;
            }
        }
    }
    Ok(Local::Done(query.reply(ResponseCode::ServFail)))
}

fn lookup(index: &Index, name: &Name, kind: Kind) -> Answer {
    let lower = name.to_lowercase();
    let labels: Vec<&[u8]> = lower.iter().collect();
    index.lookup(&labels, kind)
}

fn kind(record_type: RecordType) -> Kind {
    const KINDS: [(RecordType, Kind); 9] = [
        (RecordType::A, Kind::A),
        (RecordType::AAAA, Kind::Aaaa),
        (RecordType::CNAME, Kind::Cname),
        (RecordType::NS, Kind::Ns),
        (RecordType::PTR, Kind::Ptr),
        (RecordType::SOA, Kind::Soa),
        (RecordType::SRV, Kind::Srv),
        (RecordType::TXT, Kind::Txt),
        (RecordType::ANY, Kind::Any),
    ];
    KINDS.iter().find(|(known, _)| *known == record_type).map_or(Kind::Other, |(_, kind)| *kind)
}

/// Writes data of the index as records.
struct Writer<'a> {
    zone: &'a Zone,
    serial: u32,
    /// Maximum number of records in a section of the message: one more than fits.
    most: usize,
}

impl Writer<'_> {
    /// Adds the records, beginning with a random one: so clients that use only the first record spread over all
    /// records, and a short message leaves out other records each time.
    fn found(&self, reply: &mut Message, owner: &Name, found: &Found) -> Result<(), ProtoError> {
        let start = rand::random_range(0..found.records.len().max(1));
        let (last, first) = found.records.split_at(start);
        for data in first.iter().chain(last).take(self.most) {
            reply.add_answer(Record::from_rdata(owner.clone(), found.ttl, self.data(data)?));
        }
        // A message has all additional records or none.
        if found.additional.len() < self.most {
            for (name, address) in found.additional.iter() {
                let data = self.data(&Data::from(*address))?;
                reply.add_additional(Record::from_rdata(absolute(name)?, found.ttl, data));
            }
        }
        Ok(())
    }

    fn data(&self, data: &Data) -> Result<RData, ProtoError> {
        Ok(match data {
            Data::A(address) => RData::A(A(*address)),
            Data::Aaaa(address) => RData::AAAA(AAAA(*address)),
            Data::Cname(name) => RData::CNAME(CNAME(absolute(name)?)),
            Data::Hinfo => RData::HINFO(HINFO::new("RFC8482".to_owned(), String::new())),
            Data::Ns(name) => RData::NS(NS(absolute(name)?)),
            Data::Ptr(name) => RData::PTR(PTR(absolute(name)?)),
            Data::Soa => self.soa(self.zone.name())?.data,
            Data::Srv { weight, port, target } => RData::SRV(SRV::new(0, *weight, *port, absolute(target)?)),
            Data::Txt(text) => RData::TXT(TXT::new(vec![(*text).to_owned()])),
        })
    }

    /// The SOA record of `zone`, one of this server's zones. Resolvers cache a negative answer for the smaller of the
    /// record's TTL and its MINIMUM field (RFC 2308).
    fn soa(&self, zone: &str) -> Result<Record, ProtoError> {
        let server = absolute(&format!("ns.dns.{}", self.zone.name()))?;
        let mail = absolute(&format!("hostmaster.{}", self.zone.name()))?;
        let soa = SOA::new(server, mail, self.serial, 7200, 1800, 86_400, self.zone.ttl());
        Ok(Record::from_rdata(absolute(zone)?, self.zone.soa_ttl(), RData::SOA(soa)))
    }
}

/// The absolute name for text without a dot at its end. Keeps upper and lower case.
fn absolute(text: &str) -> Result<Name, ProtoError> {
    let mut name = Name::from_ascii(text)?;
    name.set_fqdn(true);
    Ok(name)
}
