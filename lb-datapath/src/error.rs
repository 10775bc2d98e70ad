use std::{io, path::PathBuf};

/// What can go wrong between the agent and the kernel.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// A file or folder on the bpffs.
    #[error("cannot {action} {path}: {source}{}", hint(source))]
    File {
        /// What was tried, a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another agent works with the same folder.
    #[error("another lb-agent ({holder}) works in {folder}: stop it, or give this one its own --bpffs")]
    Locked {
        /// `DIR/lb`
        folder: PathBuf,
        /// Who it is, as far as the kernel tells.
        holder: String,
    },
    /// Somebody listens to the events already.
    #[error("another monitor ({0}) listens: end it, or look on there")]
    Watched(String),
    /// There is nothing to read.
    #[error(
        "no data plane in {0}: start `lb-agent run`, or give the --bpffs that the agent was started with"
    )]
    Absent(PathBuf),
    /// A pinned map is not what this version works with.
    #[error(
        "pinned map {path} is a {found}, this lb-agent needs a {wanted}: \
         run `lb-agent cleanup` to remove the old data plane, then start again"
    )]
    Layout {
        /// The pin.
        path: PathBuf,
        /// Type and sizes it has.
        found: String,
        /// Type and sizes it must have.
        wanted: String,
    },
    /// The BPF object that was built into this binary is not the one its code expects.
    #[error("the BPF object in this binary does not fit it: {0}; this is a bug of the build")]
    Object(String),
    /// The maps could not be made.
    #[error("cannot create the BPF maps: {0}; run `lb-agent check`")]
    Maps(#[from] aya::EbpfError),
    /// The kernel refused a program.
    #[error("the kernel refused BPF program {program}: {reason}; run `lb-agent check`")]
    Program {
        /// Its name.
        program: &'static str,
        /// The error and the end of the verifier's log.
        reason: String,
    },
    /// An operation on a map failed.
    #[error("cannot {action} BPF map {map}: {source}{}", hint(source))]
    Map {
        /// What was tried, a verb.
        action: &'static str,
        /// Which map.
        map: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A question to the kernel's network configuration failed.
    #[error("netlink: cannot {action}: {source}{}", hint(source))]
    Netlink {
        /// What was tried, a verb and its object.
        action: String,
        /// Why not.
        source: io::Error,
    },
    /// A program could not be attached to, or detached from, a device.
    #[error("cannot {action} {hook} on {device}: {source}{}", hint(source))]
    Attach {
        /// What was tried, a verb.
        action: &'static str,
        /// Where, such as `tcx ingress`.
        hook: String,
        /// Name or index of the device.
        device: String,
        /// Why not.
        source: io::Error,
    },
    /// The number of the network namespace, by which the programs know sockets of the node.
    #[error("cannot ask for the number of this network namespace: {0}; kernel 5.14 and newer tell it")]
    Netns(#[source] io::Error),
    /// Programs that are not pinned cannot be opened.
    #[error("cannot open programs of earlier agents: {}; run as root with CAP_SYS_ADMIN", with_causes(.0))]
    Programs(aya::programs::ProgramError),
    /// The kernel does not count runs of programs.
    #[error(
        "cannot have the kernel count runs of BPF programs: {source}; it takes kernel 5.8 or newer, and root with CAP_SYS_ADMIN"
    )]
    RunTime {
        /// Why not.
        source: io::Error,
    },
    /// A control group cannot be used.
    #[error("cannot {action} control group {path}: {source}{}", hint(source))]
    Cgroup {
        /// What was tried, a verb.
        action: &'static str,
        /// Its folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel offers no way to wait until no program looks at old records any more.
    #[error("cannot wait for running BPF programs: {0}")]
    Grace(#[source] io::Error),
}

impl DatapathError {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::File { action, path: path.into(), source: source.into() }
    }

    pub(crate) fn netlink(action: impl Into<String>, source: io::Error) -> Self {
        Self::Netlink { action: action.into(), source }
    }
}

/// What to do about an error of the kernel, where that can be said.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (run as root, or with CAP_BPF and CAP_NET_ADMIN)",
        Some(libc::E2BIG) => {
            " (the map is full, see `lb-agent status`: after `lb-agent cleanup` start with a larger --max-…)"
        }
        Some(libc::ENOMEM) => " (the kernel has no memory for it)",
        _ => "",
    }
}

/// The error and its causes.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
