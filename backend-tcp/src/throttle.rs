//! How fast an exporter sends, to all its readers together.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How far senders may run ahead of the rate: as much as a rate allows in this time.
const BURST: Duration = Duration::from_millis(20);

/// Hands out time slots: each slice of bytes may leave once those before it have had their time.
#[derive(Debug)]
pub(crate) struct Throttle {
    /// Bytes a second.
    rate: u64,
    /// When everything handed out so far will have left.
    busy_until: Mutex<Option<Instant>>,
}

impl Throttle {
    pub(crate) fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), busy_until: Mutex::new(None) }
    }

    /// The most bytes to ask for at once, so that a slow rate is a steady one.
    pub(crate) fn slice(&self) -> u64 {
        (self.rate / 50).clamp(4 << 10, 1 << 20)
    }

    /// How long to wait, from `now` on, before sending `bytes`.
    pub(crate) fn wait(&self, bytes: u64, now: Instant) -> Duration {
        let takes = Duration::try_from_secs_f64(bytes as f64 / self.rate as f64).unwrap_or(Duration::MAX);
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = busy_until.unwrap_or(now).max(now.checked_sub(BURST).unwrap_or(now));
        *busy_until = begins.checked_add(takes);
        begins.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_more_leaves_than_the_rate_and_one_burst(rate in 1000u64..1_000_000, asks in prop::collection::vec((1u64..5000, 0u64..30), 1..60)) {
            let throttle = Throttle::new(rate);
            let zero = Instant::now();
            let (mut now, mut sent) = (zero, 0);
            for (bytes, idle_ms) in asks {
                now += Duration::from_millis(idle_ms);
                now += throttle.wait(bytes, now);
                // By `now` everything before these bytes has left at the rate.
                let allowed = (now - zero + BURST).as_secs_f64() * rate as f64;
                prop_assert!(sent as f64 <= allowed + 1.0, "{sent} of {allowed}");
                sent += bytes;
            }
        }
    }

    #[test]
    fn a_busy_sender_is_spaced_and_an_idle_one_is_not() {
        let throttle = Throttle::new(1000);
        let now = Instant::now();
        assert_eq!(throttle.wait(100, now), Duration::ZERO);
        assert_eq!(throttle.wait(100, now), Duration::from_millis(100));
        let later = now + Duration::from_secs(10);
        assert_eq!(throttle.wait(100, later), Duration::ZERO);
        // Of the time that nobody used, no more than the burst is given.
        assert_eq!(throttle.wait(100, later), Duration::from_millis(100) - BURST);
    }
}
