//! A file that is read: who it is, and the ways it can be read.

use flashboot_core::{Error, Kind, Result};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, statx};
use std::{
    fs::{File, Metadata},
    os::{fd::AsFd as _, fd::BorrowedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

/// `STATX_DIOALIGN` (Linux 6.1).
const DIOALIGN: u32 = 0x2000;
/// Where the kernel does not say what direct reads want: what every disk takes.
const USUAL: u64 = 4096;

/// A regular file open for reading, twice where it can be read directly.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    buffered: File,
    direct: Option<Direct>,
    identity: Identity,
}

#[derive(Debug)]
struct Direct {
    file: File,
    memory: u64,
    offset: u64,
    /// Refused once: it is not tried again.
    refused: AtomicBool,
}

/// Enough to see that a file was replaced or written between two looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    len: u64,
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(meta: &Metadata) -> Self {
        Self {
            len: meta.len(),
            device: meta.dev(),
            inode: meta.ino(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        }
    }
}

impl SourceFile {
    pub(super) fn open(path: &Path, direct: bool) -> Result<Self> {
        let failed = |op: &'static str, e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(Kind::Unavailable, op, format!("{}: there is no such file", path.display()))
            }
            _ => Error::from_io(op, &e, path.display().to_string()),
        };
        // Looked at before it is opened: opening a pipe would wait for its writer.
        let meta = std::fs::metadata(path).map_err(|e| failed("stat", e))?;
        if !meta.is_file() {
            let detail = format!("{}: is no regular file", path.display());
            return Err(Error::new(Kind::Invalid, "open", detail));
        }
        let buffered = File::open(path).map_err(|e| failed("open", e))?;
        let identity = Identity::of(&buffered.metadata().map_err(|e| failed("fstat", e))?);
        // Without read-ahead a buffered read brings in what it asks for and nothing else, which can be dropped again.
        let _ = rustix::fs::fadvise(&buffered, 0, None, rustix::fs::Advice::Random);
        let direct = if direct { Direct::open(path, &buffered) } else { None };
        Ok(Self { path: path.into(), buffered, direct, identity })
    }

    /// The same, called `path` from here on: for a file that came as a descriptor.
    pub fn called(self, path: PathBuf) -> Self {
        Self { path, ..self }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length when it was opened.
    pub fn len(&self) -> u64 {
        self.identity.len
    }

    /// Whether it had no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses a file that was written or truncated since it was opened.
    ///
    /// # Errors
    /// [`Kind::Corrupt`], with both lengths.
    pub fn unchanged(&self) -> Result<()> {
        let meta = self.buffered.metadata();
        let meta = meta.map_err(|e| Error::from_io("fstat", &e, self.path.display().to_string()))?;
        if Identity::of(&meta) == self.identity {
            return Ok(());
        }
        Err(self.changed(format!("{} bytes and another time, {} bytes when opened", meta.len(), self.len())))
    }

    pub(super) fn changed(&self, found: impl std::fmt::Display) -> Error {
        let detail = format!("{}: changed while it was read: {found}", self.path.display());
        Error::new(Kind::Corrupt, "pread", detail).with_remedy("load again when nobody writes the file")
    }

    /// Whether direct reads are tried.
    pub fn is_direct(&self) -> bool {
        self.direct.as_ref().is_some_and(|direct| !direct.refused.load(Ordering::Relaxed))
    }

    /// What offsets and lengths of direct reads are a multiple of, and what buffers begin at a multiple of; the usual where
    /// there are none.
    pub fn alignment(&self) -> u64 {
        self.direct.as_ref().map_or(USUAL, |direct| direct.offset.max(direct.memory))
    }

    /// How many of `len` bytes from `offset` on can be read directly into memory at `address`; zero: not from there.
    pub(super) fn direct_len(&self, offset: u64, address: usize, len: usize) -> usize {
        let Some(direct) = self.direct.as_ref().filter(|direct| !direct.refused.load(Ordering::Relaxed))
        else {
            return 0;
        };
        if !offset.is_multiple_of(direct.offset) || !(address as u64).is_multiple_of(direct.memory) {
            return 0;
        }
        len - usize::try_from(len as u64 % direct.offset).unwrap_or(len)
    }

    pub(super) fn refuse_direct(&self) {
        if let Some(direct) = &self.direct {
            direct.refused.store(true, Ordering::Relaxed);
        }
    }

    /// The descriptor, for [`Ops`](super::Ops).
    pub fn descriptor(&self, direct: bool) -> BorrowedFd<'_> {
        match &self.direct {
            Some(open) if direct => open.file.as_fd(),
            _ => self.buffered.as_fd(),
        }
    }
}

impl Direct {
    /// `None`: this file system has no direct IO, or not for this file.
    fn open(path: &Path, buffered: &File) -> Option<Self> {
        let (memory, offset) =
            match statx(buffered, "", AtFlags::EMPTY_PATH, StatxFlags::from_bits_retain(DIOALIGN)) {
                Ok(stat) if stat.stx_mask & DIOALIGN != 0 => {
                    let (memory, offset) =
                        (u64::from(stat.stx_dio_mem_align), u64::from(stat.stx_dio_offset_align));
                    if memory == 0 || offset == 0 {
                        return None;
                    }
                    (memory, offset)
                }
                _ => (USUAL, USUAL),
            };
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        Some(Self { file: file.into(), memory, offset, refused: AtomicBool::new(false) })
    }
}
