//! The reader's side of a reading connection: one thread that asks for parts ahead and lands what comes.
//!
//! What has been asked for comes, whatever became of its pull meanwhile: bytes of one that was cancelled are read and
//! dropped, so that the connection stays in step. Memory is written in calls that are bounded in time, and a part is given
//! up between two of them: then its pull is quiet, however long the rest takes to come.

use crate::{
    error::{closed, silent},
    job::{Memory, Taken},
    mover::Hop,
    wire::{ANSWER, Answer, MAX_FRAME, Read, Request, printable},
};
use flashboot_channel::{Blocking, failed, frame};
use flashboot_core::{ByteRange, Error, Result};
use flashboot_cuda::{Context, CudaOwned, Passing, Pinned, Stream};
use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use std::{
    collections::VecDeque,
    io::{self, Read as _, Write as _},
    sync::Arc,
    time::{Duration, Instant},
};

/// Parts asked for ahead of the one that is coming: one hides the way there and back.
const AHEAD: usize = 2;
/// How long a receive may block before the thread looks whether its pull is still wanted.
const TICK: Duration = Duration::from_millis(20);
/// Bytes that go nowhere are read by so many.
const SINK: usize = 64 << 10;
/// Bytes of a pinned buffer.
const PINNED: u64 = 512 << 10;

/// One connection of one hop.
pub(crate) struct Lane {
    conn: Blocking,
    hop: Arc<Hop>,
    silence: Duration,
    /// What was asked for, in order.
    coming: VecDeque<Taken>,
    gpu: Option<Bounce>,
}

/// What GPU memory is filled through.
struct Bounce {
    stream: Arc<Stream>,
    spare: Vec<Pinned>,
}

/// How a wait for bytes ended.
enum Came {
    All,
    /// The pull is not wanted any more; so many bytes had come.
    Stopped(usize),
}

impl Lane {
    /// `context`: of the GPU whose memory is filled.
    pub(crate) fn new(
        conn: Blocking,
        hop: Arc<Hop>,
        silence: Duration,
        context: Option<&Context>,
    ) -> Result<Self> {
        let io = |e: io::Error| failed("setsockopt", &e, "a reading connection", conn.peer());
        conn.socket().set_read_timeout(Some(TICK)).map_err(io)?;
        conn.socket().set_write_timeout(Some(silence)).map_err(io)?;
        let bounce =
            |context| Ok::<_, Error>(Bounce { stream: Arc::new(Stream::new(context)?), spare: Vec::new() });
        let gpu = context.map(bounce).transpose()?;
        Ok(Self { conn, hop, silence, coming: VecDeque::new(), gpu })
    }

    /// Until the hop is let go of and nothing is left to pull, or the connection breaks, which ends the hop.
    pub(crate) fn run(mut self) {
        if let Err(error) = self.carry() {
            tracing::debug!(%error, "a reading connection broke");
            for taken in &self.coming {
                taken.job.fail(error.clone());
            }
            self.hop.breaks(error);
        }
    }

    fn carry(&mut self) -> Result<()> {
        loop {
            while self.coming.len() < AHEAD {
                let next = if self.coming.is_empty() { self.hop.wait() } else { self.hop.take() };
                let Some(taken) = next else { break };
                self.ask(taken)?;
            }
            let Some(mut taken) = self.coming.pop_front() else { return Ok(()) };
            // Its pull must have the cause before the part is given up, which may be the pull's end.
            let rest = self.take(&mut taken).inspect_err(|error| taken.job.fail(error.clone()))?;
            match rest {
                0 => taken.done(),
                rest => {
                    drop(taken);
                    self.sink(rest)?;
                }
            }
        }
    }

    fn ask(&mut self, taken: Taken) -> Result<()> {
        let asked = Request::Read(self.read(taken.range)).encode();
        self.coming.push_back(taken);
        let framed = frame::framed(&asked, MAX_FRAME)
            .map_err(|e| crate::error::frame_failed("read", e, self.conn.peer()))?;
        let sent = self.conn.write_all(&framed).and_then(|()| self.conn.flush());
        sent.map_err(|e| failed("send", &e, "asking for payload", self.conn.peer()))
    }

    fn read(&self, range: ByteRange) -> Read {
        let len = u32::try_from(range.len()).unwrap_or(u32::MAX);
        Read { generation: self.hop.generation().word(), start: range.start, len }
    }

    /// One answer, into its part or nowhere. Gives how much is still to come of it.
    fn take(&mut self, taken: &mut Taken) -> Result<u64> {
        let mut head = [0; ANSWER];
        self.fill(&mut head, &mut Some(taken), "the answer to a read")?;
        let answer =
            Answer::decode(&head, &self.read(taken.range)).map_err(|e| e.with_peer(self.conn.peer()))?;
        if let Some(refusal) = answer.refused {
            let mut text = vec![0; usize::try_from(answer.len).unwrap_or(0)];
            self.fill(&mut text, &mut None, "the text of a refusal")?;
            // This pull's alone: the connection is in step.
            taken.job.fail(refusal.into_error("read", &printable(&text), self.conn.peer()));
            taken.heed();
            return Ok(0);
        }
        let came = match taken.memory() {
            None => 0,
            Some(Memory::Gpu(owned)) => {
                let owned = Arc::clone(owned);
                self.land_on_gpu(taken, &owned)?
            }
            Some(Memory::Host(_)) => self.land(taken)?,
        };
        Ok(taken.range.len().saturating_sub(came))
    }

