//! The kernel's counters of a network namespace (RFC 1213, RFC 4293).

use std::{fs, io};

use crate::netns::Netns;

/// The counter `field` of a protocol (`Icmp`, `Udp`), of IPv4 or of IPv6: for example `InDestUnreachs` of `Icmp`.
///
/// # Errors
/// The kernel has no such counter, or the file of counters cannot be read.
pub fn counter(netns: &Netns, is_ipv6: bool, protocol: &str, field: &str) -> io::Result<u64> {
    let file = if is_ipv6 { "snmp6" } else { "snmp" };
    let text = netns.run(|| fs::read_to_string(format!("/proc/thread-self/net/{file}")))?;
    let found = if is_ipv6 { of_ipv6(&text, protocol, field) } else { of_ipv4(&text, protocol, field) };
    found.ok_or_else(|| io::Error::other(format!("{file} has no counter {field} of {protocol}")))
}

/// Reads a counter from the text of the file `snmp`, which has a line of names and a line of values for each protocol.
fn of_ipv4(text: &str, protocol: &str, field: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(": "));
    let mut columns = lines.next()?.split(' ').zip(lines.next()?.split(' '));
    columns.find(|(name, _)| *name == field)?.1.parse().ok()
}

/// Reads a counter from the text of the file `snmp6`, which has a line with name and value for each counter.
fn of_ipv6(text: &str, protocol: &str, field: &str) -> Option<u64> {
    let name = format!("{protocol}6{field}");
    let mut counters = text.lines().filter_map(|line| line.split_once(char::is_whitespace));
    counters.find(|(found, _)| *found == name)?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_protocol_and_field() {
        let v4 = "Ip: Forwarding InErrors\nIp: 1 2\nIcmp: InMsgs InErrors\nIcmp: 3 4\nIcmpMsg: InType3\nIcmpMsg: 5\n";
        assert_eq!(of_ipv4(v4, "Icmp", "InErrors"), Some(4));
        assert_eq!(of_ipv4(v4, "Udp", "InErrors"), None);
        assert_eq!(of_ipv4(v4, "Icmp", "NoPorts"), None);
        let v6 = "Ip6InErrors                     \t1\nUdp6NoPorts                     \t7\n";
        assert_eq!(of_ipv6(v6, "Udp", "NoPorts"), Some(7));
        assert_eq!(of_ipv6(v6, "Udp", "InErrors"), None);
    }
}
