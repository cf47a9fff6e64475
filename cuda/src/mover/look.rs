//! Looks at the source's control block: two words into pinned memory.
//!
//! By a kernel of one thread when the source is another GPU's: a copy of 8 bytes would wait in the copy engine until
//! the chunk under way has passed, and the engine then stand still until the look is answered (129 µs a chunk of
//! 256 MiB between two H200s). By two stream-ordered copies when the source is our own GPU's: there the chunk's
//! copy occupies the multiprocessors, and it is the kernel that would wait.
//!
//! The progress word first, the generation second. The locator's generation was seen when the hop was opened and
//! never comes back once it is gone, so a look that still shows it read a word of that filling, and so did
//! every copy that was done before the look.

use super::{GENERATION, Hop};
use crate::{
    Context, Import,
    host::Pinned,
    ops::{Arg, Launch},
    stream::{Event, Pool, Pooled, Stream},
};
use flashboot_core::{
    Error, Generation, Kind, Observed, Result, ShardId,
    control::{self, ControlBlock, Words},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long one question whether a look has been answered may take.
const POLL: Duration = Duration::from_micros(20);

/// What looks travel by.
#[derive(Debug)]
pub(crate) struct Looks {
    stream: Arc<Stream>,
    slots: Pool<Slot>,
    /// The source is our own GPU's, or the kernel was refused.
    by_copy: AtomicBool,
}

/// The words of one look, and the mark after it.
#[derive(Debug)]
pub(super) struct Slot {
    words: Pinned,
    seen: Event,
}

/// The header's words and the generation.
const HEADER: usize = GENERATION as usize + 8;

impl Slot {
    fn new(context: &Context) -> Result<Self> {
        Ok(Self { words: Pinned::new(context, HEADER)?, seen: Event::new(context)? })
    }

    fn word(&self, at: usize) -> u64 {
        let (words, _) = self.words.as_slice().as_chunks::<8>();
        words.get(at).map_or(0, |word| u64::from_le_bytes(*word))
    }

    /// The generation that a look found, once its stream has passed.
    pub(super) fn generation(&self) -> Option<Generation> {
        Generation::from_word(self.word(1))
    }
}

impl Looks {
    pub(crate) fn new(import: &Import) -> Result<Self> {
        let context = import.context();
        let by_copy = AtomicBool::new(import.is_same_gpu());
        let looks = Self { stream: Arc::new(Stream::new(context)?), slots: Pool::default(), by_copy };
        drop(looks.slot(context)?);
        Ok(looks)
    }

    pub(super) fn slot(&self, context: &Context) -> Result<Pooled<Slot>> {
        self.slots.take(|_| true, || Slot::new(context))
    }

    /// Reads the header once and compares it with the locator.
    pub(crate) fn check_header(&self, import: &Import) -> Result<()> {
        let context = import.context();
        let slot = self.slot(context)?;
        let from = import.control(0, HEADER as u64)?;
        let queued = context.call(|ops| {
            // SAFETY: the words are inside the import, which the caller holds; the slot is ours until the stream
            // is synchronised below.
            unsafe { ops.copy_dtoh(slot.words.as_ptr(), from, HEADER as u64, self.stream.object()) }
        });
        let done = self.stream.synchronize();
        queued.and(done)?;
        let available = control::size(import.shards());
        let (_, header) = ControlBlock::open(Snapshot(&slot), available)?;
        if header.payload != import.payload() || header.shards != import.shards() {
            return Err(Error::new(
                Kind::Mismatch,
                "control block",
                format!(
                    "the source says {} bytes in {} shards, its locator {} bytes in {} shards",
                    header.payload,
                    header.shards,
                    import.payload(),
                    import.shards()
                ),
            ));
        }
        let found = Generation::from_word(slot.word(GENERATION as usize / 8));
        if found != Some(import.generation()) {
            let found = found.map_or_else(|| "nothing".to_owned(), |g| g.to_string());
            return Err(Error::new(
                Kind::StaleGeneration,
                "import",
                format!("the source's arena holds {found}, its locator named {}", import.generation()),
            ));
        }
        Ok(())
    }
}

struct Snapshot<'a>(&'a Slot);

impl Words for Snapshot<'_> {
    fn load(&self, offset: u64) -> u64 {
        self.0.word(offset as usize / 8)
    }
    fn store(&self, _: u64, _: u64) {}
    fn fence(&self) {}
}

/// A look under way. Dropping it waits, so that its slot is quiet.
#[derive(Debug)]
pub(crate) struct Look {
    slot: Pooled<Slot>,
    stream: Arc<Stream>,
    /// Keeps the import, which the copies read.
    hop: Arc<Hop>,
    done: bool,
}

impl Hop {
    /// Refuses a shard that the source has not.
    pub(super) fn check_shard(&self, shard: ShardId) -> Result<()> {
        if shard.0 >= self.import.shards() {
            return Err(Error::new(
                Kind::Invalid,
                "observe",
                format!("shard {} of a source with {} shards", shard.0, self.import.shards()),
            ));
        }
        Ok(())
    }

