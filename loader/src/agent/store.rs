//! The memory that the agent has, beside the ledger that says what it is for.
//!
//! One lock over both: what the ledger gives up is gone from here in the same breath. Memory itself is given back outside of
//! it, and filled by one thread ([`filler`](super::filler)) in the order of the ledger.

use super::{
    filler,
    ledger::{Ask, ClientId, Counts, Entry, Holding, Id, Key, Ledger, Made, Place, State},
    thing::{Kept, Origin, Proof, Thing},
};
use crate::pipeline::FillConfig;
use flashboot_core::{Error, Kind, Result};
use flashboot_cuda::{Context, Device};
use flashboot_memory::{HostArenaConfig, PageKind, budget, pages};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

/// How an agent keeps memory.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// The most bytes of host memory.
    pub limit: u64,
    /// What host arenas are made of.
    pub memory: HostArenaConfig,
    /// How they are filled.
    pub fill: FillConfig,
    /// Pin what was staged as soon as it is ready, for pushes into this GPU and others; `None`: at the first push.
    pub pin_for: Option<Device>,
}

/// What an agent keeps in memory. Dropped, it gives everything back that nobody has mapped.
#[derive(Debug)]
pub struct Agent {
    inner: Arc<Inner>,
    filler: Option<JoinHandle<()>>,
}

/// Everything, at one moment. Sizes in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// The release that runs.
    pub release: String,
    /// The most bytes of host memory.
    pub limit: u64,
    /// Bytes of host memory that it has, or is about to.
    pub used: u64,
    /// Bytes of host memory that are pinned for pushes.
    pub pinned: u64,
    /// What was counted since it began.
    pub counts: Counts,
    /// Every arena.
    pub entries: Vec<Listed>,
}

/// One arena.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Listed {
    /// What the ledger says.
    #[serde(flatten)]
    pub entry: Entry,
    /// Bytes that are there and verified.
    pub verified: u64,
}

pub(super) struct Inner {
    pub(super) config: AgentConfig,
    state: Mutex<Books>,
    /// There is something to fill, or a lease has begun.
    work: Condvar,
    gpus: Mutex<BTreeMap<String, Context>>,
    stopping: AtomicBool,
}

#[derive(Default)]
struct Books {
    ledger: Ledger,
    things: BTreeMap<Id, Arc<Thing>>,
    clients: ClientId,
}

