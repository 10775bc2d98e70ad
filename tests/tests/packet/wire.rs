//! A network namespace with wires, and packets that arrive on one of them.

use std::{
    fs,
    io::Write as _,
    process::{Command, Stdio},
};

use lb_common::Outcome;
use nix::sched::{CloneFlags, unshare};

use super::{
    packets::{NODE, PEER, Packet},
    report::assert_same_packet,
    stage::{Family, each_on},
    test_run::test_run,
    testbed::{Device, Testbed},
};

/// Interface index of the wire that packets arrive on.
pub(crate) const WIRE: u32 = 50;
/// Interface index of a second wire.
pub(crate) const OTHER: u32 = 52;
/// Interface index of a third wire, with a smaller MTU.
pub(crate) const NARROW: u32 = 54;
pub(crate) const NARROW_MTU: u32 = 1300;

/// Clients and backends of the stage are beyond [`WIRE`], and so is the default router. 203.0.113.192/26 is beyond
/// [`OTHER`], 203.0.113.128/26 beyond [`NARROW`]; .194 and .130 are neighbours there.
const SETUP: &str = "
link set lo address 00:00:5e:00:53:02
link set lo up
link add wire index 50 address 00:00:5e:00:53:02 type veth peer name far
link add other index 52 address 00:00:5e:00:53:02 type veth peer name far2
link add narrow index 54 address 00:00:5e:00:53:02 mtu 1300 type veth peer name far3
link set far up
link set far2 up
link set far3 up
link set wire up
link set other up
link set narrow up
address add 198.51.100.253/24 dev wire
address add 2001:db8:b::fd/64 dev wire nodad
address add 203.0.113.253/26 dev other
address add 203.0.113.190/26 dev narrow
neighbour add 198.51.100.254 lladdr 00:00:5e:00:53:01 dev wire
neighbour add 198.51.100.1 lladdr 00:00:5e:00:53:01 dev wire
neighbour add 198.51.100.2 lladdr 00:00:5e:00:53:01 dev wire
neighbour add 2001:db8:b::fe lladdr 00:00:5e:00:53:01 dev wire
neighbour add 2001:db8:b::1 lladdr 00:00:5e:00:53:01 dev wire
neighbour add 2001:db8:b::2 lladdr 00:00:5e:00:53:01 dev wire
neighbour add 203.0.113.194 lladdr 00:00:5e:00:53:01 dev other
neighbour add 203.0.113.130 lladdr 00:00:5e:00:53:01 dev narrow
route add default via 198.51.100.254 dev wire
route add default via 2001:db8:b::fe dev wire
";

/// Like [`each_on`], with Ethernet frames only, in a namespace that has the wires and their routes.
pub(crate) fn each_on_wires(case: &str, test: impl Fn(&mut Testbed, Family)) {
    unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
    set_up();
    each_on(&[Device::Ethernet], case, |bed, family| {
        for index in [WIRE, OTHER] {
            bed.add_wire(index, 1500);
        }
        bed.add_wire(NARROW, NARROW_MTU);
        test(bed, family);
    });
}

/// Creates the wires in this thread's namespace, which must not be the machine's, and turns on forwarding there.
pub(crate) fn set_up() {
    let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    ip.stdin.take().unwrap().write_all(SETUP.as_bytes()).unwrap();
    assert!(ip.wait().unwrap().success());
    for forwarding in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        fs::write(format!("/proc/sys/net/{forwarding}"), "1").unwrap();
    }
}

/// The mode of XDP, which determines the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Native,
    Generic,
}

impl Mode {
    pub(crate) const BOTH: [Self; 2] = [Self::Native, Self::Generic];

    const fn program(self) -> &'static str {
        match self {
            Self::Native => "xdp_native",
            Self::Generic => "xdp_generic",
        }
    }
}

/// The result of a run: return code, packet, and the counters that changed.
#[derive(Clone, Debug)]
#[must_use]
pub(crate) struct Run {
    case: String,
    input: Vec<u8>,
    pub(crate) output: Vec<u8>,
    pub(crate) action: u32,
    pub(crate) moved: Vec<(Outcome, u64)>,
}

