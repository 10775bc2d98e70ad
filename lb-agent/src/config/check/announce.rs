//! The settings for announcing load balancer addresses.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc};

use lb_core::announce::lease::Prefer;

use crate::{
    announce::{
        Member,
        bgp::{BirdPaths, Options as BgpOptions},
    },
    cli::{AnnouncePrefer, RunArgs},
    config::{
        AnnounceConfig, Source,
        error::{ConfigError, refused},
    },
};

/// The default of `--announce-port`.
const PORT: u16 = 7947;
/// Default path of BIRD's control socket: that of Debian.
const BIRD_SOCKET: &str = "/run/bird/bird.ctl";

/// Checks the settings of the members that share addresses.
pub(in crate::config) fn announce(
    given: &RunArgs,
    source: &Source,
    node: &str,
) -> Result<AnnounceConfig, ConfigError> {
    Ok(AnnounceConfig {
        members: members(given, source, node)?,
        port: port(given, source)?,
        key_file: given.announce_key_file.clone(),
        prefer: match given.announce_prefer {
            None | Some(AnnouncePrefer::Availability) => Prefer::Availability,
            Some(AnnouncePrefer::Single) => Prefer::Single,
        },
    })
}

/// The members of `--announce-member`, which needs `--manifests` and a key, and must include this node.
fn members(
    given: &RunArgs,
    source: &Source,
    node: &str,
) -> Result<BTreeMap<Arc<str>, SocketAddr>, ConfigError> {
    const SETTING: &str = "--announce-member";
    let mut members = BTreeMap::new();
    for text in given.announce_member.iter().flatten().filter(|text| !text.is_empty()) {
        let Member { name, address } = text.parse().map_err(|why: String| refused(SETTING, text, why))?;
        if members.insert(name, address).is_some() {
            return Err(refused(SETTING, text, "the node is named twice: give each one once"));
        }
    }
    let Some(first) = members.keys().next() else { return Ok(members) };
    if matches!(source, Source::ApiServer(_)) {
        let why = "it is for --manifests: with an API server, --announce makes its Nodes the members";
        return Err(refused(SETTING, first, why));
    }
    if !members.contains_key(node) {
        let why = format!("the members must include this node: add {node}=ADDR:PORT, or set --node-name");
        return Err(refused(SETTING, members.keys().map(|name| &**name).collect::<Vec<_>>().join(","), why));
    }
    if given.announce_key_file.is_none() {
        return Err(refused(SETTING, first, "members need a key: give --announce-key-file"));
    }
    Ok(members)
}

/// The UDP port of `--announce`, which needs an API server and a key; `None` if `--announce` is not given.
fn port(given: &RunArgs, source: &Source) -> Result<Option<u16>, ConfigError> {
    const SETTING: &str = "--announce";
    match (source, &given.announce_key_file) {
        _ if !given.announce => Ok(None),
        (Source::Manifests(_), _) => {
            let why = "with --manifests the agent announces what L2Advertisements there say in any case: remove this \
                       setting, and name the nodes that share addresses with --announce-member";
            Err(refused(SETTING, true, why))
        }
        (Source::ApiServer(_), None) => {
            let why = "the nodes authenticate their messages with a key: give --announce-key-file";
            Err(refused(SETTING, true, why))
        }
        (Source::ApiServer(_), Some(_)) if given.announce_port == Some(0) => {
            Err(refused("--announce-port", 0, "all nodes need the same port: give one from 1 to 65535"))
        }
        (Source::ApiServer(_), Some(_)) => Ok(Some(given.announce_port.unwrap_or(PORT))),
    }
}

/// Checks the settings of announcements by BGP; `None` without `--announce-table`, which `--bird-config` needs.
pub(in crate::config) fn announce_by_bgp(given: &RunArgs) -> Result<Option<BgpOptions>, ConfigError> {
    let Some(table) = given.announce_table else {
        return match &given.bird_config {
            Some(file) => Err(refused("--bird-config", file.display(), "it needs --announce-table")),
            None => Ok(None),
        };
    };
    if matches!(table, 0 | 253..=255) {
        let why = "the kernel uses this table: give a number from 1 to 252, or a greater one than 255";
        return Err(refused("--announce-table", table, why));
    }
    let socket = given.bird_socket.clone().unwrap_or_else(|| PathBuf::from(BIRD_SOCKET));
    let bird = given.bird_config.clone().map(|file| BirdPaths { file, socket });
    Ok(Some(BgpOptions { table, bird }))
}
