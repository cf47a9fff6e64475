//! The recipes that come with this crate, one file a family under `families/`, and which of them are proved.

use super::{Recipe, Target};
use crate::assign::Slicing;

macro_rules! families {
    ($($name:literal)*) => {
        /// Each family's name and its text.
        const FAMILIES: &[(&str, &str)] = &[$(($name, include_str!(concat!("families/", $name, ".toml")))),*];
    };
}

families! { "llama" "qwen3_moe" "mixtral" "deepseek_v3" "gpt_oss" "deepseek_v4" "qwen3" "phi3" }

/// How far a family's cuts for a target were compared with a reference nobody here wrote: transformers' own tensor
/// parallelism (`checkpoint/tests/parallel_reference.rs`), which leaves whole what its plan for a family does not
/// name, and for `deepseek_v4` the published table of what each rank reads and keeps (`checkpoint/tests/seed_table.rs`).
const PROVED: &[(&str, Target, Slicing)] = &[
    ("llama", Target::Checkpoint, Slicing::All),
    ("llama", Target::Transformers, Slicing::All),
    ("qwen3", Target::Checkpoint, Slicing::All),
    ("qwen3", Target::Transformers, Slicing::All),
    ("qwen3_moe", Target::Checkpoint, Slicing::All),
    ("qwen3_moe", Target::Transformers, Slicing::All),
    ("mixtral", Target::Checkpoint, Slicing::All),
    ("mixtral", Target::Transformers, Slicing::All),
    // Its attention is whole there.
    ("deepseek_v3", Target::Checkpoint, Slicing::Experts),
    ("deepseek_v3", Target::Transformers, Slicing::All),
    // Its attention and its experts are.
    ("gpt_oss", Target::Checkpoint, Slicing::Off),
    ("gpt_oss", Target::Transformers, Slicing::All),
    ("deepseek_v4", Target::Checkpoint, Slicing::All),
];

/// The recipe for a `model_type`.
pub(crate) fn builtin(model_type: &str) -> Option<Recipe> {
    FAMILIES
        .iter()
        // Every text is parsed by a test, so none is lost here.
        .filter_map(|(name, text)| Recipe::parse(name, text).ok())
        .find(|recipe| recipe.model_types.iter().any(|known| known == model_type))
}

/// The most of a built-in family that may be cut for a target as proved; `None` where nothing was.
pub(crate) fn proved(family: &str, target: Target) -> Option<Slicing> {
    PROVED.iter().find(|(name, of, _)| *name == family && *of == target).map(|(.., slicing)| *slicing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_recipe_parses_and_is_found_by_its_model_types_only_once() {
        let mut seen = Vec::new();
        for (name, text) in FAMILIES {
            let recipe = Recipe::parse(name, text).unwrap();
            assert_eq!(recipe.family, *name);
            for model_type in &recipe.model_types {
                assert!(!seen.contains(model_type), "{model_type} twice");
                assert_eq!(builtin(model_type).unwrap().family, *name);
                seen.push(model_type.clone());
            }
        }
        assert!(builtin("abacus").is_none());
        assert!(PROVED.iter().all(|(name, ..)| FAMILIES.iter().any(|(family, _)| family == name)));
    }
}
