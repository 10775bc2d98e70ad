//! The cases that are measured: a program, its packets, and baselines for comparison.

use std::{fmt, net::SocketAddr};

use anyhow::{Context as _, ensure};
use lb_common::Outcome;
use serde::Serialize;

use crate::{
    baselines::Baseline,
    candidate::{Candidate, Done, Kind},
    frames::{Flags, Frame, Seen, Sender, Transport, read},
    world::{Ip, MANY, Population, SCHEDULERS, WIRE, World},
};

/// A group of cases that reports show together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Section {
    Untouched,
    UntouchedMany,
    OneFlow,
    ManyFlows,
    HalfFull,
    NewFlow,
    Reject,
}

impl Section {
    pub(crate) const ALL: [Self; 7] = [
        Self::Untouched,
        Self::UntouchedMany,
        Self::OneFlow,
        Self::ManyFlows,
        Self::HalfFull,
        Self::NewFlow,
        Self::Reject,
    ];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Untouched => "passed on untouched, one flow",
            Self::UntouchedMany => {
                "no Service, 65,536 such flows in rotation and as many others in the table"
            }
            Self::OneFlow => "established, one flow",
            Self::ManyFlows => "established, 65,536 flows in rotation",
            Self::HalfFull => "established, 131,072 flows in rotation",
            Self::NewFlow => "new flow",
            Self::Reject => "rejected",
        }
    }

    /// Name of the section's plot file.
    pub(crate) const fn file(self) -> &'static str {
        match self {
            Self::Untouched => "packets-untouched",
            Self::UntouchedMany => "packets-untouched-many",
            Self::OneFlow => "packets-one-flow",
            Self::ManyFlows => "packets-many-flows",
            Self::HalfFull => "packets-half-full",
            Self::NewFlow => "packets-new-flow",
            Self::Reject => "packets-reject",
        }
    }

    /// The baselines that a section's programs are compared with. The fastest one sets the goal.
    const fn baselines(self) -> &'static [Baseline] {
        match self {
            Self::OneFlow | Self::ManyFlows | Self::HalfFull => &[Baseline::Balance],
            Self::Untouched | Self::UntouchedMany | Self::Reject => &[Baseline::Miss],
            Self::NewFlow => &[Baseline::Insert, Baseline::InsertPreallocated],
        }
    }

    /// Maximum cost of a program in this section, as a multiple of its baseline; `None` without a goal.
    pub(crate) const fn goal(self, kind: Kind) -> Option<f64> {
        match (self, kind) {
            (Self::Untouched, _) => Some(1.2),
            (Self::UntouchedMany, _) => Some(1.4),
            (Self::OneFlow, _) => Some(0.9),
            (Self::ManyFlows, _) => Some(0.7),
            (Self::NewFlow, Kind::Tc) => Some(1.1),
            (Self::NewFlow, Kind::Xdp) => Some(1.5),
            (Self::HalfFull | Self::Reject, _) => None,
        }
    }
}

/// Goal for a new flow that is masqueraded at tc: such a flow has four entries, not two.
const NEW_MASQUERADED: f64 = 2.0;

/// One case: a program with one kind of packet, and the baselines for comparison.
pub(crate) struct Case {
    pub(crate) section: Section,
    /// Name of the measured program.
    pub(crate) program: &'static str,
    /// Description of the packet in tables.
    pub(crate) packet: String,
    pub(crate) frame: Frame,
    pub(crate) expected: Expected,
    pub(crate) baselines: &'static [Baseline],
    pub(crate) baseline_frame: Frame,
    /// Maximum cost of the program, as a multiple of its fastest baseline; `None` without a goal.
    pub(crate) goal: Option<f64>,
}

/// What the program must do with every packet of the case.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    action: Action,
    /// The outcome that the packet is counted as; `None` if it is not counted.
    pub(crate) counted: Option<Outcome>,
    becomes: Becomes,
}

/// The verdict that the program must return for a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Passes the packet on to the stack and the next program.
    Pass,
    /// Redirects the packet to a device that the program names.
    Redirect,
    /// Redirects the packet to the device that it came from. (At tc, [`Self::Redirect`] has the same return code.)
    SendBack,
}

impl Action {
    /// The return code that stands for the verdict in a program of this kind.
    const fn code(self, kind: Kind) -> u32 {
        match (self, kind) {
            // The return code TC_ACT_UNSPEC, -1.
            (Self::Pass, Kind::Tc) => u32::MAX,
            // The return code TC_ACT_REDIRECT.
            (Self::Redirect | Self::SendBack, Kind::Tc) => 7,
            // The return code XDP_PASS.
            (Self::Pass, Kind::Xdp) => 2,
            // The return code XDP_REDIRECT.
            (Self::Redirect, Kind::Xdp) => 4,
            // The return code XDP_TX.
            (Self::SendBack, Kind::Xdp) => 3,
        }
    }
}

