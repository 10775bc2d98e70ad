//! Typed access to a map, one element or many at a time.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use aya::maps::MapData;
use bytemuck::{Pod, Zeroable};

use super::{
    error::DatapathError,
    layout::{MapSpec, Shape},
    sys::{self, Batch, Command, Element},
};

/// `BPF_ANY`: create or replace.
const ANY: u64 = 0;
/// `BPF_NOEXIST`: create only.
const NO_EXIST: u64 = 1;
/// The kernel's own ENOTSUPP, which no libc knows.
const ENOTSUPP: i32 = 524;
/// Elements for each batch call: large enough that the system call costs nothing beside them.
const CHUNK: usize = 4096;
/// How often, and how long apart, a call is repeated that failed for want of something that comes back: the
/// allocator of maps without preallocation is refilled in the background.
const RETRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(1);

/// A map with keys `K` and values `V`, whose sizes are known to be the kernel's.
#[derive(Debug)]
pub struct Table<K, V> {
    name: &'static str,
    fd: Arc<OwnedFd>,
    capacity: u32,
    batches: Arc<AtomicBool>,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Clone for Table<K, V> {
    fn clone(&self) -> Self {
        Self {
            name: self.name,
            fd: Arc::clone(&self.fd),
            capacity: self.capacity,
            batches: Arc::clone(&self.batches),
            types: PhantomData,
        }
    }
}

/// How a batch ended early.
enum Trouble {
    /// The kernel has no batches for this map.
    Unsupported,
    /// At the element with this place, for a reason that doing it alone will tell.
    At(usize),
}

impl<K: Pod, V: Pod> Table<K, V> {
    /// Opens the map pinned at `path` after checking that it is a `spec`.
    pub(super) fn open(spec: &MapSpec, path: &Path) -> Result<Self, DatapathError> {
        let found = Shape::of_pin(path)?.ok_or_else(|| DatapathError::Absent(path.to_owned()))?;
        spec.check(path, &found)?;
        if spec.shape.key_size as usize != size_of::<K>() || spec.shape.value_size as usize != size_of::<V>()
        {
            return Err(DatapathError::Object(format!("map {} is used with other types", spec.name)));
        }
        let data = MapData::from_pin(path)
            .map_err(|error| DatapathError::file("open the pinned map", path, io::Error::other(error)))?;
        let fd = data.fd().as_fd().try_clone_to_owned();
        let fd = fd.map_err(|error| DatapathError::file("open the pinned map", path, error))?;
        Ok(Self {
            name: spec.name,
            fd: Arc::new(fd),
            capacity: found.max_entries,
            batches: Arc::new(AtomicBool::new(true)),
            types: PhantomData,
        })
    }

    /// How many elements it can hold.
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Whether to use the kernel's batch commands (5.6 and newer), on by default. Without them, and where the
    /// kernel has none, each element is a system call.
    pub fn use_batches(&self, yes: bool) {
        self.batches.store(yes, Ordering::Relaxed);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn error(&self, action: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { action, map: self.name, source }
    }

    fn element(&self, key: &K) -> Element {
        Element { map: sys::raw(self.fd()), key: sys::pointer(key), ..Element::zeroed() }
    }

    /// The value of `key`.
    pub fn get(&self, key: &K) -> Result<Option<V>, DatapathError> {
        let mut value = V::zeroed();
        let mut attr = Element { value: sys::pointer(&raw mut value), ..self.element(key) };
        // SAFETY: `key` and `value` have the sizes of the map, which `open` checked.
        match unsafe { sys::bpf(Command::MapLookup, &mut attr) } {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.error("read from", error)),
        }
    }

    /// Creates `key` unless it exists; whether it did not.
    pub fn insert_new(&self, key: &K, value: &V) -> Result<bool, DatapathError> {
        match self.update_one(key, value, NO_EXIST) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(self.error("write to", error)),
        }
    }

    /// Removes `key`; whether it was there.
    pub fn remove(&self, key: &K) -> Result<bool, DatapathError> {
        self.delete_one(key).map_err(|error| self.error("delete from", error))
    }

