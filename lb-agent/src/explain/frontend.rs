//! Finds the Service of a packet that belongs to no flow, and decides whether a flow may begin. Follows `flow::new`,
//! `service::admit` and `service::vips::unlisted` of the BPF programs.

use lb_common::{
    Address, FrontendKind, Outcome, Scheduler, Service, ServiceKey, conntrack::Tuple, protocol,
    service_flags, settings_flags,
};
use lb_ebpf::rules::{
    admission::{self, Admission},
    client, limit, unlisted,
};

use super::{
    question::HookPoint,
    step::{ClientSide, TraceStep, Verdict, socket},
    tables::Tables,
    walk::{Stop, Walk, WalkResult},
};

/// A flow that may begin: its Service is known, its backend is not chosen yet.
pub(super) struct AdmittedFlow {
    /// The record of `SERVICES`, with the slice of backends for this client.
    pub(super) service: Service,
    /// Whether the service masquerades this client.
    pub(super) masquerade: bool,
    /// Whether the service's backends answer this client directly (direct server return).
    pub(super) direct: bool,
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

    /// The flow that may begin with the packet; `None` if the packet is for no Service.
    pub(super) fn prepare(&mut self) -> WalkResult<Option<AdmittedFlow>> {
        let Some(service) = self.frontend()? else { return Ok(None) };
        if self.question.tuple.protocol != protocol::UDP
            && !self.conclude(admission::first_segment(&self.segment, &service))?
        {
            return Ok(None);
        }
        self.source()?;
        let (service, side) = self.for_client(service)?;
        if let Some(is) = side {
            self.steps.push(TraceStep::Client { is, backends: service.backends_count });
        }
        let client = self.question.tuple.source;
        if !self.admit(&service, &client, |ranges| admission::packets_of(&service, ranges))?
            || !self.conclude(self.handshake(&service))?
        {
            return Ok(None);
        }
        self.limit(&service)?;
        let internal = !matches!(side, None | Some(ClientSide::External));
        let direct = client::is_answered_directly(&service, internal);
        Ok(Some(AdmittedFlow { service, masquerade: service.masquerades(internal), direct }))
    }

    fn handshake(&self, service: &Service) -> Admission {
        admission::handshake(&self.segment, self.question.tuple.protocol, service)
    }

    /// The record of the packet's destination in `SERVICES`; adds the lookup as a step.
    pub(super) fn frontend(&mut self) -> WalkResult<Option<Service>> {
        let key = self.key();
        let Some(service) = self.tables.service(&key)? else {
            self.steps.push(TraceStep::NoFrontend);
            return Ok(None);
        };
        if !service.is_sealed(&key) {
            self.steps.push(TraceStep::Torn);
            return Err(Stop::With(Verdict::Dropped { outcome: Outcome::TornService }));
        }
        let name = self.name_of(service.id)?;
        let has_internal = service.flags & service_flags::SHORT_CIRCUIT != 0;
        self.steps.push(TraceStep::Frontend {
            frontend: socket(key.address, key.port),
            protocol: protocol_name(key.protocol),
            service: name,
            kind: FrontendKind::try_from(service.kind).ok(),
            scheduler: Scheduler::try_from(service.scheduler).unwrap_or_default(),
            affinity_seconds: service.affinity_seconds,
            backends: service.backends_count,
            internal: has_internal.then_some(service.internal_count),
        });
        Ok(Some(service))
    }

    /// Ends the walk if the settings deny the client, by `--deny-source` or because of an IPsec policy; like
    /// `settings::admits`.
    fn source(&mut self) -> WalkResult<()> {
        let client = &self.question.tuple.source;
        let is_denied = self.settings()?.is_some_and(|settings| settings.denied.contains(client));
        let is_internal = is_denied && self.side()?.is_internal();
        if admission::source(|| is_denied, || is_internal) == Admission::Admitted {
            return Ok(());
        }
        self.steps.push(TraceStep::DeniedSource);
        self.conclude(Admission::SourceNotAllowed).map(drop)
    }

