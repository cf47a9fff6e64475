//! Direct IO where the file system has it, buffered IO where it has not, decided per file by trying.
//!
//! Direct IO wants buffer, offset and length aligned; payloads are cut so that they always are.

use crate::error::{Error, Result};
use flashboot_core::layout::PAYLOAD_ALIGN;
use flashboot_memory::Buffer;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// From this size on a slab is a mapping of its own, in huge pages where the kernel has them: direct IO pins its pages
/// one by one, and rows that are scattered over several slabs would miss the TLB for each.
const MAPPED_FROM: usize = 4 << 20;

/// A buffer that begins at a multiple of [`PAYLOAD_ALIGN`].
pub(crate) struct Slab {
    memory: Memory,
    len: usize,
}

enum Memory {
    Mapped(Buffer),
    /// The bytes, and where the aligned ones begin.
    Heap(Vec<u8>, usize),
}

impl Slab {
    /// `path` is for errors of the allocator only; the error of a mapping says its size and what to do.
    pub(crate) fn new(path: &Path, len: usize) -> Result<Self> {
        if len >= MAPPED_FROM {
            let buffer = Buffer::new(len).map_err(Error::Memory)?;
            return Ok(Self { memory: Memory::Mapped(buffer), len });
        }
        let align = PAYLOAD_ALIGN as usize;
        let bytes = zeroes(path, len.saturating_add(align))?;
        let start = bytes.as_ptr().align_offset(align);
        // Without an answer from the allocator's pointer the kernel refuses direct IO and buffered IO serves.
        let start = if start < align { start } else { 0 };
        Ok(Self { memory: Memory::Heap(bytes, start), len })
    }

    /// The first `len` bytes, or all of it if it is shorter.
    pub(crate) fn first(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.len);
        let (bytes, start) = match &mut self.memory {
            Memory::Mapped(buffer) => (buffer.as_mut_slice(), 0),
            Memory::Heap(bytes, start) => (bytes.as_mut_slice(), *start),
        };
        bytes.get_mut(start..start.saturating_add(len)).unwrap_or_default()
    }
}

/// `len` zeroes, or an error where `vec!` would end the process.
pub(crate) fn zeroes(path: &Path, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(len).is_err() {
        return Err(no_memory(path));
    }
    bytes.resize(len, 0);
    Ok(bytes)
}

fn no_memory(path: &Path) -> Error {
    let none = std::io::Error::from_raw_os_error(rustix::io::Errno::NOMEM.raw_os_error());
    Error::io("malloc", path, &none)
}

/// A file opened twice: direct, where that works, and buffered.
pub(crate) struct DirectFile {
    path: PathBuf,
    buffered: File,
    direct: Option<File>,
    use_direct: AtomicBool,
}

impl DirectFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let buffered = File::open(path).map_err(|e| Error::io("open", path, &e))?;
        Ok(Self::with(path, buffered, OFlags::RDONLY))
    }

    /// Creates the file, which must not exist, `len` bytes long and with its space reserved where possible.
    pub(crate) fn create(path: &Path, len: u64) -> Result<Self> {
        let create = File::options().write(true).create_new(true).open(path);
        let buffered = create.map_err(|e| Error::io("create", path, &e))?;
        if len > 0 {
            reserve(path, &buffered, len)?;
        }
        Ok(Self::with(path, buffered, OFlags::WRONLY))
    }

    /// The same for a file that is read again while it is written, and that a killed writer may have begun.
    pub(crate) fn create_or_go_on(path: &Path, len: u64) -> Result<Self> {
        let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let buffered = open.map_err(|e| Error::io("open", path, &e))?;
        buffered.set_len(len).map_err(|e| Error::io("ftruncate", path, &e))?;
        if len > 0 {
            reserve(path, &buffered, len)?;
        }
        Ok(Self::with(path, buffered, OFlags::RDWR))
    }

    fn with(path: &Path, buffered: File, mode: OFlags) -> Self {
        let flags = mode | OFlags::DIRECT | OFlags::CLOEXEC;
        // EINVAL (or anything else): this file system has no direct IO, or not for this file.
        let direct = rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from);
        let use_direct = AtomicBool::new(direct.is_some());
        Self { path: path.into(), buffered, direct, use_direct }
    }

    /// The way that serves now: direct until it was refused once.
    fn now(&self) -> (&File, bool) {
        match &self.direct {
            Some(direct) if self.use_direct.load(Ordering::Relaxed) => (direct, true),
            _ => (&self.buffered, false),
        }
    }

    /// Runs `call` on the direct file, and on the buffered one if the kernel refuses the alignment.
    fn run(&self, op: &'static str, call: impl Fn(&File) -> std::io::Result<()>) -> Result<()> {
        let (file, direct) = self.now();
        let result = match call(file) {
            Err(e) if direct && e.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
                self.use_direct.store(false, Ordering::Relaxed);
                call(&self.buffered)
            }
            other => other,
        };
        result.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::Changed { path: self.path.clone() },
            _ => Error::io(op, &self.path, &e),
        })
    }

    pub(crate) fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let into = std::cell::RefCell::new(into);
        self.run("pread", |file| file.read_exact_at(&mut into.borrow_mut(), offset))
    }

    pub(crate) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.run("pwrite", |file| file.write_all_at(bytes, offset))
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.buffered.sync_all().map_err(|e| Error::io("fsync", &self.path, &e))
    }
}

/// Gives `file` its length and, where the file system can, its space, so that a full disk is known at once.
pub(crate) fn reserve(path: &Path, file: &File, len: u64) -> Result<()> {
    use rustix::fs::FallocateFlags;
    use rustix::io::Errno;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
            file.set_len(len).map_err(|e| Error::io("ftruncate", path, &e))
        }
        Err(e) => Err(Error::io("fallocate", path, &e.into())),
    }
}
