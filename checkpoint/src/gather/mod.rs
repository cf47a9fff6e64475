//! Byte gathers: which bytes of a source go where. Rows or strided columns of a tensor, in closed form: a gather
//! of a thousand rows is one value, and cutting, composing and ordering gathers never walks over rows one by one
//! where a formula serves.
//!
//! Pure; the bytes themselves are moved by [`crate::stream`].

mod compose;

pub(crate) use compose::compose;

/// `count` runs of `run` bytes. Run `i` comes from `from + i * from_step` of the source and goes to
/// `at + i * at_step`. Runs overlap neither where they come from nor where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gather {
    /// The number of the source.
    pub source: u32,
    /// The first byte of the first run in the source.
    pub from: u64,
    /// Where it goes.
    pub at: u64,
    /// Bytes of one run.
    pub run: u64,
    /// How many runs.
    pub count: u64,
    /// From one run's first byte to the next one's, in the source.
    pub from_step: u64,
    /// From one run's first byte to the next one's, where they go.
    pub at_step: u64,
}

impl Gather {
    /// One run.
    pub fn contiguous(source: u32, from: u64, at: u64, len: u64) -> Self {
        Self { source, from, at, run: len, count: 1, from_step: len, at_step: len }
    }

    /// The same bytes in the fewest runs: runs that touch on both sides are one.
    #[must_use]
    pub fn normal(self) -> Self {
        let joined = self.count <= 1 || (self.run == self.from_step && self.run == self.at_step);
        if joined { Self::contiguous(self.source, self.from, self.at, self.bytes()) } else { self }
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.run.saturating_mul(self.count)
    }

    /// One past the last byte taken from the source; `None` past 64 bits.
    pub fn from_end(&self) -> Option<u64> {
        end(self.from, self.from_step, self.run, self.count)
    }

    /// One past the last byte written; `None` past 64 bits.
    pub fn at_end(&self) -> Option<u64> {
        end(self.at, self.at_step, self.run, self.count)
    }

    /// Whether its runs are apart on both sides and end within 64 bits: what every gather from a file must pass.
    pub fn is_sound(&self) -> bool {
        let apart = self.count <= 1 || (self.from_step >= self.run && self.at_step >= self.run);
        apart
            && self.run.checked_mul(self.count).is_some()
            && self.from_end().is_some()
            && self.at_end().is_some()
    }

    /// The same with both sides moved.
    #[must_use]
    pub(crate) fn moved(self, source: u32, from: u64, at: u64) -> Self {
        Self { source, from: self.from.saturating_add(from), at: self.at.saturating_add(at), ..self }
    }

    /// The runs from `first` on, `count` of them.
    fn rows(self, first: u64, count: u64) -> Self {
        Self {
            from: self.from.saturating_add(first.saturating_mul(self.from_step)),
            at: self.at.saturating_add(first.saturating_mul(self.at_step)),
            count,
            ..self
        }
    }

    /// The part of one run from byte `skip` on, `len` of it; of every run.
    fn columns(self, skip: u64, len: u64) -> Self {
        Self { from: self.from.saturating_add(skip), at: self.at.saturating_add(skip), run: len, ..self }
    }

    /// The parts whose source bytes are in `lo..hi`: at most a piece of a run, whole runs, and a piece of a run.
    pub(crate) fn within(self, lo: u64, hi: u64, mut take: impl FnMut(Self)) {
        if self.bytes() == 0 || lo >= hi {
            return;
        }
        let step = self.from_step.max(1);
        // The first run that ends past `lo`, and the first that begins at or past `hi`.
        let first = lo.saturating_add(1).saturating_sub(self.from.saturating_add(self.run)).div_ceil(step);
        let last = hi.saturating_sub(self.from).div_ceil(step).min(self.count);
        if first >= last {
            return;
        }
        let cut = |row: u64| {
            let one = self.rows(row, 1);
            let skip = lo.saturating_sub(one.from);
            let end = hi.saturating_sub(one.from).min(one.run);
            (skip, end.saturating_sub(skip), one)
        };
        let mut give = |(skip, len, one): (u64, u64, Self)| {
            if len > 0 {
                take(one.columns(skip, len).normal());
            }
        };
        let whole = |row: u64| {
            let (skip, len, _) = cut(row);
            skip == 0 && len == self.run
        };
        let from = if whole(first) { first } else { first.saturating_add(1) };
        let to = if last > from && !whole(last - 1) { last - 1 } else { last };
        if from > first {
            give(cut(first));
        }
        if to > from {
            give((0, self.run, self.rows(from, to - from)));
        }
        if to < last && to >= from {
            give(cut(last - 1));
        }
    }

