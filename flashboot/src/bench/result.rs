//! What one rank measured once, and what many such figures say together. Pure.

use super::{ideal, plan::Stage};
use flashboot_core::{TransportName, schedule::Rank};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};

/// A copy and what followed it, on the host's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// The copy began.
    pub begin: Duration,
    /// The copy ended.
    pub copied: Duration,
    /// The hash ended, where there was one.
    pub end: Duration,
}

/// What a GPU allows, by its events: everything queued ahead, no host in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLimits {
    /// One copy of everything.
    pub copy: Duration,
    /// The same in chunks.
    pub chunks: Duration,
    /// The hash of everything, alone.
    pub hash: Duration,
    /// Copies in chunks, each hashed while the next is copied.
    pub verified: Duration,
}

impl GpuLimits {
    /// The soonest that every byte can have been copied and hashed: one after the other, or overlapped.
    pub fn bound(self) -> Duration {
        self.verified.min(self.copy + self.hash)
    }
}

/// Before the release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SetUp {
    /// Making the arena; zero where one was at hand.
    pub arena: Duration,
    /// Making it readable.
    pub export: Duration,
    /// Importing and mapping the sources.
    pub map: Duration,
    /// Of it, inside the driver's own calls.
    pub driver: Duration,
    /// What the GPU allows, where it was asked.
    pub limits: Option<GpuLimits>,
    /// One copy of what this rank reads while every other rank copies too, each over its own link; where it was asked.
    pub together: Option<Duration>,
}

/// After it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// The release, on the host's monotonic clock.
    pub release: Duration,
    /// From the release to verified and published.
    pub ready: Duration,
    /// First pull to last byte.
    pub transfer: Duration,
    /// By what; `None` of a seed.
    pub transport: Option<TransportName>,
    /// Every copy, by the GPU's events; empty in host memory.
    pub copies: Vec<Copied>,
}

/// One repeat: every rank's account.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Repeat {
    /// By rank.
    pub set_up: Vec<SetUp>,
    /// By rank, without the seed of a broadcast.
    pub done: BTreeMap<Rank, Done>,
}

/// One stage and its repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// What was measured.
    pub stage: Stage,
    /// Each time.
    pub repeats: Vec<Repeat>,
}

/// The medians of one clone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CloneFigures {
    /// Its rank.
    pub index: Rank,
    /// Making its arena (the first time).
    pub arena_ms: f64,
    /// Making it readable.
    pub export_ms: f64,
    /// Importing and mapping its sources.
    pub map_ms: f64,
    /// Of it, inside the driver's calls.
    pub driver_ms: f64,
    /// First to last byte, by the GPU's events; `None` in host memory.
    pub copy_ms: Option<f64>,
    /// First byte to last hash, by the GPU's events.
    pub verified_ms: Option<f64>,
    /// First to last byte, as its process saw it.
    pub transfer_ms: f64,
    /// Release → the GPU begins to copy: the host's part before.
    pub lead_ms: Option<f64>,
    /// The GPU is done → published: the host's part after.
    pub trail_ms: Option<f64>,
    /// Release → verified and published.
    pub ready_ms: f64,
    /// Bytes ÷ ready.
    pub bytes_per_s: f64,
    /// Every copy of the last repeat, in milliseconds since the release: its begin, its last byte, the end of its hash.
    pub timeline_ms: Vec<[f64; 3]>,
}

/// The medians of one stage. `None`: was not asked, or there is no GPU to ask.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// Its topology.
    pub topology: &'static str,
    /// Payload bytes.
    pub bytes: u64,
    /// Bytes of one copy.
    pub chunk_bytes: u64,
    /// Whether every block was hashed and compared on arrival. The bytes of unverified runs were compared afterwards.
    pub verify: bool,
    /// How often it was measured.
    pub repeats: usize,
    /// By what.
    pub transport: Option<TransportName>,
    /// Making the seed's arena.
    pub seed_arena_ms: f64,
    /// Making it readable.
    pub seed_export_ms: f64,
    /// Release → first clone ready.
    pub first_ms: f64,
    /// Release → last clone ready.
    pub last_ms: f64,
    /// Set-up (export, import, map) and the time to the last clone together.
    pub total_ms: f64,
    /// One copy of everything by rank 1's GPU, alone.
    pub raw_ms: Option<f64>,
    /// One copy of what a rank reads while all the others copy too, the slowest rank's.
    pub raw_together_ms: Option<f64>,
    /// The same in chunks.
    pub raw_chunks_ms: Option<f64>,
    /// The hash of everything, alone.
    pub hash_ms: Option<f64>,
    /// The soonest that everything can have been copied and hashed.
    pub bound_ms: Option<f64>,
    /// The soonest that the last clone can be done by its schedule, chunk by chunk, at each rank's own pace beside the others
    /// while all read, and as its link allows while fewer do; without the hash.
    pub ideal_ms: Option<f64>,
    /// Share of the time in which every hop over a link is at work, its first copy begun and its last not ended, without
    /// a copy of ours under way on it; the worst link's. `None`: there is no such time.
    pub idle: Option<f64>,
    /// The same, counting everything from a copy's begin to the end of its hash as work, what the hash waits for included:
    /// `idle` less this is time in which copies waited for hashes.
    pub idle_gpu: Option<f64>,
    /// The same as `idle` of all the time from the first copy over a link to the last, hops that have not begun or are done
    /// included.
    pub idle_whole: Option<f64>,
    /// By rank.
    pub clones: Vec<CloneFigures>,
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// The middle one; the mean of the middle two; 0 of none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.len().saturating_sub(1) / 2, sorted.len() / 2);
    match (sorted.get(low), sorted.get(high)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => 0.0,
    }
}

