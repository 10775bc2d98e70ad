//! The verifier gate: every program, in every way the agent loads it.

use aya::{EbpfLoader, programs::SchedClassifier};

use super::bench::PROGRAMS;

/// The kernel's limit (`BPF_COMPLEXITY_LIMIT_INSNS`).
const LIMIT: u32 = 1_000_000;

/// Maps of the default sizes; logging off (what is deployed) and at each level of aya-log.
#[test]
fn every_program_loads() {
    for level in 0u8..=5 {
        let mut loader = EbpfLoader::new();
        loader.override_global("AYA_LOG_LEVEL", &level, true);
        let mut ebpf = loader.load(lb_agent::datapath::OBJECT).expect("these tests need root");
        for name in PROGRAMS {
            let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap_or_else(|error| panic!("{name} at log level {level}: {error:?}"));
            let verified = program.info().unwrap().verified_instruction_count();
            println!("log level {level}: {name:14} {verified:?} of {LIMIT} instructions verified");
            assert!(verified.is_none_or(|count| count < LIMIT / 2), "{name} is about to hit the limit");
        }
        let found: Vec<&str> = ebpf.programs().map(|(name, _)| name).collect();
        assert_eq!(found.len(), PROGRAMS.len(), "a program that is not tested here: {found:?}");
    }
}
