//! A source that is too slow: over a window of time it gave fewer bytes than a floor allows.
//!
//! Only time counts in which it was asked for something, and what is still in flight is taken for given: so nobody is left who
//! keeps the floor, whatever a chunk's size. Each source is left for this once: one that is given again is the best there is.
//! Pure: told what happens and when, it reads no clock.

use flashboot_core::{ByteSize, Error, Kind, PeerId};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// The most sources that one clone leaves for their pace: where all are slow, the way to this clone is.
const LEFT: usize = 4;

/// How fast a source has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Floor {
    /// Bytes a second.
    pub bytes_per_s: u64,
    /// Over how long.
    pub window: Duration,
}

/// Which time counts of a source that is held to a floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paced {
    /// While something is asked of it: bytes, or a word that it has more of them.
    Asked,
    /// While bytes are asked of it; that it has none yet may be the fault of others.
    Pulling,
    /// None: any pace will do.
    Never,
}

/// One source since the window began.
#[derive(Debug, Default)]
struct Pace {
    since: Duration,
    landed: u64,
    in_flight: u64,
    watched: bool,
    /// Since when nothing was asked of it.
    idle: Option<Duration>,
}

/// The pace of every source that is read from.
#[derive(Debug)]
pub(crate) struct Paces {
    floor: Floor,
    paces: BTreeMap<PeerId, Pace>,
    left: BTreeSet<PeerId>,
    endured: BTreeSet<PeerId>,
}

impl Paces {
    pub(crate) fn new(floor: Floor) -> Self {
        let floor = Floor { bytes_per_s: floor.bytes_per_s.max(1), ..floor };
        Self { floor, paces: BTreeMap::new(), left: BTreeSet::new(), endured: BTreeSet::new() }
    }

    fn asked(&mut self, now: Duration, source: PeerId) -> &mut Pace {
        let pace = self.paces.entry(source).or_insert_with(|| Pace { since: now, ..Pace::default() });
        if let Some(idle) = pace.idle.take() {
            pace.since = pace.since.saturating_add(now.saturating_sub(idle));
        }
        pace
    }

    /// A pull of `bytes` begins.
    pub(crate) fn pulling(&mut self, now: Duration, source: PeerId, bytes: u64) {
        let pace = self.asked(now, source);
        pace.in_flight = pace.in_flight.saturating_add(bytes);
    }

    /// Its word is waited for.
    pub(crate) fn watching(&mut self, now: Duration, source: PeerId) {
        self.asked(now, source).watched = true;
    }

    /// No word of it is waited for any more.
    pub(crate) fn unwatched(&mut self, now: Duration, source: PeerId) {
        if let Some(pace) = self.paces.get_mut(&source) {
            pace.watched = false;
            pace.rest(now);
        }
    }

    /// A pull of `bytes` has ended, with all of them right or not.
    pub(crate) fn ended(&mut self, now: Duration, source: PeerId, bytes: u64, right: bool) {
        if let Some(pace) = self.paces.get_mut(&source) {
            pace.in_flight = pace.in_flight.saturating_sub(bytes);
            if right {
                pace.landed = pace.landed.saturating_add(bytes);
            }
            pace.rest(now);
        }
    }

    /// It is let go of.
    pub(crate) fn gone(&mut self, source: PeerId) {
        self.paces.remove(&source);
    }

    /// What was to be read from a lost source is to be read from `source`.
    pub(crate) fn given(&mut self, source: PeerId) {
        if self.left.contains(&source) {
            self.endured.insert(source);
        }
    }

    /// When to look next.
    pub(crate) fn due(&self) -> Option<Duration> {
        if self.left.len() >= LEFT {
            return None;
        }
        let asked = self.paces.iter().filter(|(id, pace)| pace.idle.is_none() && !self.endured.contains(id));
        asked.map(|(_, pace)| pace.due(self.floor)).min()
    }

    /// Who is too slow, found once, with how slow.
    pub(crate) fn slow(&mut self, now: Duration) -> Vec<(PeerId, Error)> {
        let mut slow = Vec::new();
        for (source, pace) in &mut self.paces {
            if pace.idle.is_some() || self.endured.contains(source) || now < pace.due(self.floor) {
                continue;
            }
            let elapsed = now.saturating_sub(pace.since);
            let (had, needed) = (pace.landed.saturating_add(pace.in_flight), self.floor.bytes(elapsed));
            if had >= needed || self.left.len() >= LEFT {
                (pace.since, pace.landed) = (now, 0);
                continue;
            }
            self.left.insert(*source);
            let detail = format!(
                "{} came from it in {elapsed:.1?}, and at most {} are under way: below the floor of {} a second",
                ByteSize(pace.landed),
                ByteSize(pace.in_flight),
                ByteSize(self.floor.bytes_per_s)
            );
            slow.push((*source, Error::new(Kind::Stalled, "pull", detail).with_peer(source)));
        }
        self.paces.retain(|source, _| slow.iter().all(|(left, _)| left != source));
        slow
    }
}

