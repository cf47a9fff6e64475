//! A verified payload as a file: written beside its name, synced, renamed; so a file of that name is whole.

use super::seat::blocking;
use flashboot_core::{Arena, Error, Kind, Result};
use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

/// Bytes copied out at a time.
const PIECE: usize = 4 << 20;

/// The directory that `path` is, or is to be, in.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// That a file can be made at `path`: found out before anything is read, by making one beside it.
///
/// # Errors
/// The system's own; [`Kind::Invalid`] for what is no place for a file.
pub(super) async fn placed(path: PathBuf) -> Result<()> {
    blocking(move || {
        let invalid = |what: &str| {
            let detail = format!("{} {what}", path.display());
            Err(Error::new(Kind::Invalid, "output", detail).with_remedy("give -o the path of a file"))
        };
        if path.file_name().is_none() {
            return invalid("names no file");
        }
        if path.is_dir() {
            return invalid("is a directory");
        }
        writable(&path)
    })
    .await
}

/// That something can be made beside `path`. Blocks.
pub(super) fn writable(path: &Path) -> Result<()> {
    let parent = parent(path);
    tempfile::Builder::new().tempfile_in(parent).map(drop).map_err(|e| {
        let detail = format!("{}: nothing can be written in {}", path.display(), parent.display());
        Error::from_io("output", &e, detail)
            .with_remedy("make that directory, or let this user write there, or give -o another path")
    })
}

/// That the file system of `path` has room for so many bytes, as far as it says.
///
/// # Errors
/// [`Kind::Exhausted`].
pub(super) async fn room(path: PathBuf, bytes: u64) -> Result<()> {
    blocking(move || {
        let parent = parent(&path);
        let found = rustix::fs::statvfs(parent)
            .map_err(|e| Error::from_errno("statvfs", e.raw_os_error(), format!("{}", parent.display())))?;
        enough(&path, bytes, found.f_bavail.saturating_mul(found.f_frsize))
    })
    .await
}

fn enough(path: &Path, bytes: u64, free: u64) -> Result<()> {
    if free >= bytes {
        return Ok(());
    }
    let detail = format!("{}: {bytes} bytes are to be written, and {free} are free there", path.display());
    Err(Error::new(Kind::Exhausted, "output", detail).with_remedy("make room, or give -o another path"))
}

/// Writes the whole payload of `arena` to `path`, replacing a file of that name. Blocks.
pub(crate) fn write(arena: &dyn Arena, path: &Path) -> Result<()> {
    let failed = |op| move |e: std::io::Error| Error::from_io(op, &e, path.display().to_string());
    let parent = parent(path);
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

    #[tokio::test]
    async fn a_place_that_cannot_be_written_is_refused_before_anything_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path().join("payload");
        assert_eq!(placed(here.clone()).await, Ok(()));
        assert_eq!(room(here.clone(), 1).await, Ok(()));
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "nothing is left");
        let missing = placed(dir.path().join("no/such/place")).await.unwrap_err();
        assert!(missing.detail().contains("no/such") && missing.remedy().is_some(), "{missing}");
        assert_eq!(placed(dir.path().to_owned()).await.unwrap_err().kind(), Kind::Invalid);
        std::fs::write(&here, "x").unwrap();
        assert!(placed(here.join("below")).await.is_err(), "below a file");
        let full = room(here.clone(), u64::MAX).await.unwrap_err();
        assert_eq!(full.kind(), Kind::Exhausted, "{full}");
        assert_eq!(enough(&here, 5, 5), Ok(()));
    }

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
