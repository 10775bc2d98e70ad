//! Queries over TCP (RFC 7766).

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
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

/// Answers the queries of a connection, each as soon as its answer is known, until the client closes the connection or
/// is idle.
async fn serve_connection(server: Arc<Server>, stream: TcpStream) -> io::Result<()> {
    let (reader, writer) = stream.into_split();
    let (answers, due) = mpsc::channel(MOST_QUERIES);
    tokio::try_join!(read(server, reader, answers), write(writer, due)).map(|_| ())
}

/// Reads queries. Reserves a place in `answers` before it reads each query, so it stops reading if the client does not
/// receive the answers.
async fn read(
    server: Arc<Server>,
    mut reader: OwnedReadHalf,
    answers: mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    while let Ok(place) = answers.clone().reserve_owned().await {
        let Ok(Ok(length)) = timeout(IDLE, reader.read_u16()).await else { return Ok(()) };
        let mut bytes = vec![0; length.into()];
        timeout(IDLE, reader.read_exact(&mut bytes)).await??;
        server.stats.count_query("tcp");
        let read = query::read(&bytes);
        match (server.begin(&read, u16::MAX), read) {
            (Begun::Answered(reply), _) => {
                place.send(server.encode(&reply, u16::MAX).unwrap_or_default());
            }
            (Begun::Outside(reply, name), Ok(query)) => {
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let reply = server.complete(&query, reply, name).await;
                    place.send(server.encode(&reply, u16::MAX).unwrap_or_default());
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

/// Sends answers until the client has sent its last query and all are answered. An empty answer stands for one that
/// could not be encoded, and ends the connection.
async fn write(mut writer: OwnedWriteHalf, mut due: mpsc::Receiver<Vec<u8>>) -> io::Result<()> {
    while let Some(answer) = due.recv().await.filter(|answer| !answer.is_empty()) {
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        let bytes = [&length.to_be_bytes()[..], &answer].concat();
        timeout(IDLE, writer.write_all(&bytes)).await??;
    }
    Ok(())
}