impl Floor {
    fn bytes(self, over: Duration) -> u64 {
        let bytes = u128::from(self.bytes_per_s).saturating_mul(over.as_millis()) / 1000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

impl Pace {
    fn rest(&mut self, now: Duration) {
        if self.in_flight == 0 && !self.watched {
            self.idle.get_or_insert(now);
        }
    }

    /// When the window is over; not before what is in flight would have come at the floor's own pace.
    fn due(&self, floor: Floor) -> Duration {
        let millis = u128::from(self.in_flight).saturating_mul(1000) / u128::from(floor.bytes_per_s);
        let flight = Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX).saturating_add(1));
        self.since.saturating_add(floor.window.max(flight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: PeerId = PeerId(1);
    const B: PeerId = PeerId(2);
    const MB: u64 = 1_000_000;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn paces() -> Paces {
        Paces::new(Floor { bytes_per_s: 10 * MB, window: at(2000) })
    }

    #[test]
    fn a_source_below_the_floor_is_found_when_the_window_is_over_and_not_before() {
        let mut paces = paces();
        assert_eq!(paces.due(), None, "nobody is asked");
        paces.pulling(at(0), A, 4 * MB);
        assert_eq!(paces.due(), Some(at(2000)));
        paces.ended(at(1900), A, 4 * MB, true);
        paces.pulling(at(1900), A, 4 * MB);
        assert_eq!(paces.slow(at(1999)), []);
        let slow = paces.slow(at(2000));
        assert_eq!((slow[0].0, slow[0].1.kind()), (A, Kind::Stalled), "8 of 20 MB");
        assert_eq!(paces.slow(at(2000)), [], "once");
        // Given again, it is the best there is.
        paces.given(A);
        paces.pulling(at(2100), A, MB);
        assert_eq!((paces.due(), paces.slow(at(9000))), (None, vec![]));
    }

    #[test]
    fn a_chunk_larger_than_the_window_takes_its_time_at_the_floor() {
        let mut paces = paces();
        paces.pulling(at(0), A, 50 * MB);
        assert!(paces.due() > Some(at(5000)));
        assert_eq!(paces.slow(at(4999)), []);
        assert_eq!(paces.slow(at(5002)).len(), 1);
    }

    #[test]
    fn time_in_which_nothing_was_asked_does_not_count_and_waiting_for_a_word_does() {
        let mut paces = paces();
        paces.pulling(at(0), A, MB);
        paces.ended(at(100), A, MB, true);
        assert_eq!(paces.due(), None, "idle");
        paces.watching(at(60_000), A);
        assert_eq!(paces.due(), Some(at(61_900)));
        paces.unwatched(at(61_000), A);
        paces.watching(at(61_000), A);
        assert_eq!(paces.slow(at(61_900)).len(), 1, "1 of 20 MB in two seconds of being asked");
    }

    #[test]
    fn where_all_are_slow_it_stays() {
        let mut paces = paces();
        for source in 0..4 {
            paces.pulling(at(0), PeerId(source), MB);
        }
        assert_eq!(paces.slow(at(3000)).len(), 4);
        paces.pulling(at(3000), PeerId(9), MB);
        assert_eq!((paces.due(), paces.slow(at(9000))), (None, vec![]));
    }

    proptest! {
        /// Chunks of any size, one or two at once, at any pace not below the floor.
        #[test]
        fn nobody_who_keeps_the_floor_is_left(
            chunk in 1u64..100 * MB,
            depth in 1usize..3,
            pace in 10 * MB..100 * MB,
            chunks in 1usize..200,
        ) {
            let mut paces = paces();
            for _ in 0..depth {
                paces.pulling(at(0), B, chunk);
            }
            for n in 1..=chunks as u64 {
                // Whole milliseconds, rounded down: not slower than the pace.
                let now = at(u64::try_from(u128::from(n * chunk) * 1000 / u128::from(pace)).unwrap());
                if let Some(due) = paces.due().filter(|due| *due < now) {
                    prop_assert_eq!(paces.slow(due), vec![]);
                }
                paces.ended(now, B, chunk, true);
                paces.pulling(now, B, chunk);
                prop_assert_eq!(paces.slow(now), vec![]);
            }
        }
    }
}
