//! How large a chunk should be.

use std::time::Duration;

/// What a chunk costs apart from its bytes, and how fast bytes go.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkCosts {
    /// Fixed cost of one chunk at one hop: polling, queueing, publishing.
    pub per_chunk: Duration,
    /// Bytes per second of one hop.
    pub rate: f64,
    /// Whether verifying a chunk runs beside the copy of the next: then it is like one hop more.
    pub check_behind: bool,
}

impl ChunkCosts {
    /// GB300 NVLink: about 17 µs and 705 GB/s reproduce the paper's optimum of 256 MiB (Figure 18).
    pub const NVLINK: Self = Self { per_chunk: Duration::from_micros(17), rate: 705e9, check_behind: true };
    /// Two ranks on one GPU: copy and hash share its memory (870 GB/s verified on an H200), and every chunk makes the
    /// two change places, which costs more than the poll. 120 µs give 1 GiB from 32 GiB on, where a hop reaches 0.99
    /// of its copies (`docs/results/cuda.md`).
    pub const SAME_GPU: Self =
        Self { per_chunk: Duration::from_micros(120), rate: 870e9, check_behind: false };
    /// Host memory, measured on the two-core build machine: a fused copy and hash at 13 GB/s; a word is polled by a
    /// timer of one millisecond, which is what a chunk costs a hop that waits.
    pub const HOST: Self = Self { per_chunk: Duration::from_millis(1), rate: 13e9, check_behind: false };
}

/// The largest chunk `auto` chooses: past 2 GiB a copy engine gains nothing (the paper, Figure 5).
const MAX_AUTO_CHUNK: u64 = 2 << 30;

/// The share of a chunk's time from which on its fixed cost is too much.
const COST_SHOWS: f64 = 0.02;

/// The chunk for which a chain of `depth` hops ends soonest.
///
/// With n = size/c chunks the last clone is ready after (n + depth − 1) chunk times of (c/rate + cost). Its
/// minimum over c is at √(size · cost · rate ÷ (depth − 1)). The result is rounded to a power of two of
/// `block`s, at least one block and at most `MAX_AUTO_CHUNK`; and of a chain at most a quarter of the payload,
/// so that a lost source costs a part and not the whole.
///
/// Where nothing comes behind the copy a quarter is best, or a half, or the whole, whose fixed cost does not show.
pub fn auto_chunk(size: u64, depth: u32, verify: bool, block: u64, costs: ChunkCosts) -> u64 {
    let block = block.max(1);
    let parts = if depth < 2 { 2 } else { 4 };
    let part = (size / parts / block).max(1);
    let most = (MAX_AUTO_CHUNK / block).max(1).min(1 << part.ilog2());
    let behind = depth.saturating_sub(1).saturating_add(u32::from(verify && costs.check_behind));
    if behind == 0 {
        let quick = costs.per_chunk.as_secs_f64() * costs.rate / COST_SHOWS;
        let parts = [4, 2].into_iter().find(|parts| (size / parts) as f64 >= quick).unwrap_or(1);
        let chunk = size.div_ceil(parts).div_ceil(block).max(1);
        let chunk = chunk.checked_next_power_of_two().unwrap_or(u64::MAX);
        return chunk.min((MAX_AUTO_CHUNK / block).max(1)) * block;
    }
    let best = (size as f64 * costs.per_chunk.as_secs_f64() * costs.rate / f64::from(behind)).sqrt();
    // `as` saturates, and NaN becomes 0: any costs give a usable chunk.
    let exponent = (best / block as f64).log2().round().clamp(0.0, 40.0) as u32;
    (1u64 << exponent).clamp(1, most) * block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BLOCK;
    use proptest::prelude::*;

    #[test]
    fn the_papers_case_gets_256_mib() {
        let flash = 41_400_000_000;
        assert_eq!(auto_chunk(flash, 8, true, BLOCK, ChunkCosts::NVLINK), 256 << 20);
        assert_eq!(auto_chunk(flash, 8, false, BLOCK, ChunkCosts::NVLINK), 256 << 20);
    }

    #[test]
    fn one_gpu_gets_chunks_of_1_gib_and_more_where_the_image_is_large() {
        for depth in 1..=3 {
            assert!(auto_chunk(32 << 30, depth, true, BLOCK, ChunkCosts::SAME_GPU) >= 1 << 30, "{depth}");
            assert!(auto_chunk(120 << 30, depth, true, BLOCK, ChunkCosts::SAME_GPU) >= 1 << 30, "{depth}");
        }
        assert_eq!(auto_chunk(1 << 30, 3, true, BLOCK, ChunkCosts::SAME_GPU), 256 << 20);
    }

    #[test]
    fn a_small_model_is_cut_all_the_same() {
        assert_eq!(auto_chunk(90_868_376, 4, true, BLOCK, ChunkCosts::HOST), BLOCK);
        assert_eq!(auto_chunk(90_868_376, 1, true, BLOCK, ChunkCosts::HOST), 8 * BLOCK);
        assert_eq!(auto_chunk(0, 4, true, BLOCK, ChunkCosts::HOST), BLOCK);
    }

    #[test]
    fn one_hop_is_cut_as_far_as_it_costs_nothing() {
        let one_hop = |size, verify| auto_chunk(size, 1, verify, BLOCK, ChunkCosts::NVLINK);
        assert_eq!(one_hop(64 << 20, false), 64 << 20);
        assert_eq!(one_hop(2 << 30, false), 1 << 30);
        assert_eq!(one_hop(8 << 30, false), 2 << 30);
        assert_eq!(one_hop(1, false), BLOCK);
        // Verifying a chunk runs while the next is copied, and the last one's nobody hides.
        assert_eq!(one_hop(64 << 20, true), 32 << 20);
        assert_eq!(one_hop(8 << 30, true), 256 << 20);
    }

    proptest! {
        #[test]
        fn any_input_gives_a_power_of_two_of_blocks(
            size: u64, depth: u32, verify: bool, cost: u32, rate in prop::num::f64::ANY
        ) {
            let costs = ChunkCosts { per_chunk: Duration::from_nanos(u64::from(cost)), rate, check_behind: verify };
            let chunk = auto_chunk(size, depth, verify, BLOCK, costs);
            prop_assert!(chunk.is_multiple_of(BLOCK) && (chunk / BLOCK).is_power_of_two());
            prop_assert!((BLOCK..=MAX_AUTO_CHUNK).contains(&chunk));
            prop_assert!(chunk == BLOCK || chunk / 2 < size);
            prop_assert!(chunk == BLOCK || depth < 2 || chunk <= size / 4);
        }
    }
}
