//! The name servers in `resolv.conf`.

use std::net::{SocketAddr, SocketAddrV6};

use rustix::net::{AddressFamily, SocketType, netdevice::name_to_index, socket};

/// Maximum number of servers, as in CoreDNS. The parser ignores further servers.
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
        let server = words.next().and_then(server);
        servers.extend(server.filter(|server| !servers.contains(server)));
    }
    servers.truncate(MOST);
    servers
}

/// The server with this address. A link-local address has a zone, which is the name or the index of an interface, such
/// as `fe80::1%eth0`: routers announce such servers (RFC 8106). `None` if there is no such interface.
fn server(word: &str) -> Option<SocketAddr> {
    let Some((address, zone)) = word.split_once('%') else {
        return Some(SocketAddr::new(word.parse().ok()?, PORT));
    };
    let index = zone.parse().ok().or_else(|| index_of(zone))?;
    Some(SocketAddrV6::new(address.parse().ok()?, PORT, 0, index).into())
}

fn index_of(interface: &str) -> Option<u32> {
    // Any socket will do: it only leads to the network namespace.
    let socket = socket(AddressFamily::UNIX, SocketType::DGRAM, None).ok()?;
    name_to_index(socket, interface).ok()
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
    #[test]
    fn link_local_server_has_the_index_of_its_interface() {
        let text = b"nameserver fe80::1%lo\nnameserver fe80::2%7\nnameserver fe80::3%nowhere\n";
        let texts: Vec<String> = upstreams_of(text).iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["[fe80::1%1]:53", "[fe80::2%7]:53"]);
    }
}
