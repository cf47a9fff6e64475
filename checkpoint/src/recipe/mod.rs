//! Recipes: how a family of models is split over ranks, as data.
//!
//! A recipe says of every tensor name what it is (a column or row split, a vocabulary, replicated, part of the
//! draft, on no GPU at all) and where pipeline stages may cut. It knows nothing about bytes; how a quantised
//! tensor follows its module's split is [`crate::quant`]'s business.

mod builtin;
mod parse;
mod pattern;

pub(crate) use builtin::{builtin, families, proved};
pub(crate) use pattern::Pattern;

use crate::source::Source;
use std::fmt;
use std::path::Path;

/// Far above any recipe.
const CAP: u64 = 1 << 20;

/// Whose parameter set an image holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// The checkpoint's own names, each tensor cut for its rank: any engine can take them.
    #[default]
    Checkpoint,
    /// Hugging Face transformers' modules under its tensor parallelism.
    Transformers,
    /// vLLM's parameters.
    Vllm,
    /// SGLang's parameters.
    Sglang,
}

impl Target {
    /// All that are engines.
    pub const ENGINES: [Self; 3] = [Self::Transformers, Self::Vllm, Self::Sglang];

    /// As recipes and the command line name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint",
            Self::Transformers => "transformers",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }

    /// The release whose parameters the recipes were written from.
    pub fn version(self) -> &'static str {
        match self {
            Self::Checkpoint => "",
            Self::Transformers => "5.24.0",
            Self::Vllm => "0.33.0",
            Self::Sglang => "0.5.23",
        }
    }

    /// The target of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = std::iter::once(Self::Checkpoint).chain(Self::ENGINES);
        all.into_iter().find(|target| target.name() == name)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a module's weight is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Split {
    /// By its outputs: the weight's rows, and its bias.
    Column,
    /// By its inputs: the weight's columns; the bias is added once, so everyone has it.
    Row,
    /// By its rows, which need not divide: the last rank has fewer.
    Vocab,
    /// A fused projection of queries, keys and values, by heads.
    Qkv,
    /// Everyone has all of it.
    Replicated,
}

/// How the heads of a fused projection follow each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HeadOrder {
    /// All queries, all keys, all values.
    #[default]
    Blocks,
    /// Group by group: a group's queries, its key, its value.
    Groups,
}

/// What is said of the modules of some names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) patterns: Vec<Pattern>,
    pub(crate) split: Split,
    /// `config.json` key of the number of heads (of queries, for [`Split::Qkv`]) that a rank's part must hold whole.
    pub(crate) heads: Option<String>,
    /// The same of the key and value heads, for [`Split::Qkv`].
    pub(crate) kv_heads: Option<String>,
    pub(crate) order: HeadOrder,
    /// Equal parts one after the other along the outputs, each split by itself.
    pub(crate) parts: u64,
    /// The weight is `[inputs, outputs]`.
    pub(crate) transposed: bool,
}

/// Modules that a target has as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fuse {
    /// The new name: stars are filled in from the parts' names, `{param}` with the parameter's.
    pub(crate) into: String,
    /// The parts in order. A star more than in `into` (the expert's number) means that they are stacked.
    pub(crate) parts: Vec<Pattern>,
}

/// What is different for one target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TargetRules {
    pub(crate) rules: Vec<Rule>,
    pub(crate) rest: Option<Split>,
    /// Parts are cut as torch chunks a dimension: anywhere, through heads too, the last ones shorter or empty.
    pub(crate) chunked: bool,
    pub(crate) fuse: Vec<Fuse>,
    /// Rows of a vocabulary are padded with zeros to a multiple of this.
    pub(crate) vocab_multiple: Option<u64>,
}

/// The modules that a model of a family must have: what it may do without is not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Once, or in every layer.
    pub(crate) every: Vec<Pattern>,
    /// In every layer that has routed experts.
    pub(crate) experts: Vec<Pattern>,
    /// In every layer that has none.
    pub(crate) dense: Vec<Pattern>,
}

/// How one family is split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    pub(crate) family: String,
    pub(crate) model_types: Vec<String>,
    /// The prefix of a layer's tensors; its star is the layer's number.
    pub(crate) layers: Option<Pattern>,
    pub(crate) layer_count: String,
    pub(crate) first: Vec<Pattern>,
    pub(crate) last: Vec<Pattern>,
    /// `config.json` keys of the number of routed experts: the first that is there.
    pub(crate) experts: Vec<String>,
    pub(crate) draft: Vec<Pattern>,
    /// Layers from this many (a `config.json` key) on are the draft's.
    pub(crate) draft_from_layer: Option<String>,
    /// Whether the draft's experts are spread over expert-parallel groups as the target's are.
    pub(crate) draft_expert_parallel: bool,
    /// Tensors that no GPU loads.
    pub(crate) unloaded: Vec<Pattern>,
    pub(crate) rules: Vec<Rule>,
    /// What the tensors of no rule are; without it they are unclaimed.
    pub(crate) rest: Option<Split>,
    pub(crate) targets: Vec<(Target, TargetRules)>,
    pub(crate) needs: Needs,
    /// BLAKE3 of its text.
    pub(crate) hash: String,
}

impl Recipe {
    /// Reads a recipe; `name` is for errors only. Unknown keys are errors.
    pub fn parse(name: &str, toml: &str) -> Result<Self, RecipeError> {
        parse::parse(toml).map_err(|detail| RecipeError { recipe: name.into(), detail })
    }

    /// Reads the recipe in a file.
    pub fn read(path: &Path) -> crate::Result<Self> {
        let bytes = Source::open(path)?.all(CAP)?;
        let name = path.display().to_string();
        let text = String::from_utf8(bytes)
            .map_err(|e| RecipeError { recipe: name.clone(), detail: e.utf8_error().to_string() })?;
        Ok(Self::parse(&name, &text)?)
    }

    /// The family's name.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// The values of `model_type` that it is for.
    pub fn model_types(&self) -> &[String] {
        &self.model_types
    }

    pub(crate) fn target(&self, target: Target) -> Option<&TargetRules> {
        self.targets.iter().find(|(t, _)| *t == target).map(|(_, rules)| rules)
    }

    /// What serves a family nobody described: experts are found by their names, everything is whole.
    pub(crate) fn unknown() -> Self {
        Self {
            family: "unknown".into(),
            model_types: Vec::new(),
            layers: None,
            layer_count: "num_hidden_layers".into(),
            first: Vec::new(),
            last: Vec::new(),
            experts: Vec::new(),
            draft: Vec::new(),
            draft_from_layer: None,
            draft_expert_parallel: false,
            unloaded: Vec::new(),
            rules: Vec::new(),
            rest: Some(Split::Replicated),
            targets: Vec::new(),
            needs: Needs::default(),
            hash: "none".into(),
        }
    }
}

/// A text that is no recipe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{recipe}: is no recipe: {detail}")]
pub struct RecipeError {
    /// Its file, or its name.
    pub recipe: String,
    /// What is wrong, and where.
    pub detail: String,
}

/// Whether a component of a name is a number.
pub(crate) fn is_number(component: &str) -> bool {
    !component.is_empty() && component.bytes().all(|b| b.is_ascii_digit())
}