/// Return codes of `linux/bpf.h` and `linux/pkt_cls.h`.
pub(crate) const XDP_DROP: u32 = 1;
pub(crate) const XDP_PASS: u32 = 2;
pub(crate) const XDP_TX: u32 = 3;
pub(crate) const XDP_REDIRECT: u32 = 4;
pub(crate) const TC_ACT_SHOT: u32 = 2;
pub(crate) const TC_ACT_REDIRECT: u32 = 7;
/// `TC_ACT_UNSPEC`, -1: the program passes the packet on.
pub(crate) const TC_ACT_UNSPEC: u32 = u32::MAX;

impl Run {
    /// Asserts that the packet leaves as `expected`, through the same device ([`XDP_TX`]) or another one
    /// ([`XDP_REDIRECT`]).
    #[track_caller]
    pub(crate) fn leaves(self, action: u32, outcome: Outcome, expected: &Packet) {
        self.check(action, &[(outcome, 1)]);
        assert_same_packet(&self.case, true, &self.input, &self.output, &expected.bytes());
    }

    /// Asserts that the program passes the packet on to tc, unchanged and uncounted.
    #[track_caller]
    pub(crate) fn stays_for_tc(self) {
        self.check(XDP_PASS, &[]);
        assert_same_packet(&self.case, true, &self.input, &self.output, &self.input);
    }

    #[track_caller]
    pub(crate) fn drops(self, outcome: Outcome) {
        self.check(XDP_DROP, &[(outcome, 1)]);
    }

    #[track_caller]
    pub(crate) fn check(&self, action: u32, moved: &[(Outcome, u64)]) {
        assert_eq!((self.action, &*self.moved), (action, moved), "{}", self.case);
    }
}

/// `packet` as this node forwards it: with the MAC addresses of the next link and a hop limit decreased by 1.
pub(crate) fn routed(packet: &Packet) -> Packet {
    packet.clone().with(|packet| {
        let ethernet = packet.ethernet.as_mut().unwrap();
        (ethernet.destination, ethernet.source) = (PEER, NODE);
        packet.decrement_hops();
    })
}

impl Testbed {
    /// Runs a frame that arrives on [`WIRE`] through an XDP program.
    #[track_caller]
    pub(crate) fn arrive(&mut self, mode: Mode, packet: &Packet) -> Run {
        self.arrive_bytes(mode, &packet.bytes())
    }

    /// Like [`Self::arrive`], with these bytes. About once per second, XDP leaves a packet to tc that it could send
    /// itself (`next_hop_flags::REPEATED`): this function then runs the frame again.
    #[track_caller]
    pub(crate) fn arrive_bytes(&mut self, mode: Mode, input: &[u8]) -> Run {
        let run = self.arrive_once(mode, input);
        if run.action == XDP_PASS && run.moved.is_empty() { self.arrive_once(mode, input) } else { run }
    }

    #[track_caller]
    pub(crate) fn arrive_once(&mut self, mode: Mode, input: &[u8]) -> Run {
        // Fields of `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let length = u32::try_from(input.len()).unwrap();
        let context = [0, length, 0, WIRE, 0, 0];
        self.run_with_context(mode.program(), input, &context)
    }

    /// Runs a frame that arrives on [`WIRE`] through the tc program at ingress.
    #[track_caller]
    pub(crate) fn arrive_at_tc(&mut self, packet: &Packet) -> Run {
        self.arrive_at_tc_marked(packet, 0)
    }

    /// Like [`Self::arrive_at_tc`], with this `skb->mark`.
    #[track_caller]
    pub(crate) fn arrive_at_tc_marked(&mut self, packet: &Packet, mark: u32) -> Run {
        // The context is a `struct __sk_buff` up to `ifindex`.
        let mut context = [0; 11];
        (context[2], context[10]) = (mark, WIRE);
        self.run_with_context("tc_ingress", &packet.bytes(), &context)
    }

    #[track_caller]
    fn run_with_context(&mut self, program: &'static str, input: &[u8], context: &[u32]) -> Run {
        let case = format!("{} ({program})", self.next_step());
        let before = self.counters();
        let mut output = vec![0; input.len() + 512];
        let result = test_run(self.program(program).fd().unwrap(), input, &mut output, (context, &mut []), 0);
        let (action, length) = result.unwrap_or_else(|error| panic!("{case}: {error}"));
        output.truncate(length);
        let moved = self.moved_since(&before);
        Run { case, input: input.to_vec(), output, action, moved }
    }
}
