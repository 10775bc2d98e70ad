//! The loaded object: its programs and maps, and spare ones for the next test.

use std::{
    ops::{Deref, DerefMut},
    sync::Mutex,
    thread,
};

use aya::{Ebpf, EbpfLoader};
use lb_datapath::{Globals, load_program};

pub(crate) const PROGRAMS: [&str; 5] =
    ["tc_ingress", "tc_egress", "tc_ingress_l3", "tc_egress_l3", "tc_catch"];
/// The program that answers for announced addresses.
pub(crate) const ANNOUNCE_PROGRAM: &str = "tc_announce";
pub(crate) const XDP_PROGRAMS: [&str; 2] = ["xdp_native", "xdp_generic"];

/// The sizes, in most tests, of the maps whose default sizes are larger than the tests need: numbers of entries, and
/// for `EVENTS` bytes.
const SIZES: [(&str, u32); 13] = [
    ("SERVICES", 64),
    ("BACKENDS", 64),
    ("TABLES", 512),
    ("ACTIVE", 64),
    ("FLOWS", 256),
    ("CONNTRACK", 256),
    ("FRAGMENTS", 1024),
    ("VIPS", 16),
    ("SOURCE_RANGES", 16),
    ("LIMITS", 64),
    ("SERVICE_NAMES", 1),
    ("ENDPOINT_NAMES", 16),
    ("EVENTS", 65_536),
];

/// Objects of earlier tests of this process. Loading one takes longer than most tests, above all on old kernels, which
/// verify up to ten times as many instructions.
static SPARE: Mutex<Vec<Ebpf>> = Mutex::new(Vec::new());

/// A loaded object. Dropping one with the [`SIZES`] and the default constants makes it a spare, unless a test has
/// failed with it.
pub(super) struct Object {
    ebpf: Option<Ebpf>,
    /// Whether the object has the [`SIZES`] and the default constants.
    is_default: bool,
}

impl Drop for Object {
    fn drop(&mut self) {
        if self.is_default && !thread::panicking() {
            SPARE.lock().unwrap().extend(self.ebpf.take());
        }
    }
}

impl Deref for Object {
    type Target = Ebpf;

    fn deref(&self) -> &Ebpf {
        self.ebpf.as_ref().unwrap()
    }
}

impl DerefMut for Object {
    fn deref_mut(&mut self) -> &mut Ebpf {
        self.ebpf.as_mut().unwrap()
    }
}

impl Object {
    /// Takes a spare object if there is one, `entries` is the size of `map` in [`SIZES`], and `globals` are the
    /// default; else loads a new one.
    pub(super) fn take_or_load(map: &str, entries: u32, globals: Globals) -> Self {
        let is_default = SIZES.contains(&(map, entries)) && globals == Globals::default();
        let spare = if is_default { SPARE.lock().unwrap().pop() } else { None };
        let load = || load(lb_datapath::linked_object(), map, entries, globals);
        Self { ebpf: Some(spare.unwrap_or_else(load)), is_default }
    }

    /// Loads an object whose programs read nothing of the kernel's own structures.
    pub(super) fn unlinked() -> Self {
        let ebpf = load(lb_datapath::OBJECT, "SERVICES", 64, Globals::default());
        Self { ebpf: Some(ebpf), is_default: false }
    }
}

fn load(object: &[u8], map: &str, entries: u32, globals: Globals) -> Ebpf {
    let direct = u8::from(globals.direct);
    let mut loader = EbpfLoader::new();
    loader.override_global("AYA_LOG_LEVEL", &0u8, true);
    loader.override_global("SYN_RETRIES", &globals.syn_retries, true);
    loader.override_global("DIRECT", &direct, true);
    let slots = SIZES.into_iter().find(|(name, _)| *name == "FLOWS").unwrap().1;
    let slots = if map == "FLOWS" { entries } else { slots };
    loader.override_global("FLOW_SLOTS", &slots, true);
    for (name, default) in SIZES {
        loader.map_max_entries(name, if name == map { entries } else { default });
    }
    let mut ebpf = loader.load(object).expect("these tests need root");
    for name in PROGRAMS.into_iter().chain([ANNOUNCE_PROGRAM]).chain(XDP_PROGRAMS) {
        load_program(ebpf.program_mut(name).unwrap()).unwrap();
    }
    ebpf
}
