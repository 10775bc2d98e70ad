//! A packet at a hook: whether it is of a flow, and whether that goes on; as `datapath::process` and `xdp::process`.

use lb_common::{
    Backend, Outcome, Settings,
    conntrack::{Flow, Phase, Segment, Tuple, flow_flags, seconds_left},
    device_flags, protocol,
};
use lb_ebpf::service::schedule;

use super::{
    Hook, Question,
    frontend::Request,
    step::{Ends, Source, Stale, Step, Verdict, Way},
    tables::Tables,
};
use lb_datapath::{DatapathError, Route};

/// Why the walk ends early.
pub(super) enum Stop {
    /// It is known what becomes of the packet.
    With(Verdict),
    /// A table cannot be read.
    Failed(DatapathError),
}

impl From<DatapathError> for Stop {
    fn from(error: DatapathError) -> Self {
        Self::Failed(error)
    }
}

/// What is found out, or the end of the walk.
pub(super) type Found<T> = Result<T, Stop>;

/// The way of one packet.
pub(super) struct Walk<'a, T> {
    pub(super) tables: &'a T,
    pub(super) question: &'a Question,
    pub(super) segment: Segment,
    pub(super) steps: Vec<Step>,
}

impl<'a, T: Tables> Walk<'a, T> {
    pub(super) fn new(tables: &'a T, question: &'a Question) -> Self {
        Self { tables, question, segment: question.segment(), steps: Vec::new() }
    }

    /// A packet at one of the tc hooks.
    pub(super) fn tc(&mut self) -> Found<Verdict> {
        let known = self.known_flow()?;
        if let Some(flow) = &known
            && self.goes_on(flow)?
        {
            return self.follow(flow);
        }
        if self.question.hook == Hook::Egress {
            return Ok(untouched(Outcome::NoService));
        }
        let Some(request) = self.prepare()? else { return self.unlisted() };
        let backends = self.choose(&request, known.as_ref())?;
        self.begin(&request, &backends, known.is_some())
    }

    /// A frame at the XDP hook. What it does not drop or send on is the business of tc, uncounted.
    pub(super) fn xdp(&mut self) -> Found<Verdict> {
        let verdict = match self.try_xdp() {
            Ok(verdict) => verdict,
            Err(Stop::With(verdict @ Verdict::Dropped { .. })) => Some(verdict),
            Err(Stop::With(_)) => None,
            Err(failed @ Stop::Failed(_)) => return Err(failed),
        };
        match verdict {
            Some(verdict) => Ok(verdict),
            None => {
                self.steps = vec![Step::LeftToTc];
                self.tc()
            }
        }
    }

    /// What the XDP program itself does; nothing is to leave the packet to tc.
    fn try_xdp(&mut self) -> Found<Option<Verdict>> {
        if self.question.tuple.protocol == protocol::SCTP {
            return Ok(None);
        }
        let known = self.known_flow()?;
        if let Some(flow) = &known {
            if flow.flags & flow_flags::ROUTED == 0 || self.is_foreign(flow)? {
                return Ok(None);
            }
            if !self.is_new_connection(flow)? {
                let leaves = self.takes_frames(&flow.to)?;
                return Ok(leaves.then(|| routed(flow)));
            }
        }
        let Some(request) = self.prepare()? else { return Ok(None) };
        let backends = self.choose(&request, known.as_ref())?;
        for backend in &backends {
            if !self.is_routed(&request, backend)? {
                return Ok(None);
            }
        }
        let verdict = self.begin(&request, &backends, known.is_some())?;
        if verdict == (Verdict::Dropped { outcome: Outcome::NoRoute }) {
            return Ok(None);
        }
        for backend in &backends {
            let to = Tuple { destination: backend.address, ..self.question.tuple };
            if matches!(verdict, Verdict::Begins { .. }) && !self.takes_frames(&to)? {
                return Ok(None);
            }
        }
        Ok(Some(verdict))
    }

    /// Whether the XDP program begins flows to the backend, or drops them.
    fn is_routed(&self, request: &Request, backend: &Backend) -> Found<bool> {
        let (way, source) = self.way(request, backend)?;
        let no_ports = source == Source::Nobody && self.settings()?.is_none();
        Ok(no_ports || matches!(way, Way::Routed | Way::Tunnel))
    }

