//! How packets of a new flow get to a backend, and whether the flow can begin; as `open::open`.

use std::net::IpAddr;

use lb_common::{
    Address, Backend, Outcome, backend_flags,
    conntrack::{Tuple, flow_flags},
    device_flags,
};

use super::{
    frontend::Request,
    step::{Candidate, Source, Step, Verdict, Way, endpoint},
    tables::Tables,
    walk::{Found, Walk},
};

impl<T: Tables> Walk<'_, T> {
    /// The beginning of a flow to one of these backends, in place of an `earlier` one.
    pub(super) fn begin(&mut self, request: &Request, backends: &[Backend], earlier: bool) -> Found<Verdict> {
        let mut candidates = Vec::with_capacity(backends.len());
        let mut sources = Vec::new();
        for backend in backends {
            let (way, source) = self.way(request, backend)?;
            if !sources.contains(&source) {
                self.steps.push(Step::Masquerade { source });
                sources.push(source);
            }
            candidates.push(Candidate {
                backend: endpoint(backend),
                pod: self.tables.pod_name(&backend.address)?,
                outcome: self.outcome(backend, way, source, earlier)?,
                way,
            });
        }
        let first = candidates.first().map(|candidate| candidate.outcome);
        let all_same = candidates.iter().all(|candidate| Some(candidate.outcome) == first);
        match first.filter(|_| all_same) {
            Some(outcome @ (Outcome::NoSourcePort | Outcome::ConntrackFull | Outcome::NoRoute)) => {
                Ok(Verdict::Dropped { outcome })
            }
            _ => Ok(Verdict::Begins { backends: candidates }),
        }
    }

    /// How packets get to the backend, and whose address it sees.
    pub(super) fn way(&self, request: &Request, backend: &Backend) -> Found<(Way, Source)> {
        let has = |flag| backend.flags & flag != 0;
        let tuple = &self.question.tuple;
        let masquerade = request.masquerade && !(request.direct && has(backend_flags::LOCAL));
        if backend.address == tuple.source {
            // The virtual address stands for the client.
            return Ok((Way::Hairpin, Source::Client));
        }
        if request.direct && has(backend_flags::PEER) && self.fallback(&tuple.source)?.is_some() {
            return Ok((Way::Tunnel, Source::Client));
        }
        if !masquerade {
            return Ok((self.through_node(backend)?, Source::Client));
        }
        if has(backend_flags::HOST) {
            return Ok((self.through_node(backend)?, Source::ClientOnNode));
        }
        if self.settings()?.is_none() {
            return Ok((Way::Masqueraded, Source::Nobody));
        }
        if let Some(source) = self.routed_source(backend)? {
            return Ok((Way::Routed, Source::Node(source)));
        }
        let source = match self.tables.route(&backend.address)?.and_then(|route| route.source) {
            Some(source) => Some(source),
            None => self.fallback(&backend.address)?.map(IpAddr::from),
        };
        Ok((Way::Masqueraded, source.map_or(Source::Nobody, Source::Node)))
    }

    /// The way of a flow that nothing is special about.
    fn through_node(&self, backend: &Backend) -> Found<Way> {
        let to = Tuple { destination: backend.address, ..self.question.tuple };
        Ok(if self.direct_exit(&to)?.is_some() { Way::Direct } else { Way::Stack })
    }

    /// As `masquerade::fallback`: the address that the agent gives, of the family of `like`.
    fn fallback(&self, like: &Address) -> Found<Option<Address>> {
        let Some(settings) = self.settings()? else { return Ok(None) };
        let source = if like.is_v4() { settings.source_v4 } else { settings.source_v6 };
        Ok((source != Address::from_v6([0; 16])).then_some(source))
    }

    /// As `routed::source`.
    fn routed_source(&self, backend: &Backend) -> Found<Option<IpAddr>> {
        let wire = |device| -> Found<Option<u32>> {
            let info = self.tables.device(device)?;
            Ok(info.filter(|info| info.flags & device_flags::WIRE != 0).map(|info| info.mtu))
        };
        let Some(entrance) = wire(self.question.device)? else { return Ok(None) };
        let Some(route) = self.tables.route(&backend.address)? else { return Ok(None) };
        if route.mtu < entrance || wire(route.device)?.is_none_or(|mtu| mtu > entrance) {
            return Ok(None);
        }
        match route.source {
            Some(source) => Ok(Some(source)),
            None => Ok(self.fallback(&backend.address)?.map(IpAddr::from)),
        }
    }

    /// What the first packet counts as.
    fn outcome(&mut self, backend: &Backend, way: Way, source: Source, earlier: bool) -> Found<Outcome> {
        if source == Source::Nobody {
            return Ok(Outcome::NoSourcePort);
        }
        if self.has_no_room(way, earlier)? {
            return Ok(Outcome::ConntrackFull);
        }
        if way == Way::Tunnel && self.tables.route(&backend.address)?.is_none() {
            self.steps.push(Step::NoRoute);
            return Ok(Outcome::NoRoute);
        }
        self.look_at_port(backend, way)?;
        let to = Tuple { destination: backend.address, ..self.question.tuple };
        let exit = if matches!(way, Way::Direct | Way::Masqueraded) { self.direct_exit(&to)? } else { None };
        if let Some(route) = &exit {
            self.note_exit(route);
        }
        Ok(match way {
            Way::Hairpin => Outcome::Hairpin,
            Way::Tunnel => Outcome::NewTunnelledFlow,
            Way::Routed => Outcome::NewRoutedFlow,
            _ if exit.is_some() => Outcome::NewDirectFlow,
            Way::Masqueraded | Way::Masquerade | Way::Stack | Way::Direct => Outcome::NewFlow,
        })
    }

    /// Whether the entries of the flow find no room. (One that takes the place of another needs less; that is left out.)
    fn has_no_room(&mut self, way: Way, earlier: bool) -> Found<bool> {
        let entries = match way {
            Way::Tunnel => 1,
            Way::Masqueraded => 4,
            Way::Stack | Way::Masquerade | Way::Hairpin | Way::Routed | Way::Direct => 2,
        };
        let full = !earlier && self.tables.room_for_flows()? < entries;
        if full && !self.steps.contains(&Step::Full) {
            self.steps.push(Step::Full);
        }
        Ok(full)
    }

    /// Whether the client's port is another flow's towards the backend.
    fn look_at_port(&mut self, backend: &Backend, way: Way) -> Found<()> {
        if !matches!(way, Way::Stack | Way::Direct) || !self.question.knows_port {
            return Ok(());
        }
        let from = &self.question.tuple;
        let to = Tuple { destination: backend.address, destination_port: backend.port, ..*from };
        let reply = self.tables.flow(&to.reversed())?;
        let is_others = |flags: u8| flags & flow_flags::MASQUERADE == 0;
        if reply.is_some_and(|reply| reply.to != from.reversed() && is_others(reply.flags)) {
            let step = Step::PortTaken { port: from.source_port };
            if !self.steps.contains(&step) {
                self.steps.push(step);
            }
        }
        Ok(())
    }
}