    /// Whether the client is internal, and by which criterion: its address or its device.
    fn side(&self) -> WalkResult<client::ClientSide> {
        let source = &self.question.tuple.source;
        let by_address = self.settings()?.is_some_and(|settings| settings.internal.contains(source));
        let by_device = self.tables.is_internal_device(self.question.device)?;
        Ok(client::side(|| by_address, || by_device))
    }

    /// The record with the backends for this client, and whether the client is internal, if that matters; like
    /// `settings::for_client`.
    pub(super) fn for_client(&self, service: Service) -> WalkResult<(Service, Option<ClientSide>)> {
        if !service.depends_on_client() {
            return Ok((service.for_client(false), None));
        }
        let side = self.side()?;
        Ok((service.for_client(side.is_internal()), Some(side.into())))
    }

    /// Applies `rule`, which may check whether the client is in the source ranges of the service. Returns false if the
    /// packet is for no Service.
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

    /// Ends the walk if a limit on new connections of the service refuses the packet; like `service::limit::admits`.
    fn limit(&mut self, service: &Service) -> WalkResult<()> {
        let Tuple { source: client, protocol, .. } = self.question.tuple;
        if !limit::applies(service, protocol, self.segment.is_syn()) {
            return Ok(());
        }
        if self.question.hook == HookPoint::Xdp {
            return Err(Stop::With(Verdict::of(Outcome::OtherHook)));
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
                return Err(Stop::With(Verdict::of(Outcome::ConnectionLimited)));
            }
        }
        Ok(())
    }

    /// Returns true if `admission` lets a flow begin. Otherwise adds the reason as a step; then returns false if the
    /// packet counts as one for no Service, else ends the walk with the verdict.
    pub(super) fn conclude(&mut self, admission: Admission) -> WalkResult<bool> {
        match admission {
            // The caller has added the step already: `source` for `--deny-source`, `admit` for source ranges.
            Admission::Admitted | Admission::SourceNotAllowed => {}
            Admission::NotSyn => self.steps.push(TraceStep::NotSyn),
            Admission::InvalidFlags => self.steps.push(TraceStep::InvalidFlags),
            Admission::StrayReset => self.steps.push(TraceStep::StrayReset),
            Admission::SocketsOnly => self.steps.push(TraceStep::SocketsOnly),
            Admission::NoLocalBackend => self.steps.push(TraceStep::NoBackends { elsewhere: true }),
            Admission::NoBackends => self.steps.push(TraceStep::NoBackends { elsewhere: false }),
            Admission::StraySynAck => self.steps.push(TraceStep::StraySynAck),
            Admission::LeftToPackets => {
                self.steps.push(TraceStep::SocketWithoutHeader { refused: false });
            }
            Admission::NoProxyHeader => self.steps.push(TraceStep::SocketWithoutHeader { refused: true }),
            Admission::UnknownConnection => self.steps.push(TraceStep::UnknownConnection),
        }
        match admission.allow(self.question.tuple.protocol) {
            Ok(()) => Ok(true),
            Err(Outcome::NoService) => Ok(false),
            Err(outcome) => Err(Stop::With(Verdict::of(outcome))),
        }
    }

    /// The verdict on a packet to an address and port that no Service has; like `vips::unlisted`.
    pub(super) fn unlisted(&mut self) -> WalkResult<Verdict> {
        let address = &self.question.tuple.destination;
        let settings = self.settings()?;
        let in_range = settings.is_some_and(|settings| settings.service_ranges.contains(address));
        let drops = settings.is_some_and(|settings| settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0);
        let vip = self.tables.vip(address)?;
        let is = unlisted::unlisted(in_range, || vip, || drops, self.segment.is_rst());
        self.steps.push(TraceStep::Address { is: is.into() });
        Ok(Verdict::of(is.outcome(self.question.tuple.protocol)))
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
