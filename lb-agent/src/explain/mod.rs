//! `lb-agent explain`: what the data plane would do with a packet, step by step, as text.
//!
//! It follows the programs (`lb-ebpf/src/datapath`, `lb-ebpf/src/sockets`), reads the same maps, and calls the same
//! rules (`lb_ebpf::rules`). All input comes through the trait [`Tables`], so the packet tests can compare the
//! explanations with the programs in random states (`explain_agrees_with_the_programs`).
//!
//! ```text
//! question  the packet to explain            frontend  its Service, and whether a flow may begin
//! walk      state, lookups, early exit       choice    its backend
//! packet    a packet at XDP or tc            path      how packets get to the backend, and from which source
//! socket    a system call                    dns       queries and answers of node-local DNS
//! step      all steps and verdicts, as data  words     texts of steps and verdicts
//! docs      doc links of steps and verdicts  tables    the input; `pinned`: the pinned maps and the routing table
//! ```
//!
//! Not covered, because neither the maps nor the tuple contain them: packet length and TTL, fragments, ICMP, packets in
//! a tunnel.

mod choice;
mod dns;
mod docs;
mod frontend;
mod packet;
mod path;
mod pinned;
mod question;
mod socket;
mod step;
mod tables;
#[cfg(test)]
mod tests;
mod walk;
mod words;

use lb_datapath::DatapathError;

pub(crate) use self::docs::{step as doc_of_step, verdict as doc_of_verdict};
pub use self::{
    pinned::PinnedTables,
    question::{HookPoint, PacketKind, Question},
    step::{
        AffinityState, Candidate, ClientSide, Conclusion, ForwardingPath, Method, Source, Stale, TraceStep,
        Unlisted,
    },
    tables::Tables,
    words::{step as step_in_words, verdict as verdict_in_words},
};

/// The explanation of a packet: the steps, and the verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The lookups and decisions of the programs, in order.
    pub steps: Vec<TraceStep>,
    /// The verdict on the packet.
    pub verdict: Conclusion,
}

impl Explanation {
    /// Whether the XDP program passes the packet on to tc ingress.
    pub fn left_to_tc(&self) -> bool {
        self.steps.contains(&TraceStep::LeftToTc)
    }
}

/// Explains a packet from the contents of the tables.
///
/// # Errors
/// A table cannot be read.
pub fn explain(tables: &impl Tables, question: &Question) -> Result<Explanation, DatapathError> {
    let mut walk = walk::Walk::new(tables, question);
    let result = match question.hook {
        HookPoint::Xdp => walk.xdp(),
        HookPoint::Ingress | HookPoint::Egress => walk.tc(),
        HookPoint::Socket => walk.socket(),
    };
    let verdict = match result {
        Ok(verdict) | Err(walk::Stop::With(verdict)) => verdict,
        Err(walk::Stop::Failed(error)) => return Err(error),
    };
    Ok(Explanation { steps: walk.steps, verdict })
}
