//! The other end of the control socket.

use super::{
    ledger::{Entry, Key, Place},
    protocol::{
        Envelope, FRAME, Grant, HEARTBEAT, Lease, MOST_MANIFEST, MOST_REPLY, MOST_REQUEST, Object,
        PROTOCOL_VERSION, Reply, Request, receive, send,
    },
    store::Status,
};
use crate::source::ObjectConfig;
use flashboot_channel::local::{Policy, Wire};
use flashboot_checkpoint::Manifest;
use flashboot_core::{ByteRange, Error, Generation, Kind, Locator, Result};
use std::{
    fs::File,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// An agent that says nothing for so long is given up: it gives a sign of life each second.
const SILENCE: Duration = Duration::from_secs(HEARTBEAT.as_secs() * 30);

/// Which agent, and who it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// Its socket.
    pub socket: PathBuf,
    /// Users, besides our own and root, that it may run as.
    pub allow_uids: Vec<u32>,
    /// Groups that it may.
    pub allow_gids: Vec<u32>,
}

/// A connection to the agent. Dropped, everything that it attached is let go.
#[derive(Debug)]
pub struct Client {
    wire: Wire,
}

/// What is to be kept in memory.
#[derive(Debug, Clone)]
pub struct Order {
    /// What, and where.
    pub key: Key,
    /// Where the payload is.
    pub payload: Payload,
    /// What proves it: [`flashboot_checkpoint::Manifest::read`].
    pub manifest: Vec<u8>,
    /// Higher ones push lower ones out.
    pub priority: i32,
    /// Held: for how long nobody may use it before it goes, `None` for ever. Else it is staged.
    pub hold: Option<Option<Duration>>,
    /// Come back once it is ready; else once it is admitted.
    pub wait: bool,
}

/// Where a payload is.
#[derive(Debug, Clone)]
pub enum Payload {
    /// In this file, which we open.
    File(PathBuf),
    /// Among an image's objects, under this name; the agent fetches them.
    Object(ObjectConfig, String),
}

/// An arena that the agent has, and its descriptor.
#[derive(Debug)]
pub struct Attached {
    /// A sealed memfd, or a GPU's memory.
    pub descriptor: OwnedFd,
    /// Payload bytes.
    pub payload: u64,
    /// Bytes of the allocation.
    pub capacity: u64,
    /// Number of progress words.
    pub shards: u32,
    /// The filling.
    pub generation: Generation,
}

impl Client {
    /// Dials the agent and looks who it is.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where none runs, [`Kind::Permission`] where it may not be this one's; the system's own.
    pub fn dial(config: &ClientConfig) -> Result<Self> {
        let wire = Wire::dial(&config.socket, Instant::now() + FRAME).map_err(|e| match e.kind() {
            Kind::Unavailable => e.with_remedy("start one: flashboot agent"),
            _ => e,
        })?;
        let peer = wire.peer()?;
        let policy = Policy::new(&config.allow_uids, &config.allow_gids);
        if !policy.admits_source(peer.uid, peer.gid) {
            let detail = format!("the agent runs as uid {}, gid {}", peer.uid, peer.gid);
            return Err(Error::new(Kind::Permission, "agent", detail)
                .with_peer(wire.name())
                .with_remedy("add it to agent.allow_uids or agent.allow_gids if you trust it"));
        }
        Ok(Self { wire })
    }

    fn ask(&self, request: Request, descriptor: Option<BorrowedFd<'_>>) -> Result<()> {
        let envelope = Envelope { version: PROTOCOL_VERSION, request };
        let sent = send(&self.wire, &envelope, descriptor.as_slice(), MOST_REQUEST);
        match sent {
            // Why it was closed may be waiting to be read.
            Err(e) if e.kind() == Kind::SourceLost => Ok(()),
            sent => sent,
        }
    }

    /// The last reply; each before it goes to `each`.
    fn answer(&self, each: &mut dyn FnMut(Reply) -> Result<()>) -> Result<(Reply, Option<OwnedFd>)> {
        self.last_word(each)?
    }

