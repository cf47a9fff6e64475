//! Readers, one scatterer, writers: the steps of a job carried out on a few threads with bounded memory.

use super::cutter::{CHUNK, Cutter};
use super::open::{Open, Piece, Sink};
use super::step::{Step, Work};
use crate::blocks::Progress;
use crate::direct::Slab;
use crate::error::{Error, Result};
use crate::source::Source;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

/// Bytes that open pieces may take together.
const OPEN: u64 = 160 << 20;

/// More readers than this do not make a disk faster.
const READERS: usize = 8;

/// More writers than this do not either, while half of them hash.
const WRITERS: usize = 16;

/// Steps on their way to a reader and back.
const STEPS: usize = 4;

/// What is to be done.
pub(crate) struct Job<'j> {
    /// For errors: what is being made.
    pub(crate) what: &'j Path,
    /// The files that origins name.
    pub(crate) files: &'j [Source],
    /// Bytes of each stream, and how many of its first pieces are complete.
    pub(crate) streams: &'j [(u64, u64)],
    /// Bytes of a piece: [`memory`]'s.
    pub(crate) piece: u64,
    pub(crate) sink: &'j dyn Sink,
    pub(crate) progress: &'j dyn Progress,
    /// Bytes in all, for the progress.
    pub(crate) total: u64,
    /// Readers, of which at most 8 are started; [`writers`] says how many writers there are beside them.
    pub(crate) threads: usize,
}

/// The size of a piece for so many streams: the largest up to 4 MiB with which two of each stream's fit into 160 MiB,
/// because large writes keep a disk busiest. Beside them there are 4 steps of 1 MiB (or of one row), and the pieces that
/// are being written or wait for it: two a writer.
pub(crate) fn memory(streams: usize) -> u64 {
    let fits = OPEN / 2 / (streams.max(1) as u64);
    let power = if fits > 0 { 1u64 << fits.ilog2() } else { 0 };
    power.clamp(64 << 10, 4 << 20)
}

/// Writers for so many readers: twice as many, at most 16. Streams that are filled alike have their pieces ready all at
/// once; while some writers hash, others must be there to keep the disk busy.
pub(crate) fn writers(threads: usize) -> usize {
    threads.clamp(1, READERS).saturating_mul(2).min(WRITERS)
}

/// A step and the buffer it is read into.
type Buffered = (Step, Vec<u8>);

/// The same once it was read.
type Filled = Result<Buffered>;

/// The two ends of one reader.
type Reader = (SyncSender<Buffered>, Receiver<Filled>);

/// Carries out what `produce` gives, in order. Every stream must be complete at the end.
pub(crate) fn run(
    job: &Job<'_>,
    produce: impl FnOnce(&mut dyn FnMut(&Work) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let (threads, writers) = (job.threads.clamp(1, READERS), writers(job.threads));
    let failed = Mutex::new(None::<Error>);
    let result = std::thread::scope(|scope| -> Result<()> {
        let spawn = |e: std::io::Error| Error::io("spawn", job.what, &e);
        let (pieces, queue) = sync_channel::<Piece>(writers);
        let (back, used) = sync_channel::<Slab>(writers * 4);
        let queue = std::sync::Arc::new(Mutex::new(queue));
        for _ in 0..writers {
            let (queue, back, failed) = (queue.clone(), back.clone(), &failed);
            let write = move || write(job, &queue, &back, failed);
            std::thread::Builder::new().spawn_scoped(scope, write).map_err(spawn)?;
        }
        drop((queue, back));
        let mut readers = Vec::with_capacity(threads);
        for _ in 0..threads {
            let (send, jobs) = sync_channel::<Buffered>(STEPS);
            let (done, filled) = sync_channel::<Filled>(STEPS);
            let read = move || read(job, &jobs, &done);
            std::thread::Builder::new().spawn_scoped(scope, read).map_err(spawn)?;
            readers.push((send, filled));
        }
        let most = usize::try_from(OPEN / job.piece.max(1)).unwrap_or(1).max(job.streams.len() + 1);
        let mut scatter = Scatter {
            job,
            open: Open::new(job.sink, job.piece, job.streams, most),
            readers,
            pieces,
            used,
            failed: &failed,
            buffers: Vec::new(),
            sent: 0,
            received: 0,
            done: 0,
        };
        let mut emit = |step| scatter.emit(step);
        let mut cutter = Cutter::new(&mut emit);
        produce(&mut |work| cutter.take(work))?;
        cutter.flush()?;
        let ends = cutter.ends(job.streams.len());
        scatter.drain()?;
        // Padding after the last tensor.
        for ((stream, (bytes, _)), end) in (0u32..).zip(job.streams).zip(ends) {
            scatter.open.zero(stream, end, *bytes)?;
            scatter.fill(stream, *bytes)?;
        }
        if scatter.open.is_complete() { Ok(()) } else { Err(Error::Changed { path: job.what.into() }) }
    });
    // What a writer failed with came first, whatever that made of the rest.
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => result,
    }
}

