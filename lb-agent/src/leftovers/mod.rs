//! Leftovers of a kube-proxy in this network namespace: rules of iptables and nftables, virtual servers of IPVS, sets
//! of ipset. The programs translate packets of Services before these rules, but the rules may still reject them.
//!
//! Leftovers are listed and removed with the tools that created them, each in one transaction. If a tool is missing,
//! its leftovers are not found.

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

/// A leftover, and the commands that remove it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Leftover {
    /// Description.
    pub what: String,
    #[serde(skip)]
    orders: Vec<Order>,
}

/// A command with its standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Order {
    program: &'static str,
    arguments: Vec<String>,
    input: String,
    /// Number of attempts, with a [`PAUSE`] between them.
    attempts: u32,
}

/// Pause between attempts: the kernel releases objects that a deleted rule used after a moment.
const PAUSE: Duration = Duration::from_millis(100);

/// A leftover cannot be removed.
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
    /// Removes the leftover.
    ///
    /// # Errors
    /// The tool that listed the leftover refuses to remove it.
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

/// Lists the leftovers in the network namespace of this thread. Changes nothing.
pub fn find() -> Vec<Leftover> {
    let mut found = iptables::find();
    found.extend(nftables());
    // Last, because sets can be removed only after the rules that use them.
    found.extend(ipvs::find());
    found
}

/// One line with all leftovers and advice; `None` without leftovers.
pub fn advice(found: &[Leftover]) -> Option<String> {
    let list: Vec<&str> = found.iter().map(|leftover| &*leftover.what).collect();
    (!list.is_empty()).then(|| {
        format!(
            "kube-proxy is running or has left {}: after it has stopped, `lb-agent cleanup --kube-proxy` removes this (--dry-run \
             lists it)",
            list.join(", ")
        )
    })
}

/// The output of a tool; `None` if the tool is missing or fails, for example without support by the kernel.
fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Tables of kube-proxy, which no other program uses.
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
