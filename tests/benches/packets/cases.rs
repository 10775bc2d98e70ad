//! The cases: a program, its packets, and the baseline for comparison.

use std::{fmt, net::SocketAddr};

use anyhow::{Context as _, ensure};
use lb_common::Outcome;
use serde::Serialize;

use crate::{
    baselines::Baseline,
    candidate::{Candidate, Done, Kind},
    frames::{Flags, Frame, Seen, Sender, Transport, read},
    world::{Family, MANY, NEW, SCHEDULERS, WIRE, World},
};

/// A group of cases, shown together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Section {
    OneFlow,
    ManyFlows,
    Untouched,
    Reject,
    NewFlow,
}

impl Section {
    pub(crate) const ALL: [Self; 5] =
        [Self::OneFlow, Self::ManyFlows, Self::Untouched, Self::Reject, Self::NewFlow];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::OneFlow => "established, one flow",
            Self::ManyFlows => "established, 65,536 flows in rotation",
            Self::Untouched => "passed on untouched",
            Self::Reject => "rejected",
            Self::NewFlow => "new flow",
        }
    }

    /// Name of the plot.
    pub(crate) const fn file(self) -> &'static str {
        match self {
            Self::OneFlow => "packets-one-flow",
            Self::ManyFlows => "packets-many-flows",
            Self::Untouched => "packets-untouched",
            Self::Reject => "packets-reject",
            Self::NewFlow => "packets-new-flow",
        }
    }

    const fn baseline(self) -> Baseline {
        match self {
            Self::OneFlow | Self::ManyFlows => Baseline::Balance,
            Self::Untouched | Self::Reject => Baseline::Miss,
            Self::NewFlow => Baseline::Insert,
        }
    }

    const fn flows(self) -> u32 {
        match self {
            Self::OneFlow | Self::Untouched | Self::Reject => 1,
            Self::ManyFlows => MANY,
            Self::NewFlow => NEW,
        }
    }

    /// The target: the largest cost of a program, as a multiple of its baseline.
    const fn limit(self, kind: Kind) -> Option<f64> {
        match (self, kind) {
            (Self::OneFlow, Kind::Xdp) => Some(1.4),
            (Self::ManyFlows, Kind::Xdp) => Some(1.3),
            (Self::OneFlow | Self::ManyFlows, Kind::Tc) => Some(1.5),
            (Self::Untouched | Self::NewFlow, _) => Some(2.0),
            (Self::Reject, _) => None,
        }
    }
}

/// The measured program.
#[derive(Clone, Copy)]
pub(crate) enum Subject {
    /// The data plane's program of this name.
    Ours(&'static str),
    /// One baseline, compared with another.
    Baseline(Baseline),
}

/// One program with one kind of packet, and the baseline for comparison.
pub(crate) struct Case {
    pub(crate) section: Section,
    pub(crate) subject: Subject,
    pub(crate) program: String,
    /// The packet, as tables show it.
    pub(crate) packet: String,
    pub(crate) frame: Frame,
    pub(crate) expected: Expected,
    pub(crate) baseline: Baseline,
    pub(crate) baseline_frame: Frame,
    /// The largest cost of the program, as a multiple of its baseline.
    pub(crate) target: Option<f64>,
}

/// The required result for every packet.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    action: Action,
    /// The outcome that the packet is counted as; `None` if it is not counted.
    pub(crate) counted: Option<Outcome>,
    becomes: Becomes,
}

/// The fate of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Passed on to the stack and the next program.
    Pass,
    /// Redirected to a device that the program names.
    Redirect,
    /// Redirected to the device that it came from. tc has the same return code for both.
    SendBack,
}

