//! Probes by a DNS question over UDP.

use std::net::SocketAddr;

use lb_core::probe::{Failure, Reason};

/// Sends the server a DNS query for `name`. The probe succeeds with any response, including NXDOMAIN, except SERVFAIL
/// and REFUSED.
pub(super) async fn ask(server: SocketAddr, name: &str) -> Result<(), Failure> {
    let code = lb_dns::response_code(server, name).await.map_err(|error| super::send::failure(&error))?;
    if code.is_usable {
        return Ok(());
    }
    Err(Failure::new(Reason::Dns, format!("response code {}", code.text)))
}
