//! A map of a layout that this version does not know, read as octets.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use bytemuck::Zeroable as _;

use super::{
    error::DatapathError,
    layout::Shape,
    sys::{self, Batch, Command, Element},
};

/// Elements for each batch call.
const CHUNK: usize = 4096;
/// Bytes of a cursor; the kernel uses four for our map types.
const CURSOR: usize = 64;

/// A pinned map.
#[derive(Debug)]
pub(super) struct RawMap {
    fd: OwnedFd,
    pub(super) shape: Shape,
}

/// Called with a key and its value.
type See<'a> = dyn FnMut(&[u8], &[u8]) -> Result<(), DatapathError> + 'a;

impl RawMap {
    /// What is pinned at `path`, if anything is.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, DatapathError> {
        let Some(shape) = Shape::of_pin(path)? else { return Ok(None) };
        let fd =
            sys::open_pin(path).map_err(|error| DatapathError::file("open the pinned map", path, error))?;
        Ok(Some(Self { fd, shape }))
    }

    /// Pins it at another place, too.
    pub(super) fn pin(&self, path: &Path) -> Result<(), DatapathError> {
        sys::pin(self.fd.as_fd(), path).map_err(|error| DatapathError::file("pin the map at", path, error))
    }

    fn key_size(&self) -> usize {
        self.shape.key_size as usize
    }

    fn value_size(&self) -> usize {
        self.shape.value_size as usize
    }

    /// Every element that is there from beginning to end, at least once.
    pub(super) fn for_each(&self, see: &mut See<'_>) -> Result<(), DatapathError> {
        let failed =
            |error| DatapathError::Map { action: "read from", map: "a map of another layout", source: error };
        let mut room = CHUNK;
        let (mut from, mut to) = (None, [0u8; CURSOR]);
        loop {
            let (mut keys, mut values) = (vec![0; room * self.key_size()], vec![0; room * self.value_size()]);
            let (count, error) = self.read_batch(from.as_ref(), &mut to, &mut keys, &mut values, room);
            match error.as_ref().and_then(io::Error::raw_os_error) {
                // A bucket of the hash map holds more than the buffer.
                Some(libc::ENOSPC) => {
                    room *= 2;
                    continue;
                }
                Some(libc::ENOENT) | None => {}
                // The kernel has no batches for this map.
                Some(_) if from.is_none() => return self.walk(see).map_err(failed)?,
                Some(_) => return Err(failed(error.unwrap_or_else(io::Error::last_os_error))),
            }
            let pairs = keys.chunks_exact(self.key_size()).zip(values.chunks_exact(self.value_size()));
            pairs.take(count).try_for_each(|(key, value)| see(key, value))?;
            if error.is_some() {
                return Ok(());
            }
            from = Some(to);
        }
    }

    fn read_batch(
        &self,
        from: Option<&[u8; CURSOR]>,
        to: &mut [u8; CURSOR],
        keys: &mut [u8],
        values: &mut [u8],
        room: usize,
    ) -> (usize, Option<io::Error>) {
        let mut attr = Batch {
            in_cursor: from.map_or(0, |cursor| sys::pointer(cursor.as_ptr())),
            out_cursor: sys::pointer(to.as_mut_ptr()),
            keys: sys::pointer(keys.as_mut_ptr()),
            values: sys::pointer(values.as_mut_ptr()),
            count: u32::try_from(room).unwrap_or(u32::MAX),
            map: sys::raw(self.fd.as_fd()),
            ..Batch::zeroed()
        };
        // SAFETY: there is room for `count` keys and values of the sizes that the kernel says the map has.
        let result = unsafe { sys::bpf(Command::MapLookupBatch, &mut attr) };
        (room.min(attr.count as usize), result.err())
    }

    /// Element by element, the keys first, because a walk starts again when its key vanishes.
    fn walk(&self, see: &mut See<'_>) -> io::Result<Result<(), DatapathError>> {
        let mut keys: Vec<Vec<u8>> = Vec::new();
        while let Some(key) = self.next_key(keys.last())? {
            keys.push(key);
            if keys.len() > self.shape.max_entries as usize {
                break;
            }
        }
        let mut value = vec![0; self.value_size()];
        for key in keys {
            match self.element(Command::MapLookup, Some(&key), &mut value) {
                Ok(()) => {
                    if let Err(error) = see(&key, &value) {
                        return Ok(Err(error));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Ok(()))
    }

    fn next_key(&self, key: Option<&Vec<u8>>) -> io::Result<Option<Vec<u8>>> {
        let mut next = vec![0; self.key_size()];
        match self.element(Command::MapNextKey, key, &mut next) {
            Ok(()) => Ok(Some(next)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A command that reads `out` from the kernel: a value, or a key.
    fn element(&self, command: Command, key: Option<&Vec<u8>>, out: &mut [u8]) -> io::Result<()> {
        let mut attr = Element {
            map: sys::raw(self.fd.as_fd()),
            key: key.map_or(0, |key| sys::pointer(key.as_ptr())),
            value: sys::pointer(out.as_mut_ptr()),
            ..Element::zeroed()
        };
        // SAFETY: `key` and `out` have the sizes that the kernel says the map has.
        unsafe { sys::bpf(command, &mut attr) }.map(drop)
    }
}
