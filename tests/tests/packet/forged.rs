//! The changes that TCP segments with every combination of flags make to the entries, in every state of a connection.
//! The tables in `docs/security.md` must list the same changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
};

use lb_common::{
    Outcome,
    conntrack::{Flow, Phase, Segment, Tick, Tuple, seconds_left, tcp_flags},
};

use super::{
    clock::tick,
    packets::Packet,
    stage::{Family, each_on},
    testbed::{Device, Hook, TCP, Testbed},
};

const FIN: u8 = tcp_flags::FIN;
const SYN: u8 = tcp_flags::SYN;
const RST: u8 = tcp_flags::RST;
const ACK: u8 = tcp_flags::ACK;
const URG: u8 = tcp_flags::URG;

/// Every combination of the flags that netfilter distinguishes: FIN, SYN, RST, ACK and URG.
const FLAGS: [u8; 32] = {
    let mut flags = [0; 32];
    let mut index = 0;
    while index < 32_u8 {
        // The bits of ACK and URG are above that of PSH, which netfilter ignores.
        flags[index as usize] = index & (FIN | SYN | RST) | (index & !(FIN | SYN | RST)) << 1;
        index += 1;
    }
    flags
};

/// The columns of the tables: the valid combinations without URG.
const COLUMNS: [(&str, u8); 6] = [
    ("SYN", SYN),
    ("SYN ACK", SYN_ACK),
    ("ACK", ACK),
    ("FIN ACK", FIN_ACK),
    ("RST", RST),
    ("RST ACK", RST | ACK),
];

/// First sequence numbers of client and backend.
const CLIENT: u32 = 1000;
const BACKEND: u32 = 5000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sender {
    Client,
    Backend,
}

impl Sender {
    const BOTH: [Self; 2] = [Self::Client, Self::Backend];

    const fn hook(self) -> Hook {
        match self {
            Self::Client => Hook::Ingress,
            Self::Backend => Hook::Egress,
        }
    }

    fn packet(self, family: Family, segment: &Segment) -> Packet {
        let payload = vec![0; segment.payload as usize];
        let packet = match self {
            Self::Client => Packet::tcp(family.client(), family.vip(), segment.seq, &payload),
            Self::Backend => Packet::tcp(family.backend(), family.client(), segment.seq, &payload),
        };
        packet.with(|packet| {
            let header = packet.tcp_header();
            header.fin = segment.flags & FIN != 0;
            header.syn = segment.flags & SYN != 0;
            header.rst = segment.flags & RST != 0;
            header.ack = segment.flags & ACK != 0;
            header.urg = segment.flags & URG != 0;
            header.acknowledgment_number = if header.ack { segment.ack } else { 0 };
        })
    }
}

/// A state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    SynSent,
    SynReceived,
    Established,
    ClosedByClient,
    ClosedByBackend,
    TimeWait,
    Reset,
}

