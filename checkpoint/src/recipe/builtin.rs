//! The recipes that come with this crate, one file a family under `families/`, and which of them are proved.

use super::{Recipe, Target};

macro_rules! families {
    ($($name:literal)*) => {
        /// Each family's name and its text.
        const FAMILIES: &[(&str, &str)] = &[$(($name, include_str!(concat!("families/", $name, ".toml")))),*];
    };
}

families! { "llama" "qwen3_moe" "mixtral" "deepseek_v3" "gpt_oss" "deepseek_v4" "qwen3" "phi3" }

/// Whose cuts for which target were compared with what nobody here wrote: transformers' own tensor parallelism
/// (`checkpoint/tests/parallel_reference.rs`), the outputs of its modules run on each rank's part
/// (`checkpoint/tests/split_reference.rs`), the engines' own loaders (`checkpoint/tests/engine_reference.rs`), and for `deepseek_v4` the published table of what each rank reads and keeps
/// (`checkpoint/tests/seed_table.rs`).
const PROVED: &[(&str, Target)] = &[
    ("llama", Target::Checkpoint),
    ("llama", Target::Transformers),
    ("llama", Target::Vllm),
    ("llama", Target::Sglang),
    ("qwen3", Target::Checkpoint),
    ("qwen3", Target::Transformers),
    ("qwen3_moe", Target::Checkpoint),
    ("qwen3_moe", Target::Transformers),
    ("qwen3_moe", Target::Vllm),
    ("qwen3_moe", Target::Sglang),
    ("mixtral", Target::Checkpoint),
    ("mixtral", Target::Transformers),
    ("deepseek_v3", Target::Checkpoint),
    ("deepseek_v3", Target::Transformers),
    ("gpt_oss", Target::Checkpoint),
    ("gpt_oss", Target::Transformers),
    ("phi3", Target::Checkpoint),
    ("deepseek_v4", Target::Checkpoint),
];

/// The recipe for a `model_type`.
pub(crate) fn builtin(model_type: &str) -> Option<Recipe> {
    FAMILIES
        .iter()
        // Every text is parsed by a test, so none is lost here.
        .filter_map(|(name, text)| Recipe::parse(name, text).ok())
        .find(|recipe| recipe.model_types.iter().any(|known| known == model_type))
}

/// The families that have one, for a person.
pub(crate) fn families() -> String {
    FAMILIES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// Whether a built-in family's cuts for a target are proved.
pub(crate) fn proved(family: &str, target: Target) -> bool {
    PROVED.contains(&(family, target))
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
