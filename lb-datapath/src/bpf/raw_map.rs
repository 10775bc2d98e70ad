//! A map of untyped elements: byte strings, read and written one or many per system call.
//!
//! [`crate::bpf::table::Table`] adds the types. Maps of other layout versions are read untyped: see
//! `state/handover.rs`.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use aya::maps::MapType;
use bytemuck::Zeroable as _;

use crate::{
    bpf::{
        layout::Shape,
        mapped::Mapped,
        sys::{self, Batch, Command, Element, is_unsupported},
    },
    error::DatapathError,
};

/// `BPF_ANY`: an update creates or replaces the element.
pub(crate) const ANY: u64 = 0;
/// `BPF_NOEXIST`: an update only creates the element.
pub(crate) const NO_EXIST: u64 = 1;
/// `BPF_EXIST`: an update only replaces the element.
pub(crate) const EXIST: u64 = 2;
/// Maximum number of elements in a batch: enough to make the cost of the system call negligible.
pub(crate) const CHUNK: usize = 4096;
/// Number of repetitions of a call that fails because the kernel is busy or out of memory, and the pause before each.
/// (The kernel refills the allocator of maps without preallocation in the background.)
const RETRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(1);

/// Where a batch begins, or where it has ended. For a hash map or an array, the kernel uses the first four bytes: the
/// number of a bucket, or an index. For an LPM trie, it stores the last key.
#[derive(Clone, Copy)]
pub(crate) struct Cursor([u8; 64]);

impl Cursor {
    /// The cursor for a batch that begins after this index of an array.
    pub(crate) fn after(index: u32) -> Self {
        let mut cursor = [0; 64];
        cursor[..4].copy_from_slice(&index.to_ne_bytes());
        Self(cursor)
    }
}

/// Why a batch ended before its last element.
pub(crate) enum BatchError {
    /// The kernel has no batch commands for this type of map.
    Unsupported,
    /// The batch failed at this index; the elements before it were processed. The caller then processes the element
    /// at this index alone, which either fails with the error or succeeds.
    At(usize),
}

/// A function that is called with the bytes of a key and of its value.
type See<'a> = dyn FnMut(&[u8], &[u8]) -> Result<(), DatapathError> + 'a;

#[derive(Debug)]
pub(crate) struct RawMap {
    /// The map's name in error messages.
    name: &'static str,
    fd: OwnedFd,
    /// Type and sizes of the map as the kernel reports them.
    pub(crate) shape: Shape,
    batches: AtomicBool,
}

impl RawMap {
    /// Wraps a map. `shape` must be what the kernel reports for `fd`: buffers are checked against it.
    pub(crate) const fn new(name: &'static str, fd: OwnedFd, shape: Shape) -> Self {
        Self { name, fd, shape, batches: AtomicBool::new(true) }
    }

    /// Opens the map that is pinned at `path`; `None` if nothing is pinned there.
    pub(crate) fn open(name: &'static str, path: &Path) -> Result<Option<Self>, DatapathError> {
        let Some(shape) = Shape::of_pin(path)? else { return Ok(None) };
        let fd =
            sys::open_pin(path).map_err(|error| DatapathError::file("open the pinned map", path, error))?;
        Ok(Some(Self::new(name, fd, shape)))
    }