    /// Whether frames `to` may leave from XDP: their next hop is known, and its device takes them.
    fn takes_frames(&self, to: &Tuple) -> Found<bool> {
        let Some(route) = self.tables.route(&to.destination)? else { return Ok(false) };
        let info = self.tables.device(route.device)?;
        let takes = info.is_some_and(|info| info.flags & device_flags::XDP_REDIRECT_TARGET != 0);
        Ok(route.neighbour && (takes || route.device == self.question.device))
    }

    /// The entry of the packet's direction.
    fn known_flow(&mut self) -> Found<Option<Flow>> {
        if !self.question.knows_port {
            self.steps.push(Step::NoPort);
            return Ok(None);
        }
        let Some(flow) = self.tables.flow(&self.question.tuple)? else {
            self.steps.push(Step::NoFlow);
            return Ok(None);
        };
        let peer = self.peer(&flow)?;
        let (phase, seconds_left) = match (&peer, flow.is_tunnelled(), flow.is_reply()) {
            (_, true, _) => (Some(Phase::of_one_way(&flow)), seconds_left(&flow, &flow, self.question.now)),
            (Some(peer), _, true) => {
                (Some(Phase::of(peer, &flow)), seconds_left(peer, &flow, self.question.now))
            }
            (Some(peer), ..) => (Some(Phase::of(&flow, peer)), seconds_left(&flow, peer, self.question.now)),
            (None, ..) => (None, 0),
        };
        let service = self.name_of(flow.service)?;
        let (reply, to, way) = (flow.is_reply(), Ends::from(&flow.to), way_of(&flow));
        self.steps.push(Step::Flow { reply, to, phase, seconds_left, service, way });
        Ok(Some(flow))
    }

    /// The entry of the other direction.
    fn peer(&self, flow: &Flow) -> Found<Option<Flow>> {
        Ok(self.tables.flow(&flow.to.reversed())?)
    }

    /// As `datapath::goes_on`.
    fn goes_on(&mut self, flow: &Flow) -> Found<bool> {
        if self.question.hook == Hook::Egress && !self.translates(flow) {
            self.steps.push(Step::OtherHook);
            return Err(Stop::With(untouched(Outcome::OtherHook)));
        }
        if flow.flags & flow_flags::MASQUERADE != 0 {
            return Ok(true);
        }
        if self.is_foreign(flow)? {
            self.steps.push(Step::Foreign);
            return Err(Stop::With(untouched(Outcome::NoService)));
        }
        Ok(!self.is_new_connection(flow)?)
    }

    /// As `Hook::translates`.
    fn translates(&self, flow: &Flow) -> bool {
        (flow.flags & flow_flags::AT_EGRESS != 0) == (self.question.hook == Hook::Egress)
    }

    /// As `conntrack::is_foreign`, which also forgets the flow.
    fn is_foreign(&self, flow: &Flow) -> Found<bool> {
        if !self.segment.is_syn_ack() || !flow.is_reply() {
            return Ok(false);
        }
        Ok(self.peer(flow)?.is_some_and(|forward| Phase::of(&forward, flow).is_over()))
    }

    /// As `conntrack::is_new_connection`.
    fn is_new_connection(&mut self, flow: &Flow) -> Found<bool> {
        if !self.segment.is_syn() || flow.is_reply() {
            return Ok(false);
        }
        let why = self.stale(flow)?;
        self.steps.push(why.map_or(Step::Retransmission, |why| Step::Anew { why }));
        Ok(why.is_some())
    }

