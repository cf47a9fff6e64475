//! Why a layout cannot be planned. Every refusal names what is wrong, by tensor where it is about tensors.

use crate::cause::Names;

/// What makes a plan impossible, or unsafe to believe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// Ranks that do not factor.
    #[error("{detail}; choose sizes that divide each other")]
    World {
        /// The numbers.
        detail: String,
    },
    /// No recipe for the family.
    #[error(
        "no recipe is known for model type `{model_type}` (built in: {}); give one with --recipe, or --experimental to split nothing but experts",
        crate::recipe::families()
    )]
    UnknownFamily {
        /// `model_type` of `config.json`.
        model_type: String,
    },
    /// No family, so no recipe.
    #[error(
        "config.json {why}, so the model's family is not known; fetch the whole checkpoint, give a recipe with --recipe, or --experimental to split nothing but experts"
    )]
    NoFamily {
        /// What is wrong with `config.json`.
        why: String,
    },
    /// A recipe nobody proved for this target.
    #[error(
        "the recipe `{family}` was not proved for the target {target}; pass --experimental to use it all the same"
    )]
    NotProved {
        /// The family.
        family: String,
        /// The target.
        target: &'static str,
    },
    /// A recipe without the target.
    #[error(
        "the recipe `{family}` says nothing about the target {target}; choose another target or write the recipe's [target.{target}]"
    )]
    NoTarget {
        /// The family.
        family: String,
        /// The target.
        target: &'static str,
    },
    /// A quantisation nobody described.
    #[error("quantisation {what} is not known, so its tensors cannot be cut; pack with --slice off")]
    UnknownQuantisation {
        /// What `quantization_config` says.
        what: String,
    },
    /// A parameter of a split module that no quantisation accounts for.
    #[error(
        "these parameters belong to split modules, but the checkpoint's quantisation ({quantisation}) has none of that kind: {names}; pack with --slice off"
    )]
    UnknownParameter {
        /// The quantisation.
        quantisation: String,
        /// The tensors.
        names: Names,
    },
    /// Tensors that no rule is about.
    #[error(
        "the recipe `{family}` leaves tensors unclaimed: {names}; add rules for them, or pass --allow-unclaimed to keep them whole"
    )]
    Unclaimed {
        /// The family.
        family: String,
        /// The tensors.
        names: Names,
    },
    /// Tensors that two rules are about.
    #[error("the recipe `{family}` claims tensors twice: {names}; make its rules exclude each other")]
    ClaimedTwice {
        /// The family.
        family: String,
        /// The tensors, each with its two patterns.
        names: Names,
    },
    /// Dimensions that cannot be divided.
    #[error("these tensors cannot be cut into {parts} parts: {names}; choose a size that divides them")]
    Indivisible {
        /// How many parts.
        parts: u32,
        /// The tensors, each with its size and what it must be a multiple of.
        names: Names,
    },
    /// Quantised weights without their scales.
    #[error("these quantised weights have no scale: {names}; fetch the whole checkpoint")]
    MissingScale {
        /// The weights.
        names: Names,
    },
    /// A shape that is not what the module's others make it.
    #[error(
        "these tensors do not have the shape that their module's weight makes them have: {names}; the checkpoint and its quantization_config disagree"
    )]
    Shape {
        /// The tensors, each with what was needed.
        names: Names,
    },
    /// Experts that `config.json` does not count.
    #[error(
        "config.json says {needed} routed experts (`{key}`), the checkpoint's tensors have {found}: {names}; fetch the config and the tensors of one revision"
    )]
    ExpertCount {
        /// The config's key.
        key: String,
        /// What it says.
        needed: u64,
        /// What the tensors say.
        found: u64,
        /// Where.
        names: Names,
    },
    /// Experts that are not numbered from 0 on, or too many.
    #[error("{detail}; fetch the whole checkpoint")]
    Experts {
        /// Which, and where.
        detail: String,
    },
    /// Experts of one layer that do not have the same tensors.
    #[error("of layer {layer} these experts' tensors are missing: {names}; fetch the whole checkpoint")]
    ExpertsDiffer {
        /// The layer's number.
        layer: u32,
        /// The tensors that other experts of it have.
        names: Names,
    },
    /// Modules that every model of the family has.
    #[error(
        "by the recipe `{family}` these modules must be there, and no tensor of the checkpoint is their weight: {names}; fetch the whole checkpoint, or give a recipe of this model's own with --recipe"
    )]
    Lacking {
        /// The family.
        family: String,
        /// The modules; a star stands for every expert.
        names: Names,
    },
    /// An embedding or a head that is smaller than the vocabulary.
    #[error(
        "config.json says {said} tokens (`vocab_size`), these tensors have fewer rows: {names}; fetch the config and the tensors of one revision"
    )]
    Vocabulary {
        /// What `config.json` says.
        said: u64,
        /// The tensors, each with its rows.
        names: Names,
    },
    /// Layers that `config.json` does not count.
    #[error(
        "config.json says {said} layers (`{key}`), the checkpoint's tensors have {found}: {names}; fetch the config and the tensors of one revision, or say in a recipe which are the draft's (draft_from_layer)"
    )]
    LayerCount {
        /// The config's key.
        key: String,
        /// What it says.
        said: u64,
        /// What the tensors say.
        found: u64,
        /// The tensors past it, or of the last layer.
        names: Names,
    },
    /// A number that the recipe needs and `config.json` lacks.
    #[error(
        "config.json has no number `{key}`, which the recipe `{family}` needs; fetch the whole checkpoint"
    )]
    NoFact {
        /// The family.
        family: String,
        /// The key.
        key: String,
    },
    /// A map of experts that does not work.
    #[error("the expert map {problem}; give every expert at least one group")]
    ExpertMap {
        /// What is wrong.
        problem: String,
    },
    /// Layers that no stage would hold, or stages without layers.
    #[error("{detail}; choose fewer stages")]
    Stages {
        /// The numbers.
        detail: String,
    },
    /// Parts of one fused parameter that do not fit together.
    #[error("`{name}` cannot be fused: {problem}; choose another target")]
    Fusion {
        /// The fused parameter.
        name: String,
        /// Why.
        problem: String,
    },
    /// Parts that cannot be put together in place of others.
    #[error("{problem}; pack it from the checkpoint")]
    Relayout {
        /// Why.
        problem: String,
    },
}
