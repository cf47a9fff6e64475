//! What to ask of a host arena, and what was done.

use flashboot_core::ByteSize;
use std::{fmt, time::Duration};

/// Which pages an arena is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum PageKind {
    /// Huge pages when the system has enough free ones, base pages otherwise; the report says which and why.
    #[default]
    Auto,
    /// Base pages (4 KiB or 64 KiB, whatever the kernel has).
    Base,
    /// Huge pages of the system's default size, or an error.
    Huge,
}

/// What to ask of a host arena.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostArenaConfig {
    /// The pages.
    pub pages: PageKind,
    /// Bind every page to this NUMA node. `None`: pages lie where they are first touched.
    pub numa_node: Option<u32>,
    /// Fault every page in before returning, by this many threads. Zero: do not; pages are reserved all the
    /// same, so that a later touch cannot fail for want of memory.
    pub prefault_threads: usize,
}

/// What became of the wish for a NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NumaReport {
    /// No node was asked for.
    NotAsked,
    /// Pages are bound to this node.
    Bound(u32),
    /// The system does not let us bind; pages lie where they are first touched.
    Refused {
        /// The node asked for.
        node: u32,
        /// What the system said and what to do about it.
        why: String,
    },
}

/// How an arena was made. Times are parts of [`create`](crate::HostArena::create)'s own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaReport {
    /// Whether the pages are huge.
    pub huge: bool,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Why these pages.
    pub why: String,
    /// Bytes of the allocation.
    pub capacity: u64,
    /// What became of the NUMA node.
    pub numa: NumaReport,
    /// Time to reserve the pages (`fallocate`); zero when faulting in reserves them.
    pub reserve: Duration,
    /// Time to fault every page in; `None` when that was not asked for.
    pub prefault: Option<Duration>,
    /// What a person should know, one sentence each; also logged as warnings.
    pub warnings: Vec<String>,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.huge { "huge" } else { "base" };
        let (capacity, page) = (ByteSize(self.capacity), ByteSize(self.page_bytes));
        write!(f, "{capacity} in {kind} pages of {page}: {}", self.why)?;
        if let Some(took) = self.prefault {
            write!(f, "; faulted in within {took:.1?}")?;
        }
        self.warnings.iter().try_for_each(|w| write!(f, "; {w}"))
    }
}
