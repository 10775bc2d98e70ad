//! Typed access to the elements of a map, one or many at a time.

use std::{collections::BTreeMap, io, marker::PhantomData, os::fd::BorrowedFd, path::Path, sync::Arc};

use bytemuck::{Pod, bytes_of, bytes_of_mut, cast_slice, cast_slice_mut, pod_read_unaligned};

use crate::{
    bpf::{
        layout::MapSpec,
        raw_map::{ANY, BatchError, CHUNK, Cursor, EXIST, NO_EXIST, RawMap},
        sys::is_unsupported,
    },
    error::DatapathError,
};

/// A map with keys `K` and values `V`: types of the sizes that the kernel's map has. Clones share the map.
#[derive(Debug)]
pub struct Table<K, V> {
    map: Arc<RawMap>,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Clone for Table<K, V> {
    fn clone(&self) -> Self {
        Self { map: Arc::clone(&self.map), types: PhantomData }
    }
}

impl<K: Pod, V: Pod> Table<K, V> {
    /// Opens the map that is pinned at `path`, and checks its type and sizes against `spec`.
    pub(crate) fn open(spec: &MapSpec, path: &Path) -> Result<Self, DatapathError> {
        let map = RawMap::open(spec.name, path)?.ok_or_else(|| DatapathError::Absent(path.to_owned()))?;
        spec.check(path, &map.shape)?;
        if spec.shape.key_size as usize != size_of::<K>() || spec.shape.value_size as usize != size_of::<V>()
        {
            return Err(DatapathError::Object(format!("map {} is used with other types", spec.name)));
        }
        Ok(Self { map: Arc::new(map), types: PhantomData })
    }

    /// Maximum number of elements in the map.
    pub fn capacity(&self) -> u32 {
        self.map.shape.max_entries
    }

    /// Sets whether to use the kernel's batch commands (5.6 and newer); on by default. Without them, or if the kernel
    /// does not support them, each element takes at least one system call.
    pub fn use_batches(&self, yes: bool) {
        self.map.use_batches(yes);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.map.fd()
    }

    /// The value of `key`; `None` if the key does not exist.
    pub fn get(&self, key: &K) -> Result<Option<V>, DatapathError> {
        let mut value = V::zeroed();
        let found = self.map.get(bytes_of(key), bytes_of_mut(&mut value))?;
        Ok(found.then_some(value))
    }

    /// Creates the element unless the key exists. Returns whether it was created.
    pub fn insert_new(&self, key: &K, value: &V) -> Result<bool, DatapathError> {
        match self.map.update(bytes_of(key), bytes_of(value), NO_EXIST) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(self.map.error("write to", error)),
        }
    }

