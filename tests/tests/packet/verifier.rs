//! The verifier gate: every program of the agent loads, and the number of its verified instructions is bounded.

use std::collections::BTreeMap;

use aya::{
    Ebpf, EbpfLoader,
    programs::{ProgramError, ProgramInfo},
};

use lb_datapath::{SLOWEST_TO_VERIFY, load_program};
use lb_tests::skip;

use super::testbed::{ANNOUNCE_PROGRAM, PROGRAMS, XDP_PROGRAMS};

/// The kernel's limit (`BPF_COMPLEXITY_LIMIT_INSNS`).
const LIMIT: u32 = 1_000_000;

const SOCKET_PROGRAMS: [&str; 9] = [
    "sock_connect4",
    "sock_connect6",
    "sock_sendmsg4",
    "sock_sendmsg6",
    "sock_recvmsg4",
    "sock_recvmsg6",
    "sock_peername4",
    "sock_peername6",
    "sock_release",
];

/// Loads the programs with maps of the default sizes: with logging off (as deployed) and at each level of aya-log. Then
/// loads them three more times with logging off, each time with another option: they serve the sockets of all
/// namespaces, let packets of more flows bypass the stack, or emit events for the flow log.
#[test]
fn every_program_loads() {
    let mut levels: Vec<u8> = (0..=5).collect();
    if lb_tests::patience() > 1 {
        // An emulated machine with an old kernel takes a minute for each configuration.
        skip::part("log levels 1 to 4, which differ in what is logged only");
        levels = vec![0, 5];
    }
    let levels = levels.into_iter().map(|level| (level, 0u8, 0u8, 0u8));
    for (level, serve_pods, direct, flow_log) in levels.chain([(0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]) {
        let mut loader = EbpfLoader::new();
        loader.override_global("AYA_LOG_LEVEL", &level, true);
        loader.override_global("NODE_NETNS", &1u64, true).override_global("SERVE_PODS", &serve_pods, true);
        loader.override_global("DIRECT", &direct, true).override_global("FLOW_LOG", &flow_log, true);
        let mut ebpf = loader.load(lb_datapath::linked_object()).expect("these tests need root");
        for name in PROGRAMS.into_iter().chain(XDP_PROGRAMS).chain(SOCKET_PROGRAMS).chain([ANNOUNCE_PROGRAM])
        {
            let info = load(&mut ebpf, name);
            let info = info.unwrap_or_else(|error| panic!("{name} at log level {level}: {error:?}"));
            let verified = info.verified_instruction_count();
            println!("log level {level}: {name:14} {verified:?} of {LIMIT} instructions verified");
            // Linux 6.1 verifies two to ten times as many instructions as newer kernels.
            assert!(verified.is_none_or(|count| count < LIMIT / 5 * 4), "{name} is close to the limit");
        }
        let found: Vec<&str> = ebpf.programs().map(|(name, _)| name).collect();
        assert_eq!(
            found.len(),
            PROGRAMS.len() + XDP_PROGRAMS.len() + SOCKET_PROGRAMS.len() + 1,
            "the object has a program that is not tested here: {found:?}"
        );
    }
}

/// Upper bounds of the verified instructions: the numbers on Linux 6.18 and some room. Every start of the agent waits
/// for the first eleven programs: about 2 µs for each instruction.
const BOUNDS: [(&str, u32); 17] = [
    ("tc_ingress", 200_000),
    ("tc_egress", 150_000),
    ("sock_connect4", 33_000),
    ("sock_connect6", 34_000),
    ("sock_sendmsg4", 70_000),
    ("sock_sendmsg6", 70_000),
    ("sock_recvmsg4", 200),
    ("sock_recvmsg6", 200),
    ("sock_peername4", 100),
    ("sock_peername6", 100),
    ("sock_release", 100),
    ("tc_ingress_l3", 180_000),
    ("tc_egress_l3", 130_000),
    ("tc_catch", 110_000),
    ("xdp_native", 240_000),
    ("xdp_generic", 240_000),
    ("tc_announce", 20_000),
];

/// The programs as the agent loads them without further options.
#[test]
fn start_verifies_no_more_instructions_than_planned() {
    if skip::is_older_than(6, 12) {
        return skip::whole("older kernels verify more instructions");
    }
    for ((name, bound), verified) in BOUNDS.into_iter().zip(verified_instructions()) {
        println!("{name:14} {verified:6} of {bound} instructions");
        assert!(verified <= bound, "the verifier processes {verified} instructions of {name}, not {bound}");
    }
}

#[test]
fn slowest_programs_are_loaded_first() {
    if skip::is_older_than(6, 12) {
        return skip::whole("older kernels verify more instructions");
    }
    let verified: BTreeMap<&str, u32> =
        BOUNDS.into_iter().map(|(name, _)| name).zip(verified_instructions()).collect();
    // Programs of nearly the same length may come in any order.
    for (earlier, later) in SLOWEST_TO_VERIFY.iter().zip(&SLOWEST_TO_VERIFY[1..]) {
        assert!(verified[earlier] > verified[later] / 4 * 3, "{later} takes longer than {earlier}");
    }
    let last = verified[SLOWEST_TO_VERIFY.last().unwrap()];
    for (name, verified) in verified {
        assert!(verified <= last / 3 * 4 || SLOWEST_TO_VERIFY.contains(&name), "{name} is loaded late");
    }
}

/// The verified instructions of each program in [`BOUNDS`].
fn verified_instructions() -> Vec<u32> {
    let mut loader = EbpfLoader::new();
    loader.override_global("AYA_LOG_LEVEL", &0u8, true).override_global("DECAPSULATE", &0u8, true);
    let mut ebpf = loader.load(lb_datapath::linked_object()).expect("these tests need root");
    let verified = |name| load(&mut ebpf, name).unwrap().verified_instruction_count().unwrap();
    BOUNDS.into_iter().map(|(name, _)| name).map(verified).collect()
}

fn load(ebpf: &mut Ebpf, name: &str) -> Result<ProgramInfo, ProgramError> {
    let program = ebpf.program_mut(name).unwrap();
    load_program(program)?;
    program.info()
}
