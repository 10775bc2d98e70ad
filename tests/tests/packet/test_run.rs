//! `BPF_PROG_TEST_RUN`, with what aya does not offer: flags, and contexts of any kind of program.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::programs::ProgramFd;
use nix::libc;

/// The kernel computes the checksum of the whole packet, as devices do.
pub(crate) const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// The part of `union bpf_attr` for this command.
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

/// Runs a packet through a program once: what it returns, and how many octets of `output` it has made. No `context` is one of zeros.
pub(crate) fn test_run(
    program: &ProgramFd,
    input: &[u8],
    output: &mut [u8],
    context: &[u32],
    flags: u32,
) -> io::Result<(u32, usize)> {
    const BPF_PROG_TEST_RUN: libc::c_int = 10;
    let size = |octets: usize| u32::try_from(octets).map_err(io::Error::other);
    let mut attr = Attr {
        program: u32::try_from(program.as_fd().as_raw_fd()).map_err(io::Error::other)?,
        input_size: size(input.len())?,
        output_size: size(output.len())?,
        input: input.as_ptr() as u64,
        output: output.as_mut_ptr() as u64,
        repeat: 1,
        context_in_size: size(size_of_val(context))?,
        context_in: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        flags,
        ..Attr::default()
    };
    // SAFETY: `attr` has the layout of the kernel and its size goes with it; all buffers are as long as it says and
    // outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw mut attr, size_of::<Attr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((attr.return_value, attr.output_size as usize))
}
