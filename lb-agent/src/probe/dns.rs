//! Probes by a DNS question over UDP.

use std::net::SocketAddr;

use lb_core::probe::{Failure, Reason};

/// Asks the server for a name. Every answer is good, including that the name does not exist, unless the server says
/// that it cannot or does not want to answer.
pub(super) async fn ask(server: SocketAddr, name: &str) -> Result<(), Failure> {
    let code = lb_dns::response_code(server, name).await.map_err(|error| super::send::failure(&error))?;
    if code.is_usable {
        return Ok(());
    }
    Err(Failure::new(Reason::Dns, format!("response code {}", code.text)))
}
