//! The request to stop: a task that gets it hands over what this agent does for the cluster, and drops its receiver.

use std::future;

use tokio::sync::watch;

/// Waits until the agent shall stop; forever if the sender is closed.
pub(crate) async fn requested(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        future::pending::<()>().await;
    }
}