impl Action {
    /// The return code of a program of this kind.
    const fn code(self, kind: Kind) -> u32 {
        match (self, kind) {
            // TC_ACT_UNSPEC, -1
            (Self::Pass, Kind::Tc) => u32::MAX,
            // TC_ACT_REDIRECT
            (Self::Redirect | Self::SendBack, Kind::Tc) => 7,
            // XDP_PASS
            (Self::Pass, Kind::Xdp) => 2,
            // XDP_REDIRECT
            (Self::Redirect, Kind::Xdp) => 4,
            // XDP_TX
            (Self::SendBack, Kind::Xdp) => 3,
        }
    }
}

/// The packet that must leave the program, with correct checksums.
#[derive(Clone, Copy)]
enum Becomes {
    /// The unchanged packet.
    Same,
    /// A packet to this address.
    To(SocketAddr),
    /// A packet to this port of any address.
    ToPort(u16),
    /// A packet from this address.
    From(SocketAddr),
    /// A TCP RST to its sender.
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
        packet: &str,
        frame: Frame,
        expected: Expected,
    ) -> anyhow::Result<Self> {
        let transport = if frame.is_udp() { Transport::Udp } else { ACK };
        let baseline = section.baseline();
        let server = if baseline == Baseline::Miss { world.v4.elsewhere } else { world.v4.vip };
        let frame = frame.flows(section.flows());
        let baseline_frame = Frame::new(transport, Sender::Client, server)?.flows(section.flows());
        // The baselines support IPv4 only; those for IPv6 would cost more.
        let target = section.limit(Kind::of(program)).filter(|_| !frame.is_v6());
        let (subject, program, packet) = (Subject::Ours(program), program.to_owned(), packet.to_owned());
        Ok(Self { section, subject, program, packet, frame, expected, baseline, baseline_frame, target })
    }

    /// The same case without a target.
    fn without_target(self) -> Self {
        Self { target: None, ..self }
    }

    /// Fails unless the program does the work that the case measures, because a program that does less is faster.
    pub(crate) fn check(&self, candidate: &Candidate) -> anyhow::Result<()> {
        let Done { verdict, output } = candidate.once()?;
        let wanted = self.expected.action.code(self.kind());
        ensure!(verdict == wanted, "{self}: the program returned {verdict:x}, not {wanted:x}");
        let becomes = self.expected.becomes;
        becomes.check(self.frame.bytes(), &output).with_context(|| self.to_string())
    }

    /// Kind of the program.
    pub(crate) fn kind(&self) -> Kind {
        Kind::of(&self.program)
    }

    /// Whether every packet creates a flow.
    pub(crate) fn makes_flows(&self) -> bool {
        self.section == Section::NewFlow
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {}", self.section.label(), self.program, self.packet)
    }
}

const SYN: Transport = Transport::Tcp(Flags::Syn);
const SYN_ACK: Transport = Transport::Tcp(Flags::SynAck);
const ACK: Transport = Transport::Tcp(Flags::Ack);

/// All cases.
pub(crate) fn all(world: &World) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (family, ip) in [(world.v4, "IPv4"), (world.v6, "IPv6")] {
        established(&mut cases, world, family, ip)?;
        routed(&mut cases, world, family, ip)?;
        untouched(&mut cases, world, family, ip)?;
        new_flows(&mut cases, world, family, ip)?;
    }
    masqueraded(&mut cases, world)?;
    preallocated(&mut cases, world)?;
    Ok(cases)
}

fn established(cases: &mut Vec<Case>, world: &World, family: Family, ip: &str) -> anyhow::Result<()> {
    let forward = translated(Outcome::Forward, Becomes::To(family.backend));
    let reply = translated(Outcome::Reply, Becomes::From(family.vip));
    for (section, transport, protocol) in [
        (Section::OneFlow, ACK, "TCP"),
        (Section::OneFlow, Transport::Udp, "UDP"),
        (Section::ManyFlows, ACK, "TCP"),
    ] {
        let packet = format!("{protocol}/{ip}");
        let there = Frame::new(transport, Sender::Client, family.vip)?;
        let back = Frame::new(transport, Sender::Server, family.backend)?;
        cases.push(Case::new(world, section, "tc_ingress", &packet, there, forward)?);
        cases.push(Case::new(world, section, "tc_egress", &packet, back, reply)?);
    }
    Ok(())
}

