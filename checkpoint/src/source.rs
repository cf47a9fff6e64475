//! Files that are read: opened once, checked to be regular, read with `pread`, never mapped, so that a bad disk
//! is an error and not a signal.

use crate::direct::zeroes;
use crate::error::{Error, Result};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::{fs::File, io, path::Path, path::PathBuf};

/// A regular file open for reading, and who it was when it was opened.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) identity: Identity,
}

/// Enough to see that a file was replaced or written between two looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) len: u64,
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // Looked at before opening: opening a pipe would wait for its writer.
        let meta = std::fs::metadata(path).map_err(|e| Error::io("stat", path, &e))?;
        check_regular(path, &meta)?;
        let file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
        Self::from_file(path, file)
    }

    /// Takes a file that was opened in some other way.
    pub(crate) fn from_file(path: &Path, file: File) -> Result<Self> {
        let meta = file.metadata().map_err(|e| Error::io("fstat", path, &e))?;
        check_regular(path, &meta)?;
        let identity = Identity {
            len: meta.len(),
            device: meta.dev(),
            inode: meta.ino(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        };
        Ok(Self { path: path.into(), file, identity })
    }

    pub(crate) fn len(&self) -> u64 {
        self.identity.len
    }

    /// Fills `into` from `offset`; a file that ends before is one that changed.
    pub(crate) fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(into, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Error::Changed { path: self.path.clone() },
            _ => Error::io("pread", &self.path, &e),
        })
    }

    /// `len` bytes from `offset`, which the caller has bounded by the file's length.
    pub(crate) fn bytes_at(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let too_long = || Error::Changed { path: self.path.clone() };
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(too_long());
        }
        let mut bytes = zeroes(&self.path, usize::try_from(len).map_err(|_| too_long())?)?;
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// All of it, unless it is longer than `cap`.
    pub(crate) fn all(&self, cap: u64) -> Result<Vec<u8>> {
        if self.len() > cap {
            return Err(Error::HeaderOverCap { file: self.path.clone(), size: self.len(), cap });
        }
        self.bytes_at(0, self.len())
    }

    /// Hands out `range` in pieces of at most `piece` bytes.
    pub(crate) fn stream(
        &self,
        mut offset: u64,
        len: u64,
        piece: usize,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let end = offset.saturating_add(len);
        let mut buffer = zeroes(&self.path, piece.min(usize::try_from(len).unwrap_or(piece)))?;
        while offset < end {
            let now = usize::try_from(end - offset).unwrap_or(piece).min(buffer.len());
            let part = buffer.get_mut(..now).unwrap_or_default();
            self.read_at(offset, part)?;
            take(part)?;
            offset += now as u64;
        }
        Ok(())
    }
}

fn check_regular(path: &Path, meta: &std::fs::Metadata) -> Result<()> {
    if meta.is_dir() {
        return Err(Error::IsDirectory { path: path.into() });
    }
    if !meta.is_file() {
        return Err(Error::NotRegular { path: path.into() });
    }
    Ok(())
}
