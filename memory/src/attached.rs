//! Another process's host arena as one of ours: used where it is, and never written.

use crate::{
    imported::{Expected, ImportedArena},
    mapping::FileId,
    pages,
};
use flashboot_core::{Arena, ByteRange, Error, Generation, Kind, Location, Observed, Result, ShardId};
use std::{any::Any, fmt, os::fd::OwnedFd, sync::Arc};

/// A read-only mapping of another process's sealed memfd that holds one whole filling.
///
/// The owner is trusted to leave the bytes alone while it is attached: it is a process of our own user or of root, which could
/// write our memory anyway. All the same no reference into them is handed out: they are copied, and can be proved again.
pub struct AttachedArena {
    import: Arc<ImportedArena>,
    capacity: u64,
    shards: u32,
    location: Location,
    /// Dropped after the mapping, if nobody else has that.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl AttachedArena {
    /// Checks `fd` as [`ImportedArena::map`] does, maps it, and compares the filling. `keep` lives as long as the value.
    ///
    /// # Errors
    /// Those of [`ImportedArena::map`]; [`Kind::StaleGeneration`] where another filling is there.
    pub fn map(
        fd: OwnedFd,
        expected: Expected,
        generation: Generation,
        keep: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Self>> {
        let import = ImportedArena::map(fd, expected)?;
        let found = import.observe(ShardId(0)).generation;
        if found != Some(generation) {
            let found = found.map_or_else(|| "nothing".to_owned(), |generation| generation.to_string());
            let detail = format!("the arena holds {found}, its owner said {generation}");
            return Err(Error::new(Kind::StaleGeneration, "attach", detail));
        }
        Ok(Arc::new(Self {
            import: Arc::new(import),
            capacity: expected.capacity,
            shards: expected.shards,
            location: Location::Host { boot_id: pages::boot_id()?, numa_node: None },
            _keep: keep,
        }))
    }

    /// The mapping, for a copy engine.
    pub fn import(&self) -> &Arc<ImportedArena> {
        &self.import
    }

    /// The file behind it.
    pub fn file_id(&self) -> FileId {
        self.import.file_id()
    }
}

impl fmt::Debug for AttachedArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachedArena").field("import", &self.import).finish_non_exhaustive()
    }
}

fn not_ours(op: &'static str) -> Error {
    Error::new(Kind::Permission, op, "the arena is attached, and its owner's to write")
        .with_remedy("attach a private copy to write it")
}

// SAFETY: the import stays mapped, at one address and with the length of `capacity`, until the value is dropped, and the
// seals keep the file from shrinking; its layout keeps payload and control block apart; the seals let nobody write but the
// owner, who is trusted as the type says; `copy_out`, the only method that touches bytes, checks its range.
unsafe impl Arena for AttachedArena {
    fn payload(&self) -> u64 {
        self.import.payload()
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn shards(&self) -> u32 {
        self.shards
    }

    fn location(&self) -> Location {
        self.location.clone()
    }

    fn copy_in(&self, _: u64, _: &[u8]) -> Result<()> {
        Err(not_ours("copy_in"))
    }

    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.import.copy_out(offset, to)
    }

    fn fill(&self, _: ByteRange, _: u8) -> Result<()> {
        Err(not_ours("fill"))
    }

    /// The filling is its owner's to retire: nothing happens.
    fn retire(&self) {}

    /// The filling is its owner's to begin: nothing happens.
    fn begin(&self, _: Generation) {}

    fn publish(&self, _: ShardId, _: u64) -> Result<()> {
        Err(not_ours("publish"))
    }

    fn observe(&self, shard: ShardId) -> Observed {
        self.import.observe(shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostArena, HostArenaConfig};
    use flashboot_core::ArenaSpec;
    use std::os::fd::AsFd as _;

    #[test]
    fn an_attached_arena_shows_its_owners_bytes_outlives_it_and_is_not_written() {
        let (owner, _) =
            HostArena::create(ArenaSpec { payload: 10_000, shards: 1 }, &HostArenaConfig::default()).unwrap();
        let expected = Expected { payload: 10_000, capacity: owner.capacity(), shards: 1 };
        let fd = || owner.as_fd().try_clone_to_owned().unwrap();
        let generation = Generation::from_random(3);
        let e = AttachedArena::map(fd(), expected, generation, None).unwrap_err();
        assert_eq!(e.kind(), Kind::StaleGeneration, "nothing is there yet");
        owner.fill(ByteRange::new(0, 10_000), 7).unwrap();
        owner.begin(generation);
        owner.publish(ShardId(0), 10_000).unwrap();
        let kept = Arc::new(());
        let attached =
            AttachedArena::map(fd(), expected, generation, Some(Arc::<()>::clone(&kept) as _)).unwrap();
        drop(owner);
        let mut found = [0; 100];
        attached.copy_out(9_900, &mut found).unwrap();
        assert_eq!(found, [7; 100]);
        assert_eq!(attached.copy_out(9_901, &mut found).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(attached.copy_out(u64::MAX, &mut found).unwrap_err().kind(), Kind::Invalid);
        assert_eq!((attached.observe(ShardId(0)).progress, attached.payload()), (10_000, 10_000));
        for refused in [
            attached.copy_in(0, &[1]),
            attached.fill(ByteRange::new(0, 1), 1),
            attached.publish(ShardId(0), 10_000),
        ] {
            assert_eq!(refused.unwrap_err().kind(), Kind::Permission);
        }
        attached.retire();
        attached.begin(Generation::from_random(4));
        assert_eq!(attached.observe(ShardId(0)).generation, Some(generation));
        drop(attached);
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
