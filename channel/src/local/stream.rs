//! Frames over a Unix stream, each with the descriptors that go with it.
//!
//! A frame's descriptors travel with its first byte. Whoever receives says how many there may be; more, or ones that come
//! with later bytes, are closed unseen and the frame is refused.

use super::{Peer, failed};
use crate::frame;
use flashboot_core::{Error, Kind, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

/// The most descriptors of one frame.
pub const MOST_DESCRIPTORS: usize = 4;
/// A full backlog offers nothing to poll for.
const BACKLOG_FULL: Duration = Duration::from_millis(2);

/// One end of a connection. Its calls block, never past their deadline.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    peer: String,
}

impl Wire {
    /// An end at hand; `peer` names the other one in errors.
    ///
    /// # Errors
    /// The system's own.
    pub fn new(stream: UnixStream, peer: impl Into<String>) -> Result<Self> {
        let peer = peer.into();
        stream.set_nonblocking(true).map_err(|e| Error::from_io("fcntl", &e, "a Unix stream"))?;
        Ok(Self { stream, peer })
    }

    /// Dials the socket at `path`.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where nobody listens, [`Kind::Permission`] where we may not, [`Kind::Deadline`] with a full backlog.
    pub fn dial(path: &Path, deadline: Instant) -> Result<Self> {
        super::directory::socket_path(path)?;
        let peer = path.display().to_string();
        loop {
            let error = match UnixStream::connect(path) {
                Ok(stream) => return Self::new(stream, peer),
                Err(error) => error,
            };
            let errno = Errno::from_io_error(&error);
            let (kind, detail, remedy) = match errno {
                Some(Errno::INTR) => continue,
                Some(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(BACKLOG_FULL);
                    continue;
                }
                Some(Errno::AGAIN) => (Kind::Deadline, "its backlog is full", "try again later"),
                Some(Errno::NOENT) => (
                    Kind::Unavailable,
                    "there is no such socket",
                    "see that it runs and that its socket's directory is mounted here",
                ),
                Some(Errno::CONNREFUSED) => (Kind::Unavailable, "nobody listens", "see that it runs"),
                Some(Errno::ACCESS | Errno::PERM) => (
                    Kind::Permission,
                    "the socket or its directory is closed to this user",
                    "add this user to its allow_uids or allow_gids",
                ),
                _ => return Err(Error::from_io("connect", &error, "dialling").with_peer(peer)),
            };
            return Err(Error::new(kind, "connect", detail).with_peer(peer).with_remedy(remedy));
        }
    }

    /// Who is at the other end.
    ///
    /// # Errors
    /// The system's own.
    pub fn peer(&self) -> Result<Peer> {
        Peer::of(&self.stream)
    }

    /// Its name in errors.
    pub fn name(&self) -> &str {
        &self.peer
    }

    /// Ends the connection at both ends, also while another thread waits for it.
    pub fn shut(&self) {
        // An end that is gone already is as wanted.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Whether the other end has gone, or has something to say.
    pub fn is_readable(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Another handle of the same end.
    ///
    /// # Errors
    /// The system's own.
    pub fn again(&self) -> Result<Self> {
        let stream = self.stream.try_clone();
        let stream = stream.map_err(|e| Error::from_io("dup", &e, "a Unix stream"))?;
        Ok(Self { stream, peer: self.peer.clone() })
    }

    /// Sends one frame, and copies of `descriptors`.
    ///
    /// # Errors
    /// [`Kind::Invalid`] past `cap` or [`MOST_DESCRIPTORS`], [`Kind::SourceLost`] where nobody receives any more, [`Kind::Deadline`].
    pub fn send(
        &self,
        body: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cap: usize,
        deadline: Instant,
    ) -> Result<()> {
        let framed = frame::framed(body, cap)
            .map_err(|e| Error::new(Kind::Invalid, "send", e.to_string()).with_peer(&self.peer))?;
        let mut left = framed.as_slice();
        let mut descriptors = descriptors;
        while !left.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fits = descriptors.len() <= MOST_DESCRIPTORS;
            let pushed =
                descriptors.is_empty() || fits && control.push(SendAncillaryMessage::ScmRights(descriptors));
            if !pushed {
                let detail = format!("{} descriptors with one frame", descriptors.len());
                return Err(Error::new(Kind::Invalid, "send", detail).with_peer(&self.peer));
            }
            match sendmsg(&self.stream, &[IoSlice::new(left)], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    descriptors = &[];
                    left = left.get(sent..).unwrap_or_default();
                }
                Err(Errno::AGAIN) => self.ready(PollFlags::OUT, deadline, "send")?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(self.lost("send")),
                Err(errno) => return Err(failed("sendmsg", errno, "a frame").with_peer(&self.peer)),
            }
        }
        Ok(())
    }

