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
    let means = Means::of(&served, &lane, place.exporter().zero_copy)?;
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
    Pages(Arc<HostArena>),
    /// The system copies them from the arena's mapping.
    Mapping(Arc<HostArena>),
    /// Through this buffer: TLS encrypts what it is given.
    Buffer(Arc<HostArena>, Vec<u8>),
    /// Through pinned memory; two buffers, so that the GPU copies one while the other is sent.
    Pinned(Arc<CudaArena>, Arc<Stream>, Vec<Pinned>),
}

impl Means {
    fn of(served: &Served, lane: &Blocking, zero_copy: Option<bool>) -> Result<Self> {
        let near = lane.socket().peer_addr().is_ok_and(|peer| peer.ip().to_canonical().is_loopback());
        Ok(match served {
            Served::Host(arena) if lane.plain().is_none() => Self::Buffer(Arc::clone(arena), Vec::new()),
            Served::Host(arena) if zero_copy.unwrap_or(!near) => Self::Pages(Arc::clone(arena)),
            Served::Host(arena) => Self::Mapping(Arc::clone(arena)),
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
        self.head(read)?;
        match &self.means {
            Means::Pages(arena) => {
                let arena = Arc::clone(arena);
                let done = self.pages(&arena, range)?;
                if done < range.end {
                    tracing::debug!("the system passes no pages of this memfd on: they are copied");
                    self.means = Means::Mapping(Arc::clone(&arena));
                    self.mapping(&arena, ByteRange::new(done, range.end))?;
                }
                Ok(())
            }
            Means::Mapping(arena) => self.mapping(arena, range),
            Means::Buffer(..) => self.buffered(range),
            Means::Pinned(..) => self.pinned(range),
        }
    }

    /// Says that the bytes follow; on a plain socket in one segment with the first of them.
    fn head(&mut self, read: &Read) -> Result<()> {
        let head = Answer::granted(read).encode();
        let Some(socket) = self.lane.plain() else { return self.write(&head) };
        let mut left = &head[..];
        while !left.is_empty() {
            match send(socket, left, SendFlags::NOSIGNAL | SendFlags::MORE) {
                Ok(sent) => left = left.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.lost("send", &errno.into())),
            }
        }
        Ok(())
    }

    fn lost(&self, call: &'static str, error: &std::io::Error) -> Error {
        failed(call, error, "sending payload", self.lane.peer())
    }

    /// Gives the byte before which everything was sent: the range's end, or where the system does not do it, its start.
    fn pages(&self, arena: &HostArena, range: ByteRange) -> Result<u64> {
        let Some(socket) = self.lane.plain() else { return Ok(range.start) };
        let mut at = range.start;
        while at < range.end {
            let slice = self.paced(range.end.saturating_sub(at))?;
            let mut left = usize::try_from(slice).unwrap_or(0);
            while left > 0 {
                match sendfile(socket, arena, Some(&mut at), left) {
                    // The memfd is sealed: it cannot have become shorter.
                    Ok(0) => return Err(self.lost("sendfile", &Errno::NODATA.into())),
                    Ok(sent) => left = left.saturating_sub(sent),
                    Err(Errno::INTR) => {}
                    Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if at == range.start => {
                        return Ok(at);
                    }
                    Err(errno) => return Err(self.lost("sendfile", &errno.into())),
                }
            }
        }
        Ok(at)
    }

    fn mapping(&self, arena: &HostArena, range: ByteRange) -> Result<()> {
        let Some(socket) = self.lane.plain() else { return Ok(()) };
        let mut at = range.start;
        while at < range.end {
            let end = at.saturating_add(self.paced(range.end.saturating_sub(at))?);
            while at < end {
                match arena.send(socket, ByteRange::new(at, end)) {
                    Ok(sent) => at = at.saturating_add(sent as u64),
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(self.lost("send", &e)),
                }
            }
        }
        Ok(())
    }

    fn buffered(&mut self, range: ByteRange) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let slice = self.paced(range.end.saturating_sub(at).min(SLICE))?;
            let Means::Buffer(arena, buffer) = &mut self.means else { return Ok(()) };
            buffer.resize(usize::try_from(slice).unwrap_or(0), 0);
            arena.copy_out(at, buffer)?;
            let sent = self.lane.write_all(buffer);
            sent.map_err(|e| self.lost("send", &e))?;
            at = at.saturating_add(slice);
        }
        self.lane.flush().map_err(|e| self.lost("send", &e))
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
                sent.map_err(|e| self.lost("send", &e))?;
                if let Means::Pinned(_, _, spare) = &mut self.means {
                    spare.push(buffer);
                }
            }
            match next {
                Some(next) => coming = Some(next),
                None => break,
            }
        }
        self.lane.flush().map_err(|e| self.lost("send", &e))
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
