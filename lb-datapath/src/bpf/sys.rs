//! `bpf(2)` commands that aya does not offer, or not in the form that we need: for example batches, links by interface
//! index, queries. Also the cookie of the network namespace.
//!
//! Each attribute is the prefix of `union bpf_attr` (include/uapi/linux/bpf.h) that the command reads; the kernel
//! accepts any size and treats missing bytes as zero. Pointers are `u64`, as in the UAPI.

use std::{
    ffi::CString,
    io,
    net::{Ipv4Addr, UdpSocket},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use bytemuck::{Pod, Zeroable};

/// Commands of `bpf(2)`, from `enum bpf_cmd`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    MapCreate = 0,
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    MapNextKey = 4,
    ProgramLoad = 5,
    ObjectPin = 6,
    ObjectGet = 7,
    ProgramTestRun = 10,
    ObjectInfo = 15,
    ProgramQuery = 16,
    MapLookupAndDelete = 21,
    MapLookupBatch = 24,
    MapUpdateBatch = 26,
    MapDeleteBatch = 27,
    LinkCreate = 28,
    LinkUpdate = 29,
    LinkDetach = 34,
}

/// Attribute of `bpf(2)` for commands on one element of a map.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Element {
    pub(crate) map: u32,
    pub(crate) zero: u32,
    pub(crate) key: u64,
    /// Address of the value; for a command that reads the next key, of the buffer for that key.
    pub(crate) value: u64,
    pub(crate) flags: u64,
}

/// Attribute of `bpf(2)` for commands on many elements of a map.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Batch {
    pub(crate) in_cursor: u64,
    pub(crate) out_cursor: u64,
    pub(crate) keys: u64,
    pub(crate) values: u64,
    /// In: number of elements. Out: number of elements that were processed, even if the command failed.
    pub(crate) count: u32,
    pub(crate) map: u32,
    pub(crate) element_flags: u64,
    pub(crate) flags: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
}

/// A BPF instruction, `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Instruction {
    code: u8,
    /// Destination register in the lower four bits, source register in the upper four bits.
    registers: u8,
    offset: i16,
    value: i32,
}

impl Instruction {
    /// `to = from`, for 64-bit registers.
    pub(crate) const fn copy(to: u8, from: u8) -> Self {
        Self { code: 0xbf, registers: to | from << 4, offset: 0, value: 0 }
    }

    /// `to = value`, for a 64-bit register.
    pub(crate) const fn set(to: u8, value: i32) -> Self {
        Self { code: 0xb7, registers: to, offset: 0, value }
    }

    /// `to += value`, for a 64-bit register.
    pub(crate) const fn add(to: u8, value: i32) -> Self {
        Self { code: 0x07, registers: to, offset: 0, value }
    }

    /// `to &= value`, for a 64-bit register.
    pub(crate) const fn and(to: u8, value: i32) -> Self {
        Self { code: 0x57, registers: to, offset: 0, value }
    }

    /// `to >>= bits`, for a 64-bit register: a logical shift, which fills with zeros.
    pub(crate) const fn shift_right(to: u8, bits: i32) -> Self {
        Self { code: 0x77, registers: to, offset: 0, value: bits }
    }

    /// `to = byte at base + offset`.
    pub(crate) const fn load_byte(to: u8, base: u8, offset: i16) -> Self {
        Self { code: 0x71, registers: to | base << 4, offset, value: 0 }
    }

    /// Stores `value` in `size` bytes (8, 4 or 1) at `base + offset`.
    pub(crate) const fn store(size: u8, base: u8, offset: i16, value: i32) -> Self {
        let width = match size {
            8 => 0x18,
            4 => 0x00,
            _ => 0x10,
        };
        Self { code: 0x62 | width, registers: base, offset, value }
    }

    /// Ends the program, which returns `r0`.
    pub(crate) const fn exit() -> Self {
        Self { code: 0x95, registers: 0, offset: 0, value: 0 }
    }

    /// `r0 = helper(r1, …, r5)`, for a BPF helper by its id.
    pub(crate) const fn call(helper: i32) -> Self {
        Self { code: 0x85, registers: 0, offset: 0, value: helper }
    }

