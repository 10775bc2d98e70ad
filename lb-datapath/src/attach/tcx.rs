//! Keeps a program on a tc hook by a pinned tcx link.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use crate::{
    attach::{direction::Direction, pinned_link::adopt},
    bpf::{
        program::LoadedProgram,
        sys::{self, LinkInfo, TcxProgram},
    },
    error::DatapathError,
};

/// A tc hook of a device, for attachment by tcx.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcxHook<'a> {
    /// Interface index.
    pub(crate) index: u32,
    /// Name or index of the device, for error messages.
    pub(crate) device: &'a str,
    pub(crate) direction: Direction,
}

impl TcxHook<'_> {
    /// Makes sure that a link has `program` on the hook: the link with the id `known`, else the link that an earlier
    /// agent has pinned at `pin`, else a new link, which this function pins at `pin`. `successor` gets the programs on
    /// the hook, and may return a link: a new link is placed before that link. If `successor` returns none, the new
    /// link is placed first at ingress and last at egress.
    ///
    /// Returns the id of the link, or `None` if the link `known` has `program` already.
    pub(crate) fn ensure(
        &self,
        program: &LoadedProgram,
        known: Option<u32>,
        pin: &Path,
        successor: impl FnOnce(&[TcxProgram]) -> Result<Option<OwnedFd>, DatapathError>,
    ) -> Result<Option<u32>, DatapathError> {
        let failed = |source| DatapathError::Attach {
            action: "attach a program to",
            hook: format!("tcx {}", self.direction.as_str()),
            device: self.device.to_owned(),
            source,
        };
        let present = sys::query_tcx(self.index, self.direction.tcx()).map_err(failed)?;
        let ours = known.map(|link_id| TcxProgram { program_id: program.id, link_id });
        if ours.is_some_and(|ours| present.contains(&ours)) {
            return Ok(None);
        }
        let is_present = |info: &LinkInfo| present.iter().any(|program| program.link_id == info.id);
        if let Some(info) = adopt(pin, program, is_present)? {
            return Ok(Some(info.id));
        }
        let successor = successor(&present)?;
        let (hook, position) = (self.direction.tcx(), self.direction.position());
        let before = successor.as_ref().map(OwnedFd::as_fd);
        let link = sys::attach_tcx(program.fd(), self.index, hook, position, before).map_err(failed)?;
        sys::pin(link.as_fd(), pin).map_err(|error| DatapathError::file("pin the link at", pin, error))?;
        Ok(Some(sys::link_info(link.as_fd()).map_err(failed)?.id))
    }
}
