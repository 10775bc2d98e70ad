//! Random states of the data plane, and random packets in them.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use bytemuck::Zeroable as _;
use lb_agent::explain::{
    self, Candidate, Conclusion, Explanation, HookPoint, PacketKind, Question, Source, TraceStep,
};
use lb_common::{
    Address, Backend, ConnectionLimits, ConnectionRate, FrontendKind, Network, Networks, Outcome, Scheduler,
    Service, ServiceKey, Settings, backend_flags,
    conntrack::{Flow, Tuple, flow_flags},
    handover::{CREATES_FLOWS, EARLIER_CREATES_FLOWS, OVER},
    service_flags, settings_flags, vip_flags,
};
use lb_core::tables::{self, Maglev, TableSize};
use lb_datapath::{Globals, Routes};

use super::{
    super::{
        clock,
        node_dns::SERVER_PORT,
        packets::Packet,
        stage::Family,
        testbed::{Hook, SCTP, TCP, Testbed, UDP},
        wire::{Mode, WIRE, XDP_PASS},
    },
    Coverage,
    tables::TestbedTables,
};

const PROTOCOLS: [u8; 3] = [TCP, UDP, SCTP];
/// Packets in each world.
const PACKETS: usize = 50;
/// How long the agent's DNS server counts as answering after each renewal, in ns: longer than a world exists.
const LEASE: u64 = 600_000_000_000;

/// A random state: Services, settings, and the clients that send.
pub(super) struct World<'a> {
    pub(super) bed: &'a mut Testbed,
    pub(super) dice: fastrand::Rng,
    pub(super) family: Family,
    pub(super) wires: bool,
    pub(super) globals: Globals,
    /// The next free slot of `BACKENDS`.
    pub(super) slot: u32,
    /// The next free slot of `TABLES`.
    pub(super) entry: u32,
    /// Whether `CONNTRACK` is full or nearly full.
    pub(super) full: bool,
    /// Whether an agent with another map layout takes over now and then.
    pub(super) takeover: bool,
    /// Whether the node has a DNS server for its pods.
    pub(super) dns: bool,
    pub(super) seen: &'a mut Coverage,
}

