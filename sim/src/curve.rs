//! What copies of given sizes run at, as it was measured: for links on which a constant cost a chunk is not the truth.

use serde::Deserialize;

/// Sizes in bytes with the rate of one copy behind another, in bytes a second, by size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct Curve(Vec<(u64, f64)>);

/// More points than this no measurement has.
const MOST: usize = 64;

impl Curve {
    /// What a copy of `bytes` takes beyond `bytes` at `rate`, in nanoseconds. Between two sizes it is in proportion, above the largest what the largest
    /// has; one smaller than the smallest takes as long as that.
    pub fn beyond(&self, bytes: u64, rate: f64) -> u64 {
        let beyond = |(size, at): (u64, f64)| size as f64 * (1.0 / at - 1.0 / rate);
        let after = self.0.partition_point(|(size, _)| *size < bytes);
        let point = |at: usize| self.0.get(at).copied();
        let seconds = match (after.checked_sub(1).and_then(point), point(after)) {
            (None, None) => 0.0,
            (None, Some((size, at))) => size as f64 / at - bytes as f64 / rate,
            (Some(last), None) => beyond(last),
            (Some(low), Some(high)) => {
                let part = (bytes - low.0) as f64 / (high.0 - low.0) as f64;
                beyond(low) * (1.0 - part) + beyond(high) * part
            }
        };
        (seconds.max(0.0) * 1e9).round() as u64
    }

    pub(crate) fn check(&self, of: &str, rate: f64) -> Result<(), String> {
        let of = format!("{of}.curve");
        if self.0.is_empty() || self.0.len() > MOST {
            return Err(format!("{of} has {} points: from 1 to {MOST} are possible", self.0.len()));
        }
        let mut took = 0.0;
        for (before, (size, at)) in
            std::iter::once(0).chain(self.0.iter().map(|(size, _)| *size)).zip(&self.0)
        {
            if *size <= before {
                return Err(format!("{of} has {size} bytes after {before}: sizes are above 0 and grow"));
            }
            if !(*at >= 1e3 && *at <= rate) {
                return Err(format!(
                    "{of} has {at} at {size} bytes: rates are from 1e3 to the link's own {rate}"
                ));
            }
            let takes = *size as f64 / at;
            if takes < took {
                return Err(format!(
                    "{of} has {at} at {size} bytes: that copy would end before the smaller one"
                ));
            }
            took = takes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(points: &[(u64, f64)]) -> Curve {
        Curve(points.to_vec())
    }

    #[test]
    fn a_size_that_was_measured_runs_at_the_rate_that_was_measured() {
        let curve = curve(&[(1_000, 1e9), (4_000, 2e9), (1_000_000, 3.9e9)]);
        for (size, rate) in &curve.0 {
            let took = curve.beyond(*size, 4e9) + size / 4;
            assert!((took as f64 - *size as f64 / rate * 1e9).abs() <= 1.0, "{size}: {took} ns");
        }
        assert_eq!(curve.beyond(2_500, 4e9), (750 + 1_000) / 2, "half way between two");
        assert_eq!(curve.beyond(100, 4e9), 1_000 - 25, "the smallest is the least");
        assert_eq!(curve.beyond(1 << 40, 4e9), curve.beyond(1_000_000, 4e9), "what the largest has");
    }

    #[test]
    fn what_is_no_curve_is_refused_with_the_point() {
        for (points, named) in [
            (vec![], "0 points"),
            (vec![(1, 1e9); MOST + 1], "65 points"),
            (vec![(0, 1e9)], "0 bytes"),
            (vec![(5, 1e9), (5, 1e9)], "5 bytes after 5"),
            (vec![(5, 2e12)], "2000000000000 at 5"),
            (vec![(5, f64::NAN)], "NaN at 5"),
            (vec![(1, 1e3), (2, 1e12)], "before the smaller one"),
        ] {
            let said = Curve(points).check("nvlink", 1e12).unwrap_err();
            assert!(said.starts_with("nvlink.curve") && said.contains(named), "{said}");
        }
        assert_eq!(curve(&[(1, 1e3), (2, 2e3)]).check("nvlink", 1e12), Ok(()));
    }

    proptest! {
        #[test]
        fn a_larger_copy_never_ends_sooner(
            points in prop::collection::btree_map(1u64..1 << 40, 1e3f64..1e12, 1..8),
            sizes in prop::collection::vec(0u64..1 << 41, 2..20),
        ) {
            let mut curve = Curve(Vec::new());
            for point in points {
                curve.0.push(point);
                if curve.check("link", 1e12).is_err() {
                    curve.0.pop();
                }
            }
            let mut sizes = sizes;
            sizes.sort_unstable();
            let took = |size: u64| curve.beyond(size, 1e12) + (size as f64 / 1e3).round() as u64;
            for pair in sizes.windows(2) {
                prop_assert!(took(pair[0]) <= took(pair[1]) + 2);
            }
        }
    }
}
