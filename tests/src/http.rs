//! Sends HTTP requests to the agent, as load balancers, probes and scrapers do.

use std::{
    fmt::Display,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    str::FromStr,
    time::Duration,
};

use crate::netns::Netns;

/// Timeout of the connect, and of each read.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server's response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status code.
    pub code: u16,
    /// Header names in lower case, with their values.
    pub headers: Vec<(String, String)>,
    /// Body of the response.
    pub body: String,
}

impl Answer {
    /// The value of the header with this name, which must be in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The value of a metric in this page of metrics; `name` includes the labels. `None` if the page lacks the metric.
    ///
    /// # Panics
    /// The value is no number of type `T`.
    pub fn metric<T: FromStr<Err: Display>>(&self, name: &str) -> Option<T> {
        let value = self.body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        Some(value.parse().unwrap_or_else(|error| panic!("{name} {value}: {error}")))
    }

    fn parse(text: &str) -> Option<Self> {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let code = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let header = |line: &str| {
            let (name, value) = line.split_once(": ")?;
            Some((name.to_lowercase(), value.to_owned()))
        };
        Some(Self { code, headers: lines.map(header).collect::<Option<_>>()?, body: body.to_owned() })
    }
}

/// Sends a `GET` request for `path` to a server, over a new connection from `netns`.
pub fn get(netns: &Netns, server: SocketAddr, path: &str) -> io::Result<Answer> {
    let mut stream = netns.run(|| TcpStream::connect_timeout(&server, PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("no HTTP answer: {text:?}"));
    Answer::parse(&text).ok_or_else(malformed)
}