    /// `r0 = function(r1, …, r5)`, for a function of the kernel by its id in the kernel's BTF.
    pub(crate) const fn call_kernel(function: i32) -> Self {
        const BPF_PSEUDO_KFUNC_CALL: u8 = 2;
        Self { code: 0x85, registers: BPF_PSEUDO_KFUNC_CALL << 4, offset: 0, value: function }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ProgramLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TestRun {
    program: u32,
    result: u32,
    data_size: u32,
    out_size: u32,
    data: u64,
    out: u64,
    repeat: u32,
    duration: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ObjectPath {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ObjectInfo {
    fd: u32,
    length: u32,
    info: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Query {
    ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    program_ids: u64,
    count: u32,
    zero: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LinkCreate {
    program: u32,
    /// Interface index, or the descriptor of a cgroup.
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    zero: u32,
    expected_revision: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LinkUpdate {
    link: u32,
    new_program: u32,
    flags: u32,
    old_program: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LinkDetach {
    link: u32,
}

/// The prefix of `struct bpf_link_info` that links of all kinds share, and the first 16 bytes of the part that depends
/// on the kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct LinkInfo {
    link_type: u32,
    pub(crate) id: u32,
    pub(crate) program_id: u32,
    zero: u32,
    target: [u32; 4],
}

impl LinkInfo {
    /// Interface index of the device of a tcx or XDP link; 0 if the device is gone.
    pub(crate) const fn ifindex(&self) -> u32 {
        self.target[0]
    }

    /// Inode number of the cgroup of a cgroup link; 0 if the cgroup is gone.
    pub(crate) fn cgroup(&self) -> u64 {
        let [inode, _] = bytemuck::cast::<[u32; 4], [u64; 2]>(self.target);
        inode
    }
}

/// One of the two tcx hooks of a device, with its value in `enum bpf_attach_type`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tcx {
    Ingress = 46,
    Egress = 47,
}

/// Where a program goes among those of a hook: `BPF_F_BEFORE` or `BPF_F_AFTER`, without a reference program.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    First = 1 << 3,
    Last = 1 << 4,
}

/// A program on a tcx hook; `link_id` is 0 if it was attached without a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcxProgram {
    pub(crate) program_id: u32,
    pub(crate) link_id: u32,
}

/// Runs one command.
///
/// # Safety
///
/// `attr` is the attribute of `command`: every pointer in it is valid for as many bytes as the kernel reads or writes,
/// until this returns.
pub(crate) unsafe fn bpf<A: Pod>(command: Command, attr: &mut A) -> io::Result<i32> {
    // SAFETY: `attr` is valid for reads and writes of its size; the caller guarantees its pointers.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as libc::c_long, std::ptr::from_mut(attr), size_of::<A>())
    };
    match i32::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        Ok(_) | Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Runs a command that returns a new file descriptor.
///
/// # Safety
///
/// As [`bpf`], and `command` returns a file descriptor.
unsafe fn bpf_fd<A: Pod>(command: Command, attr: &mut A) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees what `bpf` requires.
    let fd = unsafe { bpf(command, attr) }?;
    // SAFETY: the kernel has just created this descriptor (close-on-exec); nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The kernel's internal error number ENOTSUPP, which libc does not define.
const ENOTSUPP: i32 = 524;

/// Whether the error means that the kernel lacks the command, or lacks it for this type of map.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | ENOTSUPP | libc::EOPNOTSUPP))
}

/// A file descriptor in the form that attributes of `bpf(2)` contain.
pub(crate) fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// An address in the form that attributes of `bpf(2)` contain.
pub(crate) fn pointer<T: ?Sized>(value: *const T) -> u64 {
    value.cast::<u8>().addr() as u64
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)
}

/// Pins a map, program or link at `path`, which must be on a BPF file system.
pub(crate) fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjectPath { path: pointer(path.as_ptr()), fd: raw(fd), flags: 0 };
    // SAFETY: `path` ends with a zero and outlives the call.
    unsafe { bpf(Command::ObjectPin, &mut attr) }.map(drop)
}

/// Opens the map, program or link that is pinned at `path`.
pub(crate) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjectPath { path: pointer(path.as_ptr()), fd: 0, flags: 0 };
    // SAFETY: `path` ends with a zero and outlives the call; BPF_OBJ_GET returns a descriptor.
    unsafe { bpf_fd(Command::ObjectGet, &mut attr) }
}

/// What the kernel reports about a link.
pub(crate) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    object_info(link)
}

/// The first `size_of::<T>()` bytes of what the kernel reports about a link or program.
fn object_info<T: Pod>(object: BorrowedFd<'_>) -> io::Result<T> {
    let mut info = T::zeroed();
    let length = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    let mut attr = ObjectInfo { fd: raw(object), length, info: pointer(std::ptr::from_mut(&mut info)) };
    // SAFETY: the kernel writes at most `length` bytes to `info`.
    unsafe { bpf(Command::ObjectInfo, &mut attr) }?;
    Ok(info)
}

