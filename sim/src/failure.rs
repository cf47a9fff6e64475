//! Who dies when, and who is slow.

use crate::{
    Scenario,
    random::{mix, unit},
};

const DIES: u64 = 0xD1E5;
const WHEN: u64 = 0x3E4;
const SLOW: u64 = 0x510;
const RANK: u64 = 0xA24B_AED4_963E_E407;
const UNEVEN: u64 = 0x0DD << 24;

/// The moments at which clones die, in nanoseconds, by their number: each evenly drawn from `0..within`.
pub(crate) fn deaths(scenario: &Scenario, within: u64) -> Vec<(u32, u64)> {
    let draw = |what: u64, clone: u32| unit(mix(scenario.seed ^ what, u64::from(clone)));
    (0..scenario.clones)
        .filter(|clone| draw(DIES, *clone) < scenario.fail)
        .map(|clone| (clone, (draw(WHEN, clone) * within as f64) as u64))
        .collect()
}

/// What is left of the rate of the links of `clone`.
pub(crate) fn factor(scenario: &Scenario, clone: Option<u32>) -> f64 {
    let (Some(slow), Some(clone)) = (scenario.slow, clone) else { return 1.0 };
    let drawn = unit(mix(scenario.seed ^ SLOW, u64::from(clone)));
    if drawn < slow.share { slow.factor } else { 1.0 }
}

/// What is left of the rate of the hop from the replica `source` to `reader`, between their GPUs of `rank`: half of a normal
/// distribution below 1. Numbers are of all replicas: who is simulated together with whom changes nothing.
pub(crate) fn unevenness(scenario: &Scenario, rank: u32, source: u32, reader: u32) -> f64 {
    if scenario.uneven == 0.0 {
        return 1.0;
    }
    let hop = (u64::from(source) << 32 | u64::from(reader)) ^ u64::from(rank).wrapping_mul(RANK);
    // The sum of twelve even draws is all but normal.
    let draw = |n: u64| unit(mix(scenario.seed ^ UNEVEN ^ hop, n));
    let normal = (0..12).map(draw).sum::<f64>() - 6.0;
    (1.0 - scenario.uneven * normal.abs()).max(0.05)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Slow;

    #[test]
    fn as_many_die_and_are_slow_as_asked_for_and_always_the_same() {
        let slow = Some(Slow { share: 0.25, factor: 0.5 });
        let scenario = Scenario { fail: 0.1, slow, ..Scenario::new(1, 10_000) };
        let dead = deaths(&scenario, 1000);
        assert!((900..1100).contains(&dead.len()), "{}", dead.len());
        assert!(dead.iter().all(|(_, at)| *at < 1000));
        assert_eq!(dead, deaths(&scenario, 1000));
        assert_ne!(dead, deaths(&Scenario { seed: 2, ..scenario }, 1000));
        let slow = (0..10_000).filter(|clone| factor(&scenario, Some(*clone)) < 1.0).count();
        assert!((2300..2700).contains(&slow), "{slow}");
        assert_eq!(factor(&scenario, None), 1.0, "seeds are never slow");
        assert!(deaths(&Scenario { fail: 0.0, ..scenario }, 1000).is_empty());
    }
}
