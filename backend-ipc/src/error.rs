//! What an exporter answers instead of a descriptor, and how a failed system call becomes the boundary's error.

use flashboot_core::{Error, Kind};
use rustix::io::Errno;
use std::{fmt, time::Duration};

/// Why an exporter refuses a reader. The numbers are part of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The reader's uid and gid are not allowed.
    NotPermitted = 1,
    /// No export of that generation, or its arena was filled again.
    StaleGeneration = 2,
    /// The request is none.
    Malformed = 3,
    /// The request is of another protocol version.
    Version = 4,
    /// Too many readers.
    Full = 5,
}

impl Refusal {
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::NotPermitted, Self::StaleGeneration, Self::Malformed, Self::Version, Self::Full]
            .into_iter()
            .find(|refusal| *refusal as u32 == code)
    }

    /// The error that the reader gets; `said` is the exporter's own sentence.
    pub(crate) fn into_error(self, said: &str, peer: impl fmt::Display) -> Error {
        let (kind, remedy) = match self {
            Self::NotPermitted => {
                (Kind::Permission, "add this user to the exporter's allow_uids or allow_gids")
            }
            Self::StaleGeneration => (Kind::StaleGeneration, "fetch a fresh locator from the exporter"),
            Self::Malformed => (Kind::Protocol, "run the same release on both sides"),
            Self::Version => (Kind::Mismatch, "run the same release on both sides"),
            Self::Full => (Kind::Busy, "try again later, or raise the exporter's max_readers"),
        };
        Error::new(kind, "import", format!("the exporter refuses: {said}"))
            .with_peer(peer)
            .with_remedy(remedy)
    }
}

pub(crate) fn failed(op: &'static str, errno: Errno, detail: impl Into<String>) -> Error {
    Error::from_errno(op, errno.raw_os_error(), detail)
}

pub(crate) fn deadline(op: &'static str, timeout: Duration, what: &str, peer: impl fmt::Display) -> Error {
    Error::new(Kind::Deadline, op, format!("{what} did not happen within {timeout:?}")).with_peer(peer)
}
