//! The process of an agent that reads an API server.

use std::{
    ffi::OsStr,
    fs::File,
    path::Path,
    process::{Child, Stdio},
};

use lb_tests::{agent::binary, cleanup::Cleanup, netns::Netns};

/// A running agent. Dropping it kills the process and waits for its end.
pub(crate) struct RunningAgent {
    child: Child,
    cleanup: Option<Cleanup>,
}

/// The files of an agent.
pub(crate) struct Files<'a> {
    pub(crate) kubeconfig: &'a Path,
    pub(crate) bpffs: &'a Path,
    /// The file to which the agent's output is appended. It may contain the output of an earlier agent.
    pub(crate) log: &'a Path,
}

impl RunningAgent {
    /// Starts the agent of the node with this name in a namespace, with these further arguments of `run`.
    pub(crate) fn start(
        netns: &Netns,
        node: &str,
        files: &Files<'_>,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Self {
        let log = File::options().create(true).append(true).open(files.log).unwrap();
        let mut command = netns.command(binary());
        command.arg("run").arg("--kubeconfig").arg(files.kubeconfig).arg("--bpffs").arg(files.bpffs);
        command.args(["--node-name", node]).args(arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let (child, cleanup) = Cleanup::spawn(&mut command).unwrap();
        Self { child, cleanup: Some(cleanup) }
    }
}

impl Drop for RunningAgent {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
        self.cleanup.take().into_iter().for_each(Cleanup::disarm);
    }
}
