//! Events for every browser that listens, from one reader: programs emit events for one reader only.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use futures_util::{Stream, stream};
use serde::Serialize;
use tokio::{
    sync::broadcast::{
        self, Receiver, Sender,
        error::{RecvError, TryRecvError},
    },
    time,
};
use tracing::debug;

use crate::source::{EventFilter, EventReader, Source};

/// The most events that wait for a slow browser; the oldest ones are lost first.
const QUEUE: usize = 4096;
/// How long the reader waits for events before it checks whether a browser still listens.
const PATIENCE: Duration = Duration::from_millis(200);
/// Time for which events are collected into one message, so the minimum time between two messages to a browser.
const PAUSE: Duration = Duration::from_millis(250);
/// The most events in a message. More could be drawn, but nobody reads 800 lines a second.
const MOST: usize = 200;

/// The channel from the reader to the browsers; `None` while no reader runs.
pub(crate) struct Live<E> {
    sender: Arc<Mutex<Option<Sender<Heard<E>>>>>,
}

/// One item from the reader: an event, a loss, or the reader's failure.
#[derive(Debug)]
enum Heard<E> {
    Event(Arc<E>),
    /// This many events were lost in the kernel.
    Lost(u64),
    /// The reader has ended with this error.
    Failed(String),
}

// `derive(Clone)` would require `E: Clone`.
impl<E> Clone for Heard<E> {
    fn clone(&self) -> Self {
        match self {
            Self::Event(event) => Self::Event(Arc::clone(event)),
            Self::Lost(count) => Self::Lost(*count),
            Self::Failed(why) => Self::Failed(why.clone()),
        }
    }
}

/// A message to a browser.
#[derive(Debug, Serialize)]
#[serde(bound = "E: Serialize")]
pub(crate) struct Message<E> {
    #[serde(serialize_with = "shared")]
    events: Vec<Arc<E>>,
    /// Number of events that this browser does not get: too many for this message, for the queue, or for the kernel's
    /// buffer. Events that the queue or the kernel's buffer loses count even if the filter would reject them.
    skipped: u64,
    /// Why no more events follow.
    failure: Option<String>,
}

fn shared<E: Serialize, S: serde::Serializer>(events: &[Arc<E>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(events.iter().map(AsRef::as_ref))
}

impl<E> Default for Live<E> {
    fn default() -> Self {
        Self { sender: Arc::default() }
    }
}

impl<E: Send + Sync + 'static> Live<E> {
    /// Listens to events; starts the reader if no browser listens yet.
    ///
    /// # Errors
    /// There is no data plane, it cannot be read, or another program reads the events.
    pub(crate) fn listen<S: Source<Event = E>>(
        &self,
        source: &S,
        filter: EventFilter<E>,
    ) -> anyhow::Result<impl Stream<Item = Message<E>> + use<E, S>> {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = match &*sender {
            Some(sender) => sender.subscribe(),
            None => {
                let reader = source.events()?;
                let (new, receiver) = broadcast::channel(QUEUE);
                let (to, slot) = (new.clone(), Arc::clone(&self.sender));
                thread::Builder::new().name("events".to_owned()).spawn(move || read(reader, &to, &slot))?;
                *sender = Some(new);
                receiver
            }
        };
        Ok(messages(receiver, filter))
    }
}

/// Reads events until no browser listens, or the reader fails.
fn read<E>(
    mut reader: Box<dyn EventReader<E>>,
    sender: &Sender<Heard<E>>,
    slot: &Mutex<Option<Sender<Heard<E>>>>,
) {
    loop {
        let heard = reader.read(PATIENCE);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match heard {
            Ok((events, lost)) if sender.receiver_count() > 0 => {
                let events = events.into_iter().map(|event| Heard::Event(Arc::new(event)));
                for heard in events.chain((lost > 0).then_some(Heard::Lost(lost))) {
                    send(sender, heard);
                }
                continue;
            }
            Ok(_) => {}
            Err(error) => send(sender, Heard::Failed(format!("{error:#}"))),
        }
        *slot = None;
        // Only one reader may exist. So this reader ends before `slot` is unlocked: `listen` may then create the next
        // reader.
        drop(reader);
        return;
    }
}

fn send<E>(sender: &Sender<Heard<E>>, heard: Heard<E>) {
    if sender.send(heard).is_err() {
        debug!("the last browser has just stopped listening");
    }
}

/// The events that pass the filter, collected into few messages.
fn messages<E>(receiver: Receiver<Heard<E>>, filter: EventFilter<E>) -> impl Stream<Item = Message<E>> {
    stream::unfold(Some((receiver, filter)), async |listener| {
        let (mut receiver, filter) = listener?;
        let mut message = Message { events: Vec::new(), skipped: 0, failure: None };
        while message.is_empty() {
            match receiver.recv().await {
                Ok(heard) => message.add(heard, &filter),
                Err(RecvError::Lagged(count)) => message.skipped += count,
                Err(RecvError::Closed) => return None,
            }
        }
        time::sleep(PAUSE).await;
        loop {
            match receiver.try_recv() {
                Ok(heard) => message.add(heard, &filter),
                Err(TryRecvError::Lagged(count)) => message.skipped += count,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        let next = message.failure.is_none().then_some((receiver, filter));
        Some((message, next))
    })
}

impl<E> Message<E> {
    const fn is_empty(&self) -> bool {
        self.events.is_empty() && self.skipped == 0 && self.failure.is_none()
    }

    fn add(&mut self, heard: Heard<E>, filter: &EventFilter<E>) {
        match heard {
            Heard::Event(event) if !filter(&event) => {}
            Heard::Event(event) if self.events.len() < MOST => self.events.push(event),
            Heard::Event(_) => self.skipped += 1,
            Heard::Lost(count) => self.skipped += count,
            Heard::Failed(why) => self.failure = Some(why),
        }
    }
}
