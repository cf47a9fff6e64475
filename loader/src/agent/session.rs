//! One connection: a request at a time, and what it attached is its own until it ends.

use super::{
    ledger::{ClientId, Entry},
    protocol::{
        Envelope, FRAME, HEARTBEAT, MOST_MANIFEST, MOST_REPLY, MOST_REQUEST, PROTOCOL_VERSION, Reply,
        Request, receive, send,
    },
    store::Inner,
    thing::Thing,
};
use flashboot_channel::{ErrorWire, local::Wire};
use flashboot_core::{Error, Kind, Result};
use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// A connection may be silent for as long as an engine runs.
const FOR_EVER: Duration = Duration::from_secs(86_400 * 3650);

/// One connection.
pub(super) struct Session<'s> {
    pub(super) agent: &'s Inner,
    pub(super) wire: &'s Wire,
    pub(super) client: ClientId,
}

/// Serves one client until it goes, or says what cannot be understood.
pub(super) fn run(agent: &Inner, wire: &Wire) {
    let client = agent.client();
    let session = Session { agent, wire, client };
    let ended = session.talk();
    agent.gone(client);
    match ended {
        Ok(()) => tracing::debug!(client, "a client has gone"),
        Err(error) => tracing::debug!(client, %error, "a client is dropped"),
    }
}

impl Session<'_> {
    fn talk(&self) -> Result<()> {
        loop {
            let next = receive::<Envelope>(self.wire, MOST_REQUEST, Instant::now() + FOR_EVER);
            let (envelope, descriptor) = match next {
                Ok(Some(next)) => next,
                Ok(None) => return Ok(()),
                Err(e) => {
                    // What follows in the stream means nothing any more.
                    let _ = self.reply(&Reply::Refused(ErrorWire::from(&e)), &[]);
                    return Err(e);
                }
            };
            if envelope.version != PROTOCOL_VERSION {
                let (theirs, ours) = (envelope.version, PROTOCOL_VERSION);
                let e = Error::new(
                    Kind::Mismatch,
                    "agent",
                    format!("protocol {theirs}; this agent speaks {ours}"),
                )
                .with_remedy("run the same release on both sides");
                self.reply(&Reply::Refused(ErrorWire::from(&e)), &[])?;
                return Err(e);
            }
            if let Err(e) = self.answer(envelope.request, descriptor) {
                tracing::debug!(client = self.client, error = %e, "refused");
                self.reply(&Reply::Refused(ErrorWire::from(&e)), &[])?;
            }
        }
    }

    fn answer(&self, request: Request, descriptor: Option<OwnedFd>) -> Result<()> {
        match request {
            Request::Keep { key, name, object, priority, hold, wait } => {
                self.keep(key, &name, (priority, hold), wait, (descriptor, object))
            }
            Request::Attach { key, held } => self.attach(&key, held),
            Request::Push { image, rank, into, missing } => {
                self.push(image, rank, &into, &missing, descriptor)
            }
            Request::Manifest { image, rank } => self.manifest(&image, &rank),
            Request::List => self.reply(&Reply::Listed(self.agent.status()), &[]),
            Request::Evict { image, rank, place } => {
                let is = |wanted: &Option<String>, found: &str| wanted.as_ref().is_none_or(|w| w == found);
                let gone = self.agent.evict(|entry: &Entry| {
                    is(&image, &entry.image)
                        && is(&rank, &entry.rank)
                        && place.as_ref().is_none_or(|place| *place == entry.place)
                })?;
                self.reply(&Reply::Gone(gone), &[])
            }
            Request::Room { place, bytes, priority } => {
                let gone = self.agent.room(&place, bytes, priority)?;
                self.reply(&Reply::Gone(gone), &[])
            }
        }
    }

    fn manifest(&self, image: &str, rank: &str) -> Result<()> {
        let thing = self.agent.anywhere(image, rank).ok_or_else(|| {
            Error::new(Kind::Unavailable, "agent", format!("the agent has nothing of {rank} of {image}"))
        })?;
        self.reply(&Reply::Manifest, &[])?;
        self.wire.send(&thing.manifest, &[], MOST_MANIFEST, Instant::now() + FRAME)
    }

    pub(super) fn reply(&self, reply: &Reply, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        send(self.wire, reply, descriptors, MOST_REPLY)
    }

    /// Waits until `thing` is ready, and tells the client how far it is.
    pub(super) fn until_ready(&self, thing: &Arc<Thing>) -> Result<()> {
        loop {
            if let Some(outcome) = thing.wait(HEARTBEAT) {
                return outcome;
            }
            let (done, total) = (thing.verified(), thing.digests.payload());
            self.reply(&Reply::Progress { done, total }, &[])?;
        }
    }
}
