//! Deletes the flows of a loaded data plane without knowledge of their layout, so that two revisions with different
//! layouts can be compared. Flows are created by packets that run through the programs.
//!
//! State of flows is in the hash map [`HASH`] and in arrays that user space may map into memory (`BPF_F_MMAPABLE`).

use std::{
    ffi::c_void,
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
    ptr, slice,
};

use anyhow::{Context as _, ensure};
use aya::{
    Ebpf,
    maps::{Map, MapData, MapType},
};
use nix::libc;

/// Name of the hash map with flows.
const HASH: &str = "CONNTRACK";
const BPF_F_MMAPABLE: u32 = 1 << 10;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
/// Size in bytes of the blocks in which arrays are compared and restored.
const BLOCK: usize = 4096;

/// The contents of all arrays that can be mapped into memory, before the first flow.
pub(crate) struct Snapshot {
    arrays: Vec<(String, Vec<u8>)>,
}

impl Snapshot {
    pub(crate) fn take(ebpf: &Ebpf) -> anyhow::Result<Self> {
        let mut arrays = Vec::new();
        for (name, map) in ebpf.maps() {
            if let Some(memory) = Memory::of(name, map)? {
                arrays.push((name.to_owned(), memory.bytes().to_vec()));
            }
        }
        Ok(Self { arrays })
    }

    /// Deletes all flows that were created since the snapshot, by restoring what has changed.
    pub(crate) fn restore(&self, ebpf: &Ebpf) -> anyhow::Result<()> {
        if let Some(map) = ebpf.map(HASH) {
            delete_all(map)?;
        }
        for (name, before) in &self.arrays {
            let map = ebpf.map(name).with_context(|| format!("there is no map {name}"))?;
            let mut memory = Memory::of(name, map)?.with_context(|| format!("{name} cannot be mapped"))?;
            for (now, before) in memory.bytes_mut().chunks_mut(BLOCK).zip(before.chunks(BLOCK)) {
                if now != before {
                    now.copy_from_slice(before);
                }
            }
        }
        Ok(())
    }
}

/// Deletes all entries of a map, if it is a hash map.
pub(crate) fn delete_all(map: &Map) -> anyhow::Result<()> {
    let (Map::HashMap(data) | Map::LruHashMap(data)) = map else { return Ok(()) };
    let (fd, size) = (data.fd().as_fd(), usize::try_from(data.info()?.key_size())?);
    let mut keys: Vec<Vec<u8>> = Vec::new();
    while let Some(key) = next_key(fd, keys.last(), size)? {
        keys.push(key);
    }
    for key in keys {
        map_command(fd, BPF_MAP_DELETE_ELEM, Some(&key), None).context("deleting a flow")?;
    }
    Ok(())
}

/// The key after `key` in a map, or the first key; `None` at the end.
fn next_key(fd: BorrowedFd<'_>, key: Option<&Vec<u8>>, size: usize) -> anyhow::Result<Option<Vec<u8>>> {
    let mut next = vec![0; size];
    match map_command(fd, BPF_MAP_GET_NEXT_KEY, key, Some(&mut next)) {
        Ok(()) => Ok(Some(next)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error).context("listing the flows"),
    }
}

/// Attribute of `bpf(2)` for commands on one element of a map.
#[repr(C)]
struct Element {
    map_fd: u32,
    zero: u32,
    key: *const u8,
    next_key: *mut u8,
    flags: u64,
}

fn map_command(
    fd: BorrowedFd<'_>,
    command: libc::c_long,
    key: Option<&Vec<u8>>,
    next_key: Option<&mut Vec<u8>>,
) -> io::Result<()> {
    let element = Element {
        map_fd: fd.as_raw_fd().cast_unsigned(),
        zero: 0,
        key: key.map_or(ptr::null(), |key| key.as_ptr()),
        next_key: next_key.map_or(ptr::null_mut(), |key| key.as_mut_ptr()),
        flags: 0,
    };
    // SAFETY: the kernel reads and writes one key each. Both vectors have the size of the map's keys.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const element, size_of::<Element>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An array map, mapped into the memory of this process.
struct Memory {
    start: *mut c_void,
    length: usize,
}

impl Memory {
    /// Maps the elements of `map` into memory. Returns `None` for a map that is no array, that the kernel does not let
    /// user space map, or that holds global variables or constants of the object.
    fn of(name: &str, map: &Map) -> anyhow::Result<Option<Self>> {
        let Map::Array(data) = map else { return Ok(None) };
        let info = data.info()?;
        let is_array = info.map_type()? == MapType::Array;
        if !is_array || info.map_flags() & BPF_F_MMAPABLE == 0 || name.starts_with('.') {
            return Ok(None);
        }
        let length = usize::try_from(info.value_size().next_multiple_of(8))?
            .checked_mul(usize::try_from(info.max_entries())?)
            .context("a map larger than the address space")?;
        Self::map(data, length).with_context(|| format!("mapping {name} into memory")).map(Some)
    }

    fn map(data: &MapData, length: usize) -> anyhow::Result<Self> {
        let fd = data.fd().as_fd().as_raw_fd();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, so the mapping replaces no memory that is in use.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, fd, 0) };
        ensure!(start != libc::MAP_FAILED, io::Error::last_os_error());
        Ok(Self { start, length })
    }

    const fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has this length. No program runs, so nothing writes to it.
        unsafe { slice::from_raw_parts(self.start.cast(), self.length) }
    }

    const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length. `self` is borrowed mutably, no program runs, and nothing uses another
        // mapping of the array meanwhile.
        unsafe { slice::from_raw_parts_mut(self.start.cast(), self.length) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.start, self.length) };
    }
}
