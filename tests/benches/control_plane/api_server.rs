//! An API server that serves prepared responses, so that its own work is a small part of the result.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use lb_tests::netns::Netns;

use crate::objects::Lists;

/// A mock API server that serves until the process ends.
pub(crate) struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    lists: Arc<Lists>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// For each resource, when the last page of its list was sent.
    listed: BTreeMap<&'static str, Instant>,
    watches: Vec<(&'static str, TcpStream)>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ApiServer {
    /// Starts to listen on the loopback device of the namespace.
    pub(crate) fn start(netns: &Netns, lists: Arc<Lists>) -> io::Result<Self> {
        let listener = netns.run(|| TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { lists, state: Mutex::default() });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&serving);
                // Ignores errors: when the agent stops, its connections end with an error.
                thread::spawn(move || serve(&shared, stream).ok());
            }
        });
        Ok(Self { shared, address })
    }

    pub(crate) fn kubeconfig(&self) -> String {
        format!(
            "{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}], \
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}]}}\n",
            self.address
        )
    }

    /// When both lists (Services and EndpointSlices) were sent completely; `None` before that.
    pub(crate) fn listed(&self) -> Option<Instant> {
        let listed = &self.shared.lock().listed;
        Some(*listed.get("services")?.max(listed.get("endpointslices")?))
    }

    /// Number of watches of a resource that were opened since [`Self::reset`].
    pub(crate) fn watches(&self, plural: &str) -> usize {
        self.shared.lock().watches.iter().filter(|(watched, _)| *watched == plural).count()
    }

    /// Clears the records of sent lists and watches, before the next agent starts.
    pub(crate) fn reset(&self) {
        *self.shared.lock() = State::default();
    }

    /// Sends a watch event, as a line of JSON, to all watches of a resource.
    pub(crate) fn tell(&self, plural: &str, line: &str) -> io::Result<()> {
        let chunk = format!("{:x}\r\n{line}\r\n", line.len());
        let mut state = self.shared.lock();
        let mut watches = state.watches.iter_mut().filter(|(watched, _)| *watched == plural);
        watches.try_for_each(|(_, stream)| stream.write_all(chunk.as_bytes()))
    }
}

/// Answers the requests of a connection.
fn serve(shared: &Shared, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    loop {
        let Some((path, body)) = read_head(&mut reader)? else { return Ok(()) };
        io::copy(&mut reader.by_ref().take(body), &mut io::sink())?;
        let (path, query) = path.split_once('?').unwrap_or((&path, ""));
        let plural = path.rsplit('/').next().unwrap_or_default();
        let Some((plural, pages)) = shared.lists.get_key_value(plural) else {
            stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        };
        if query.split('&').any(|pair| pair == "watch=true") {
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes())?;
            shared.lock().watches.push((plural, stream.try_clone()?));
            continue;
        }
        let page = query.split('&').find_map(|pair| pair.strip_prefix("continue="));
        let page: usize = page.map_or(Ok(0), str::parse).map_err(io::Error::other)?;
        let body = pages.get(page).ok_or_else(|| io::Error::other(format!("there is no page {page}")))?;
        let length = body.len();
        let head =
            format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        if page + 1 == pages.len() {
            shared.lock().listed.insert(plural, Instant::now());
        }
    }
}

/// Reads the head of the next request: its path, and the length of its body; `None` at the end of the connection.
fn read_head(reader: &mut BufReader<TcpStream>) -> io::Result<Option<(String, u64)>> {
    let (mut path, mut body) = (None, 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end().to_ascii_lowercase();
        match path {
            None => path = line.split(' ').nth(1).map(ToOwned::to_owned),
            Some(path) if line.is_empty() => return Ok(Some((path, body))),
            Some(_) => {}
        }
        if let Some(length) = line.strip_prefix("content-length:") {
            body = length.trim().parse().map_err(io::Error::other)?;
        }
    }
}
