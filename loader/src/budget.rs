//! Bytes in flight: who wants some waits until there are some, in the order of asking.

use flashboot_core::{ByteSize, Error, Kind, Result};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A number of bytes that at most may be in flight. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    peak: u64,
    /// Who waits, first come first served: a large request is not starved by small ones.
    queue: VecDeque<u64>,
    next: u64,
}

impl State {
    /// Whether `bytes` more may be in flight: within the limit, or alone.
    fn admits(&self, limit: u64, bytes: u64) -> bool {
        self.used == 0 || self.used.checked_add(bytes).is_some_and(|sum| sum <= limit)
    }
}

/// Bytes that are in flight until it is dropped.
#[derive(Debug)]
pub struct Permit {
    budget: Arc<Inner>,
    bytes: u64,
}

impl Budget {
    /// What a loader may have in flight unless it is told otherwise: 6 GB.
    pub const DEFAULT: ByteSize = ByteSize(6_000_000_000);

    /// A budget of `limit`.
    pub fn new(limit: ByteSize) -> Self {
        Self(Arc::new(Inner { limit: limit.0, state: Mutex::default(), changed: Condvar::new() }))
    }

    /// Waits until `bytes` may be in flight: until they and what is in flight are within the limit, or, where they alone are
    /// more than it, until nothing else is. Earlier requests are served first.
    ///
    /// # Errors
    /// [`Kind::Deadline`] after `timeout`, with the numbers.
    pub fn acquire(&self, bytes: u64, timeout: Duration) -> Result<Permit> {
        let Inner { limit, state, changed } = &*self.0;
        let until = Instant::now().checked_add(timeout);
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = state.next;
        state.next += 1;
        state.queue.push_back(ticket);
        while state.queue.front() != Some(&ticket) || !state.admits(*limit, bytes) {
            let left = until
                .map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                state.queue.retain(|waiting| *waiting != ticket);
                let detail = format!(
                    "{bytes} bytes not to be had within {timeout:?}: {} of {limit} are in flight",
                    state.used
                );
                drop(state);
                changed.notify_all();
                return Err(Error::new(Kind::Deadline, "budget", detail)
                    .with_remedy("let go of tensors that were read, or raise the budget"));
            }
            state = changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.queue.pop_front();
        state.used = state.used.saturating_add(bytes);
        state.peak = state.peak.max(state.used);
        drop(state);
        changed.notify_all();
        Ok(Permit { budget: Arc::clone(&self.0), bytes })
    }

    /// The same without waiting; `None` when it would have to.
    pub fn try_acquire(&self, bytes: u64) -> Option<Permit> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.queue.is_empty() || !state.admits(self.0.limit, bytes) {
            return None;
        }
        state.used = state.used.saturating_add(bytes);
        state.peak = state.peak.max(state.used);
        drop(state);
        Some(Permit { budget: Arc::clone(&self.0), bytes })
    }

    /// The limit, in bytes.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes in flight now.
    pub fn used(&self) -> u64 {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).used
    }

    /// The most bytes that ever were.
    pub fn peak(&self) -> u64 {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).peak
    }
}

impl Permit {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.used = state.used.saturating_sub(self.bytes);
        drop(state);
        self.budget.changed.notify_all();
    }
}

/// Paces copies that consumers queue on threads of their own: each charges the buffer it copies from, whole and once, until
/// the last copy out of it ends, because one slow small copy keeps all of it alive.
#[derive(Debug, Clone)]
pub struct Pacer {
    budget: Budget,
    charged: Arc<Mutex<HashMap<u64, Charge>>>,
    turn: Arc<Mutex<()>>,
}

#[derive(Debug)]
struct Charge {
    copies: u64,
    _permit: Permit,
}

/// A copy that is queued or under way.
#[derive(Debug)]
pub struct Paced {
    pacer: Pacer,
    buffer: u64,
}

impl Pacer {
    /// Paces by `budget`.
    pub fn new(budget: Budget) -> Self {
        Self { budget, charged: Arc::default(), turn: Arc::default() }
    }

    /// Waits until a copy out of the buffer number `buffer`, of `bytes` bytes, may be queued. Numbers are whatever tells buffers
    /// apart: [`View::buffer`](crate::slab::View::buffer), or one of the caller's.
    ///
    /// # Errors
    /// [`Kind::Deadline`] after `timeout`.
    pub fn pace(&self, buffer: u64, bytes: u64, timeout: Duration) -> Result<Paced> {
        let join = || {
            let mut charged = self.charged.lock().unwrap_or_else(PoisonError::into_inner);
            charged.get_mut(&buffer).map(|charge| charge.copies += 1)
        };
        let paced = || Paced { pacer: self.clone(), buffer };
        if join().is_some() {
            return Ok(paced());
        }
        // One at a time, so that who wants a buffer that is just being charged joins it, and does not wait behind it.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if join().is_none() {
            let permit = self.budget.acquire(bytes, timeout)?;
            let mut charged = self.charged.lock().unwrap_or_else(PoisonError::into_inner);
            charged.insert(buffer, Charge { copies: 1, _permit: permit });
        }
        Ok(paced())
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        let mut charged = self.pacer.charged.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = match charged.get_mut(&self.buffer) {
            Some(charge) if charge.copies <= 1 => charged.remove(&self.buffer),
            Some(charge) => {
                charge.copies -= 1;
                None
            }
            None => None,
        };
        drop(charged);
        // Given back without the lock.
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::thread;

