//! A reliable queue pair, its states, and the READs it posts.

use super::{Call, Change, Completions, Handle, VerbsError};
use std::{fmt, sync::Arc};

/// The way to a peer's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    /// Our port.
    pub(crate) port: u8,
    /// The index of our GID.
    pub(crate) own_gid: u8,
    /// The peer's.
    pub(crate) gid: [u8; 16],
    /// Whether packets carry GIDs: always on Ethernet.
    pub(crate) global: bool,
    /// The peer's, on InfiniBand.
    pub(crate) lid: u16,
    /// The peer's queue pair.
    pub(crate) number: u32,
    /// The number of the first packet that it sends.
    pub(crate) psn: u32,
    /// `ibv_mtu`.
    pub(crate) mtu: u32,
    pub(crate) traffic_class: u8,
    pub(crate) service_level: u8,
    /// Reads that the peer may have coming in at once.
    pub(crate) reads_in: u8,
}

/// One READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadRequest {
    /// Comes back in the completion.
    pub(crate) id: u64,
    /// The peer's address and key.
    pub(crate) from: u64,
    pub(crate) remote_key: u32,
    /// Ours.
    pub(crate) to: u64,
    pub(crate) len: u32,
    pub(crate) local_key: u32,
    /// Whether its success is told; a failure always is.
    pub(crate) signalled: bool,
}

/// A post that was not taken whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Requests that were taken all the same, from the first on.
    pub(crate) accepted: usize,
    pub(crate) error: VerbsError,
}

/// A queue pair of one device, whose completions come to one queue.
pub(crate) struct Pair {
    completions: Arc<Completions>,
    pub(super) handle: Handle,
    number: u32,
    destroyed: bool,
}

impl Pair {
    /// Room for `depth` requests.
    pub(crate) fn new(completions: &Arc<Completions>, depth: u32) -> Call<Self> {
        let device = &completions.device;
        let (handle, number) = device.verbs.pair(device.domain, completions.queue, depth)?;
        Ok(Self { completions: Arc::clone(completions), handle, number, destroyed: false })
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn device_name(&self) -> &str {
        self.completions.device.name()
    }

    fn change(&self, change: Change) -> Call<()> {
        self.completions.device.verbs.change(self.handle, change)
    }

    /// From a fresh or reset pair to one that knows its port.
    pub(crate) fn init(&self, port: u8) -> Call<()> {
        self.change(Change::Init { port })
    }

    /// Answers the peer's READs from here on.
    pub(crate) fn receive(&self, path: Path) -> Call<()> {
        self.change(Change::Receive(path))
    }

    /// May post from here on. `timeout` is 4.096 µs · 2^timeout; `retries` 7 would mean for ever.
    pub(crate) fn send(&self, psn: u32, reads: u8, timeout: u8, retries: u8) -> Call<()> {
        self.change(Change::Send { psn, reads, timeout, retries: retries.min(6) })
    }

    /// Ends everything that is posted: each request completes, most of them flushed.
    pub(crate) fn fail(&self) -> Call<()> {
        self.change(Change::Fail)
    }

    /// As when it was made. Nothing may be posted and not completed.
    pub(crate) fn reset(&self) -> Call<()> {
        self.change(Change::Reset)
    }

    /// Destroys it before its time: the device is done with everything that was posted when this succeeds, and no completion
    /// tells of it. After that it must not be used.
    pub(crate) fn destroy(&mut self) -> Call<()> {
        self.completions.device.verbs.drop_pair(self.handle)?;
        self.destroyed = true;
        Ok(())
    }

    /// Posts READs in order.
    ///
    /// # Safety
    /// Each request's local range stays mapped and registered, and nobody else touches it, until its completion or
    /// that of a later request of this pair.
    pub(crate) unsafe fn read(&self, requests: &[ReadRequest]) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.completions.device.verbs.read(self.handle, requests) }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if self.destroyed {
            return;
        }
        if let Err(e) = self.completions.device.verbs.drop_pair(self.handle) {
            tracing::error!(
                device = self.device_name(),
                call = e.call,
                errno = e.errno,
                "a queue pair does not go"
            );
        }
    }
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pair({} {:#x})", self.device_name(), self.number)
    }
}
