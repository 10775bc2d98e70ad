//! glibc's resolver with a resolv.conf of its own.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::netns::Netns;

/// As kubelet writes it for a pod of the namespace `default`, with a server on the loopback.
const RESOLV_CONF: &str = "\
nameserver 127.0.0.1
search default.svc.cluster.local svc.cluster.local cluster.local
options ndots:5 timeout:1 attempts:1
";

/// A client in a network namespace whose resolv.conf names a DNS server at 127.0.0.1.
#[derive(Debug)]
pub struct Resolver {
    netns: Netns,
    resolv_conf: PathBuf,
}

impl Resolver {
    /// Writes the resolv.conf into `folder`.
    pub fn new(netns: Netns, folder: &Path) -> io::Result<Self> {
        let resolv_conf = folder.join("resolv.conf");
        fs::write(&resolv_conf, RESOLV_CONF)?;
        Ok(Self { netns, resolv_conf })
    }

    /// What `getent` prints for a name; empty if the name does not resolve. The process sees the resolv.conf in a mount
    /// namespace of its own.
    pub fn getent(&self, database: &str, name: &str) -> io::Result<String> {
        let script = "mount --bind \"$0\" /etc/resolv.conf && exec getent \"$1\" \"$2\"";
        let mut command = self.netns.command("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(&self.resolv_conf).args([database, name]);
        let output = command.output()?;
        // getent exits with 2 if the name does not resolve.
        match output.status.code() {
            Some(0 | 2) => String::from_utf8(output.stdout).map_err(io::Error::other),
            _ => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
        }
    }

    /// The addresses that the name has, sorted and without duplicates.
    pub fn addresses(&self, database: &str, name: &str) -> io::Result<Vec<String>> {
        let text = self.getent(database, name)?;
        let first = text.lines().filter_map(|line| line.split_whitespace().next());
        let mut addresses: Vec<String> = first.map(str::to_owned).collect();
        addresses.sort();
        addresses.dedup();
        Ok(addresses)
    }
}
