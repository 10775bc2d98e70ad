//! What the data plane would do with a packet, step by step: the same decisions in the same order as `lb-ebpf/src/datapath`
//! takes them, on the same maps, but in words. Pure: [`Tables`] is all it knows of the world, so the packet tests hold it
//! against the programs themselves (`explain_and_the_programs_agree`).
//!
//! ```text
//! walk      a packet at a hook: is there a flow, does it go on, else …     frontend  … what is it for, and may it
//! socket    the same for a system call                                     choice    which backend
//! words     every step and the verdict as people say them                  way       how it gets there
//! ```
//!
//! Left out is what is in no map and not in the tuple: lengths and hops of a packet, fragments, ICMP, what is in a tunnel.

mod choice;
mod frontend;
mod pinned;
mod socket;
mod step;
mod tables;
#[cfg(test)]
mod tests;
mod walk;
mod way;
mod words;

use lb_common::{
    Outcome,
    conntrack::{Segment, Tick, Tuple, chunk, tcp_flags},
    protocol,
};

pub use self::{
    pinned::PinnedTables,
    step::{Candidate, ClientSide, Holds, Method, Source, Stale, Step, Unlisted, Verdict, Way},
    tables::Tables,
};
use lb_datapath::DatapathError;

/// Where a packet is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Where it enters the node, before there is an skb.
    Xdp,
    /// Where it enters the node.
    Ingress,
    /// Where it leaves the node.
    Egress,
    /// A process of the node names the destination in a system call.
    Socket,
}

/// What a packet is in the life of its connection. Datagrams are all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It asks for a connection: SYN, INIT.
    Opens,
    /// It accepts one: SYN-ACK, INIT ACK.
    Accepts,
    /// It is of one that there is.
    GoesOn,
    /// The sender has nothing more to say.
    Ends,
    /// It breaks the connection.
    Resets,
}

/// What is asked: what becomes of this packet.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Addresses and ports.
    pub tuple: Tuple,
    /// Whether the source port is known; else connections are not looked for, and the packet is of a new one.
    pub knows_port: bool,
    /// What kind of packet it is.
    pub turn: Turn,
    /// Where it is looked at.
    pub hook: Hook,
    /// Interface index of the device that it is at; 0 is unknown.
    pub device: u32,
    /// When that is.
    pub now: Tick,
}

impl Question {
    /// What the headers say about the connection.
    fn segment(&self) -> Segment {
        const NOTHING: Segment = Segment { flags: 0, seq: 0, ack: 0, payload: 0 };
        let (flags, chunk) = match self.turn {
            Turn::Opens => (tcp_flags::SYN, chunk::INIT),
            Turn::Accepts => (tcp_flags::SYN | tcp_flags::ACK, chunk::INIT_ACK),
            Turn::GoesOn => (tcp_flags::ACK, 0),
            Turn::Ends => (tcp_flags::FIN | tcp_flags::ACK, chunk::SHUTDOWN),
            Turn::Resets => (tcp_flags::RST, chunk::ABORT),
        };
        match self.tuple.protocol {
            protocol::TCP => Segment { flags, ..NOTHING },
            protocol::SCTP => Segment::of_chunk(chunk, 0, 0),
            _ => NOTHING,
        }
    }

    /// The outcome where nobody may be spoken to.
    const fn rejection(&self) -> Outcome {
        if self.tuple.protocol == protocol::TCP { Outcome::RejectTcp } else { Outcome::RejectUdp }
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// What was looked at and decided, in this order.
    pub steps: Vec<Step>,
    /// What becomes of the packet.
    pub verdict: Verdict,
}

impl Explanation {
    /// Whether the XDP program has nothing to say about the packet, which is the business of tc then.
    pub fn left_to_tc(&self) -> bool {
        self.steps.contains(&Step::LeftToTc)
    }
}

/// Follows the packet through the tables.
///
/// # Errors
/// A table cannot be read.
pub fn explain(tables: &impl Tables, question: &Question) -> Result<Explanation, DatapathError> {
    let mut walk = walk::Walk::new(tables, question);
    let result = match question.hook {
        Hook::Xdp => walk.xdp(),
        Hook::Ingress | Hook::Egress => walk.tc(),
        Hook::Socket => walk.socket(),
    };
    let verdict = match result {
        Ok(verdict) | Err(walk::Stop::With(verdict)) => verdict,
        Err(walk::Stop::Failed(error)) => return Err(error),
    };
    Ok(Explanation { steps: walk.steps, verdict })
}

/// One step, or a verdict, as a line of text.
pub use self::words::{step as step_in_words, verdict as verdict_in_words};
