//! Tests of loading programs.

use std::{io::ErrorKind, sync::mpsc, thread, time::Duration};

use aya::{
    Ebpf, EbpfLoader,
    programs::{Program, ProgramError, SchedClassifier},
};
use lb_datapath::load_program;
use nix::sys::{
    pthread::{pthread_kill, pthread_self},
    signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};

/// Pause between two signals: shorter than the verifier needs for the program.
const BETWEEN_SIGNALS: Duration = Duration::from_millis(5);

extern "C" fn ignore(_: i32) {}

/// The BPF object, opened with small maps.
fn object() -> Ebpf {
    let mut loader = EbpfLoader::new();
    loader.override_global("AYA_LOG_LEVEL", &0u8, true).override_global("FLOW_SLOTS", &256u32, true);
    for map in ["SERVICES", "BACKENDS", "FLOWS", "CONNTRACK", "AFFINITY", "FRAGMENTS", "TABLES"] {
        loader.map_max_entries(map, 256);
    }
    loader.load(lb_datapath::linked_object()).unwrap()
}

/// Loads a large program on a thread, which gets up to `signals` signals meanwhile.
fn load_interrupted(
    signals: usize,
    load: impl FnOnce(&mut Program) -> Result<(), ProgramError> + Send,
) -> Result<(), ProgramError> {
    let mut ebpf = object();
    let (begins, begun) = mpsc::channel();
    thread::scope(|scope| {
        let loading = scope.spawn(move || {
            begins.send(pthread_self()).unwrap();
            load(ebpf.program_mut("tc_ingress").unwrap())
        });
        let thread = begun.recv().unwrap();
        for _ in 0..signals {
            thread::sleep(BETWEEN_SIGNALS);
            if loading.is_finished() {
                break;
            }
            // As the thread is not joined yet, its handle is valid even if it has ended.
            pthread_kill(thread, Signal::SIGUSR2).unwrap();
        }
        loading.join().unwrap()
    })
}

#[test]
fn program_is_loaded_although_signals_interrupt_the_verifier() {
    let action = SigAction::new(SigHandler::Handler(ignore), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing, which is safe at any time.
    unsafe { sigaction(Signal::SIGUSR2, &action) }.unwrap();

    let plain = |program: &mut Program| <&mut SchedClassifier>::try_from(program)?.load();
    let error = load_interrupted(10_000, plain).expect_err("a load that is attempted once is interrupted");
    let ProgramError::LoadError { io_error, .. } = error else { panic!("{error}") };
    assert_eq!(io_error.kind(), ErrorKind::WouldBlock);

    load_interrupted(10_000, load_program).unwrap();
}
