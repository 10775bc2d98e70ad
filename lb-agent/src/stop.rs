//! The request to stop: tasks hand over what this agent does for the cluster, and drop their receivers.

use std::future;

use tokio::sync::watch;

/// Waits for the request to stop; forever if its sender is closed.
pub(crate) async fn requested(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        future::pending::<()>().await;
    }
}
