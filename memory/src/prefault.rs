//! Faulting pages in by several threads.

use crate::{errno::failed, mapping::Mapping};
use flashboot_core::{Error, Kind, Result};
use rustix::{
    io::Errno,
    mm::{Advice, madvise},
};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

/// Bytes of one call: small enough to share out evenly and to stop early, large enough that the call does
/// not matter. A multiple of every page size in use.
const STEP: usize = 64 << 20;

/// What a kernel without `MADV_POPULATE_WRITE` (before 5.14) answers with.
#[derive(Debug)]
pub(crate) struct NoPopulate;

/// Faults every page of `mapping` in for writing. Failure is an error, never a signal.
pub(crate) fn populate(mapping: &Mapping, threads: usize) -> Result<Result<(), NoPopulate>> {
    let outcome = in_steps(mapping, threads, |at, len| {
        loop {
            // SAFETY: part of one mapping of ours; populating changes no byte.
            let done = unsafe { madvise(at.cast(), len, Advice::LinuxPopulateWrite) };
            match done {
                Err(Errno::INTR | Errno::AGAIN) => {}
                other => return other,
            }
        }
    });
    match outcome {
        Ok(()) => Ok(Ok(())),
        Err(Errno::INVAL) => Ok(Err(NoPopulate)),
        Err(errno) => {
            // EFAULT is where a touch would have raised SIGBUS: no page, or none within a cgroup's limit.
            let e =
                failed("madvise(MADV_POPULATE_WRITE)", errno, format!("faulting in {} bytes", mapping.len()));
            Err(match errno {
                Errno::FAULT | Errno::NOMEM => {
                    Error::new(Kind::Exhausted, "madvise(MADV_POPULATE_WRITE)", e.detail().to_owned())
                        .with_code(flashboot_core::Code::Errno(errno.raw_os_error()))
                        .with_remedy(
                            "free memory (or huge pages) on the node, or raise the container's limit",
                        )
                }
                _ => e,
            })
        }
    }
}

/// Writes a zero to one byte of every page of a fresh mapping that is reserved already.
pub(crate) fn touch(mapping: &Mapping, threads: usize, page: usize) {
    let page = page.max(1);
    let touched: Result<(), Errno> = in_steps(mapping, threads, |at, len| {
        for offset in (0..len).step_by(page) {
            let byte = at.wrapping_add(offset).cast::<AtomicU8>();
            // SAFETY: inside the mapping; the creator shares it with nobody yet, and the store is atomic.
            let byte = unsafe { &*byte };
            byte.store(0, Ordering::Relaxed);
        }
        Ok(())
    });
    // `touch` itself cannot fail.
    let _: Result<(), Errno> = touched;
}

fn in_steps(
    mapping: &Mapping,
    threads: usize,
    work: impl Fn(*mut u8, usize) -> Result<(), Errno> + Sync,
) -> Result<(), Errno> {
    let steps = mapping.len().div_ceil(STEP);
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let run = || -> Result<(), Errno> {
        loop {
            let step = next.fetch_add(1, Ordering::Relaxed);
            if step >= steps || failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            // step < steps, so the product is below the mapping's length.
            let start = step.saturating_mul(STEP);
            let at = mapping.base().as_ptr().wrapping_add(start);
            let done = work(at, STEP.min(mapping.len().saturating_sub(start)));
            if done.is_err() {
                failed.store(true, Ordering::Relaxed);
                return done;
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads.clamp(1, steps.max(1)))
            .filter_map(|_| {
                std::thread::Builder::new().name("flashboot-fault".into()).spawn_scoped(scope, run).ok()
            })
            .collect();
        let mine = run();
        others.into_iter().fold(mine, |sofar, other| sofar.and(other.join().unwrap_or(Ok(()))))
    })
}
