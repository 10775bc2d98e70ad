//! The limit on open files of the agent's process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// Raises the soft limit on open files to the hard limit: each DNS query that the agent forwards holds a socket, and so
/// does each server of a `healthCheckNodePort`.
pub(super) fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        warn!(
            "cannot raise the limit of open files from {current:?} to {maximum:?}: {error}; it stays as it is"
        );
    }
}

/// How many files one part of the agent may open: `wanted`, but at most half of the process's limit.
pub(super) fn share(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit / 2).ok()).map_or(wanted, |half| wanted.min(half))
}