/// Beginnings and ends.
pub(super) type Spans = Vec<(Duration, Duration)>;

/// A time of which the share without copies is asked, found from when each hop's first copy begins and its last ends.
type Window = fn(&[(Duration, Duration)]) -> Option<(Duration, Duration)>;

/// The time in which all hops are at work: from the latest first beginning to the earliest last end.
fn all_at_work(hops: &[(Duration, Duration)]) -> Option<(Duration, Duration)> {
    Some((hops.iter().map(|hop| hop.0).max()?, hops.iter().map(|hop| hop.1).min()?))
}

/// From the first beginning to the last end.
fn any_at_work(hops: &[(Duration, Duration)]) -> Option<(Duration, Duration)> {
    Some((hops.iter().map(|hop| hop.0).min()?, hops.iter().map(|hop| hop.1).max()?))
}

/// The share of the window that no span covers.
fn idle(hops: &[Spans], window: Window) -> Option<f64> {
    let hops = || hops.iter().filter(|hop| !hop.is_empty());
    let span = |hop: &Spans| {
        Some((hop.iter().map(|(begin, _)| *begin).min()?, hop.iter().map(|(_, end)| *end).max()?))
    };
    let (first, last) = window(&hops().filter_map(span).collect::<Vec<_>>())?;
    let mut spans: Vec<_> = hops().flatten().copied().collect();
    spans.sort();
    let (mut covered, mut until) = (Duration::ZERO, first);
    for (begin, end) in spans {
        let (begin, end) = (begin.max(until), end.min(last));
        covered += end.saturating_sub(begin);
        until = until.max(end);
    }
    let whole = last.saturating_sub(first);
    if whole.is_zero() {
        return None;
    }
    Some((1.0 - covered.as_secs_f64() / whole.as_secs_f64()).max(0.0))
}

impl Repeat {
    /// The soonest that the last rank can be done, in milliseconds, by what the GPUs allowed.
    fn ideal(&self, stage: &Stage, gpu: impl Fn(Rank) -> usize) -> Option<f64> {
        let alone = self.set_up.iter().find_map(|set_up| set_up.limits).map(|limits| ms(limits.copy));
        let together = |rank: Rank| self.set_up.get(rank as usize)?.together.map(ms);
        let slowest = (0..).take(self.set_up.len()).filter_map(together).reduce(f64::max);
        let alone = alone.or(slowest)?;
        Some(ideal::soonest(stage, gpu, alone, |rank| together(rank).unwrap_or(alone)))
    }

    /// The worst link's idle share; a link is a pair of GPUs, `gpu` says which a rank is on.
    fn idle(
        &self,
        stage: &Stage,
        gpu: impl Fn(Rank) -> usize,
        end: fn(&Copied) -> Duration,
        window: Window,
    ) -> Option<f64> {
        let mut links: BTreeMap<(usize, usize), Vec<Spans>> = BTreeMap::new();
        for (rank, done) in &self.done {
            let Some(leg) = stage.shape.schedule().legs(*rank).first().copied() else { continue };
            let copies = done.copies.iter().map(|copy| (copy.begin, end(copy)));
            links.entry((gpu(leg.source), gpu(*rank))).or_default().push(copies.collect());
        }
        links.values().filter_map(|hops| idle(hops, window)).reduce(f64::max)
    }
}

