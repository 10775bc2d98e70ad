//! Resolvers of programs, with a resolv.conf of their own: those of glibc, musl and dig.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::netns::Netns;

/// As kubelet writes it for a pod of the namespace `default`, with a server on the loopback.
const RESOLV_CONF: &str = "\
nameserver 127.0.0.1
search default.svc.cluster.local svc.cluster.local cluster.local
options ndots:5 timeout:1 attempts:1
";
/// Source of the program that asks by musl's resolver.
const MUSL_SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/musl/resolve.c");

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

    /// What `getent` prints for a name; empty if the name does not resolve.
    pub fn getent(&self, database: &str, name: &str) -> io::Result<String> {
        let output = self.output(&["getent", database, name])?;
        // getent exits with 2 if the name does not resolve.
        text(output, &[0, 2])
    }

    /// The addresses that glibc has for the name, sorted and without duplicates.
    pub fn addresses(&self, database: &str, name: &str) -> io::Result<Vec<String>> {
        let text = self.getent(database, name)?;
        Ok(sorted(text.lines().filter_map(|line| line.split_whitespace().next())))
    }

    /// What `dig` prints.
    pub fn dig(&self, arguments: &[&str]) -> io::Result<String> {
        let output = self.output(&[&["dig", "+tries=1", "+time=3"], arguments].concat())?;
        // dig exits with 9 if no server answers.
        text(output, &[0, 9])
    }

    /// The addresses that musl has for the name, sorted; none if it does not resolve. `program` is that of
    /// [`build_for_musl`].
    pub fn musl(&self, program: &Path, name: &str) -> io::Result<Vec<String>> {
        let program = program.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
        let text = text(self.output(&[program, name])?, &[0, 2])?;
        Ok(sorted(text.lines()))
    }

    /// Runs a program, which sees the resolv.conf in a mount namespace of its own.
    fn output(&self, program: &[&str]) -> io::Result<Output> {
        let script = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
        let mut command = self.netns.command("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(&self.resolv_conf).args(program);
        command.output()
    }
}

/// Builds a static program in `folder` that asks by musl's resolver.
pub fn build_for_musl(folder: &Path) -> io::Result<PathBuf> {
    let program = folder.join("resolve");
    let mut compiler = Command::new("musl-gcc");
    compiler.args(["-static", "-O1", "-Wall", "-Werror", MUSL_SOURCE, "-o"]).arg(&program);
    text(compiler.output()?, &[0])?;
    Ok(program)
}

/// The standard output, if the program has exited with one of these codes.
fn text(output: Output, codes: &[i32]) -> io::Result<String> {
    match output.status.code() {
        Some(code) if codes.contains(&code) => String::from_utf8(output.stdout).map_err(io::Error::other),
        _ => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

fn sorted<'a>(words: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut words: Vec<String> = words.map(str::to_owned).collect();
    words.sort();
    words.dedup();
    words
}
