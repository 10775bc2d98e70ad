//! Attaches the programs to devices (tcx, clsact, XDP) and cgroups, and detaches them.

pub(crate) mod announcer;
pub(crate) mod attacher;
pub(crate) mod cleanup;
pub(crate) mod clsact;
pub(crate) mod direction;
pub(crate) mod pinned_link;
pub(crate) mod sockets;
pub(crate) mod tcx;
pub(crate) mod xdp;

use std::path::Path;

use tracing::info;

use crate::{
    attach::direction::Direction,
    bpf::{
        bpffs::{self, Folder},
        layout::{ON_DEMAND, PROGRAMS, SOCKET_HOOKS},
        options::Options,
    },
    error::DatapathError,
};

/// Names of the programs that the devices in the options need: on tc hooks, and for the XDP mode that is tried first.
pub(crate) fn programs_of_devices(options: &Options) -> Vec<&'static str> {
    let of_device = |device| {
        let xdp = xdp::modes(options.xdp, device).first().map(|mode| mode.program());
        Direction::BOTH.map(|direction| attacher::program_of(device, direction)).into_iter().chain(xdp)
    };
    options.devices.iter().flat_map(of_device).collect()
}

/// Removes the pins of links and programs that this version does not know: another version with the same map layout has
/// left them. Without its pin, a link detaches its program.
pub(crate) fn remove_unknown(folder: &Folder) -> Result<(), DatapathError> {
    let links = bpffs::entries(&folder.links())?.into_iter().filter(|pin| !is_known_link(pin));
    let programs = bpffs::entries(&folder.programs())?.into_iter().filter(|pin| !is_known_program(pin));
    for pin in links.chain(programs) {
        info!(pin = %pin.display(), "removing what another version has left");
        bpffs::unpin(&pin)?;
    }
    Ok(())
}

fn is_known_link(pin: &Path) -> bool {
    direction::parse_pin(pin).is_some()
        || announcer::parse_pin(pin).is_some()
        || xdp::parse_pin(pin).is_some()
        || sockets::is_pin(pin)
}

fn is_known_program(pin: &Path) -> bool {
    let of_sockets = SOCKET_HOOKS.iter().map(|hook| hook.program);
    let mut known = PROGRAMS.into_iter().chain(ON_DEMAND).chain(of_sockets);
    known.any(|program| pin.file_name().is_some_and(|name| name == program))
}
