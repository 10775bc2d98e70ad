//! What a kube-proxy that is gone has left in this network namespace: rules of iptables and nftables, virtual servers of
//! IPVS, sets of ipset. Traffic never needs them, as packets of Services come past them translated; but they may refuse what they do not know.
//!
//! Looked for and removed with the tools that made them, each as one transaction; where a tool is missing, nothing is found.

mod iptables;
mod ipvs;

use std::{
    fmt,
    io::{self, Write as _},
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use serde::Serialize;

/// Something that kube-proxy has left, and how it is removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Leftover {
    /// What it is.
    pub what: String,
    #[serde(skip)]
    orders: Vec<Order>,
}

/// A command with what it reads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Order {
    program: &'static str,
    arguments: Vec<String>,
    input: String,
    /// How often it is tried, with a [`PAUSE`] between.
    attempts: u32,
}

/// In this time the kernel has let go of what a rule has used that is gone.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a leftover stays.
#[derive(Debug, thiserror::Error)]
#[error("cannot remove {what}: {source}; remove it by hand, or restart the node")]
pub struct LeftoverError {
    what: String,
    #[source]
    source: io::Error,
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Leftover {
    /// Removes it.
    ///
    /// # Errors
    /// A tool that has shown it refuses to remove it.
    pub fn remove(&self) -> Result<(), LeftoverError> {
        let failed = |source| LeftoverError { what: self.what.clone(), source };
        self.orders.iter().try_for_each(Order::run).map_err(failed)
    }
}

impl Order {
    fn new(program: &'static str, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self { program, arguments, input: String::new(), attempts: 1 }
    }

    fn run(&self) -> io::Result<()> {
        for _ in 1..self.attempts {
            if self.try_once().is_ok() {
                return Ok(());
            }
            sleep(PAUSE);
        }
        self.try_once()
    }

    fn try_once(&self) -> io::Result<()> {
        let mut command = Command::new(self.program);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let written = child.stdin.take().map(|mut stdin| stdin.write_all(self.input.as_bytes()));
        let output = child.wait_with_output()?;
        if output.status.success() {
            return written.unwrap_or(Ok(()));
        }
        let reason = String::from_utf8_lossy(&output.stderr);
        Err(io::Error::other(format!("{} {}: {}", self.program, self.arguments.join(" "), reason.trim())))
    }
}

/// Everything that kube-proxy has left in the network namespace of this thread. Changes nothing.
pub fn find() -> Vec<Leftover> {
    let mut found = iptables::find();
    found.extend(nftables());
    // Its sets can go when no rule looks into them.
    found.extend(ipvs::find());
    found
}

/// All of it in a line, with what to do; none where nothing is left.
pub fn advice(found: &[Leftover]) -> Option<String> {
    let list: Vec<&str> = found.iter().map(|leftover| &*leftover.what).collect();
    (!list.is_empty()).then(|| {
        format!(
            "kube-proxy runs here or has left {}: once it is gone, `lb-agent cleanup --kube-proxy` removes that (--dry-run \
             lists it)",
            list.join(", ")
        )
    })
}

/// What a tool prints; none where it is missing or fails, as one does that the kernel has no support for.
fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Its tables are its own.
fn nftables() -> Vec<Leftover> {
    let tables = output_of("nft", &["list", "tables"]).unwrap_or_default();
    ["ip", "ip6"]
        .into_iter()
        .filter(|family| tables.lines().any(|line| line.trim() == format!("table {family} kube-proxy")))
        .map(|family| Leftover {
            what: format!("the nftables table `{family} kube-proxy`"),
            orders: vec![Order::new("nft", &["delete", "table", family, "kube-proxy"])],
        })
        .collect()
}
