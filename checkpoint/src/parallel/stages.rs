//! Pipeline stages: ranges of layers.

use super::Refused;
use crate::recipe::Target;

/// The first layer of each stage, and one past the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StageLayers {
    bounds: Vec<u64>,
}

impl StageLayers {
    /// `layers` over `stages` as the target does it: where they do not divide, transformers' and our own images and
    /// vLLM's give the layers that are over to the stages before the last (which has the head to compute),
    /// SGLang's to the last ones.
    pub(crate) fn new(layers: u64, stages: u32, target: Target) -> Result<Self, Refused> {
        let n = u64::from(stages.max(1));
        if n > 1 && layers < n {
            return Err(Refused::Stages {
                detail: format!("{layers} layers cannot fill {n} pipeline stages"),
            });
        }
        let (base, over) = (layers / n, layers % n);
        let more = |stage: u64| match target {
            Target::Sglang => stage + over >= n,
            // One each for the `over` stages before the last one.
            _ => stage + 1 < n && stage + 1 + over >= n,
        };
        let mut bounds = vec![0u64];
        for stage in 0..n {
            let end = bounds.last().copied().unwrap_or(0);
            bounds.push(end + base + u64::from(more(stage)));
        }
        Ok(Self { bounds })
    }

    /// Stages of these many layers each.
    pub(crate) fn explicit(counts: &[u64], layers: u64, stages: u32) -> Result<Self, Refused> {
        let sum = counts.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
        if counts.len() != stages as usize || sum != layers || counts.contains(&0) {
            let detail = format!("{counts:?} are no {stages} stages of {layers} layers together");
            return Err(Refused::Stages { detail });
        }
        let mut bounds = vec![0];
        bounds.extend(counts.iter().scan(0u64, |end, n| {
            *end += n;
            Some(*end)
        }));
        Ok(Self { bounds })
    }

    /// Whether `stage` holds `layer`.
    pub(crate) fn holds(&self, stage: u32, layer: u64) -> bool {
        let at = |i: usize| self.bounds.get(i).copied().unwrap_or(0);
        let stage = stage as usize;
        (at(stage)..at(stage + 1)).contains(&layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(layers: u64, stages: u32, target: Target) -> Vec<u64> {
        let made = StageLayers::new(layers, stages, target).unwrap();
        made.bounds.windows(2).map(|w| w[1] - w[0]).collect()
    }

    #[test]
    fn what_does_not_divide_goes_where_the_engines_put_it() {
        assert_eq!(counts(10, 4, Target::Vllm), [2, 3, 3, 2]);
        assert_eq!(counts(10, 4, Target::Sglang), [2, 2, 3, 3]);
        assert_eq!(counts(8, 4, Target::Checkpoint), [2, 2, 2, 2]);
        assert!(StageLayers::new(3, 4, Target::Vllm).is_err());
        assert!(StageLayers::explicit(&[3, 5], 8, 2).is_ok());
        assert!(StageLayers::explicit(&[3, 4], 8, 2).is_err());
    }

    proptest! {
        #[test]
        fn every_layer_is_in_one_stage(layers in 1u64..100, stages in 1u32..9) {
            for target in [Target::Checkpoint, Target::Vllm, Target::Sglang] {
                if let Ok(made) = StageLayers::new(layers, stages, target) {
                    for layer in 0..layers {
                        prop_assert_eq!((0..stages).filter(|&s| made.holds(s, layer)).count(), 1);
                    }
                    prop_assert!(!made.holds(stages - 1, layers));
                }
            }
        }
    }
}
