//! The request to stop the agent. When a task gets the request, it hands over what this agent does for the cluster
//! (such as announced addresses or a Lease). It then drops its receiver, to report that it is done.

use std::future;

use tokio::sync::watch;

/// Waits for the request to stop the agent; forever if the sender is closed.
pub(crate) async fn requested(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        future::pending::<()>().await;
    }
}
