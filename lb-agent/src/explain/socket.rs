//! A process of the node that names a virtual address in a system call; as `sockets::frontend`.

use lb_common::{Address, Outcome, Service, conntrack::Tuple, protocol};

use super::{
    Question,
    frontend::Request,
    step::{Candidate, Verdict, Way, endpoint},
    tables::Tables,
    walk::{Found, Walk, untouched},
};

impl<T: Tables> Walk<'_, T> {
    /// What `connect(2)` or `sendmsg(2)` does. The client is the node, whatever address the process may have in mind.
    pub(super) fn socket(&mut self) -> Found<Verdict> {
        if self.question.tuple.protocol == protocol::SCTP {
            return Ok(untouched(Outcome::NotTransport));
        }
        let Some(service) = self.frontend()? else {
            return self.unlisted();
        };
        // Frontends for processes of the node only are for these.
        let service = service.for_client(true);
        let node = self.node_address()?;
        self.admit(&service, &node)?;
        // Nobody knows the source port yet: the number of the socket stands for it.
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
                way: Way::Stack,
            });
        }
        Ok(Verdict::Begins { backends })
    }

    /// The node's own address of the family of the destination; unspecified as long as the agent has written none.
    fn node_address(&self) -> Found<Address> {
        let is_v4 = self.question.tuple.destination.is_v4();
        let settings = self.settings()?;
        Ok(settings.map_or_else(Address::default, |s| if is_v4 { s.source_v4 } else { s.source_v6 }))
    }
}

const fn request(service: Service) -> Request {
    Request { service, masquerade: false, direct: false }
}
