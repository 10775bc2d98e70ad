//! An emulated guest with a shell, and a network namespace of this machine as another host of its network.
//!
//! ```text
//! shell    boots the guest, and runs commands in it
//! network  the wire, and the other host at its end
//! ```

pub(crate) mod network;
pub(crate) mod shell;
