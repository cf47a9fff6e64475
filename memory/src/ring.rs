//! io_uring, as far as reading files needs it: one slice is filled, with several reads of it under way.

use flashboot_core::{Error, Kind, Result};
use io_uring::{IoUring, opcode, types};
use rustix::fs::Advice;
use std::{
    fmt, io,
    num::NonZeroU64,
    ops::Range,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
};

/// Is told of a piece that completed: its place, what the system said, its bytes.
pub type Completed<'c> = dyn FnMut(Range<usize>, io::Result<usize>, &mut [u8]) -> Result<()> + 'c;

/// A queue of reads that the kernel carries out. One thread uses it at a time.
pub struct Ring {
    ring: IoUring,
    depth: usize,
}

impl Ring {
    /// A ring for `depth` reads at a time, at least one.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where the kernel has none or a container's policy forbids it (ENOSYS, EPERM); the system's
    /// own otherwise.
    pub fn new(depth: u32) -> Result<Self> {
        let depth = depth.clamp(1, 1024);
        let ring = IoUring::new(depth).map_err(|e| match e.raw_os_error() {
            // ENOSYS, EPERM, EACCES.
            Some(38 | 1 | 13) => {
                Error::new(Kind::Unavailable, "io_uring_setup", format!("no io_uring here: {e}"))
                    .with_remedy("allow io_uring (kernel.io_uring_disabled, seccomp), or read with pread")
            }
            _ => Error::from_io("io_uring_setup", &e, format!("a ring of {depth} entries")),
        })?;
        Ok(Self { ring, depth: usize::try_from(depth).unwrap_or(1) })
    }

    /// Reads `into.len()` bytes of `file` from `offset` on, in pieces of `piece` bytes, at most as many at a time as the ring
    /// has entries. `each` is told of every piece as it completes, in any order: its place in `into`, what the system said
    /// (how many bytes, which may be fewer), and its bytes. Once `each` fails nothing more is asked for; the call returns
    /// when nothing is under way any more, whatever happened.
    ///
    /// # Errors
    /// What `each` returned first; the system's when a ring cannot be entered.
    pub fn read(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        into: &mut [u8],
        piece: usize,
        each: &mut Completed<'_>,
    ) -> Result<()> {
        let piece = piece.clamp(1, 1 << 30);
        let (len, base) = (into.len(), into.as_mut_ptr());
        let (mut next, mut verdict) = (0usize, Ok(()));
        let mut flight = Flight { ring: &mut self.ring, count: 0 };
        loop {
            while verdict.is_ok() && next < len && flight.count < self.depth {
                let size = piece.min(len - next);
                let at = base.wrapping_add(next);
                let entry = opcode::Read::new(
                    types::Fd(file.as_raw_fd()),
                    at,
                    u32::try_from(size).unwrap_or(u32::MAX),
                )
                .offset(offset.saturating_add(next as u64))
                .build()
                .user_data(next as u64);
                // SAFETY: the kernel writes `size` bytes inside `into`, which is borrowed until this call returns, and
                // `flight` waits, also when it is dropped, until the kernel is done with them. The descriptor is borrowed
                // for as long.
                let pushed = unsafe { flight.ring.submission().push(&entry) };
                if pushed.is_err() {
                    break;
                }
                flight.count += 1;
                next += size;
            }
            if flight.count == 0 {
                return verdict;
            }
            flight.wait()?;
            while let Some((start, result)) = flight.take() {
                let end = start.saturating_add(piece).min(len);
                if verdict.is_ok() {
                    // SAFETY: the piece lies inside `into`, the kernel is done with it, and pieces do not overlap, so no
                    // read under way touches it.
                    let bytes =
                        unsafe { std::slice::from_raw_parts_mut(base.wrapping_add(start), end - start) };
                    verdict = each(start..end, result, bytes);
                }
            }
        }
    }
}

/// Reads under way. Dropped, it waits for them: their memory is somebody's again afterwards.
struct Flight<'r> {
    ring: &'r mut IoUring,
    count: usize,
}

