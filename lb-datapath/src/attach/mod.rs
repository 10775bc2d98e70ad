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

use crate::{attach::direction::Direction, bpf::options::Options};

/// Names of the programs that the devices in the options need: on tc hooks, and for the XDP mode that is tried first.
pub(crate) fn programs_of_devices(options: &Options) -> Vec<&'static str> {
    let of_device = |device| {
        let xdp = xdp::modes(options.xdp, device).first().map(|mode| mode.program());
        Direction::BOTH.map(|direction| attacher::program_of(device, direction)).into_iter().chain(xdp)
    };
    options.devices.iter().flat_map(of_device).collect()
}