impl Agent {
    /// Starts with nothing.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] without a thread to be had.
    pub fn new(config: AgentConfig) -> Result<Self> {
        let ledger = Ledger::new(BTreeMap::from([(Place::Host, config.limit)]));
        let inner = Arc::new(Inner {
            config,
            state: Mutex::new(Books { ledger, ..Books::default() }),
            work: Condvar::new(),
            gpus: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let fills = Arc::clone(&inner);
        let filler = std::thread::Builder::new()
            .name("flashboot-fill".into())
            .spawn(move || filler::run(&fills))
            .map_err(|e| Error::from_io("clone", &e, "the thread that fills"))?;
        Ok(Self { inner, filler: Some(filler) })
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// What it has.
    pub fn status(&self) -> Status {
        self.inner.status()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.inner.stop();
        if let Some(filler) = self.filler.take()
            && filler.join().is_err()
        {
            tracing::error!("the thread that fills panicked");
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Inner {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another connection.
    pub(super) fn client(&self) -> ClientId {
        let mut books = self.books();
        // Zero is the filler's own.
        books.clients += 1;
        books.clients
    }

    /// Admits `key`, or finds it.
    pub(super) fn want(
        &self,
        key: Key,
        bytes: u64,
        (priority, hold): (i32, Option<Holding>),
        proof: Proof,
        origin: Origin,
    ) -> Result<Arc<Thing>> {
        let free = self.free(&key.place)?;
        let ask = Ask { key: key.clone(), bytes, priority, hold, free };
        let mut books = self.books();
        if self.is_stopping() {
            return Err(stopped());
        }
        let made = books.ledger.ask(&ask, Instant::now())?;
        let (id, victims) = match made {
            Made::Present(id) => {
                let found = books.things.get(&id).map(Arc::clone);
                return found.ok_or_else(|| Error::new(Kind::Busy, "agent", "it is being given up"));
            }
            Made::New(id, victims) => (id, victims),
        };
        let gone = books.take(&victims);
        let thing = Arc::new(Thing::new(id, key, proof, origin));
        books.things.insert(id, Arc::clone(&thing));
        drop(books);
        give_back(gone, "for another image");
        self.work.notify_all();
        Ok(thing)
    }

    /// Bytes that `place` has free now.
    fn free(&self, place: &Place) -> Result<u64> {
        match place {
            Place::Gpu(uuid) => Ok(self.gpu(uuid)?.memory()?.0),
            Place::Host => {
                let there = budget::available().map_or(u64::MAX, |available| available.bytes);
                // Huge pages that are set apart are no part of what is available.
                let huge = match self.config.memory.pages {
                    PageKind::Base => None,
                    _ => pages::HugePages::read(self.config.memory.numa_node),
                };
                let huge = huge.map_or(0, |huge| huge.available.saturating_mul(huge.bytes));
                Ok(there.saturating_add(huge))
            }
        }
    }

    /// The context of the GPU with this UUID, opened once.
    pub(super) fn gpu(&self, uuid: &str) -> Result<Context> {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = gpus.get(uuid).filter(|context| context.lost().is_none()) {
            return Ok(context.clone());
        }
        let context = Context::open(&Device::find(uuid)?)?;
        gpus.insert(uuid.to_owned(), context.clone());
        Ok(context)
    }

    /// What was asked for by `key`, in whatever state.
    pub(super) fn find(&self, key: &Key) -> Option<(Arc<Thing>, State, bool)> {
        let books = self.books();
        let id = books.ledger.find(key)?;
        let (state, held) = books.ledger.state(id)?;
        Some((Arc::clone(books.things.get(&id)?), state, held))
    }

    /// This rank image of this image, at whichever place.
    pub(super) fn anywhere(&self, image: &str, rank: &str) -> Option<Arc<Thing>> {
        let books = self.books();
        books.things.values().find(|thing| thing.key.image == image && thing.key.rank == rank).map(Arc::clone)
    }

    /// Its memory, for `client` until it is gone or lets go.
    pub(super) fn attach(&self, thing: &Thing, client: ClientId) -> Result<Kept> {
        let mut books = self.books();
        let kept = thing.kept.get().cloned();
        let kept = kept.ok_or_else(|| Error::new(Kind::Unavailable, "attach", "it is not all there yet"))?;
        if let Err(lost) = kept.arena.usable() {
            // Nobody can use it, here or anywhere.
            let gone = books.ledger.evict(thing.id).map(|()| books.take(&[thing.id])).unwrap_or_default();
            drop(books);
            give_back(gone, "its GPU's context is lost");
            return Err(Error::new(Kind::Unavailable, "attach", format!("what was held is lost: {lost}")));
        }
        books.ledger.attach(thing.id, client, Instant::now())?;
        Ok(kept)
    }

    /// `client` is done with it.
    pub(super) fn detach(&self, thing: &Thing, client: ClientId) {
        self.books().ledger.detach(thing.id, client, Instant::now());
        self.work.notify_all();
    }

    /// `client` is gone.
    pub(super) fn gone(&self, client: ClientId) {
        self.books().ledger.gone(client, Instant::now());
        self.work.notify_all();
    }

    /// Gives up what `which` names and nobody has attached.
    pub(super) fn evict(&self, which: impl Fn(&Entry) -> bool) -> Result<Vec<Entry>> {
        let mut books = self.books();
        let all = books.ledger.entries(Instant::now());
        let (mut gone, mut busy) = (Vec::new(), None);
        for (id, entry) in all.into_iter().filter(|(_, entry)| which(entry)) {
            match books.ledger.evict(id) {
                Ok(()) => gone.push((id, entry)),
                Err(e) => busy = Some(e),
            }
        }
        let ids: Vec<_> = gone.iter().map(|(id, _)| *id).collect();
        let memory = books.take(&ids);
        drop(books);
        give_back(memory, "somebody asked");
        match (gone.is_empty(), busy) {
            (true, Some(e)) => Err(e),
            (true, None) => Err(Error::new(Kind::Unavailable, "evict", "the agent has nothing of that name")),
            (false, _) => Ok(gone.into_iter().map(|(_, entry)| entry).collect()),
        }
    }

    /// Gives up what has to go for `bytes` at `place`.
    pub(super) fn room(&self, place: &Place, bytes: u64, priority: i32) -> Result<Vec<Entry>> {
        let free = self.free(place)?;
        let mut books = self.books();
        let all: BTreeMap<_, _> = books.ledger.entries(Instant::now()).into_iter().collect();
        let victims = books.ledger.yield_room(place, bytes, priority, free)?;
        let memory = books.take(&victims);
        drop(books);
        give_back(memory, "for somebody's load");
        Ok(victims.iter().filter_map(|id| all.get(id).cloned()).collect())
    }

    /// The next to be filled, once there is one; `None` at the end. Leases end meanwhile.
    pub(super) fn next(&self) -> Option<Arc<Thing>> {
        let mut books = self.books();
        loop {
            if self.is_stopping() {
                return None;
            }
            let ended = books.ledger.expire(Instant::now());
            if !ended.is_empty() {
                let memory = books.take(&ended);
                drop(books);
                give_back(memory, "its lease has ended");
                books = self.books();
                continue;
            }
            if let Some(thing) = books.ledger.next().and_then(|id| books.things.get(&id)) {
                return Some(Arc::clone(thing));
            }
            let wait = books.ledger.next_end().map(|at| at.saturating_duration_since(Instant::now()));
            books = match wait {
                None => self.work.wait(books).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => self.work.wait_timeout(books, wait).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Its memory has been taken.
    pub(super) fn filling(&self, thing: &Thing) {
        self.books().ledger.filling(thing.id);
    }

    /// It is full and verified, or it is not.
    pub(super) fn decide(&self, thing: &Arc<Thing>, filled: Result<Kept>) {
        let mut books = self.books();
        let outcome = match filled {
            Ok(kept) if books.ledger.ready(thing.id, Instant::now()) => {
                // Set under the lock: nobody finds it ready and without memory.
                let _ = thing.kept.set(kept);
                Ok(())
            }
            Ok(_) => Err(given_up()),
            Err(e) => {
                books.ledger.failed(thing.id);
                books.things.remove(&thing.id);
                Err(e)
            }
        };
        drop(books);
        if let Err(error) = &outcome {
            tracing::warn!(image = thing.key.image, rank = thing.key.rank, %error, "not in memory");
        }
        thing.decide(outcome);
    }

    pub(super) fn entry(&self, thing: &Thing) -> Option<Entry> {
        self.books().ledger.entry(thing.id, Instant::now())
    }

    pub(super) fn status(&self) -> Status {
        let books = self.books();
        let of = |id: &Id| books.things.get(id);
        let entries = books.ledger.entries(Instant::now()).into_iter().map(|(id, entry)| {
            let verified = of(&id).and_then(|thing| thing.filling.get()).map_or(0, |filling| filling.bytes());
            Listed { entry, verified }
        });
        let pinned = books.things.values().filter_map(|thing| thing.pinned());
        Status {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            limit: self.config.limit,
            used: books.ledger.used(&Place::Host),
            pinned: pinned.sum(),
            counts: books.ledger.counts(),
            entries: entries.collect(),
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Ends fills and waits. What is attached stays with who has it mapped.
    pub(super) fn stop(&self) {
        let books = self.books();
        self.stopping.store(true, Ordering::Relaxed);
        let things: Vec<_> = books.things.values().map(Arc::clone).collect();
        drop(books);
        self.work.notify_all();
        for thing in things {
            thing.cancel.store(true, Ordering::Relaxed);
            thing.decide(Err(stopped()));
        }
    }
}

impl Books {
    /// The memory of what the ledger has given up; its waiters hear of it.
    fn take(&mut self, ids: &[Id]) -> Vec<Arc<Thing>> {
        ids.iter().filter_map(|id| self.things.remove(id)).collect()
    }
}

/// Gives memory back, outside of the lock.
fn give_back(things: Vec<Arc<Thing>>, why: &str) {
    for thing in things {
        let Key { image, rank, place } = &thing.key;
        tracing::info!(image, rank, %place, why, "given up");
        thing.cancel.store(true, Ordering::Relaxed);
        thing.decide(Err(given_up()));
    }
}

fn given_up() -> Error {
    Error::new(Kind::Cancelled, "agent", "it was given up before it was all there")
}

fn stopped() -> Error {
    Error::new(Kind::Unavailable, "agent", "the agent is stopping").with_remedy("ask again when it runs")
}