    /// As [`answer`](Self::answer); a refusal, and that the agent is gone, are last words too. Without one it may still be at
    /// work.
    fn last_word(
        &self,
        each: &mut dyn FnMut(Reply) -> Result<()>,
    ) -> Result<Result<(Reply, Option<OwnedFd>)>> {
        loop {
            let next = match receive::<Reply>(&self.wire, MOST_REPLY, Instant::now() + SILENCE) {
                Err(e) if e.kind() == Kind::SourceLost => return Ok(Err(e)),
                next => next?,
            };
            match next {
                Some((Reply::Refused(error), _)) => {
                    return Ok(Err(error.into_error("agent", "the agent").with_peer(self.wire.name())));
                }
                Some((reply @ (Reply::Progress { .. } | Reply::Landed { .. }), _)) => each(reply)?,
                Some(last) => return Ok(Ok(last)),
                None => {
                    let detail = "the agent is gone without an answer";
                    return Ok(
                        Err(Error::new(Kind::SourceLost, "agent", detail).with_peer(self.wire.name())),
                    );
                }
            }
        }
    }

    fn odd(&self, reply: &Reply) -> Error {
        let detail = format!("an answer to something else: {reply:?}");
        Error::new(Kind::Protocol, "agent", detail).with_peer(self.wire.name())
    }

