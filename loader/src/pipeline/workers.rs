//! Units shared out among threads.

use flashboot_core::{ByteRange, Error, Result};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// Units, each taken once, until one fails.
pub(super) struct Queue<'u> {
    units: &'u [ByteRange],
    next: AtomicUsize,
    stop: AtomicBool,
    first_error: Mutex<Option<Error>>,
}

impl<'u> Queue<'u> {
    pub(super) fn new(units: &'u [ByteRange]) -> Self {
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { units, next, stop, first_error: Mutex::new(None) }
    }

    /// The next unit.
    pub(super) fn take(&self) -> Option<ByteRange> {
        if self.stop.load(Ordering::Relaxed) {
            return None;
        }
        self.units.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    pub(super) fn fail(&self, e: Error) {
        self.stop.store(true, Ordering::Relaxed);
        self.first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
    }

    /// Runs `work` on `threads` threads, this one among them; its failure stops the others.
    pub(super) fn run(&self, threads: usize, work: impl Fn(&Self) -> Result<()> + Sync) -> Result<()> {
        let one = || {
            if let Err(e) = work(self) {
                self.fail(e);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.max(1) {
                // This thread works too: one that cannot be had makes it slower, no worse.
                if std::thread::Builder::new().spawn_scoped(scope, one).is_err() {
                    break;
                }
            }
            one();
        });
        self.first_error.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }
}
