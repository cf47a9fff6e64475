//! How far a rank's image has come, so that a killed writer can be gone on from: the values of its first pieces, one
//! after the other in a file beside it. A value is written down only when its bytes are on the disk.

use crate::error::{Error, Result};
use crate::source::Source;
use flashboot_core::digest::Piece;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

const VALUE: u64 = 32;

/// One rank's journal.
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    written: usize,
}

impl Journal {
    /// Opens it, and gives what it says of a payload of `pieces` pieces; a torn end is cut off.
    pub(super) fn open(path: PathBuf, pieces: usize) -> Result<(Self, Vec<Piece>)> {
        let mut found = Vec::new();
        match Source::open(&path) {
            Ok(source) => {
                let whole = (source.len() / VALUE).min(pieces as u64);
                let bytes = source.bytes_at(0, whole * VALUE)?;
                let values = bytes.chunks_exact(32).filter_map(|v| v.try_into().ok());
                found.extend(values.map(Piece::from_bytes));
            }
            Err(Error::Missing { .. }) => {}
            Err(e) => return Err(e),
        }
        let open = File::options().create(true).append(true).open(&path);
        let file = open.map_err(|e| Error::io("open", &path, &e))?;
        file.set_len(found.len() as u64 * VALUE).map_err(|e| Error::io("ftruncate", &path, &e))?;
        Ok((Self { path, file, written: found.len() }, found))
    }

    /// Writes down the values up to the first that is not there yet. Their bytes must be synced.
    pub(super) fn note(&mut self, values: &[Option<Piece>]) -> Result<()> {
        let new = values.iter().skip(self.written).map_while(|v| *v);
        let bytes: Vec<u8> = new.flat_map(Piece::to_bytes).collect();
        if bytes.is_empty() {
            return Ok(());
        }
        self.file.write_all(&bytes).map_err(|e| Error::io("write", &self.path, &e))?;
        self.file.sync_data().map_err(|e| Error::io("fdatasync", &self.path, &e))?;
        self.written += bytes.len() / 32;
        Ok(())
    }

    /// Removes it: the image is complete.
    pub(super) fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(|e| Error::io("unlink", &self.path, &e))
    }
}

/// Where the journal of the image `name` is.
pub(super) fn path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.progress"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::digest;

    #[test]
    fn what_was_noted_is_found_again_and_a_torn_end_is_not() {
        let dir = tempfile::TempDir::new().unwrap();
        let at = path(dir.path(), "target-0-0-0-0");
        let value = |i: u8| digest::piece(1 << 20, 0, &[i; 1024]);
        let (mut journal, found) = Journal::open(at.clone(), 3).unwrap();
        assert!(found.is_empty());
        journal.note(&[Some(value(0)), None, Some(value(2))]).unwrap();
        journal.note(&[Some(value(0)), Some(value(1)), None]).unwrap();
        let mut bytes = std::fs::read(&at).unwrap();
        bytes.extend([1; 17]);
        std::fs::write(&at, bytes).unwrap();
        let (mut journal, found) = Journal::open(at.clone(), 3).unwrap();
        assert_eq!(found, [value(0), value(1)]);
        journal.note(&[Some(value(0)), Some(value(1)), Some(value(2))]).unwrap();
        assert_eq!(Journal::open(at.clone(), 3).unwrap().1.len(), 3);
        assert_eq!(Journal::open(at, 2).unwrap().1.len(), 2, "of a shorter payload no more than it has");
    }
}
