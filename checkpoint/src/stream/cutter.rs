//! Cuts work into steps. Pure: gives steps to whoever asked, reads nothing.

use super::step::{Copy, Intake, Origin, Step, Work};
use crate::error::Result;
use crate::gather::Gather;
use std::ops::Range;

/// Bytes that one step reads, unless a single row is longer: as many as a core's cache keeps until they are scattered.
pub(super) const CHUNK: u64 = 1 << 20;

/// Bytes of rows that every stream takes its columns of before the next ones are touched: as many as a core's nearest
/// cache keeps.
const TILE: u64 = 16 << 10;

/// More copies than this are another step.
const COPIES: usize = 16 << 10;

/// Small works are put together, large ones cut.
pub(super) struct Cutter<'e> {
    pending: Step,
    /// Where the last work of each stream ended.
    ends: Vec<u64>,
    emit: &'e mut dyn FnMut(Step) -> Result<()>,
}

impl<'e> Cutter<'e> {
    pub(super) fn new(emit: &'e mut dyn FnMut(Step) -> Result<()>) -> Self {
        Self { pending: Step::default(), ends: Vec::new(), emit }
    }

    /// Takes one work. Works must come in the order in which each stream is filled.
    pub(super) fn take(&mut self, work: &Work) -> Result<()> {
        let spans = spans(work);
        let total = spans.iter().fold(0u64, |sum, (lo, hi)| sum.saturating_add(hi.saturating_sub(*lo)));
        if total > CHUNK {
            self.flush()?;
            self.gaps(work);
            return self.cut(work, &spans);
        }
        if self.pending.bytes.saturating_add(total) > CHUNK || self.pending.copies.len() > COPIES {
            self.flush()?;
        }
        self.gaps(work);
        for ((at, takers), span) in work.origins.iter().zip(takers(work)).zip(&spans) {
            add(&mut self.pending, *at, &takers, u64::MAX, *span);
        }
        for intake in &work.intakes {
            intake.holes.iter().for_each(|(from, to)| self.pending.zero(intake.stream, *from, *to));
            self.pending.fill(intake.stream, intake.end);
        }
        Ok(())
    }

    /// Notes what lies between this work and each stream's last.
    fn gaps(&mut self, work: &Work) {
        for intake in &work.intakes {
            let stream = intake.stream as usize;
            if self.ends.len() <= stream {
                self.ends.resize(stream + 1, 0);
            }
            if let Some(end) = self.ends.get_mut(stream) {
                self.pending.zero(intake.stream, *end, intake.start);
                *end = intake.end;
            }
        }
    }

    /// Gives what is left.
    pub(super) fn flush(&mut self) -> Result<()> {
        if self.pending.reads.is_empty() && self.pending.filled.is_empty() && self.pending.zeros.is_empty() {
            return Ok(());
        }
        (self.emit)(std::mem::take(&mut self.pending))
    }

    /// Where the last work of each of so many streams ended.
    pub(super) fn ends(&self, streams: usize) -> Vec<u64> {
        let mut ends = self.ends.clone();
        ends.resize(streams, 0);
        ends
    }

    /// Cuts a large work: cluster by cluster, each from its first byte to its last.
    fn cut(&mut self, work: &Work, spans: &[(u64, u64)]) -> Result<()> {
        let (clusters, takers) = (clusters(work), takers(work));
        let frontiers: Vec<Frontier> = work.intakes.iter().map(|i| Frontier::new(i, &clusters)).collect();
        for (number, cluster) in clusters.iter().enumerate() {
            let of_cluster = cluster.clone().filter_map(|origin| {
                let takers = takers.get(origin)?.as_slice();
                Some((*work.origins.get(origin)?, takers, pitch(takers), *spans.get(origin)?))
            });
            let of_cluster: Vec<_> = of_cluster.collect();
            let total: u64 = of_cluster.iter().map(|(.., (lo, hi))| hi.saturating_sub(*lo)).sum();
            let parts = total.div_ceil(CHUNK).max(1);
            for part in 1..=parts {
                // The first one takes along what lies before the work.
                let mut step = std::mem::take(&mut self.pending);
                let mut progress = Vec::with_capacity(cluster.len());
                for &(origin, takers, pitch, (lo, hi)) in &of_cluster {
                    let at = |part: u64| {
                        let whole = u128::from(hi - lo) * u128::from(part) / u128::from(parts);
                        let whole = u64::try_from(whole).unwrap_or(hi - lo);
                        // Whole rows, so that no row is cut in two.
                        if part == parts { hi } else { lo + whole / pitch * pitch }
                    };
                    add(&mut step, origin, takers, tile(pitch), (at(part - 1), at(part)));
                    progress.push(at(part));
                }
                let last = part == parts && number + 1 == clusters.len();
                for intake in work.intakes.iter().filter(|_| last) {
                    intake.holes.iter().for_each(|(from, to)| step.zero(intake.stream, *from, *to));
                }
                for (intake, frontier) in work.intakes.iter().zip(&frontiers) {
                    step.fill(intake.stream, frontier.after(number, cluster.start, &progress, intake.end));
                }
                (self.emit)(step)?;
            }
        }
        Ok(())
    }
}

