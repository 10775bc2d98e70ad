//! Finds the Service of a packet that belongs to no flow, and decides whether a flow may begin. Follows `flow::new`,
//! `service::admit` and `service::vips::unlisted` of the BPF programs.

use lb_common::{
    Address, FrontendKind, Outcome, Scheduler, Service, ServiceKey, conntrack::Tuple, protocol, service_flags,
};
use lb_ebpf::rules::{
    admission::{self, Admission},
    client, limit, unlisted,
};

use super::{
    question::HookPoint,
    step::{ClientSide, Conclusion, TraceStep, socket},
    tables::Tables,
    walk::{Stop, Walk, WalkResult},
};

/// A flow that may begin: its Service is known, its backend is not chosen yet.
pub(super) struct AdmittedFlow {
    /// The record of `SERVICES`, with the slice of backends for this client.
    pub(super) service: Service,
    /// Whether the service masquerades this client.
    pub(super) masquerade: bool,
    /// Whether backends on other nodes answer this client directly (direct server return).
    pub(super) dsr: bool,
}

impl<T: Tables> Walk<'_, T> {
    /// The record of the packet's destination in `SERVICES`; `None` if there is none, or while the agent is replacing
    /// it.
    pub(super) fn record(&self) -> WalkResult<Option<Service>> {
        let key = self.key();
        Ok(self.tables.service(&key)?.filter(|service| service.is_sealed(&key)))
    }

    pub(super) const fn key(&self) -> ServiceKey {
        let tuple = &self.question.tuple;
        ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol)
    }

    /// The flow that may begin with the packet; `None` if the program treats the packet as if it went to no Service.
    pub(super) fn prepare(&mut self) -> WalkResult<Option<AdmittedFlow>> {
        let Some(service) = self.frontend()? else { return Ok(None) };
        if !self.first_packet(&service)? {
            return Ok(None);
        }
        let (service, internal, side) = self.for_client(service)?;
        if let Some(is) = side {
            self.steps.push(TraceStep::Client { is, backends: service.backends_count });
        }
        let Tuple { source: client, protocol, .. } = self.question.tuple;
        let segment = self.segment;
        if !self.admit(&service, &client, |ranges| admission::packet(&segment, protocol, &service, ranges))? {
            return Ok(None);
        }
        self.limit(&service)?;
        let dsr = client::uses_dsr(&service, internal);
        Ok(Some(AdmittedFlow { service, masquerade: service.masquerades(internal), dsr }))
    }

    /// The record of the packet's destination in `SERVICES`; adds the lookup as a step. While the agent is replacing
    /// the record, ends the walk: the program drops the packet.
    pub(super) fn frontend(&mut self) -> WalkResult<Option<Service>> {
        let key = self.key();
        let Some(service) = self.tables.service(&key)? else {
            self.steps.push(TraceStep::NoFrontend);
            return Ok(None);
        };
        if !service.is_sealed(&key) {
            self.steps.push(TraceStep::Torn);
            return Err(Stop::With(Conclusion::Dropped { outcome: Outcome::TornService }));
        }
        let name = self.name_of(service.id)?;
        self.steps.push(TraceStep::Frontend {
            frontend: socket(key.address, key.port),
            protocol: protocol_name(key.protocol),
            service: name,
            kind: FrontendKind::try_from(service.kind).ok(),
            scheduler: Scheduler::try_from(service.scheduler).unwrap_or_default(),
            affinity_seconds: service.affinity_seconds,
            backends: service.backends_count,
            internal: service.has_internal_slice().then_some(service.internal_count),
        });
        Ok(Some(service))
    }

    /// Whether the packet may begin a flow, as far as its protocol and flags decide, and whether the settings admit its
    /// client: `--deny-source` and IPsec policies exclude clients. Like `service::admit::first_packet`. The result is
    /// that of [`Self::conclude`].
    fn first_packet(&mut self, service: &Service) -> WalkResult<bool> {
        let client = &self.question.tuple.source;
        let is_denied = self.settings()?.is_some_and(|settings| settings.denied.contains(client));
        let is_internal = self.side()?.is_internal();
        let (handover, body, segment) = (self.tables.handover()?, self.question.body(), &self.segment);
        let admission =
            admission::first_packet(handover, body, segment, service, || is_denied, || is_internal);
        if admission == Admission::SourceNotAllowed {
            self.steps.push(TraceStep::DeniedSource);
        }
        self.conclude(admission)
    }

    /// Whether the client is internal, and by which criterion: its address or its device.
    fn side(&self) -> WalkResult<client::ClientSide> {
        let source = &self.question.tuple.source;
        let by_address = self.settings()?.is_some_and(|settings| settings.internal.contains(source));
        let by_device = self.tables.is_internal_device(self.question.device)?;
        Ok(client::side(|| by_address, || by_device))
    }

    /// The record with the backends for this client, whether the client counts as internal and, if that matters, by
    /// which criterion.
    pub(super) fn for_client(&self, service: Service) -> WalkResult<(Service, bool, Option<ClientSide>)> {
        let side = self.side()?;
        let matters = service.depends_on_client();
        let (service, internal) = client::for_client(service, || side.is_internal());
        Ok((service, internal, matters.then(|| side.into())))
    }

    /// Applies `rule`, which may check whether the client is in the source ranges of the service; adds the check as a
    /// step. The result is that of [`Self::conclude`].
    pub(super) fn admit(
        &mut self,
        service: &Service,
        client: &Address,
        rule: impl FnOnce(&mut dyn FnMut() -> bool) -> Admission,
    ) -> WalkResult<bool> {
        let has_ranges = service.flags & service_flags::SOURCE_RANGES != 0;
        let allowed = has_ranges && self.tables.is_in_source_range(service.id, client)?;
        let mut asked = false;
        let admission = rule(&mut || {
            asked = true;
            allowed
        });
        if asked {
            self.steps.push(TraceStep::SourceRanges { allowed });
        }
        self.conclude(admission)
    }

    /// Ends the walk if a limit on new connections of the service refuses the packet, or at the XDP hook, where the
    /// program leaves a limited connection to tc; like `service::limit::take_tokens`.
    fn limit(&mut self, service: &Service) -> WalkResult<()> {
        let Tuple { source: client, protocol, .. } = self.question.tuple;
        if !limit::applies(service, protocol, self.segment.is_syn()) {
            return Ok(());
        }
        if self.question.hook == HookPoint::Xdp {
            return Err(Stop::With(Conclusion::of(Outcome::OtherHook)));
        }
        let Some(limits) = self.tables.limits(service.id)? else { return Ok(()) };
        let now = self.tables.nanos();
        for (number, (key, rate)) in limit::buckets(&limits, service.id, &client).into_iter().enumerate() {
            if !rate.is_limit() {
                continue;
            }
            let full_at = self.tables.limit_bucket(&key)?.unwrap_or(0);
            let left = limit::bucket(rate).left(full_at, now);
            self.steps.push(TraceStep::Limit { rate: rate.to_string(), each_client: number == 0, left });
            if left == 0 {
                return Err(Stop::With(Conclusion::of(Outcome::ConnectionLimited)));
            }
        }
        Ok(())
    }

    /// Returns true if `admission` lets a flow begin. Otherwise adds the reason as a step. Then returns false if the
    /// program treats the packet as if it went to no Service, and else ends the walk with the verdict.
    pub(super) fn conclude(&mut self, admission: Admission) -> WalkResult<bool> {
        match admission {
            // An admitted packet needs no step. For `SourceNotAllowed`, the caller has added the step: `first_packet`
            // for a denied source, `admit` for source ranges. `UnknownFragment` never occurs, because `explain` does
            // not cover fragments.
            Admission::Admitted | Admission::SourceNotAllowed | Admission::UnknownFragment => {}
            Admission::LeftToEarlier => self.steps.push(TraceStep::LeftToEarlier),
            Admission::NotSyn => self.steps.push(TraceStep::NotSyn),
            Admission::InvalidFlags => self.steps.push(TraceStep::InvalidFlags),
            Admission::StrayReset => self.steps.push(TraceStep::StrayReset),
            Admission::SocketsOnly => self.steps.push(TraceStep::SocketsOnly),
            Admission::NoLocalBackend => self.steps.push(TraceStep::NoBackends { elsewhere: true }),
            Admission::NoBackends => self.steps.push(TraceStep::NoBackends { elsewhere: false }),
            Admission::StraySynAck => self.steps.push(TraceStep::StraySynAck),
            // The socket belongs to a process of the node: `explain` does not cover sockets of pods.
            Admission::LeftToPackets => {
                self.steps.push(TraceStep::SocketWithoutHeader { refused: false });
            }
            Admission::NoProxyHeader => self.steps.push(TraceStep::SocketWithoutHeader { refused: true }),
            Admission::UnknownConnection => self.steps.push(TraceStep::UnknownConnection),
        }
        match admission.allow(self.question.tuple.protocol) {
            Ok(()) => Ok(true),
            Err(Outcome::NoService) => Ok(false),
            Err(outcome) => Err(Stop::With(Conclusion::of(outcome))),
        }
    }

    /// The verdict on a packet to an address and port that no Service has; like `vips::unlisted`.
    pub(super) fn unlisted(&mut self) -> WalkResult<Conclusion> {
        let address = &self.question.tuple.destination;
        let settings = self.settings()?;
        let in_range = settings.is_some_and(|settings| settings.service_ranges.contains(address));
        let drops = settings.is_some_and(|settings| settings.drops_unknown_vips());
        let vip = self.tables.vip(address)?;
        // A system call has no segment.
        let is_rst = self.segment.is_rst() && self.question.hook != HookPoint::Socket;
        let is = unlisted::unlisted(in_range, || vip, || drops, is_rst);
        self.steps.push(TraceStep::Address { is: is.into() });
        Ok(Conclusion::of(is.outcome(self.question.tuple.protocol)))
    }
}

const fn protocol_name(number: u8) -> &'static str {
    match number {
        protocol::TCP => "tcp",
        protocol::UDP => "udp",
        protocol::SCTP => "sctp",
        _ => "unknown",
    }
}
