//! What stays of a handshake: a silent connection whose end tells that the source is gone.

use flashboot_core::{Error, Kind, Observed, Result, ShardId};
use flashboot_cuda::SourceAlive;
use flashboot_memory::ImportedArena;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;

#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    peer: String,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, peer: String) -> Self {
        Self { socket, peer }
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the exporter's end is closed: it died, or gave the arena up.
    pub(crate) fn is_broken(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        poll(&mut polled, Some(&now)).is_ok() && polled.iter().any(|p| p.revents().intersects(gone))
    }
}

/// A source of GPU memory: its connection, and its words in host memory, which another process of this host reads
/// without the GPU.
#[derive(Debug)]
pub(crate) struct GpuSource {
    connection: Connection,
    words: Option<ImportedArena>,
}

impl GpuSource {
    pub(crate) fn new(connection: Connection, words: Option<ImportedArena>) -> Self {
        Self { connection, words }
    }
}

impl SourceAlive for GpuSource {
    fn check(&self) -> Result<()> {
        if !self.connection.is_broken() {
            return Ok(());
        }
        Err(Error::new(Kind::SourceLost, "observe", "the source died or gave its arena up")
            .with_peer(&self.connection.peer)
            .with_remedy("go on from another source"))
    }

    fn words(&self, shard: ShardId) -> Option<Observed> {
        self.words.as_ref().map(|words| words.observe(shard))
    }
}
