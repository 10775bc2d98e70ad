//! Runs one packet through one program, and compares the result.

use lb_common::Outcome;

use super::{
    super::{
        packets::Packet,
        report::assert_same_packet,
        test_run::{self, test_run},
    },
    Device, Hook, Testbed,
};

/// Number of the fields of `struct __sk_buff`, of 32 bits each.
const FIELDS: usize = 48;
/// Index of the field `mark`. Every packet has [`MARKED`], and must keep it: marks belong to the node's firewall and
/// policy routing.
const MARK: usize = 2;
/// The mark with which kube-proxy's rules select packets to masquerade.
const MARKED: u32 = 0x4000;
/// Index of the field `ingress_ifindex`: 1 if the packet came in through a device. With 0 the programs treat a packet at
/// egress as sent by a socket of the node.
const INGRESS: usize = 9;

impl Testbed {
    /// Runs a packet through the program of this hook.
    #[track_caller]
    pub(crate) fn send(&mut self, hook: Hook, packet: &Packet) -> Sent {
        let packet = self.on_device(packet);
        self.run(hook, &packet.bytes())
    }

    /// Runs a packet of a socket of the node through the program at egress.
    #[track_caller]
    pub(crate) fn send_from_node(&mut self, packet: &Packet) -> Sent {
        let packet = self.on_device(packet);
        self.run_in(Hook::Egress, &packet.bytes(), false)
    }

    /// Runs a frame of any bytes. A bare device gets the frame without its Ethernet header, the first 14 bytes.
    #[track_caller]
    pub(crate) fn send_bytes(&mut self, hook: Hook, bytes: &[u8]) -> Sent {
        let from = if self.device == Device::Bare { 14 } else { 0 };
        self.run(hook, &bytes[from..])
    }

    fn on_device(&self, packet: &Packet) -> Packet {
        if self.device == Device::Bare { packet.clone().bare() } else { packet.clone() }
    }

    /// Runs these bytes, unchanged, through the program of this hook.
    #[track_caller]
    pub(crate) fn run(&mut self, hook: Hook, input: &[u8]) -> Sent {
        self.run_in(hook, input, hook == Hook::Egress)
    }

    /// Like [`Self::run`]; with `is_forwarded`, the packet at egress came in through a device.
    #[track_caller]
    fn run_in(&mut self, hook: Hook, input: &[u8], is_forwarded: bool) -> Sent {
        let program = self.device.program(hook);
        let case = format!("{} ({program})", self.next_step());
        let before = self.counters();
        let mut output = vec![0; input.len() + 512];
        let flags = if self.device == Device::EthernetWithSum { test_run::CHECKSUM_COMPLETE } else { 0 };
        let (mut context, mut after) = ([0; FIELDS], [0; FIELDS]);
        (context[MARK], context[INGRESS]) = (MARKED, is_forwarded.into());
        let contexts = (&context[..], &mut after[..]);
        let result = test_run(self.program(program).fd().unwrap(), input, &mut output, contexts, flags);
        let (action, length) = result.unwrap_or_else(|error| panic!("{case}: {error}"));
        let action = action.cast_signed();
        output.truncate(length);
        let moved = self.moved_since(&before);
        assert_eq!(after[MARK], MARKED, "{case}: mark");
        Sent { case, device: self.device, input: input.to_vec(), output, action, moved }
    }

    pub(super) fn has_checksum_complete(&self) -> bool {
        let program = self.program("tc_ingress").fd().unwrap();
        test_run(program, &[0; 64], &mut [0; 64], (&[], &mut []), test_run::CHECKSUM_COMPLETE).is_ok()
    }
}

/// Name of the return code, as in `linux/pkt_cls.h`.
fn action_name(action: i32) -> String {
    match action {
        -1 => "TC_ACT_UNSPEC".into(),
        0 => "TC_ACT_OK".into(),
        2 => "TC_ACT_SHOT".into(),
        7 => "TC_ACT_REDIRECT".into(),
        other => format!("action {other}"),
    }
}

/// The result of a run. Each method asserts what the program did with the packet.
#[must_use]
pub(crate) struct Sent {
    case: String,
    device: Device,
    input: Vec<u8>,
    pub(crate) output: Vec<u8>,
    action: i32,
    pub(crate) moved: Vec<(Outcome, u64)>,
}

impl Sent {
    /// Asserts that the program passes the packet on as `expected`: at ingress to the stack, at egress to the device.
    #[track_caller]
    pub(crate) fn passes(self, outcome: Outcome, expected: &Packet) {
        self.check(-1, outcome);
        self.compare(expected);
    }

    /// Asserts that the program passes the packet on untouched.
    #[track_caller]
    pub(crate) fn passes_untouched(self, outcome: Outcome) {
        self.check(-1, outcome);
        self.compare_bytes(&self.input);
    }

    /// Asserts that the program passes the packet on untouched, with any outcome.
    #[track_caller]
    pub(crate) fn passes_unchanged(self) {
        assert_eq!(action_name(self.action), action_name(-1), "{}: {:?}", self.case, self.moved);
        self.compare_bytes(&self.input);
    }

    /// Asserts that the program redirects the packet, as `expected`. A test run does not tell to which device.
    #[track_caller]
    pub(crate) fn redirects(self, outcome: Outcome, expected: &Packet) {
        self.check(7, outcome);
        self.compare(expected);
    }

    /// Like [`Self::redirects`], but does not compare the packet.
    #[track_caller]
    pub(crate) fn redirects_any(self, outcome: Outcome) {
        self.check(7, outcome);
    }

    /// Like [`Self::passes`], but does not compare the packet.
    #[track_caller]
    pub(crate) fn passes_any(self, outcome: Outcome) {
        self.check(-1, outcome);
    }

    /// Asserts that the program drops the packet.
    #[track_caller]
    pub(crate) fn drops(self, outcome: Outcome) {
        self.check(2, outcome);
    }

    #[track_caller]
    fn check(&self, action: i32, outcome: Outcome) {
        let (found, wanted) = (action_name(self.action), action_name(action));
        let moved = &self.moved;
        assert_eq!(found, wanted, "{}: return code; counted: {moved:?}", self.case);
        assert_eq!(*moved, [(outcome, 1)], "{}: counters that changed", self.case);
    }

    #[track_caller]
    fn compare(&self, expected: &Packet) {
        let expected = if self.device == Device::Bare { expected.clone().bare() } else { expected.clone() };
        self.compare_bytes(&expected.bytes());
    }

    #[track_caller]
    fn compare_bytes(&self, expected: &[u8]) {
        let ethernet = self.device != Device::Bare;
        assert_same_packet(&self.case, ethernet, &self.input, &self.output, expected);
    }
}