/// Expects the packet to go on to the stack, translated.
fn translated(outcome: Outcome, becomes: Becomes) -> Expected {
    Expected { action: Action::Pass, counted: Some(outcome), becomes }
}

/// Adds flows between clients and backends that are both beyond a wire.
fn routed(cases: &mut Vec<Case>, world: &World, family: Family, ip: &str) -> anyhow::Result<()> {
    let port = Becomes::ToPort(family.backend.port());
    let routed = |action| Expected { action, counted: Some(Outcome::Routed), becomes: port };
    let tcp = Frame::new(ACK, Sender::Client, family.routed)?.through(WIRE);
    let udp = Frame::new(Transport::Udp, Sender::Client, family.routed)?.through(WIRE);
    let across = Frame::new(ACK, Sender::Client, family.across)?.through(WIRE);
    for (section, program, packet, frame, action) in [
        (Section::OneFlow, "xdp_native", "TCP/", &tcp, Action::SendBack),
        (Section::OneFlow, "xdp_native", "UDP/", &udp, Action::SendBack),
        (Section::OneFlow, "xdp_native", "TCP/, to another device", &across, Action::Redirect),
        (Section::ManyFlows, "xdp_native", "TCP/", &tcp, Action::SendBack),
        (Section::OneFlow, "tc_ingress", "TCP/, between wires", &tcp, Action::Redirect),
    ] {
        if section == Section::ManyFlows && family.routed.is_ipv6() {
            continue;
        }
        let packet = packet.replace('/', &format!("/{ip}"));
        cases.push(Case::new(world, section, program, &packet, frame.clone(), routed(action))?);
    }
    Ok(())
}

/// Adds packets of no Service, a reply that another hook translates, and a rejected packet.
fn untouched(cases: &mut Vec<Case>, world: &World, family: Family, ip: &str) -> anyhow::Result<()> {
    let packet = format!("TCP/{ip}");
    let elsewhere = Frame::new(ACK, Sender::Client, family.elsewhere)?;
    let passes = |counted| Expected { action: Action::Pass, counted, becomes: Becomes::Same };
    for (program, frame) in [("tc_ingress", elsewhere.clone()), ("tc_egress", elsewhere.clone())] {
        let expected = passes(Some(Outcome::NoService));
        cases.push(Case::new(world, Section::Untouched, program, &packet, frame, expected)?);
    }
    let arriving = elsewhere.through(WIRE);
    cases.push(Case::new(world, Section::Untouched, "xdp_native", &packet, arriving, passes(None))?);
    let reply = Frame::new(ACK, Sender::Server, family.backend)?;
    let packet = format!("a reply that egress will translate, {ip}");
    let expected = passes(Some(Outcome::OtherHook));
    cases
        .push(Case::new(world, Section::Untouched, "tc_ingress", &packet, reply, expected)?.without_target());
    let refused = Frame::new(SYN, Sender::Client, family.empty)?;
    let expected =
        Expected { action: Action::SendBack, counted: Some(Outcome::RejectTcp), becomes: Becomes::Reset };
    cases.push(Case::new(world, Section::Reject, "tc_ingress", &format!("TCP/{ip}"), refused, expected)?);
    Ok(())
}

