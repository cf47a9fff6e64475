//! The reader's side of a reading connection: one thread that asks for parts ahead and lands what comes.
//!
//! What has been asked for comes, whatever became of its pull meanwhile: bytes of one that was cancelled are read and
//! dropped, so that the connection stays in step. Memory is written in calls that are bounded in time, and a part is given
//! up between two of them: then its pull is quiet, however long the rest takes to come.
//!
//! A connection that its peer's side ended (reset, or closed) is dialled again, and what it had been asked for is asked for
//! anew from the first piece that has not landed. Its parts stay owned meanwhile; where none of them is wanted any more, it
//! is dialled for the next. One that ends once more before anything landed ends its hop, and so does everything else that
//! breaks one: silence, and bytes that are no answer. The watch is a connection of another kind, and never dialled again.

use crate::{
    dial::Route,
    error::silent,
    job::{Destination, Taken},
    mover::Hop,
    runtime,
    wire::{self, ANSWER, Answer, MAX_FRAME, Read, Request, printable},
};
use flashboot_channel::{Blocking, failed, frame};
use flashboot_core::{ByteRange, Error, Kind, Result};
use flashboot_cuda::{Context, CudaOwned, Passing, Pinned, Stream};
use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use std::{
    collections::VecDeque,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    sync::Arc,
    time::{Duration, Instant},
};

/// Parts asked for ahead of the one that is coming: one hides the way there and back.
const AHEAD: usize = 2;
/// How long a receive may block before the thread looks whether its pull is still wanted.
const TICK: Duration = Duration::from_millis(20);
/// How long a broken connection may take to be dialled and attached again, unless a silence may not last as long.
const REDIAL: Duration = Duration::from_secs(5);
/// Bytes that go nowhere are read by so many.
const SINK: usize = 64 << 10;
/// Bytes of a pinned buffer.
const PINNED: u64 = 512 << 10;