impl World<'_> {
    fn chance(&mut self, percent: u32) -> bool {
        self.dice.u32(..100) < percent
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        *self.dice.choice(of).unwrap()
    }

    fn flags(&mut self, of: &[(u16, u32)]) -> u16 {
        of.iter().filter(|(_, percent)| self.chance(*percent)).map(|(flag, _)| flag).sum()
    }

    fn clients(&self) -> [IpAddr; 3] {
        [self.family.client().ip(), self.family.stranger().ip(), self.family.backend().ip()]
    }

    fn vips(&self) -> [IpAddr; 4] {
        let family = self.family;
        [family.vip().ip(), family.other_vip().ip(), family.empty_vip().ip(), family.node()]
    }

    fn build(&mut self) {
        for vip in self.vips() {
            for port in [80, 443] {
                for protocol in PROTOCOLS {
                    if self.chance(40) {
                        self.service(SocketAddr::new(vip, port), protocol);
                    }
                }
            }
            if self.chance(60) {
                let flags = self.pick(&[0, vip_flags::ECHO, vip_flags::CLUSTER_IP | vip_flags::ECHO]);
                self.bed.add_vip(vip, flags);
            }
        }
        let settings = self.settings();
        self.bed.settings(&settings);
        self.bed.set_handover(OVER);
        if self.chance(20) {
            self.bed.make_clients_internal();
        }
        if self.dns {
            let (service, server) = (self.vips()[0], self.family.node());
            for protocol in PROTOCOLS {
                self.service(SocketAddr::new(service, 53), protocol);
            }
            let lease = if self.chance(60) { LEASE } else { 0 };
            self.bed.intercept(service.into(), server.into(), lease);
        }
    }

    fn settings(&mut self) -> Settings {
        let ends = |network: &str, prefix| Network::new(network.parse::<IpAddr>().unwrap().into(), prefix);
        let (v4, v6) = (Family::V4.node().into(), Family::V6.node().into());
        let internal = if self.chance(40) {
            vec![ends("192.0.2.0", 25), ends("2001:db8:c::", 64)]
        } else {
            vec![ends("192.0.2.96", 27), ends("2001:db8:c::99", 128)]
        };
        let ranges = vec![ends("203.0.113.0", 30), ends("2001:db8:f::", 64)];
        let no_source = self.chance(10);
        let pick = |address: Address| if no_source { Address::from_v6([0; 16]) } else { address };
        let denied = [ends("192.0.2.64", 26), ends("2001:db8:c::", 64)];
        Settings {
            internal: Networks::new(internal),
            denied: Networks::new(denied.into_iter().filter(|_| self.chance(20))),
            service_ranges: Networks::new(if self.chance(70) { ranges } else { Vec::new() }),
            source_v4: pick(v4),
            source_v6: pick(v6),
            first_port: 10_000,
            ports: if self.chance(90) { 20_000 } else { 0 },
            flags: if self.chance(50) { settings_flags::DROP_UNKNOWN_VIPS } else { 0 }
                | if self.chance(50) { settings_flags::GUE } else { 0 },
            ..Settings::zeroed()
        }
    }

    fn service(&mut self, vip: SocketAddr, protocol: u8) {
        let scheduler = self.pick(&Scheduler::ALL);
        let kinds = [
            FrontendKind::ClusterIp,
            FrontendKind::NodePort,
            FrontendKind::LoadBalancer,
            FrontendKind::ExternalIp,
        ];
        let external = self.slice(scheduler);
        let mut flags = self.flags(&[
            (service_flags::DROP_WITHOUT_BACKENDS, 30),
            (service_flags::SHORT_CIRCUIT, 20),
            (service_flags::MASQUERADE, 30),
            (service_flags::MASQUERADE_EXTERNAL, 20),
            (service_flags::SOURCE_RANGES, 15),
            (service_flags::SOCKETS_ONLY, 5),
            (service_flags::SYN_ONLY, 15),
            (service_flags::RESET_UNKNOWN, 15),
            (service_flags::LIMITED, 15),
        ]);
        if protocol == TCP && self.chance(15) {
            flags |= service_flags::PROXY_PROTOCOL | service_flags::RESET_UNKNOWN;
        } else if flags & service_flags::MASQUERADE != 0 && self.chance(40) {
            flags |= service_flags::DSR;
        }
        let internal = if flags & service_flags::SHORT_CIRCUIT != 0 { self.slice(scheduler) } else { [0; 4] };
        let id = 1 + self.slot * 64 + u32::from(vip.port()) % 7;
        let key = ServiceKey::new(vip.ip().into(), vip.port(), protocol);
        let record = Service {
            id,
            backends_base: external[0],
            backends_count: external[1],
            table_base: external[2],
            table_count: external[3],
            internal_base: internal[0],
            internal_count: internal[1],
            internal_table_base: internal[2],
            internal_table_count: internal[3],
            affinity_seconds: self.pick(&[0, 0, 1, 10_800]),
            scheduler: scheduler as u8,
            kind: self.pick(&kinds) as u8,
            flags,
            seal: 0,
        };
        let sealed = record.sealed(&key);
        let seal = if self.chance(2) { !sealed.seal } else { sealed.seal };
        self.bed.record(&key, &Service { seal, ..sealed });
        if flags & service_flags::LIMITED != 0 && self.chance(80) {
            // A token returns after at least 10 s, so hardly ever between an explanation and its packet.
            let mut rate = |most| match self.dice.u32(..=most) {
                0 => ConnectionRate::NONE,
                connections => ConnectionRate { connections, seconds: 60 },
            };
            self.bed.insert("LIMITS", id, ConnectionLimits { service: rate(6), client: rate(3) });
        }
        if flags & service_flags::SOURCE_RANGES != 0 && self.chance(70) {
            let client = self.pick(&self.clients());
            let prefix = if client.is_ipv4() { 28 } else { 124 };
            // Bits after the prefix are ignored.
            self.bed.allow_source_range(id, client, prefix);
        }
    }

    /// Up to four random endpoints, sorted.
    fn endpoints(&mut self) -> Vec<SocketAddr> {
        let family = self.family;
        let mut endpoints =
            vec![family.backend(), family.other_backend(), family.client(), family.stranger()];
        if family == Family::V4 {
            endpoints.extend(
                ["203.0.113.194:8080", "203.0.113.130:8080"].map(|text| text.parse::<SocketAddr>().unwrap()),
            );
            if self.globals.direct {
                // The neighbour entry of this endpoint is not resolved yet.
                endpoints.push("203.0.113.195:8080".parse().unwrap());
            }
        }
        endpoints.retain(|_| self.dice.bool());
        endpoints.sort();
        let room = 64 - self.slot as usize;
        endpoints.truncate(room.min(4));
        endpoints
    }

    /// Writes random backends and their table; returns base and length of both.
    fn slice(&mut self, scheduler: Scheduler) -> [u32; 4] {
        let base = self.slot;
        let mut backends = Vec::new();
        for endpoint in self.endpoints() {
            let flags = self.flags(&[
                (backend_flags::LOCAL, 30),
                (backend_flags::HOST, 15),
                (backend_flags::PEER, 40),
            ]);
            let weight = self.pick(&[0, 1, 1, 1, 2, 5]);
            let active_flows_slot = if scheduler.uses_active_flows() { self.slot } else { 0 };
            let (address, port) = (endpoint.ip().into(), endpoint.port());
            let backend = Backend { address, port, flags, weight, active_flows_slot };
            self.bed.put("BACKENDS", self.slot, backend);
            self.bed.put("ACTIVE", self.slot, i64::from(self.dice.u8(..3)) - 1);
            backends.push(backend);
            self.slot += 1;
        }
        let maglev = Maglev { size: TableSize::ALL[0], ..Maglev::default() };
        let table = tables::table(scheduler, maglev, &backends).unwrap_or_default();
        let table_base = self.entry;
        let fits = table_base as usize + table.len() <= 512;
        let table = if fits { table } else { Vec::new() };
        for entry in &table {
            self.bed.put("TABLES", self.entry, *entry);
            self.entry += 1;
        }
        let length = |of: usize| u32::try_from(of).unwrap();
        [base, length(backends.len()), table_base, length(table.len())]
    }

    /// A random packet, of an existing flow or of a random client and VIP.
    fn question(&mut self) -> Question {
        let kinds = [
            PacketKind::Syn,
            PacketKind::Syn,
            PacketKind::SynAck,
            PacketKind::Data,
            PacketKind::Fin,
            PacketKind::Rst,
        ];
        let hook = match self.dice.u8(..10) {
            0 | 1 => HookPoint::Egress,
            2..=5 if self.wires => HookPoint::Xdp,
            _ => HookPoint::Ingress,
        };
        let from_node = hook == HookPoint::Egress && self.chance(50);
        let device = if self.wires && hook != HookPoint::Egress { WIRE } else { 1 };
        Question {
            tuple: if from_node { self.tuple_of_node() } else { self.tuple() },
            knows_port: true,
            kind: self.pick(&kinds),
            hook,
            from_node,
            device,
            now: clock::tick(),
        }
    }

    fn tuple(&mut self) -> Tuple {
        let known: Vec<Tuple> = self.bed.flows().into_keys().collect();
        if !known.is_empty() && self.chance(60) {
            return self.pick(&known);
        }
        let (client, vip) = (self.pick(&self.clients()), self.pick(&self.vips()));
        if self.dns && self.chance(40) {
            let protocol = self.pick(&PROTOCOLS);
            let client = (client.into(), self.dice.u16(1000..1004));
            let ((server, port), to) = if self.chance(70) {
                (client, (self.vips()[0].into(), 53))
            } else {
                ((self.family.node().into(), SERVER_PORT), client)
            };
            return Tuple::new(server, to.0, port, to.1, protocol);
        }
        let (from, to) = (self.dice.u16(1000..1004), self.pick(&[80, 80, 443, 444]));
        Tuple::new(client.into(), vip.into(), from, to, self.pick(&PROTOCOLS))
    }

    /// A random tuple for a packet that the node sends. Reverses 70% of the tuples, so that many packets go to an
    /// endpoint: if the tuple is the key of a reverse entry (endpoint to client), its reverse goes to that endpoint.
    fn tuple_of_node(&mut self) -> Tuple {
        let tuple = self.tuple();
        if self.chance(70) { tuple.reversed() } else { tuple }
    }

    /// Explains a packet, sends it, and compares the explanation with the result. If the tick changed meanwhile, there
    /// is no comparison: entries may have expired in between.
    fn step(&mut self, context: &str) {
        let mut question = self.question();
        let mut explanation = self.explain(&question);
        let packet = packet(&question);
        if question.hook == HookPoint::Xdp {
            let run = self.bed.arrive(Mode::Generic, &packet);
            if clock::tick() != question.now {
                return;
            }
            let passes = run.action == XDP_PASS;
            // If the packet may get one of several backends, XDP may have to leave the packet to tc for only some of
            // these backends.
            let is_open = match &explanation.verdict {
                Conclusion::Begins { backends } => backends.len() > 1,
                Conclusion::Dropped { outcome } => *outcome == Outcome::ConntrackFull,
                Conclusion::Untouched { .. }
                | Conclusion::Rejected { .. }
                | Conclusion::Translated { .. } => false,
            };
            if !is_open {
                assert_eq!(
                    explanation.left_to_tc(),
                    passes,
                    "{context}: {question:?}: {explanation:#?} {run:?}"
                );
            }
            self.seen.xdp[usize::from(passes)] += 1;
            if passes {
                question.hook = HookPoint::Ingress;
                let at_tc = self.explain(&question);
                // XDP may have created the flow before it found that the frame cannot leave. Then tc finds the flow.
                let agrees = match (&explanation.verdict, &at_tc.verdict) {
                    (Conclusion::Begins { backends }, Conclusion::Translated { outcome, .. }) => {
                        backends.iter().any(|candidate| candidate.outcome == *outcome)
                    }
                    // XDP has chosen a backend whose flows only tc creates; with another choice, tc would find the
                    // flow.
                    (Conclusion::Begins { backends: at_xdp }, Conclusion::Begins { backends: at_tc }) => {
                        let is_same = |(at_xdp, at_tc): (&Candidate, &Candidate)| {
                            let outcomes = [at_xdp.outcome, at_xdp.outcome.of_first_packet()];
                            at_xdp.backend == at_tc.backend && outcomes.contains(&at_tc.outcome)
                        };
                        at_xdp.len() == at_tc.len() && at_xdp.iter().zip(at_tc).all(is_same)
                    }
                    (at_xdp, at_tc) => at_xdp == at_tc,
                };
                assert!(
                    agrees || !explanation.left_to_tc(),
                    "{context}: {question:?}: {explanation:#?}, but at tc {at_tc:#?}"
                );
                explanation = at_tc;
            } else {
                return self.compare(context, &question, &explanation, &run.moved);
            }
        }
        let moved = match question.hook {
            HookPoint::Ingress if self.wires => self.bed.arrive_at_tc(&packet).moved,
            HookPoint::Ingress => self.bed.send(Hook::Ingress, &packet).moved,
            HookPoint::Egress if question.from_node => self.bed.send_from_node(&packet).moved,
            HookPoint::Egress => self.bed.send(Hook::Egress, &packet).moved,
            HookPoint::Xdp | HookPoint::Socket => panic!("not a tc hook"),
        };
        self.compare(context, &question, &explanation, &moved);
    }

    fn explain(&mut self, question: &Question) -> Explanation {
        let routes = RefCell::new(Routes::open().unwrap());
        let tables = TestbedTables { bed: self.bed, routes, device: question.device, globals: self.globals };
        explain::explain(&tables, question).unwrap()
    }

    fn compare(
        &mut self,
        context: &str,
        question: &Question,
        explanation: &Explanation,
        moved: &[(Outcome, u64)],
    ) {
        if clock::tick() != question.now {
            return;
        }
        let flow = self.bed.flows().get(&question.tuple).copied();
        let to = flow.map(|flow| flow.to);
        let holds = match &explanation.verdict {
            Conclusion::Untouched { outcome }
            | Conclusion::Rejected { outcome }
            | Conclusion::Dropped { outcome }
            | Conclusion::Translated { outcome, .. } => moved == [(*outcome, 1)],
            Conclusion::Begins { backends } => backends.iter().any(|candidate| {
                let dropped = candidate.outcome.verdict() == lb_common::Verdict::Drop;
                let chosen = to.is_some_and(|to| candidate.backend == to.destination_socket());
                moved == [(candidate.outcome, 1)] && (dropped || chosen)
            }),
        };
        let of_dns = explanation.steps.iter().any(|step| matches!(step, TraceStep::NodeLocalDns { .. }))
            || matches!(explanation.verdict, Conclusion::Translated { outcome: Outcome::DnsAnswer, .. });
        if let (Conclusion::Begins { backends }, Some(flow)) = (&explanation.verdict, &flow) {
            let chosen = backends.iter().find(|candidate| candidate.backend == flow.to.destination_socket());
            if let Some(candidate) = chosen.filter(|candidate| moved == [(candidate.outcome, 1)]) {
                self.assert_source(context, question, candidate, flow);
            }
        }
        // For packets of node-local DNS there is no flow entry that shows the new destination.
        let leads = if of_dns {
            true
        } else if let Conclusion::Translated { ends, .. } = &explanation.verdict {
            to.is_some_and(|to| {
                ends.to == to.destination_socket() && ends.from.ip() == IpAddr::from(to.source)
            })
        } else {
            true
        };
        assert!(
            holds && leads,
            "{context}: {question:?}\nexplained: {explanation:#?}\ncounted: {moved:?}, flow: {flow:?}"
        );
        for (outcome, _) in moved {
            *self.seen.outcomes.entry(*outcome).or_default() += 1;
        }
        self.note(explanation);
    }

    /// Asserts that the backend sees the source that the explanation names. Skips three kinds of flows: masqueraded
    /// ones (a second flow sets the source), tunnelled ones (the inner packet keeps the client's source), and those of
    /// the node itself.
    fn assert_source(&mut self, context: &str, question: &Question, candidate: &Candidate, flow: &Flow) {
        if flow.flags & (flow_flags::MASQUERADED | flow_flags::TUNNEL) != 0
            || flow_flags::is_of_node(flow.flags)
        {
            return;
        }
        let expected: IpAddr = match candidate.source {
            Source::Client | Source::ClientOnNode => question.tuple.source.into(),
            Source::Vip(address) | Source::Node(address) => address,
            Source::Unset => panic!("{context}: a flow without source: {candidate:?}"),
        };
        let source = IpAddr::from(flow.to.source);
        assert_eq!(source, expected, "{context}: {question:?}\n{candidate:?}\n{flow:?}");
        self.seen.sources.insert(format!("{:?}", candidate.source).split('(').next().unwrap().to_owned());
    }

    fn note(&mut self, explanation: &Explanation) {
        let of_several =
            |step: &TraceStep| matches!(step, TraceStep::Frontend { backends, .. } if *backends > 1);
        let several = explanation.steps.iter().any(of_several);
        if let Conclusion::Begins { backends } = &explanation.verdict {
            self.seen.named += u32::from(several && backends.len() == 1);
        }
        for step in &explanation.steps {
            let name = format!("{step:?}");
            let name = name.split([' ', '{']).next().unwrap_or_default();
            self.seen.steps.insert(name.to_owned());
        }
    }

    /// Sometimes causes an event between packets: affinity ages, a Service changes, an entry is lost, or a takeover
    /// from programs of another map layout begins or ends.
    fn disturb(&mut self) {
        match self.dice.u8(..20) {
            0 => self.bed.age_affinity(3),
            1 => {
                let vip = SocketAddr::new(self.pick(&self.vips()), 80);
                if self.slot < 56 {
                    let protocol = self.pick(&PROTOCOLS);
                    self.service(vip, protocol);
                }
            }
            2 => self.bed.delete_nth_entry(self.dice.usize(..256)),
            3 if self.takeover => {
                let mode = self.pick(&[OVER, OVER, CREATES_FLOWS, EARLIER_CREATES_FLOWS]);
                self.bed.set_handover(mode);
            }
            _ => {}
        }
    }

    /// Builds the world and sends packets.
    pub(super) fn run(&mut self, context: &str) {
        self.build();
        // In a full world all new entries go to `CONNTRACK`, so it alone decides whether there is room.
        self.bed.take_all_into_overflow(self.full);
        let filled = self.filled();
        for packet in 0..PACKETS {
            if self.full {
                self.bed.restore_flows(&filled);
            }
            self.step(&format!("{context}, packet {packet}"));
            self.disturb();
        }
    }

    /// Unrelated flows that leave little or no room in `CONNTRACK`.
    fn filled(&mut self) -> BTreeMap<Tuple, Flow> {
        let client = Address::from_v4([198, 18, 0, 1]);
        let flows = self.dice.u16(252..=256);
        let other = |port| (Tuple::new(client, client, port, 9, UDP), Flow::zeroed());
        (0..flows).map(other).collect()
    }
}

