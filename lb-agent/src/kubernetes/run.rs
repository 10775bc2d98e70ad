//! The task that keeps the rest of the agent in step with the API server.

use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use lb_core::model::{Change, SourceEvent};
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::{ApiServer, KubernetesError, Published, watch::Watch};

/// Watches the API server until the receiver of `events` is dropped. Sends what changes, [`SourceEvent::Synchronised`]
/// once when all Services and EndpointSlices were listed, and [`SourceEvent::Complete`] as soon as none is left that
/// could never be read: until then nobody knows what those describe. `node_name` is the name of the own Node.
///
/// # Errors
///
/// A configuration that leads to no API server. One that does not answer is asked until it does.
pub async fn run(
    server: ApiServer,
    node_name: &str,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
) -> Result<(), KubernetesError> {
    let config = client_config(server).await?;
    info!(server = %config.cluster_url, node = node_name, "watching Services and EndpointSlices");
    let client = Client::try_from(config).map_err(Box::new)?;
    let follower = Follower {
        services: Watch::new(client.clone()),
        slices: Watch::new(client),
        events,
        published,
        synchronised: false,
        complete: false,
        away: false,
    };
    follower.follow().await
}

/// Where the API server is and who we are to it; nothing is asked yet.
pub(super) async fn client_config(server: ApiServer) -> Result<Config, KubernetesError> {
    match server {
        ApiServer::InCluster => Config::incluster().map_err(|error| Box::new(error).into()),
        ApiServer::Kubeconfig(path) => {
            let refused =
                |source| KubernetesError::Kubeconfig { path: path.clone(), source: Box::new(source) };
            let file = Kubeconfig::read_from(&path).map_err(refused)?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(refused)
        }
    }
}

struct Follower {
    services: Watch<Service>,
    slices: Watch<EndpointSlice>,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
    /// Whether the rest of the agent was told so.
    synchronised: bool,
    complete: bool,
    /// Whether people were told that the API server cannot be asked.
    away: bool,
}

impl Follower {
    async fn follow(mut self) -> Result<(), KubernetesError> {
        loop {
            let changes = tokio::select! {
                changes = self.services.next() => changes,
                changes = self.slices.next() => changes,
                () = self.events.closed() => return Ok(()),
            };
            self.tell_people();
            for event in self.due(changes.ok_or(KubernetesError::Ended)?) {
                if self.events.send(event).await.is_err() {
                    return Ok(());
                }
            }
        }
    }

    /// What the rest of the agent is told.
    fn due(&mut self, changes: Vec<Change>) -> Vec<SourceEvent> {
        let (services, slices) = (self.services.objects(), self.slices.objects());
        let mut events = Vec::new();
        if !changes.is_empty() {
            events.push(SourceEvent::Changes(changes));
        }
        if !self.synchronised && services.is_listed() && slices.is_listed() {
            self.synchronised = true;
            events.push(SourceEvent::Synchronised);
        }
        if !self.complete && services.is_complete() && slices.is_complete() {
            self.complete = true;
            events.push(SourceEvent::Complete);
        }
        events
    }

    /// An API server that does not answer is said once, however many attempts fail.
    fn tell_people(&mut self) {
        let failures = [self.services.failure(), self.slices.failure()];
        let failure = failures.into_iter().flatten().next().map(|why| {
            format!("cannot ask the API server for {why}; the last known state stays, and it is tried again")
        });
        match &failure {
            Some(failure) if !self.away => warn!("{failure}"),
            None if self.away => info!("the API server answers again"),
            Some(_) | None => {}
        }
        self.away = failure.is_some();
        let objects = self.services.objects().problems().chain(self.slices.objects().problems());
        let now: Vec<String> = failure.into_iter().chain(objects.map(ToOwned::to_owned)).collect();
        self.published.problems.send_if_modified(|problems| {
            let modified = *problems != now;
            if modified {
                *problems = now;
            }
            modified
        });
    }
}