fn read(job: &Job<'_>, jobs: &Receiver<Buffered>, done: &SyncSender<Filled>) {
    while let Ok((step, mut buffer)) = jobs.recv() {
        let filled = fill(job, &step, &mut buffer).map(|()| (step, buffer));
        if done.send(filled).is_err() {
            return;
        }
    }
}

fn fill(job: &Job<'_>, step: &Step, buffer: &mut Vec<u8>) -> Result<()> {
    let len = usize::try_from(step.bytes).unwrap_or(usize::MAX);
    if buffer.len() < len {
        *buffer = crate::direct::zeroes(job.what, len.max(usize::try_from(CHUNK).unwrap_or(0)))?;
    }
    for read in &step.reads {
        let start = usize::try_from(read.at).unwrap_or(usize::MAX);
        let end = start.saturating_add(usize::try_from(read.len).unwrap_or(usize::MAX));
        let Some(into) = buffer.get_mut(start..end) else { continue };
        match job.files.get(read.file as usize) {
            Some(file) => file.read_at(read.offset, into)?,
            None => return Err(Error::Missing { path: job.what.into() }),
        }
    }
    Ok(())
}

fn write(
    job: &Job<'_>,
    queue: &Mutex<Receiver<Piece>>,
    back: &SyncSender<Slab>,
    failed: &Mutex<Option<Error>>,
) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Piece { stream, start, len, mut slab }) = next else { return };
        let bytes = slab.first(len);
        if let Err(e) = job.sink.put(stream, start, bytes) {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
            // The scatterer sees it before its next step; until then pieces are taken, so that it never waits for us.
        }
        // With enough slabs about, one more is given up.
        let _ = back.try_send(slab);
    }
}

/// The one thread between readers and writers.
struct Scatter<'s> {
    job: &'s Job<'s>,
    open: Open<'s>,
    readers: Vec<Reader>,
    pieces: SyncSender<Piece>,
    used: Receiver<Slab>,
    failed: &'s Mutex<Option<Error>>,
    buffers: Vec<Vec<u8>>,
    sent: usize,
    received: usize,
    done: u64,
}

impl Scatter<'_> {
    fn stopped(&self) -> Error {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        failed.unwrap_or_else(|| Error::Cancelled { path: self.job.what.into() })
    }

    /// Gives a step to the next reader in turn; takes the oldest one back where enough are on their way.
    fn emit(&mut self, step: Step) -> Result<()> {
        if self.sent - self.received >= STEPS {
            self.receive()?;
        }
        let buffer = self.buffers.pop().unwrap_or_default();
        let turn = self.sent % self.readers.len().max(1);
        let sent = self.readers.get(turn).map(|(send, _)| send.send((step, buffer)).is_ok());
        self.sent += 1;
        if sent == Some(true) { Ok(()) } else { Err(self.stopped()) }
    }

    fn drain(&mut self) -> Result<()> {
        while self.received < self.sent {
            self.receive()?;
        }
        Ok(())
    }

    /// Scatters the oldest step.
    fn receive(&mut self) -> Result<()> {
        let turn = self.received % self.readers.len().max(1);
        self.received += 1;
        let filled = self.readers.get(turn).map(|(_, filled)| filled.recv());
        let Some(Ok(filled)) = filled else { return Err(self.stopped()) };
        let (step, buffer) = filled?;
        if self.job.progress.cancelled() {
            return Err(Error::Cancelled { path: self.job.what.into() });
        }
        if self.failed.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Err(self.stopped());
        }
        while let Ok(slab) = self.used.try_recv() {
            self.open.recycle(slab);
        }
        for copy in &step.copies {
            self.open.copy(&buffer, copy)?;
        }
        for (stream, from, to) in &step.zeros {
            self.open.zero(*stream, *from, *to)?;
        }
        for (stream, to) in &step.filled {
            self.fill(*stream, *to)?;
        }
        self.open.make_room()?;
        self.buffers.push(buffer);
        Ok(())
    }

    fn fill(&mut self, stream: u32, to: u64) -> Result<()> {
        let (pieces, done) = (&self.pieces, &mut self.done);
        let mut gone = false;
        self.open.filled(stream, to, |piece| {
            *done += piece.len as u64;
            gone |= pieces.send(piece).is_err();
            Ok(())
        })?;
        self.job.progress.advance(self.done, self.job.total);
        if gone { Err(self.stopped()) } else { Ok(()) }
    }
}