/// The packet that the program must produce. Its checksums must also be correct.
#[derive(Clone, Copy)]
pub(crate) enum Becomes {
    /// The unchanged packet.
    Same,
    /// A packet whose destination is this address and port.
    To(SocketAddr),
    /// A packet to this port of any address.
    ToPort(u16),
    /// A packet whose source is this address and port.
    From(SocketAddr),
    /// A TCP RST.
    Reset,
}

impl Becomes {
    fn check(self, input: &[u8], output: &[u8]) -> anyhow::Result<()> {
        let seen = read(output).context("the packet that the program returned")?;
        let Seen { from, to, is_reset } = seen;
        let right = match self {
            Self::Same => input == output,
            Self::To(address) => to == address,
            Self::ToPort(port) => to.port() == port,
            Self::From(address) => from == address,
            Self::Reset => is_reset,
        };
        ensure!(right, "the program returned the wrong packet: {seen:?}");
        Ok(())
    }
}

impl Case {
    fn new(
        world: &World,
        section: Section,
        program: &'static str,
        packet: String,
        frame: Frame,
        expected: Expected,
    ) -> anyhow::Result<Self> {
        let transport = if frame.is_udp() { Transport::Udp } else { ACK };
        let baselines = section.baselines();
        let server = if baselines == [Baseline::Miss] { world.v4.elsewhere } else { world.v4.vip };
        let flows = if section == Section::Reject { 1 } else { world.population.flows() };
        let frame = frame.flows(flows);
        // For packets of no Service, the goal is a multiple of the baseline's time with a single flow, even if the case
        // has many. This goal is stricter: with one flow, the baseline's lookup finds its bucket in the CPU caches.
        let baseline_flows = if baselines == [Baseline::Miss] { 1 } else { flows };
        let baseline_frame = Frame::new(transport, Sender::Client, server)?.flows(baseline_flows);
        // IPv6 cases have no goal: the baselines handle IPv4 only, and parsing IPv6 would cost them more time.
        let goal = section.goal(Kind::of(program)).filter(|_| !frame.is_v6());
        Ok(Self { section, program, packet, frame, expected, baselines, baseline_frame, goal })
    }

    /// The same case without a goal: for a case whose baseline does less than the program.
    fn without_goal(self) -> Self {
        Self { goal: None, ..self }
    }

    /// Fails unless the program does the work that the case measures, because a program that does less is faster.
    pub(crate) fn check(&self, candidate: &Candidate) -> anyhow::Result<()> {
        let Done { verdict, output } = candidate.once()?;
        let wanted = self.expected.action.code(self.kind());
        ensure!(verdict == wanted, "{self}: the program returned {verdict:x}, not {wanted:x}");
        let becomes = self.expected.becomes;
        becomes.check(self.frame.bytes(), &output).with_context(|| self.to_string())
    }

    pub(crate) fn kind(&self) -> Kind {
        Kind::of(self.program)
    }

    /// Whether every packet of the case creates a flow.
    pub(crate) fn makes_flows(&self) -> bool {
        self.section == Section::NewFlow
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {}", self.section.label(), self.program, self.packet)
    }
}

pub(crate) const SYN: Transport = Transport::Tcp(Flags::Syn);
const SYN_ACK: Transport = Transport::Tcp(Flags::SynAck);
pub(crate) const ACK: Transport = Transport::Tcp(Flags::Ack);

/// All cases for the flows of this world, with the data plane at index `datapath`. The cases of two data planes differ,
/// because each data plane chooses its own ports for masqueraded packets.
pub(crate) fn all(world: &World, datapath: usize) -> anyhow::Result<Vec<Case>> {
    let mut cases = Cases { world, datapath, cases: Vec::new() };
    match world.population {
        Population::Few => {
            for ip in Ip::ALL {
                cases.untouched(Section::Untouched, ip)?;
                cases.other_hook(ip)?;
                cases.established(Section::OneFlow, ip)?;
                cases.routed(Section::OneFlow, ip)?;
                cases.one_flow(ip)?;
                cases.masqueraded(ip)?;
                cases.rejected(ip)?;
            }
        }
        Population::Stack(ip, MANY) => {
            cases.untouched(Section::UntouchedMany, ip)?;
            cases.established(Section::ManyFlows, ip)?;
        }
        Population::Stack(ip, _) => cases.established(Section::HalfFull, ip)?,
        Population::Routed(ip, MANY) => cases.routed(Section::ManyFlows, ip)?,
        Population::Routed(ip, _) => cases.routed(Section::HalfFull, ip)?,
        Population::Empty => {
            for ip in Ip::ALL {
                cases.new_flows(ip)?;
            }
        }
    }
    Ok(cases.cases)
}

