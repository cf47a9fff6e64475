//! What a transport supplies to be tested.

use async_trait::async_trait;
use flashboot_core::{Arena, ArenaSpec, Caps, HandleExchange, Location, Locator, Readiness, Result};
use std::{path::Path, sync::Arc};

/// What ranks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ranks {
    /// Processes: the test binary executed again.
    Processes,
    /// Tasks of one process under a paused clock.
    Tasks,
}

/// What a process holds that a transport could leak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Open file descriptors, or a transport's own handles.
    pub descriptors: usize,
    /// Memory mappings.
    pub mappings: usize,
}

impl Resources {
    /// Whether no more is held than `before`. Less may be: what was counted then may have been on its way out.
    #[must_use]
    pub fn is_within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors && self.mappings <= before.mappings
    }
}

/// How an attempt to write through an import ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteAttempt {
    /// The system refused, and said so.
    Refused(String),
    /// It went through: the transport cannot enforce read-only.
    Written,
}

/// A transport under test. A case makes a new one; with ranks as tasks all ranks of a case share it.
#[async_trait]
pub trait Fixture: Send + Sync {
    /// The transport's name, as `FLASHBOOT_REQUIRE` lists it.
    fn name(&self) -> &'static str;

    /// What ranks are.
    fn ranks(&self) -> Ranks {
        Ranks::Processes
    }

    /// What the transport promises; each promise is tested.
    fn caps(&self) -> Caps;

    /// Whether it works on this machine.
    fn readiness(&self) -> Readiness;

    /// A new arena for `rank`.
    fn arena(&self, rank: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>>;

    /// Opens the endpoint of `rank`; `dir` is a directory of the rank's own, mode 0700.
    async fn open(&self, rank: u32, dir: &Path) -> Result<Arc<dyn HandleExchange>>;

    /// The transport's own, for memory at `into`.
    async fn probe_pair(&self, locator: &Locator, into: &Location) -> Readiness;

    /// Tries, by every means the transport gives a reader, to write to what `locator` names. `into` is an
    /// arena that could be imported into.
    async fn try_write(&self, locator: &Locator, into: Arc<dyn Arena>) -> WriteAttempt;

    /// With ranks as tasks: makes `rank` dead to its peers.
    fn die(&self, rank: u32) {
        let _ = rank;
    }

    /// Bytes free on all devices that arenas lie on, as their driver says; `None` where memory is the host's. What asking
    /// costs (a context) is held from the first answer on.
    fn free_memory(&self) -> Option<u64> {
        None
    }

    /// What this process holds now.
    fn resources(&self) -> Resources {
        let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
        let mappings = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| {
            // Anonymous mappings come and go with the allocator and thread stacks; a transport maps objects.
            maps.lines().filter(|line| line.contains("/memfd:") || line.contains("/dev/")).count()
        });
        Resources { descriptors: count("/proc/self/fd"), mappings }
    }
}
