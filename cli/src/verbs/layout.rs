//! What `plan`, `pack` and `reshard` are told about ranks.

use crate::exit::Failure;
use clap::{Args, ValueEnum};
use flashboot_checkpoint::{ExpertMap, LayoutOptions, Parallel, Recipe, Slicing, Target};
use std::path::{Path, PathBuf};

/// How a model is laid out over ranks: tp × dp × pp of them
#[derive(Debug, Default, Args)]
pub(crate) struct LayoutArgs {
    /// Ranks that share everything but routed experts
    #[arg(long, value_name = "N")]
    tp: Option<u32>,
    /// Groups of such ranks
    #[arg(long, value_name = "N")]
    dp: Option<u32>,
    /// Groups that routed experts are spread over
    #[arg(long, value_name = "N")]
    ep: Option<u32>,
    /// Ranks that share one expert [default: tp × dp ÷ ep]
    #[arg(long, value_name = "N")]
    moe_tp: Option<u32>,
    /// Pipeline stages
    #[arg(long, value_name = "N")]
    pp: Option<u32>,
    /// Layers of each stage, such as 20,21,20 [default: evenly]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pp_layers: Option<Vec<u64>>,
    /// What is cut [default: all where the family is known]
    #[arg(long, value_enum, value_name = "off|experts|all", hide_possible_values = true)]
    slice: Option<Slice>,
    /// Which experts are in which group: contiguous, round-robin, or a JSON file {"groups": [[…], …]}
    #[arg(long, value_name = "MAP")]
    expert_map: Option<String>,
    /// Whose parameters: checkpoint, transformers, vllm, sglang
    #[arg(long, value_name = "TARGET", value_parser = target)]
    target: Option<Target>,
    /// Use this recipe instead of the built-in one
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Allow a recipe that was not proved, or none
    #[arg(long)]
    experimental: bool,
    /// Keep tensors that no rule is about, whole, on every rank
    #[arg(long)]
    allow_unclaimed: bool,
    /// Leave out tensors of these names; `*` is any run of characters
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// The draft's ranks too
    #[arg(long)]
    draft: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Slice {
    Off,
    Experts,
    All,
}

fn target(text: &str) -> Result<Target, String> {
    Target::from_name(text)
        .ok_or_else(|| format!("`{text}` is none of checkpoint, transformers, vllm, sglang"))
}

impl LayoutArgs {
    /// The options, with the files that they name read.
    pub(crate) fn options(&self) -> Result<LayoutOptions, Failure> {
        let slicing = self.slice.map(|slice| match slice {
            Slice::Off => Slicing::Off,
            Slice::Experts => Slicing::Experts,
            Slice::All => Slicing::All,
        });
        let experts = match self.expert_map.as_deref() {
            None | Some("contiguous") => ExpertMap::Contiguous,
            Some("round-robin") => ExpertMap::RoundRobin,
            Some(path) => ExpertMap::read(Path::new(path))?,
        };
        let recipe = self.recipe.as_deref().map(Recipe::read).transpose()?;
        let parallel = Parallel {
            tp: self.tp.unwrap_or(1),
            dp: self.dp.unwrap_or(1),
            ep: self.ep.unwrap_or(1),
            moe_tp: self.moe_tp,
            pp: self.pp.unwrap_or(1),
        };
        Ok(LayoutOptions {
            parallel,
            slicing,
            experts,
            target: self.target.unwrap_or_default(),
            recipe,
            experimental: self.experimental,
            allow_unclaimed: self.allow_unclaimed,
            exclude: self.exclude.clone(),
            draft: self.draft,
            stage_layers: self.pp_layers.clone(),
        })
    }
}