impl Flight<'_> {
    /// Submits what is queued and waits for one completion at least.
    fn wait(&mut self) -> Result<()> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy) => {}
                Err(e) => {
                    return Err(Error::from_io(
                        "io_uring_enter",
                        &e,
                        format!("{} reads under way", self.count),
                    ));
                }
            }
        }
    }

    /// The next completion that is there: where its piece begins, and what came of it.
    fn take(&mut self) -> Option<(usize, io::Result<usize>)> {
        let done = self.ring.completion().next()?;
        self.count = self.count.saturating_sub(1);
        let result = usize::try_from(done.result()).map_err(|_| io::Error::from_raw_os_error(-done.result()));
        Some((usize::try_from(done.user_data()).unwrap_or(usize::MAX), result))
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        while self.count > 0 {
            if self.wait().is_err() {
                // The kernel may still write: leaving would be worse than asking again.
                std::thread::yield_now();
            }
            while self.take().is_some() {}
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({} entries)", self.depth)
    }
}

/// `cachestat(2)`, the same number on every architecture that has it.
const CACHESTAT: libc::c_long = 451;

/// How many pages of `len` bytes of `file` from `offset` on are in the page cache; `None` where the kernel does not say
/// (before Linux 6.5, or a policy).
pub fn cached(file: impl AsFd, offset: u64, len: u64) -> Option<u64> {
    // `struct cachestat_range` and `struct cachestat` of linux/mman.h. A length of 0 would mean: to the end.
    let range = [offset, NonZeroU64::new(len)?.get()];
    let mut stat = [0u64; 5];
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: both structures are as long as the kernel's and live through the call, which only fills the second.
    let answer = unsafe { libc::syscall(CACHESTAT, fd, range.as_ptr(), stat.as_mut_ptr(), 0u32) };
    (answer == 0).then_some(stat[0])
}

/// Drops clean pages of `len` bytes of `file` from `offset` on out of the page cache.
pub fn uncache(file: impl AsFd, offset: u64, len: u64) {
    if let Some(len) = NonZeroU64::new(len) {
        // Advice: a file system without a cache refuses, and nothing is lost.
        let _ = rustix::fs::fadvise(file, offset, Some(len), Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn file(len: usize) -> (std::fs::File, Vec<u8>) {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        (file, bytes)
    }

    fn ring() -> Option<Ring> {
        match Ring::new(3) {
            Ok(ring) => Some(ring),
            Err(e) if e.kind() == Kind::Unavailable => None,
            Err(e) => panic!("{e}"),
        }
    }

    #[test]
    fn every_piece_comes_once_with_its_bytes_and_the_end_of_the_file_is_seen() {
        let Some(mut ring) = ring() else { return };
        let (file, bytes) = file(10_000);
        let mut into = vec![0; 12_000];
        let mut seen = Vec::new();
        ring.read(file.as_fd(), 5, &mut into, 700, &mut |range, result, got| {
            let n = result.unwrap();
            let end = (5 + range.start + n).min(bytes.len());
            assert_eq!(&got[..n], &bytes[(5 + range.start).min(end)..end]);
            seen.push((range.start, n));
            Ok(())
        })
        .unwrap();
        seen.sort_unstable();
        assert_eq!(seen.len(), 12_000usize.div_ceil(700));
        assert_eq!(seen.iter().map(|(_, n)| n).sum::<usize>(), 9_995);
    }

    #[test]
    fn an_error_or_a_panic_ends_it_once_nothing_is_under_way() {
        let Some(mut ring) = ring() else { return };
        let (file, bytes) = file(100_000);
        let mut into = vec![0; 100_000];
        let stop = || Error::new(Kind::Cancelled, "test", "enough");
        let mut told = 0;
        let failed = ring.read(file.as_fd(), 0, &mut into, 1000, &mut |_, _, _| {
            told += 1;
            if told == 5 { Err(stop()) } else { Ok(()) }
        });
        assert_eq!((failed, told), (Err(stop()), 5));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            ring.read(file.as_fd(), 0, &mut into, 1000, &mut |_, _, _| panic!("in the middle"))
        }));
        assert!(panicked.is_err());
        // Nothing of them is left in the ring.
        into.fill(0);
        ring.read(file.as_fd(), 0, &mut into, 4096, &mut |_, result, _| result.map(drop).map_err(|_| stop()))
            .unwrap();
        assert_eq!(into, bytes);
    }

    #[test]
    fn the_page_cache_says_what_it_holds() {
        let (file, _) = file(64 << 10);
        file.sync_all().unwrap();
        let Some(before) = cached(&file, 0, 64 << 10) else { return };
        assert!(before > 0, "just written");
        uncache(&file, 0, 64 << 10);
        let after = cached(&file, 0, 64 << 10).unwrap();
        // A file system that lives in memory keeps them.
        assert!(after == 0 || after == before, "{before} pages, then {after}");
        assert_eq!(cached(&file, 0, 0), None);
    }
}
