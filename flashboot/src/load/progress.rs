//! How far a load is, for who shows it.

use flashboot_loader::source::Load;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{RecvTimeoutError, channel},
    },
    thread::{Builder, scope},
    time::Duration,
};

/// How often it is looked at.
const EVERY: Duration = Duration::from_millis(50);

/// Bytes that are there, of so many; cloning shares them.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Bytes that are there, and all of them: 0 before it is known how many.
    pub fn now(&self) -> (u64, u64) {
        (self.0.done.load(Ordering::Relaxed), self.0.total.load(Ordering::Relaxed))
    }

    /// Runs `work`, which is `load`'s, and keeps the counts meanwhile.
    pub(super) fn watch<T, E>(&self, load: &Load, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let total = load.wanted().payload;
        self.0.total.store(total, Ordering::Relaxed);
        let (running, ended) = channel::<()>();
        scope(|scope| {
            let look = move || {
                while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                    self.0.done.store(load.bytes(), Ordering::Relaxed);
                }
            };
            // Without a thread to spare nobody sees how far it is, no worse.
            let looking = Builder::new().name("flashboot-progress".into()).spawn_scoped(scope, look);
            let done = work();
            drop(running);
            drop(looking);
            if done.is_ok() {
                self.0.done.store(total, Ordering::Relaxed);
            }
            done
        })
    }
}
