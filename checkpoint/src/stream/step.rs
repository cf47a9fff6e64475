//! The units of work: what is to be moved, and one read-sized part of it.

use crate::gather::Gather;

/// Bytes of a file that belong together: a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Which file.
    pub(crate) file: u32,
    /// Where its first byte is.
    pub(crate) offset: u64,
}

/// What one stream takes of a work's origins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Intake {
    /// Which stream.
    pub(crate) stream: u32,
    /// The first byte of the stream that this work fills; what lies between it and the work before becomes zero.
    pub(crate) start: u64,
    /// One past the last byte that it fills.
    pub(crate) end: u64,
    /// What of `start..end` no gather fills: it becomes zero.
    pub(crate) holes: Vec<(u64, u64)>,
    /// `source` is the origin's number in its work, `at` counts from the stream's first byte.
    pub(crate) gathers: Vec<Gather>,
}

/// Something to be moved. Origins are taken in their order, except that those which meet in a stream row by row are
/// taken together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) origins: Vec<Origin>,
    pub(crate) intakes: Vec<Intake>,
}

/// One read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Read {
    pub(super) file: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Where its bytes are in the step's buffer.
    pub(super) at: u64,
}

/// One copy: `from` counts from the first byte of the step's buffer, `source` means nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) stream: u32,
    pub(super) gather: Gather,
}

/// A few MiB: what is read, where it goes, and up to where each stream is filled afterwards.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) reads: Vec<Read>,
    pub(super) copies: Vec<Copy>,
    pub(super) filled: Vec<(u32, u64)>,
    /// Ranges of streams that become zero.
    pub(super) zeros: Vec<(u32, u64, u64)>,
    /// Bytes of all reads.
    pub(super) bytes: u64,
}

impl Step {
    /// Adds a read, as a part of the last one if they touch; gives where its bytes will be.
    pub(super) fn read(&mut self, file: u32, offset: u64, len: u64) -> u64 {
        let at = self.bytes;
        self.bytes = self.bytes.saturating_add(len);
        match self.reads.last_mut() {
            Some(last) if last.file == file && last.offset.checked_add(last.len) == Some(offset) => {
                last.len = last.len.saturating_add(len);
            }
            _ => self.reads.push(Read { file, offset, len, at }),
        }
        at
    }

    /// Notes what becomes zero.
    pub(super) fn zero(&mut self, stream: u32, from: u64, to: u64) {
        if from < to {
            self.zeros.push((stream, from, to));
        }
    }

    /// Notes up to where a stream is filled.
    pub(super) fn fill(&mut self, stream: u32, to: u64) {
        match self.filled.last_mut() {
            Some((last, filled)) if *last == stream => *filled = (*filled).max(to),
            _ => self.filled.push((stream, to)),
        }
    }
}