impl Measured {
    /// The medians over all repeats; `gpus`: how many GPUs the ranks go around.
    pub fn figures(&self, gpus: usize) -> Figures {
        let Self { stage, repeats } = self;
        let over = |of: &dyn Fn(&Repeat) -> Option<f64>| {
            let values: Vec<f64> = repeats.iter().filter_map(of).collect();
            (!values.is_empty()).then(|| median(values))
        };
        let limit = |of: fn(GpuLimits) -> Duration| {
            over(&|repeat| repeat.set_up.iter().find_map(|set_up| set_up.limits).map(|limits| ms(of(limits))))
        };
        let ready = |repeat: &Repeat| repeat.done.values().map(|done| done.ready).collect::<Vec<_>>();
        let first = |repeat: &Repeat| ready(repeat).into_iter().min().map(ms);
        let last = |repeat: &Repeat| ready(repeat).into_iter().max().map(ms);
        let before = |repeat: &Repeat| {
            let longest = |of: fn(&SetUp) -> Duration| repeat.set_up.iter().map(of).max().unwrap_or_default();
            longest(|set_up| set_up.export) + longest(|set_up| set_up.map)
        };
        let gpu = |rank: Rank| (rank as usize).checked_rem(gpus).unwrap_or(0);
        let ranks: Vec<Rank> =
            repeats.first().map_or_else(Vec::new, |repeat| repeat.done.keys().copied().collect());
        let transport =
            repeats.iter().flat_map(|repeat| repeat.done.values()).find_map(|done| done.transport);
        let arena = |rank: usize| {
            let made = repeats.iter().filter_map(|repeat| repeat.set_up.get(rank)).map(|set_up| set_up.arena);
            made.max().map_or(0.0, ms)
        };
        Figures {
            topology: stage.shape.name(),
            bytes: stage.bytes,
            chunk_bytes: stage.chunk,
            verify: stage.verify,
            repeats: repeats.len(),
            transport,
            seed_arena_ms: arena(0),
            seed_export_ms: median(
                repeats.iter().filter_map(|repeat| repeat.set_up.first()).map(|set_up| ms(set_up.export)),
            ),
            first_ms: over(&first).unwrap_or(0.0),
            last_ms: over(&last).unwrap_or(0.0),
            total_ms: over(&|repeat| Some(ms(before(repeat)) + last(repeat).unwrap_or(0.0))).unwrap_or(0.0),
            raw_ms: limit(|limits| limits.copy),
            raw_together_ms: over(&|repeat| {
                repeat.set_up.iter().filter_map(|set_up| set_up.together).max().map(ms)
            }),
            ideal_ms: over(&|repeat| repeat.ideal(stage, gpu)),
            raw_chunks_ms: limit(|limits| limits.chunks),
            hash_ms: limit(|limits| limits.hash),
            bound_ms: limit(GpuLimits::bound),
            idle: over(&|repeat| repeat.idle(stage, gpu, |copy| copy.copied, all_at_work)),
            idle_gpu: over(&|repeat| repeat.idle(stage, gpu, |copy| copy.end, all_at_work)),
            idle_whole: over(&|repeat| repeat.idle(stage, gpu, |copy| copy.copied, any_at_work)),
            clones: ranks.iter().map(|rank| self.clone_figures(*rank, arena(*rank as usize))).collect(),
        }
    }