/// Expects that the packet is translated and passed on to the stack.
pub(crate) const fn translated(outcome: Outcome, becomes: Becomes) -> Expected {
    Expected { action: Action::Pass, counted: Some(outcome), becomes }
}

struct Cases<'a> {
    world: &'a World,
    datapath: usize,
    cases: Vec<Case>,
}

impl Cases<'_> {
    fn add(
        &mut self,
        section: Section,
        program: &'static str,
        packet: String,
        frame: Frame,
        expected: Expected,
    ) -> anyhow::Result<()> {
        self.cases.push(Case::new(self.world, section, program, packet, frame, expected)?);
        Ok(())
    }

    /// Adds a case without a goal, because its baseline does less than the program.
    fn add_without_goal(
        &mut self,
        section: Section,
        program: &'static str,
        packet: String,
        frame: Frame,
        expected: Expected,
    ) -> anyhow::Result<()> {
        let case = Case::new(self.world, section, program, packet, frame, expected)?;
        self.cases.push(case.without_goal());
        Ok(())
    }

    /// Adds the cases of packets of established flows through the stack, in both directions.
    fn established(&mut self, section: Section, ip: Ip) -> anyhow::Result<()> {
        let family = self.world.family(ip);
        let forward = translated(Outcome::Forward, Becomes::To(family.backend));
        let reply = translated(Outcome::Reply, Becomes::From(family.vip));
        for (transport, protocol) in [(ACK, "TCP"), (Transport::Udp, "UDP")] {
            if transport == Transport::Udp && section != Section::OneFlow {
                continue;
            }
            let there = Frame::new(transport, Sender::Client, family.vip)?;
            let back = Frame::new(transport, Sender::Server, family.backend)?;
            self.add(section, "tc_ingress", format!("{protocol}/{ip}"), there, forward)?;
            self.add(section, "tc_egress", format!("{protocol}/{ip}"), back, reply)?;
        }
        Ok(())
    }

    /// Adds the case of a flow whose client and backend are both on other machines, at XDP.
    fn routed(&mut self, section: Section, ip: Ip) -> anyhow::Result<()> {
        let family = self.world.family(ip);
        let frame = Frame::new(ACK, Sender::Client, family.routed)?.through(WIRE);
        let sent_back = routed(Action::SendBack, family.backend.port());
        self.add(section, "xdp_native", format!("TCP/{ip}"), frame, sent_back)
    }

    /// Adds more cases of routed flows: over UDP, to another device, and at tc.
    fn one_flow(&mut self, ip: Ip) -> anyhow::Result<()> {
        let family = self.world.family(ip);
        let [sent_back, redirected] =
            [Action::SendBack, Action::Redirect].map(|action| routed(action, family.backend.port()));
        let frame =
            |transport, to| Ok::<_, anyhow::Error>(Frame::new(transport, Sender::Client, to)?.through(WIRE));
        let (tcp, udp) = (frame(ACK, family.routed)?, frame(Transport::Udp, family.routed)?);
        let across = frame(ACK, family.across)?;
        self.add(Section::OneFlow, "xdp_native", format!("UDP/{ip}"), udp, sent_back)?;
        // The baselines cannot redirect, so these cases have no goal.
        let packet = format!("TCP/{ip}, to another device");
        self.add_without_goal(Section::OneFlow, "xdp_native", packet, across, redirected)?;
        self.add_without_goal(
            Section::OneFlow,
            "tc_ingress",
            format!("TCP/{ip}, between wires"),
            tcp,
            redirected,
        )
    }

    /// Adds the cases of packets that belong to no Service.
    fn untouched(&mut self, section: Section, ip: Ip) -> anyhow::Result<()> {
        let frame = Frame::new(ACK, Sender::Client, self.world.family(ip).elsewhere)?;
        let packet = format!("TCP/{ip}");
        let counted = passes(Some(Outcome::NoService));
        self.add(section, "tc_ingress", packet.clone(), frame.clone(), counted)?;
        self.add(section, "tc_egress", packet.clone(), frame.clone(), counted)?;
        self.add(section, "xdp_native", packet, frame.through(WIRE), passes(None))
    }

    /// Adds the case of a reply that the program at tc ingress leaves to the program at tc egress.
    fn other_hook(&mut self, ip: Ip) -> anyhow::Result<()> {
        let reply = Frame::new(ACK, Sender::Server, self.world.family(ip).backend)?;
        let packet = format!("a reply that egress will translate, {ip}");
        let expected = passes(Some(Outcome::OtherHook));
        self.add_without_goal(Section::Untouched, "tc_ingress", packet, reply, expected)
    }

    fn rejected(&mut self, ip: Ip) -> anyhow::Result<()> {
        let refused = Frame::new(SYN, Sender::Client, self.world.family(ip).empty)?;
        let expected =
            Expected { action: Action::SendBack, counted: Some(Outcome::RejectTcp), becomes: Becomes::Reset };
        self.add(Section::Reject, "tc_ingress", format!("TCP/{ip}"), refused, expected)
    }

    fn new_flows(&mut self, ip: Ip) -> anyhow::Result<()> {
        let family = self.world.family(ip);
        let port = Becomes::ToPort(family.backend.port());
        let opened = translated(Outcome::NewFlow, port);
        let sent_on =
            Expected { action: Action::SendBack, counted: Some(Outcome::NewRoutedFlow), becomes: port };
        for scheduler in SCHEDULERS {
            let frame = Frame::new(SYN, Sender::Client, family.scheduled(scheduler))?;
            self.add(Section::NewFlow, "tc_ingress", format!("TCP/{ip}, {scheduler}"), frame, opened)?;
        }
        let udp = Frame::new(Transport::Udp, Sender::Client, family.vip)?;
        self.add(Section::NewFlow, "tc_ingress", format!("UDP/{ip}, random"), udp, opened)?;
        let masqueraded = Frame::new(SYN, Sender::Client, family.masquerading)?;
        let packet = format!("TCP/{ip}, random");
        self.add(Section::NewFlow, "xdp_native", packet, masqueraded.clone().through(WIRE), sent_on)?;
        let packet = format!("TCP/{ip}, random, masqueraded");
        let mut case = Case::new(self.world, Section::NewFlow, "tc_ingress", packet, masqueraded, opened)?;
        case.goal = case.goal.and(Some(NEW_MASQUERADED));
        self.cases.push(case);
        Ok(())
    }

    /// Adds the cases of a masqueraded connection, whose packets both hooks translate in each direction.
    fn masqueraded(&mut self, ip: Ip) -> anyhow::Result<()> {
        let service = self.world.family(ip).masquerading;
        self.exchange(SYN, SYN_ACK, service)?;
        let Exchange { between, outside, answer, inside } = self.exchange(ACK, ACK, service)?;
        let client = read(between.bytes())?.from;
        ensure!(outside.from.ip() != client.ip(), "the client is not masqueraded: {outside:?}");
        let exchanged = |becomes| translated(Outcome::Masquerade, becomes);
        let reply = translated(Outcome::Reply, Becomes::From(service));
        for (program, packet, frame, expected) in [
            ("tc_egress", "to the backend", between, exchanged(Becomes::From(outside.from))),
            ("tc_ingress", "from the backend", answer, exchanged(Becomes::To(client))),
            ("tc_egress", "to the client", inside, reply),
        ] {
            let packet = format!("TCP/{ip}, masqueraded, {packet}");
            self.add(Section::OneFlow, program, packet, frame, expected)?;
        }
        Ok(())
    }

    /// Sends a request and its answer through both hooks; returns the packets of each step.
    fn exchange(
        &self,
        sent: Transport,
        answered: Transport,
        service: SocketAddr,
    ) -> anyhow::Result<Exchange> {
        let first = Frame::new(sent, Sender::Client, service)?;
        let between = Frame::of_bytes(self.through("tc_ingress", &first)?);
        let outside = read(&self.through("tc_egress", &between)?)?;
        let answer = Frame::between(answered, outside.to, outside.from)?;
        let inside = Frame::of_bytes(self.through("tc_ingress", &answer)?);
        self.through("tc_egress", &inside)?;
        Ok(Exchange { between, outside, answer, inside })
    }

    /// Runs a program of the data plane on the packet, and returns the resulting packet. Fails unless the program
    /// passes the packet on.
    fn through(&self, program: &str, frame: &Frame) -> anyhow::Result<Vec<u8>> {
        let datapath = &self.world.datapaths[self.datapath];
        let before = datapath.counters()?;
        let Done { verdict, output } = self.world.candidate(self.datapath, program, frame)?.once()?;
        let counted = datapath.counters()?.since(&before);
        ensure!(verdict == Action::Pass.code(Kind::Tc), "{program} does not let a packet pass: {counted:?}");
        Ok(output)
    }
}

/// The packets of a masqueraded connection.
struct Exchange {
    /// The client's packet after ingress and before egress: destined to the backend, not masqueraded yet.
    between: Frame,
    /// The addresses of the client's packet after egress: masqueraded.
    outside: Seen,
    /// The backend's answer as it arrives.
    answer: Frame,
    /// The backend's answer after ingress and before egress: destined to the client.
    inside: Frame,
}

/// Expects that the packet is sent on to this port of a backend, bypassing the stack.
const fn routed(action: Action, port: u16) -> Expected {
    Expected { action, counted: Some(Outcome::Routed), becomes: Becomes::ToPort(port) }
}

/// Expects that the packet passes unchanged.
const fn passes(counted: Option<Outcome>) -> Expected {
    Expected { action: Action::Pass, counted, becomes: Becomes::Same }
}
