//! The node's own disk as a source: everything is there, and each pull reads its range from the file.

use crate::replicate::fill_range;
use async_trait::async_trait;
use flashboot_core::{
    Arena, ByteRange, Digests, Error, Generation, InFlight, Kind, Landed, Mover, Observed, Pull, Result,
    ShardId,
};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::task::JoinHandle;

/// A payload file beside an arena.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    pub(super) path: PathBuf,
    pub(super) digests: Arc<Digests>,
    pub(super) arena: Arc<dyn Arena>,
    pub(super) threads: usize,
    /// Any filling: the file has none, and keeps what it was opened with.
    pub(super) generation: Generation,
}

impl Disk {
    pub(super) fn start(&self, range: ByteRange) -> Box<dyn InFlight> {
        let disk = self.clone();
        let read = tokio::task::spawn_blocking(move || {
            fill_range(&disk.path, &disk.digests, &disk.arena, range, disk.threads)?;
            // Compared on the way, where the bytes ended.
            let first = usize::try_from(range.start / disk.digests.block()).unwrap_or(usize::MAX);
            let blocks = usize::try_from(range.len().div_ceil(disk.digests.block())).unwrap_or(usize::MAX);
            let found = disk.digests.values().iter().skip(first).take(blocks).copied().collect();
            Ok(Landed { digests: found, generation: Some(disk.generation) })
        });
        Box::new(Reading { read: Some(read), ended: None })
    }
}

#[async_trait]
impl Mover for Disk {
    fn generation(&self) -> Generation {
        self.generation
    }

    async fn observe(&self, _: ShardId, _: u64, _: Duration) -> Result<Observed> {
        Ok(Observed { generation: Some(self.generation), progress: self.digests.payload() })
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        Ok(Self::start(self, pull.range))
    }
}

/// One range that is being read. It ends by itself; dropped, the thread ends alone and the arena lives until then.
struct Reading {
    read: Option<JoinHandle<Result<Landed>>>,
    ended: Option<Result<Landed>>,
}

#[async_trait]
impl InFlight for Reading {
    fn cancel(&self) {}

    async fn quiesced(&mut self) -> Result<Landed> {
        if let Some(read) = &mut self.read {
            let gone = |e| Err(Error::new(Kind::Exhausted, "pread", format!("a thread that reads: {e}")));
            let ended = read.await.unwrap_or_else(gone);
            (self.read, self.ended) = (None, Some(ended));
        }
        let never = || Err(Error::new(Kind::Invalid, "pread", "nothing was begun"));
        self.ended.clone().unwrap_or_else(never)
    }
}
