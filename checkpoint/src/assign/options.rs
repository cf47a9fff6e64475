//! What a person asks for when a model is planned or packed for many ranks.

use crate::parallel::{ExpertMap, Parallel};
use crate::recipe::{Recipe, Target};

/// What is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Slicing {
    /// Nothing: the experts a rank's group owns, and everything else, whole.
    Off,
    /// Routed experts only.
    Experts,
    /// Everything the recipe splits.
    All,
}

impl Slicing {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Experts => "experts",
            Self::All => "all",
        }
    }
}

/// How a model is laid out over ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayoutOptions {
    /// The ranks.
    pub parallel: Parallel,
    /// What is cut; everything where the family is known, nothing where it is not.
    pub slicing: Option<Slicing>,
    /// Which experts are where.
    pub experts: ExpertMap,
    /// Whose parameters.
    pub target: Target,
    /// A recipe to use instead of the built-in one.
    pub recipe: Option<Recipe>,
    /// Whether a recipe that was not proved may be used, or none at all.
    pub experimental: bool,
    /// Whether tensors that no rule is about are kept whole.
    pub allow_unclaimed: bool,
    /// Tensors that are left out, by glob.
    pub exclude: Vec<String>,
    /// Whether the draft's ranks are wanted too.
    pub draft: bool,
    /// Layers of each pipeline stage; evenly unless given.
    pub stage_layers: Option<Vec<u64>>,
}
