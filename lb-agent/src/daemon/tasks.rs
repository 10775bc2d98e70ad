//! The tasks of the agent, and the signals that stop it.

use std::convert::Infallible;

use anyhow::{Context as _, anyhow};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::JoinSet,
};

/// The tasks of the agent. Each runs until it fails, which ends the agent.
#[derive(Default)]
pub(super) struct Tasks(JoinSet<(&'static str, anyhow::Error)>);

impl Tasks {
    pub(super) fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = anyhow::Result<Infallible>> + Send + 'static,
    ) {
        self.0.spawn(async move {
            let Err(error) = task.await;
            (name, error)
        });
    }

    /// Aborts all tasks and waits until they have ended.
    pub(super) async fn stop(&mut self) {
        self.0.shutdown().await;
    }

    /// Waits until the first task fails; returns its error.
    pub(super) async fn failure(&mut self) -> anyhow::Error {
        match self.0.join_next().await {
            Some(Ok((name, error))) => error.context(format!("the task `{name}` has failed")),
            Some(Err(panic)) => anyhow!(panic).context("a task has panicked, which is a bug"),
            None => anyhow!("there is no task, which is a bug"),
        }
    }
}

/// The signals that stop the agent.
pub(super) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    pub(super) fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// Waits for the next signal; returns its name.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
