//! The task that reads from the API server what is announced at layer 2.

use std::{convert::Infallible, sync::Arc};

use anyhow::{Context as _, anyhow};
use lb_core::announce::{advertisement::Advertised, cluster::Cluster, voters::Ballot};
use tokio::sync::watch;

use super::{state::State, tasks::Tasks};
use crate::kubernetes::{
    ApiServer, Events,
    announce::{self, Published},
};

/// The channels between the source of Services and the announcer.
pub(super) struct Announced {
    pub(super) advertised: watch::Sender<Advertised>,
    pub(super) cluster: watch::Sender<Cluster>,
    pub(super) ballots: watch::Receiver<Ballot>,
    pub(super) events: Events,
}

impl Announced {
    /// Spawns two tasks: one reads from the API server what is announced, and one publishes the conditions that the
    /// first task reports.
    pub(super) fn spawn(self, server: ApiServer, node: Arc<str>, state: Arc<State>, tasks: &mut Tasks) {
        let Self { advertised, cluster, ballots, events } = self;
        let (problem_sender, problems) = watch::channel(Vec::new());
        tasks.spawn("announcements", async move {
            let published = Published { advertised, cluster, problems: problem_sender };
            announce::run(server, node, ballots, (published, events)).await?;
            Err(anyhow!("the watch of announcements has ended"))
        });
        tasks.spawn("conditions of announcements", follow(problems, state));
    }
}

async fn follow(mut problems: watch::Receiver<Vec<String>>, state: Arc<State>) -> anyhow::Result<Infallible> {
    loop {
        problems.changed().await.context("the watch of announcements has ended")?;
        state.set_announce_conditions(problems.borrow_and_update().clone());
    }
}
