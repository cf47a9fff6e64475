//! Reading files as fast as the disk: direct where the file system can, from the page cache where the bytes are there
//! already, buffered where nothing else works; with io_uring, or with `pread` on several threads.
//!
//! The page cache is left as it was found: what a buffered read brought in is dropped again. A bad disk is an error, never
//! a signal: nothing is mapped.

mod config;
mod file;
mod lane;
mod ops;

pub use config::{Engine, IoConfig};
pub use file::SourceFile;
pub(crate) use lane::BOUNCE;
pub use lane::{Each, Lane};
pub use ops::{Call, Ops, System};

use flashboot_core::Result;
use flashboot_memory::Ring;
use serde::Serialize;
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// How files are read, and what was read so far. Cloning shares the counts.
#[derive(Debug, Clone)]
pub struct Io {
    config: IoConfig,
    ops: Arc<dyn Ops>,
    engine: Engine,
    why: Option<String>,
    counts: Arc<Counts>,
}

/// What was read, in bytes, and by what.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct IoStats {
    /// `io_uring` or `pread`.
    pub engine: &'static str,
    /// Why not io_uring, where it was not asked for otherwise.
    pub engine_reason: Option<String>,
    /// Asked for.
    pub requested: u64,
    /// Came past the page cache.
    pub direct: u64,
    /// Were in the page cache already.
    pub cached: u64,
    /// Came through the page cache and were dropped from it again.
    pub buffered: u64,
    /// Direct reads that were refused and done buffered.
    pub fallbacks: u64,
    /// The most bytes that lanes' own buffers had at one time.
    pub bounce_peak: u64,
}

#[derive(Debug, Default)]
struct Counts {
    requested: AtomicU64,
    direct: AtomicU64,
    cached: AtomicU64,
    buffered: AtomicU64,
    fallbacks: AtomicU64,
    /// Bytes of bounce buffers: now, and at most.
    bounce: AtomicU64,
    bounce_peak: AtomicU64,
}

impl Io {
    /// Looks which engine works. A container that forbids io_uring is found out here, and `pread` serves.
    ///
    /// # Errors
    /// The ring's own, where io_uring was asked for by name.
    pub fn new(config: &IoConfig) -> Result<Self> {
        Self::with_ops(config, Arc::new(System))
    }

    /// The same over other system calls than the system's: for tests of what fails.
    pub fn with_ops(config: &IoConfig, ops: Arc<dyn Ops>) -> Result<Self> {
        let (engine, why) = match config.engine {
            Engine::Pread => (Engine::Pread, None),
            asked => match ops.may_ring().and_then(|()| Ring::new(config.depth)) {
                Ok(_) => (Engine::Uring, None),
                Err(e) if asked == Engine::Uring => return Err(e),
                Err(e) => (Engine::Pread, Some(e.to_string())),
            },
        };
        Ok(Self { config: config.clone(), ops, engine, why, counts: Arc::default() })
    }

    /// Opens a regular file.
    ///
    /// # Errors
    /// [`Kind::Unavailable`](flashboot_core::Kind::Unavailable) for a file that is not there, [`Kind::Invalid`](flashboot_core::Kind::Invalid)
    /// for what is no regular file; the system's own.
    pub fn open(&self, path: &Path) -> Result<SourceFile> {
        SourceFile::open(path, self.config.direct)
    }

    /// One thread's way to read.
    pub fn lane(&self) -> Lane {
        // A lane that gets no ring of its own (a limit on descriptors) is slower, no worse.
        let ring = (self.engine == Engine::Uring).then(|| Ring::new(self.config.depth).ok()).flatten();
        Lane::new(self.clone(), ring)
    }

    /// What it was made with.
    pub fn config(&self) -> &IoConfig {
        &self.config
    }

    /// What was read so far.
    pub fn stats(&self) -> IoStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { requested, direct, cached, buffered, fallbacks, bounce_peak, .. } = &*self.counts;
        IoStats {
            engine: if self.engine == Engine::Uring { "io_uring" } else { "pread" },
            engine_reason: self.why.clone(),
            requested: load(requested),
            direct: load(direct),
            cached: load(cached),
            buffered: load(buffered),
            fallbacks: load(fallbacks),
            bounce_peak: load(bounce_peak),
        }
    }
}