    /// Replaces the value of `key`. Returns whether the key existed.
    pub(crate) fn replace(&self, key: &K, value: &V) -> Result<bool, DatapathError> {
        match self.map.update(bytes_of(key), bytes_of(value), EXIST) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.map.error("write to", error)),
        }
    }

    /// Deletes `key`. Returns whether the key existed.
    pub fn remove(&self, key: &K) -> Result<bool, DatapathError> {
        self.map.delete(bytes_of(key)).map_err(|error| self.map.error("delete from", error))
    }

    /// Deletes `key`; returns the value that it had.
    pub(crate) fn take(&self, key: &K) -> Result<Option<V>, DatapathError> {
        let mut value = V::zeroed();
        let found = self.map.take(bytes_of(key), bytes_of_mut(&mut value))?;
        Ok(found.then_some(value))
    }

    /// Writes all elements in order. An error comes with the number of elements that were written.
    pub fn update(&self, keys: &[K], values: &[V]) -> Result<(), (usize, DatapathError)> {
        debug_assert_eq!(keys.len(), values.len());
        let count = keys.len().min(values.len());
        let one = |at: usize| self.map.update(bytes_of(&keys[at]), bytes_of(&values[at]), ANY);
        self.write(&keys[..count], Some(&values[..count]), one)
            .map_err(|(done, error)| (done, self.map.error("write to", error)))
    }

    /// Deletes all keys in order; a missing key counts as deleted. An error comes with the number of keys that were
    /// deleted.
    pub fn delete(&self, keys: &[K]) -> Result<(), (usize, DatapathError)> {
        let one = |at: usize| self.map.delete(bytes_of(&keys[at])).map(drop);
        self.write(keys, None, one).map_err(|(done, error)| (done, self.map.error("delete from", error)))
    }

    /// Like [`Self::update`], for callers that do not need the number of written elements in an error.
    pub(crate) fn update_all(&self, keys: &[K], values: &[V]) -> Result<(), DatapathError> {
        self.update(keys, values).map_err(|(_, error)| error)
    }

    /// Like [`Self::delete`], for callers that do not need the number of deleted keys in an error.
    pub(crate) fn delete_all(&self, keys: &[K]) -> Result<(), DatapathError> {
        self.delete(keys).map_err(|(_, error)| error)
    }

    /// Runs batches until all elements are processed. If a batch stops at an element, processes that element with
    /// `one`, which returns the error or succeeds. Processing an element twice is harmless: all operations are
    /// idempotent.
    fn write(
        &self,
        keys: &[K],
        values: Option<&[V]>,
        one: impl Fn(usize) -> io::Result<()>,
    ) -> Result<(), (usize, io::Error)> {
        let mut done = 0;
        while done < keys.len() {
            let end = keys.len().min(done + CHUNK);
            let result = if self.map.has_batches() {
                let values = values.map(|values| cast_slice(&values[done..end]));
                self.map.write_batch(cast_slice(&keys[done..end]), values)
            } else {
                Err(BatchError::Unsupported)
            };
            match result {
                Ok(()) => {
                    done = end;
                    continue;
                }
                Err(BatchError::Unsupported) => self.use_batches(false),
                Err(BatchError::At(index)) => done += index,
            }
            one(done).map_err(|error| (done, error))?;
            done += 1;
        }
        Ok(())
    }

    /// Calls `see`, which may change the map, for the elements of the map. With batch commands, `see` gets every
    /// element that is in the map during the whole walk, some of them more than once. Without batch commands, `see` may
    /// miss elements if other elements are deleted while the walk lists the keys.
    pub fn for_each(
        &self,
        mut see: impl FnMut(&K, &V) -> Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        self.map.for_each(&mut |key, value| see(&pod_read_unaligned(key), &pod_read_unaligned(value)))
    }

    /// All elements of the map, sorted by key.
    pub(crate) fn entries(&self) -> Result<BTreeMap<K, V>, DatapathError>
    where
        K: Ord,
    {
        let mut entries = BTreeMap::new();
        self.for_each(|key, value| {
            entries.insert(*key, *value);
            Ok(())
        })?;
        Ok(entries)
    }

    /// Counts the elements of the map by reading all of them.
    pub fn count(&self) -> Result<usize, DatapathError> {
        let mut count = 0;
        self.map.for_each(&mut |_, _| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }
}

impl<V: Pod> Table<u32, V> {
    /// Reads `count` elements of an array from index `base` on; fewer if the array ends earlier.
    pub fn read_range(&self, base: u32, count: u32) -> Result<Vec<V>, DatapathError> {
        let count = count.min(self.capacity().saturating_sub(base));
        if self.map.has_batches() && count > 0 {
            let (mut keys, mut values) = (vec![0u32; count as usize], vec![V::zeroed(); count as usize]);
            // The kernel begins after the index that the cursor contains.
            let from = base.checked_sub(1).map(Cursor::after);
            let (keys, bytes) = (cast_slice_mut(&mut keys), cast_slice_mut(&mut values));
            match self.map.read_batch(from.as_ref(), &mut Cursor::after(0), keys, bytes) {
                Ok(read) if read == values.len() => return Ok(values),
                Err((read, error)) if read == values.len() && error.kind() == io::ErrorKind::NotFound => {
                    return Ok(values);
                }
                Ok(_) => {}
                Err((_, error)) if is_unsupported(&error) => {}
                Err((_, error)) => return Err(self.map.error("read from", error)),
            }
        }
        // Every index of an array has a value.
        let one = |index| self.get(&index).map(|value| value.unwrap_or_else(V::zeroed));
        (base..base + count).map(one).collect()
    }
}
