use std::{net::IpAddr, ops::RangeInclusive};

use ipnet::IpNet;
use lb_common::{Address, MAX_NETWORKS, Network, Networks, Settings, settings_flags};

use super::Primary;

/// The facts from which the content of the map `SETTINGS` is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsInputs {
    /// Networks whose clients are internal; `None` until the API server names them.
    pub inside: Option<Vec<IpNet>>,
    /// Ranges of cluster IPs; `None` until the API server names them.
    pub service_ranges: Option<Vec<IpNet>>,
    /// Whether packets to unassigned addresses in `service_ranges` are dropped; `None` until the map `VIPS` is
    /// complete.
    pub drops_unknown_vips: Option<bool>,
    /// The primary addresses of the node: the source addresses of masqueraded packets whose routes name no source, and
    /// the outer source addresses of tunnelled packets.
    pub primary: Primary,
    /// Range of source ports for masqueraded packets.
    pub ports: RangeInclusive<u16>,
    /// Networks (`--dsr-peers`) of machines, other than the nodes, that may send tunnelled packets to backends on this
    /// node.
    pub peers: Vec<IpNet>,
    /// Networks whose external clients may use no Service: those of `--deny-source`, and those behind IPsec policies
    /// that replies would bypass.
    pub denied_sources: Vec<IpNet>,
    /// Whether tunnels are GUE instead of IP in IP.
    pub gue: bool,
    /// Whether the next hop of a packet depends only on its destination, device and protocol, so that flows may share a
    /// cached next hop.
    pub routes_by_destination: bool,
}

impl SettingsInputs {
    /// The settings, and conditions such as too many ranges. Unknown inputs keep their `earlier` values.
    pub fn settings(&self, earlier: &Settings) -> (Settings, Vec<String>) {
        let mut problems = Vec::new();
        let mut list = |what: &str, known: &Option<Vec<IpNet>>, earlier: Networks| match known {
            Some(networks) => {
                let (list, problem) = fit(what, networks);
                problems.extend(problem);
                list
            }
            None => earlier,
        };
        let settings = Settings {
            peers: list("peers", &Some(self.peers.clone()), earlier.peers),
            denied: list(
                "networks of --deny-source and behind IPsec policies",
                &Some(self.denied_sources.clone()),
                earlier.denied,
            ),
            internal: list("networks of internal clients", &self.inside, earlier.internal),
            service_ranges: list("cluster IP ranges", &self.service_ranges, earlier.service_ranges),
            source_v4: self.primary.v4.map_or_else(unspecified, Address::from),
            source_v6: self.primary.v6.map_or_else(unspecified, Address::from),
            first_port: *self.ports.start(),
            ports: u16::try_from(self.ports.len()).unwrap_or(u16::MAX),
            flags: self.flags(earlier.flags),
        };
        (settings, problems)
    }

    fn flags(&self, earlier: u32) -> u32 {
        let drops = match self.drops_unknown_vips {
            Some(true) => settings_flags::DROP_UNKNOWN_VIPS,
            Some(false) => 0,
            None => earlier & settings_flags::DROP_UNKNOWN_VIPS,
        };
        let flag = |holds, flag| if holds { flag } else { 0 };
        drops
            | flag(self.gue, settings_flags::GUE)
            | flag(self.routes_by_destination, settings_flags::ROUTES_BY_DESTINATION)
    }
}

fn unspecified() -> Address {
    bytemuck::Zeroable::zeroed()
}

/// Merges adjacent networks, and keeps as many as the map can hold. Returns a condition that names the networks left
/// out.
fn fit(what: &str, networks: &[IpNet]) -> (Networks, Option<String>) {
    let mut merged = IpNet::aggregate(&networks.to_vec());
    merged.sort_unstable();
    let list = Networks::new(merged.iter().map(|net| Network::new(net.addr().into(), net.prefix_len())));
    let problem = merged.get(MAX_NETWORKS..).filter(|left_out| !left_out.is_empty()).map(|left_out| {
        let left_out: Vec<String> = left_out.iter().map(ToString::to_string).collect();
        format!(
            "there are more than {MAX_NETWORKS} {what}: {} are ignored; configure fewer and larger ones",
            left_out.join(", ")
        )
    });
    (list, problem)
}

