//! The BPF programs of this process. Each is loaded when it is first needed, because the verifier takes up to half a
//! second for one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use aya::Ebpf;

use crate::{
    bpf::{
        bpffs::{Folder, is_pinned},
        globals,
        layout::{MAPS, MapSpec},
        loader, sys, verify,
    },
    error::DatapathError,
};

/// A loaded program. The kernel keeps it at least as long as this value exists.
#[derive(Debug)]
pub(crate) struct LoadedProgram {
    pub(crate) name: &'static str,
    pub(crate) id: u32,
    pub(crate) fd: OwnedFd,
}

impl LoadedProgram {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The programs of a BPF object, and the maps that they use.
pub(crate) struct Programs {
    folder: Folder,
    inner: Mutex<Inner>,
}

struct Inner {
    ebpf: Ebpf,
    loaded: BTreeMap<&'static str, Arc<LoadedProgram>>,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_tuple("Programs").field(&inner.loaded).finish()
    }
}

impl Programs {
    /// Wraps an object whose maps are created; no program is loaded yet.
    pub(crate) fn new(folder: Folder, ebpf: Ebpf) -> Self {
        Self { folder, inner: Mutex::new(Inner { ebpf, loaded: BTreeMap::new() }) }
    }

    /// Returns the program with this name; loads and pins it if necessary. A call after a failure tries again.
    pub(crate) fn get(&self, name: &'static str) -> Result<Arc<LoadedProgram>, DatapathError> {
        let mut loaded = self.load(&[name]);
        loaded
            .remove(name)
            .unwrap_or_else(|| Err(DatapathError::Object(format!("program {name} is missing"))))
    }

    /// Pins those maps and loaded programs whose pins are gone. Returns their names.
    pub(crate) fn restore_pins(&self) -> Result<Vec<&'static str>, DatapathError> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let mut restored = Vec::new();
        for MapSpec { name, .. } in MAPS {
            let path = self.folder.map(name);
            if is_pinned(&path)? {
                continue;
            }
            let map = inner.ebpf.map(name);
            let map = map.ok_or_else(|| DatapathError::Object(format!("map {name} is missing")))?;
            map.pin(&path)
                .map_err(|error| DatapathError::file("pin the map at", path, io::Error::other(error)))?;
            restored.push(name);
        }
        if !is_pinned(&self.folder.map(globals::PIN))? {
            globals::pin(&inner.ebpf, &self.folder)?;
            restored.push(globals::PIN);
        }
        for (name, program) in &inner.loaded {
            let path = self.folder.programs().join(name);
            if !is_pinned(&path)? {
                sys::pin(program.fd(), &path)
                    .map_err(|error| DatapathError::file("pin the program at", path, error))?;
                restored.push(name);
            }
        }
        Ok(restored)
    }

    /// Whether the program with this name is loaded.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).loaded.contains_key(name)
    }

    /// Returns the programs with these names, or their errors. Those that are not loaded yet are loaded in parallel,
    /// and pinned.
    pub(crate) fn load(
        &self,
        names: &[&'static str],
    ) -> BTreeMap<&'static str, Result<Arc<LoadedProgram>, DatapathError>> {
        // A thread that panicked with the lock has left the map of loaded programs consistent.
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Inner { ebpf, loaded } = &mut *inner;
        // A set, because several devices may need the same program.
        let missing: BTreeSet<&'static str> =
            names.iter().copied().filter(|name| !loaded.contains_key(name)).collect();
        let mut failed = BTreeMap::new();
        for (name, verified) in verify::verify(ebpf, missing.into_iter()) {
            match verified.and_then(|fd| loader::pin(fd, &self.folder, name)) {
                Ok(program) => _ = loaded.insert(name, Arc::new(program)),
                Err(error) => _ = failed.insert(name, error),
            }
        }
        let result = |name: &&'static str| match loaded.get(name) {
            Some(program) => Some((*name, Ok(Arc::clone(program)))),
            None => failed.remove(name).map(|error| (*name, Err(error))),
        };
        names.iter().filter_map(result).collect()
    }
}
