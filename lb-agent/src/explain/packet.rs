//! Traces what a program does with a packet: it follows the packet's flow, begins a flow, or leaves the packet
//! untouched. [`Walk::tc`] takes the steps of the programs' `datapath::process`, [`Walk::xdp`] those of `xdp::process`.

use lb_common::{
    Backend, Outcome,
    conntrack::{Flow, Phase, Tuple, flow_flags, seconds_left},
};
use lb_ebpf::{
    rules::{
        self,
        flow::{Membership, Relation, Staleness},
        forwarding,
    },
    service::schedule,
};

use super::{
    HookPoint, Question,
    frontend::AdmittedFlow,
    step::{Conclusion, Ends, ForwardingPath, Source, Stale, TraceStep},
    tables::Tables,
    walk::{Stop, Walk, WalkResult, untouched},
};

impl<T: Tables> Walk<'_, T> {
    /// Explains a packet at tc ingress or tc egress.
    pub(super) fn tc(&mut self) -> WalkResult<Conclusion> {
        let known = self.known_flow()?;
        if let Some(flow) = &known
            && self.check_same_flow(flow)?
        {
            return self.follow(flow);
        }
        let at_egress = self.question.hook == HookPoint::Egress;
        let at_catch = at_egress && self.is_at_catch_device()?;
        if known.as_ref().is_some_and(|flow| rules::flow::begins_only_at_ingress(flow, at_egress, at_catch)) {
            self.steps.push(TraceStep::BeginsAtIngress);
            return Ok(untouched(Outcome::NoService));
        }
        if at_egress {
            return self.of_node(known.is_some());
        }
        if let Some(verdict) = self.query()? {
            return Ok(verdict);
        }
        let Some(request) = self.prepare()? else { return self.unlisted() };
        let backends = self.choose(&request, known.as_ref())?;
        self.begin(&request, &backends, known.is_some())
    }

    /// Explains a packet that leaves the node and belongs to no flow, or (if `earlier`) that begins a connection in
    /// place of a flow with the same tuple; like `slow_path::create_of_node`.
    fn of_node(&mut self, earlier: bool) -> WalkResult<Conclusion> {
        if !earlier && !self.begins_at_egress()? {
            return self.answer();
        }
        let tuple = &self.question.tuple;
        self.steps.push(TraceStep::NodePortTaken { port: tuple.source_port });
        self.begin_of_node(earlier)
    }

    /// Whether the packet begins a connection of the node with a source port that a flow already uses towards the same
    /// endpoint; like `of_node::begins`.
    fn begins_at_egress(&self) -> WalkResult<bool> {
        let Question { tuple, from_node, .. } = self.question;
        if !from_node
            || self.is_at_catch_device()?
            || !rules::flow::may_begin_at_egress(self.question.body(), &self.segment)
        {
            return Ok(false);
        }
        Ok(self.tables.flow(&tuple.reversed())?.is_some_and(|flow| rules::flow::takes_answers_of_node(&flow)))
    }

    pub(super) fn is_at_catch_device(&self) -> WalkResult<bool> {
        Ok(self.tables.device(self.question.device)?.is_some_and(|device| forwarding::is_catch(&device)))
    }

    /// Explains a frame at the XDP hook. Frames that the program neither drops nor forwards go on to tc, uncounted.
    pub(super) fn xdp(&mut self) -> WalkResult<Conclusion> {
        let verdict = match self.try_xdp() {
            Ok(verdict) => verdict,
            Err(Stop::With(verdict @ Conclusion::Dropped { .. })) => Some(verdict),
            Err(Stop::With(_)) => None,
            Err(failed @ Stop::Failed(_)) => return Err(failed),
        };
        match verdict {
            Some(verdict) => Ok(verdict),
            None => self.left_to_tc(),
        }
    }

    /// Explains a packet that the XDP program passes on to tc ingress.
    fn left_to_tc(&mut self) -> WalkResult<Conclusion> {
        let question = Question { hook: HookPoint::Ingress, ..*self.question };
        let mut at_tc = Walk { is_left_by_xdp: self.is_left_by_xdp, ..Walk::new(self.tables, &question) };
        let verdict = at_tc.tc();
        self.steps = vec![TraceStep::LeftToTc];
        self.steps.append(&mut at_tc.steps);
        verdict
    }

    /// The verdict of the XDP program; `None` if it passes the packet on to tc.
    fn try_xdp(&mut self) -> WalkResult<Option<Conclusion>> {
        // Without an entry in `DEVICES` for the device, the program treats its frames as not addressed to the node.
        let is_for_node = self.tables.device(self.question.device)?.is_some();
        if !self.question.body().may_bypass_stack() || !is_for_node {
            return Ok(None);
        }
        let known = self.known_flow()?;
        if let Some(flow) = &known {
            if flow.flags & flow_flags::ROUTED == 0 {
                return Ok(None);
            }
            match self.relation(flow, false)? {
                Relation::Same => {
                    let leaves = self.takes_frames(&flow.to)?;
                    return Ok(leaves.then(|| translated(flow, false)));
                }
                Relation::New => {}
                Relation::OtherHook | Relation::Foreign => return Ok(None),
            }
        }
        let Some(request) = self.prepare()? else { return Ok(None) };
        let backends = self.choose(&request, known.as_ref())?;
        self.is_left_by_xdp = true;
        for backend in &backends {
            if !self.is_routed(&request, backend)? {
                return Ok(None);
            }
        }
        let verdict = self.begin(&request, &backends, known.is_some())?;
        if verdict == (Conclusion::Dropped { outcome: Outcome::NoRoute }) {
            return Ok(None);
        }
        for backend in &backends {
            let to = Tuple { destination: backend.address, ..self.question.tuple };
            if matches!(verdict, Conclusion::Begins { .. }) && !self.takes_frames(&to)? {
                return Ok(None);
            }
        }
        Ok(Some(verdict))
    }

    /// Whether the XDP program, rather than tc, handles a new flow to the backend. XDP creates routed and tunnelled
    /// flows. Until the agent has written settings, XDP also drops packets that need masquerading.
    fn is_routed(&self, request: &AdmittedFlow, backend: &Backend) -> WalkResult<bool> {
        let (flow, source) = self.begun(request, backend)?;
        let no_ports = source == Source::Unset && self.settings()?.is_none();
        Ok(no_ports || flow.flags & flow_flags::ROUTED != 0)
    }

    /// Whether XDP can send frames with the tuple `to`: the kernel knows the link-layer address of their next hop, and
    /// the device of the route can send them, by `XDP_TX` if the packet arrived on that device, else by a redirect.
    pub(super) fn takes_frames(&self, to: &Tuple) -> WalkResult<bool> {
        let Some(route) = self.tables.route(&to.destination)? else { return Ok(false) };
        let info = self.tables.device(route.device)?;
        let flags = info.map_or(0, |info| forwarding::next_hop_flags_of(info.flags));
        let back = route.device == self.question.device;
        Ok(route.neighbour && forwarding::leaves_at_xdp(flags, back))
    }

    /// The flow table's entry for the packet's tuple; adds the lookup as a step.
    fn known_flow(&mut self) -> WalkResult<Option<Flow>> {
        if !self.question.knows_port {
            self.steps.push(TraceStep::NoPort);
            return Ok(None);
        }
        let Some(flow) = self.tables.flow(&self.question.tuple)? else {
            self.steps.push(TraceStep::NoFlow);
            return Ok(None);
        };
        // A tunnelled flow has no reverse entry. An entry that does not lead back to the packet's tuple belongs to
        // another flow.
        let leads_back = |peer: &Flow| !flow.is_tunnelled() && peer.leads_back_to(&self.question.tuple);
        let peer = self.reverse_entry(&flow)?.filter(leads_back);
        self.steps.push(TraceStep::Flow {
            reply: flow.is_reply(),
            to: Ends::from(&flow.to),
            phase: Phase::of_entry(&flow, peer.as_ref()),
            half: flow.is_half(peer.as_ref()),
            seconds_left: seconds_left(&flow, peer.as_ref(), self.question.now),
            service: self.name_of(flow.service)?,
            way: way_of(&flow),
        });
        Ok(Some(flow))
    }

    /// The flow's entry for the opposite direction.
    fn reverse_entry(&self, flow: &Flow) -> WalkResult<Option<Flow>> {
        Ok(self.tables.flow(&flow.to.reversed())?)
    }

    /// Whether the packet belongs to the flow, rather than beginning another flow; like `slow_path::check_same_flow`.
    fn check_same_flow(&mut self, flow: &Flow) -> WalkResult<bool> {
        let at_egress = self.question.hook == HookPoint::Egress;
        if rules::flow::is_of_other_flow(flow, at_egress, || self.question.from_node) {
            self.steps.push(TraceStep::OfOtherFlow);
            return Err(Stop::With(untouched(Outcome::OtherHook)));
        }
        match self.relation(flow, at_egress)? {
            Relation::Same => Ok(true),
            Relation::New => Ok(false),
            Relation::OtherHook => {
                self.steps.push(TraceStep::OtherHook);
                Err(Stop::With(untouched(Outcome::OtherHook)))
            }
            Relation::Foreign => {
                self.steps.push(TraceStep::Foreign);
                Err(Stop::With(untouched(Outcome::NoService)))
            }
        }
    }

    /// The relation of the packet to the flow with this entry; adds a step about a SYN of the client.
    fn relation(&mut self, flow: &Flow, at_egress: bool) -> WalkResult<Relation> {
        let (bypasses_vip, staleness) = (self.bypasses_vip(flow)?, self.staleness(flow)?);
        let has_reverse_entry = self.reverse_entry(flow)?.is_some();
        let is_lost = rules::proxy_protocol::is_lost(flow, || has_reverse_entry);
        let mut asked = false;
        let relation = rules::flow::relation(
            flow,
            at_egress,
            || bypasses_vip,
            || {
                asked = true;
                staleness.is_some_and(|staleness| staleness != Staleness::Fresh) || is_lost
            },
        );
        if asked {
            self.note_staleness(staleness.or(is_lost.then_some(Staleness::HalfLost)));
        }
        Ok(relation)
    }

    /// Whether this hook translates packets of the flow.
    fn translates(&self, flow: &Flow) -> bool {
        rules::flow::is_translated_at(flow, self.question.hook == HookPoint::Egress)
    }

    /// Whether the packet belongs to a connection that bypasses the VIP; like `conntrack::delete_if_bypassed`, which
    /// also deletes the flow in that case.
    fn bypasses_vip(&self, flow: &Flow) -> WalkResult<bool> {
        if !rules::flow::is_syn_ack_of_backend(&self.segment, flow) {
            return Ok(false);
        }
        Ok(self.reverse_entry(flow)?.is_some_and(|forward| rules::flow::has_ended(&forward, flow)))
    }

    fn note_staleness(&mut self, staleness: Option<Staleness>) {
        let Some(staleness) = staleness else { return };
        let step =
            Stale::of(staleness).map_or(TraceStep::Retransmission, |why| TraceStep::NewConnection { why });
        self.steps.push(step);
    }

    /// Whether the entry is stale for the packet, and why; `None` if the packet is no SYN of the client.
    fn staleness(&self, flow: &Flow) -> WalkResult<Option<Staleness>> {
        if !rules::flow::is_syn_of_client(&self.segment, flow) {
            return Ok(None);
        }
        let (reply, membership) = (self.reverse_entry(flow)?, self.membership(flow)?);
        let syn_retries = self.tables.globals().syn_retries;
        let now = self.question.now;
        Ok(Some(rules::flow::staleness(flow, reply.as_ref(), syn_retries, now, || membership)))
    }

    /// Whether the service of the packet still has the flow's backend; like `conntrack::membership`.
    fn membership(&self, flow: &Flow) -> WalkResult<Membership> {
        let Some(service) = self.record()? else { return Ok(Membership::NoService) };
        let (service, ..) = self.for_client(service)?;
        let slice = self.tables.backends(service.backends_base, service.backends_count)?;
        let slot = |slot: u32| slice.get(slot.wrapping_sub(service.backends_base) as usize);
        let (address, port) = (&flow.to.destination, flow.to.destination_port);
        Ok(Membership::of(&service, || {
            schedule::find(&service, address, port, slot).unwrap_or(schedule::NONE)
        }))
    }

    /// Follows how the programs translate a packet of the flow and send it on; like `forward::packet`.
    fn follow(&mut self, flow: &Flow) -> WalkResult<Conclusion> {
        if flow.flags & flow_flags::ROUTED != 0 && self.question.hook == HookPoint::Ingress {
            if self.tables.route(&flow.to.destination)?.is_none() {
                self.steps.push(TraceStep::NoRoute);
                return Ok(Conclusion::Dropped { outcome: Outcome::NoRoute });
            }
            return Ok(translated(flow, false));
        }
        if self.question.hook == HookPoint::Ingress
            && let Some(route) = self.direct_exit(flow)?
        {
            self.note_exit(&route);
            return Ok(translated(flow, true));
        }
        if !self.translates(flow) {
            self.steps.push(TraceStep::OtherHook);
            return Ok(untouched(Outcome::OtherHook));
        }
        Ok(translated(flow, false))
    }
}

fn translated(flow: &Flow, bypasses_stack: bool) -> Conclusion {
    let outcome = rules::flow::outcome(flow, bypasses_stack);
    Conclusion::Translated { outcome, ends: Ends::from(&flow.to) }
}

/// How packets of the flow get to their destination without `--forwarding direct`: the function ignores that setting,
/// and never returns [`ForwardingPath::Direct`].
pub(super) const fn way_of(flow: &Flow) -> ForwardingPath {
    match flow.flags {
        flags if flags & flow_flags::TUNNEL != 0 => ForwardingPath::Tunnel,
        flags if flags & flow_flags::ROUTED != 0 => ForwardingPath::Routed,
        flags if flags & flow_flags::CAUGHT == flow_flags::CAUGHT => {
            if flow.has_second() {
                ForwardingPath::CaughtAndMasqueraded
            } else {
                ForwardingPath::Caught
            }
        }
        flags if flags & flow_flags::HAIRPIN != 0 => ForwardingPath::Hairpin,
        _ if flow.is_second() => ForwardingPath::Masquerade,
        flags if flow_flags::is_of_node(flags) => ForwardingPath::Masquerade,
        _ if flow.has_second() => ForwardingPath::Masqueraded,
        _ => ForwardingPath::Stack,
    }
}
