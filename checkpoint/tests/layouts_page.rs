//! The recipe that `docs/layouts.md` shows is one, and does what the page says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{Image, LayoutOptions, PackOptions, Parallel, Recipe, Target, pack_ranks};
use support::models::{Model, Sizes, llama};
use support::open;
use tempfile::TempDir;

const PAGE: &str = include_str!("../../docs/layouts.md");

fn shown() -> &'static str {
    let (_, rest) = PAGE.split_once("```toml\n").expect("the page shows a recipe");
    rest.split_once("```").expect("and ends it").0
}

/// A Llama under the names of the page.
fn tiny() -> Model {
    let mut model = llama(&Sizes { vocab: 64, ..Sizes::default() });
    model.set("model_type", "tiny");
    for tensor in &mut model.tensors {
        tensor.name = tensor
            .name
            .replace("self_attn", "attn")
            .replace("input_layernorm", "attn_norm")
            .replace("post_attention_layernorm", "mlp_norm");
    }
    model
}

#[test]
fn the_pages_recipe_splits_its_family() {
    let recipe = Recipe::parse("docs/layouts.md", shown()).unwrap();
    assert_eq!((recipe.family(), recipe.model_types()), ("tiny", ["tiny".to_owned()].as_slice()));
    assert!(shown().lines().filter(|l| !l.is_empty()).count() <= 20, "twenty lines, as its heading says");
    let dir = TempDir::new().unwrap();
    tiny().write(&dir.path().join("m"), 2);
    let shape = |target: Target, name: &str| {
        let parallel = Parallel { tp: 4, ..Parallel::default() };
        let recipe = Some(recipe.clone());
        let layout =
            LayoutOptions { parallel, recipe, experimental: true, target, ..LayoutOptions::default() };
        let path = dir.path().join(target.name());
        let options = PackOptions { replace: true, ..PackOptions::default() };
        pack_ranks(&open(&dir.path().join("m")).unwrap(), &path, &layout, &options, &()).unwrap();
        let image = Image::open(&path).unwrap();
        let table = &image.ranks()[3].table;
        table.at(table.find(name).unwrap_or_else(|| panic!("no {name}"))).unwrap().shape.to_vec()
    };
    for (name, wanted) in [
        ("model.layers.0.attn.q_proj.weight", [8, 32]),
        ("model.layers.0.attn.k_proj.weight", [4, 32]),
        ("model.layers.0.attn.o_proj.weight", [32, 8]),
        ("model.layers.3.mlp.down_proj.weight", [32, 12]),
        ("lm_head.weight", [16, 32]),
    ] {
        assert_eq!(shape(Target::Checkpoint, name), wanted, "{name}");
    }
    assert_eq!(shape(Target::Vllm, "model.layers.0.mlp.gate_up_proj.weight"), [24, 32]);
}
