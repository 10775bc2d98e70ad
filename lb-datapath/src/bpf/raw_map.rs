//! A map as the kernel has it: its elements are octets, read and written one or many for each system call.
//!
//! [`crate::bpf::table::Table`] gives them their types; the maps of a layout that this version does not know stay as they are.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use bytemuck::Zeroable as _;

use crate::{
    bpf::{
        layout::Shape,
        sys::{self, Batch, Command, Element},
    },
    error::DatapathError,
};

/// `BPF_ANY`: create or replace.
pub(crate) const ANY: u64 = 0;
/// `BPF_NOEXIST`: create only.
pub(crate) const NO_EXIST: u64 = 1;
/// The kernel's own ENOTSUPP, which no libc knows.
const ENOTSUPP: i32 = 524;
/// Elements for each batch call: large enough that the system call costs nothing beside them.
pub(crate) const CHUNK: usize = 4096;
/// How often, and how long apart, a call is repeated that failed for want of something that comes back: the
/// allocator of maps without preallocation is refilled in the background.
const RETRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(1);

/// Where a batch begins, or ended. The kernel uses four octets for our map types: the bucket of a hash map, the index in
/// an array.
#[derive(Clone, Copy)]
pub(crate) struct Cursor([u8; 64]);

impl Cursor {
    /// For the batch that begins after `index` of an array.
    pub(crate) fn after(index: u32) -> Self {
        let mut cursor = [0; 64];
        cursor[..4].copy_from_slice(&index.to_ne_bytes());
        Self(cursor)
    }
}

/// How a write of many elements ended early.
pub(crate) enum Trouble {
    /// The kernel has no batches for this map.
    Unsupported,
    /// At the element with this place, for a reason that doing it alone will tell.
    At(usize),
}

/// Called with a key and its value.
type See<'a> = dyn FnMut(&[u8], &[u8]) -> Result<(), DatapathError> + 'a;

/// An open map.
#[derive(Debug)]
pub(crate) struct RawMap {
    /// For errors.
    name: &'static str,
    fd: OwnedFd,
    /// As the kernel says.
    pub(crate) shape: Shape,
    batches: AtomicBool,
}

impl RawMap {
    /// `shape` is what the kernel says of `fd`.
    pub(crate) const fn new(name: &'static str, fd: OwnedFd, shape: Shape) -> Self {
        Self { name, fd, shape, batches: AtomicBool::new(true) }
    }

    /// What is pinned at `path`, if anything is.
    pub(crate) fn open(name: &'static str, path: &Path) -> Result<Option<Self>, DatapathError> {
        let Some(shape) = Shape::of_pin(path)? else { return Ok(None) };
        let fd =
            sys::open_pin(path).map_err(|error| DatapathError::file("open the pinned map", path, error))?;
        Ok(Some(Self::new(name, fd, shape)))
    }

