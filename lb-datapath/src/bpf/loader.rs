//! Loads the BPF object: reuses pinned maps, but no pinned programs. Loads each program when it is first needed.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    thread,
};

use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use lb_common::capacity;
use tracing::warn;

use crate::{
    bpf::{
        bpffs::{self, Folder},
        checksum::linked_object,
        flow_events::{self, FlowEvents},
        globals,
        layout::{
            self, ANNOUNCE_PROGRAM, CATCH_PROGRAMS, MAPS, MapSpec, ON_DEMAND, PROGRAMS,
            PROGRAMS_WITHOUT_LINK_LAYER, SOCKET_HOOKS, Shape, XDP_PROGRAMS,
        },
        options::{BpfLogLevel, Capacities, Forwarding, Options, SocketScope},
        program::{LoadedProgram, Programs},
        sys,
        verify::verify,
    },
    error::DatapathError,
};

/// The BPF object, built by build.rs. Public for tests that load it themselves.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/lb"));

/// Passes log lines of the programs to the `log` crate. Its owner must call `flush` whenever the descriptor is
/// readable.
pub type BpfLogger = EbpfLogger<&'static dyn log::Log>;

/// What [`load`] returns: the programs and, if enabled, the reader of their log and the reader of flow events.
pub(crate) struct Loaded {
    pub(crate) programs: Programs,
    pub(crate) logger: Option<BpfLogger>,
    pub(crate) flow_events: Option<FlowEvents>,
}

/// Values of the constants that the loader writes into the programs.
struct Constants {
    log_level: u8,
    netns: u64,
    serve_pods: u8,
    direct: u8,
    decapsulate: u8,
    syn_retries: u16,
    flow_log: u8,
    hash_seed: u64,
    random_seed: u64,
    flow_slots: u32,
}

impl Constants {
    fn new(options: &Options, flow_slots: u32) -> Result<Self, DatapathError> {
        let serves_pods = options.sockets.as_ref().is_some_and(|sockets| sockets.scope == SocketScope::All);
        Ok(Self {
            // The object logs everything by default. With level 0 the verifier removes all code that only logs.
            log_level: options.bpf_log.map_or(0, |level| level as u8),
            netns: sys::netns_cookie().map_err(DatapathError::Netns)?,
            serve_pods: u8::from(serves_pods),
            direct: u8::from(options.forwarding == Forwarding::Direct),
            decapsulate: u8::from(options.decapsulate),
            syn_retries: options.syn_retries,
            flow_log: u8::from(options.flow_log),
            hash_seed: options.hash_seed,
            random_seed: RandomState::new().hash_one(0),
            flow_slots,
        })
    }

    fn set<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        loader
            .override_global(aya_log::LEVEL, &self.log_level, false)
            .override_global("NODE_NETNS", &self.netns, true)
            .override_global("SERVE_PODS", &self.serve_pods, true)
            .override_global("DIRECT", &self.direct, true)
            .override_global("DECAPSULATE", &self.decapsulate, true)
            .override_global("SYN_RETRIES", &self.syn_retries, true)
            .override_global("FLOW_LOG", &self.flow_log, true)
            .override_global("HASH_SEED", &self.hash_seed, true)
            .override_global("CHANCE_SEED", &self.random_seed, true)
            .override_global("FLOW_SLOTS", &self.flow_slots, true);
    }
}