    /// Queues one look.
    pub(crate) fn look(self: &Arc<Self>, shard: ShardId) -> Result<Look> {
        self.check_shard(shard)?;
        let slot = self.looks.slot(self.context())?;
        let look = Look { slot, stream: Arc::clone(&self.looks.stream), hop: Arc::clone(self), done: false };
        self.queue_look(&look.slot, &look.stream, shard)?;
        self.context().call(|ops| look.slot.seen.record_with(ops, &look.stream))?;
        Ok(look)
    }

    /// Queues the copying of two words of the source into `slot`. Whoever calls keeps the hop and the slot until
    /// `stream` has passed.
    pub(super) fn queue_look(&self, slot: &Slot, stream: &Stream, shard: ShardId) -> Result<()> {
        let progress = self.import.control(control::progress_offset(shard), 8)?;
        let generation = self.import.control(GENERATION, 8)?;
        if self.look_by_kernel(slot, stream, progress, generation)? {
            return Ok(());
        }
        self.look_by_copy(slot, stream, progress, generation)
    }

    /// Whether there is a kernel to do it.
    fn look_by_kernel(&self, slot: &Slot, stream: &Stream, progress: u64, generation: u64) -> Result<bool> {
        if self.looks.by_copy.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let function = self.context().kernel().and_then(|kernel| {
            let none =
                || Error::new(Kind::Unavailable, "cuModuleGetFunction", "the module has no such kernel");
            kernel.look.ok_or_else(none)
        });
        let launched = function.and_then(|function| {
            let out = slot.words.as_ptr().expose_provenance() as u64;
            let args = &mut [Arg::U64(progress), Arg::U64(generation), Arg::U64(out)];
            let launch = Launch { function, grid: 1, block: 1, stream: stream.object(), args };
            self.context().call(|ops| {
                // SAFETY: the words are inside the import, which the caller keeps by the hop, and so it does the slot,
                // which has room for two; the arguments are those of the kernel's declaration.
                unsafe { ops.launch(launch) }
            })
        });
        match launched {
            Ok(()) => Ok(true),
            Err(error) if self.context().lost().is_some() => Err(error),
            Err(error) => {
                tracing::warn!(%error, "no kernel to look at sources with: looks wait for the copy engine");
                self.looks.by_copy.store(true, Ordering::Relaxed);
                Ok(false)
            }
        }
    }

    fn look_by_copy(&self, slot: &Slot, stream: &Stream, progress: u64, generation: u64) -> Result<()> {
        let (first, stream) = (slot.words.as_ptr(), stream.object());
        let second = first.wrapping_add(8);
        self.context().call(|ops| {
            // SAFETY: the word is inside the import, which the caller keeps by the hop, and so it does the slot.
            unsafe { ops.copy_dtoh(first, progress, 8, stream) }?;
            // SAFETY: as above; the slot has room for more than two words.
            unsafe { ops.copy_dtoh(second, generation, 8, stream) }
        })
    }
}

impl Look {
    /// What was seen, or the look itself when it is not there after [`POLL`].
    pub(crate) fn poll(mut self) -> Result<std::result::Result<Observed, Self>> {
        let seen = self.hop.context().call(|ops| self.slot.seen.spin_with(ops, POLL))?;
        if !seen {
            return Ok(Err(self));
        }
        self.done = true;
        Ok(Ok(self.seen()))
    }

    /// Blocks until it is there.
    pub(crate) fn wait(mut self) -> Result<Observed> {
        self.slot.seen.wait(POLL)?;
        self.done = true;
        Ok(self.seen())
    }

    fn seen(&self) -> Observed {
        let generation = self.slot.generation();
        // A word of another filling is of no use to anyone.
        let ours = generation == Some(self.hop.import.generation());
        Observed { generation, progress: if ours { self.slot.word(0) } else { 0 } }
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        if !self.done {
            // An error here is sticky: nothing runs any more.
            let _ = self.stream.synchronize();
        }
    }
}

/// Looks again and again, on a thread that may block, until there is an answer.
#[derive(Debug)]
pub(crate) struct Watch {
    hop: Arc<Hop>,
    shard: ShardId,
    at_least: u64,
    until: Option<Instant>,
    given_up: Arc<AtomicBool>,
}

/// Ends the watch when its caller goes.
pub(crate) struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Watch {
    /// Until `until`; for ever when it is `None`, which is past the clock's end.
    pub(crate) fn new(hop: Arc<Hop>, shard: ShardId, at_least: u64, until: Option<Instant>) -> Self {
        Self { hop, shard, at_least, until, given_up: Arc::default() }
    }

    pub(crate) fn guard(&self) -> Guard {
        Guard(Arc::clone(&self.given_up))
    }

    pub(crate) fn run(self) -> Result<Observed> {
        let mut pause = self.hop.config.first_pause;
        loop {
            thread::sleep(pause);
            pause = (pause * 2).min(self.hop.config.longest_pause);
            let over = self.until.is_some_and(|until| Instant::now() >= until);
            let alive = self.hop.alive.check();
            let seen = match self.hop.words(self.shard)? {
                Some(seen) => seen,
                None => match self.hop.look(self.shard)?.poll()? {
                    Ok(seen) => seen,
                    Err(late) => late.wait()?,
                },
            };
            if let Some(answer) = self.hop.answer(seen, self.at_least, alive) {
                return answer;
            }
            if over || self.given_up.load(Ordering::Relaxed) {
                return Ok(seen);
            }
        }
    }
}
