//! Unix sockets of one host: whose directory they lie in ([`directory`]), who owns one ([`Lock`]), who may talk on it
//! ([`Policy`]), and frames that carry descriptors ([`Wire`]).
//!
//! Must never: remove the socket of a living owner, keep a descriptor that nobody asked for, or wait without a deadline.

pub mod directory;
mod lock;
mod policy;
mod stream;

pub use lock::{Lock, sweep};
pub use policy::{Peer, Policy};
pub use stream::{MOST_DESCRIPTORS, Wire};

use flashboot_core::Error;
use rustix::io::Errno;

fn failed(op: &'static str, errno: Errno, detail: impl Into<String>) -> Error {
    Error::from_errno(op, errno.raw_os_error(), detail)
}
