//! From a recipe, a layout and a checkpoint's headers: which part of which tensor every rank holds.
//!
//! Tensors of one name pattern, shape and type are one *class*, looked at once; what remains per tensor is who owns
//! its layer and its expert. So a hundred thousand tensors cost little more than their names.

mod class;
mod count;
mod cut;
mod find;
pub(crate) mod glob;
mod group;
mod needs;
mod options;
mod template;
mod view;
mod wrong;

pub(crate) use class::Class;
pub(crate) use cut::Part;
pub(crate) use group::Groups;
pub use options::{LayoutOptions, Slicing};
pub(crate) use template::Kind;
pub(crate) use view::{RankTensor, RankView};

use crate::config::ModelConfig;
use crate::error::Result;
use crate::image::ModelPart;
use crate::parallel::{Refused, StageLayers};
use crate::quant::Quantisation;
use crate::recipe::{Recipe, Target, builtin, proved};
use crate::tensors::Tensors;
use template::Stages;

/// A number that is none.
pub(crate) const NONE: u32 = u32::MAX;

/// What is known of one tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) class: u32,
    pub(crate) template: u32,
    pub(crate) layer: u32,
    /// The expert whose it is; [`NONE`] also for tensors of all experts.
    pub(crate) expert: u32,
    pub(crate) kind: Kind,
    stages: Stages,
}

/// The model that is laid out: real headers, or an image's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model<'m> {
    pub(crate) tensors: &'m Tensors,
    pub(crate) aliases: &'m [(String, usize)],
    pub(crate) config: &'m ModelConfig,
}

/// A model, a recipe and a layout put together and found to fit.
#[derive(Debug)]
pub(crate) struct Assignment<'m> {
    pub(crate) model: Model<'m>,
    pub(crate) options: LayoutOptions,
    pub(crate) recipe: Recipe,
    pub(crate) slicing: Slicing,
    pub(crate) entries: Vec<Entry>,
    pub(crate) classes: Vec<Class>,
    /// The fusion a template is a part of, and which.
    fuses: Vec<Option<(usize, usize)>>,
    /// The parameter's name of each template.
    params: Vec<String>,
    stages: StageLayers,
    /// Routed experts of the target, and of the draft.
    experts: [u64; 2],
    /// What a person should know.
    pub(crate) notes: Vec<String>,
}

impl<'m> Assignment<'m> {
    /// Puts them together, or says by name what does not fit.
    pub(crate) fn new(model: Model<'m>, options: &LayoutOptions) -> Result<Self> {
        let moe_width = options.parallel.moe_width()?;
        let mut notes = Vec::new();
        let recipe = choose(model.config, options, &mut notes)?;
        let known = !recipe.rules.is_empty() || recipe.layers.is_some();
        let slicing = options.slicing.unwrap_or(if known { Slicing::All } else { Slicing::Off });
        check_proved(&recipe, options, &mut notes)?;
        let engine = options.target != Target::Checkpoint;
        if engine && slicing != Slicing::All {
            let problem = format!("an engine's parameters are sliced, and slicing is `{}`", slicing.name());
            return Err(Refused::Fusion { name: options.target.to_string(), problem }.into());
        }
        let quant = match slicing {
            Slicing::Off => Quantisation::default(),
            _ => Quantisation::parse(model.config.quantisation.as_deref())?,
        };
        let found = find::find(&model, &recipe, options, slicing, moe_width, &quant, &mut notes)?;
        let layers = found.layers;
        let stages = match &options.stage_layers {
            Some(counts) => StageLayers::explicit(counts, layers, options.parallel.pp)?,
            None => StageLayers::new(layers, options.parallel.pp, options.target)?,
        };
        if options.parallel.pp > 1 && recipe.layers.is_none() {
            let detail = format!("the recipe `{}` does not say what a layer is", recipe.family);
            return Err(Refused::Stages { detail }.into());
        }
        options.experts.check(options.parallel.ep, found.experts[0], &found.expert_layers)?;
        Ok(Self {
            model,
            options: options.clone(),
            recipe,
            slicing,
            entries: found.entries,
            classes: found.classes,
            fuses: found.fuses,
            params: found.params,
            stages,
            experts: found.experts,
            notes,
        })
    }

