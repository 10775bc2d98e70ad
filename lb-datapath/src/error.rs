use std::{io, path::PathBuf};

/// Why an operation of the agent on the kernel has failed.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// An operation on a file, folder or pin failed.
    #[error("cannot {action} {path}: {source}{}", hint(source))]
    File {
        /// The operation, as a verb.
        action: &'static str,
        /// Path of the file, folder or pin.
        path: PathBuf,
        /// Error that the kernel returned, or what is wrong with the content.
        source: io::Error,
    },
    /// Another agent has locked the folder.
    #[error("another lb-agent ({holder}) uses {folder}: stop it, or give this one its own --bpffs")]
    Locked {
        /// Path of the folder `DIR/lb`.
        folder: PathBuf,
        /// Pid and command of the process that holds the lock, as far as `/proc` shows them.
        holder: String,
    },
    /// Another monitor already reads the events; the text describes the process of that monitor.
    #[error("another monitor ({0}) reads the events: stop it, or watch its output")]
    Watched(String),
    /// After a monitor opened the maps of the data plane, the data plane was removed and created again.
    #[error(
        "the maps were removed and created again, so the ones that were opened get no more events: start again"
    )]
    MadeAnew,
    /// No data plane is pinned at this path.
    #[error(
        "no data plane in {0}: an agent that has just started creates it within seconds; if none runs, start \
         `lb-agent run`, or give the --bpffs that the agent was started with"
    )]
    Absent(PathBuf),
    /// No BPF file system is mounted at this path, so nothing can be pinned there.
    #[error(
        "no BPF file system is mounted at {0}, so there are no pins: a running agent pins everything again once one is \
         (mount -t bpf bpf {0}), and `lb-agent run` mounts one itself; or give the --bpffs that the agent was started with"
    )]
    NotMounted(PathBuf),
    /// Some maps of the data plane have no pin.
    #[error(
        "the pins of these maps in {folder} were removed: {maps}. A running agent pins them again within a second, if it \
         can: its log says why not. If none runs, programs on devices go on with these maps; restart `lb-agent run`, \
         which begins with empty ones"
    )]
    Unpinned {
        /// Path of the folder `DIR/lb/vN`.
        folder: PathBuf,
        /// Names of the maps without a pin.
        maps: String,
    },
    /// A pinned map has another type or other sizes than this version needs.
    #[error(
        "pinned map {path} is a {found}, this lb-agent needs a {wanted}: \
         run `lb-agent cleanup` to remove the old data plane, then start again"
    )]
    Layout {
        /// Path of the pin.
        path: PathBuf,
        /// Type and sizes that the pinned map has.
        found: String,
        /// The type and sizes that this version needs.
        wanted: String,
    },
    /// The BPF object in this binary does not match the Rust code of the binary.
    #[error(
        "the BPF object in this binary does not match its code: {0}; this is a bug of the build: build lb-agent again"
    )]
    Object(String),
    /// The maps could not be created; contains the loader's error.
    #[error("cannot create the BPF maps: {0}; run `lb-agent check`")]
    Maps(#[from] aya::EbpfError),
    /// The verifier or the loader has refused a program.
    #[error("the kernel refused BPF program {program}: {reason}; run `lb-agent check`")]
    Program {
        /// The program's name.
        program: &'static str,
        /// The error, with the end of the verifier's log if the verifier has refused the program.
        reason: String,
    },
    /// A veth drops the frames that a native XDP program sends through it.
    #[error(
        "veth {device} loses the frames that a native XDP program sends through it, because its other end has \
         neither an XDP program nor GRO: attach a program there (any that passes packets on), or use --xdp generic"
    )]
    NoWayOut {
        /// Name of the veth device.
        device: String,
    },
    /// A native XDP program on a bond would run on its ports.
    #[error(
        "{device} is a bond, whose driver runs a native XDP program on the ports, where the program takes no frame for one \
         of the node: use --xdp generic or --xdp off"
    )]
    RunsOnPorts {
        /// Name of the bond.
        device: String,
    },
    /// A device has VLANs and strips their tags before XDP programs see the frames.
    #[error(
        "XDP would serve frames of any VLAN on {device}, because the device takes VLAN tags out of frames, and has VLAN \
         devices: switch that off (ethtool -K {device} rxvlan off), or use --xdp off"
    )]
    StripsTags {
        /// Name of the device.
        device: String,
    },
    /// An operation on a map failed.
    #[error("cannot {action} BPF map {map}: {source}{}", hint(source))]
    Map {
        /// The operation, as a verb.
        action: &'static str,
        /// The map's name.
        map: &'static str,
        /// Error that the kernel returned, or a report that the agent uses the map incorrectly, which is a bug.
        source: io::Error,
    },
    /// A request over netlink failed.
    #[error("netlink: cannot {action}: {source}{}", hint(source))]
    Netlink {
        /// The operation, as a verb and its object.
        action: String,
        /// Error that the kernel returned, or why the kernel's answers cannot be used.
        source: io::Error,
    },
    /// A program could not be attached to a device, or the programs on it could not be listed.
    #[error("cannot {action} {hook} on {device}: {source}{}", hint(source))]
    Attach {
        /// The operation, as a verb.
        action: &'static str,
        /// The hook, such as `tcx ingress`.
        hook: String,
        /// Name or index of the device.
        device: String,
        /// Error that the kernel returned.
        source: io::Error,
    },
    /// The cookie of the network namespace, by which the programs identify sockets of the node, cannot be read.
    #[error(
        "cannot read the cookie of this network namespace (SO_NETNS_COOKIE): {0}; it takes kernel 5.14 or newer"
    )]
    Netns(#[source] io::Error),
    /// Loaded programs without a pin cannot be opened by their ids.
    #[error("cannot open programs of earlier agents: {}; run as root with CAP_SYS_ADMIN", with_causes(.0))]
    Programs(aya::programs::ProgramError),
    /// The kernel does not count runs of programs (`BPF_ENABLE_STATS`).
    #[error(
        "cannot count runs of BPF programs: {source}; it takes kernel 5.8 or newer, and root with CAP_SYS_ADMIN"
    )]
    RunTime {
        /// Error that the kernel returned.
        source: io::Error,
    },
    /// A cgroup cannot be opened, or a program cannot be attached to it.
    #[error("cannot {action} control group {path}: {source}{}", hint(source))]
    Cgroup {
        /// The operation, as a verb.
        action: &'static str,
        /// Path of the cgroup's folder.
        path: PathBuf,
        /// Error that the kernel returned.
        source: io::Error,
    },
    /// The wait for a grace period failed, see [`crate::grace`].
    #[error("cannot wait for running BPF programs to end: {source}{}", hint(source))]
    Grace {
        /// Error that the kernel returned.
        source: io::Error,
    },
}

impl DatapathError {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::File { action, path: path.into(), source: source.into() }
    }

    pub(crate) fn netlink(action: impl Into<String>, source: io::Error) -> Self {
        Self::Netlink { action: action.into(), source }
    }
}

/// Advice about an error that the kernel returned; empty if there is none.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (run as root, or with CAP_BPF and CAP_NET_ADMIN)",
        Some(libc::E2BIG) => {
            " (the map is full, see `lb-agent status`: run `lb-agent cleanup`, then start with a larger --max-…)"
        }
        Some(libc::ENOMEM) => " (the kernel is out of memory)",
        _ => "",
    }
}

/// The texts of an error and its causes, joined by `: `.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
