//! Explains a system call in which a process of the node names a virtual address. Follows `sockets::frontend` of the
//! BPF programs.

use lb_common::{Address, Outcome, Service, conntrack::Tuple, protocol};
use lb_ebpf::rules::{admission, socket};

use super::{
    Question,
    frontend::AdmittedFlow,
    step::{Candidate, Conclusion, ForwardingPath, Source, TraceStep, endpoint},
    tables::Tables,
    walk::{Walk, WalkResult, untouched},
};

impl<T: Tables> Walk<'_, T> {
    /// Explains `connect(2)` or `sendmsg(2)`. The client is the node: the socket has no source address yet.
    pub(super) fn socket(&mut self) -> WalkResult<Conclusion> {
        if self.question.tuple.protocol == protocol::SCTP {
            return Ok(untouched(Outcome::NotTransport));
        }
        let Some(service) = self.frontend()? else {
            let verdict = self.unlisted()?;
            if let Conclusion::Rejected { outcome } = verdict
                && socket::connects_nowhere(outcome, || true)
            {
                self.steps.push(TraceStep::UdpConnectSucceeds);
            }
            return Ok(verdict);
        };
        // The flag `SOCKETS_ONLY` needs no check: frontends that have it serve exactly these system calls.
        let service = service.for_client(true);
        let node = self.node_address()?;
        if !self.admit(&service, &node, |ranges| admission::system_call(&service, true, ranges, || false))? {
            return Ok(untouched(Outcome::NoService));
        }
        // The socket has no source port yet. The programs hash part of the socket's cookie instead, which `explain`
        // cannot know.
        let tuple = Tuple { source: node, source_port: 0, ..self.question.tuple };
        let question = Question { tuple, knows_port: false, ..*self.question };
        let mut inner = Walk::new(self.tables, &question);
        let chosen = inner.choose(&request(service), None);
        self.steps.append(&mut inner.steps);
        let mut backends = Vec::new();
        for backend in chosen? {
            backends.push(Candidate {
                backend: endpoint(&backend),
                pod: self.tables.pod_name(&backend.address)?,
                outcome: Outcome::NewFlow,
                way: ForwardingPath::Stack,
                source: Source::Client,
            });
        }
        Ok(Conclusion::Begins { backends })
    }

    /// The node's own address in the destination's family; [`Address::NONE`] until the agent has written the settings.
    fn node_address(&self) -> WalkResult<Address> {
        let is_v4 = self.question.tuple.destination.is_v4();
        Ok(self.settings()?.map_or(Address::NONE, |settings| *settings.source(is_v4)))
    }
}

const fn request(service: Service) -> AdmittedFlow {
    AdmittedFlow { service, masquerade: false, dsr: false }
}