    /// Pins the map at `path`, in addition to other pins.
    pub(crate) fn pin(&self, path: &Path) -> Result<(), DatapathError> {
        sys::pin(self.fd(), path).map_err(|error| DatapathError::file("pin the map at", path, error))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Maps all elements of an array into memory. The size of its values must be a multiple of eight bytes: the kernel
    /// then leaves no gaps between them.
    pub(crate) fn mapped(&self) -> Result<Mapped<AtomicU64>, DatapathError> {
        let is_dense = self.shape.kind == MapType::Array && self.value_size().is_multiple_of(8);
        self.check_sizes(is_dense)
            .and_then(|()| Mapped::new(self.fd(), self.shape.max_entries as usize * self.value_size() / 8))
            .map_err(|error| self.error("map", error))
    }

    pub(crate) fn error(&self, action: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { action, map: self.name, source }
    }

    /// Sets whether batch commands are used, see [`crate::bpf::table::Table::use_batches`].
    pub(crate) fn use_batches(&self, yes: bool) {
        self.batches.store(yes, Ordering::Relaxed);
    }

    pub(crate) fn has_batches(&self) -> bool {
        self.batches.load(Ordering::Relaxed)
    }

    const fn key_size(&self) -> usize {
        self.shape.key_size as usize
    }

    const fn value_size(&self) -> usize {
        self.shape.value_size as usize
    }

    /// Returns an error unless `sizes_match`, so that the kernel never reads or writes beyond a buffer. Also returns an
    /// error for map types whose values are larger than reported (one value per CPU).
    fn check_sizes(&self, sizes_match: bool) -> io::Result<()> {
        if sizes_match && self.shape.has_single_values() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "it is a {}, and is used as another type of map; this is a bug",
            self.shape
        )))
    }

    /// Reads the value of `key` into `value`. Returns whether the key exists.
    pub(crate) fn get(&self, key: &[u8], value: &mut [u8]) -> Result<bool, DatapathError> {
        self.read(Command::MapLookup, Some(key), value).map_err(|error| self.error("read from", error))
    }

    /// Reads the key after `key`, or the first key, into `next`. Returns whether there is one.
    fn next_key(&self, key: Option<&[u8]>, next: &mut [u8]) -> Result<bool, DatapathError> {
        self.read(Command::MapNextKey, key, next).map_err(|error| self.error("list the keys of", error))
    }

    /// Runs a command that reads a value or a key into `out`. Returns whether the element exists.
    fn read(&self, command: Command, key: Option<&[u8]>, out: &mut [u8]) -> io::Result<bool> {
        let size = if command == Command::MapNextKey { self.key_size() } else { self.value_size() };
        self.check_sizes(out.len() == size && key.is_none_or(|key| key.len() == self.key_size()))?;
        let mut attr = Element {
            map: sys::raw(self.fd()),
            key: key.map_or(0, |key| sys::pointer(key.as_ptr())),
            value: sys::pointer(out.as_mut_ptr()),
            ..Element::zeroed()
        };
        // SAFETY: `key` and `out` have the sizes that the kernel reports for the map.
        found(unsafe { sys::bpf(command, &mut attr) })
    }

    /// Writes one element; `flags` are [`ANY`], [`NO_EXIST`] or [`EXIST`].
    pub(crate) fn update(&self, key: &[u8], value: &[u8], flags: u64) -> io::Result<()> {
        self.check_sizes(key.len() == self.key_size() && value.len() == self.value_size())?;
        retry_while_busy(|| {
            let mut attr = Element {
                map: sys::raw(self.fd()),
                key: sys::pointer(key.as_ptr()),
                value: sys::pointer(value.as_ptr()),
                flags,
                ..Element::zeroed()
            };
            // SAFETY: `key` and `value` have the sizes that the kernel reports for the map.
            unsafe { sys::bpf(Command::MapUpdate, &mut attr) }.map(drop)
        })
    }

    /// Deletes one element. Returns whether the key existed.
    pub(crate) fn delete(&self, key: &[u8]) -> io::Result<bool> {
        self.check_sizes(key.len() == self.key_size())?;
        found(retry_while_busy(|| {
            let mut attr =
                Element { map: sys::raw(self.fd()), key: sys::pointer(key.as_ptr()), ..Element::zeroed() };
            // SAFETY: `key` has the size that the kernel reports for keys of the map.
            unsafe { sys::bpf(Command::MapDelete, &mut attr) }
        }))
    }

    /// Deletes an element of a hash map and reads its value in one step (Linux 5.14). Returns whether the key existed.
    pub(crate) fn take(&self, key: &[u8], value: &mut [u8]) -> Result<bool, DatapathError> {
        let taken = retry_while_busy(|| self.read(Command::MapLookupAndDelete, Some(key), value));
        taken.map_err(|error| self.error("delete from", error))
    }

    /// Updates many elements with one system call; without `values`, deletes them.
    pub(crate) fn write_batch(&self, keys: &[u8], values: Option<&[u8]>) -> Result<(), BatchError> {
        let count = keys.len().checked_div(self.key_size()).unwrap_or(0);
        let checked = self.check_sizes(values.is_none_or(|values| values.len() == count * self.value_size()));
        let Some(wanted) = u32::try_from(count).ok().filter(|_| checked.is_ok()) else {
            return Err(BatchError::At(0));
        };
        let command = if values.is_some() { Command::MapUpdateBatch } else { Command::MapDeleteBatch };
        let mut attr = Batch {
            keys: sys::pointer(keys.as_ptr()),
            values: values.map_or(0, |values| sys::pointer(values.as_ptr())),
            count: wanted,
            map: sys::raw(self.fd()),
            ..Batch::zeroed()
        };
        // SAFETY: there are `count` keys and, where the command reads them, as many values, of the map's sizes.
        match unsafe { sys::bpf(command, &mut attr) } {
            Ok(_) => Ok(()),
            Err(error) if is_unsupported(&error) => Err(BatchError::Unsupported),
            // If a kernel fails before the first element, it leaves `count` unchanged.
            Err(_) => Err(BatchError::At(if attr.count < wanted { attr.count as usize } else { 0 })),
        }
    }

    /// Reads as many elements as fit into both buffers. Returns how many were read, also on failure.
    pub(crate) fn read_batch(
        &self,
        from: Option<&Cursor>,
        to: &mut Cursor,
        keys: &mut [u8],
        values: &mut [u8],
    ) -> Result<usize, (usize, io::Error)> {
        self.check_sizes(true).map_err(|error| (0, error))?;
        let room = (keys.len() / self.key_size()).min(values.len() / self.value_size());
        let mut attr = Batch {
            in_cursor: from.map_or(0, |cursor| sys::pointer(cursor.0.as_ptr())),
            out_cursor: sys::pointer(to.0.as_mut_ptr()),
            keys: sys::pointer(keys.as_mut_ptr()),
            values: sys::pointer(values.as_mut_ptr()),
            count: u32::try_from(room).map_err(|error| (0, io::Error::other(error)))?,
            map: sys::raw(self.fd()),
            ..Batch::zeroed()
        };
        // SAFETY: both buffers hold `count` elements of the map's sizes, and `to` is larger than a cursor.
        let result = unsafe { sys::bpf(Command::MapLookupBatch, &mut attr) };
        let count = room.min(attr.count as usize);
        result.map(|_| count).map_err(|error| (count, error))
    }

    /// Calls `see`, which may change the map, for the elements of the map. With batch commands, `see` gets every
    /// element that is in the map during the whole walk, some of them more than once. Without batch commands, `see` may
    /// miss elements if other elements are deleted while the walk lists the keys.
    pub(crate) fn for_each(&self, see: &mut See<'_>) -> Result<(), DatapathError> {
        if !self.has_batches() {
            return self.for_each_key(see);
        }
        let (mut keys, mut values) = (vec![0; CHUNK * self.key_size()], vec![0; CHUNK * self.value_size()]);
        let (mut from, mut to) = (None, Cursor::after(0));
        loop {
            let (count, more) = match self.read_batch(from.as_ref(), &mut to, &mut keys, &mut values) {
                Ok(count) => (count, true),
                Err((count, error)) if error.kind() == io::ErrorKind::NotFound => (count, false),
                // A bucket of the hash map has more elements than the buffer has room for.
                Err((_, error)) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    keys.resize(keys.len() * 2, 0);
                    values.resize(values.len() * 2, 0);
                    continue;
                }
                Err((_, error)) if is_unsupported(&error) && from.is_none() => {
                    self.use_batches(false);
                    return self.for_each_key(see);
                }
                Err((_, error)) => return Err(self.error("read from", error)),
            };
            let elements = keys.chunks_exact(self.key_size()).zip(values.chunks_exact(self.value_size()));
            elements.take(count).try_for_each(|(key, value)| see(key, value))?;
            if !more {
                return Ok(());
            }
            from = Some(to);
        }
    }

    /// Like [`Self::for_each`], without batch commands. Lists all keys first, because the kernel restarts a walk at
    /// the first key if the key that the walk has reached was deleted. A walk that restarts often may miss keys.
    fn for_each_key(&self, see: &mut See<'_>) -> Result<(), DatapathError> {
        let (mut keys, mut key) = (Vec::<Vec<u8>>::new(), vec![0; self.key_size()]);
        while self.next_key(keys.last().map(Vec::as_slice), &mut key)? {
            keys.push(key.clone());
            // A walk that restarts returns keys again; this limit ends one that would restart forever.
            if keys.len() > self.shape.max_entries as usize {
                break;
            }
        }
        let mut value = vec![0; self.value_size()];
        for key in keys {
            if self.get(&key, &mut value)? {
                see(&key, &value)?;
            }
        }
        Ok(())
    }
}

fn found(result: io::Result<i32>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Repeats `attempt` while it fails because the kernel is briefly busy or short of memory.
fn retry_while_busy<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 0..RETRIES {
        match attempt() {
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM | libc::EINTR)
                ) =>
            {
                thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
    attempt()
}
