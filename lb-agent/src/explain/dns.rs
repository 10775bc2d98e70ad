//! Traces packets of node-local DNS: queries of pods that go to the agent, and its answers.

use lb_common::{DnsIntercept, Outcome, ServiceKey, conntrack::Tuple, dns::Lease};
use lb_ebpf::{
    parse::Part,
    rules::{
        dns::{Query, ServerSocket, may_be_query, outcome, query},
        forwarding::is_workload,
    },
};

use super::{
    step::{Conclusion, Ends, TraceStep},
    tables::Tables,
    walk::{Walk, WalkResult, untouched},
};

impl<T: Tables> Walk<'_, T> {
    /// Explains the packet if node-local DNS redirects it, else returns `None`; like `dns::query`. The programs look up
    /// the server's socket; this function assumes that the socket exists, because a server with a live lease has one.
    pub(super) fn query(&mut self) -> WalkResult<Option<Conclusion>> {
        let tuple = self.question.tuple;
        let is_query = may_be_query(&tuple, Part::Whole) && self.is_of_pod()?;
        let key = ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol);
        let Some(server) = self.tables.dns_intercept(&key)?.filter(|_| is_query) else { return Ok(None) };
        let lease = server.lease(self.tables.nanos());
        let live = lease == Lease::Live;
        let to = Tuple { destination: server.address, destination_port: server.port, ..tuple };
        let to = Ends::from(&to);
        self.steps.push(TraceStep::NodeLocalDns { server: to.to, live });
        Ok(match query(tuple.protocol, &self.segment, lease, ServerSocket::Open) {
            Query::Local => {
                Some(Conclusion::Translated { outcome: outcome(tuple.protocol, &self.segment), ends: to })
            }
            Query::Service | Query::Reset => None,
        })
    }

    /// Explains a packet that leaves the node without a flow: the programs translate it if it is an answer of the
    /// agent's DNS server, and otherwise leave it untouched; like `dns::answer`.
    pub(super) fn answer(&self) -> WalkResult<Conclusion> {
        let tuple = self.question.tuple;
        let key = ServiceKey::new(tuple.source, tuple.source_port, tuple.protocol);
        let entry = self.tables.dns_intercept(&key)?.filter(DnsIntercept::is_of_answers);
        match entry {
            Some(entry) if self.is_of_pod()? => {
                let to = Tuple { source: entry.address, source_port: entry.port, ..tuple };
                Ok(Conclusion::Translated { outcome: Outcome::DnsAnswer, ends: Ends::from(&to) })
            }
            _ => Ok(untouched(Outcome::NoService)),
        }
    }

    /// Whether the device is the host side of a pod's interface.
    fn is_of_pod(&self) -> WalkResult<bool> {
        let device = self.tables.device(self.question.device)?;
        Ok(device.is_some_and(|device| is_workload(&device)))
    }
}