/// The bytes of each origin that any stream takes, from the first to the last.
fn spans(work: &Work) -> Vec<(u64, u64)> {
    let mut spans = vec![(u64::MAX, 0u64); work.origins.len()];
    for g in work.intakes.iter().flat_map(|i| &i.gathers) {
        if let Some((lo, hi)) = spans.get_mut(g.source as usize) {
            *lo = (*lo).min(g.from);
            *hi = (*hi).max(g.from_end().unwrap_or(u64::MAX));
        }
    }
    spans.iter_mut().filter(|(lo, _)| *lo == u64::MAX).for_each(|span| *span = (0, 0));
    spans
}

/// What the streams take of each origin: every gather with its stream.
fn takers(work: &Work) -> Vec<Vec<(u32, Gather)>> {
    let mut takers = vec![Vec::new(); work.origins.len()];
    for intake in &work.intakes {
        for g in &intake.gathers {
            if let Some(own) = takers.get_mut(g.source as usize) {
                own.push((intake.stream, *g));
            }
        }
    }
    takers
}

/// Adds what the streams take of an origin's bytes in `lo..hi` to a step: one read, from the first byte that any of them
/// takes to the last, and the copies out of it in the order of tiles of `tile` bytes.
fn add(step: &mut Step, at: Origin, takers: &[(u32, Gather)], tile: u64, (lo, hi): (u64, u64)) {
    let (mut first, mut last) = (u64::MAX, 0u64);
    // Only these are asked again for each tile: an origin of many experts has thousands of gathers.
    let mut here = Vec::new();
    for (stream, g) in takers {
        g.within(lo, hi, |part| {
            first = first.min(part.from);
            last = last.max(part.from_end().unwrap_or(u64::MAX));
            here.push((*stream, part));
        });
    }
    if first >= last {
        return;
    }
    let buffer = step.read(at.file, at.offset.saturating_add(first), last - first);
    let mut from = lo;
    while from < hi {
        let to = from.saturating_add(tile).min(hi);
        for (stream, part) in &here {
            part.within(from, to, |cut| {
                let gather = Gather { from: cut.from - first + buffer, ..cut };
                step.copies.push(Copy { stream: *stream, gather });
            });
        }
        from = to;
    }
}

/// Bytes of a tile of whole rows of `pitch` bytes; without rows all is one.
fn tile(pitch: u64) -> u64 {
    if pitch > 1 { (TILE / pitch).max(1).saturating_mul(pitch) } else { u64::MAX }
}

/// What a large origin's cuts should be a multiple of, so that rows stay whole.
fn pitch(takers: &[(u32, Gather)]) -> u64 {
    let of_rows = takers.iter().filter(|(_, g)| g.count > 1 && g.from_step <= CHUNK);
    of_rows.map(|(_, g)| g.from_step).max().unwrap_or(1).max(1)
}