/// One connection of one hop.
pub(crate) struct Lane {
    conn: Blocking,
    hop: Arc<Hop>,
    route: Route,
    silence: Duration,
    /// The peer's side ended the connection, and may be alive all the same.
    dropped: bool,
    /// Something has landed since the connection was made.
    moved: bool,
    /// How often it was dialled again.
    redials: u64,
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
        route: Route,
        silence: Duration,
        context: Option<&Context>,
    ) -> Result<Self> {
        set_up(&conn, silence)?;
        let bounce =
            |context| Ok::<_, Error>(Bounce { stream: Arc::new(Stream::new(context)?), spare: Vec::new() });
        let gpu = context.map(bounce).transpose()?;
        // The first connection has a second one to its credit.
        let (dropped, moved, redials) = (false, true, 0);
        Ok(Self { conn, hop, route, silence, dropped, moved, redials, coming: VecDeque::new(), gpu })
    }

    /// Until the hop is let go of and nothing is left to pull, or the connection breaks for good, which ends the hop.
    pub(crate) fn run(mut self) {
        while let Err(error) = self.carry() {
            if let Err(error) = self.dial_again(error) {
                tracing::debug!(%error, "a reading connection broke");
                // Pulls must have the cause before their parts are given up, which may be the pull's end.
                for taken in &self.coming {
                    taken.job.fail(error.clone());
                }
                return self.hop.breaks(error);
            }
        }
    }

    fn carry(&mut self) -> Result<()> {
        loop {
            while self.coming.len() < AHEAD {
                let next = if self.coming.is_empty() { self.hop.wait() } else { self.hop.take() };
                let Some(taken) = next else { break };
                self.coming.push_back(taken);
                self.ask(self.coming.len().saturating_sub(1))?;
            }
            let Some(mut taken) = self.coming.pop_front() else { return Ok(()) };
            match self.take(&mut taken) {
                Ok(0) => taken.done(),
                Ok(rest) => {
                    drop(taken);
                    self.sink(rest)?;
                }
                Err(error) => {
                    self.coming.push_front(taken);
                    return Err(error);
                }
            }
        }
    }

    /// Makes the connection anew after `error`, and asks for everything again that was under way on it and is still wanted.
    /// Without any of that it waits for the next part first, and makes none where there will be none.
    ///
    /// # Errors
    /// `error`, where it is no reason to, or nothing has landed since the last time; with why, where the source takes no new
    /// one.
    fn dial_again(&mut self, error: Error) -> Result<()> {
        if !std::mem::take(&mut self.dropped) || !std::mem::take(&mut self.moved) {
            return Err(error);
        }
        // Its place at the source is free, and nothing comes late. It has ended: that it cannot be shut is no matter.
        let _ = self.conn.socket().shutdown(Shutdown::Both);
        self.coming.iter_mut().for_each(Taken::heed);
        self.coming.retain(|taken| !taken.is_given_up());
        if self.coming.is_empty() {
            let Some(next) = self.hop.wait() else { return Ok(()) };
            self.coming.push_back(next);
        }
        self.redials = self.redials.saturating_add(1);
        let (peer, redials) = (self.conn.peer(), self.redials);
        tracing::warn!(peer, redials, %error, "a reading connection ended: dialling it again");
        self.conn = self.dialled().map_err(|again| for_good(&error, &again))?;
        self.coming.retain(|taken| !taken.is_given_up());
        (0..self.coming.len()).try_for_each(|number| self.ask(number))
    }

    /// One more connection to the source. Pulls that are stopped meanwhile give up their parts, and a hop that is let go of
    /// waits for none.
    fn dialled(&mut self) -> Result<Blocking> {
        let patience = REDIAL.min(self.silence);
        let route = self.route.once_more(patience);
        let (coming, hop) = (&mut self.coming, &self.hop);
        let conn = runtime::handle()?.block_on(async {
            let dialling = tokio::time::timeout(patience, route.attach(wire::Lane::Read));
            tokio::pin!(dialling);
            loop {
                tokio::select! {
                    dialled = &mut dialling => {
                        let late = |_| Error::new(Kind::Deadline, "attach", format!("longer than {patience:?}"));
                        return dialled.map_err(late)??.into_blocking();
                    }
                    () = tokio::time::sleep(TICK) => {
                        coming.iter_mut().for_each(Taken::heed);
                        if hop.is_abandoned() {
                            return Err(crate::error::cancelled("what was still to come of them"));
                        }
                    }
                }
            }
        })?;
        set_up(&conn, self.silence)?;
        Ok(conn)
    }

    /// Asks for what is left of one that is coming.
    fn ask(&mut self, number: usize) -> Result<()> {
        let Some(taken) = self.coming.get(number) else { return Ok(()) };
        let asked = Request::Read(self.read(taken.left())).encode();
        let framed = frame::framed(&asked, MAX_FRAME)
            .map_err(|e| crate::error::frame_failed("read", e, self.conn.peer()))?;
        let sent = self.conn.write_all(&framed).and_then(|()| self.conn.flush());
        sent.map_err(|e| self.broke("send", &e, "asking for payload"))
    }

    fn read(&self, range: ByteRange) -> Read {
        let len = u32::try_from(range.len()).unwrap_or(u32::MAX);
        Read { generation: self.hop.generation().word(), start: range.start, len }
    }

    /// One answer, into its part or nowhere. Gives how much is still to come of it.
    fn take(&mut self, taken: &mut Taken) -> Result<u64> {
        let asked = taken.left();
        let mut head = [0; ANSWER];
        self.fill(&mut head, &mut Some(taken), "the answer to a read")?;
        let answer = Answer::decode(&head, &self.read(asked)).map_err(|e| e.with_peer(self.conn.peer()))?;
        if let Some(refusal) = answer.refused {
            let mut text = vec![0; usize::try_from(answer.len).unwrap_or(0)];
            self.fill(&mut text, &mut None, "the text of a refusal")?;
            // This pull's alone: the connection is in step.
            taken.job.fail(refusal.into_error("read", &printable(&text), self.conn.peer()));
            taken.heed();
            return Ok(0);
        }
        let gpu = match taken.memory() {
            None => return Ok(asked.len()),
            Some(Destination::Gpu(owned)) => Some(owned),
            Some(Destination::Host(_)) => None,
        };
        // Of a piece that was not wanted any more, some bytes may have come.
        let some = match gpu {
            Some(owned) => self.land_on_gpu(taken, &owned)?,
            None => self.land(taken)?,
        };
        Ok(taken.left().len().saturating_sub(some))
    }

    /// Lands a part in place, piece by piece, each hashed while it is in the cache. Gives how many bytes came of a piece that
    /// is not wanted any more.
    fn land(&mut self, taken: &mut Taken) -> Result<u64> {
        let job = Arc::clone(&taken.job);
        let step = usize::try_from(job.piece()).unwrap_or(usize::MAX).max(1);
        let mut at = taken.left().start;
        let mut ended = Ok(0);
        if let Some(Destination::Host(memory)) = taken.memory() {
            for piece in memory.chunks_mut(step) {
                match self.receive(piece, &|| job.is_stopped(), "payload") {
                    Ok(Came::All) => {
                        job.landed(at, piece);
                        at = at.saturating_add(piece.len() as u64);
                        self.moved = true;
                    }
                    Ok(Came::Stopped(some)) => {
                        ended = Ok(some as u64);
                        break;
                    }
                    Err(e) => {
                        ended = Err(e);
                        break;
                    }
                }
            }
        }
        taken.landed_to(at);
        ended
    }

    /// Lands a part through pinned memory; one buffer is copied by the GPU while the next is received. Gives what
    /// [`land`](Self::land) does.
    fn land_on_gpu(&mut self, taken: &mut Taken, owned: &Arc<CudaOwned>) -> Result<u64> {
        let mut passing = None;
        let mut at = taken.left().start;
        let ended = self.pass(taken, owned, &mut at, &mut passing);
        // What was received is in place before anything is asked for again.
        let last = passing.map_or(Ok(()), |last| self.settle(last, &mut at));
        taken.landed_to(at);
        last.and(ended)
    }

    /// Receives what is left of a part. Moves `at` behind what is in place, and leaves in `passing` what the GPU still copies.
    fn pass(
        &mut self,
        taken: &Taken,
        owned: &Arc<CudaOwned>,
        at: &mut u64,
        passing: &mut Option<(Passing, u64)>,
    ) -> Result<u64> {
        let job = Arc::clone(&taken.job);
        let range = taken.left();
        let mut received = range.start;
        while received < range.end {
            let len = range.end.saturating_sub(received).min(PINNED);
            let mut buffer = self.buffer(owned.context())?;
            let into = buffer.as_mut_slice().get_mut(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
            let came = self.receive(into, &|| job.is_stopped(), "payload");
            if let Some(before) = passing.take() {
                self.settle(before, at)?;
            }
            match came {
                Ok(Came::All) => {
                    let end = received.saturating_add(len);
                    let stream = self.gpu.as_ref().map(|gpu| Arc::clone(&gpu.stream));
                    let stream = match stream {
                        Some(stream) => stream,
                        None => Arc::new(Stream::new(owned.context())?),
                    };
                    let copied = owned.upload(&stream, ByteRange::new(received, end), buffer)?;
                    *passing = Some((copied, end));
                    received = end;
                    self.moved = true;
                }
                Ok(Came::Stopped(some)) => {
                    self.keep(buffer);
                    return Ok(some as u64);
                }
                Err(e) => {
                    self.keep(buffer);
                    return Err(e);
                }
            }
        }
        Ok(0)
    }

    fn buffer(&mut self, context: &Context) -> Result<Pinned> {
        match self.gpu.as_mut().and_then(|gpu| gpu.spare.pop()) {
            Some(buffer) => Ok(buffer),
            None => Pinned::new(context, usize::try_from(PINNED).unwrap_or(0)),
        }
    }

    /// Waits until the GPU has copied a buffer, and moves `at` behind it. Where that fails, no connection helps.
    fn settle(&mut self, (passing, end): (Passing, u64), at: &mut u64) -> Result<()> {
        let spare = passing.wait().inspect_err(|_| self.dropped = false)?;
        self.keep(spare);
        *at = end;
        Ok(())
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
                Ok(0) => return Err(self.broke("recv", &io::ErrorKind::UnexpectedEof.into(), what)),
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
                Err(e) => return Err(self.broke("recv", &e, what)),
            }
        }
    }

    /// What a failed call means; notes whether the peer's side ended the connection, which a silent one's has not.
    fn broke(&mut self, call: &'static str, error: &io::Error, what: &str) -> Error {
        use io::ErrorKind as E;
        let ended = [E::UnexpectedEof, E::ConnectionReset, E::ConnectionAborted, E::BrokenPipe];
        self.dropped = ended.contains(&error.kind());
        failed(call, error, what, self.conn.peer())
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

/// What ended a connection, and why there is no other.
fn for_good(first: &Error, again: &Error) -> Error {
    let code = again.code().map_or_else(String::new, |code| format!(": {code}"));
    let detail = format!("{}; dialled again: {}: {}{code}", first.detail(), again.op(), again.detail());
    let both = Error::new(first.kind(), first.op(), detail)
        .with_remedy(again.remedy().unwrap_or("go on from another source"));
    let both = first.code().into_iter().fold(both, Error::with_code);
    first.peer().into_iter().fold(both, Error::with_peer)
}

fn set_up(conn: &Blocking, silence: Duration) -> Result<()> {
    let io = |e: io::Error| failed("setsockopt", &e, "a reading connection", conn.peer());
    conn.socket().set_read_timeout(Some(TICK)).map_err(io)?;
    conn.socket().set_write_timeout(Some(silence)).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::Code;

    #[test]
    fn an_end_for_good_is_the_first_one_with_what_the_dial_met_and_its_remedy() {
        let first = Error::new(Kind::SourceLost, "recv", "payload: reset")
            .with_code(Code::Errno(104))
            .with_peer("h:1")
            .with_remedy("see what ended it");
        let refused = Error::new(Kind::Io, "connect", "nobody listens").with_code(Code::Errno(111));
        let both = for_good(&first, &refused);
        assert_eq!((both.kind(), both.op(), both.code()), (first.kind(), first.op(), first.code()));
        assert_eq!((both.peer(), both.remedy()), (Some("h:1"), Some("go on from another source")));
        for word in ["payload: reset; dialled again: connect: nobody listens", "111"] {
            assert!(both.detail().contains(word), "{word}: {both}");
        }
        let both = for_good(&first, &refused.with_remedy("start it"));
        assert_eq!(both.remedy(), Some("start it"));
    }
}
