//! When: a schedule played out on ideal links, one chunk per reader and round.

use super::{Gate, Rank, Schedule};
use crate::{ChunkRef, Geometry};

/// One chunk read in one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// The round, from 0.
    pub round: u64,
    /// Who reads.
    pub reader: Rank,
    /// From whom.
    pub source: Rank,
    /// What.
    pub chunk: ChunkRef,
}

/// Plays `schedule` out: in every round each rank reads its next chunk if its source had it when the round
/// began. The list is in round order. It ends when all is read, or when nobody can go on (which a correct
/// schedule never reaches).
///
/// `geometry` must have the schedule's number of shards.
pub fn rounds(schedule: Schedule, geometry: &Geometry) -> Vec<Read> {
    let ranks = schedule.ranks();
    let mut have: Vec<Vec<u64>> = (0..ranks).map(|_| vec![0; geometry.shards() as usize]).collect();
    let mut todo = Vec::new();
    for rank in 0..ranks {
        for shard in schedule.holds(rank) {
            set(&mut have, rank, shard.0, geometry.chunks_in(shard));
        }
        let mut chunks: Vec<_> = schedule
            .legs(rank)
            .into_iter()
            .flat_map(|leg| geometry.chunks(leg.shard).map(move |chunk| (leg.source, chunk)))
            .collect();
        chunks.reverse();
        todo.push(chunks);
    }
    let mut reads = Vec::new();
    for round in 0.. {
        let before = reads.len();
        for (reader, chunks) in (0..).zip(&todo) {
            let Some(&(source, chunk)) = chunks.last() else { continue };
            let needed = match schedule.gate() {
                Gate::Chunk => chunk.index + 1,
                Gate::Shard => geometry.chunks_in(chunk.shard),
            };
            if get(&have, source, chunk.shard.0) >= needed {
                reads.push(Read { round, reader, source, chunk });
            }
        }
        let landed = reads.get(before..).unwrap_or_default();
        if landed.is_empty() {
            break;
        }
        for read in landed {
            set(&mut have, read.reader, read.chunk.shard.0, read.chunk.index + 1);
            if let Some(chunks) = todo.get_mut(read.reader as usize) {
                chunks.pop();
            }
        }
    }
    reads
}

fn get(have: &[Vec<u64>], rank: Rank, shard: u32) -> u64 {
    have.get(rank as usize).and_then(|shards| shards.get(shard as usize)).copied().unwrap_or(0)
}

