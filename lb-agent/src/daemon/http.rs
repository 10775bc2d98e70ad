//! Serving HTTP on an address that may not be free yet.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use axum::Router;
use tokio::{net::TcpListener, time};
use tracing::{info, warn};

/// How long to wait before a busy address is tried again.
const PAUSE: Duration = Duration::from_secs(5);

/// Serves `router` on `address` for ever. Like kube-proxy this keeps trying where it cannot: the data plane is worth
/// more than its health check. It is said once.
pub(super) async fn serve(
    what: &'static str,
    address: SocketAddr,
    router: Router,
) -> anyhow::Result<Infallible> {
    let mut said = false;
    loop {
        let error = match TcpListener::bind(address).await {
            Ok(listener) => {
                info!(%address, "serving {what}");
                said = false;
                match axum::serve(listener, router.clone()).await {
                    Ok(()) => continue,
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        if !said {
            said = true;
            warn!(%address, %error, "cannot serve {what}: free the address or give another one; trying again");
        }
        time::sleep(PAUSE).await;
    }
}
