//! Runs BIRD in the namespaces of nodes and routers.

use std::path::Path;

use anyhow::Result;

use crate::{daemon::Daemon, netns::Netns};

/// Starts BIRD in a namespace. BIRD's files are in `folder`: `NAME.conf`, which must exist, `NAME.ctl` (the control
/// socket), `NAME.pid`, and `NAME.log`.
///
/// # Errors
/// BIRD cannot be started.
pub fn start(netns: &Netns, folder: &Path, name: &str) -> Result<Daemon> {
    let path = |end: &str| folder.join(format!("{name}.{end}"));
    let mut command = netns.command("bird");
    command.arg("-f").arg("-c").arg(path("conf")).arg("-s").arg(path("ctl")).arg("-P").arg(path("pid"));
    Daemon::start_with_log(&mut command, &path("log"))
}

/// The configuration of a router that learns routes from nodes. The router spreads packets over the nodes that announce
/// the same destination.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// The router's addresses in the network of the nodes, IPv4 first.
    pub addresses: [&'a str; 2],
    /// The start of a node's address in that network, IPv4 first: `10.9.0.` and `fd00:9::`. The node's number follows,
    /// in hexadecimal in IPv6.
    pub networks: [&'a str; 2],
    /// Number of nodes; they are numbered from 1.
    pub nodes: usize,
    /// TCP port of BGP, on both sides.
    pub port: u16,
    /// Password of the IPv4 sessions; `None` without one.
    pub password: Option<&'a str>,
    /// Whether the router monitors the nodes with BFD, which detects a dead node after 300 ms.
    pub bfd: bool,
}

/// Number of the autonomous system of the nodes.
pub const NODES_AS: u32 = 64_500;
/// Number of the autonomous system of the router.
pub const ROUTER_AS: u32 = 64_501;

impl Router<'_> {
    /// BIRD's configuration: a session of each family with each node (`n1`, `n1x6`), and equal-cost routes.
    pub fn config(&self) -> String {
        let mut text = format!("router id {};\nprotocol device {{\n}}\n", self.addresses[0]);
        if self.bfd {
            text += "protocol bfd {\n}\n";
        }
        for family in ["ipv4", "ipv6"] {
            text += &format!(
                "protocol kernel {{ merge paths on; {family} {{ import none; export where source = RTS_BGP; }}; }}\n"
            );
        }
        for number in 1..=self.nodes {
            let [v4, v6] = self.networks;
            text += &self.session(&format!("n{number}"), 0, &format!("{v4}{number}"));
            text += &self.session(&format!("n{number}x6"), 1, &format!("{v6}{number:x}"));
        }
        text
    }

    fn session(&self, name: &str, family: usize, neighbour: &str) -> String {
        let Self { addresses, port, password, bfd, .. } = self;
        let bfd =
            if *bfd { "bfd { min rx interval 100 ms; min tx interval 100 ms; multiplier 3; };" } else { "" };
        let password = password.filter(|_| family == 0).map(|it| format!("password \"{it}\";"));
        format!(
            "protocol bgp {name} {{\n  local {} port {port} as {ROUTER_AS};\n  neighbor {neighbour} as {NODES_AS};\n  {}\n  \
             connect delay time 1; connect retry time 1; error wait time 1, 2;\n  {bfd}\n  \
             {} {{ import all; export none; }};\n}}\n",
            addresses[family],
            password.unwrap_or_default(),
            ["ipv4", "ipv6"][family]
        )
    }
}
