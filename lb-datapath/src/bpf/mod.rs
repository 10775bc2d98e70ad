//! BPF system calls, typed maps, pins on the BPF file system, and the loader of the BPF object.

pub(crate) mod anchor;
pub(crate) mod bpffs;
pub(crate) mod checksum;
pub(crate) mod description;
pub(crate) mod flow_events;
pub(crate) mod globals;
pub mod grace;
pub(crate) mod kernel_types;
pub(crate) mod layout;
pub(crate) mod loader;
pub(crate) mod mapped;
pub(crate) mod options;
pub(crate) mod probe;
pub(crate) mod program;
pub(crate) mod raw_map;
pub(crate) mod sys;
pub(crate) mod table;
pub(crate) mod verify;
