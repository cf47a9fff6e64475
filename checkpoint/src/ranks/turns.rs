//! Turns at the cores: work that keeps a core busy is done by half as many threads at once as there are cores, and by no
//! more than half of the writers, one piece after the other. All at once would end all at once: the disk would have nothing to do until then, and everything
//! after. The other half of the cores reads and scatters.

use std::sync::{Condvar, Mutex, PoisonError};

/// So many turns at once.
pub(super) struct Turns {
    free: Mutex<usize>,
    given: Condvar,
}

impl Turns {
    /// Half as many as there are cores, and no more than half of so many writers: with a turn for each, none would be
    /// left to keep the disk busy.
    pub(super) fn for_writers(writers: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::of(count(cores, writers))
    }

    fn of(count: usize) -> Self {
        Self { free: Mutex::new(count.max(1)), given: Condvar::new() }
    }

    /// Waits for a turn and does `work` in it.
    pub(super) fn take<T>(&self, work: impl FnOnce() -> T) -> T {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.given.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        drop(free);
        // Given back also where `work` panics: others wait for it.
        let _turn = Turn(self);
        work()
    }
}

fn count(cores: usize, writers: usize) -> usize {
    (cores / 2).min(writers / 2).max(1)
}

struct Turn<'t>(&'t Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.given.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_more_are_at_work_than_there_are_turns_and_everyone_gets_one() {
        let (turns, now, most, done) =
            (Turns::of(2), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        crate::blocks::on_threads(
            5,
            || {
                for _ in 0..50 {
                    turns.take(|| {
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(1, Ordering::SeqCst);
                    });
                    done.fetch_add(1, Ordering::SeqCst);
                }
            },
            || {},
        );
        assert!(most.into_inner() <= 2);
        let done = done.into_inner();
        assert!(done > 0 && done % 50 == 0 && *turns.free.lock().unwrap() == 2);
    }

    #[test]
    fn on_any_machine_some_writers_have_no_turn() {
        for cores in 1..=256 {
            let writers = crate::stream::writers(crate::blocks::workers(Some(cores + 2), 8));
            let turns = count(cores, writers);
            assert!(turns >= 1 && turns <= cores.div_ceil(2) && 2 * turns <= writers, "{cores} cores");
        }
    }

    #[test]
    fn a_turn_comes_back_from_work_that_panics() {
        let turns = Turns::of(1);
        let work = std::panic::AssertUnwindSafe(|| turns.take(|| panic!("on purpose")));
        assert!(std::panic::catch_unwind(work).is_err());
        assert_eq!(turns.take(|| 7), 7);
    }
}