    /// Has it keep `order` in memory; `each` hears of bytes that are verified, of how many.
    ///
    /// # Errors
    /// Those of opening the payload; the agent's refusals, with their kinds.
    pub fn keep(&self, order: &Order, each: &mut dyn FnMut(u64, u64)) -> Result<Entry> {
        let (file, name, object) = match &order.payload {
            Payload::File(path) => {
                let name = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                (Some(open(path)?), name.display().to_string(), None)
            }
            Payload::Object(config, payload) => {
                let object = Object {
                    url: config.url.clone(),
                    payload: payload.clone(),
                    options: config.options.clone(),
                    allow_http: config.allow_http,
                    range: config.range.0,
                    attempts: config.attempts,
                    timeout_ms: u64::try_from(config.timeout.as_millis()).unwrap_or(u64::MAX),
                };
                (None, format!("{}/{payload}", config.url.trim_end_matches('/')), Some(object))
            }
        };
        let hold = order.hold.map(|lease| Lease {
            ms: lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX)),
        });
        let request = Request::Keep {
            key: order.key.clone(),
            name,
            object,
            priority: order.priority,
            hold,
            wait: order.wait,
        };
        self.ask(request, file.as_ref().map(File::as_fd))?;
        match self.wire.send(&order.manifest, &[], MOST_MANIFEST, Instant::now() + FRAME) {
            Err(e) if e.kind() == Kind::SourceLost => {}
            sent => sent?,
        }
        let reply = self.answer(&mut |reply| {
            if let Reply::Progress { done, total } = reply {
                each(done, total);
            }
            Ok(())
        })?;
        match reply {
            (Reply::Kept(entry), _) => Ok(entry),
            (other, _) => Err(self.odd(&other)),
        }
    }

    /// Attaches what is ready, or will be; until the connection ends.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] for what the agent does not have.
    pub fn attach(&self, key: &Key, held: bool) -> Result<Attached> {
        self.ask(Request::Attach { key: key.clone(), held }, None)?;
        let reply = self.answer(&mut |_| Ok(()))?;
        let (Reply::Attached(grant), descriptor) = reply else { return Err(self.odd(&reply.0)) };
        let Grant { payload, capacity, shards, generation, .. } = grant;
        let protocol =
            |what: &str| Error::new(Kind::Protocol, "agent", what.to_owned()).with_peer(self.wire.name());
        Ok(Attached {
            descriptor: descriptor.ok_or_else(|| protocol("no descriptor came along"))?,
            payload,
            capacity,
            shards,
            generation: Generation::from_word(generation)
                .ok_or_else(|| protocol("it attached an arena that holds nothing"))?,
        })
    }

    /// Has it copy `missing` of what was staged into the arena behind `descriptor`, a GPU's; `landed` hears of every range that
    /// is there, and verifies it. Gives what pinning took.
    ///
    /// Whatever `landed` says, it returns only once the agent has said its last word, or is gone: until then the agent may
    /// write.
    ///
    /// # Errors
    /// The agent's refusals, and `landed`'s. What comes in place of the agent's last word goes through `unquiet`: the agent may
    /// still write to the arena.
    pub fn push(
        &self,
        (image, rank): (&str, &str),
        into: &Locator,
        descriptor: BorrowedFd<'_>,
        missing: &[ByteRange],
        landed: &mut dyn FnMut(ByteRange) -> Result<()>,
        unquiet: &dyn Fn(Error) -> Error,
    ) -> Result<Duration> {
        let request = Request::Push {
            image: image.to_owned(),
            rank: rank.to_owned(),
            into: into.clone(),
            missing: missing.iter().map(|range| (range.start, range.end)).collect(),
        };
        self.ask(request, Some(descriptor))?;
        let mut wrong = None;
        let last = self.last_word(&mut |reply| match reply {
            Reply::Landed { start, end } if start <= end && end <= into.payload => {
                if wrong.is_none() {
                    wrong = landed(ByteRange::new(start, end)).err();
                }
                Ok(())
            }
            Reply::Landed { .. } => Err(self.odd(&reply)),
            _ => Ok(()),
        });
        let last = last.map_err(unquiet)?;
        match wrong.map_or(last, Err)? {
            (Reply::Pushed { pin_ms, .. }, _) => {
                Ok(Duration::try_from_secs_f64(pin_ms / 1e3).unwrap_or_default())
            }
            (other, _) => Err(self.odd(&other)),
        }
    }

    /// What proves a rank image that it has, wherever it has it.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] for what the agent does not have; what a manifest can be refused for.
    pub fn manifest(&self, image: &str, rank: &str) -> Result<Manifest> {
        self.ask(Request::Manifest { image: image.to_owned(), rank: rank.to_owned() }, None)?;
        match self.answer(&mut |_| Ok(()))? {
            (Reply::Manifest, _) => {}
            (other, _) => return Err(self.odd(&other)),
        }
        let followed = self.wire.receive(MOST_MANIFEST, 0, Instant::now() + SILENCE)?;
        let (bytes, _) = followed.ok_or_else(|| {
            Error::new(Kind::SourceLost, "agent", "a manifest was to follow").with_peer(self.wire.name())
        })?;
        Ok(Manifest::check(&bytes, image, rank)?)
    }

    /// Everything that the agent has.
    ///
    /// # Errors
    /// The connection's.
    pub fn status(&self) -> Result<Status> {
        self.ask(Request::List, None)?;
        match self.answer(&mut |_| Ok(()))? {
            (Reply::Listed(status), _) => Ok(status),
            (other, _) => Err(self.odd(&other)),
        }
    }

    /// Gives up what these name and nobody has attached.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where there is nothing of that name, [`Kind::Busy`] where all of it is attached.
    pub fn evict(
        &self,
        image: Option<&str>,
        rank: Option<&str>,
        place: Option<&Place>,
    ) -> Result<Vec<Entry>> {
        let (image, rank) = (image.map(str::to_owned), rank.map(str::to_owned));
        self.ask(Request::Evict { image, rank, place: place.cloned() }, None)?;
        self.went()
    }

    /// Has it give up what must go for `bytes` of ours at `place`.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] where all that may go is not enough.
    pub fn room(&self, place: &Place, bytes: u64, priority: i32) -> Result<Vec<Entry>> {
        self.ask(Request::Room { place: place.clone(), bytes, priority }, None)?;
        self.went()
    }

    fn went(&self) -> Result<Vec<Entry>> {
        match self.answer(&mut |_| Ok(()))? {
            (Reply::Gone(entries), _) => Ok(entries),
            (other, _) => Err(self.odd(&other)),
        }
    }
}

/// A payload's file, for reading; a pipe is not waited for.
fn open(path: &Path) -> Result<File> {
    let detail = || path.display().to_string();
    let meta = std::fs::metadata(path).map_err(|e| Error::from_io("stat", &e, detail()))?;
    if !meta.is_file() {
        return Err(Error::new(Kind::Invalid, "open", format!("{}: is no regular file", path.display())));
    }
    File::open(path).map_err(|e| Error::from_io("open", &e, detail()))
}
