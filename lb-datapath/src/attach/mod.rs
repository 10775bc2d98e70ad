//! Our programs on devices (tcx, clsact, XDP) and control groups, and their removal.

pub(crate) mod announcer;
pub(crate) mod attacher;
pub(crate) mod cleanup;
pub(crate) mod clsact;
pub(crate) mod direction;
pub(crate) mod pinned_link;
pub(crate) mod sockets;
pub(crate) mod tcx;
pub(crate) mod xdp;
