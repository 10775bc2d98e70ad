//! Test helpers: a router behind a real socket, and a minimal HTTP/1.1 client.

use std::net::SocketAddr;

use axum::Router;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

/// A router that is served on a free port until this value is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Server {
    pub(crate) async fn start(router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, task }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.request("GET", path).await
    }

    pub(crate) async fn request(&self, method: &str, path: &str) -> Answer {
        request(self.address, method, path, "").await.unwrap()
    }

    /// Sends a GET request with one additional header line.
    pub(crate) async fn get_with(&self, path: &str, header: &str) -> Answer {
        request(self.address, "GET", path, &format!("{header}\r\n")).await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Answer {
    /// The value of a header of the response; the name's case does not matter.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

pub(crate) async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut lines = head.lines();
    let code = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header = |line: &str| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_owned(), value.to_owned())
    };
    Ok(Answer { code, headers: lines.map(header).collect(), body: body.to_owned() })
}
