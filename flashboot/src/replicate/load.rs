//! Fills an arena from a payload file, verifying every block on the way.

use crate::config::Memory;
use flashboot_core::{Arena, ByteRange, Digests, Error, Kind, Result};
use flashboot_loader::{
    io::IoConfig,
    pipeline::{self, FillConfig, Filling, Phases},
    source::FileProducer,
};
use std::{path::Path, sync::Arc};

/// Threads that fault in, read and copy: what `memory` says, else one a core.
pub(crate) fn threads(memory: Memory) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    memory.threads.and_then(|n| usize::try_from(n).ok()).unwrap_or_else(cores).max(1)
}

/// Reads all of `path` into `arena`, wherever its memory is, with `threads` threads, and verifies it there.
///
/// # Errors
/// [`Kind::Corrupt`] when the file's length or a block is not what `digests` say; the system's own otherwise.
pub(crate) fn fill(path: &Path, digests: &Digests, arena: &Arc<dyn Arena>, threads: usize) -> Result<()> {
    fill_range(path, digests, arena, ByteRange::new(0, digests.payload()), threads)
}

/// The same of the whole blocks of `range`.
///
/// # Errors
/// As [`fill`].
pub(crate) fn fill_range(
    path: &Path,
    digests: &Digests,
    arena: &Arc<dyn Arena>,
    range: ByteRange,
    threads: usize,
) -> Result<()> {
    let config = FillConfig { threads, ..FillConfig::new(&IoConfig::default())? };
    let file = config.io.open(path)?;
    let (found, payload) = (file.len(), digests.payload());
    let damaged = |detail: String| {
        let detail = format!("{}: {detail}", path.display());
        Error::new(Kind::Corrupt, "load", detail).with_remedy("pack or fetch the image again")
    };
    if found != payload {
        return Err(damaged(format!("{payload} bytes needed, {found} found")));
    }
    let filling = Filling::new(Arc::clone(arena), Some(Arc::new(digests.clone())))?;
    // What is not asked for is as good as there.
    filling.proved(ByteRange::new(0, range.start));
    filling.proved(ByteRange::new(range.end, payload));
    match pipeline::fill(&filling, &FileProducer(&file), &config, &Phases::default()) {
        Err(e) if e.op() == "verify" => Err(damaged(e.detail().to_owned())),
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::{ArenaSpec, Geometry};
    use flashboot_memory::{HostArena, HostArenaConfig};

    #[test]
    fn what_is_asked_for_is_filled_and_nothing_else() {
        const BLOCK: u64 = 4096;
        for payload in [1, BLOCK, 2 * BLOCK, 3 * BLOCK + 7] {
            let bytes: Vec<u8> = (0..payload).map(|i| (i % 251) as u8 | 1).collect();
            let digests = Digests::of(&Geometry::new(payload, BLOCK, BLOCK, 1).unwrap(), &bytes);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
            let ends: Vec<u64> = (0..payload).step_by(BLOCK as usize).chain([payload]).collect();
            for (i, start) in ends.iter().enumerate() {
                for end in ends.iter().skip(i) {
                    let spec = ArenaSpec { payload, shards: 1 };
                    let arena: Arc<dyn Arena> =
                        HostArena::create(spec, &HostArenaConfig::default()).unwrap().0;
                    fill_range(file.path(), &digests, &arena, ByteRange::new(*start, *end), 2).unwrap();
                    let mut found = vec![0; payload as usize];
                    arena.copy_out(0, &mut found).unwrap();
                    let inside = |at: usize| (*start..*end).contains(&(at as u64));
                    let right =
                        found.iter().enumerate().all(|(at, b)| *b == if inside(at) { bytes[at] } else { 0 });
                    assert!(right, "{start}..{end} of {payload}");
                }
            }
        }
    }
}