fn packet(question: &Question) -> Packet {
    let Question { tuple, kind, .. } = question;
    let end = |ip: Address, port| SocketAddr::new(ip.into(), port);
    let (from, to) = (end(tuple.source, tuple.source_port), end(tuple.destination, tuple.destination_port));
    match (tuple.protocol, kind) {
        (UDP, _) => Packet::udp(from, to, b"?"),
        (TCP, PacketKind::Syn) => Packet::tcp(from, to, 1000, b"").syn(),
        (TCP, PacketKind::SynAck) => Packet::tcp(from, to, 5000, b"").syn().ack(1001),
        (TCP, PacketKind::Data) => Packet::tcp(from, to, 1001, b"hello").ack(5001),
        (TCP, PacketKind::Fin) => Packet::tcp(from, to, 1006, b"").fin().ack(5001),
        (TCP, PacketKind::Rst) => Packet::tcp(from, to, 1001, b"").rst(),
        (_, PacketKind::Syn) => Packet::sctp(from, to, 0, 1, &[0; 16]),
        (_, PacketKind::SynAck) => Packet::sctp(from, to, 7, 2, &[0; 16]),
        (_, PacketKind::Data) => Packet::sctp(from, to, 7, 0, &[0; 16]),
        (_, PacketKind::Fin) => Packet::sctp(from, to, 7, 7, &[0; 4]),
        (_, PacketKind::Rst) => Packet::sctp(from, to, 7, 6, &[]),
    }
}
