//! Loads programs into the kernel. A starting agent mostly waits for the verifier, so all CPUs verify at once.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    iter,
    os::fd::{AsFd as _, OwnedFd},
    panic,
    sync::{Mutex, PoisonError},
    thread,
};

use aya::{
    Ebpf,
    programs::{Program, ProgramError, SchedClassifier},
};
use nix::sys::signal::{SigSet, SigmaskHow};

use crate::error::DatapathError;

/// Names of the programs that the verifier takes longest for, slowest first. They are loaded in this order, before
/// others.
pub const SLOWEST_TO_VERIFY: [&str; 10] = [
    "xdp_native",
    "xdp_generic",
    "tc_ingress",
    "tc_ingress_l3",
    "tc_egress",
    "tc_egress_l3",
    "tc_catch",
    "sock_sendmsg4",
    "sock_connect6",
    "sock_sendmsg6",
];

/// Number of last lines of the verifier's log that an error shows: they contain the reason.
const LOG_LINES: usize = 15;

/// Maximum number of attempts to load a program, if attempts are interrupted. libbpf makes as many.
const LOAD_ATTEMPTS: usize = 5;

/// For each program: its descriptor, or the verifier's error.
pub(crate) type Verified = BTreeMap<&'static str, Result<OwnedFd, DatapathError>>;

/// Loads programs, as many at a time as there are CPUs. The slowest come first: a slow one at the end would leave all
/// other CPUs idle.
pub(crate) fn verify(ebpf: &mut Ebpf, names: impl Iterator<Item = &'static str>) -> Verified {
    let mut programs: BTreeMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let mut waiting: Vec<_> = names.map(|name| (name, programs.remove(name))).collect();
    waiting.sort_by_key(|(name, _)| rank(name));
    let threads = thread::available_parallelism().map_or(1, usize::from).min(waiting.len());
    let waiting = Mutex::new(waiting.into_iter());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || iter::from_fn(next).map(|(name, program)| (name, verify_one(name, program))).collect();
    thread::scope(|scope| {
        // This thread also loads programs, so loading works even if no other thread can be started.
        let others: Vec<_> =
            (1..threads).filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mut verified: Verified = work();
        for thread in others {
            verified.append(&mut thread.join().unwrap_or_else(|bug| panic::resume_unwind(bug)));
        }
        verified
    })
}

/// Position of a program in the order of loading.
fn rank(name: &str) -> usize {
    SLOWEST_TO_VERIFY.iter().position(|slow| *slow == name).unwrap_or(SLOWEST_TO_VERIFY.len())
}

fn verify_one(name: &'static str, program: Option<&mut Program>) -> Result<OwnedFd, DatapathError> {
    let failed = |error: ProgramError| DatapathError::Program { program: name, reason: explain(&error) };
    let program = program.ok_or_else(|| DatapathError::Object(format!("program {name} is missing")))?;
    // A program has a descriptor already if an earlier call has loaded it and could not pin it.
    if program.fd().is_err() {
        load_program(program).map_err(failed)?;
    }
    let fd = program.fd().map_err(failed)?.as_fd().try_clone_to_owned();
    fd.map_err(|error| DatapathError::Program { program: name, reason: error.to_string() })
}

/// Loads a program of [`OBJECT`](crate::OBJECT) into the kernel. The verifier gives up with `EAGAIN` when its thread
/// has a signal to handle or is to be frozen (`do_check` in kernel/bpf/verifier.c). So this function blocks signals
/// during the load, and tries again after `EAGAIN`.
///
/// # Errors
/// The kernel refuses the program, or five attempts were interrupted.
pub fn load_program(program: &mut Program) -> Result<(), ProgramError> {
    // If the mask cannot be set (the kernel refuses only invalid arguments), a signal only costs an attempt.
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).ok();
    let loaded = attempt_often(program);
    if let Some(mask) = mask {
        _ = mask.thread_set_mask();
    }
    loaded
}

fn attempt_often(program: &mut Program) -> Result<(), ProgramError> {
    for _ in 1..LOAD_ATTEMPTS {
        match attempt_to_load(program) {
            Err(ProgramError::LoadError { io_error, .. }) if io_error.kind() == ErrorKind::WouldBlock => {}
            done => return done,
        }
    }
    attempt_to_load(program)
}

fn attempt_to_load(program: &mut Program) -> Result<(), ProgramError> {
    if let Program::CgroupSockAddr(hook) = program {
        return hook.load();
    }
    if let Program::CgroupSock(hook) = program {
        return hook.load();
    }
    if let Program::Xdp(xdp) = program {
        return xdp.load();
    }
    <&mut SchedClassifier>::try_from(program)?.load()
}

/// The text of an error, with the end of the verifier's log if the verifier has refused the program.
fn explain(error: &ProgramError) -> String {
    let ProgramError::LoadError { io_error, verifier_log } = error else { return error.to_string() };
    let log = verifier_log.to_string();
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = &lines[lines.len().saturating_sub(LOG_LINES)..];
    if tail.is_empty() { io_error.to_string() } else { format!("{io_error}\n  {}\n", tail.join("\n  ")) }
}
