//! `BPF_PROG_TEST_RUN` with flags and contexts of any program type, which aya does not support.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::programs::ProgramFd;
use nix::{
    libc,
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`: the kernel computes the checksum of the whole packet, as devices do.
pub(crate) const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// The `test` member of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct Attr {
    program: u32,
    return_value: u32,
    input_size: u32,
    output_size: u32,
    input: u64,
    output: u64,
    repeat: u32,
    duration: u32,
    context_in_size: u32,
    context_out_size: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    padding: u32,
}

/// Binds the thread, and so the programs that it runs, to CPU 0: they then use one element of each per-CPU map entry.
pub(crate) fn stay_on_one_cpu() {
    let mut cpus = CpuSet::new();
    cpus.set(0).unwrap();
    sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
}

/// Runs a packet through a program once; returns the return code and the length of the packet in `output`. An empty
/// `context` stands for zeros. `context_after`, which is empty or as large as the whole context, gets the context as
/// the program leaves it.
pub(crate) fn test_run(
    program: &ProgramFd,
    input: &[u8],
    output: &mut [u8],
    (context, context_after): (&[u32], &mut [u32]),
    flags: u32,
) -> io::Result<(u32, usize)> {
    const BPF_PROG_TEST_RUN: libc::c_int = 10;
    let size = |bytes: usize| u32::try_from(bytes).map_err(io::Error::other);
    let mut attr = Attr {
        program: u32::try_from(program.as_fd().as_raw_fd()).map_err(io::Error::other)?,
        input_size: size(input.len())?,
        output_size: size(output.len())?,
        input: input.as_ptr() as u64,
        output: output.as_mut_ptr() as u64,
        repeat: 1,
        context_in_size: size(size_of_val(context))?,
        context_in: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        context_out_size: size(size_of_val(context_after))?,
        context_out: if context_after.is_empty() { 0 } else { context_after.as_mut_ptr() as u64 },
        flags,
        ..Attr::default()
    };
    // SAFETY: `attr` has the kernel's layout and is passed with its size. All buffers have the lengths that `attr`
    // contains and outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw mut attr, size_of::<Attr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((attr.return_value, attr.output_size as usize))
}