    /// The next frame and at most `most` descriptors; `None` where the connection ended before one began.
    ///
    /// # Errors
    /// [`Kind::Protocol`] for more than `cap` bytes or `most` descriptors, [`Kind::SourceLost`] within a frame, [`Kind::Deadline`].
    pub fn receive(
        &self,
        cap: usize,
        most: usize,
        deadline: Instant,
    ) -> Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let mut descriptors = Vec::new();
        let mut prefix = [0; frame::PREFIX];
        if !self.fill(&mut prefix, Some(&mut descriptors), deadline)? {
            return Ok(None);
        }
        let protocol = |detail: String| Error::new(Kind::Protocol, "receive", detail).with_peer(&self.peer);
        if descriptors.len() > most {
            return Err(protocol(format!("{} descriptors, {most} are taken", descriptors.len())));
        }
        let len = frame::length(prefix, cap).map_err(|e| protocol(e.to_string()))?;
        let mut body = vec![0; len];
        if !self.fill(&mut body, None, deadline)? && len > 0 {
            return Err(self.lost("receive"));
        }
        Ok(Some((body, descriptors)))
    }

    /// Fills `into`; `false` where the connection ended before its first byte.
    fn fill(
        &self,
        into: &mut [u8],
        mut descriptors: Option<&mut Vec<OwnedFd>>,
        deadline: Instant,
    ) -> Result<bool> {
        let (mut have, mut resets) = (0, 0);
        while have < into.len() {
            let rest = into.get_mut(have..).unwrap_or_default();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = recvmsg(&self.stream, &mut [IoSliceMut::new(rest)], &mut control, flags);
            let got = match got {
                Ok(got) => got,
                Err(Errno::AGAIN) => {
                    self.ready(PollFlags::IN, deadline, "receive")?;
                    continue;
                }
                Err(Errno::INTR) => continue,
                // It closed with something of ours unread; what it said before may be queued all the same.
                Err(Errno::CONNRESET) if resets == 0 => {
                    resets += 1;
                    continue;
                }
                Err(Errno::CONNRESET) => return Err(self.lost("receive")),
                Err(errno) => return Err(failed("recvmsg", errno, "a frame").with_peer(&self.peer)),
            };
            let mut came = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(found) = message {
                    came.extend(found);
                }
            }
            let refuse = |what: &str| Error::new(Kind::Protocol, "receive", what).with_peer(&self.peer);
            if got.flags.contains(ReturnFlags::CTRUNC) {
                return Err(refuse("more descriptors than a frame has"));
            }
            match &mut descriptors {
                Some(kept) if have == 0 => kept.extend(came),
                _ if came.is_empty() => {}
                _ => return Err(refuse("descriptors in the middle of a frame")),
            }
            if got.bytes == 0 {
                return if have == 0 { Ok(false) } else { Err(self.lost("receive")) };
            }
            have += got.bytes;
        }
        Ok(true)
    }

    fn lost(&self, op: &'static str) -> Error {
        Error::new(Kind::SourceLost, op, "the other end closed the connection").with_peer(&self.peer)
    }

    /// Waits until the stream can be used.
    fn ready(&self, wanted: PollFlags, deadline: Instant, op: &'static str) -> Result<()> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let detail = "the other end did not move within its time";
                return Err(Error::new(Kind::Deadline, op, detail).with_peer(&self.peer));
            }
            let wait = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::from_borrowed_fd(self.stream.as_fd(), wanted)], Some(&wait)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(failed("poll", errno, "a Unix stream").with_peer(&self.peer)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, io::Write as _, thread};

    fn pair() -> (Wire, Wire) {
        let (a, b) = UnixStream::pair().unwrap();
        (Wire::new(a, "a").unwrap(), Wire::new(b, "b").unwrap())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    fn file() -> File {
        File::open("/dev/null").unwrap()
    }

    #[test]
    fn frames_come_in_order_each_with_its_own_descriptors() {
        let (a, b) = pair();
        let (one, big) = (file(), vec![7; 3 << 20]);
        let sender = thread::spawn({
            let big = big.clone();
            move || {
                a.send(b"first", &[one.as_fd(), one.as_fd()], 100, soon()).unwrap();
                a.send(b"", &[], 100, soon()).unwrap();
                a.send(&big, &[one.as_fd()], 4 << 20, soon()).unwrap();
            }
        });
        let (body, fds) = b.receive(100, 2, soon()).unwrap().unwrap();
        assert_eq!((body.as_slice(), fds.len()), (&b"first"[..], 2));
        let (body, fds) = b.receive(100, 2, soon()).unwrap().unwrap();
        assert_eq!((body.len(), fds.len()), (0, 0));
        let (body, fds) = b.receive(4 << 20, 1, soon()).unwrap().unwrap();
        assert!(body == big && fds.len() == 1);
        sender.join().unwrap();
        assert!(b.receive(100, 0, soon()).unwrap().is_none(), "the other end is gone");
    }

    #[test]
    fn too_much_of_anything_is_refused_and_nothing_stays_open() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let one = file();
        let (a, b) = pair();
        a.send(b"x", &[one.as_fd(), one.as_fd()], 10, soon()).unwrap();
        let before = open();
        assert_eq!(b.receive(10, 1, soon()).unwrap_err().kind(), Kind::Protocol);
        // Other tests of this process open and close files meanwhile.
        assert!(open() <= before + 8);
        let (a, b) = pair();
        a.send(b"longer than that", &[], 100, soon()).unwrap();
        assert_eq!(b.receive(10, 0, soon()).unwrap_err().kind(), Kind::Protocol);
        assert_eq!(a.send(b"longer", &[], 3, soon()).unwrap_err().kind(), Kind::Invalid);
        let many = [one.as_fd(); MOST_DESCRIPTORS + 1];
        assert_eq!(a.send(b"x", &many, 10, soon()).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn a_descriptor_in_the_middle_of_a_frame_is_refused() {
        let (a, b) = pair();
        (&a.stream).write_all(&8u32.to_le_bytes()).unwrap();
        (&a.stream).write_all(b"half").unwrap();
        let one = file();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [one.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&a.stream, &[IoSlice::new(b"rest")], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(b.receive(10, 4, soon()).unwrap_err().kind(), Kind::Protocol);
    }

    #[test]
    fn a_silent_or_a_dead_peer_ends_the_wait() {
        let (a, b) = pair();
        let now = Instant::now();
        assert_eq!(b.receive(10, 0, now).unwrap_err().kind(), Kind::Deadline);
        (&a.stream).write_all(&[5, 0]).unwrap();
        let e = b.receive(10, 0, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(e.kind(), Kind::Deadline, "half a prefix");
        drop(a);
        let (a, b) = pair();
        (&a.stream).write_all(&[5, 0, 0, 0, 1]).unwrap();
        drop(a);
        assert_eq!(b.receive(10, 0, soon()).unwrap_err().kind(), Kind::SourceLost);
        let full = vec![0; 64 << 20];
        let (a, _b) = pair();
        let e = a.send(&full, &[], usize::MAX, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(e.kind(), Kind::Deadline, "nobody reads");
    }

    #[test]
    fn what_was_said_before_the_end_is_heard_although_ours_was_not() {
        let (a, b) = pair();
        a.send(b"nobody reads this", &[], 100, soon()).unwrap();
        b.send(b"refused", &[], 100, soon()).unwrap();
        drop(b);
        let (said, _) = a.receive(100, 0, soon()).unwrap().unwrap();
        assert_eq!(said, b"refused");
        assert!(a.receive(100, 0, soon()).unwrap().is_none());
    }

    #[test]
    fn nobody_to_dial_is_said_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let e = Wire::dial(&path, soon()).unwrap_err();
        assert!(e.kind() == Kind::Unavailable && e.remedy().is_some(), "{e}");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert_eq!(Wire::dial(&path, soon()).unwrap_err().kind(), Kind::Unavailable, "its owner is dead");
        let (a, _b) = pair();
        assert_eq!(a.peer().unwrap().uid, rustix::process::geteuid().as_raw());
    }
}