impl State {
    const ALL: [Self; 7] = [
        Self::SynSent,
        Self::SynReceived,
        Self::Established,
        Self::ClosedByClient,
        Self::ClosedByBackend,
        Self::TimeWait,
        Self::Reset,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::SynSent => "SYN sent",
            Self::SynReceived => "SYN received",
            Self::Established => "established",
            Self::ClosedByClient => "half-closed by the client",
            Self::ClosedByBackend => "half-closed by the backend",
            Self::TimeWait => "both FINs sent",
            Self::Reset => "reset",
        }
    }

    const fn phase(self) -> Phase {
        match self {
            Self::SynSent => Phase::Opening,
            Self::SynReceived => Phase::Accepted,
            Self::Established => Phase::Established,
            Self::ClosedByClient | Self::ClosedByBackend => Phase::HalfClosed,
            Self::TimeWait => Phase::TimeWait,
            Self::Reset => Phase::Closed,
        }
    }

    /// The segments that lead to the state: each is expected by its receiver. Client and backend send four and eight
    /// bytes after the handshake.
    fn segments(self) -> Vec<(Sender, Segment)> {
        use Sender::{Backend, Client};
        let segment = |flags, seq, ack, payload| Segment { flags, seq, ack, payload };
        let handshake = [
            (Client, segment(SYN, CLIENT, 0, 0)),
            (Backend, segment(SYN | ACK, BACKEND, CLIENT + 1, 0)),
            (Client, segment(ACK, CLIENT + 1, BACKEND + 1, 0)),
            (Backend, segment(ACK, BACKEND + 1, CLIENT + 1, 8)),
            (Client, segment(ACK, CLIENT + 1, BACKEND + 9, 4)),
            (Backend, segment(ACK, BACKEND + 9, CLIENT + 5, 0)),
        ];
        let fin_of_client = (Client, segment(FIN | ACK, CLIENT + 5, BACKEND + 9, 0));
        let fin_of_backend = |ack| (Backend, segment(FIN | ACK, BACKEND + 9, ack, 0));
        let end = match self {
            Self::SynSent => return handshake[..1].to_vec(),
            Self::SynReceived => return handshake[..2].to_vec(),
            Self::Established => vec![],
            Self::ClosedByClient => vec![fin_of_client],
            Self::ClosedByBackend => vec![fin_of_backend(CLIENT + 5)],
            Self::TimeWait => vec![fin_of_client, fin_of_backend(CLIENT + 6)],
            Self::Reset => vec![(Client, segment(RST, CLIENT + 5, 0, 0))],
        };
        [&handshake[..], &end].concat()
    }

    /// The segment with these flags that the receiver expects from this sender. A SYN before the end of the handshake
    /// is a retransmission.
    fn expected(self, sender: Sender, flags: u8) -> Segment {
        let sent = self.segments();
        let next = |of, first| {
            sent.iter()
                .filter(|(sender, _)| *sender == of)
                .map(|(_, sent)| sent.end())
                .next_back()
                .unwrap_or(first)
        };
        let (client, backend) = (next(Sender::Client, CLIENT), next(Sender::Backend, BACKEND));
        let (seq, ack, first) = match sender {
            Sender::Client => (client, backend, CLIENT),
            Sender::Backend => (backend, client, BACKEND),
        };
        let is_opening = matches!(self, Self::SynSent | Self::SynReceived);
        let seq = if is_opening && flags & SYN != 0 { first } else { seq };
        Segment { flags, seq, ack, payload: 0 }
    }

    /// Segments with these flags that are outside the window. For a RST the window is what the sender has sent and the
    /// receiver has not acknowledged, and the acknowledgement number is not compared. A RST that answers a SYN must
    /// acknowledge exactly that SYN.
    fn outside(self, sender: Sender, flags: u8) -> Vec<Segment> {
        const FAR: u32 = 1 << 30;
        let right = self.expected(sender, flags);
        let seq = |by: u32| Segment { seq: right.seq.wrapping_add(by), ..right };
        let ack = |by: u32| Segment { ack: right.ack.wrapping_add(by), ..right };
        let both = |by: u32| Segment { ack: right.ack.wrapping_add(by), ..seq(by) };
        let far = [FAR, FAR.wrapping_neg()];
        let wrong: Vec<Segment> = if flags & RST != 0 {
            let near_and_far = [1, 2_u32.wrapping_neg()].into_iter().chain(far);
            let answers_syn = self == Self::SynSent && sender == Sender::Backend;
            near_and_far.map(|by| if answers_syn { ack(by) } else { seq(by) }).collect()
        } else if flags & ACK != 0 {
            far.into_iter().flat_map(|by| [seq(by), ack(by), both(by)]).collect()
        } else {
            far.map(seq).to_vec()
        };
        let with_data = wrong.iter().map(|segment| Segment { payload: 4, ..*segment });
        with_data.chain(wrong.iter().copied()).collect()
    }

    /// The changes that a segment outside the window may make to the entries, apart from keeping them alive.
    const fn exceptions(self, sender: Sender, flags: u8) -> &'static [&'static str] {
        use Sender::{Backend, Client};
        match (self, sender, flags & !URG) {
            // Until the handshake is complete, the client's sequence numbers prove nothing. The programs only compare
            // the client's acknowledgement numbers with what the backend has sent: `Flow::acknowledges_only_sent`.
            (Self::SynSent, Client, SYN | SYN_ACK | ACK | FIN_ACK) => &["numbers"],
            (Self::SynReceived, Client, SYN) => &["numbers"],
            (Self::SynReceived, Client, SYN_ACK | ACK) => &["numbers", "established"],
            (Self::SynReceived, Client, FIN_ACK) => &["numbers", "half-closed"],
            // The backend's first segments define its sequence numbers, so there is no window yet.
            (Self::SynSent, Backend, SYN | SYN_ACK | ACK | FIN_ACK) => &["accepted"],
            (Self::SynReceived, Backend, SYN | SYN_ACK) => &["numbers"],
            // The backend accepts a new connection from the same port: both ends have lost the old one.
            (Self::Established | Self::ClosedByClient | Self::ClosedByBackend, Backend, SYN_ACK) => {
                &["accepted"]
            }
            // The tuple is free again.
            (Self::TimeWait | Self::Reset, Client, SYN) => &["new flow"],
            (Self::TimeWait | Self::Reset, Backend, SYN_ACK) => &["deleted"],
            _ => &[],
        }
    }

    /// Asserts that segments outside the window have changed nothing but what is documented.
    fn assert_unchanged(self, sender: Sender, flags: u8, effects: &BTreeSet<&str>) {
        let segment = self.expected(sender, flags);
        let allowed = match segment {
            _ if !segment.is_valid() => DROPPED,
            _ if segment.is_rst() => NOTHING,
            // A backend repeats its SYN-ACK even if the SYN was forged, so segments of a backend keep no half-open flow
            // alive.
            _ if matches!((self, sender), (Self::SynSent | Self::SynReceived, Sender::Backend)) => NOTHING,
            _ => DEADLINE,
        };
        let exceptions = if segment.is_valid() { self.exceptions(sender, flags) } else { &[] };
        let wrong: Vec<_> =
            effects.iter().filter(|effect| **effect != allowed && !exceptions.contains(effect)).collect();
        assert!(wrong.is_empty(), "{self:?}, {sender:?}, flags {flags:#x}: {wrong:?}");
        let unused: Vec<_> = exceptions.iter().filter(|effect| !effects.contains(*effect)).collect();
        assert!(unused.is_empty(), "{self:?}, {sender:?}, flags {flags:#x}: never {unused:?}");
    }
}