    /// The parts that go to bytes `lo..hi`: at most a piece of a run, whole runs, and a piece of a run.
    pub fn landing_within(self, lo: u64, hi: u64, mut take: impl FnMut(Self)) {
        let turned =
            |g: Self| Self { from: g.at, at: g.from, from_step: g.at_step, at_step: g.from_step, ..g };
        turned(self).within(lo, hi, |part| take(turned(part)));
    }

    /// The lowest byte that source bytes from `y` on go to, provided that later source bytes go to later places;
    /// `None` when all of it lies before `y`.
    pub(crate) fn frontier(&self, y: u64) -> Option<u64> {
        if self.bytes() == 0 {
            return None;
        }
        let first = y
            .saturating_add(1)
            .saturating_sub(self.from.saturating_add(self.run))
            .div_ceil(self.from_step.max(1));
        if first >= self.count {
            return None;
        }
        let row = self.rows(first, 1);
        Some(row.at.saturating_add(y.saturating_sub(row.from)))
    }
}

fn end(start: u64, step: u64, run: u64, count: u64) -> Option<u64> {
    match count.checked_sub(1) {
        None => Some(start),
        Some(steps) => step.checked_mul(steps)?.checked_add(run)?.checked_add(start),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every byte moved, as (from, at).
    pub(crate) fn bytes_of(gathers: &[Gather]) -> Vec<(u32, u64, u64)> {
        let mut all = Vec::new();
        for g in gathers {
            for i in 0..g.count {
                all.extend(
                    (0..g.run).map(|b| (g.source, g.from + i * g.from_step + b, g.at + i * g.at_step + b)),
                );
            }
        }
        all.sort_unstable();
        all
    }

    pub(crate) fn any_gather() -> impl Strategy<Value = Gather> {
        (0u64..40, 0u64..40, 1u64..6, 1u64..6, 0u64..6, 0u64..6).prop_map(|(from, at, run, count, f, a)| {
            Gather { source: 0, from, at, run, count, from_step: run + f, at_step: run + a }
        })
    }

    proptest! {
        #[test]
        fn a_range_of_the_source_takes_exactly_its_bytes(g in any_gather(), lo in 0u64..100, len in 0u64..60) {
            let mut parts = Vec::new();
            g.within(lo, lo + len, |part| parts.push(part));
            let wanted: Vec<_> =
                bytes_of(&[g]).into_iter().filter(|&(_, from, _)| from >= lo && from < lo + len).collect();
            prop_assert_eq!(bytes_of(&parts), wanted);
            prop_assert!(parts.len() <= 3);
        }

        #[test]
        fn a_range_of_the_destination_takes_exactly_its_bytes(g in any_gather(), lo in 0u64..100, len in 0u64..60) {
            let mut parts = Vec::new();
            g.landing_within(lo, lo + len, |part| parts.push(part));
            let wanted: Vec<_> =
                bytes_of(&[g]).into_iter().filter(|&(_, _, at)| at >= lo && at < lo + len).collect();
            prop_assert_eq!(bytes_of(&parts), wanted);
        }

        #[test]
        fn the_frontier_is_the_lowest_place_still_to_be_written(g in any_gather(), y in 0u64..100) {
            let left = bytes_of(&[g]).into_iter().filter(|&(_, from, _)| from >= y).map(|(_, _, at)| at).min();
            prop_assert_eq!(g.frontier(y), left);
        }

        #[test]
        fn the_normal_form_moves_the_same_bytes(g in any_gather()) {
            prop_assert_eq!(bytes_of(&[g.normal()]), bytes_of(&[g]));
            prop_assert!(g.is_sound());
        }
    }

    #[test]
    fn what_would_overlap_or_overflow_is_not_sound() {
        let g = Gather { source: 0, from: 0, at: 0, run: 4, count: 2, from_step: 3, at_step: 4 };
        assert!(!g.is_sound());
        assert!(!Gather { from_step: u64::MAX, at_step: 4, count: 3, ..g }.is_sound());
        assert!(Gather { from_step: 4, ..g }.is_sound());
        assert!(!Gather::contiguous(0, u64::MAX, 0, 1).is_sound());
    }
}
