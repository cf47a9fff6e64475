//! The six free parameters, found from Table 2, Figure 5 and Figure 18 and nothing else.
//!
//! Each has a figure that depends on it most; one after the other is moved until its figure comes out, and round again until
//! none moves.

use super::gb300::{DEFAULT, FLASH, chain, last_ms, mean, one_copy, quiet, rate_of};
use crate::{Chunk, Copy, Error, Profile, Scenario, Topology, simulate};

/// The six.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Free {
    /// Bytes a second of one copy.
    pub rate: f64,
    /// Bytes a second that all readers of one GPU get.
    pub egress: f64,
    /// A copy's start, in microseconds.
    pub start_us: f64,
    /// A chunk's own cost.
    pub chunk_us: f64,
    /// What is left of the rate of a GPU that sends and receives.
    pub duplex: f64,
    /// The standard deviation of the chunk's cost.
    pub jitter_us: f64,
}

impl Free {
    /// The six as `profile` has them; `None` for one without NVLink.
    pub fn of(profile: &Profile) -> Option<Self> {
        let &Copy { rate, start_us, chunk_us, jitter_us, .. } = profile.nvlink.as_ref()?;
        let (egress, duplex) = (profile.gpu.egress, profile.gpu.duplex);
        Some(Self { rate, egress, start_us, chunk_us, duplex, jitter_us })
    }

    fn within(self, profile: &Profile) -> Profile {
        let Self { rate, egress, start_us, chunk_us, duplex, jitter_us } = self;
        let mut profile = profile.clone();
        profile.gpu = crate::Gpu { egress, ingress: egress, duplex, ..profile.gpu };
        profile.nvlink = profile.nvlink.map(|copy| Copy { rate, start_us, chunk_us, jitter_us, ..copy });
        profile
    }
}

/// A fit and how it went.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// What was found.
    pub free: Free,
    /// Rounds until nothing moved by a thousandth.
    pub rounds: u32,
}

const ROUNDS: u32 = 12;
/// Of an interval, in search of a zero: to a millionth of it.
const HALVINGS: u32 = 20;

impl Fit {
    /// Fits the six, from values that are far from the built-in ones.
    ///
    /// # Errors
    /// Whatever a simulation fails with.
    pub fn find(profile: &Profile) -> Result<Self, Error> {
        let mut free =
            Free { rate: 500e9, egress: 500e9, start_us: 1.0, chunk_us: 1.0, duplex: 1.0, jitter_us: 0.0 };
        for round in 1..=ROUNDS {
            let before = free;
            free = step(profile, free)?;
            if near(before, free) {
                return Ok(Self { free, rounds: round });
            }
        }
        Ok(Self { free, rounds: ROUNDS })
    }
}

fn near(a: Free, b: Free) -> bool {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-3 * a.abs().max(1e-3);
    close(a.rate, b.rate)
        && close(a.egress, b.egress)
        && close(a.start_us, b.start_us)
        && close(a.chunk_us, b.chunk_us)
        && close(a.duplex, b.duplex)
        && close(a.jitter_us, b.jitter_us)
}

/// Every parameter once.
fn step(profile: &Profile, mut free: Free) -> Result<Free, Error> {
    let base = quiet(profile);
    // Table 2: 825 to 826 GB/s for one copy, 837 to 839 for all readers of a seed.
    free.rate = bisect(100e9, 2000e9, HALVINGS, |rate| {
        let wide = Free { rate, egress: f64::max(free.egress, 2.0 * rate), jitter_us: 0.0, ..free };
        Ok(one_copy(&wide.within(&base), 32 << 30)? - 825.5)
    })?;
    free.egress = bisect(100e9, 2000e9, HALVINGS, |egress| {
        let star = Scenario { topology: Topology::Star, chunk: Chunk::Whole, ..chain(FLASH, 2, DEFAULT) };
        let found = simulate(&Free { egress, jitter_us: 0.0, ..free }.within(&base), &star)?;
        Ok(found.mean_rate() * 2.0 / 1e9 - 838.0)
    })?;
    // Figure 5: 47 GB/s for one copy of 1 MB.
    free.start_us = bisect(0.0, 200.0, HALVINGS, |start_us| {
        Ok(one_copy(&Free { start_us, jitter_us: 0.0, ..free }.within(&base), 1 << 20)? - 47.0)
    })?;
    // Figure 18: the head at both ends of the sweep, and the tail at 256 MB.
    let head = |free: Free, mib: u64| mean(&free.within(profile), &chain(FLASH, 8, mib << 20), rate_of(0));
    free.duplex = bisect(0.3, 1.0, HALVINGS, |duplex| Ok(head(Free { duplex, ..free }, 2048)? - 748.0))?;
    free.chunk_us =
        bisect(0.0, 100.0, HALVINGS, |chunk_us| Ok(head(Free { chunk_us, ..free }, 64)? - 695.0))?;
    free.jitter_us = bisect(0.0, 100.0, HALVINGS, |jitter_us| {
        let tail = mean(&Free { jitter_us, ..free }.within(profile), &chain(FLASH, 8, DEFAULT), last_ms)?;
        Ok(tail - 60.1)
    })?;
    Ok(free)
}

/// Where `f`, which rises or falls all the way from `low` to `high`, is nearest to 0.
pub(super) fn bisect(
    mut low: f64,
    mut high: f64,
    halvings: u32,
    f: impl Fn(f64) -> Result<f64, Error>,
) -> Result<f64, Error> {
    let rises = f(high)? > f(low)?;
    for _ in 0..halvings {
        let middle = f64::midpoint(low, high);
        if (f(middle)? > 0.0) == rises { high = middle } else { low = middle }
    }
    Ok(f64::midpoint(low, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_holds_what_the_fit_finds() {
        let profile = Profile::built_in("gb300").unwrap();
        let held = Free::of(&profile).unwrap();
        // From the held values the fit does not move: they are where it ends.
        let found = step(&profile, held).unwrap();
        let near = |found: f64, held: f64| assert!((found / held - 1.0).abs() < 0.01, "{found}, held {held}");
        near(found.rate, held.rate);
        near(found.egress, held.egress);
        near(found.start_us, held.start_us);
        near(found.chunk_us, held.chunk_us);
        near(found.duplex, held.duplex);
        near(found.jitter_us, held.jitter_us);
    }

    #[test]
    fn a_zero_is_found_whichever_way_it_is_crossed() {
        for sign in [1.0, -1.0] {
            let found = bisect(0.0, 10.0, HALVINGS, |x| Ok(sign * (x * x - 2.0))).unwrap();
            assert!((found - 2f64.sqrt()).abs() < 1e-5, "{found}");
        }
    }
}