const SYN_ACK: u8 = SYN | ACK;
const FIN_ACK: u8 = FIN | ACK;

/// The words of the tables for a segment that changes nothing, one that only keeps the entries alive, and one that is
/// dropped.
const NOTHING: &str = "–";
const DEADLINE: &str = "deadline";
const DROPPED: &str = "dropped";

/// A connection in some state: the keys and the flows of its entries.
struct Connection {
    keys: [Tuple; 2],
    flows: [Flow; 2],
}

/// Ticks since the last packet of either direction.
const IDLE: u32 = 5;

impl Connection {
    /// Opens the connection and leads it to the state.
    fn lead_to(state: State, bed: &mut Testbed, family: Family) -> Self {
        bed.clear_flows();
        for (sender, segment) in state.segments() {
            let sent = bed.send(sender.hook(), &sender.packet(family, &segment));
            assert_ne!(sent.moved, [(Outcome::InvalidFlags, 1)], "{state:?}: {segment:?}");
        }
        let from = Packet::tcp(family.client(), family.vip(), 0, b"").tuple();
        let keys = [from, bed.flow(&from).unwrap().to.reversed()];
        let flows = keys.map(|key| bed.flow(&key).unwrap());
        assert_eq!(Phase::of(&flows[0], &flows[1]), state.phase(), "{state:?}");
        Self { keys, flows }
    }

