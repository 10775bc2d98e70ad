//! Leftovers of a kube-proxy in this network namespace: rules of iptables and nftables, the interface and virtual
//! servers of mode `ipvs`, sets of ipset. The search cannot tell whether that kube-proxy still runs. The programs
//! translate packets of Services before these rules, but the rules may still reject them.
//!
//! The module lists and removes leftovers with the tools of the host, chains of iptables in one transaction per table.
//! The search assumes that kube-proxy has left nothing for a missing tool to list, and reports a tool that fails.

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

/// Something that a kube-proxy has left in the kernel, and the commands that remove it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Leftover {
    /// The name of the leftover in messages, for example `3 sets of ipset`.
    pub what: String,
    #[serde(skip)]
    removal: Vec<Invocation>,
}

/// The result of a search: leftovers, and the tools that failed, whose leftovers are unknown.
#[derive(Debug, Default)]
pub struct Findings {
    /// The leftovers that were found, in the order in which they can be removed.
    pub leftovers: Vec<Leftover>,
    /// Errors of installed tools.
    pub errors: Vec<ToolError>,
}

/// An installed tool has failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot tell whether kube-proxy has left something: `{command}` fails: {reason}; run it by hand")]
pub struct ToolError {
    /// The tool with its arguments.
    pub(crate) command: String,
    /// Exit status and standard error of the tool, or the error of the kernel.
    pub(crate) reason: String,
}

/// A command to run, with its standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Invocation {
    program: &'static str,
    arguments: Vec<String>,
    input: String,
    /// Maximum number of attempts to run the command, with a [`PAUSE`] between two of them.
    attempts: u32,
}

/// Pause between two attempts. After the deletion of a rule, the kernel needs a moment to release the objects that the
/// rule used.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a leftover cannot be removed.
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
    /// A command that removes the leftover fails.
    pub fn remove(&self) -> Result<(), LeftoverError> {
        let failed = |source| LeftoverError { what: self.what.clone(), source };
        self.removal.iter().try_for_each(Invocation::run).map_err(failed)
    }
}

impl Invocation {
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

/// Searches the network namespace of the calling thread for leftovers. Changes nothing.
pub fn find() -> Findings {
    let mut findings = Findings::default();
    iptables::find(&mut findings);
    nftables(&mut findings);
    // IP sets come last, because they can be removed only after the rules that use them.
    ipvs::find(&mut findings);
    findings
}

impl Findings {
    /// Lines for the user: one with all leftovers and advice, and one for each tool that failed.
    pub fn report(&self) -> Vec<String> {
        advice(&self.leftovers).into_iter().chain(self.errors.iter().map(ToString::to_string)).collect()
    }

    /// The output of a tool, as [`output_of`] gives it; `None` if the tool is missing or fails. Adds a failure to the
    /// errors.
    fn output_of(&mut self, program: &str, arguments: &[&str]) -> Option<String> {
        output_of(program, arguments).unwrap_or_else(|error| {
            self.errors.push(error);
            None
        })
    }
}

/// One line with all leftovers and advice; `None` without leftovers.
pub(crate) fn advice(found: &[Leftover]) -> Option<String> {
    let list: Vec<&str> = found.iter().map(|leftover| &*leftover.what).collect();
    (!list.is_empty()).then(|| {
        format!(
            "kube-proxy is running or has left {}: after it has stopped, `lb-agent cleanup --kube-proxy` removes this (--dry-run \
             lists it)",
            list.join(", ")
        )
    })
}

/// Error messages by which a tool reports that the kernel lacks the subsystem, which therefore has no leftovers.
const UNSUPPORTED: [&str; 3] =
    ["Protocol not supported", "Protocol not available", "Operation not supported"];

/// The output of a tool; `None` if the tool is missing. Empty if the kernel does not have the subsystem.
fn output_of(program: &str, arguments: &[&str]) -> Result<Option<String>, ToolError> {
    let failed = |reason: String| ToolError { command: [&[program], arguments].concat().join(" "), reason };
    let output = Command::new(program).args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).output();
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error.to_string())),
    };
    if output.status.success() {
        return Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()));
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    if UNSUPPORTED.iter().any(|text| reason.contains(text)) {
        return Ok(Some(String::new()));
    }
    Err(failed(format!("{}: {}", output.status, reason.trim())))
}

/// Name and output of each installed save command of iptables.
pub(crate) fn saved_rules() -> Vec<(&'static str, Result<String, ToolError>)> {
    iptables::saved().into_iter().map(|((save, _), text)| (save, text)).collect()
}

/// The rules of nftables as JSON; `None` if the tool is missing. Empty if the kernel does not have the subsystem.
pub(crate) fn nft_ruleset() -> Result<Option<String>, ToolError> {
    output_of("nft", &["-j", "list", "ruleset"])
}

/// Finds the nftables tables of kube-proxy, by their name.
fn nftables(findings: &mut Findings) {
    let Some(tables) = findings.output_of("nft", &["list", "tables"]) else { return };
    for family in ["ip", "ip6"] {
        if tables.lines().any(|line| line.trim() == format!("table {family} kube-proxy")) {
            findings.leftovers.push(Leftover {
                what: format!("the nftables table `{family} kube-proxy`"),
                removal: vec![Invocation::new("nft", &["delete", "table", family, "kube-proxy"])],
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Option<String>, ToolError> {
        output_of("sh", &["-c", script])
    }

    #[test]
    fn missing_tool_has_left_nothing_and_failing_tool_is_an_error() {
        assert_eq!(output_of("/nowhere/nft", &["list", "tables"]).unwrap(), None);
        assert_eq!(shell("echo table ip kube-proxy").unwrap().as_deref(), Some("table ip kube-proxy\n"));
        let error = shell("echo Permission denied >&2; exit 4").unwrap_err().to_string();
        assert!(
            error.contains("sh -c echo") && error.contains("exit status: 4: Permission denied"),
            "{error}"
        );
    }

    #[test]
    fn kernel_without_the_subsystem_has_no_leftovers_of_it() {
        let unsupported =
            shell("echo 'Unable to initialize Netlink socket: Protocol not supported' >&2; exit 1");
        assert_eq!(unsupported.unwrap().as_deref(), Some(""));
    }

    #[test]
    fn findings_report_failed_tools() {
        let mut findings = Findings::default();
        assert_eq!(findings.output_of("sh", &["-c", "exit 3"]), None);
        let report = findings.report();
        assert!(matches!(&report[..], [line] if line.contains("`sh -c exit 3` fails")), "{report:?}");
    }
}
