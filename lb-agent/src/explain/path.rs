//! Predicts how packets of a new flow get to a backend, and whether the flow can be created. Follows `flow::create` of
//! the BPF programs.

use std::net::IpAddr;

use lb_common::{
    Address, Backend, Outcome, Service,
    conntrack::{Flow, Tuple, flow_flags},
    service_flags,
};
use lb_ebpf::rules::{
    self,
    forwarding::{self, Forwarding},
};

use super::{
    Question,
    frontend::AdmittedFlow,
    packet::way_of,
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
            let (flow, source) = self.begun(request, backend)?;
            if !sources.contains(&source) {
                self.steps.push(TraceStep::Masquerade { source });
                sources.push(source);
            }
            candidates.push(Candidate {
                backend: endpoint(backend),
                pod: self.tables.pod_name(&backend.address)?,
                outcome: self.outcome(request, &flow, source, earlier)?,
                way: self.way(&flow)?,
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
        if self.has_no_room(flow_flags::AT_EGRESS, earlier)? {
            return Ok(Conclusion::Dropped { outcome: Outcome::ConntrackFull });
        }
        let Question { tuple, now, .. } = self.question;
        let Tuple { destination, destination_port, .. } = *tuple;
        let flow = Flow::new(tuple, tuple, 0, flow_flags::AT_EGRESS, *now);
        let candidate = Candidate {
            backend: step::socket(destination, destination_port),
            pod: self.tables.pod_name(&destination)?,
            outcome: rules::flow::outcome(&flow, false),
            way: ForwardingPath::Masquerade,
            source: Source::Client,
        };
        Ok(Conclusion::Begins { backends: vec![candidate] })
    }

    /// The forward entry of a new flow to the backend, and which source address the backend sees. The entry has the
    /// flow's flags and destination; its translated source is the client's, even if the program would masquerade the
    /// flow.
    pub(super) fn begun(&self, request: &AdmittedFlow, backend: &Backend) -> WalkResult<(Flow, Source)> {
        let Question { tuple: from, now, .. } = self.question;
        let (client, vip) = (&from.source, from.destination);
        let may_tunnel = self.fallback(client)?.is_some() && !self.tables.is_node(client)?;
        let device = self.tables.device(self.question.device)?;
        let in_range = self.settings()?.is_some_and(|settings| settings.service_ranges.contains(&vip));
        let caught = device.is_some_and(|device| forwarding::is_caught(&device, || in_range));
        let (masquerade, dsr) = (request.masquerade, request.dsr);
        let rule = forwarding::forwarding(client, backend, masquerade, dsr, caught, || may_tunnel);
        let (is_routed, source) = match rule {
            Forwarding::Plain | Forwarding::Tunnel => (false, Source::Client),
            Forwarding::PlainOnNode => (false, Source::ClientOnNode),
            Forwarding::Hairpin | Forwarding::Caught => (false, Source::Vip(vip.into())),
            Forwarding::Masquerade => self.masqueraded(&request.service, backend)?,
            Forwarding::CaughtAndMasquerade => (false, self.node_source(backend)?),
        };
        let flags = forwarding::flags_of(rule, is_routed) | forwarding::flags_of_service(&request.service);
        let to = Tuple { destination: backend.address, destination_port: backend.port, ..*from };
        Ok((Flow::new(from, &to, request.service.id, flags, *now), source))
    }

    /// Whether a masqueraded flow is routed, and which source address the backend sees.
    fn masqueraded(&self, service: &Service, backend: &Backend) -> WalkResult<(bool, Source)> {
        if self.settings()?.is_none() {
            return Ok((false, Source::Unset));
        }
        if forwarding::may_be_routed(forwarding::flags_of_service(service))
            && let Some(source) = self.routed_source(backend)?
        {
            return Ok((true, Source::Node(source)));
        }
        Ok((false, self.node_source(backend)?))
    }

    /// The node's address that the backend sees, as `masquerade::source` finds it. [`Source::Unset`] if there are no
    /// settings, because the range of ports for masquerading is then unknown, or if no source address is known.
    fn node_source(&self, backend: &Backend) -> WalkResult<Source> {
        if self.settings()?.is_none() {
            return Ok(Source::Unset);
        }
        let source = match self.tables.route(&backend.address)?.and_then(|route| route.source) {
            Some(source) => Some(source),
            None => self.fallback(&backend.address)?.map(IpAddr::from),
        };
        Ok(source.map_or(Source::Unset, Source::Node))
    }

    /// How packets of a new flow get to the backend.
    fn way(&self, flow: &Flow) -> WalkResult<ForwardingPath> {
        let way = way_of(flow);
        let is_direct = way == ForwardingPath::Stack && self.direct_exit(flow)?.is_some();
        Ok(if is_direct { ForwardingPath::Direct } else { way })
    }

    /// The source address that the settings contain for masqueraded packets of the family of `like`; as
    /// `masquerade::fallback` reads it.
    fn fallback(&self, like: &Address) -> WalkResult<Option<Address>> {
        let Some(settings) = self.settings()? else { return Ok(None) };
        let source = *settings.source(like.is_v4());
        Ok((source != Address::NONE).then_some(source))
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

    /// The outcome under which the programs count a packet that begins this flow.
    fn outcome(
        &mut self,
        request: &AdmittedFlow,
        flow: &Flow,
        source: Source,
        earlier: bool,
    ) -> WalkResult<Outcome> {
        if source == Source::Unset {
            return Ok(Outcome::NoSourcePort);
        }
        let is_stateless = self.has_no_room(flow.flags, earlier)?;
        if is_stateless && !forwarding::needs_no_entry(flow.is_tunnelled(), &request.service) {
            return Ok(Outcome::ConntrackFull);
        }
        if flow.is_tunnelled() {
            if self.tables.route(&flow.to.destination)?.is_none() {
                self.steps.push(TraceStep::NoRoute);
                return Ok(Outcome::NoRoute);
            }
            if is_stateless {
                return Ok(rules::flow::outcome(flow, false).without_entry());
            }
        }
        self.look_at_port(flow)?;
        let is_routed = flow.flags & flow_flags::ROUTED != 0;
        let exit = if is_routed { None } else { self.direct_exit(flow)? };
        if let Some(route) = &exit {
            self.note_exit(route);
        }
        // The program at the ingress of the catch device translates the first packet as the program at the egress of
        // that device does. A caught flow that begins at another device is translated when the packet has reached the
        // catch device.
        if !rules::flow::is_translated_at(flow, self.is_at_catch_device()?) {
            return Ok(Outcome::OtherHook);
        }
        let outcome = rules::flow::outcome(flow, exit.is_some());
        // The XDP program creates the flow before it knows whether the frame can leave.
        let is_created = self.is_left_by_xdp && is_routed && !self.takes_frames(&flow.to)?;
        Ok(if is_created { outcome } else { outcome.of_first_packet() })
    }

    /// Whether the flow table has no room for the entries of a connection whose first flow has these flags. A
    /// connection that replaces an `earlier` one needs fewer new entries; the function assumes that they fit. Adds a
    /// step if there is no room.
    fn has_no_room(&mut self, flags: u8, earlier: bool) -> WalkResult<bool> {
        let full = !earlier && self.tables.free_conntrack_entries()? < flow_flags::entries(flags);
        if full && !self.steps.contains(&TraceStep::Full) {
            self.steps.push(TraceStep::Full);
        }
        Ok(full)
    }

    /// Adds a step if another flow to the backend already uses the client's source port.
    fn look_at_port(&mut self, flow: &Flow) -> WalkResult<()> {
        if way_of(flow) != ForwardingPath::Stack || !self.question.knows_port {
            return Ok(());
        }
        let from = &self.question.tuple;
        let reply = self.tables.flow(&flow.to.reversed())?;
        if reply.is_some_and(|reply| !reply.leads_back_to(from)) {
            let step = TraceStep::PortTaken { port: from.source_port };
            if !self.steps.contains(&step) {
                self.steps.push(step);
            }
        }
        Ok(())
    }
}