    /// Pins it at another place, too.
    pub(crate) fn pin(&self, path: &Path) -> Result<(), DatapathError> {
        sys::pin(self.fd(), path).map_err(|error| DatapathError::file("pin the map at", path, error))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn error(&self, action: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { action, map: self.name, source }
    }

    /// See [`crate::bpf::table::Table::use_batches`].
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

    /// No pointer goes to the kernel with less behind it than it reads or writes: `yes` says that keys and values are as large as
    /// the map's.
    fn fits(&self, yes: bool) -> io::Result<()> {
        if yes && self.shape.has_single_values() {
            return Ok(());
        }
        Err(io::Error::other(format!("it is a {}, read and written as something else", self.shape)))
    }

    /// Reads the value of `key`; whether there is one.
    pub(crate) fn get(&self, key: &[u8], value: &mut [u8]) -> Result<bool, DatapathError> {
        self.read(Command::MapLookup, Some(key), value).map_err(|error| self.error("read from", error))
    }

    /// Reads what follows `key`, or the first key; whether there is one.
    fn next_key(&self, key: Option<&[u8]>, next: &mut [u8]) -> Result<bool, DatapathError> {
        self.read(Command::MapNextKey, key, next).map_err(|error| self.error("walk through", error))
    }

    /// A command that reads a value, or a key.
    fn read(&self, command: Command, key: Option<&[u8]>, out: &mut [u8]) -> io::Result<bool> {
        let size = if command == Command::MapNextKey { self.key_size() } else { self.value_size() };
        self.fits(out.len() == size && key.is_none_or(|key| key.len() == self.key_size()))?;
        let mut attr = Element {
            map: sys::raw(self.fd()),
            key: key.map_or(0, |key| sys::pointer(key.as_ptr())),
            value: sys::pointer(out.as_mut_ptr()),
            ..Element::zeroed()
        };
        // SAFETY: `key` and `out` have the sizes that the kernel says the map has.
        found(unsafe { sys::bpf(command, &mut attr) })
    }

    /// Writes one element; `flags` are [`ANY`] or [`NO_EXIST`].
    pub(crate) fn update(&self, key: &[u8], value: &[u8], flags: u64) -> io::Result<()> {
        self.fits(key.len() == self.key_size() && value.len() == self.value_size())?;
        patiently(|| {
            let mut attr = Element {
                map: sys::raw(self.fd()),
                key: sys::pointer(key.as_ptr()),
                value: sys::pointer(value.as_ptr()),
                flags,
                ..Element::zeroed()
            };
            // SAFETY: `key` and `value` have the sizes that the kernel says the map has.
            unsafe { sys::bpf(Command::MapUpdate, &mut attr) }.map(drop)
        })
    }

    /// Removes one element; whether it was there.
    pub(crate) fn delete(&self, key: &[u8]) -> io::Result<bool> {
        self.fits(key.len() == self.key_size())?;
        found(patiently(|| {
            let mut attr =
                Element { map: sys::raw(self.fd()), key: sys::pointer(key.as_ptr()), ..Element::zeroed() };
            // SAFETY: `key` has the size that the kernel says the map's keys have.
            unsafe { sys::bpf(Command::MapDelete, &mut attr) }
        }))
    }

    /// Updates or, where there are no `values`, deletes many elements at once.
    pub(crate) fn write_batch(&self, keys: &[u8], values: Option<&[u8]>) -> Result<(), Trouble> {
        let count = keys.len().checked_div(self.key_size()).unwrap_or(0);
        let fits = self.fits(values.is_none_or(|values| values.len() == count * self.value_size()));
        let Some(wanted) = u32::try_from(count).ok().filter(|_| fits.is_ok()) else {
            return Err(Trouble::At(0));
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
            Err(error) if is_unsupported(&error) => Err(Trouble::Unsupported),
            // A kernel that fails before the first element leaves `count` as it was.
            Err(_) => Err(Trouble::At(if attr.count < wanted { attr.count as usize } else { 0 })),
        }
    }

    /// Reads as many elements as both buffers have room for; how many it read, also on failure.
    pub(crate) fn read_batch(
        &self,
        from: Option<&Cursor>,
        to: &mut Cursor,
        keys: &mut [u8],
        values: &mut [u8],
    ) -> Result<usize, (usize, io::Error)> {
        self.fits(true).map_err(|error| (0, error))?;
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
        // SAFETY: there is room for `count` keys and values of the map's sizes, and for more than a cursor.
        let result = unsafe { sys::bpf(Command::MapLookupBatch, &mut attr) };
        let count = room.min(attr.count as usize);
        result.map(|_| count).map_err(|error| (count, error))
    }

    /// Every element, each at least once if it is there from beginning to end; `see` may change the map.
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
                // A bucket of the hash map holds more than the buffer.
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

    /// The slow way of [`Self::for_each`]: the keys first, because a walk starts again when its key vanishes.
    fn for_each_key(&self, see: &mut See<'_>) -> Result<(), DatapathError> {
        let (mut keys, mut key) = (Vec::<Vec<u8>>::new(), vec![0; self.key_size()]);
        while self.next_key(keys.last().map(Vec::as_slice), &mut key)? {
            keys.push(key.clone());
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

pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | ENOTSUPP | libc::EOPNOTSUPP))
}

/// Repeats what fails for want of something that comes back.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
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