    /// Sends a segment to the idle connection; returns what it has changed, in the words of the tables.
    fn effect(&self, bed: &mut Testbed, family: Family, sender: Sender, segment: &Segment) -> &'static str {
        let last_seen = Tick(tick().0 - IDLE);
        let before = self.flows.map(|flow| Flow { last_seen, ..flow });
        for (key, flow) in self.keys.iter().zip(&before) {
            bed.insert_entry(key, flow);
        }
        let sent = bed.send(sender.hook(), &sender.packet(family, segment));
        let [Some(forward), Some(reply)] = self.keys.map(|key| bed.flow(&key)) else {
            return "deleted";
        };
        // Every translated segment counts as traffic, also one outside the window, so the counters are not compared.
        let observed = |flow: &Flow| Flow { last_seen, packets: 0, traffic: 0, ..*flow };
        let is_same = [&forward, &reply].map(observed) == [&before[0], &before[1]].map(observed);
        let now = tick();
        let [phase, earlier] = [Phase::of(&forward, &reply), Phase::of(&before[0], &before[1])];
        let later =
            seconds_left(&forward, Some(&reply), now) > seconds_left(&before[0], Some(&before[1]), now);
        match sent.moved[..] {
            [(Outcome::InvalidFlags, 1)] => {
                assert!([forward, reply] == before, "{segment:?}: dropped, but changes the flow");
                DROPPED
            }
            [(Outcome::NewFlow, 1)] => "new flow",
            [(Outcome::Forward | Outcome::Reply, 1)] if phase != earlier => phase.as_str(),
            [(Outcome::Forward | Outcome::Reply, 1)] if !is_same => "numbers",
            [(Outcome::Forward | Outcome::Reply, 1)] if later => DEADLINE,
            [(Outcome::Forward | Outcome::Reply, 1)] => {
                assert_eq!(phase.last_used(&forward, Some(&reply)), last_seen, "{segment:?}");
                NOTHING
            }
            ref moved => panic!("{segment:?}: {moved:?}"),
        }
    }
}

/// The effects by state, sender and flags.
type Effects = BTreeMap<(State, Sender, u8), BTreeSet<&'static str>>;

/// The effects of segments inside and outside the window, in every state.
fn effects(bed: &mut Testbed, family: Family) -> [Effects; 2] {
    bed.service(family.vip(), TCP, &[family.backend()]);
    let [mut inside, mut outside] = [Effects::new(), Effects::new()];
    for state in State::ALL {
        let connection = Connection::lead_to(state, bed, family);
        for (sender, flags) in Sender::BOTH.into_iter().flat_map(|sender| FLAGS.map(|flags| (sender, flags)))
        {
            let row = (state, sender, flags);
            let mut effect = |segment: &Segment| connection.effect(bed, family, sender, segment);
            inside.insert(row, [effect(&state.expected(sender, flags))].into());
            outside.insert(row, state.outside(sender, flags).iter().map(effect).collect());
        }
    }
    [inside, outside]
}

#[test]
fn segments_outside_the_window_change_no_state() {
    each_on(&[Device::Ethernet], "segments in every state", |bed, family| {
        let [inside, outside] = effects(bed, family);
        for ((state, sender, flags), effects) in &outside {
            state.assert_unchanged(*sender, *flags, effects);
            let expected = Segment { flags: *flags, ..state.expected(*sender, *flags) };
            let without_urgent = (*state, *sender, flags & !URG);
            let row = (*state, *sender, *flags);
            assert_eq!(inside[&row].contains(DROPPED), !expected.is_valid(), "{row:?}");
            if expected.is_valid() {
                assert_eq!((&inside[&row], effects), (&inside[&without_urgent], &outside[&without_urgent]));
            }
        }
        let page = with_tables(PAGE, &inside, &outside);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/security.md"), &page).unwrap();
        }
        assert!(
            page == PAGE,
            "docs/security.md is out of date: UPDATE_DOCS=1 lets this test write it\n{page}"
        );
    });
}

const PAGE: &str = include_str!("../../../docs/security.md");
/// The markers around the tables.
const BEGIN: &str = "<!-- written by the packet test forged.rs with UPDATE_DOCS=1: begin -->\n";
const END: &str = "<!-- end -->\n";

/// The page with these tables.
fn with_tables(page: &str, inside: &Effects, outside: &Effects) -> String {
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let (inside, outside) = (table(inside), table(outside));
    format!(
        "{before}{BEGIN}\nOutside the window:\n\n{outside}\nThe segment that the receiver expects next:\n\n{inside}\n{END}{after}"
    )
}

/// A table with a row for each state and sender.
fn table(effects: &Effects) -> String {
    let names: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
    let mut text =
        format!("| state | from | {} |\n|---|---|{}\n", names.join(" | "), "---|".repeat(names.len()));
    for state in State::ALL {
        for sender in Sender::BOTH {
            let cells = COLUMNS.map(|(_, flags)| {
                let words = &effects[&(state, sender, flags)];
                words.iter().copied().collect::<Vec<_>>().join(", ")
            });
            let sender = format!("{sender:?}").to_lowercase();
            writeln!(text, "| {} | {sender} | {} |", state.name(), cells.join(" | ")).unwrap();
        }
    }
    text
}
