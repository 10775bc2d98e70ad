//! Checks whether a BPF helper of this kernel accepts a flag: runs a program of a few instructions that calls the
//! helper once, on a frame of zeros.

use std::io;

use crate::bpf::sys::{self, Instruction};

/// Id of the helper `bpf_fib_lookup`.
const FIB_LOOKUP: i32 = 69;
/// Size of `struct bpf_fib_lookup` in bytes.
const ROUTE: i16 = 64;
/// The address family `AF_INET`.
const IPV4: i32 = 2;
/// What a helper returns for a flag that it does not support: `-EINVAL`.
const EINVAL: u32 = 22_u32.wrapping_neg();

/// The flag `BPF_FIB_LOOKUP_SKIP_NEIGH`.
pub(crate) const SKIP_NEIGHBOUR: i32 = 1 << 2;
/// The flag `BPF_FIB_LOOKUP_SRC`.
pub(crate) const SOURCE: i32 = 1 << 4;

/// A flag that no kernel supports, to check that the probe can fail.
const NO_FLAG: i32 = 1 << 30;

/// Whether `bpf_fib_lookup` accepts these flags.
///
/// # Errors
/// The program cannot be loaded or run, or the kernel accepts every flag, so that the probe shows nothing.
pub(crate) fn takes_route_flags(flags: i32) -> io::Result<bool> {
    let takes = |flags| sys::run_once(&route_lookup(flags)).map(|result| result != EINVAL);
    if takes(NO_FLAG)? {
        return Err(io::Error::other(
            "bpf_fib_lookup accepts flags that do not exist: its answer says nothing about this one",
        ));
    }
    takes(flags)
}

/// A program that calls `bpf_fib_lookup` for 0.0.0.0 on interface 1 and returns the helper's return value.
fn route_lookup(flags: i32) -> Vec<Instruction> {
    // `r6 = context`. The helper's parameters are on the stack: zeros except the family and, at byte 8, the interface
    // index.
    let mut program = vec![Instruction::copy(6, 1)];
    program.extend((1..=ROUTE / 8).map(|word| Instruction::store(8, 10, -8 * word, 0)));
    program.extend([
        Instruction::store(1, 10, -ROUTE, IPV4),
        Instruction::store(4, 10, 8 - ROUTE, 1),
        Instruction::copy(1, 6),
        Instruction::copy(2, 10),
        Instruction::add(2, i32::from(-ROUTE)),
        Instruction::set(3, i32::from(ROUTE)),
        Instruction::set(4, flags),
        Instruction::call(FIB_LOOKUP),
        Instruction::exit(),
    ]);
    program
}
