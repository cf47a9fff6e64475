//! One scenario over many chunks, or many numbers of clones.

use crate::{Chunk, Error, Outcome, Profile, Scenario, simulate};
use flashboot_core::BLOCK;

/// What is varied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Bytes of one copy: 16 MiB, doubled up to 2 GiB or the image.
    Chunk,
    /// Clones: 1, doubled up to the scenario's number, and that.
    Clones,
}

/// One of the runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Bytes of one copy.
    pub chunk: u64,
    /// Number of clones.
    pub clones: u32,
    /// What came of it.
    pub outcome: Outcome,
}

const LARGEST: u64 = 2 << 30;

/// Runs `scenario` at every point of `sweep`, in order.
///
/// # Errors
/// The first point's that cannot be simulated.
pub fn sweep(profile: &Profile, scenario: &Scenario, sweep: Sweep) -> Result<Vec<Point>, Error> {
    scenario.check()?;
    let doubled = |from: u64| std::iter::successors(Some(from), |last| last.checked_mul(2));
    let scenarios: Vec<Scenario> = match sweep {
        Sweep::Chunk => {
            let most = LARGEST.min(scenario.image).max(BLOCK);
            let chunks = doubled(BLOCK).take_while(|chunk| *chunk <= most);
            chunks.map(|chunk| Scenario { chunk: Chunk::Bytes(chunk), ..*scenario }).collect()
        }
        Sweep::Clones => {
            let counts = doubled(1).map_while(|n| u32::try_from(n).ok());
            let mut counts: Vec<u32> = counts.take_while(|n| *n < scenario.clones).collect();
            counts.push(scenario.clones);
            let seeds = |clones: u32| scenario.seeds.min(clones);
            counts.into_iter().map(|clones| Scenario { clones, seeds: seeds(clones), ..*scenario }).collect()
        }
    };
    let point = |scenario: Scenario| {
        let outcome = simulate(profile, &scenario)?;
        Ok(Point { chunk: outcome.chunk, clones: scenario.clones, outcome })
    };
    scenarios.into_iter().map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweeps_double_up_to_what_is_asked_for() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario::new(100 << 20, 6);
        let chunks = sweep(&profile, &scenario, Sweep::Chunk).unwrap();
        assert_eq!(chunks.iter().map(|p| p.chunk >> 20).collect::<Vec<_>>(), [16, 32, 64]);
        let clones = sweep(&profile, &Scenario { seeds: 2, ..scenario }, Sweep::Clones).unwrap();
        assert_eq!(clones.iter().map(|p| p.clones).collect::<Vec<_>>(), [1, 2, 4, 6]);
        assert!(clones.iter().all(|p| p.outcome.clones.len() == p.clones as usize));
        assert!(sweep(&profile, &Scenario { clones: 0, ..scenario }, Sweep::Clones).is_err());
    }

    #[test]
    fn the_papers_chain_has_its_best_chunk_inside_of_the_sweep() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario { verify: false, per_host: Some(1), ..Scenario::new(41_400_000_000, 8) };
        let points = sweep(&profile, &scenario, Sweep::Chunk).unwrap();
        let last = |p: &Point| p.outcome.filled().unwrap().last_ms;
        let best = points.iter().min_by(|a, b| last(a).total_cmp(&last(b))).unwrap();
        assert!((128 << 20..=512 << 20).contains(&best.chunk), "{}", best.chunk);
    }
}