    const NOW: Duration = Duration::ZERO;
    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn what_is_too_much_waits_until_its_deadline_and_says_the_numbers() {
        let budget = Budget::new(ByteSize(100));
        let held = budget.acquire(60, NOW).unwrap();
        let e = budget.acquire(41, Duration::from_millis(5)).unwrap_err();
        assert_eq!(e.kind(), Kind::Deadline);
        assert!(e.detail().contains("41 bytes") && e.detail().contains("60 of 100"), "{e}");
        drop(budget.acquire(40, NOW).unwrap());
        drop(held);
        assert_eq!((budget.used(), budget.peak()), (0, 100));
    }

    #[test]
    fn one_larger_than_the_budget_goes_alone() {
        let budget = Budget::new(ByteSize(100));
        let small = budget.acquire(1, NOW).unwrap();
        assert!(budget.acquire(1000, NOW).is_err());
        drop(small);
        let large = budget.acquire(1000, NOW).unwrap();
        assert!(budget.try_acquire(1).is_none());
        drop(large);
        assert!(budget.try_acquire(1).is_some());
    }

    #[test]
    fn a_large_request_is_served_before_small_ones_that_came_later() {
        let budget = Budget::new(ByteSize(10));
        let first = budget.acquire(5, NOW).unwrap();
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let large = scope.spawn(|| {
                let permit = budget.acquire(10, SOON).unwrap();
                order.lock().unwrap().push("large");
                drop(permit);
            });
            while budget.0.state.lock().unwrap().queue.is_empty() {
                thread::yield_now();
            }
            let small = scope.spawn(|| {
                let permit = budget.acquire(1, SOON).unwrap();
                order.lock().unwrap().push("small");
                drop(permit);
            });
            while budget.0.state.lock().unwrap().queue.len() < 2 {
                thread::yield_now();
            }
            drop(first);
            large.join().unwrap();
            small.join().unwrap();
        });
        assert_eq!(order.into_inner().unwrap(), ["large", "small"]);
    }

    #[test]
    fn who_gives_up_waiting_is_in_nobodys_way() {
        let budget = Budget::new(ByteSize(10));
        let held = budget.acquire(6, NOW).unwrap();
        thread::scope(|scope| {
            let gives_up = scope.spawn(|| budget.acquire(10, Duration::from_millis(50)).is_err());
            while budget.0.state.lock().unwrap().queue.is_empty() {
                thread::yield_now();
            }
            let behind = scope.spawn(|| budget.acquire(2, SOON).is_ok());
            assert!(gives_up.join().unwrap() && behind.join().unwrap());
        });
        drop(held);
    }

    #[test]
    fn a_buffer_is_charged_once_and_until_its_last_copy_ends() {
        let pacer = Pacer::new(Budget::new(ByteSize(100)));
        let copies: Vec<_> = (0..5).map(|_| pacer.pace(7, 80, NOW).unwrap()).collect();
        assert_eq!(pacer.budget.used(), 80);
        assert!(pacer.pace(8, 80, NOW).is_err(), "another buffer does not fit beside it");
        let mut copies = copies.into_iter();
        let slow = copies.next();
        drop(copies);
        assert_eq!(pacer.budget.used(), 80, "one slow copy keeps all of it");
        drop(slow);
        assert_eq!(pacer.budget.used(), 0);
        // Two threads that want one buffer that is larger than everything: the second joins the first.
        thread::scope(|scope| {
            let copies: Vec<_> = (0..2).map(|_| scope.spawn(|| pacer.pace(9, 1000, SOON).unwrap())).collect();
            let copies: Vec<_> = copies.into_iter().map(|copy| copy.join().unwrap()).collect();
            assert_eq!((copies.len(), pacer.budget.used()), (2, 1000));
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn never_more_than_the_limit_but_for_one_alone_and_nothing_at_the_end(
            limit in 0u64..100, steps in prop::collection::vec((any::<bool>(), 0u64..150, 0usize..8), 0..60),
        ) {
            let budget = Budget::new(ByteSize(limit));
            let mut held: Vec<Permit> = Vec::new();
            for (take, bytes, which) in steps {
                let before: u64 = held.iter().map(Permit::bytes).sum();
                if take {
                    let fits = before == 0 || before + bytes <= limit;
                    let got = if which % 2 == 0 { budget.try_acquire(bytes) } else { budget.acquire(bytes, NOW).ok() };
                    prop_assert_eq!(got.is_some(), fits);
                    held.extend(got);
                } else if !held.is_empty() {
                    held.remove(which % held.len());
                }
                let now: u64 = held.iter().map(Permit::bytes).sum();
                prop_assert_eq!(budget.used(), now);
                let large = held.iter().filter(|p| p.bytes() > 0).count();
                prop_assert!(now <= limit || large == 1);
            }
            held.clear();
            prop_assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn many_threads_together_stay_below_it() {
        let budget = Budget::new(ByteSize(64));
        thread::scope(|scope| {
            for seed in 0..8u64 {
                let budget = budget.clone();
                scope.spawn(move || {
                    for step in 0..200u64 {
                        let bytes = (seed * 31 + step * 7) % 65;
                        let permit = budget.acquire(bytes, SOON).unwrap();
                        assert!(budget.used() <= 64);
                        drop(permit);
                    }
                });
            }
        });
        assert!(budget.peak() <= 64 && budget.used() == 0);
    }
}