    fn clone_figures(&self, rank: Rank, arena_ms: f64) -> CloneFigures {
        let set_up = |of: fn(&SetUp) -> Duration| {
            let all = self.repeats.iter().filter_map(|repeat| repeat.set_up.get(rank as usize));
            median(all.map(|set_up| ms(of(set_up))))
        };
        let done = || self.repeats.iter().filter_map(|repeat| repeat.done.get(&rank));
        let span = |end: fn(&Copied) -> Duration| {
            let spans = done().filter_map(|done| {
                let first = done.copies.iter().map(|copy| copy.begin).min()?;
                done.copies.iter().map(end).max().map(|last| ms(last.saturating_sub(first)))
            });
            let spans: Vec<f64> = spans.collect();
            (!spans.is_empty()).then(|| median(spans))
        };
        let edge = |of: fn(&Done) -> Option<Duration>| {
            let edges: Vec<f64> = done().filter_map(|done| of(done).map(ms)).collect();
            (!edges.is_empty()).then(|| median(edges))
        };
        let ready_ms = median(done().map(|done| ms(done.ready)));
        CloneFigures {
            index: rank,
            arena_ms,
            export_ms: set_up(|s| s.export),
            map_ms: set_up(|s| s.map),
            driver_ms: set_up(|s| s.driver),
            copy_ms: span(|copy| copy.copied),
            verified_ms: if self.stage.verify { span(|copy| copy.end) } else { None },
            lead_ms: edge(|done| {
                Some(done.copies.iter().map(|copy| copy.begin).min()?.saturating_sub(done.release))
            }),
            trail_ms: edge(|done| {
                let ready = done.release + done.ready;
                Some(ready.saturating_sub(done.copies.iter().map(|copy| copy.end).max()?))
            }),
            timeline_ms: done().next_back().map_or_else(Vec::new, |done| {
                let since = |at: Duration| ms(at) - ms(done.release);
                done.copies.iter().map(|copy| [copy.begin, copy.copied, copy.end].map(since)).collect()
            }),
            transfer_ms: median(done().map(|done| ms(done.transfer))),
            ready_ms,
            bytes_per_s: if ready_ms > 0.0 {
                (self.stage.bytes as f64 / ready_ms * 1e3).round()
            } else {
                0.0
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::plan::Shape, *};

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn a_median_is_the_middle() {
        assert_eq!(median([]), 0.0);
        assert_eq!(median([3.0]), 3.0);
        assert_eq!(median([9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 9.0]), 3.0);
    }

    #[test]
    fn idle_is_what_nobody_covers_while_all_are_at_work() {
        let near = |found: Option<f64>, share: f64| found.is_some_and(|found| (found - share).abs() < 1e-9);
        assert_eq!(idle(&[], all_at_work), None);
        assert_eq!(idle(&[vec![(us(5), us(5))]], all_at_work), None);
        assert_eq!(idle(&[vec![(us(0), us(100))], vec![]], all_at_work), Some(0.0));
        assert!(near(idle(&[vec![(us(50), us(100)), (us(0), us(40))]], all_at_work), 0.1));
        // From 10 to 90, without 40 to 50.
        let two = [vec![(us(0), us(40)), (us(60), us(100))], vec![(us(10), us(20)), (us(50), us(90))]];
        assert!(near(idle(&two, all_at_work), 10.0 / 80.0), "{:?}", idle(&two, all_at_work));
        let after_another = [vec![(us(0), us(40))], vec![(us(50), us(90))]];
        assert_eq!(idle(&after_another, all_at_work), None, "never both");
        assert!(near(idle(&two, any_at_work), 0.1));
        assert!(near(idle(&after_another, any_at_work), 10.0 / 90.0));
        assert_eq!(idle(&[], any_at_work), None);
    }

    #[test]
    fn links_of_two_gpus_are_told_apart() {
        let stage = Stage {
            shape: Shape::Chain { clones: 3 },
            bytes: 1000,
            chunk: 500,
            verify: true,
            repeats: 1,
            limits: true,
        };
        let copy = |begin, copied| Copied { begin: us(begin), copied: us(copied), end: us(copied + 5) };
        let done = |ready, copies| Done {
            release: Duration::ZERO,
            ready: us(ready),
            transfer: us(ready - 1),
            transport: Some(TransportName::Ipc),
            copies,
        };
        let limits = GpuLimits { copy: us(80), chunks: us(90), hash: us(30), verified: us(100) };
        let repeat = Repeat {
            set_up: vec![
                SetUp { arena: us(7), export: us(2), ..SetUp::default() },
                SetUp { map: us(10), limits: Some(limits), ..SetUp::default() },
                SetUp { map: us(30), ..SetUp::default() },
                SetUp { map: us(20), ..SetUp::default() },
            ],
            done: BTreeMap::from([
                (1, done(120, vec![copy(0, 50), copy(60, 100)])),
                (2, done(130, vec![copy(50, 100), copy(100, 150)])),
                (3, done(150, vec![copy(0, 60), copy(60, 100)])),
            ]),
        };
        let measured = Measured { stage, repeats: vec![repeat] };
        // Ranks 1 and 3 read over the same link, and 3 fills the gap of 1.
        let two = measured.figures(2);
        assert!(two.idle.unwrap().abs() < 1e-9, "{two:?}");
        assert!((two.first_ms - 0.12).abs() < 1e-9 && (two.last_ms - 0.15).abs() < 1e-9, "{two:?}");
        assert!((two.total_ms - (0.002 + 0.03 + 0.15)).abs() < 1e-9, "{two:?}");
        assert!((two.seed_export_ms - 0.002).abs() < 1e-9, "the seed's, not a reader's: {two:?}");
        let near = |found: Option<f64>, ms: f64| found.is_some_and(|found| (found - ms).abs() < 1e-9);
        assert!(near(two.ideal_ms, 0.08 * 4.0 / 2.0), "2 chunks over 3 hops: {two:?}");
        assert!(near(two.raw_ms, 0.08) && near(two.bound_ms, 0.1), "{two:?}");
        let first = &two.clones[0];
        assert!(near(first.copy_ms, 0.1) && near(first.verified_ms, 0.105), "{first:?}");
        assert!(near(first.lead_ms, 0.0) && near(first.trail_ms, 0.015), "{first:?}");
        let micros = first.timeline_ms.iter().flatten().map(|ms| (ms * 1e3).round());
        assert_eq!(micros.collect::<Vec<_>>(), [0.0, 50.0, 55.0, 60.0, 100.0, 105.0]);
        // With a GPU each, rank 1's link stood still for 10 of 100.
        let four = measured.figures(4);
        assert!((four.idle.unwrap() - 0.1).abs() < 1e-9, "{four:?}");
    }
}
