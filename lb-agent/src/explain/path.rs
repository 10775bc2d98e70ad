//! Predicts how packets of a new flow get to a backend, and whether the flow can be created. Follows `flow::create` of
//! the BPF programs.

use std::net::IpAddr;

use lb_common::{
    Address, Backend, Outcome, Service,
    conntrack::{Flow, Tuple, flow_flags},
    service_flags,
};
use lb_ebpf::rules::forwarding::{self, Forwarding};

use super::{
    Question,
    frontend::AdmittedFlow,
    step::{self, Candidate, Conclusion, ForwardingPath, Source, TraceStep, endpoint},
    tables::Tables,
    walk::{Walk, WalkResult},
};

impl<T: Tables> Walk<'_, T> {
    /// Predicts the creation of a flow to one of these backends, in place of an `earlier` flow if there is one.
    pub(super) fn begin(
        &mut self,
        request: &AdmittedFlow,
        backends: &[Backend],
        earlier: bool,
    ) -> WalkResult<Conclusion> {
        if request.service.flags & service_flags::PROXY_PROTOCOL != 0 {
            self.steps.push(TraceStep::ProxyProtocol);
        }
        let mut candidates = Vec::with_capacity(backends.len());
        let mut sources = Vec::new();
        for backend in backends {
            let (way, source) = self.way(request, backend)?;
            if !sources.contains(&source) {
                self.steps.push(TraceStep::Masquerade { source });
                sources.push(source);
            }
            candidates.push(Candidate {
                backend: endpoint(backend),
                pod: self.tables.pod_name(&backend.address)?,
                outcome: self.outcome(request, backend, way, source, earlier)?,
                way,
                source,
            });
        }
        let first = candidates.first().map(|candidate| candidate.outcome);
        let all_same = candidates.iter().all(|candidate| Some(candidate.outcome) == first);
        match first.filter(|_| all_same) {
            Some(outcome @ (Outcome::NoSourcePort | Outcome::ConntrackFull | Outcome::NoRoute)) => {
                Ok(Conclusion::Dropped { outcome })
            }
            _ => Ok(Conclusion::Begins { backends: candidates }),
        }
    }

    /// Predicts the creation of a flow for a connection of the node that needs another source port; like
    /// `of_node::create`.
    pub(super) fn begin_of_node(&mut self, earlier: bool) -> WalkResult<Conclusion> {
        if self.settings()?.is_none() {
            self.steps.push(TraceStep::Masquerade { source: Source::Unset });
            return Ok(Conclusion::Dropped { outcome: Outcome::NoSourcePort });
        }
        if self.has_no_room(ForwardingPath::Masquerade, earlier)? {
            return Ok(Conclusion::Dropped { outcome: Outcome::ConntrackFull });
        }
        let Tuple { destination, destination_port, .. } = self.question.tuple;
        let candidate = Candidate {
            backend: step::socket(destination, destination_port),
            pod: self.tables.pod_name(&destination)?,
            outcome: Outcome::Masquerade,
            way: ForwardingPath::Masquerade,
            source: Source::Client,
        };
        Ok(Conclusion::Begins { backends: vec![candidate] })
    }

    /// How packets get to the backend, and which source address the backend sees.
    pub(super) fn way(
        &self,
        request: &AdmittedFlow,
        backend: &Backend,
    ) -> WalkResult<(ForwardingPath, Source)> {
        let client = &self.question.tuple.source;
        let may_tunnel = self.fallback(client)?.is_some();
        let device = self.tables.device(self.question.device)?;
        let vip = self.question.tuple.destination;
        let in_range = self.settings()?.is_some_and(|settings| settings.service_ranges.contains(&vip));
        let caught = device.is_some_and(|device| forwarding::is_caught(&device, || in_range));
        let (masquerade, direct) = (request.masquerade, request.direct);
        let rule = forwarding::forwarding(client, backend, masquerade, direct, caught, || may_tunnel);
        Ok(match rule {
            Forwarding::Hairpin => (ForwardingPath::Hairpin, Source::Vip(vip.into())),
            Forwarding::Tunnel => (ForwardingPath::Tunnel, Source::Client),
            Forwarding::Plain => (self.through_node(&request.service, backend)?, Source::Client),
            Forwarding::PlainOnNode => (self.through_node(&request.service, backend)?, Source::ClientOnNode),
            Forwarding::Masquerade => self.masqueraded(&request.service, backend)?,
            Forwarding::Caught => (ForwardingPath::Caught, Source::Vip(vip.into())),
            Forwarding::CaughtAndMasquerade => {
                (ForwardingPath::CaughtAndMasqueraded, self.node_source(backend)?)
            }
        })
    }

    /// How packets of a masqueraded client get to the backend, and which source address the backend sees.
    fn masqueraded(&self, service: &Service, backend: &Backend) -> WalkResult<(ForwardingPath, Source)> {
        if self.settings()?.is_none() {
            return Ok((ForwardingPath::Masqueraded, Source::Unset));
        }
        if forwarding::may_be_routed(forwarding::flags_of_service(service))
            && let Some(source) = self.routed_source(backend)?
        {
            return Ok((ForwardingPath::Routed, Source::Node(source)));
        }
        Ok((ForwardingPath::Masqueraded, self.node_source(backend)?))
    }

    /// The node's address that the backend sees, as `masquerade::source` finds it.
    fn node_source(&self, backend: &Backend) -> WalkResult<Source> {
        let source = match self.tables.route(&backend.address)?.and_then(|route| route.source) {
            Some(source) => Some(source),
            None => self.fallback(&backend.address)?.map(IpAddr::from),
        };
        Ok(source.map_or(Source::Unset, Source::Node))
    }

    /// The path of a flow that is neither masqueraded, nor a hairpin, nor tunnelled.
    fn through_node(&self, service: &Service, backend: &Backend) -> WalkResult<ForwardingPath> {
        let exit = self.direct_exit(&self.flow(service, backend, 0))?;
        Ok(if exit.is_some() { ForwardingPath::Direct } else { ForwardingPath::Stack })
    }

    /// The forward entry of a flow of the service to the backend, with these flags and those of all flows of the
    /// service. Its translated source is that of the client, even if the program would masquerade the flow.
    fn flow(&self, service: &Service, backend: &Backend, flags: u8) -> Flow {
        let Question { tuple: from, now, .. } = self.question;
        let to = Tuple { destination: backend.address, destination_port: backend.port, ..*from };
        Flow::new(from, &to, service.id, flags | forwarding::flags_of_service(service), *now)
    }

    /// The source address that the settings contain for masqueraded packets of the family of `like`; as
    /// `masquerade::fallback` reads it.
    fn fallback(&self, like: &Address) -> WalkResult<Option<Address>> {
        let Some(settings) = self.settings()? else { return Ok(None) };
        let source = *settings.source(like.is_v4());
        Ok((source != Address::from_v6([0; 16])).then_some(source))
    }

    /// The node's address for a routed flow to the backend, as `masquerade::routed_source` finds it.
    fn routed_source(&self, backend: &Backend) -> WalkResult<Option<IpAddr>> {
        let Some(entrance) = self.tables.device(self.question.device)? else { return Ok(None) };
        let Some(route) = self.tables.route(&backend.address)? else { return Ok(None) };
        let Some(exit) = self.tables.device(route.device)? else { return Ok(None) };
        if route.mtu < entrance.mtu || !forwarding::is_routed(&entrance, &exit) {
            return Ok(None);
        }
        match route.source {
            Some(source) => Ok(Some(source)),
            None => Ok(self.fallback(&backend.address)?.map(IpAddr::from)),
        }
    }

    /// The outcome under which the programs count a packet that begins a flow on the path `way`.
    fn outcome(
        &mut self,
        request: &AdmittedFlow,
        backend: &Backend,
        way: ForwardingPath,
        source: Source,
        earlier: bool,
    ) -> WalkResult<Outcome> {
        if source == Source::Unset {
            return Ok(Outcome::NoSourcePort);
        }
        let is_stateless = self.has_no_room(way, earlier)?;
        if is_stateless && !forwarding::needs_no_entry(way == ForwardingPath::Tunnel, &request.service) {
            return Ok(Outcome::ConntrackFull);
        }
        if way == ForwardingPath::Tunnel && self.tables.route(&backend.address)?.is_none() {
            self.steps.push(TraceStep::NoRoute);
            return Ok(Outcome::NoRoute);
        }
        self.look_at_port(backend, way)?;
        let is_masqueraded = way == ForwardingPath::Masqueraded;
        let exit = if is_masqueraded || way == ForwardingPath::Direct {
            let flags = if is_masqueraded { flow_flags::MASQUERADED } else { 0 };
            self.direct_exit(&self.flow(&request.service, backend, flags))?
        } else {
            None
        };
        if let Some(route) = &exit {
            self.note_exit(route);
        }
        Ok(match way {
            ForwardingPath::Hairpin => Outcome::Hairpin,
            ForwardingPath::Tunnel if is_stateless => Outcome::Stateless,
            ForwardingPath::Caught | ForwardingPath::CaughtAndMasqueraded => {
                let device = self.tables.device(self.question.device)?;
                let is_catch = device.is_some_and(|device| forwarding::is_catch(&device));
                if is_catch { Outcome::Caught } else { Outcome::OtherHook }
            }
            ForwardingPath::Tunnel => Outcome::NewTunnelledFlow,
            ForwardingPath::Routed => Outcome::NewRoutedFlow,
            _ if exit.is_some() => Outcome::NewDirectFlow,
            ForwardingPath::Masqueraded
            | ForwardingPath::Masquerade
            | ForwardingPath::Stack
            | ForwardingPath::Direct => Outcome::NewFlow,
        })
    }

    /// Whether the flow table has no room for the entries of the flow. A flow that replaces an `earlier` one needs
    /// fewer new entries; the function assumes that it fits.
    fn has_no_room(&mut self, way: ForwardingPath, earlier: bool) -> WalkResult<bool> {
        let entries = match way {
            ForwardingPath::Tunnel => 1,
            ForwardingPath::Masqueraded | ForwardingPath::CaughtAndMasqueraded => 4,
            ForwardingPath::Stack
            | ForwardingPath::Masquerade
            | ForwardingPath::Hairpin
            | ForwardingPath::Caught
            | ForwardingPath::Routed
            | ForwardingPath::Direct => 2,
        };
        let full = !earlier && self.tables.free_conntrack_entries()? < entries;
        if full && !self.steps.contains(&TraceStep::Full) {
            self.steps.push(TraceStep::Full);
        }
        Ok(full)
    }

    /// Adds a step if another flow to the backend already uses the client's source port.
    fn look_at_port(&mut self, backend: &Backend, way: ForwardingPath) -> WalkResult<()> {
        if !matches!(way, ForwardingPath::Stack | ForwardingPath::Direct) || !self.question.knows_port {
            return Ok(());
        }
        let from = &self.question.tuple;
        let to = Tuple { destination: backend.address, destination_port: backend.port, ..*from };
        let reply = self.tables.flow(&to.reversed())?;
        let is_others = |flags: u8| flags & flow_flags::SECOND_OF_MASQUERADED == 0;
        if reply.is_some_and(|reply| reply.to != from.reversed() && is_others(reply.flags)) {
            let step = TraceStep::PortTaken { port: from.source_port };
            if !self.steps.contains(&step) {
                self.steps.push(step);
            }
        }
        Ok(())
    }
}