/// Origins that interleave in some stream are one cluster, and every other is its own.
fn clusters(work: &Work) -> Vec<Range<usize>> {
    // What each origin fills of each stream, from the first byte to the last.
    let mut filled = vec![vec![None::<(u64, u64)>; work.intakes.len()]; work.origins.len()];
    for (number, intake) in work.intakes.iter().enumerate() {
        for g in &intake.gathers {
            let Some(slot) = filled.get_mut(g.source as usize).and_then(|f| f.get_mut(number)) else {
                continue;
            };
            let (lo, hi) = slot.unwrap_or((u64::MAX, 0));
            *slot = Some((lo.min(g.at), hi.max(g.at_end().unwrap_or(u64::MAX))));
        }
    }
    let mut clusters: Vec<Range<usize>> = Vec::new();
    let mut current: Vec<Option<(u64, u64)>> = vec![None; work.intakes.len()];
    for (origin, spans) in filled.iter().enumerate() {
        let meets = spans.iter().zip(&current).any(|(a, b)| match (a, b) {
            (Some((lo, hi)), Some((from, to))) => lo < to && from < hi,
            _ => false,
        });
        match clusters.last_mut() {
            Some(last) if meets => {
                last.end = origin + 1;
                for (all, own) in current.iter_mut().zip(spans) {
                    *all = match (*all, *own) {
                        (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
                        (a, b) => a.or(b),
                    };
                }
            }
            _ => {
                clusters.push(origin..origin + 1);
                current.clone_from(spans);
            }
        }
    }
    clusters
}

/// Where a stream's first unfilled byte is, as the clusters are taken one after the other.
struct Frontier {
    by_cluster: Vec<Vec<Gather>>,
    /// The lowest place that this cluster or a later one fills.
    lowest_from: Vec<u64>,
}

impl Frontier {
    fn new(intake: &Intake, clusters: &[Range<usize>]) -> Self {
        let mut by_cluster = vec![Vec::new(); clusters.len()];
        for g in &intake.gathers {
            let cluster = clusters.partition_point(|c| c.end <= g.source as usize);
            if let Some(own) = by_cluster.get_mut(cluster) {
                own.push(*g);
            }
        }
        let mut lowest = u64::MAX;
        let mut lowest_from: Vec<u64> = by_cluster
            .iter()
            .rev()
            .map(|own| {
                lowest = own.iter().map(|g| g.at).fold(lowest, u64::min);
                lowest
            })
            .collect();
        lowest_from.reverse();
        Self { by_cluster, lowest_from }
    }

    /// With the origins of cluster `number` (the first of them is `first`) taken up to `progress`.
    fn after(&self, number: usize, first: usize, progress: &[u64], end: u64) -> u64 {
        let later = self.lowest_from.get(number + 1).copied().unwrap_or(u64::MAX);
        let own = self.by_cluster.get(number).into_iter().flatten();
        let left = own.filter_map(|g| g.frontier(*progress.get((g.source as usize).checked_sub(first)?)?));
        left.fold(later, u64::min).min(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather::tests::bytes_of;
    use proptest::prelude::*;

    fn steps(works: &[Work]) -> Vec<Step> {
        let mut found = Vec::new();
        let mut emit = |step| {
            found.push(step);
            Ok(())
        };
        let mut cutter = Cutter::new(&mut emit);
        works.iter().for_each(|work| cutter.take(work).unwrap());
        cutter.flush().unwrap();
        found
    }

    /// Every byte a step moves, as (file, file offset, stream, stream offset).
    fn moved(steps: &[Step]) -> Vec<(u32, u64, u32, u64)> {
        let mut all = Vec::new();
        for step in steps {
            for copy in &step.copies {
                for (_, from, at) in bytes_of(&[copy.gather]) {
                    let read = step.reads.iter().find(|r| from >= r.at && from < r.at + r.len).unwrap();
                    all.push((read.file, read.offset + from - read.at, copy.stream, at));
                }
            }
        }
        all.sort_unstable();
        all
    }

    fn large(rows: u64) -> Work {
        // Two origins of `rows` rows of 3 MiB, whose halves meet row by row in stream 0 and follow in stream 1.
        const W: u64 = 3 << 20;
        let half = |source: u32, at: u64| Gather {
            source,
            from: 0,
            at,
            run: W / 2,
            count: rows,
            from_step: W,
            at_step: W,
        };
        let rest = |source: u32, at: u64| Gather { from: W / 2, at_step: W / 2, ..half(source, at) };
        let end = rows * W;
        Work {
            origins: vec![Origin { file: 0, offset: 5 }, Origin { file: 1, offset: 7 }],
            intakes: vec![
                Intake { stream: 0, start: 0, end, holes: vec![], gathers: vec![half(0, 0), half(1, W / 2)] },
                Intake {
                    stream: 1,
                    start: 0,
                    end,
                    holes: vec![],
                    gathers: vec![rest(0, 0), rest(1, end / 2)],
                },
            ],
        }
    }

    #[test]
    fn large_works_are_cut_between_rows_and_streams_fill_as_they_go() {
        let found = steps(&[large(5)]);
        assert!(found.len() >= 8 && found.iter().all(|s| s.bytes <= (2 * 3) << 20), "{}", found.len());
        let mut last = 0;
        for step in &found {
            let filled = step.filled.iter().find(|(stream, _)| *stream == 0).unwrap().1;
            assert!(filled >= last);
            last = filled;
        }
        assert_eq!(last, (5 * 3) << 20);
        // Nothing below what is filled is written later.
        for (i, step) in found.iter().enumerate() {
            for (stream, to) in &step.filled {
                let later = found.iter().skip(i + 1).flat_map(|s| &s.copies).filter(|c| c.stream == *stream);
                later.for_each(|c| assert!(c.gather.at >= *to, "{c:?} after {to}"));
            }
        }
    }

    #[test]
    fn half_of_the_columns_are_one_read_a_step() {
        // Rows of 8 KiB of which the only stream takes the second half, of two origins whose halves meet.
        const W: u64 = 8 << 10;
        let half = |source: u32| Gather {
            source,
            from: W / 2,
            at: u64::from(source) * W / 2,
            run: W / 2,
            count: 1000,
            from_step: W,
            at_step: W,
        };
        let work = |sources: Range<u32>| Work {
            origins: sources.clone().map(|file| Origin { file, offset: 5 }).collect(),
            intakes: vec![Intake {
                stream: 0,
                start: 0,
                end: 1000 * W,
                holes: vec![],
                gathers: sources.map(half).collect(),
            }],
        };
        for origins in 1..=2u32 {
            let found = steps(&[work(0..origins)]);
            let of_copies = |s: &Step| s.copies.iter().map(|c| c.gather.bytes()).sum::<u64>();
            assert_eq!(found.iter().map(of_copies).sum::<u64>(), u64::from(origins) * 1000 * W / 2);
            assert!(found.len() >= 8);
            for step in &found {
                assert_eq!(step.reads.len(), origins as usize, "{:?}", step.reads);
                assert!(step.bytes <= CHUNK, "{}", step.bytes);
            }
        }
    }

    #[test]
    fn neighbours_are_one_read() {
        let work = |offset: u64, at: u64| Work {
            origins: vec![Origin { file: 3, offset }],
            intakes: vec![Intake {
                stream: 0,
                start: at,
                holes: vec![],
                end: at + 10,
                gathers: vec![Gather::contiguous(0, 0, at, 10)],
            }],
        };
        let found = steps(&[work(100, 0), work(110, 512), work(130, 1024)]);
        let reads: Vec<_> = found[0].reads.iter().map(|r| (r.offset, r.len)).collect();
        assert_eq!((found.len(), reads), (1, vec![(100, 20), (130, 10)]));
        assert_eq!(found[0].filled, [(0, 1034)]);
        assert_eq!(found[0].zeros, [(0, 10, 512), (0, 522, 1024)], "what lies between them becomes zero");
    }

    proptest! {
        #[test]
        fn every_byte_is_moved_once_and_from_where_it_is(
            given in prop::collection::vec((crate::gather::tests::any_gather(), 0u32..3, 0u32..2), 1..8),
        ) {
            // The streams' places are made apart: what is under test is the cutting.
            let mut work = Work { origins: (0..3).map(|i| Origin { file: i, offset: 1000 * u64::from(i) }).collect(), intakes: vec![] };
            let mut wanted = Vec::new();
            for stream in 0..2u32 {
                let mut at = 0;
                let mut gathers = Vec::new();
                for (g, source, _) in given.iter().filter(|(_, _, s)| *s == stream) {
                    let g = Gather { source: *source, at, ..*g };
                    at = g.at_end().unwrap();
                    wanted.extend(bytes_of(&[g]).into_iter().map(|(s, from, at)| (s, 1000 * u64::from(s) + from, stream, at)));
                    gathers.push(g);
                }
                work.intakes.push(Intake { stream, start: 0, end: at, holes: vec![], gathers });
            }
            wanted.sort_unstable();
            prop_assert_eq!(moved(&steps(&[work])), wanted);
        }
    }
}
