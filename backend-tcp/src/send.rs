//! The source's side of a reading connection: one thread that answers its reads in order.

use crate::{
    arena::Served,
    endpoint::Place,
    error::{frame_failed, no_thread},
    registry::check_current,
    wire::{Answer, MAX_FRAME, Read, Refusal, Request},
};
use flashboot_channel::{Blocking, failed, frame};
use flashboot_core::{Arena as _, ByteRange, Error, Generation, Kind, Result};
use flashboot_cuda::{CudaArena, Passing, Pinned, Stream};
use flashboot_memory::HostArena;
use rustix::{
    fs::sendfile,
    io::Errno,
    net::{SendFlags, send},
};
use std::{
    io::Write as _,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Bytes that pass through a buffer at once, where they must: enough for the GPU's copy engine, and within a core's cache.
const SLICE: u64 = 512 << 10;
/// How long a throttled sender sleeps at most before it looks whether its endpoint is still there.
const NAP: Duration = Duration::from_millis(50);

/// Starts the thread. It ends with the connection, or when the endpoint does.
pub(crate) fn start(lane: Blocking, served: Arc<Served>, generation: Generation, place: Place) -> Result<()> {
    let io = |e: std::io::Error| failed("setsockopt", &e, "a reading connection", lane.peer());
    if !place.ends(lane.socket()).map_err(io)? {
        return Ok(());
    }
    lane.socket().set_write_timeout(Some(place.exporter().silence)).map_err(io)?;
    let means = Means::of(&served)?;
    let sender = Sender { lane, served, generation, place, means };
    let spawned = thread::Builder::new().name("flashboot-send".into()).spawn(move || sender.run());
    spawned.map(drop).map_err(|e| no_thread(&e, "a thread to send by"))
}

struct Sender {
    lane: Blocking,
    served: Arc<Served>,
    generation: Generation,
    place: Place,
    means: Means,
}

/// How bytes get from the arena to the socket.
enum Means {
    /// The system passes pages of the memfd on.
    ZeroCopy(Arc<HostArena>),
    /// Through this buffer: TLS wants bytes, and some file systems pass no pages on.
    Buffer(Arc<HostArena>, Vec<u8>),
    /// Through pinned memory; two buffers, so that the GPU copies one while the other is sent.
    Pinned(Arc<CudaArena>, Arc<Stream>, Vec<Pinned>),
}

impl Means {
    fn of(served: &Served) -> Result<Self> {
        Ok(match served {
            Served::Host(arena) => Self::ZeroCopy(Arc::clone(arena)),
            Served::Gpu(arena) => {
                let stream = Arc::new(Stream::new(arena.context())?);
                Self::Pinned(Arc::clone(arena), stream, Vec::new())
            }
        })
    }
}

impl Sender {
    fn run(mut self) {
        loop {
            match self.one() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::debug!(%error, "a reading connection ended");
                    return;
                }
            }
        }
    }

    /// Answers one read; false when the reader has left.
    fn one(&mut self) -> Result<bool> {
        let frame = frame::read(&mut self.lane, MAX_FRAME);
        let Some(frame) = frame.map_err(|e| frame_failed("serve", e, self.lane.peer()))? else {
            return Ok(false);
        };
        let read = match Request::decode(&frame) {
            Ok(Request::Read(read)) => read,
            Ok(Request::Look(_)) => {
                let detail = "a look on a connection for reading";
                return Err(Error::new(Kind::Protocol, "serve", detail).with_peer(self.lane.peer()));
            }
            Err(e) => return Err(e.with_peer(self.lane.peer())),
        };
        match self.checked(&read) {
            Ok(range) => self.send(&read, range)?,
            Err((refusal, text)) => self.write(&Answer::refusal(&read, refusal, &text))?,
        }
        Ok(true)
    }

    /// What may be sent: bytes of the payload, never of the control block, and of the filling that was attached to.
    fn checked(&self, read: &Read) -> Result<ByteRange, (Refusal, String)> {
        if read.generation != self.generation.word() {
            return Err((Refusal::Stale, format!("attached to generation {}", self.generation)));
        }
        let payload = self.served.arena().payload();
        let Some(range) = read.range(payload) else {
            let text = format!("{} bytes from {} of a payload of {payload}", read.len, read.start);
            return Err((Refusal::Malformed, text));
        };
        check_current(&self.served, self.generation)?;
        Ok(range)
    }

    fn send(&mut self, read: &Read, range: ByteRange) -> Result<()> {
        if self.lane.plain().is_none()
            && let Means::ZeroCopy(arena) = &self.means
        {
            self.means = Means::Buffer(Arc::clone(arena), Vec::new());
        }
        match &mut self.means {
            Means::ZeroCopy(arena) => {
                let arena = Arc::clone(arena);
                if self.pass(&arena, read, range)? {
                    return Ok(());
                }
                tracing::debug!("the system passes no pages of this memfd on: copying");
                self.means = Means::Buffer(arena, Vec::new());
                // The head is out.
                self.buffered(range)
            }
            Means::Buffer(..) => {
                self.write(&Answer::granted(read).encode())?;
                self.buffered(range)
            }
            Means::Pinned(..) => {
                self.write(&Answer::granted(read).encode())?;
                self.pinned(range)
            }
        }
    }

    /// Zero copy; false, with nothing but the head sent, where the system does not do it.
    fn pass(&self, arena: &HostArena, read: &Read, range: ByteRange) -> Result<bool> {
        let lost = |call: &'static str, errno: Errno| {
            failed(call, &errno.into(), "sending payload", self.lane.peer())
        };
        let Some(socket) = self.lane.plain() else { return Ok(false) };
        let head = Answer::granted(read).encode();
        let mut out = &head[..];
        while !out.is_empty() {
            match send(socket, out, SendFlags::NOSIGNAL | SendFlags::MORE) {
                Ok(sent) => out = out.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(lost("send", errno)),
            }
        }
        let mut at = range.start;
        while at < range.end {
            let slice = self.paced(range.end.saturating_sub(at))?;
            let count = usize::try_from(slice).unwrap_or(0);
            let mut left = count;
            while left > 0 {
                match sendfile(socket, arena, Some(&mut at), left) {
                    // The memfd is sealed: it cannot have become shorter.
                    Ok(0) => return Err(lost("sendfile", Errno::NODATA)),
                    Ok(sent) => left = left.saturating_sub(sent),
                    Err(Errno::INTR) => {}
                    Err(Errno::INVAL | Errno::NOSYS) if at == range.start => return Ok(false),
                    Err(errno) => return Err(lost("sendfile", errno)),
                }
            }
        }
        Ok(true)
    }

    fn buffered(&mut self, range: ByteRange) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let slice = self.paced(range.end.saturating_sub(at).min(SLICE))?;
            let Means::Buffer(arena, buffer) = &mut self.means else { return Ok(()) };
            buffer.resize(usize::try_from(slice).unwrap_or(0), 0);
            arena.copy_out(at, buffer)?;
            let sent = self.lane.write_all(buffer);
            sent.map_err(|e| failed("send", &e, "sending payload", self.lane.peer()))?;
            at = at.saturating_add(slice);
        }
        self.lane.flush().map_err(|e| failed("send", &e, "sending payload", self.lane.peer()))
    }

    fn pinned(&mut self, range: ByteRange) -> Result<()> {
        let mut at = range.start;
        let mut coming: Option<(Passing, u64)> = None;
        loop {
            let next = if at < range.end {
                let slice = self.paced(range.end.saturating_sub(at).min(SLICE))?;
                let Means::Pinned(arena, stream, spare) = &mut self.means else { return Ok(()) };
                let buffer = match spare.pop() {
                    Some(buffer) => buffer,
                    None => Pinned::new(arena.context(), usize::try_from(SLICE).unwrap_or(0))?,
                };
                let part = ByteRange::new(at, at.saturating_add(slice));
                at = part.end;
                Some((arena.download(stream, part, buffer)?, slice))
            } else {
                None
            };
            if let Some((passing, len)) = coming.take() {
                let buffer = passing.wait()?;
                let bytes = buffer.as_slice().get(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
                let sent = self.lane.write_all(bytes);
                sent.map_err(|e| failed("send", &e, "sending payload", self.lane.peer()))?;
                if let Means::Pinned(_, _, spare) = &mut self.means {
                    spare.push(buffer);
                }
            }
            match next {
                Some(next) => coming = Some(next),
                None => break,
            }
        }
        self.lane.flush().map_err(|e| failed("send", &e, "sending payload", self.lane.peer()))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.lane.write_all(bytes).and_then(|()| self.lane.flush());
        written.map_err(|e| failed("send", &e, "an answer", self.lane.peer()))
    }

    /// How many of `wanted` bytes to send now; waits for their time where the exporter is throttled.
    fn paced(&self, wanted: u64) -> Result<u64> {
        let Some(throttle) = &self.place.exporter().throttle else { return Ok(wanted) };
        let slice = wanted.min(throttle.slice());
        let mut left = throttle.wait(slice, Instant::now());
        while !left.is_zero() {
            let nap = left.min(NAP);
            thread::sleep(nap);
            left = left.saturating_sub(nap);
            if self.place.is_closed() {
                return Err(Error::new(Kind::Cancelled, "serve", "the endpoint is closed"));
            }
        }
        Ok(slice)
    }
}
