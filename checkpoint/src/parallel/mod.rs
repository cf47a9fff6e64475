//! Parallel layouts: which ranks there are, and which experts and layers are whose. Knows no tensor.

mod experts;
mod refused;
mod stages;

pub use experts::ExpertMap;
pub use refused::Refused;
pub(crate) use stages::StageLayers;

use crate::image::{Coordinate, ModelPart};

/// How many ranks there are along each axis. The world is `tp * dp * pp` ranks; within a pipeline stage ranks are
/// numbered tensor-parallel first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    /// Ranks that share everything but routed experts.
    pub tp: u32,
    /// Groups of such ranks.
    pub dp: u32,
    /// Groups that routed experts are spread over.
    pub ep: u32,
    /// Ranks that share one expert; `tp * dp / ep` unless given.
    pub moe_tp: Option<u32>,
    /// Pipeline stages.
    pub pp: u32,
}

impl Default for Parallel {
    fn default() -> Self {
        Self { tp: 1, dp: 1, ep: 1, moe_tp: None, pp: 1 }
    }
}

/// One rank: where it is, and its place among those that share its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rank {
    /// Whose image.
    pub coordinate: Coordinate,
    /// Its number among the ranks that share its experts.
    pub moe_tp: u32,
}

/// The most ranks that are planned for.
const MOST: u64 = 1 << 16;

impl Parallel {
    /// Ranks that share one expert, once the world is known to factor.
    pub fn moe_width(&self) -> Result<u32, Refused> {
        let zero = [self.tp, self.dp, self.ep, self.pp, self.moe_tp.unwrap_or(1)].contains(&0);
        let world = [self.tp, self.dp, self.pp].iter().fold(1u64, |n, &x| n.saturating_mul(x.into()));
        if zero || world > MOST {
            let detail = format!("{self} has {world} ranks, 1 to {MOST} can be planned");
            return Err(Refused::World { detail });
        }
        let stage = self.tp.saturating_mul(self.dp);
        let width = self.moe_tp.unwrap_or_else(|| (stage / self.ep).max(1));
        let group = self.ep.saturating_mul(width);
        if group == 0 || !stage.is_multiple_of(group) {
            let detail = format!(
                "{stage} ranks (tp {} × dp {}) are no multiple of {group} (ep {} × moe-tp {width})",
                self.tp, self.dp, self.ep
            );
            return Err(Refused::World { detail });
        }
        Ok(width)
    }

    /// Every rank of `model`, stage by stage.
    pub fn ranks(&self, model: ModelPart) -> Result<Vec<Rank>, Refused> {
        let width = self.moe_width()?;
        let group = self.ep.saturating_mul(width);
        let mut ranks = Vec::new();
        for pp in 0..self.pp {
            for dp in 0..self.dp {
                for tp in 0..self.tp {
                    let slot = dp.saturating_mul(self.tp).saturating_add(tp) % group;
                    let coordinate = Coordinate { model, pp, tp, ep: slot / width, dp };
                    ranks.push(Rank { coordinate, moe_tp: slot % width });
                }
            }
        }
        Ok(ranks)
    }

    /// Whether nothing is split.
    pub fn is_whole(&self) -> bool {
        (self.tp, self.dp, self.ep, self.pp) == (1, 1, 1, 1) && self.moe_tp.unwrap_or(1) == 1
    }
}

impl std::fmt::Display for Parallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pp{}-tp{}-ep{}-dp{}", self.pp, self.tp, self.ep, self.dp)?;
        match self.moe_tp {
            Some(width) => write!(f, "-moetp{width}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_world_that_does_not_factor_is_refused_with_its_numbers() {
        let bad = Parallel { tp: 4, ep: 3, ..Parallel::default() };
        let said = bad.ranks(ModelPart::Target).unwrap_err().to_string();
        assert!(said.contains("4 ranks") && said.contains("ep 3"), "{said}");
        assert!(Parallel { tp: 0, ..Parallel::default() }.moe_width().is_err());
        assert!(Parallel { tp: 1 << 16, dp: 2, ..Parallel::default() }.moe_width().is_err());
        assert!(Parallel { tp: 8, ep: 2, moe_tp: Some(3), ..Parallel::default() }.moe_width().is_err());
        assert_eq!(Parallel { tp: 8, ep: 2, moe_tp: Some(2), ..Parallel::default() }.moe_width(), Ok(2));
    }

    proptest! {
        #[test]
        fn every_expert_slot_has_as_many_ranks_as_every_other(tp in 1u32..9, dp in 1u32..5, ep in 1u32..9, m in 1u32..5) {
            let parallel = Parallel { tp, dp, ep, moe_tp: Some(m), pp: 1 };
            if let Ok(ranks) = parallel.ranks(ModelPart::Target) {
                prop_assert_eq!(ranks.len() as u32, tp * dp);
                for group in 0..ep {
                    for part in 0..m {
                        let holders = ranks.iter().filter(|r| (r.coordinate.ep, r.moe_tp) == (group, part));
                        prop_assert_eq!(holders.count() as u32, tp * dp / (ep * m));
                    }
                }
            } else {
                prop_assert!(!(tp * dp).is_multiple_of(ep * m));
            }
        }
    }
}
