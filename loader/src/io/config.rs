//! How to read.

use flashboot_core::ByteSize;

/// Which system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Engine {
    /// io_uring where a ring can be made, `pread` otherwise.
    #[default]
    Auto,
    /// `pread`, one at a time a lane.
    Pread,
    /// io_uring or an error.
    Uring,
}

/// How to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoConfig {
    /// Which system calls.
    pub engine: Engine,
    /// Whether to go past the page cache where the file system can.
    pub direct: bool,
    /// Bytes of one read. A multiple of 4 KiB, so that direct reads stay aligned.
    pub piece: ByteSize,
    /// Reads under way in one lane of io_uring.
    pub depth: u32,
}

impl Default for IoConfig {
    /// Direct, in pieces of 1 MiB that a core's cache keeps until they are hashed, eight of them under way.
    fn default() -> Self {
        Self { engine: Engine::Auto, direct: true, piece: ByteSize::mib(1), depth: 8 }
    }
}

impl IoConfig {
    pub(crate) fn piece_len(&self) -> usize {
        const PAGE: usize = 4096;
        let piece = usize::try_from(self.piece.0).unwrap_or(1 << 30).clamp(PAGE, 1 << 30);
        piece / PAGE * PAGE
    }
}
