//! The name servers in `resolv.conf`.

use std::net::{IpAddr, SocketAddr};

/// Maximum number of servers, as in CoreDNS. Further ones are ignored.
const MOST: usize = 15;
const PORT: u16 = 53;

/// The addresses of the `nameserver` lines. Other lines tell a client how to complete names and how to ask; they do not
/// apply to a server. Comments may have any encoding.
pub fn upstreams_of(bytes: &[u8]) -> Vec<SocketAddr> {
    let mut servers = Vec::new();
    for line in String::from_utf8_lossy(bytes).lines() {
        let mut words = line.split_ascii_whitespace();
        if words.next() != Some("nameserver") {
            continue;
        }
        let address = words.next().and_then(|word| word.parse::<IpAddr>().ok());
        let address = address.map(|address| SocketAddr::new(address, PORT));
        servers.extend(address.filter(|address| !servers.contains(address)));
    }
    servers.truncate(MOST);
    servers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nameservers_are_read_once_each_and_other_lines_are_ignored() {
        let text = b"# nameserver 1.1.1.1\n# caf\xe9\nsearch a b\nnameserver 192.0.2.1\n nameserver\t2001:db8::1 # x\n\
                    nameserver 192.0.2.1\nnameserver dns.example\noptions ndots:5\n";
        let texts: Vec<String> = upstreams_of(text).iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["192.0.2.1:53", "[2001:db8::1]:53"]);
    }
}