    /// Lands a part in place, piece by piece, each hashed while it is in the cache. Gives how much came.
    fn land(&mut self, taken: &mut Taken) -> Result<u64> {
        let job = Arc::clone(&taken.job);
        let step = usize::try_from(job.piece()).unwrap_or(usize::MAX).max(1);
        let start = taken.range.start;
        let Some(Memory::Host(part)) = taken.memory() else { return Ok(0) };
        let mut at = start;
        for piece in part.as_mut_slice().chunks_mut(step) {
            match self.receive(piece, &|| job.is_stopped(), "payload")? {
                Came::All => {
                    job.landed(at, piece);
                    at = at.saturating_add(piece.len() as u64);
                }
                Came::Stopped(some) => return Ok(at.saturating_sub(start).saturating_add(some as u64)),
            }
        }
        Ok(at.saturating_sub(start))
    }

    /// Lands a part through pinned memory; one buffer is copied by the GPU while the next is received.
    fn land_on_gpu(&mut self, taken: &Taken, owned: &Arc<CudaOwned>) -> Result<u64> {
        let job = Arc::clone(&taken.job);
        let range = taken.range;
        let mut at = range.start;
        let mut passing: Option<Passing> = None;
        while at < range.end {
            let len = range.end.saturating_sub(at).min(PINNED);
            let mut buffer = self.buffer(owned.context())?;
            let into = buffer.as_mut_slice().get_mut(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
            let came = self.receive(into, &|| job.is_stopped(), "payload")?;
            if let Some(before) = passing.take() {
                let spare = before.wait()?;
                self.keep(spare);
            }
            match came {
                Came::All => {
                    let end = at.saturating_add(len);
                    let stream = self.gpu.as_ref().map(|gpu| Arc::clone(&gpu.stream));
                    let stream = match stream {
                        Some(stream) => stream,
                        None => Arc::new(Stream::new(owned.context())?),
                    };
                    passing = Some(owned.upload(&stream, ByteRange::new(at, end), buffer)?);
                    at = end;
                }
                Came::Stopped(some) => {
                    self.keep(buffer);
                    at = at.saturating_add(some as u64);
                    break;
                }
            }
        }
        if let Some(last) = passing {
            let spare = last.wait()?;
            self.keep(spare);
        }
        Ok(at.saturating_sub(range.start))
    }

    fn buffer(&mut self, context: &Context) -> Result<Pinned> {
        match self.gpu.as_mut().and_then(|gpu| gpu.spare.pop()) {
            Some(buffer) => Ok(buffer),
            None => Pinned::new(context, usize::try_from(PINNED).unwrap_or(0)),
        }
    }

    fn keep(&mut self, buffer: Pinned) {
        if let Some(gpu) = &mut self.gpu {
            gpu.spare.push(buffer);
        }
    }

    /// Reads what nobody wants any more, unless nobody wants the connection either.
    fn sink(&mut self, len: u64) -> Result<()> {
        let mut left = len;
        let mut nowhere = vec![0; SINK];
        while left > 0 {
            let step = usize::try_from(left).unwrap_or(SINK).min(SINK);
            let Some(into) = nowhere.get_mut(..step) else { return Ok(()) };
            self.fill(into, &mut None, "payload that was cancelled")?;
            left = left.saturating_sub(step as u64);
        }
        Ok(())
    }

    /// Fills `into`, giving up `heeding` when its pull is stopped; a hop that is let go of ends it.
    fn fill(&mut self, into: &mut [u8], heeding: &mut Option<&mut Taken>, what: &str) -> Result<()> {
        let mut filled: usize = 0;
        loop {
            let hop = Arc::clone(&self.hop);
            let stopped = heeding.as_ref().map(|taken| Arc::clone(&taken.job));
            let stop = move || match &stopped {
                Some(job) => job.is_stopped(),
                None => hop.is_abandoned(),
            };
            let rest = into.get_mut(filled..).unwrap_or_default();
            match self.receive(rest, &stop, what)? {
                Came::All => return Ok(()),
                Came::Stopped(some) => {
                    filled = filled.saturating_add(some);
                    match heeding.take() {
                        Some(taken) => taken.heed(),
                        None => return Err(crate::error::cancelled("what was still to come of them")),
                    }
                }
            }
        }
    }

    /// Fills `into`, unless `stop` says that it is not wanted any more.
    fn receive(&mut self, into: &mut [u8], stop: &dyn Fn() -> bool, what: &str) -> Result<Came> {
        let mut filled: usize = 0;
        let mut last = Instant::now();
        loop {
            // Others that were asked for may be stopped while this one comes.
            self.coming.iter_mut().for_each(Taken::heed);
            if stop() {
                return Ok(Came::Stopped(filled));
            }
            let rest = into.get_mut(filled..).unwrap_or_default();
            if rest.is_empty() {
                return Ok(Came::All);
            }
            match self.some(rest) {
                Ok(0) => return Err(closed("recv", what, self.conn.peer())),
                Ok(came) => {
                    filled = filled.saturating_add(came);
                    last = Instant::now();
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if last.elapsed() >= self.silence {
                        return Err(silent("recv", self.silence, what, self.conn.peer()));
                    }
                }
                Err(e) => return Err(failed("recv", &e, what, self.conn.peer())),
            }
        }
    }

    /// Some bytes, within a tick.
    fn some(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(socket) = self.conn.plain() else { return self.conn.read(into) };
        // All of them in one call where they come in time.
        match recv(socket, into, RecvFlags::WAITALL) {
            Ok((came, _)) => Ok(came),
            Err(Errno::INTR) => Err(io::ErrorKind::Interrupted.into()),
            Err(errno) => Err(errno.into()),
        }
    }
}