    /// As `conntrack::is_stale`.
    fn stale(&self, flow: &Flow) -> Found<Option<Stale>> {
        let phase = match self.peer(flow)? {
            _ if flow.is_tunnelled() => Phase::of_one_way(flow),
            Some(reply) => Phase::of(flow, &reply),
            None => return Ok(Some(Stale::HalfLost)),
        };
        let retries = self.tables.globals().syn_retries;
        if phase.is_over() {
            return Ok(Some(Stale::Over));
        }
        if retries != 0 && flow.is_unanswered(phase, retries) {
            return Ok(Some(Stale::Unanswered));
        }
        let Some(service) = self.record()? else { return Ok(None) };
        let (service, _) = self.for_client(service)?;
        let slice = self.tables.backends(service.backends_base, service.backends_count)?;
        let slot = |slot: u32| slice.get(slot.wrapping_sub(service.backends_base) as usize);
        let (address, port) = (&flow.to.destination, flow.to.destination_port);
        let is_lost = (service.backends_count > 0 || phase == Phase::Opening)
            && schedule::find(&service, address, port, slot).is_none();
        Ok(is_lost.then_some(Stale::BackendGone))
    }

    /// As `datapath::follow`.
    fn follow(&mut self, flow: &Flow) -> Found<Verdict> {
        if flow.flags & flow_flags::ROUTED != 0 && self.question.hook == Hook::Ingress {
            if self.tables.route(&flow.to.destination)?.is_none() {
                self.steps.push(Step::NoRoute);
                return Ok(Verdict::Dropped { outcome: Outcome::NoRoute });
            }
            return Ok(routed(flow));
        }
        let to = Ends::from(&flow.to);
        if self.question.hook == Hook::Ingress
            && flow.may_bypass_stack(self.tables.globals().direct)
            && let Some(route) = self.direct_exit(&flow.to)?
        {
            self.note_exit(&route);
            return Ok(Verdict::Translated { outcome: Outcome::Direct, to });
        }
        if !self.translates(flow) {
            self.steps.push(Step::OtherHook);
            return Ok(untouched(Outcome::OtherHook));
        }
        let outcome = match flow.flags {
            flags if flags & flow_flags::MASQUERADE != 0 => Outcome::Masquerade,
            flags if flags & flow_flags::HAIRPIN != 0 => Outcome::Hairpin,
            flags if flags & flow_flags::REPLY != 0 => Outcome::Reply,
            _ => Outcome::Forward,
        };
        Ok(Verdict::Translated { outcome, to })
    }

    /// Where packets `to` leave past the stack although their flow is none of those that always do; as `direct::leads_out`.
    pub(super) fn direct_exit(&self, to: &Tuple) -> Found<Option<Route>> {
        if !self.tables.globals().direct || to.protocol == protocol::SCTP {
            return Ok(None);
        }
        Ok(self.tables.route(&to.destination)?.filter(|route| route.neighbour))
    }

    /// Notes the device through which packets go past the stack.
    pub(super) fn note_exit(&mut self, route: &Route) {
        let name = self.tables.device_name(route.device);
        let step = Step::PastStack { device: name.unwrap_or_else(|| format!("#{}", route.device)) };
        if !self.steps.contains(&step) {
            self.steps.push(step);
        }
    }

    /// What holds for every packet; nothing as long as no agent has written any.
    pub(super) fn settings(&self) -> Found<Option<Settings>> {
        Ok(Some(self.tables.settings()?).filter(|settings| settings.ports != 0))
    }

    pub(super) fn name_of(&self, service: u32) -> Found<String> {
        Ok(self.tables.service_name(service)?.unwrap_or_else(|| format!("service #{service}")))
    }
}

/// It goes on as it is.
pub(super) const fn untouched(outcome: Outcome) -> Verdict {
    Verdict::Untouched { outcome }
}

fn routed(flow: &Flow) -> Verdict {
    let outcome = if flow.is_tunnelled() { Outcome::Tunnelled } else { Outcome::Routed };
    Verdict::Translated { outcome, to: Ends::from(&flow.to) }
}

const fn way_of(flow: &Flow) -> Way {
    match flow.flags {
        flags if flags & flow_flags::TUNNEL != 0 => Way::Tunnel,
        flags if flags & flow_flags::ROUTED != 0 => Way::Routed,
        flags if flags & flow_flags::HAIRPIN != 0 => Way::Hairpin,
        flags if flags & flow_flags::MASQUERADE != 0 => Way::Masquerade,
        flags if flags & flow_flags::MASQUERADED != 0 => Way::Masqueraded,
        _ => Way::Stack,
    }
}
