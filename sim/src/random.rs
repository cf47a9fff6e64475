//! Draws that depend on a seed and on what they are for, never on the order in which they are made.

/// A well-mixed word of two others (SplitMix64's finisher).
pub(crate) fn mix(seed: u64, of: u64) -> u64 {
    let mut z = seed ^ of.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A number in [0, 1).
pub(crate) fn unit(word: u64) -> f64 {
    (word >> 11) as f64 / (1u64 << 53) as f64
}

/// Costs with a mean and a spread, log-normal: most a little below the mean, a few far above, none below zero.
#[derive(Debug, Clone)]
pub(crate) struct Costs(Vec<f64>);

const DRAWS: usize = 4096;

impl Costs {
    /// `mean` and `deviation` in one unit. The draws' mean is `mean` exactly, so that spread moves no average.
    pub(crate) fn new(mean: f64, deviation: f64, seed: u64) -> Self {
        if mean <= 0.0 || deviation <= 0.0 {
            return Self(vec![mean.max(0.0)]);
        }
        let ratio = deviation / mean;
        let sigma = (1.0 + ratio * ratio).ln().sqrt();
        let draw = |n: u64| {
            // Box and Muller: two even draws make a normal one.
            let (u, v) = (unit(mix(seed, 2 * n)), unit(mix(seed, 2 * n + 1)));
            let normal = (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos();
            (sigma * normal).exp()
        };
        let mut draws: Vec<f64> = (0..DRAWS as u64).map(draw).collect();
        let scale = mean * DRAWS as f64 / draws.iter().sum::<f64>();
        draws.iter_mut().for_each(|d| *d *= scale);
        Self(draws)
    }

    /// The one value of costs without spread.
    pub(crate) fn always(&self) -> Option<f64> {
        if let [always] = self.0[..] { Some(always) } else { None }
    }

    /// The draw that belongs to `word`.
    pub(crate) fn of(&self, word: u64) -> f64 {
        let at = usize::try_from(word % self.0.len().max(1) as u64).unwrap_or(0);
        self.0.get(at).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_mean_and_about_the_spread_asked_for() {
        let costs = Costs::new(7.0, 10.0, 1);
        let mean = costs.0.iter().sum::<f64>() / costs.0.len() as f64;
        let variance = costs.0.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / costs.0.len() as f64;
        assert!((mean - 7.0).abs() < 1e-9, "{mean}");
        assert!((variance.sqrt() - 10.0).abs() < 2.0, "{}", variance.sqrt());
        assert!(costs.0.iter().all(|d| *d > 0.0));
    }

    #[test]
    fn without_spread_every_draw_is_the_mean() {
        let costs = Costs::new(7.0, 0.0, 1);
        assert_eq!((costs.of(3), costs.of(u64::MAX)), (7.0, 7.0));
    }

    #[test]
    fn a_unit_is_below_one() {
        assert!(unit(u64::MAX) < 1.0 && unit(0) == 0.0);
        assert_ne!(mix(1, 2), mix(2, 1));
    }
}
