//! libibverbs behind a small safe layer.
//!
//! Three parts, each using only the ones before it: `sys` (structures as the headers lay them out), [`Verbs`] (one method
//! a call: the seam at which error paths are tested, over the library or a stand-in), and the objects ([`Device`],
//! [`Region`], [`Completions`], [`Pair`]) that own what the calls make and let go of it in the right order. Nothing
//! outside this folder holds a handle.

mod device;
#[cfg(test)]
pub(crate) mod fake;
mod library;
mod pair;
mod region;
mod status;
mod sys;

pub(crate) use device::{Completions, Device};
pub(crate) use library::Library;
pub(crate) use pair::{Pair, Path, ReadRequest, Refused};
pub(crate) use region::Region;
pub(crate) use status::{Status, mtu_bytes, mtu_code};

use std::{
    ffi::c_void,
    fmt,
    os::fd::{BorrowedFd, RawFd},
};

/// A call that failed: which, and the number it gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VerbsError {
    /// The verb, as `man` knows it.
    pub(crate) call: &'static str,
    /// `errno`.
    pub(crate) errno: i32,
}

pub(crate) type Call<T> = Result<T, VerbsError>;

/// Something that the library made. Only this folder's objects have one, and none outlives what it stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(*mut c_void);

// SAFETY: it is a name; every call that takes one may be made from any thread, by the library's own promise.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// What a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) max_mr_size: u64,
    pub(crate) max_qp_wr: u32,
    pub(crate) max_cqe: u32,
    /// Reads coming in at one queue pair.
    pub(crate) reads_in: u32,
    /// Reads going out of one queue pair.
    pub(crate) reads_out: u32,
    pub(crate) ports: u8,
}

/// What links a port to its neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LinkLayer {
    Infiniband,
    Ethernet,
}

/// One port as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) state: u32,
    /// `ibv_mtu` of the link.
    pub(crate) mtu: u32,
    pub(crate) gids: u32,
    pub(crate) max_msg: u32,
    pub(crate) lid: u16,
    pub(crate) link: LinkLayer,
}

impl Port {
    pub(crate) const ACTIVE: u32 = 4;

    pub(crate) fn is_active(&self) -> bool {
        self.state == Self::ACTIVE
    }

    pub(crate) fn state_name(&self) -> &'static str {
        ["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"]
            .get(self.state as usize)
            .copied()
            .unwrap_or("unknown")
    }
}

/// What a GID is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GidKind {
    Infiniband,
    RoceV1,
    RoceV2,
}

/// One valid entry of a port's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    pub(crate) kind: GidKind,
    pub(crate) bytes: [u8; 16],
}

/// A registered range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Registered {
    pub(crate) handle: Handle,
    pub(crate) local_key: u32,
    pub(crate) remote_key: u32,
}

/// One completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) status: Status,
    pub(crate) vendor: u32,
}

/// Something that happened to a device apart from any request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    PortUp(u8),
    PortDown(u8),
    /// The device is beyond use.
    DeviceFatal,
    /// A completion queue is beyond use: it overran.
    QueueLost,
    /// A queue pair went into its error state; its requests tell why.
    PairLost,
    Other(u32),
}

/// A change of a queue pair's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Reset,
    Init { port: u8 },
    Receive(Path),
    Send { psn: u32, reads: u8, timeout: u8, retries: u8 },
    Fail,
}

/// The verbs in use.
///
/// # Safety of the methods marked `unsafe`
///
/// They let hardware read and write memory after they return. Whoever calls one keeps that memory mapped, and everyone
/// else off what is written, until the completion of the request or the end of the region. All others take handles
/// that this folder's objects keep alive, and can at worst return an error.
pub(crate) trait Verbs: Send + Sync + fmt::Debug {
    fn devices(&self) -> Call<Vec<String>>;
    fn open(&self, device: &str) -> Call<Handle>;
    fn close(&self, context: Handle) -> Call<()>;
    fn limits(&self, context: Handle) -> Call<Limits>;
    fn port(&self, context: Handle, port: u8) -> Call<Port>;
    /// The valid entries of a port's GID table of `len`; holes are left out.
    fn gids(&self, context: Handle, device: &str, port: u8, len: u32) -> Call<Vec<Gid>>;
    /// Becomes readable when [`event`](Self::event) has something.
    fn event_fd(&self, context: Handle) -> RawFd;
    /// The next event, if there is one; never waits.
    fn event(&self, context: Handle) -> Call<Option<Event>>;
    fn domain(&self, context: Handle) -> Call<Handle>;
    fn drop_domain(&self, domain: Handle) -> Call<()>;
    /// # Safety
    /// See [`Verbs`]: peers read the range, and requests of ours write it.
    unsafe fn register(&self, domain: Handle, address: u64, len: u64) -> Call<Registered>;
    /// # Safety
    /// As [`register`](Self::register), of what the dma-buf is of from `offset` on; `address` is how requests name the first
    /// byte of that.
    unsafe fn register_dma_buf(
        &self,
        domain: Handle,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
    ) -> Call<Registered>;
    fn deregister(&self, region: Handle) -> Call<()>;
    /// A completion channel and its descriptor, which is the channel's.
    fn channel(&self, context: Handle) -> Call<(Handle, RawFd)>;
    fn drop_channel(&self, channel: Handle) -> Call<()>;
    fn queue(&self, context: Handle, entries: u32, channel: Handle) -> Call<Handle>;
    fn drop_queue(&self, queue: Handle) -> Call<()>;
    /// The channel becomes readable at the next completion.
    fn arm(&self, queue: Handle) -> Call<()>;
    /// Takes one event out of a channel that is readable.
    fn disarm(&self, channel: Handle) -> Call<()>;
    /// Appends what has completed; `false` when there was nothing.
    fn poll(&self, queue: Handle, into: &mut Vec<Completion>) -> Call<bool>;
    /// A queue pair for `depth` requests, and its number.
    fn pair(&self, domain: Handle, queue: Handle, depth: u32) -> Call<(Handle, u32)>;
    fn drop_pair(&self, pair: Handle) -> Call<()>;
    fn change(&self, pair: Handle, change: Change) -> Call<()>;
    /// Posts READs in order; of a refusal, how many were accepted before it.
    ///
    /// # Safety
    /// See [`Verbs`]: each request's local range is written until its completion.
    unsafe fn read(&self, pair: Handle, requests: &[ReadRequest]) -> Result<(), Refused>;
}
