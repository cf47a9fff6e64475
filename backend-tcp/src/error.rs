//! From sockets' errors to the boundary's, in one place.

use flashboot_channel::{failed, frame::FrameError};
use flashboot_core::{Error, Kind};
use std::{io, time::Duration};

/// What a broken frame of `peer` means.
pub(crate) fn frame_failed(op: &'static str, error: FrameError, peer: &str) -> Error {
    match error {
        FrameError::Io(e) => failed(op, &e, "a frame", peer),
        FrameError::Cut => Error::new(Kind::SourceLost, op, error.to_string()).with_peer(peer),
        _ => Error::new(Kind::Protocol, op, error.to_string()).with_peer(peer),
    }
}

/// The peer closed a connection in the middle of something.
pub(crate) fn closed(op: &'static str, what: &str, peer: &str) -> Error {
    failed(op, &io::ErrorKind::UnexpectedEof.into(), what, peer)
}

/// The peer is there, and sends nothing.
pub(crate) fn silent(op: &'static str, silence: Duration, what: &str, peer: &str) -> Error {
    Error::new(Kind::Stalled, op, format!("{what}: nothing came for {silence:?}")).with_peer(peer)
}

/// What a closed hop answers.
pub(crate) fn cancelled(what: &str) -> Error {
    Error::new(Kind::Cancelled, "pull", format!("{what} were cancelled; nothing of them will land any more"))
}

/// The system gives no thread.
pub(crate) fn no_thread(e: &io::Error, what: &str) -> Error {
    Error::new(Kind::Exhausted, "clone", format!("{what}: {e}"))
        .with_remedy("raise the limit on threads, or lower tcp.connections")
}
