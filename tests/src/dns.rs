//! Encodes DNS queries for A records and decodes the answers, for tests that query a server without a resolver.
//! Measures how soon answers follow a change.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::{client::receive, netns::Netns, patience, stopwatch::Stopwatch};

/// How long a change may take to arrive on the busiest machine. Only a server that misses the change takes longer.
const LOST: Duration = Duration::from_secs(30);
/// Pause between two queries, so that the client leaves time to the server on a machine with one CPU.
const PAUSE: Duration = Duration::from_micros(200);
/// A change may always take as long as this many round trips of a query: see [`Delays::limit`].
const ROUND_TRIPS: u32 = 50;

/// A query for the A records of `name`, which has labels of at most 63 bytes and no trailing dot.
pub fn query(id: u16, name: &str) -> Vec<u8> {
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.').chain([""]) {
        query.extend(u8::try_from(label.len()));
        query.extend(label.as_bytes());
    }
    query.extend([0, 1, 0, 1]);
    query
}

/// The address in the answer to a [`query`]: the last four bytes of `message`, which must end with the A record.
/// `None` unless the answer has one record and no error.
pub fn address(message: &[u8]) -> Option<Ipv4Addr> {
    let header = message.first_chunk::<12>()?;
    let has_address = header[3] & 15 == 0 && header[7] == 1;
    message.last_chunk::<4>().filter(|_| has_address).map(|bytes| Ipv4Addr::from(*bytes))
}

/// A client of the DNS server at 127.0.0.1 of a namespace.
#[derive(Debug)]
pub struct Client(UdpSocket);

impl Client {
    /// Opens a socket in `netns`.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn new(netns: &Netns) -> io::Result<Self> {
        netns.run(|| {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.connect("127.0.0.1:53")?;
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            Ok(Self(socket))
        })
    }

    /// Asks for the A records of `NAME.default.svc.cluster.local`. Returns the address in the answer; `None` without an
    /// answer or with an empty one.
    ///
    /// # Errors
    /// The socket fails for another reason than that no server answers.
    pub fn ask(&self, name: &str) -> io::Result<Option<Ipv4Addr>> {
        let query = query(1, &format!("{name}.default.svc.cluster.local"));
        let mut buffer = [0; 512];
        match self.0.send(&query).and_then(|_| receive(&self.0, &mut buffer)) {
            Ok(length) => Ok(address(&buffer[..length])),
            Err(error) if is_silence(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a change, and asks for the name until the answer is `wanted`. Returns how long that took.
    ///
    /// # Errors
    /// The socket fails, or the answer has not followed after half a minute.
    pub fn follow(
        &self,
        name: &str,
        wanted: Option<Ipv4Addr>,
        change: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Delay> {
        let asked = Instant::now();
        self.ask(name)?;
        let round_trip = asked.elapsed();
        let stopwatch = Stopwatch::start();
        change()?;
        while self.ask(name)? != wanted {
            if stopwatch.wall() > LOST {
                return Err(io::Error::other(format!("{name} is not {wanted:?} after {LOST:?}")));
            }
            sleep(PAUSE);
        }
        Ok(Delay { wall: stopwatch.wall(), own: stopwatch.elapsed(), round_trip })
    }
}

/// Whether the error means that there is no answer, or no server yet.
fn is_silence(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, TimedOut, WouldBlock};
    matches!(error.kind(), ConnectionRefused | TimedOut | WouldBlock)
}

/// The delay of one change: from the moment before the change until the answer is new.
#[derive(Clone, Copy, Debug)]
pub struct Delay {
    /// The delay.
    pub wall: Duration,
    /// The delay without the time in which tasks waited for a CPU, I/O or memory.
    pub own: Duration,
    /// Time from a query to its answer, immediately before the change.
    pub round_trip: Duration,
}

/// The delays of some changes of the same kind.
#[derive(Clone, Debug)]
pub struct Delays(pub Vec<Delay>);

impl Delays {
    /// A percentile of a field: the field is at most this value in at least `percent` % of the delays.
    ///
    /// # Panics
    /// If there are no delays.
    pub fn at(&self, percent: usize, field: fn(&Delay) -> Duration) -> Duration {
        let mut values: Vec<Duration> = self.0.iter().map(field).collect();
        values.sort();
        values[(values.len() * percent / 100).min(values.len() - 1)]
    }

    /// The limit for delays on this machine. `limit` is for a machine that is neither slow nor busy; on any other
    /// machine, a change may take as long as [`ROUND_TRIPS`] round trips of a query took at the same time (their
    /// median).
    pub fn limit(&self, limit: Duration) -> Duration {
        (limit * patience()).max(ROUND_TRIPS * self.at(50, |delay| delay.round_trip))
    }

    /// The distribution of a field, as text.
    pub fn show(&self, field: fn(&Delay) -> Duration) -> String {
        let at = |percent| self.at(percent, field);
        format!("{:?} min, {:?} median, {:?} p90, {:?} p99, {:?} max", at(0), at(50), at(90), at(99), at(100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(round_trip: u64) -> Delays {
        let millis = Duration::from_millis;
        let delay = |own| Delay { wall: millis(own + 1), own: millis(own), round_trip: millis(round_trip) };
        Delays((1..=200).rev().map(delay).collect())
    }

    #[test]
    fn quantiles_are_read_from_sorted_delays() {
        let delays = delays(1);
        let own = |percent| delays.at(percent, |delay| delay.own).as_millis();
        assert_eq!([0, 50, 99, 100].map(own), [1, 101, 199, 200]);
    }

    #[test]
    fn limit_grows_with_round_trips_only_on_slow_machines() {
        let limit = |round_trip| delays(round_trip).limit(Duration::from_millis(100)).as_millis();
        assert_eq!([0, 1].map(limit), [100 * u128::from(patience()); 2]);
        assert_eq!(limit(1_000), 50_000);
    }
}
