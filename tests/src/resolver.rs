//! Resolves names as programs do, with glibc, musl and dig, and with a resolv.conf that only these resolvers see.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::netns::Netns;

/// Content of resolv.conf as kubelet writes it for a pod in the namespace `default`, with a server at 127.0.0.1.
const RESOLV_CONF: &str = "\
nameserver 127.0.0.1
search default.svc.cluster.local svc.cluster.local cluster.local
options ndots:5
";
/// Path of the C source of a program that resolves names by musl.
const MUSL_SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/musl/resolve.c");

/// Runs resolvers in a network namespace, with a resolv.conf of their own.
#[derive(Debug)]
pub struct Resolver {
    netns: Netns,
    resolv_conf: PathBuf,
}

impl Resolver {
    /// Creates the resolver of a pod; writes its resolv.conf into `folder`.
    pub fn new(netns: Netns, folder: &Path) -> io::Result<Self> {
        Self::configured(netns, folder, RESOLV_CONF)
    }

    /// Creates a resolver; writes a resolv.conf with this content into `folder`.
    pub fn configured(netns: Netns, folder: &Path, content: &str) -> io::Result<Self> {
        let resolv_conf = folder.join("resolv.conf");
        fs::write(&resolv_conf, content)?;
        Ok(Self { netns, resolv_conf })
    }

    /// The output of `getent` for a name; empty if the name cannot be resolved.
    pub fn getent(&self, database: &str, name: &str) -> io::Result<String> {
        let output = self.output(&["getent", database, name])?;
        // The exit code 2 means that the name cannot be resolved.
        text(output, &[0, 2])
    }

    /// The addresses that glibc resolves a name to, sorted and without duplicates.
    pub fn addresses(&self, database: &str, name: &str) -> io::Result<Vec<String>> {
        let text = self.getent(database, name)?;
        Ok(sorted(text.lines().filter_map(|line| line.split_whitespace().next())))
    }

    /// The output of `dig` with these arguments.
    pub fn dig(&self, arguments: &[&str]) -> io::Result<String> {
        let output = self.output(&[&["dig", "+tries=1", "+time=3"], arguments].concat())?;
        // The exit code 9 means that no server answers.
        text(output, &[0, 9])
    }

    /// The addresses that musl resolves a name to, sorted; empty if it cannot be resolved. `program` is the path that
    /// [`build_for_musl`] has returned.
    pub fn musl(&self, program: &Path, name: &str) -> io::Result<Vec<String>> {
        let program = program.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
        let text = text(self.output(&[program, name])?, &[0, 2])?;
        Ok(sorted(text.lines()))
    }

    /// Runs a program in a mount namespace in which it sees this resolv.conf.
    pub fn output(&self, program: &[&str]) -> io::Result<Output> {
        let script = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
        let mut command = self.netns.command("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(&self.resolv_conf).args(program);
        command.output()
    }
}

/// Builds a static program in `folder` that resolves names by musl; returns its path.
pub fn build_for_musl(folder: &Path) -> io::Result<PathBuf> {
    let program = folder.join("resolve");
    let mut compiler = Command::new("musl-gcc");
    compiler.args(["-static", "-O1", "-Wall", "-Werror", MUSL_SOURCE, "-o"]).arg(&program);
    text(compiler.output()?, &[0])?;
    Ok(program)
}

/// The standard output of a program that must have exited with one of these codes.
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
