//! Finds pins and programs of a data plane that are missing, for example because another process has removed them.

use lb_common::{DeviceInfo, device_flags};

use crate::{
    attach::{direction::Direction, sockets},
    bpf::{
        bpffs::{Folder, is_pinned},
        globals,
        layout::{self, MAPS, PROGRAMS, SOCKET_HOOKS},
        table::Table,
    },
    error::DatapathError,
    inspect::pinned::Pinned,
    net::{netlink::Netlink, network},
};

/// Parts of a data plane that should exist and do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Names of maps without a pin.
    pub maps: Vec<&'static str>,
    /// Names of programs without a pin, among the programs that every agent pins and the programs that are attached.
    pub programs: Vec<String>,
    /// Tc and XDP hooks without our program, such as `eth0 ingress`.
    pub hooks: Vec<String>,
    /// Names of socket programs without a pinned link: they are detached, so processes of the node do not reach all
    /// Services. An agent that has not synchronised yet attaches them later.
    pub sockets: Vec<&'static str>,
}

impl Missing {
    /// Compares the pins, and the programs on the devices of this network namespace, with what the agent sets up.
    ///
    /// # Errors
    /// Pins or devices cannot be read.
    pub fn find(pinned: &Pinned) -> Result<Self, DatapathError> {
        let folder = pinned.pins();
        Ok(Self {
            maps: [maps(folder)?, constants(folder)?].concat(),
            programs: programs(pinned)?,
            hooks: hooks(pinned)?,
            sockets: if serves_sockets(folder)? { sockets::missing(folder)? } else { Vec::new() },
        })
    }
}

/// Names of this version's maps that are not pinned.
pub(crate) fn maps(folder: &Folder) -> Result<Vec<&'static str>, DatapathError> {
    let mut missing = Vec::new();
    for spec in &MAPS {
        if !is_pinned(&folder.map(spec.name))? {
            missing.push(spec.name);
        }
    }
    Ok(missing)
}

/// The name of the map that holds the programs' constants; empty if the map is pinned. Only `explain` reads this map.
fn constants(folder: &Folder) -> Result<Vec<&'static str>, DatapathError> {
    Ok(if is_pinned(&folder.map(globals::PIN))? { Vec::new() } else { vec![globals::PIN] })
}

/// Whether the last agent has loaded programs for sockets, according to their pins.
fn serves_sockets(folder: &Folder) -> Result<bool, DatapathError> {
    for hook in &SOCKET_HOOKS {
        if is_pinned(&folder.programs().join(hook.program))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Names of programs without a pin, among the programs that every agent pins and the programs that are attached.
fn programs(pinned: &Pinned) -> Result<Vec<String>, DatapathError> {
    let of_devices = pinned.attachments()?.into_iter().map(|attachment| attachment.program.name);
    let of_xdp = pinned.xdp_attachments()?.into_iter().map(|attachment| attachment.program.name);
    let of_sockets = pinned.socket_attachments()?.into_iter().map(|attachment| attachment.program.to_owned());
    let mut missing: Vec<String> =
        PROGRAMS.into_iter().map(str::to_owned).chain(of_devices).chain(of_xdp).chain(of_sockets).collect();
    missing.sort();
    missing.dedup();
    let folder = pinned.pins().programs();
    missing.retain(|name| matches!(is_pinned(&folder.join(name)), Ok(false)));
    Ok(missing)
}

/// Hooks of served devices on which our program is missing, such as `eth0 ingress`.
fn hooks(pinned: &Pinned) -> Result<Vec<String>, DatapathError> {
    let devices = Table::<u32, DeviceInfo>::open(&layout::DEVICES, &pinned.pins().map(layout::DEVICES.name))?;
    let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
    let names =
        network::names(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
    let (tc, xdp) = (pinned.attachments()?, pinned.xdp_attachments()?);
    let mut missing = Vec::new();
    for (index, info) in devices.entries()? {
        let Some(name) = names.get(&index) else { continue };
        for direction in Direction::BOTH {
            if !tc.iter().any(|found| found.index == index && found.direction == direction) {
                missing.push(format!("{name} {}", direction.as_str()));
            }
        }
        let runs_xdp = info.flags & (device_flags::XDP_TX | device_flags::XDP_REDIRECT_TARGET) != 0;
        if runs_xdp && !xdp.iter().any(|found| found.index == index) {
            missing.push(format!("{name} xdp"));
        }
    }
    Ok(missing)
}
