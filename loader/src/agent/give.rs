//! Attaching and pushing: what is ready leaves as a read-only descriptor, or is copied into an arena that an engine has made.

use super::{
    ledger::{Key, Place},
    protocol::{Grant, HEARTBEAT, Reply},
    session::Session,
    thing::{Kept, host},
};
use crate::pipeline::{Filling, Phases, push_pinned};
use flashboot_core::{ByteRange, Error, Kind, Location, Locator, Result};
use flashboot_cuda::{Attach, CudaArena};
use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

impl Session<'_> {
    pub(super) fn attach(&self, key: &Key, held: bool) -> Result<()> {
        let kept = self.take(key, held)?;
        let arena = &kept.arena;
        let grant = Grant {
            payload: arena.payload(),
            capacity: arena.capacity(),
            shards: arena.shards(),
            generation: kept.generation.word(),
            place: key.place.clone(),
        };
        match CudaArena::from_arena(arena) {
            // A write capability: `docs/security.md` says to whom it may go.
            Some(gpu) => self.reply(&Reply::Attached(grant), &[gpu.export_fd()?.as_fd()]),
            None => self.reply(&Reply::Attached(grant), &[host(arena)?.as_fd()]),
        }
    }

    /// What `key` names, once it is ready, for this connection.
    fn take(&self, key: &Key, held: bool) -> Result<Kept> {
        let found = self.agent.find(key).filter(|(.., is_held)| *is_held || !held);
        let (thing, ..) = found.ok_or_else(|| key.absent("attach", held))?;
        self.until_ready(&thing)?;
        self.agent.attach(&thing, self.client)
    }

    /// Does `work`, which may take long, and gives the client signs of life.
    pub(super) fn meanwhile<T: Send>(
        &self,
        total: u64,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        let (done, wait) = mpsc::sync_channel(1);
        thread::scope(|scope| {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                // Nobody waits any more: the client has gone.
                let _ = done.send(work());
            });
            spawned.map_err(|e| Error::from_io("clone", &e, "a thread that works meanwhile"))?;
            loop {
                match wait.recv_timeout(HEARTBEAT) {
                    Ok(outcome) => return outcome,
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        self.reply(&Reply::Progress { done: 0, total }, &[])?;
                    }
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        let detail = "it panicked: a defect of flashboot's";
                        return Err(Error::new(Kind::Io, "agent", detail));
                    }
                }
            }
        })
    }

    /// Fills the client's arena. The client verifies what landed: nothing that is said here is taken on trust.
    pub(super) fn push(
        &self,
        image: String,
        rank: String,
        into: &Locator,
        missing: &[(u64, u64)],
        descriptor: Option<OwnedFd>,
    ) -> Result<()> {
        let invalid = |what: &str| Error::new(Kind::Invalid, "push", what.to_owned());
        let descriptor = descriptor.ok_or_else(|| invalid("the arena's descriptor was to come along"))?;
        let Location::Gpu { uuid, .. } = &into.location else {
            return Err(invalid("the arena to be filled is not in a GPU's memory"));
        };
        let key = Key { image, rank, place: Place::Host };
        let (thing, ..) = self.agent.find(&key).ok_or_else(|| key.absent("push", false))?;
        self.until_ready(&thing)?;
        self.agent.attach(&thing, self.client)?;
        let push = || -> Result<(u64, Duration, Arc<Filling>)> {
            let context = self.agent.gpu(uuid)?;
            let (pins, pinning) = self.meanwhile(into.payload, || thing.pins(&context))?;
            let began = Instant::now();
            let arena = CudaArena::attach(&context, descriptor.as_fd(), into, Attach::Write, None)?;
            // The client compares: here it is only said what has been copied.
            let attached = began.elapsed();
            let filling = Arc::new(Filling::new(arena, None)?);
            only(&filling, missing)?;
            let bytes = push_pinned(&filling, &pins, &Phases::default(), &mut |range| {
                self.reply(&Reply::Landed { start: range.start, end: range.end }, &[])
            })?;
            let copied = began.elapsed().saturating_sub(attached);
            tracing::debug!(bytes, ?attached, ?copied, "pushed");
            Ok((bytes, pinning, filling))
        };
        let done = push();
        self.agent.detach(&thing, self.client);
        let (bytes, pinning, filling) = done?;
        let told = self.reply(&Reply::Pushed { bytes, pin_ms: pinning.as_secs_f64() * 1e3 }, &[]);
        // Unmapping takes milliseconds that nobody need wait for.
        drop(filling);
        told
    }
}

/// Marks everything but `missing`, which ascends, as there.
fn only(filling: &Arc<Filling>, missing: &[(u64, u64)]) -> Result<()> {
    let payload = filling.arena().payload();
    let mut at = 0;
    for (start, end) in missing {
        if *start < at || end < start || *end > payload || !start.is_multiple_of(filling.block()) {
            let detail = format!("bytes {start}..{end} of a payload of {payload} bytes, after {at}");
            return Err(Error::new(Kind::Invalid, "push", detail));
        }
        filling.proved(ByteRange::new(at, *start));
        at = *end;
    }
    filling.proved(ByteRange::new(at, payload));
    Ok(())
}
