//! The reader's half of the handshake: blocking, and bounded by its deadline at every wait.

use crate::{
    connection::Connection,
    error::{deadline, failed},
    wire::{MAX_REPLY, Reply, Request},
};
use flashboot_channel::local::{Policy, directory};
use flashboot_core::{Code, Error, Kind, Locator, MemoryKind, Result};
use flashboot_memory::Expected;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
        SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, socket_with,
        sockopt::socket_peercred,
    },
};
use std::{
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

/// How long to wait when an exporter's backlog is full; the kernel offers nothing to poll for.
const BACKLOG_FULL: Duration = Duration::from_millis(2);
/// Descriptors we make room for: one is right, more are told apart from it and closed.
const ROOM: usize = 4;

/// A connection to an exporter that has handed out its arena, which its numbers say is the locator's.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) connection: Connection,
    /// The memory, of the kind that the locator says; the caller maps and checks it.
    pub(crate) descriptor: OwnedFd,
    /// The memfd of a GPU arena's words, where the exporter keeps them in host memory too.
    pub(crate) words: Option<OwnedFd>,
}

/// The time left of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock<'a> {
    until: Instant,
    timeout: Duration,
    peer: &'a str,
}

impl<'a> Clock<'a> {
    /// A call that began at `started`. A timeout beyond the clock's range is none.
    pub(crate) fn new(started: Instant, timeout: Duration, peer: &'a str) -> Self {
        let until = started
            .checked_add(timeout)
            .or_else(|| started.checked_add(Duration::from_secs(86_400 * 365)))
            .unwrap_or(started);
        Self { until, timeout, peer }
    }

    pub(crate) fn left(&self, what: &str) -> Result<Duration> {
        match self.until.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(deadline("import", self.timeout, what, self.peer)),
        }
    }
}

/// Dials the exporter that `locator` names, checks who it is, and takes what it hands over.
pub(crate) fn dial(locator: &Locator, policy: &Policy, clock: Clock<'_>) -> Result<Dialled> {
    let peer = locator.endpoint.as_str();
    let socket = connect_to(&clock)?;

    let source = socket_peercred(&socket).map_err(|errno| {
        failed("getsockopt(SO_PEERCRED)", errno, "the exporter's identity").with_peer(peer)
    })?;
    let (uid, gid) = (source.uid.as_raw(), source.gid.as_raw());
    if !policy.admits_source(uid, gid) {
        return Err(Error::new(
            Kind::Permission,
            "import",
            format!("the exporter runs as uid {uid}, gid {gid}"),
        )
        .with_peer(peer)
        .with_remedy("add it to allow_uids or allow_gids if you trust it"));
    }

    let request = Request { generation: locator.generation.word() }.encode();
    match send(&socket, &request, SendFlags::NOSIGNAL) {
        // A refusal may be waiting although nobody reads our request any more.
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(errno) => return Err(failed("send", errno, "the request").with_peer(peer)),
    }
    let (reply, descriptors) = receive(&socket, &clock)?;
    if let Err((refusal, said)) = reply.status {
        return Err(refusal.into_error(&said, peer));
    }
    let count = descriptors.len();
    let most = if reply.memory == MemoryKind::Gpu { 2 } else { 1 };
    let mut descriptors = descriptors.into_iter();
    let (Some(descriptor), words, true) = (descriptors.next(), descriptors.next(), count <= most) else {
        let detail = format!("the reply carries {count} descriptors for {} memory", reply.memory);
        return Err(Error::new(Kind::Protocol, "import", detail).with_peer(peer));
    };
    if reply.generation != locator.generation.word() {
        let detail = format!("the exporter answered for generation {:016x}", reply.generation);
        return Err(Error::new(Kind::StaleGeneration, "import", detail).with_peer(peer));
    }
    let found = Expected { payload: reply.payload, capacity: reply.capacity, shards: reply.shards };
    let expected = Expected { payload: locator.payload, capacity: locator.capacity, shards: locator.shards };
    if found != expected {
        return Err(Error::new(
            Kind::Mismatch,
            "import",
            format!("the exporter has {found:?}, the locator says {expected:?}"),
        )
        .with_peer(peer));
    }
    if reply.memory != locator.location.memory() {
        let (found, named) = (reply.memory, locator.location.memory());
        let detail = format!("the exporter hands out {found} memory, the locator names {named} memory");
        return Err(Error::new(Kind::Mismatch, "import", detail).with_peer(peer));
    }
    Ok(Dialled { connection: Connection::new(socket, peer.to_owned()), descriptor, words })
}

fn connect_to(clock: &Clock<'_>) -> Result<OwnedFd> {
    let peer = clock.peer;
    directory::socket_path(Path::new(peer))?;
    let address =
        SocketAddrUnix::new(peer).map_err(|errno| failed("connect", errno, "the exporter's path"))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|errno| failed("socket", errno, "a Unix socket"))?;
    loop {
        let errno = match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(errno) => errno,
        };
        let (kind, detail, remedy) = match errno {
            Errno::INTR => continue,
            Errno::AGAIN => {
                let left = clock.left("connecting to an exporter with a full backlog")?;
                std::thread::sleep(BACKLOG_FULL.min(left));
                continue;
            }
            Errno::NOENT => (
                Kind::SourceLost,
                "no such socket",
                "check that the exporter runs and that its socket directory is mounted here",
            ),
            Errno::CONNREFUSED => (Kind::SourceLost, "nobody listens", "check that the exporter runs"),
            Errno::ACCESS | Errno::PERM => (
                Kind::Permission,
                "the socket or its directory is closed to this user",
                "add this user to the exporter's allow_uids or allow_gids",
            ),
            Errno::PROTOTYPE => (Kind::Protocol, "another kind of socket", "fetch the locator again"),
            _ => (Kind::Io, "connecting", "check the exporter"),
        };
        return Err(Error::new(kind, "connect", detail)
            .with_code(Code::Errno(errno.raw_os_error()))
            .with_peer(peer)
            .with_remedy(remedy));
    }
}

/// Waits for the one reply and whatever descriptors come with it.
fn receive(socket: &OwnedFd, clock: &Clock<'_>) -> Result<(Reply, Vec<OwnedFd>)> {
    let peer = clock.peer;
    let lost = || {
        Error::new(Kind::SourceLost, "import", "the exporter closed the connection without an answer")
            .with_peer(peer)
    };
    let mut resets = 0;
    loop {
        let left = clock.left("an answer of the exporter")?;
        let wait = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait)) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(errno) => return Err(failed("poll", errno, "waiting for the reply").with_peer(peer)),
        }
        // One byte more than a reply has, so that a longer one shows.
        let mut frame = [0; MAX_REPLY + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match recvmsg(socket, &mut [IoSliceMut::new(&mut frame)], &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            // The exporter closed with our request unread; its reply may be queued all the same.
            Err(Errno::CONNRESET) if resets == 0 => {
                resets += 1;
                continue;
            }
            Err(Errno::CONNRESET) => return Err(lost()),
            Err(errno) => return Err(failed("recvmsg", errno, "the reply").with_peer(peer)),
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(found) = message {
                descriptors.extend(found);
            }
        }
        if got.bytes == 0 {
            return Err(lost());
        }
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || got.bytes > MAX_REPLY {
            let detail = format!("a reply of more than {MAX_REPLY} bytes or {ROOM} descriptors");
            return Err(Error::new(Kind::Protocol, "import", detail).with_peer(peer));
        }
        let reply =
            Reply::decode(frame.get(..got.bytes).unwrap_or_default()).map_err(|e| e.with_peer(peer))?;
        return Ok((reply, descriptors));
    }
}