    /// The name of this layout for a fingerprint: all that decides which bytes are where.
    pub(crate) fn name(&self) -> String {
        let o = &self.options;
        let hash = self.recipe.hash.get(..16).unwrap_or(&self.recipe.hash);
        let mut name = format!("{}-{}-{}-{}", o.parallel, self.slicing.name(), o.experts.name(), hash);
        if let Some(counts) = &o.stage_layers {
            name += &format!("-stages{counts:?}");
        }
        if !o.exclude.is_empty() {
            name += &format!("-without{:?}", o.exclude);
        }
        name
    }

    /// Experts of the part that `model` is.
    pub(crate) fn experts(&self, model: ModelPart) -> u64 {
        let [target, draft] = self.experts;
        match model {
            ModelPart::Target => target,
            ModelPart::Draft => draft,
        }
    }

    /// Whether anything is the draft's.
    pub(crate) fn has_draft(&self) -> bool {
        self.entries.iter().any(|entry| entry.kind == Kind::Draft)
    }

    /// Which part of how many a rank takes of a class.
    pub(crate) fn place_of(&self, class: &Class, rank: &crate::parallel::Rank) -> usize {
        let place = if class.is_expert { rank.moe_tp } else { rank.coordinate.tp };
        (place as usize).min(class.cuts.len().saturating_sub(1))
    }
}

/// The recipe for a model, if it may be used.
fn choose(config: &ModelConfig, options: &LayoutOptions, notes: &mut Vec<String>) -> Result<Recipe, Refused> {
    let target = options.target;
    let model_type = config.model_type.clone().unwrap_or_default();
    let found = options.recipe.clone().or_else(|| builtin(&model_type));
    let splits_nothing = options.parallel.is_whole() && target == Target::Checkpoint;
    let Some(recipe) = found else {
        if !splits_nothing && !options.experimental {
            return Err(match (&config.model_type, &config.unreadable) {
                (Some(_), _) => Refused::UnknownFamily { model_type },
                (None, Some(why)) => Refused::NoFamily { why: format!("is not valid JSON ({why})") },
                (None, None) => Refused::NoFamily { why: "is not there or names no model_type".into() },
            });
        }
        if target != Target::Checkpoint {
            return Err(Refused::NoTarget { family: "unknown".into(), target: target.name() });
        }
        if !splits_nothing {
            notes.push(format!(
                "no recipe is known for model type `{model_type}`: experts (by their names) are spread over groups, everything else is whole on every rank"
            ));
        }
        return Ok(Recipe::unknown());
    };
    if target != Target::Checkpoint && recipe.target(target).is_none() {
        return Err(Refused::NoTarget { family: recipe.family, target: target.name() });
    }
    Ok(recipe)
}

/// Refuses cuts that nobody proved, unless they are asked for. A layout that makes none of them needs no proof.
fn check_proved(recipe: &Recipe, options: &LayoutOptions, notes: &mut Vec<String>) -> Result<(), Refused> {
    let target = options.target;
    let is_unknown = options.recipe.is_none() && recipe.model_types.is_empty();
    if is_unknown || (options.parallel.is_whole() && target == Target::Checkpoint) {
        // That nothing is known of the family was said; or nothing is split.
        return Ok(());
    }
    if options.recipe.is_none() && proved(&recipe.family, target) {
        return Ok(());
    }
    let family = recipe.family.clone();
    if !options.experimental {
        return Err(Refused::NotProved { family, target: target.name() });
    }
    notes.push(format!("the recipe `{family}` was not proved for the target {target}"));
    Ok(())
}
