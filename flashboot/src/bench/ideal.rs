//! The soonest that a schedule can be done over links whose pace is known: chunk by chunk, without a pause and without a
//! host. Pure.

use super::plan::{Shape, Stage};
use flashboot_core::schedule::Rank;
use std::collections::BTreeMap;

/// A GPU that is read from and one that reads.
type Link = (usize, usize);

/// A reader and how far it is.
#[derive(Debug)]
struct Hop {
    source: Rank,
    link: Link,
    /// One read of everything while all hops read, in milliseconds.
    together: f64,
    /// Whole chunks.
    done: u64,
    /// Of the chunk under way, in shares of the payload.
    left: f64,
}

/// Milliseconds until the last rank has every byte. `alone` is one read of everything over a link between two GPUs with
/// nobody beside it, `together` what it takes a rank while all read.
///
/// While all read, each goes at its pace of `together`. While fewer do, those of one link share what it has, and none is
/// quicker than `alone`: without this the time in which a chain fills would be counted at the pace of a crowd, and real
/// runs would beat their ideal.
pub(super) fn soonest(
    stage: &Stage,
    gpu: impl Fn(Rank) -> usize,
    alone: f64,
    together: impl Fn(Rank) -> f64,
) -> f64 {
    let schedule = stage.shape.schedule();
    if let Shape::Ring { .. } = stage.shape {
        // A rank reads a shard a round, and in every round all read.
        let slowest = (0..schedule.ranks()).map(together).fold(0.0, f64::max);
        return slowest * f64::from(schedule.depth().max(1));
    }
    let (bytes, chunk) = (stage.bytes.max(1), stage.chunk.max(1));
    let chunks = bytes.div_ceil(chunk);
    let share = |index: u64| (bytes - index * chunk).min(chunk) as f64 / bytes as f64;
    let reads = |rank| Some((rank, schedule.legs(rank).first()?.source));
    let mut hops: BTreeMap<Rank, Hop> = (0..schedule.ranks())
        .filter_map(reads)
        .map(|(rank, source)| {
            let link = (gpu(source), gpu(rank));
            (rank, Hop { source, link, together: together(rank), done: 0, left: share(0) })
        })
        .collect();
    let on = |hops: &BTreeMap<Rank, Hop>, ranks: &[Rank]| {
        let mut count = BTreeMap::<Link, u32>::new();
        ranks
            .iter()
            .filter_map(|rank| hops.get(rank))
            .for_each(|hop| *count.entry(hop.link).or_default() += 1);
        count
    };
    let of = |counts: &BTreeMap<Link, u32>, hop: &Hop| counts.get(&hop.link).copied().map_or(1.0, f64::from);
    let every: Vec<Rank> = hops.keys().copied().collect();
    let of_link = on(&hops, &every);
    let mut passed = 0.0;
    loop {
        let has = |hop: &Hop| hops.get(&hop.source).is_none_or(|source| source.done > hop.done);
        let reading: Vec<Rank> =
            hops.iter().filter(|(_, hop)| hop.done < chunks && has(hop)).map(|(rank, _)| *rank).collect();
        let active = on(&hops, &reading);
        let pace = |hop: &Hop| {
            let (now, most) = (of(&active, hop), of(&of_link, hop));
            let crowded = if most > 1.0 { hop.together * now / most } else { 0.0 };
            let pace = if reading.len() == every.len() {
                hop.together
            } else {
                crowded.max(alone).min(hop.together)
            };
            pace.max(f64::MIN_POSITIVE)
        };
        let paces: Vec<(Rank, f64)> =
            reading.iter().filter_map(|rank| Some((*rank, pace(hops.get(rank)?)))).collect();
        let next = paces.iter().filter_map(|(rank, pace)| Some(hops.get(rank)?.left * pace)).reduce(f64::min);
        let Some(next) = next else { return passed };
        passed += next;
        for (rank, pace) in paces {
            let Some(hop) = hops.get_mut(&rank) else { continue };
            hop.left -= next / pace;
            if hop.left <= 1e-12 {
                hop.done += 1;
                hop.left = if hop.done < chunks { share(hop.done) } else { 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(shape: Shape, chunks: u64) -> Stage {
        Stage { shape, bytes: chunks * 1000, chunk: 1000, verify: false, repeats: 1, limits: true }
    }

    #[track_caller]
    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    }

    #[test]
    fn links_that_share_nothing_fill_one_after_the_other() {
        // Three hops over three links, 100 ms a read: (chunks + hops - 1) chunk times.
        for chunks in [1, 4, 100] {
            let found =
                soonest(&stage(Shape::Chain { clones: 3 }, chunks), |rank| rank as usize, 100.0, |_| 100.0);
            near(found, 100.0 * (chunks + 2) as f64 / chunks as f64);
        }
        let odd = Stage { bytes: 1500, ..stage(Shape::Chain { clones: 2 }, 2) };
        near(soonest(&odd, |rank| rank as usize, 150.0, |_| 150.0), 100.0 + 100.0 + 50.0);
    }

    #[test]
    fn a_chain_that_fills_is_not_slowed_down_by_hops_that_wait() {
        // Two hops over one link that gives each half of it. One chunk: one after the other, each with all of it.
        let chain = |chunks| soonest(&stage(Shape::Chain { clones: 2 }, chunks), |_| 0, 100.0, |_| 200.0);
        near(chain(1), 200.0);
        // Two: the first alone (50), then both at half of the link (100), then the last alone (50).
        near(chain(2), 200.0);
        assert!(chain(64) < 200.0 * 65.0 / 64.0, "all of it at the pace of both is no lower bound");
    }

    #[test]
    fn a_star_ends_with_its_slowest_reader_once_the_others_have_gone() {
        let together = |rank| if rank == 1 { 100.0 } else { 20.0 };
        let star = soonest(&stage(Shape::Star { clones: 2 }, 1), |rank| rank as usize % 2, 50.0, together);
        // 20 ms beside the other do a fifth, the rest goes alone.
        near(star, 20.0 + 0.8 * 50.0);
    }

    #[test]
    fn a_ring_takes_a_read_a_round() {
        near(soonest(&stage(Shape::Ring { nodes: 3 }, 3), |rank| rank as usize, 9.0, |_| 10.0), 20.0);
    }

    #[test]
    fn nothing_known_is_nothing_and_ends() {
        near(soonest(&stage(Shape::Chain { clones: 3 }, 5), |_| 0, 0.0, |_| 0.0), 0.0);
        let empty = Stage { bytes: 0, chunk: 0, ..stage(Shape::Chain { clones: 2 }, 1) };
        near(soonest(&empty, |_| 0, 1.0, |_| 1.0), 2.0);
    }
}