/// The kernel's id of a program, from the first fields of `struct bpf_prog_info`.
pub(crate) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    let [_program_type, id]: [u32; 2] = object_info(program)?;
    Ok(id)
}

/// Attaches `program` to a tcx hook of a device in this network namespace: directly before the program of the link
/// `before`, or, if that is `None`, at `position`. The link exists while it has an open descriptor or a pin.
pub(crate) fn attach_tcx(
    program: BorrowedFd<'_>,
    ifindex: u32,
    hook: Tcx,
    position: Position,
    before: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    /// Flag: `relative` is the descriptor of a link.
    const BPF_F_LINK: u32 = 1 << 13;
    let mut attr = LinkCreate {
        program: raw(program),
        ifindex,
        attach_type: hook as u32,
        flags: before.map_or(position as u32, |_| Position::First as u32 | BPF_F_LINK),
        relative: before.map_or(0, raw),
        zero: 0,
        expected_revision: 0,
    };
    // SAFETY: the attribute holds no pointers; BPF_LINK_CREATE returns a descriptor.
    unsafe { bpf_fd(Command::LinkCreate, &mut attr) }
}

/// Attaches `program` to a cgroup, in addition to other programs there. The link exists while it has an open descriptor
/// or a pin.
pub(crate) fn attach_cgroup(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    let mut attr =
        LinkCreate { program: raw(program), ifindex: raw(cgroup), attach_type, ..LinkCreate::zeroed() };
    // SAFETY: the attribute holds no pointers; BPF_LINK_CREATE returns a descriptor.
    unsafe { bpf_fd(Command::LinkCreate, &mut attr) }
}

/// Attaches `program` to the XDP hook of a device; `flags` are `XDP_FLAGS_*`. The link exists while it has an open
/// descriptor or a pin.
pub(crate) fn attach_xdp(program: BorrowedFd<'_>, ifindex: u32, flags: u32) -> io::Result<OwnedFd> {
    /// The attach type of XDP links, from `enum bpf_attach_type`.
    const BPF_XDP: u32 = 37;
    let mut attr =
        LinkCreate { program: raw(program), ifindex, attach_type: BPF_XDP, flags, ..LinkCreate::zeroed() };
    // SAFETY: the attribute holds no pointers; BPF_LINK_CREATE returns a descriptor.
    unsafe { bpf_fd(Command::LinkCreate, &mut attr) }
}

/// The cookie by which programs identify this thread's network namespace (kernel 5.14 and newer).
pub(crate) fn netns_cookie() -> io::Result<u64> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let (mut cookie, mut length): (u64, libc::socklen_t) = (0, 8);
    // SAFETY: the kernel writes at most `length` bytes to `cookie`, which has that size, and the length to `length`.
    let result = unsafe {
        let value = (&raw mut cookie).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &raw mut length)
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// The socket option `SO_NETNS_COOKIE` of include/uapi/asm-generic/socket.h.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Replaces the program of a link atomically: each packet is processed by either the old or the new program.
pub(crate) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkUpdate { link: raw(link), new_program: raw(program), flags: 0, old_program: 0 };
    // SAFETY: the attribute holds no pointers.
    unsafe { bpf(Command::LinkUpdate, &mut attr) }.map(drop)
}

/// Detaches the program of a link at once. (If only the last pin is removed, the kernel detaches it a little later.)
pub(crate) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkDetach { link: raw(link) };
    // SAFETY: the attribute holds no pointers.
    unsafe { bpf(Command::LinkDetach, &mut attr) }.map(drop)
}

/// The programs on a tcx hook, in the order in which they run. The error is `EINVAL` if the kernel has no tcx (before
/// 6.6), `ENODEV` if there is no such device.
pub(crate) fn query_tcx(ifindex: u32, hook: Tcx) -> io::Result<Vec<TcxProgram>> {
    // 64 is the maximum number of programs on a hook (BPF_MPROG_MAX).
    let (mut programs, mut links) = ([0u32; 64], [0u32; 64]);
    let mut attr = Query {
        ifindex,
        attach_type: hook as u32,
        program_ids: pointer(programs.as_mut_ptr()),
        link_ids: pointer(links.as_mut_ptr()),
        count: 64,
        ..Query::zeroed()
    };
    // SAFETY: both arrays hold `count` numbers.
    unsafe { bpf(Command::ProgramQuery, &mut attr) }?;
    let found = programs.into_iter().zip(links).take(attr.count as usize);
    Ok(found.map(|(program_id, link_id)| TcxProgram { program_id, link_id }).collect())
}