    fn update_one(&self, key: &K, value: &V, flags: u64) -> io::Result<()> {
        patiently(|| {
            let mut attr = Element { value: sys::pointer(value), flags, ..self.element(key) };
            // SAFETY: `key` and `value` have the sizes of the map, which `open` checked.
            unsafe { sys::bpf(Command::MapUpdate, &mut attr) }.map(drop)
        })
    }

    fn delete_one(&self, key: &K) -> io::Result<bool> {
        let deleted = patiently(|| {
            let mut attr = self.element(key);
            // SAFETY: `key` has the size of the map's keys, which `open` checked.
            unsafe { sys::bpf(Command::MapDelete, &mut attr) }
        });
        match deleted {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes all elements in their order. On failure the number says how many were written.
    pub fn update(&self, keys: &[K], values: &[V]) -> Result<(), (usize, DatapathError)> {
        debug_assert_eq!(keys.len(), values.len());
        let count = keys.len().min(values.len());
        let one = |at: usize| self.update_one(&keys[at], &values[at], ANY);
        self.run(Command::MapUpdateBatch, count, keys, Some(values), one)
            .map_err(|(done, error)| (done, self.error("write to", error)))
    }

    /// Removes all keys in their order; one that is not there counts as removed. On failure the number says how
    /// many were removed.
    pub fn delete(&self, keys: &[K]) -> Result<(), (usize, DatapathError)> {
        let one = |at: usize| self.delete_one(&keys[at]).map(drop);
        self.run(Command::MapDeleteBatch, keys.len(), keys, None, one)
            .map_err(|(done, error)| (done, self.error("delete from", error)))
    }

    /// Runs batches until `count` elements are done; the element at which one stops is tried by itself, which
    /// tells whether it fails for good, and is right because every operation may be repeated.
    fn run(
        &self,
        command: Command,
        count: usize,
        keys: &[K],
        values: Option<&[V]>,
        one: impl Fn(usize) -> io::Result<()>,
    ) -> Result<(), (usize, io::Error)> {
        let mut done = 0;
        while done < count {
            let end = count.min(done + CHUNK);
            let trouble = if self.batches.load(Ordering::Relaxed) {
                self.batch(command, &keys[done..end], values.map(|values| &values[done..end]))
            } else {
                Err(Trouble::Unsupported)
            };
            match trouble {
                Ok(()) => done = end,
                Err(Trouble::Unsupported) => {
                    self.use_batches(false);
                    one(done).map_err(|error| (done, error))?;
                    done += 1;
                }
                Err(Trouble::At(place)) => {
                    done += place;
                    one(done).map_err(|error| (done, error))?;
                    done += 1;
                }
            }
        }
        Ok(())
    }

    fn batch(&self, command: Command, keys: &[K], values: Option<&[V]>) -> Result<(), Trouble> {
        let count = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        let mut attr = Batch {
            keys: sys::pointer(keys.as_ptr()),
            values: values.map_or(0, |values| sys::pointer(values.as_ptr())),
            count,
            map: sys::raw(self.fd()),
            ..Batch::zeroed()
        };
        // SAFETY: there are `count` keys and, where the command reads them, as many values, of the map's sizes.
        match unsafe { sys::bpf(command, &mut attr) } {
            Ok(_) => Ok(()),
            Err(error) if is_unsupported(&error) => Err(Trouble::Unsupported),
            // A kernel that fails before the first element leaves `count` as it was.
            Err(_) => Err(Trouble::At(if attr.count < count { attr.count as usize } else { 0 })),
        }
    }

    /// Every element, each at least once if it is there from beginning to end; `see` may change the map.
    pub fn for_each(
        &self,
        mut see: impl FnMut(&K, &V) -> Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        if !self.batches.load(Ordering::Relaxed) {
            return self.for_each_key(see);
        }
        let (mut keys, mut values) = (vec![K::zeroed(); CHUNK], vec![V::zeroed(); CHUNK]);
        let (mut from, mut to) = (None, [0; CURSOR]);
        loop {
            let (count, more) = match self.read_batch(from.as_ref(), &mut to, &mut keys, &mut values) {
                Ok(count) => (count, true),
                Err((count, error)) if error.kind() == io::ErrorKind::NotFound => (count, false),
                // A bucket of the hash map holds more than the buffer.
                Err((_, error)) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    keys.resize(keys.len() * 2, K::zeroed());
                    values.resize(values.len() * 2, V::zeroed());
                    continue;
                }
                Err((_, error)) if is_unsupported(&error) && from.is_none() => {
                    self.use_batches(false);
                    return self.for_each_key(see);
                }
                Err((_, error)) => return Err(self.error("read from", error)),
            };
            for (key, value) in keys.iter().zip(&values).take(count) {
                see(key, value)?;
            }
            if !more {
                return Ok(());
            }
            from = Some(to);
        }
    }

    fn read_batch(
        &self,
        from: Option<&[u8; CURSOR]>,
        to: &mut [u8; CURSOR],
        keys: &mut [K],
        values: &mut [V],
    ) -> Result<usize, (usize, io::Error)> {
        let room = keys.len().min(values.len());
        let mut attr = Batch {
            in_cursor: from.map_or(0, |cursor| sys::pointer(cursor.as_ptr())),
            out_cursor: sys::pointer(to.as_mut_ptr()),
            keys: sys::pointer(keys.as_mut_ptr()),
            values: sys::pointer(values.as_mut_ptr()),
            count: u32::try_from(room).map_err(|error| (0, io::Error::other(error)))?,
            map: sys::raw(self.fd()),
            ..Batch::zeroed()
        };
        // SAFETY: there is room for `count` keys and values of the map's sizes; a cursor is four bytes (the bucket
        // of a hash map, the index of an array).
        let result = unsafe { sys::bpf(Command::MapLookupBatch, &mut attr) };
        let count = room.min(attr.count as usize);
        result.map(|_| count).map_err(|error| (count, error))
    }

    /// The slow way of [`Self::for_each`]: the keys first, because a walk starts again when its key vanishes.
    fn for_each_key(
        &self,
        mut see: impl FnMut(&K, &V) -> Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        let mut keys: Vec<K> = Vec::new();
        while let Some(key) = self.next_key(keys.last())? {
            keys.push(key);
            if keys.len() > self.capacity as usize {
                break;
            }
        }
        for key in keys {
            if let Some(value) = self.get(&key)? {
                see(&key, &value)?;
            }
        }
        Ok(())
    }

    fn next_key(&self, key: Option<&K>) -> Result<Option<K>, DatapathError> {
        let mut next = K::zeroed();
        let mut attr = Element {
            map: sys::raw(self.fd()),
            key: key.map_or(0, |key| sys::pointer(key)),
            value: sys::pointer(&raw mut next),
            ..Element::zeroed()
        };
        // SAFETY: both keys have the size of the map's keys, which `open` checked.
        match unsafe { sys::bpf(Command::MapNextKey, &mut attr) } {
            Ok(_) => Ok(Some(next)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.error("walk through", error)),
        }
    }

    /// How many elements there are.
    pub fn count(&self) -> Result<usize, DatapathError> {
        let mut count = 0;
        self.for_each(|_, _| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }
}

impl<V: Pod> Table<u32, V> {
    /// The elements of an array from `base` on, `count` of them or as many as there are.
    pub fn read_range(&self, base: u32, count: u32) -> Result<Vec<V>, DatapathError> {
        let count = count.min(self.capacity.saturating_sub(base));
        if self.batches.load(Ordering::Relaxed) && count > 0 {
            let (mut keys, mut values) = (vec![0; count as usize], vec![V::zeroed(); count as usize]);
            // The kernel continues after the index in the cursor.
            let cursor = base.checked_sub(1).map(|before| {
                let mut cursor = [0; CURSOR];
                cursor[..4].copy_from_slice(&before.to_ne_bytes());
                cursor
            });
            match self.read_batch(cursor.as_ref(), &mut [0; CURSOR], &mut keys, &mut values) {
                Ok(read) if read == values.len() => return Ok(values),
                Err((read, error)) if read == values.len() && error.kind() == io::ErrorKind::NotFound => {
                    return Ok(values);
                }
                Ok(_) => {}
                Err((_, error)) if is_unsupported(&error) => {}
                Err((_, error)) => return Err(self.error("read from", error)),
            }
        }
        let one = |index| self.get(&index).map(|value| value.unwrap_or_else(V::zeroed));
        (base..base + count).map(one).collect()
    }
}

/// Bytes of a cursor; the kernel uses four for our map types.
const CURSOR: usize = 64;

fn is_unsupported(error: &io::Error) -> bool {
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
