//! When a pull is likely to end.

use std::time::{Duration, Instant};

/// How fast a hop's pulls have been, so that nobody asks for the end of one long before it.
///
/// It expects no more than what was seen twice: a small pull says nothing of a large one (what it takes is not its bytes),
/// and one that was held up says nothing of the next. What was not seen yet it expects at a rate that no link passes.
#[derive(Debug)]
pub(crate) struct Pace {
    last_end: Option<Instant>,
    /// Bytes of the last two pulls, and what they took.
    last: [(u64, Duration); 2],
}

impl Pace {
    /// `fastest`: bytes per second of the fastest link of the kind.
    pub(crate) fn new(fastest: u64) -> Self {
        Self { last_end: None, last: [(fastest, Duration::from_secs(1)); 2] }
    }

    /// When a pull's work can begin: one after the other.
    fn begins(&self, started: Instant) -> Instant {
        self.last_end.map_or(started, |end| end.max(started))
    }

    /// The least that a pull of `len` bytes is likely to take.
    pub(crate) fn takes(&self, len: u64) -> Duration {
        // Rather too early than too late: the last pull has no copy behind it to wait for and ends sooner.
        let likely =
            |(seen, took): (u64, Duration)| took.mul_f64(0.5 * (len as f64 / seen.max(1) as f64).min(1.0));
        self.last.map(likely).into_iter().min().unwrap_or_default()
    }

    /// How long nothing will happen, from `now` on, for a pull of `len` bytes that started at `started`; `spin` less, so
    /// that whoever sleeps until then is awake in time.
    pub(crate) fn idle(&self, started: Instant, len: u64, spin: Duration, now: Instant) -> Duration {
        (self.begins(started) + self.takes(len)).saturating_duration_since(now + spin)
    }

    pub(crate) fn ended(&mut self, started: Instant, len: u64, now: Instant) {
        let took = now.saturating_duration_since(self.begins(started));
        self.last = [(len, took), self.last[0]];
        self.last_end = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_sleeps_until_shortly_before_the_end_it_expects() {
        let mut pace = Pace::new(1_000_000_000_000);
        let zero = Instant::now();
        let at = |us| zero + Duration::from_micros(us);
        let spin = Duration::from_micros(100);
        assert_eq!(pace.idle(at(0), 1000, spin, at(0)), Duration::ZERO, "1 ns at the fastest");
        pace.ended(at(0), 1000, at(1000));
        assert_eq!(pace.idle(at(500), 1000, spin, at(1000)), Duration::ZERO, "one may have been held up");
        pace.ended(at(500), 1000, at(2000));
        assert_eq!(pace.idle(at(1500), 1000, spin, at(2000)), Duration::from_micros(400));
        assert_eq!(pace.idle(at(1500), 500, spin, at(2000)), Duration::from_micros(150));
        assert_eq!(pace.idle(at(1500), 1000, spin, at(2900)), Duration::ZERO);
        assert_eq!(pace.idle(at(3000), 1000, spin, at(3000)), Duration::from_micros(400));
    }

    #[test]
    fn the_first_pull_is_expected_at_the_fastest_rate() {
        let pace = Pace::new(1_000_000_000);
        assert_eq!(pace.takes(1_000_000), Duration::from_micros(500));
    }

    #[test]
    fn a_pull_of_five_bytes_says_nothing_of_one_of_a_gigabyte() {
        let mut pace = Pace::new(1_000_000_000_000);
        let zero = Instant::now();
        let at = |us| zero + Duration::from_micros(us);
        pace.ended(at(0), 5, at(25));
        pace.ended(at(0), 5, at(50));
        let idle = pace.idle(at(50), 1 << 30, Duration::from_micros(100), at(50));
        assert!(idle < Duration::from_micros(25), "{idle:?}");
    }
}