/// Creates an array map with one element, which is `value`.
pub(crate) fn create_array(value: &[u8]) -> io::Result<OwnedFd> {
    const ARRAY: u32 = 2;
    let value_size = u32::try_from(value.len()).map_err(io::Error::other)?;
    let mut attr =
        MapCreate { map_type: ARRAY, key_size: 4, value_size, max_entries: 1, ..MapCreate::zeroed() };
    // SAFETY: the attribute holds no pointers; BPF_MAP_CREATE returns a descriptor.
    let map = unsafe { bpf_fd(Command::MapCreate, &mut attr) }?;
    let key = 0u32;
    let mut attr = Element {
        map: raw(map.as_fd()),
        key: pointer(&raw const key),
        value: pointer(value.as_ptr()),
        ..Element::zeroed()
    };
    // SAFETY: key and value have the sizes of the map's keys and values.
    unsafe { bpf(Command::MapUpdate, &mut attr) }?;
    Ok(map)
}

/// Whether the kernel has batch commands for hash maps (5.6 and newer).
pub(crate) fn has_batches() -> io::Result<bool> {
    const HASH: u32 = 1;
    let mut attr =
        MapCreate { map_type: HASH, key_size: 4, value_size: 4, max_entries: 1, ..MapCreate::zeroed() };
    // SAFETY: the attribute holds no pointers; BPF_MAP_CREATE returns a descriptor.
    let map = unsafe { bpf_fd(Command::MapCreate, &mut attr) }?;
    let (keys, values) = ([7u32], [7u32]);
    let (keys, values) = (pointer(keys.as_ptr()), pointer(values.as_ptr()));
    let mut attr = Batch { keys, values, count: 1, map: raw(map.as_fd()), ..Batch::zeroed() };
    // SAFETY: there is one key and one value, of four bytes each like those of the map.
    match unsafe { bpf(Command::MapUpdateBatch, &mut attr) } {
        Ok(_) => Ok(true),
        Err(error) if is_unsupported(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Loads a tc program, runs it once on a frame of 64 zero bytes, and unloads it. Returns what the program returned.
pub(crate) fn run_once(program: &[Instruction]) -> io::Result<u32> {
    const SCHED_CLS: u32 = 3;
    let count = u32::try_from(program.len()).map_err(io::Error::other)?;
    let license = c"GPL";
    let mut attr = ProgramLoad {
        kind: SCHED_CLS,
        count,
        instructions: pointer(program.as_ptr()),
        license: pointer(license.as_ptr()),
    };
    // SAFETY: there are `count` instructions, and the licence ends with a zero; BPF_PROG_LOAD returns a descriptor.
    let program = unsafe { bpf_fd(Command::ProgramLoad, &mut attr) }?;
    let frame = [0u8; 64];
    let mut attr = TestRun {
        program: raw(program.as_fd()),
        data_size: 64,
        data: pointer(frame.as_ptr()),
        repeat: 1,
        ..TestRun::zeroed()
    };
    // SAFETY: there are 64 bytes of data, and the kernel writes back to the attribute only.
    unsafe { bpf(Command::ProgramTestRun, &mut attr) }?;
    Ok(attr.result)
}

/// Waits until every BPF program that was running at the call has finished. The kernel does this after each update of a
/// map of maps (`maybe_wait_bpf_programs`, kernel/bpf/syscall.c).
pub(crate) fn wait_for_programs() -> io::Result<()> {
    const ARRAY: u32 = 2;
    const ARRAY_OF_MAPS: u32 = 12;
    let mut attr =
        MapCreate { map_type: ARRAY, key_size: 4, value_size: 4, max_entries: 1, ..MapCreate::zeroed() };
    // SAFETY: the attribute holds no pointers; BPF_MAP_CREATE returns a descriptor.
    let inner = unsafe { bpf_fd(Command::MapCreate, &mut attr) }?;
    attr = MapCreate { map_type: ARRAY_OF_MAPS, inner_map: raw(inner.as_fd()), ..attr };
    // SAFETY: the attribute holds no pointers; BPF_MAP_CREATE returns a descriptor.
    let outer = unsafe { bpf_fd(Command::MapCreate, &mut attr) }?;
    let (key, value) = (0u32, raw(inner.as_fd()));
    let mut attr = Element {
        map: raw(outer.as_fd()),
        key: pointer(&raw const key),
        value: pointer(&raw const value),
        ..Element::zeroed()
    };
    // SAFETY: key and value have four bytes each, like those of the map.
    unsafe { bpf(Command::MapUpdate, &mut attr) }.map(drop)
}