fn set(have: &mut [Vec<u64>], rank: Rank, shard: u32, chunks: u64) {
    if let Some(word) = have.get_mut(rank as usize).and_then(|shards| shards.get_mut(shard as usize)) {
        *word = chunks;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ShardId;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn any_schedule() -> impl Strategy<Value = Schedule> {
        prop_oneof![
            (0u32..12).prop_map(|clones| Schedule::Star { clones }),
            (0u32..12).prop_map(|clones| Schedule::Chain { clones }),
            (0u32..20, 1u32..6, 1u32..4).prop_map(|(clones, length, fanout)| Schedule::Tree {
                clones,
                length,
                fanout
            }),
            (1u32..9).prop_map(|nodes| Schedule::Ring { nodes }),
            (1u32..9).prop_map(|nodes| Schedule::Staggered { nodes }),
            (1u32..9).prop_map(|nodes| Schedule::WholeChunkRing { nodes }),
        ]
    }

    fn geometry(schedule: Schedule, payload: u64) -> Geometry {
        Geometry::new(payload, 1024, 2048, schedule.shards()).unwrap()
    }

    fn last_round(reads: &[Read]) -> u64 {
        reads.last().map_or(0, |r| r.round + 1)
    }

    fn most_readers_of_one_source_in_a_round(reads: &[Read]) -> usize {
        let mut readers: BTreeMap<(u64, Rank), usize> = BTreeMap::new();
        for r in reads {
            *readers.entry((r.round, r.source)).or_default() += 1;
        }
        readers.into_values().max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn every_rank_ends_with_every_chunk_read_once(schedule in any_schedule(), payload in 0u64..60_000) {
            let g = geometry(schedule, payload);
            let reads = rounds(schedule, &g);
            for rank in 0..schedule.ranks() {
                let held: BTreeSet<_> = schedule.holds(rank).into_iter().collect();
                let mut got = BTreeSet::new();
                for r in reads.iter().filter(|r| r.reader == rank) {
                    prop_assert!(got.insert(r.chunk), "read twice: {:?}", r);
                    prop_assert!(!held.contains(&r.chunk.shard), "read what it held: {:?}", r);
                    prop_assert_ne!(r.source, rank);
                }
                let needed: BTreeSet<_> = (0..schedule.shards()).map(ShardId)
                    .filter(|s| !held.contains(s)).flat_map(|s| g.chunks(s)).collect();
                prop_assert_eq!(got, needed, "rank {}", rank);
            }
        }

        #[test]
        fn a_chain_ends_after_its_chunks_and_its_fill(clones in 1u32..10, payload in 1u64..60_000) {
            let schedule = Schedule::Chain { clones };
            let g = geometry(schedule, payload);
            let reads = rounds(schedule, &g);
            prop_assert_eq!(last_round(&reads), g.chunks_in(ShardId(0)) + u64::from(clones) - 1);
            prop_assert_eq!(most_readers_of_one_source_in_a_round(&reads), 1);
        }

        #[test]
        fn a_tree_is_as_deep_as_it_says(clones in 1u32..40, length in 1u32..6, fanout in 1u32..4) {
            let schedule = Schedule::Tree { clones, length, fanout };
            let g = geometry(schedule, 20_000);
            let reads = rounds(schedule, &g);
            prop_assert_eq!(last_round(&reads), g.chunks_in(ShardId(0)) + u64::from(schedule.depth()) - 1);
            prop_assert!(most_readers_of_one_source_in_a_round(&reads) <= fanout as usize + 1);
        }

        #[test]
        fn rings_have_one_reader_a_source_and_pipelining_saves_rounds(nodes in 2u32..9, blocks in 1u64..5) {
            let per_shard = blocks * 2048;
            let payload = per_shard * u64::from(nodes);
            let ring = Schedule::Ring { nodes };
            let whole = Schedule::WholeChunkRing { nodes };
            let reads = rounds(ring, &geometry(ring, payload));
            prop_assert_eq!(most_readers_of_one_source_in_a_round(&reads), 1);
            prop_assert!(reads.iter().all(|r| (r.source + 1) % nodes == r.reader), "predecessor only");
            prop_assert_eq!(last_round(&reads), blocks * u64::from(nodes - 1), "links never idle");
            let stored = rounds(whole, &geometry(whole, payload));
            prop_assert_eq!(most_readers_of_one_source_in_a_round(&stored), 1);
            prop_assert!(last_round(&stored) >= last_round(&reads));
        }

        #[test]
        fn staggered_pulls_read_owners_only_and_never_two_at_once(nodes in 2u32..9, blocks in 1u64..5) {
            let schedule = Schedule::Staggered { nodes };
            let reads = rounds(schedule, &geometry(schedule, blocks * 2048 * u64::from(nodes)));
            prop_assert!(reads.iter().all(|r| r.source == r.chunk.shard.0));
            prop_assert_eq!(most_readers_of_one_source_in_a_round(&reads), 1);
        }

        #[test]
        fn no_rank_of_any_schedule_panics(schedule in any_schedule(), rank: u32) {
            let _ = (schedule.legs(rank), schedule.holds(rank), schedule.depth());
        }
    }

    #[test]
    fn a_star_shares_the_seed() {
        let schedule = Schedule::Star { clones: 5 };
        let reads = rounds(schedule, &geometry(schedule, 10_000));
        assert_eq!(most_readers_of_one_source_in_a_round(&reads), 5);
    }
}
