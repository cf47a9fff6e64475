//! Where a load's time goes.

use serde::Serialize;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// A part of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Reaching a source: an agent, a service, an object store.
    Connect,
    /// Waiting for bytes that somebody else reads: an agent that is still staging, a peer.
    IoWait,
    /// Reading.
    Read,
    /// Hashing and comparing.
    Verify,
    /// Pinning host memory.
    Pin,
    /// Copying to the GPU, as far as a thread waited for it.
    H2d,
    /// Unpinning host memory.
    Unpin,
    /// Making the arena, and tensors of it.
    Bind,
}

/// Time in each phase, added up by any number of threads.
#[derive(Debug, Default)]
pub struct Phases {
    nanoseconds: [AtomicU64; 8],
    /// Work of several threads at once counts as its mean: sums are kept as they are, and divided by this.
    workers: AtomicU64,
}

/// The same in milliseconds, by name. Phases overlap: their sum is not the load's time. Phases of several threads at once are
/// the mean of theirs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[expect(missing_docs, reason = "named after their phases")]
pub struct PhasesMs {
    pub connect: f64,
    pub io_wait: f64,
    pub read: f64,
    pub verify: f64,
    pub pin: f64,
    pub h2d: f64,
    pub unpin: f64,
    pub bind: f64,
}

impl Phases {
    fn slot(&self, phase: Phase) -> &AtomicU64 {
        let [connect, io_wait, read, verify, pin, h2d, unpin, bind] = &self.nanoseconds;
        match phase {
            Phase::Connect => connect,
            Phase::IoWait => io_wait,
            Phase::Read => read,
            Phase::Verify => verify,
            Phase::Pin => pin,
            Phase::H2d => h2d,
            Phase::Unpin => unpin,
            Phase::Bind => bind,
        }
    }

    /// Adds `took` to a phase that one thread works at.
    pub fn add(&self, phase: Phase, took: Duration) {
        self.slot(phase).fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Adds one of `workers` threads' share.
    pub(super) fn add_share(&self, phase: Phase, took: Duration, workers: usize) {
        let workers = u32::try_from(workers.max(1)).unwrap_or(u32::MAX);
        self.workers.fetch_max(u64::from(workers), Ordering::Relaxed);
        self.add(phase, took / workers);
    }

    /// Runs `work` and adds what it took.
    pub fn time<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.add(phase, began.elapsed());
        done
    }

    /// The most threads that worked at once.
    pub fn workers(&self) -> u64 {
        self.workers.load(Ordering::Relaxed)
    }

    /// In milliseconds.
    pub fn ms(&self) -> PhasesMs {
        let ms = |phase| self.slot(phase).load(Ordering::Relaxed) as f64 / 1e6;
        PhasesMs {
            connect: ms(Phase::Connect),
            io_wait: ms(Phase::IoWait),
            read: ms(Phase::Read),
            verify: ms(Phase::Verify),
            pin: ms(Phase::Pin),
            h2d: ms(Phase::H2d),
            unpin: ms(Phase::Unpin),
            bind: ms(Phase::Bind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_a_place_of_its_own_and_workers_count_as_their_mean() {
        let phases = Phases::default();
        let all = [
            Phase::Connect,
            Phase::IoWait,
            Phase::Read,
            Phase::Verify,
            Phase::Pin,
            Phase::H2d,
            Phase::Unpin,
            Phase::Bind,
        ];
        for (i, phase) in (1..).zip(all) {
            phases.add(phase, Duration::from_millis(i));
        }
        (0..4).for_each(|_| phases.add_share(Phase::Read, Duration::from_millis(8), 4));
        let ms = phases.ms();
        let found = [ms.connect, ms.io_wait, ms.read, ms.verify, ms.pin, ms.h2d, ms.unpin, ms.bind];
        assert_eq!(found, [1.0, 2.0, 11.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(phases.workers(), 4);
    }
}
