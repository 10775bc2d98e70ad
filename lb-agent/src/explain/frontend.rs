//! The Service of a packet that belongs to no flow, and whether a flow may begin; as `flow::new`, `service::admit` and
//! `service::vips::unlisted`.

use lb_common::{
    Address, FrontendKind, Outcome, Scheduler, Service, ServiceKey, protocol, service_flags, settings_flags,
    vip_flags,
};

use super::{
    step::{ClientSide, TraceStep, Unlisted, Verdict, socket},
    tables::Tables,
    walk::{Stop, Walk, WalkResult, untouched},
};

/// A flow that may begin: its Service, before a backend is chosen.
pub(super) struct AdmittedFlow {
    /// The record for this client.
    pub(super) service: Service,
    /// Whether the service masquerades this client.
    pub(super) masquerade: bool,
    /// Whether its backends answer this client directly (direct server return).
    pub(super) direct: bool,
}

impl<T: Tables> Walk<'_, T> {
    /// The record of the destination; `None` also while the agent is replacing it.
    pub(super) fn record(&self) -> WalkResult<Option<Service>> {
        let key = self.key();
        Ok(self.tables.service(&key)?.filter(|service| service.is_sealed(&key)))
    }

    pub(super) const fn key(&self) -> ServiceKey {
        let tuple = &self.question.tuple;
        ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol)
    }

    /// The flow that may begin with the packet; `None` if it is for no Service.
    pub(super) fn prepare(&mut self) -> WalkResult<Option<AdmittedFlow>> {
        let Some(service) = self.frontend()? else { return Ok(None) };
        if !self.may_begin(&service)? {
            return Ok(None);
        }
        let (service, side) = self.for_client(service)?;
        if let Some(is) = side {
            self.steps.push(TraceStep::Client { is, backends: service.backends_count });
        }
        if service.flags & service_flags::SOCKETS_ONLY != 0 {
            self.steps.push(TraceStep::SocketsOnly);
            return Ok(None);
        }
        self.admit(&service, &self.question.tuple.source)?;
        if self.segment.is_syn_ack() {
            self.steps.push(TraceStep::StraySynAck);
            return Ok(None);
        }
        let inside = !matches!(side, None | Some(ClientSide::Outside));
        let direct = !inside && service.flags & service_flags::DSR != 0;
        Ok(Some(AdmittedFlow { service, masquerade: service.masquerades(inside), direct }))
    }

    /// The record of the destination, noted as a step.
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
        let has_inside = service.flags & service_flags::SHORT_CIRCUIT != 0;
        self.steps.push(TraceStep::Frontend {
            frontend: socket(key.address, key.port),
            protocol: protocol_name(key.protocol),
            service: name,
            kind: FrontendKind::try_from(service.kind).ok(),
            scheduler: Scheduler::try_from(service.scheduler).unwrap_or_default(),
            affinity_seconds: service.affinity_seconds,
            backends: service.backends_count,
            inside: has_inside.then_some(service.internal_count),
        });
        Ok(Some(service))
    }

    /// As `admit::first_packet`.
    fn may_begin(&mut self, service: &Service) -> WalkResult<bool> {
        let tracked = self.question.tuple.protocol != protocol::UDP;
        if tracked && service.requires_syn() && !self.segment.is_syn() {
            self.steps.push(TraceStep::NotSyn);
            return Ok(false);
        }
        if tracked && self.segment.is_rst() {
            self.steps.push(TraceStep::StrayReset);
            return Err(Stop::With(Verdict::Dropped { outcome: Outcome::StrayReset }));
        }
        Ok(true)
    }

    /// As `settings::for_client`: the record for this client, and whether it is internal, if that matters.
    pub(super) fn for_client(&self, service: Service) -> WalkResult<(Service, Option<ClientSide>)> {
        if !service.depends_on_client() {
            return Ok((service.for_client(false), None));
        }
        let source = &self.question.tuple.source;
        let side = if self.settings()?.is_some_and(|settings| settings.internal.contains(source)) {
            ClientSide::InsideByAddress
        } else if self.tables.is_internal_device(self.question.device)? {
            ClientSide::InsideByDevice
        } else {
            ClientSide::Outside
        };
        Ok((service.for_client(side != ClientSide::Outside), Some(side)))
    }

    /// As `admit::client`, and what follows it.
    pub(super) fn admit(&mut self, service: &Service, client: &Address) -> WalkResult<()> {
        if service.flags & service_flags::SOURCE_RANGES != 0 {
            let allowed = self.tables.is_in_source_range(service.id, client)?;
            self.steps.push(TraceStep::SourceRanges { allowed });
            if !allowed {
                return Err(Stop::With(Verdict::Dropped { outcome: Outcome::SourceNotAllowed }));
            }
        }
        if service.backends_count > 0 {
            return Ok(());
        }
        let elsewhere = service.flags & service_flags::DROP_WITHOUT_BACKENDS != 0;
        self.steps.push(TraceStep::NoBackends { elsewhere });
        Err(Stop::With(if elsewhere {
            Verdict::Dropped { outcome: Outcome::NoLocalBackend }
        } else {
            Verdict::Rejected { outcome: self.question.rejection() }
        }))
    }

    /// A packet to an address and port that no Service has; as `vips::unlisted`.
    pub(super) fn unlisted(&mut self) -> WalkResult<Verdict> {
        let address = &self.question.tuple.destination;
        let settings = self.settings()?;
        let in_range = settings.is_some_and(|settings| settings.service_ranges.contains(address));
        let drops = settings.is_some_and(|settings| settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0);
        let vip = self.tables.vip(address)?;
        let (is, verdict) = match vip {
            _ if !in_range => (Unlisted::OutOfRange, untouched(Outcome::NoService)),
            None if drops => (Unlisted::UnknownVip, Verdict::Dropped { outcome: Outcome::UnknownVip }),
            None => (Unlisted::Unknown, untouched(Outcome::NoService)),
            Some(vip) if vip.flags & vip_flags::CLUSTER_IP == 0 => {
                (Unlisted::NoClusterIp, untouched(Outcome::NoService))
            }
            Some(_) if self.segment.is_rst() => {
                (Unlisted::ClusterIp, Verdict::Dropped { outcome: Outcome::StrayReset })
            }
            Some(_) => (Unlisted::ClusterIp, Verdict::Rejected { outcome: self.question.rejection() }),
        };
        self.steps.push(TraceStep::Address { is });
        Ok(verdict)
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
