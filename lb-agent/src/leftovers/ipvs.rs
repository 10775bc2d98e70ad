//! Virtual servers of IPVS at the addresses that kube-proxy gave to its device.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Leftover, Order, output_of};

/// The dummy device that has the addresses of all Services.
const DEVICE: &str = "kube-ipvs0";

pub(super) fn find() -> Vec<Leftover> {
    let Some(listed) = output_of("ip", &["-o", "address", "show", "dev", DEVICE]) else { return Vec::new() };
    let addresses = addresses(&listed);
    let saved = output_of("ipvsadm", &["-S", "-n"]).unwrap_or_default();
    let servers = servers(&saved, &addresses);
    let mut orders: Vec<Order> =
        servers.iter().map(|(protocol, at)| Order::new("ipvsadm", &["-D", protocol, at])).collect();
    orders.push(Order::new("ip", &["link", "delete", "dev", DEVICE]));
    let (count, servers) = (addresses.len(), servers.len());
    let what =
        format!("the device {DEVICE} with {count} addresses and {servers} virtual servers of IPVS there");
    vec![Leftover { what, orders }]
}

/// Those in the output of `ip -o address show`, but for link-local ones.
fn addresses(listed: &str) -> BTreeSet<IpAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace().skip_while(|word| !["inet", "inet6"].contains(word)).skip(1);
        let address = words.next()?.split('/').next()?.parse().ok()?;
        (!line.contains("scope link")).then_some(address)
    };
    listed.lines().filter_map(address).collect()
}

/// Protocol (as ipvsadm's option) and address of the virtual servers at one of the addresses, in the output of `ipvsadm -S -n`.
fn servers<'a>(saved: &'a str, addresses: &BTreeSet<IpAddr>) -> Vec<(&'a str, &'a str)> {
    let server = |line: &'a str| {
        let mut words = line.strip_prefix("-A ")?.split(' ');
        let (protocol, at) = (words.next()?, words.next()?);
        let address: IpAddr = at.rsplit_once(':')?.0.trim_matches(['[', ']']).parse().ok()?;
        addresses.contains(&address).then_some((protocol, at))
    };
    saved.lines().filter_map(server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_virtual_servers_at_addresses_of_its_device_are_kube_proxys() {
        let listed = "\
7: kube-ipvs0    inet 10.96.0.1/32 scope global kube-ipvs0\\       valid_lft forever preferred_lft forever
7: kube-ipvs0    inet6 fd00:10:96::a/128 scope global \\       valid_lft forever preferred_lft forever
7: kube-ipvs0    inet6 fe80::1/64 scope link \\       valid_lft forever preferred_lft forever
";
        let addresses = addresses(listed);
        assert_eq!(addresses.len(), 2);
        let saved = "\
-A -t 10.96.0.1:443 -s rr
-a -t 10.96.0.1:443 -r 192.0.2.1:6443 -m -w 1
-A -u [fd00:10:96::a]:53 -s rr
-A -t 192.0.2.10:80 -s wlc
-A -f 7 -s rr
";
        assert_eq!(servers(saved, &addresses), [("-t", "10.96.0.1:443"), ("-u", "[fd00:10:96::a]:53")]);
    }
}