/// Converts a list of networks from the map `SETTINGS`.
pub fn networks(list: &Networks) -> Vec<IpNet> {
    let net = |network: &Network| {
        let address = IpAddr::from(network.address);
        let bits = u128::from_be_bytes(*network.mask.bytes()).count_ones();
        let prefix = if address.is_ipv4() { bits.saturating_sub(96) } else { bits };
        IpNet::new(address, u8::try_from(prefix).ok()?).ok()
    };
    list.networks.iter().take(list.count as usize).filter_map(net).collect()
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn address(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn known() -> SettingsInputs {
        SettingsInputs {
            inside: Some(nets(&["10.244.0.0/16", "fd00:10:244::/48"])),
            service_ranges: Some(nets(&["10.96.0.0/12"])),
            drops_unknown_vips: Some(true),
            primary: Primary { v4: Some("192.0.2.1".parse().unwrap()), v6: None },
            ports: 10_000..=29_999,
            peers: nets(&["192.0.2.0/24"]),
            denied_sources: nets(&["203.0.113.0/24"]),
            gue: true,
            routes_by_destination: false,
        }
    }

    #[test]
    fn known_inputs_are_applied() {
        let (settings, problems) = known().settings(&Settings::zeroed());
        assert!(problems.is_empty());
        assert!(settings.internal.contains(&address("10.244.7.7")));
        assert!(settings.internal.contains(&address("fd00:10:244::9")));
        assert!(!settings.internal.contains(&address("10.96.0.1")));
        assert!(settings.service_ranges.contains(&address("10.96.0.1")));
        assert_eq!(settings.flags, settings_flags::DROP_UNKNOWN_VIPS | settings_flags::GUE);
        assert!(
            settings.peers.contains(&address("192.0.2.7")) && !settings.peers.contains(&address("192.0.3.7"))
        );
        assert_eq!((settings.source_v4, settings.source_v6), (address("192.0.2.1"), unspecified()));
        assert_eq!((settings.first_port, settings.ports), (10_000, 20_000));
    }

    #[test]
    fn networks_survive_a_round_trip() {
        for texts in [&[][..], &["10.96.0.0/12", "192.0.2.1/32", "fd00:10:244::/48", "fd01::1/128"]] {
            assert_eq!(networks(&fit("networks", &nets(texts)).0), nets(texts));
        }
    }

    #[test]
    fn unknown_inputs_keep_their_earlier_values() {
        let (earlier, _) = known().settings(&Settings::zeroed());
        let restarted =
            SettingsInputs { inside: None, service_ranges: None, drops_unknown_vips: None, ..known() };
        assert_eq!(restarted.settings(&earlier).0, earlier);
        let (first, _) = restarted.settings(&Settings::zeroed());
        assert_eq!((first.internal.count, first.flags), (0, settings_flags::GUE));
        let nothing_inside = SettingsInputs { inside: Some(Vec::new()), ..known() };
        assert_eq!(nothing_inside.settings(&earlier).0.internal.count, 0);
    }

    #[test]
    fn adjacent_networks_are_merged_and_excess_ones_named() {
        let halves: Vec<IpNet> = (0..32).map(|n| format!("10.{n}.0.0/16").parse().unwrap()).collect();
        let (list, problem) = fit("networks", &halves);
        assert_eq!((list.count, problem), (1, None));
        let scattered: Vec<IpNet> =
            (0..18).map(|n| format!("10.{}.0.0/16", n * 2).parse().unwrap()).collect();
        let (list, problem) = fit("networks", &scattered);
        assert_eq!(list.count as usize, MAX_NETWORKS);
        let problem = problem.unwrap();
        assert!(problem.contains("10.32.0.0/16, 10.34.0.0/16 are ignored"), "{problem}");
    }

    #[test]
    fn range_of_all_ports_is_counted() {
        let (settings, _) = SettingsInputs { ports: 1..=u16::MAX, ..known() }.settings(&Settings::zeroed());
        assert_eq!((settings.first_port, settings.ports), (1, u16::MAX));
    }
}