fn new_flows(cases: &mut Vec<Case>, world: &World, family: Family, ip: &str) -> anyhow::Result<()> {
    let port = Becomes::ToPort(family.backend.port());
    let opened = Expected { action: Action::Pass, counted: Some(Outcome::NewFlow), becomes: port };
    let sent_on = Expected { action: Action::SendBack, counted: Some(Outcome::NewRoutedFlow), becomes: port };
    let mut case = |program, packet: &str, frame, expected| {
        cases.push(Case::new(world, Section::NewFlow, program, packet, frame, expected)?);
        Ok::<_, anyhow::Error>(())
    };
    // Schedulers do not depend on the family.
    let schedulers = if family.vip.is_ipv4() { &SCHEDULERS[..] } else { &[] };
    for &scheduler in schedulers {
        let frame = Frame::new(SYN, Sender::Client, family.scheduled(scheduler))?;
        case("tc_ingress", &format!("TCP/{ip}, {scheduler}"), frame, opened)?;
    }
    let tcp = Frame::new(SYN, Sender::Client, family.vip)?;
    let udp = Frame::new(Transport::Udp, Sender::Client, family.vip)?;
    let exchanged = Frame::new(SYN, Sender::Client, family.masquerading)?;
    if schedulers.is_empty() {
        case("tc_ingress", &format!("TCP/{ip}, random"), tcp, opened)?;
    }
    case("tc_ingress", &format!("UDP/{ip}, random"), udp, opened)?;
    case("xdp_native", &format!("TCP/{ip}, random"), exchanged.clone().through(WIRE), sent_on)?;
    // Two flows; the baseline inserts one entry.
    let packet = format!("TCP/{ip}, random, masqueraded");
    cases
        .push(Case::new(world, Section::NewFlow, "tc_ingress", &packet, exchanged, opened)?.without_target());
    Ok(())
}

/// Adds a masqueraded connection: both hooks translate in both directions.
fn masqueraded(cases: &mut Vec<Case>, world: &World) -> anyhow::Result<()> {
    let through = |program: &str, frame: &Frame| {
        let before = world.settled.counters()?;
        let Done { verdict, output } = world.settled_candidate(program, frame)?.once()?;
        let counted = world.settled.counters()?.since(&before);
        ensure!(verdict == Action::Pass.code(Kind::Tc), "{program} does not let a packet pass: {counted:?}");
        Ok::<_, anyhow::Error>(output)
    };
    let exchange = |sent, answered| {
        let first = Frame::new(sent, Sender::Client, world.v4.masquerading)?;
        let between = Frame::of_bytes(through("tc_ingress", &first)?);
        let outside = read(&through("tc_egress", &between)?)?;
        let answer = Frame::between(answered, outside.to, outside.from)?;
        let inside = Frame::of_bytes(through("tc_ingress", &answer)?);
        through("tc_egress", &inside)?;
        Ok::<_, anyhow::Error>((between, outside, answer, inside))
    };
    exchange(SYN, SYN_ACK)?;
    let (between, outside, answer, inside) = exchange(ACK, ACK)?;
    let client = read(between.bytes())?.from;
    ensure!(outside.from.ip() != client.ip(), "the client is not masqueraded: {outside:?}");
    let exchanged = |becomes| translated(Outcome::Masquerade, becomes);
    let reply = translated(Outcome::Reply, Becomes::From(world.v4.masquerading));
    for (program, packet, frame, expected) in [
        (
            "tc_egress",
            "TCP/IPv4, masqueraded, to the backend",
            between,
            exchanged(Becomes::From(outside.from)),
        ),
        ("tc_ingress", "TCP/IPv4, masqueraded, from the backend", answer, exchanged(Becomes::To(client))),
        ("tc_egress", "TCP/IPv4, masqueraded, to the client", inside, reply),
    ] {
        cases.push(Case::new(world, Section::OneFlow, program, packet, frame, expected)?);
    }
    Ok(())
}

/// Adds the cost of a new entry in a preallocated map.
fn preallocated(cases: &mut Vec<Case>, world: &World) -> anyhow::Result<()> {
    let frame = Frame::new(SYN, Sender::Client, world.v4.vip)?;
    let baseline = Baseline::InsertPreallocated;
    let untouched = Becomes::To(world.v4.vip);
    let expected = Expected { action: Action::Pass, counted: None, becomes: untouched };
    let case = Case::new(world, Section::NewFlow, "tc", "TCP/IPv4", frame, expected)?.without_target();
    let (subject, program) = (Subject::Baseline(baseline), baseline.program(Kind::Tc));
    cases.push(Case { subject, program, ..case });
    Ok(())
}
