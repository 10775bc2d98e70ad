//! Queries over TCP (RFC 7766).

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp::OwnedWriteHalf},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{sleep, timeout},
};
use tracing::debug;

use crate::{
    query,
    server::{Begun, PAUSE, Server},
};

/// Time after which a connection ends if the client sends no query, or does not read its answers.
const IDLE: Duration = Duration::from_secs(10);
/// Maximum number of queries of a connection whose answers are unknown or not yet sent.
const MOST_QUERIES: usize = 32;
/// Maximum size of an answer in bytes.
const LARGEST: usize = u16::MAX as usize;
/// Maximum number of bytes of a connection's answers that are not yet sent. An unknown answer counts as [`LARGEST`].
const MOST_BYTES: usize = 8 * LARGEST;

/// Answers the queries of connections to the socket.
pub(crate) async fn serve(server: Arc<Server>, listener: TcpListener) -> Infallible {
    let own = listener.local_addr().ok().map(|address| address.ip());
    loop {
        // The permit comes first: connections beyond the limit wait in the backlog.
        let permit = Arc::clone(&server.connections).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, client)) => {
                if !server.clients.is_allowed(client.ip()) {
                    server.stats.refused_clients.inc();
                    continue;
                }
                server.count_received(client.ip(), own);
                let Some(place) = server.clients.connect(client.ip()) else {
                    server.stats.rate_limited.inc();
                    continue;
                };
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let _places = (permit, place);
                    if let Err(error) = serve_connection(server, stream).await {
                        debug!("a DNS connection has ended: {error}");
                    }
                });
            }
            Err(error) => {
                debug!("cannot accept a DNS connection: {error}");
                sleep(PAUSE).await;
            }
        }
    }
}

/// An answer that is not yet sent, and its share of [`MOST_BYTES`]. An empty answer stands for one that could not be
/// encoded.
struct Answer {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
}

impl Answer {
    /// An answer that keeps only the part of `room` that it needs. The caller has reserved [`LARGEST`] bytes.
    fn new(bytes: Option<Vec<u8>>, mut room: OwnedSemaphorePermit) -> Self {
        let bytes = bytes.unwrap_or_default();
        drop(room.split(LARGEST.saturating_sub(bytes.len())));
        Self { bytes, _room: room }
    }
}

/// Answers the queries of a connection, each as soon as its answer is known, until the client closes the connection or
/// is idle.
async fn serve_connection(server: Arc<Server>, stream: TcpStream) -> io::Result<()> {
    let (reader, writer) = stream.into_split();
    let (answers, due) = mpsc::channel(MOST_QUERIES);
    tokio::try_join!(read(server, reader, answers), write(writer, due)).map(|_| ())
}

/// Reads queries. Reserves a place in `answers` and room for the largest answer before it reads each query, so it stops
/// reading if the client does not receive the answers.
async fn read(
    server: Arc<Server>,
    mut reader: impl AsyncRead + Unpin,
    answers: mpsc::Sender<Answer>,
) -> io::Result<()> {
    let rooms = Arc::new(Semaphore::new(MOST_BYTES));
    while let Ok(place) = answers.clone().reserve_owned().await {
        let room = Arc::clone(&rooms).acquire_many_owned(u16::MAX.into()).await.map_err(io::Error::other)?;
        let Ok(Ok(length)) = timeout(IDLE, reader.read_u16()).await else { return Ok(()) };
        let mut bytes = vec![0; length.into()];
        timeout(IDLE, reader.read_exact(&mut bytes)).await??;
        server.stats.count_query("tcp");
        let read = query::read(&bytes);
        match (server.begin(&read, u16::MAX), read) {
            (Begun::Answered(reply), _) => {
                place.send(Answer::new(server.encode(&reply, u16::MAX), room));
            }
            (Begun::Outside(reply, name), Ok(query)) => {
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let reply = server.complete(&query, reply, name).await;
                    place.send(Answer::new(server.encode(&reply, u16::MAX), room));
                });
            }
            (Begun::Dropped | Begun::Outside(..), _) => {
                server.stats.dropped.inc();
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Sends answers until the client has sent its last query and all are answered. An empty answer is an error, which ends
/// the connection.
async fn write(mut writer: OwnedWriteHalf, mut due: mpsc::Receiver<Answer>) -> io::Result<()> {
    while let Some(answer) = due.recv().await {
        if answer.bytes.is_empty() {
            return Err(io::Error::other("an answer could not be encoded"));
        }
        let length = u16::try_from(answer.bytes.len()).map_err(io::Error::other)?;
        let bytes = [&length.to_be_bytes()[..], &answer.bytes].concat();
        timeout(IDLE, writer.write_all(&bytes)).await??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::RecordType;

    use super::*;
    use crate::{
        Access, Forwarder, Stats,
        tests::{crowd, framed, question},
    };

    #[tokio::test]
    async fn client_that_reads_no_answers_makes_the_server_keep_few() {
        let (stats, names) = (Stats::default(), Arc::new(crowd("crowd", 5000)));
        let forwarder = Arc::new(Forwarder::new(1, stats.clone()));
        let access = Access { allowed: Vec::new(), rate: None, hosts: Vec::new() };
        let server = Arc::new(Server::new(names, forwarder, access, stats));
        let queries = framed(&question("crowd.n.svc.cluster.local.", RecordType::A)).repeat(MOST_QUERIES);
        let (answers, mut due) = mpsc::channel(MOST_QUERIES);
        let reading = timeout(Duration::from_millis(500), read(server, &*queries, answers)).await;
        assert!(reading.is_err(), "the server reads no more queries");
        let mut sizes = Vec::new();
        while let Ok(answer) = due.try_recv() {
            sizes.push(answer.bytes.len());
        }
        assert_eq!(sizes.len(), MOST_BYTES / LARGEST, "{sizes:?}");
        assert!(sizes.iter().all(|size| *size > 60_000), "{sizes:?}");
    }
}
