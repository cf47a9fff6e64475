//! What the agent has, who uses it, and what has to go for what: pure, no memory, no clock, no IO.
//!
//! Every place (host memory, each GPU) has a limit. What is asked for is admitted within it or refused as a whole: victims are
//! only what is ready, that nobody has attached, and that matters less. A *staged* image goes for anything of its own priority
//! or a higher one; a *held* one for a higher priority only, or when its lease ends.

mod view;

#[cfg(test)]
mod tests;

use flashboot_core::{ByteSize, Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};
pub use view::{Counts, Entry, State};

/// Where an arena's memory is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The host's memory.
    Host,
    /// The memory of the GPU with this UUID.
    Gpu(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Gpu(uuid) => f.pad(uuid),
        }
    }
}

/// What one arena holds, and where.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The image's id.
    pub image: String,
    /// The rank image's name.
    pub rank: String,
    /// Where.
    pub place: Place,
}

impl Key {
    /// That there is none, which `call` was about.
    pub(super) fn absent(&self, call: &'static str, held: bool) -> Error {
        let Self { image, rank, place } = self;
        let detail = if held {
            format!("it holds no arena of {rank} of {image} at {place}")
        } else {
            format!("it has no staged copy of {rank} of {image}")
        };
        let error = Error::new(Kind::Unavailable, call, detail);
        if held { error.with_remedy("have it held first: flashboot hold IMAGE") } else { error }
    }
}

/// That an arena is held, and for how long nobody may use it before it goes; `None`: for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Holding {
    /// Counted while nobody has it attached.
    pub lease: Option<Duration>,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// What, and where.
    pub key: Key,
    /// Bytes of the arena.
    pub bytes: u64,
    /// Higher ones push lower ones out.
    pub priority: i32,
    /// Held, or (`None`) staged.
    pub hold: Option<Holding>,
    /// Bytes that the place has free now, beside everything that the agent has made there.
    pub free: u64,
}

/// One arena, for as long as the agent has it.
pub type Id = u64;
/// A connection.
pub(crate) type ClientId = u64;

/// What an [`Ask`] came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Made {
    /// It is there already, or being made.
    Present(Id),
    /// It is to be made, once the memory of these is given back.
    New(Id, Vec<Id>),
}

#[derive(Debug)]
struct Record {
    key: Key,
    bytes: u64,
    priority: i32,
    state: State,
    hold: Option<Holding>,
    /// How often each connection has it attached.
    attached: BTreeMap<ClientId, u32>,
    /// Last asked for, attached or let go.
    used: Instant,
}

impl Record {
    /// When it goes although nobody needs its room.
    fn ends(&self) -> Option<Instant> {
        let lease = self.hold?.lease?;
        if self.attached.is_empty() && self.state == State::Ready {
            self.used.checked_add(lease)
        } else {
            None
        }
    }

    fn may_go_for(&self, priority: i32) -> bool {
        let matters_less =
            if self.hold.is_some() { self.priority < priority } else { self.priority <= priority };
        self.state == State::Ready && self.attached.is_empty() && matters_less
    }
}

/// What the agent has.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Of places without one here, what they have free is the limit.
    limits: BTreeMap<Place, u64>,
    records: BTreeMap<Id, Record>,
    next: Id,
    counts: Counts,
}

impl Ledger {
    /// Nothing yet, and at most so many bytes in each of these places.
    pub fn new(limits: BTreeMap<Place, u64>) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Bytes of everything at `place`, made or to be made.
    pub fn used(&self, place: &Place) -> u64 {
        self.at(place).map(|(_, record)| record.bytes).fold(0, u64::saturating_add)
    }

    /// The limit of `place`, if it has one.
    pub fn limit(&self, place: &Place) -> Option<u64> {
        self.limits.get(place).copied()
    }

