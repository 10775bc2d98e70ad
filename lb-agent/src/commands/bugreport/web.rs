//! Requests pages of the agent's metrics server.

use std::{
    io::{Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use anyhow::{Context as _, bail};

const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum size of a response, in bytes.
const MOST: u64 = 64 << 20;

/// Requests the page at `path` from the metrics server at `address`; returns its body.
pub(super) fn get(address: &str, path: &str) -> anyhow::Result<Vec<u8>> {
    let asked = || format!("cannot ask the agent for http://{address}{path}");
    let mut addresses = address.to_socket_addrs().with_context(asked)?;
    let to = addresses.next().with_context(asked)?;
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE).with_context(asked)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n");
    stream.write_all(request.as_bytes()).with_context(asked)?;
    let mut answer = Vec::new();
    stream.take(MOST).read_to_end(&mut answer).with_context(asked)?;
    body(&answer).with_context(asked)
}

/// The body of an HTTP response; an error unless its status code is 200.
fn body(answer: &[u8]) -> anyhow::Result<Vec<u8>> {
    const END: &[u8] = b"\r\n\r\n";
    let end = memchr::memmem::find(answer, END).context("no HTTP")?;
    let status = String::from_utf8_lossy(&answer[..end]).lines().next().unwrap_or_default().to_owned();
    if status.split(' ').nth(1) != Some("200") {
        bail!("the answer is {status}");
    }
    Ok(answer[end + END.len()..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_is_taken_only_from_code_200() {
        assert_eq!(body(b"HTTP/1.0 200 OK\r\nA: b\r\n\r\n{}\r\n\r\n").unwrap(), b"{}\r\n\r\n");
        assert!(body(b"HTTP/1.0 404 Not Found\r\n\r\nno").unwrap_err().to_string().contains("404"));
        assert!(body(b"SSH-2.0").is_err());
    }
}