/// Creates the maps with these sizes, or reuses pinned ones as they are (but replaces those of [`GROWS`] that are too
/// small). Loads the programs that the agent needs whatever its devices are, and those in `of_devices`, which the
/// devices in the options need. Pins maps and programs.
pub(crate) fn load(
    folder: &Folder,
    options: &Options,
    capacities: &Capacities,
    of_devices: &[&'static str],
) -> Result<Loaded, DatapathError> {
    let mut loader = prepare()?;
    if options.sockets.is_none() {
        // No program will count the ends of connections, so programs of a later agent must not find the counts of
        // sockets that are open now.
        for map in [&layout::SOCKET_COUNTS, &layout::COUNTED_SOCKETS] {
            bpffs::unpin(&folder.map(map.name))?;
        }
    }
    let paths = MAPS.map(|spec| folder.map(spec.name));
    let sizes =
        MAPS.iter().zip(&paths).map(|(spec, path)| Ok((spec.name, entries_of(path, spec, capacities)?)));
    let sizes = sizes.collect::<Result<BTreeMap<&str, u32>, DatapathError>>()?;
    let constants = Constants::new(options, sizes[layout::FLOWS.name])?;
    constants.set(&mut loader);
    for (spec, path) in MAPS.iter().zip(&paths) {
        loader.map_max_entries(spec.name, sizes[spec.name]).map_pin_path(spec.name, path);
    }
    if options.flow_log {
        loader.map_max_entries(flow_events::MAP, capacity::FLOW_EVENTS);
    }
    let mut ebpf = loader.load(linked_object())?;
    globals::pin(&ebpf, folder)?;
    let logger = options.bpf_log.and_then(|level| logger(&mut ebpf, level));
    let flow_events = options.flow_log.then(|| FlowEvents::take(&mut ebpf)).transpose()?;
    let programs = Programs::new(folder.clone(), ebpf);
    load_first(&programs, options, of_devices)?;
    for name in ON_DEMAND.into_iter().filter(|name| !programs.has(name)) {
        // Removes the pin of an earlier agent's program, which devices keep running until they get another one.
        bpffs::unpin(&folder.programs().join(name))?;
    }
    Ok(Loaded { programs, logger, flow_events })
}

/// Loads the programs that every agent needs, the socket programs if sockets are served, and the programs in
/// `of_devices`. If the kernel refuses a program that is only in `of_devices`, attaching that program later reports the
/// error.
fn load_first(
    programs: &Programs,
    options: &Options,
    of_devices: &[&'static str],
) -> Result<(), DatapathError> {
    let hooks = if options.sockets.is_some() { &SOCKET_HOOKS[..] } else { &[] };
    let needed = PROGRAMS.iter().copied().chain(hooks.iter().map(|hook| hook.program));
    let names: Vec<&str> = needed.clone().chain(of_devices.iter().copied()).collect();
    let mut loaded = programs.load(&names);
    needed.filter_map(|name| loaded.remove(name)).try_for_each(|program| program.map(drop))
}

/// Loads the tc and socket programs once, only to check that the kernel accepts them.
pub(crate) fn try_load() -> Result<(), DatapathError> {
    let socket_programs = SOCKET_HOOKS.iter().map(|hook| hook.program);
    let catch = CATCH_PROGRAMS.into_iter().skip(1);
    let of_devices = PROGRAMS.into_iter().chain(PROGRAMS_WITHOUT_LINK_LAYER).chain(catch);
    try_verify(of_devices.chain([ANNOUNCE_PROGRAM]).chain(socket_programs))
}

/// Loads the XDP programs once, only to check that the kernel accepts them.
pub(crate) fn try_load_xdp() -> Result<(), DatapathError> {
    try_verify(XDP_PROGRAMS.into_iter())
}

/// Loads programs with small maps of their own, then unloads both.
fn try_verify(names: impl Iterator<Item = &'static str>) -> Result<(), DatapathError> {
    let mut loader = prepare()?;
    loader.override_global(aya_log::LEVEL, &0u8, false);
    let sized = |spec: &&MapSpec| spec.name != layout::STATS.name && spec.shape.max_entries > 0;
    for spec in MAPS.iter().filter(sized) {
        loader.map_max_entries(spec.name, spec.shape.max_entries.min(16));
    }
    let mut ebpf = loader.load(linked_object())?;
    verify(&mut ebpf, names).into_values().try_for_each(|program| program.map(drop))
}

/// Creates a loader for the object; also checks the object and computes [`linked_object`]. The loader reads all types
/// of the kernel, which takes as long as the rest of this function, so another thread creates the loader.
fn prepare<'a>() -> Result<EbpfLoader<'a>, DatapathError> {
    thread::scope(|scope| {
        let loader = thread::Builder::new().spawn_scoped(scope, EbpfLoader::new).ok();
        check_object()?;
        linked_object();
        Ok(loader.and_then(|thread| thread.join().ok()).unwrap_or_default())
    })
}

/// Checks that the object contains the maps and programs that this code expects.
fn check_object() -> Result<(), DatapathError> {
    let object = aya_obj::Object::parse(OBJECT).map_err(|error| DatapathError::Object(error.to_string()))?;
    for spec in &MAPS {
        let map = object.maps.get(spec.name);
        let map = map.ok_or_else(|| DatapathError::Object(format!("map {} is missing", spec.name)))?;
        let found = Shape {
            kind: spec.shape.kind,
            key_size: map.key_size(),
            value_size: map.value_size(),
            max_entries: spec.shape.max_entries,
        };
        if found != spec.shape || map.map_type() != spec.shape.kind as u32 {
            let wanted = spec.shape;
            return Err(DatapathError::Object(format!("map {} is a {found}, not a {wanted}", spec.name)));
        }
    }
    let socket_programs = SOCKET_HOOKS.iter().map(|hook| hook.program);
    let mut all = PROGRAMS.into_iter().chain(ON_DEMAND).chain(socket_programs);
    match all.find(|name| !object.programs.contains_key(*name)) {
        Some(name) => Err(DatapathError::Object(format!("program {name} is missing"))),
        None => Ok(()),
    }
}

/// Names of maps that are replaced if this version needs more entries. Counters then start from 0, and the ports of
/// fragmented datagrams in transit are lost.
const GROWS: [&str; 2] = [layout::STATS.name, layout::FRAGMENTS.name];

/// Number of entries that the map has or will have. Unpins a map of [`GROWS`] that is too small. Returns an error for a
/// pinned map with another type or other sizes.
fn entries_of(path: &Path, spec: &MapSpec, capacities: &Capacities) -> Result<u32, DatapathError> {
    let wanted = capacities.of(spec);
    let Some(found) = Shape::of_pin(path)? else { return Ok(wanted) };
    spec.check(path, &found)?;
    if GROWS.contains(&spec.name) && found.max_entries < wanted {
        bpffs::unpin(path)?;
        return Ok(wanted);
    }
    if found.max_entries != wanted {
        let (map, keeps) = (spec.name, found.max_entries);
        warn!(
            map,
            keeps,
            wanted,
            "a pinned map keeps its size: to change it, run `lb-agent cleanup`, which cuts all connections, and start again"
        );
    }
    Ok(found.max_entries)
}

/// Pins a program that the kernel has accepted.
pub(crate) fn pin(fd: OwnedFd, folder: &Folder, name: &'static str) -> Result<LoadedProgram, DatapathError> {
    let id = sys::program_id(fd.as_fd());
    let id = id.map_err(|error| DatapathError::Program { program: name, reason: error.to_string() })?;
    let path = folder.programs().join(name);
    bpffs::unpin(&path)?;
    sys::pin(fd.as_fd(), &path).map_err(|error| DatapathError::file("pin the program at", &path, error))?;
    Ok(LoadedProgram { name, id, fd })
}

fn logger(ebpf: &mut Ebpf, level: BpfLogLevel) -> Option<BpfLogger> {
    match EbpfLogger::init(ebpf) {
        Ok(logger) => Some(logger),
        Err(error) => {
            warn!(?level, "cannot read the log of the BPF programs: {error}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn object_has_the_maps_and_programs_of_this_code() {
        super::check_object().unwrap();
    }
}