    /// Asks for an arena: what is there is used again, with the priority and, where it is to be held, the lease of the ask.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with the sizes and the limit's name; then nothing has changed.
    pub fn ask(&mut self, ask: &Ask, now: Instant) -> Result<Made> {
        let present = self.records.iter_mut().find(|(_, record)| record.key == ask.key);
        if let Some((id, record)) = present {
            record.priority = ask.priority;
            record.hold = ask.hold.or(record.hold);
            record.used = now;
            return Ok(Made::Present(*id));
        }
        let victims = self.room(&ask.key.place, ask.bytes, ask.priority, ask.free).inspect_err(|_| {
            self.counts.refused += 1;
        })?;
        self.remove(&victims);
        let id = self.next;
        self.next += 1;
        let record = Record {
            key: ask.key.clone(),
            bytes: ask.bytes,
            priority: ask.priority,
            state: State::Waiting,
            hold: ask.hold,
            attached: BTreeMap::new(),
            used: now,
        };
        self.records.insert(id, record);
        Ok(Made::New(id, victims))
    }

    /// Gives up what has to go so that somebody else may have `bytes` at `place`.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn yield_room(&mut self, place: &Place, bytes: u64, priority: i32, free: u64) -> Result<Vec<Id>> {
        // Not memory of the agent's: its limit does not matter, what is free does.
        let needed = bytes.saturating_sub(free);
        let victims = self.victims(place, needed, priority).ok_or_else(|| {
            self.refusal(place, bytes, free, "what is free there, and what may go for it")
                .with_remedy("end what has it attached, evict something, or ask with a higher priority")
        })?;
        self.remove(&victims);
        Ok(victims)
    }

    /// What has to go for `bytes` more at `place`: nothing, where they fit.
    fn room(&self, place: &Place, bytes: u64, priority: i32, free: u64) -> Result<Vec<Id>> {
        let used = self.used(place);
        let unmade: u64 = self
            .at(place)
            .filter(|(_, record)| record.state == State::Waiting)
            .fold(0, |sum, (_, record)| sum.saturating_add(record.bytes));
        let there = used.saturating_sub(unmade).saturating_add(free);
        let (limit, by) = match self.limit(place) {
            Some(limit) if limit <= there => (limit, "the agent's limit"),
            _ => (there, "what the memory has"),
        };
        if bytes > limit {
            let refusal = self.refusal(place, bytes, limit, by);
            return Err(refusal.with_remedy("raise agent.limit, free memory, or stage a smaller rank"));
        }
        let needed = used.saturating_add(bytes).saturating_sub(limit);
        self.victims(place, needed, priority).ok_or_else(|| {
            self.refusal(place, bytes, limit, by).with_remedy(
                "evict something, end what has it attached, raise agent.limit, or ask with a higher priority",
            )
        })
    }

    /// The least that gives `needed` bytes back, those that matter least first: by priority, what is not held, what was not
    /// used for longest. `None`: all of it is not enough.
    fn victims(&self, place: &Place, needed: u64, priority: i32) -> Option<Vec<Id>> {
        let mut candidates: Vec<_> =
            self.at(place).filter(|(_, record)| record.may_go_for(priority)).collect();
        candidates.sort_by_key(|(id, record)| (record.priority, record.hold.is_some(), record.used, *id));
        let (mut freed, mut victims) = (0u64, Vec::new());
        for (id, record) in candidates {
            if freed >= needed {
                break;
            }
            freed = freed.saturating_add(record.bytes);
            victims.push((id, record.bytes));
        }
        if freed < needed {
            return None;
        }
        // A small one that went first may not have been needed after a large one.
        let mut kept = Vec::new();
        for (id, bytes) in victims {
            if freed.saturating_sub(bytes) >= needed {
                freed -= bytes;
            } else {
                kept.push(id);
            }
        }
        Some(kept)
    }

    fn refusal(&self, place: &Place, bytes: u64, limit: u64, by: &str) -> Error {
        let used = self.used(place);
        let attached: u64 = self
            .at(place)
            .filter(|(_, record)| !record.attached.is_empty())
            .fold(0, |sum, (_, record)| sum.saturating_add(record.bytes));
        let detail = format!(
            "{} ({bytes} bytes) are wanted at {place}; {by} is {} ({limit} bytes), of which {used} are taken, {attached} of \
             them attached",
            ByteSize(bytes),
            ByteSize(limit),
        );
        Error::new(Kind::Exhausted, "agent", detail)
    }

    fn at<'l>(&'l self, place: &'l Place) -> impl Iterator<Item = (Id, &'l Record)> {
        self.records
            .iter()
            .filter(move |(_, record)| record.key.place == *place)
            .map(|(id, record)| (*id, record))
    }

    fn remove(&mut self, victims: &[Id]) {
        for id in victims {
            self.records.remove(id);
            self.counts.evicted += 1;
        }
    }

    /// What is to be filled next: the highest priority, and of those the first that came.
    pub fn next(&self) -> Option<Id> {
        let waiting = self.records.iter().filter(|(_, record)| record.state == State::Waiting);
        waiting.max_by_key(|(id, record)| (record.priority, std::cmp::Reverse(**id))).map(|(id, _)| *id)
    }

    /// When the next lease ends.
    pub fn next_end(&self) -> Option<Instant> {
        self.records.values().filter_map(Record::ends).min()
    }

    /// Its memory is there, and is being filled.
    pub fn filling(&mut self, id: Id) {
        if let Some(record) = self.records.get_mut(&id) {
            record.state = State::Filling;
        }
    }

    /// All of it is there, and verified; what was evicted meanwhile stays so: then `false`.
    pub fn ready(&mut self, id: Id, now: Instant) -> bool {
        let Some(record) = self.records.get_mut(&id) else { return false };
        record.state = State::Ready;
        record.used = now;
        match record.hold {
            Some(_) => self.counts.held += 1,
            None => self.counts.staged += 1,
        }
        true
    }

    /// It cannot be filled, and is gone.
    pub fn failed(&mut self, id: Id) {
        if self.records.remove(&id).is_some() {
            self.counts.failed += 1;
        }
    }

    /// The arena of this key.
    pub fn find(&self, key: &Key) -> Option<Id> {
        self.records.iter().find(|(_, record)| record.key == *key).map(|(id, _)| *id)
    }

    /// How far it is, and whether it is held.
    pub fn state(&self, id: Id) -> Option<(State, bool)> {
        self.records.get(&id).map(|record| (record.state, record.hold.is_some()))
    }

    /// `client` uses it from now on, until it lets go; only what is ready.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] for what is not there, or not ready yet.
    pub(crate) fn attach(&mut self, id: Id, client: ClientId, now: Instant) -> Result<()> {
        match self.records.get_mut(&id) {
            Some(record) if record.state == State::Ready => {
                let times = record.attached.entry(client).or_default();
                *times = times.saturating_add(1);
                record.used = now;
                self.counts.attached += 1;
                Ok(())
            }
            Some(_) => Err(Error::new(Kind::Unavailable, "attach", "it is not all there yet")),
            None => Err(Error::new(Kind::Unavailable, "attach", "the agent does not have it any more")),
        }
    }

    /// `client` is done with it once.
    pub(crate) fn detach(&mut self, id: Id, client: ClientId, now: Instant) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if let Some(times) = record.attached.get_mut(&client) {
            *times = times.saturating_sub(1);
            record.used = now;
            if *times == 0 {
                record.attached.remove(&client);
            }
        }
    }

    /// `client` is gone, and with it everything that it had attached.
    pub(crate) fn gone(&mut self, client: ClientId, now: Instant) {
        for record in self.records.values_mut() {
            if record.attached.remove(&client).is_some() {
                record.used = now;
            }
        }
    }

    /// Gives one up, in whatever state; never one that is attached.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] for what is not there, [`Kind::Busy`] for what is attached.
    pub fn evict(&mut self, id: Id) -> Result<()> {
        match self.records.get(&id) {
            None => Err(Error::new(Kind::Unavailable, "evict", "the agent does not have it")),
            Some(record) if !record.attached.is_empty() => {
                let detail = format!("{} processes have it attached", record.attached.len());
                Err(Error::new(Kind::Busy, "evict", detail)
                    .with_remedy("end them, or let them load elsewhere"))
            }
            Some(_) => {
                self.remove(&[id]);
                Ok(())
            }
        }
    }

    /// Gives up what was held and whose lease has ended.
    pub fn expire(&mut self, now: Instant) -> Vec<Id> {
        let ended = self.records.iter().filter(|(_, record)| record.ends().is_some_and(|at| at <= now));
        let ended: Vec<_> = ended.map(|(id, _)| *id).collect();
        self.remove(&ended);
        ended
    }
}
