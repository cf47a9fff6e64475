//! A verified payload as a file: written beside its name, synced, renamed; so a file of that name is whole.

use flashboot_core::{Arena, Error, Result};
use std::{fs::File, io::Write as _, path::Path};

/// Bytes copied out at a time.
const PIECE: usize = 4 << 20;

/// Writes the whole payload of `arena` to `path`, replacing a file of that name. Blocks.
pub(crate) fn write(arena: &dyn Arena, path: &Path) -> Result<()> {
    let failed = |op| move |e: std::io::Error| Error::from_io(op, &e, path.display().to_string());
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::NamedTempFile::new_in(parent).map_err(failed("create"))?;
    let mut buffer = vec![0; PIECE];
    let mut at = 0;
    while at < arena.payload() {
        let len = usize::try_from(arena.payload() - at).unwrap_or(PIECE).min(PIECE);
        let Some(piece) = buffer.get_mut(..len) else { break };
        arena.copy_out(at, piece)?;
        file.write_all(piece).map_err(failed("write"))?;
        at += len as u64;
    }
    file.as_file().sync_all().map_err(failed("fsync"))?;
    file.persist(path).map_err(|e| failed("rename")(e.error))?;
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("fsync"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::ArenaSpec;
    use flashboot_memory::{HostArena, HostArenaConfig};

    #[test]
    fn the_file_is_the_payload_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..PIECE + 9).map(|i| (i % 253) as u8).collect();
        let spec = ArenaSpec { payload: bytes.len() as u64, shards: 1 };
        let arena = HostArena::create(spec, &HostArenaConfig::default()).unwrap().0;
        arena.copy_in(0, &bytes).unwrap();
        let path = dir.path().join("payload");
        std::fs::write(&path, "before").unwrap();
        write(&*arena, &path).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(write(&*arena, &dir.path().join("no/such/place")).is_err());
    }
}
