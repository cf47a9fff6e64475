//! What cannot be laid out is refused, by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    CostOptions, Error, ExpertMap, Image, LayoutOptions, PackOptions, Parallel, PlanReport, Recipe, Refused,
    Slicing, Target, pack_ranks, plan,
};
use flashboot_core::{Dtype, Kind};
use std::path::PathBuf;
use support::models::{Model, Sizes, gpt_oss, llama, qwen3_moe};
use support::open;
use tempfile::TempDir;

fn tp(tp: u32) -> LayoutOptions {
    LayoutOptions { parallel: Parallel { tp, ..Parallel::default() }, ..LayoutOptions::default() }
}

fn planned(model: &Model, layout: &LayoutOptions) -> Result<PlanReport, Error> {
    let dir = TempDir::new().unwrap();
    model.write(dir.path(), 2);
    plan(&open(dir.path()).unwrap(), layout, &CostOptions::default())
}

/// The refusal and its text.
fn refused(model: &Model, layout: &LayoutOptions) -> (Refused, String) {
    let e = planned(model, layout).unwrap_err();
    assert_eq!((e.kind(), e.op()), (Kind::Mismatch, "plan"), "{e}");
    assert!(e.remedy().is_some(), "{e}");
    let Error::Refused(refused) = e.clone() else { panic!("{e:?}") };
    (refused, e.to_string())
}

fn sizes() -> Sizes {
    Sizes { layers: 2, ..Sizes::default() }
}

#[test]
fn dimensions_that_do_not_divide_are_named_with_their_sizes() {
    let (what, text) = refused(&llama(&Sizes { mlp: 50, ..sizes() }), &tp(4));
    assert!(matches!(what, Refused::Indivisible { parts: 4, .. }), "{what:?}");
    assert!(text.contains("`model.layers.0.mlp.gate_proj.weight (50 is no multiple of 4)`"), "{text}");
    // Three heads do not fit two ranks, and two ranks do not share three key heads.
    let (_, text) = refused(&llama(&Sizes { heads: 3, kv_heads: 3, ..sizes() }), &tp(2));
    assert!(text.contains("q_proj.weight (3 is no multiple of 2)"), "{text}");
    let (_, text) = refused(&llama(&Sizes { heads: 8, kv_heads: 3, ..sizes() }), &tp(4));
    assert!(text.contains("k_proj.weight (4 is no multiple of 3)"), "{text}");
    assert!(
        planned(
            &llama(&Sizes { mlp: 50, ..sizes() }),
            &LayoutOptions { slicing: Some(Slicing::Off), ..tp(4) }
        )
        .is_ok()
    );
}

#[test]
fn a_config_that_names_no_family_is_what_is_refused() {
    let mut model = qwen3_moe(&sizes());
    model.set("model_type", serde_json::Value::Null);
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(what, Refused::NoFamily { .. }), "{what:?}");
    assert!(text.contains("names no model_type") && text.contains("--recipe"), "{text}");
}

#[test]
fn heads_that_are_no_number_are_not_taken_for_the_default() {
    let mut model = llama(&sizes());
    model.set("num_key_value_heads", -1);
    let (_, text) = refused(&model, &tp(2));
    assert!(text.contains("`num_key_value_heads`"), "{text}");
}

#[test]
fn an_unknown_family_splits_nothing_and_says_so_only_when_asked_for() {
    let mut model = qwen3_moe(&sizes());
    model.set("model_type", "abacus");
    let split = LayoutOptions {
        parallel: Parallel { tp: 2, ep: 2, ..Parallel::default() },
        ..LayoutOptions::default()
    };
    let (what, text) = refused(&model, &split);
    assert_eq!(what, Refused::UnknownFamily { model_type: "abacus".into() });
    assert!(text.contains("--experimental"), "{text}");
    let report = planned(&model, &LayoutOptions { experimental: true, ..split }).unwrap();
    assert_eq!((report.family.as_str(), report.slicing), ("unknown", Slicing::Off));
    assert!(
        report.notes.iter().any(|n| n.contains("`abacus`") && n.contains("whole on every rank")),
        "{:?}",
        report.notes
    );
    let whole: u64 =
        model.tensors.iter().filter(|t| !t.name.contains(".experts.")).map(|t| t.bytes.len() as u64).sum();
    let experts: u64 =
        model.tensors.iter().filter(|t| t.name.contains(".experts.")).map(|t| t.bytes.len() as u64).sum();
    assert!(
        report.ranks.iter().all(|r| r.target.bytes_kept == whole + experts / 2),
        "owned experts, and the rest"
    );
    // Without a layout nothing is asked of the family.
    assert!(planned(&model, &LayoutOptions::default()).is_ok());
}

#[test]
fn a_recipe_of_ones_own_and_an_unproved_target_need_to_be_asked_for() {
    let model = llama(&sizes());
    let own = Recipe::parse("own.toml", "family = \"own\"\nmodel_types = [\"llama\"]\nrest = \"replicated\"")
        .unwrap();
    let layout = LayoutOptions { recipe: Some(own), ..tp(2) };
    assert!(matches!(refused(&model, &layout).0, Refused::NotProved { .. }));
    assert!(planned(&model, &LayoutOptions { experimental: true, ..layout }).is_ok());
    let mut other = qwen3_moe(&sizes());
    other.set("model_type", "deepseek_v4");
    let none = LayoutOptions { target: Target::Vllm, experimental: true, ..tp(2) };
    assert!(matches!(refused(&other, &none).0, Refused::NoTarget { target: "vllm", .. }));
}

#[test]
fn an_unknown_quantisation_is_refused_unless_nothing_is_cut() {
    let mut model = llama(&sizes());
    model.set("quantization_config", serde_json::json!({ "quant_method": "abacus" }));
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(what, Refused::UnknownQuantisation { .. }) && text.contains("`abacus`"), "{text}");
    assert!(planned(&model, &LayoutOptions { slicing: Some(Slicing::Off), ..tp(2) }).is_ok());
}

#[test]
fn a_missing_scale_and_a_scale_of_the_wrong_shape_are_named() {
    let sizes = Sizes { block: Some(16), ..sizes() };
    let mut model = llama(&sizes);
    model.tensors.retain(|t| t.name != "model.layers.1.mlp.up_proj.weight_scale_inv");
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(what, Refused::MissingScale { .. }), "{what:?}");
    assert!(text.contains("`model.layers.1.mlp.up_proj.weight`") && !text.contains("layers.0"), "{text}");
    let mut model = llama(&sizes);
    model.tensors.retain(|t| t.name != "model.layers.1.mlp.up_proj.weight_scale_inv");
    model.add("model.layers.1.mlp.up_proj.weight_scale_inv", Dtype::F32, &[3, 3]);
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(what, Refused::Shape { .. }), "{what:?}");
    assert!(text.contains("weight_scale_inv (needed: in dimension 1 2, and not 3)"), "{text}");
    let mut model = llama(&sizes);
    model.add("model.layers.1.mlp.up_proj.weight_colour", Dtype::F32, &[3, 3]);
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(what, Refused::UnknownParameter { .. }) && text.contains("weight_colour"), "{text}");
}

#[test]
fn experts_that_the_config_does_not_count_are_named() {
    let mut model = qwen3_moe(&sizes());
    model.set("num_experts", 16);
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(&what, Refused::ExpertCount { needed: 16, found: 8, .. }), "{what:?}");
    assert!(text.contains("`model.layers.0.mlp.experts.7.gate_proj.weight`"), "{text}");
    let mut model = qwen3_moe(&sizes());
    model.config.remove("num_experts");
    assert_eq!(
        refused(&model, &tp(2)).0,
        Refused::NoFact { family: "qwen3_moe".into(), key: "num_experts".into() }
    );
    let mut model = llama(&sizes());
    model.config.remove("num_attention_heads");
    assert_eq!(
        refused(&model, &tp(2)).0,
        Refused::NoFact { family: "llama".into(), key: "num_attention_heads".into() }
    );
}

#[test]
fn layers_that_no_stage_would_hold_are_named_and_so_are_missing_ones() {
    // Packed, they would be on no rank at all.
    for said in [0, 1] {
        let mut model = llama(&sizes());
        model.set("num_hidden_layers", said);
        for layout in [tp(2), LayoutOptions::default()] {
            let (what, text) = refused(&model, &layout);
            assert!(matches!(&what, Refused::LayerCount { found: 2, .. }), "{what:?}");
            assert!(text.contains(&format!("`model.layers.{said}.")), "{text}");
        }
    }
    let mut model = llama(&sizes());
    model.set("num_hidden_layers", u64::MAX);
    assert!(matches!(refused(&model, &tp(2)).0, Refused::LayerCount { said: u64::MAX, found: 2, .. }));
    // What is left out on purpose is not missing, and a config may say nothing.
    let mut model = llama(&sizes());
    let excluding = LayoutOptions { exclude: vec!["model.layers.1.*".into()], ..tp(2) };
    assert!(planned(&model, &excluding).is_ok());
    model.config.remove("num_hidden_layers");
    assert!(planned(&model, &tp(2)).is_ok());
}

#[test]
fn experts_with_gaps_or_far_too_many_are_refused_before_anything_is_made_of_their_number() {
    let ep = |experimental| LayoutOptions {
        parallel: Parallel { tp: 2, ep: 2, ..Parallel::default() },
        experimental,
        ..LayoutOptions::default()
    };
    let mut model = qwen3_moe(&sizes());
    model.tensors.retain(|t| !t.name.contains("layers.1.mlp.experts.3."));
    let (what, text) = refused(&model, &ep(false));
    assert!(matches!(what, Refused::Experts { .. }), "{what:?}");
    assert!(text.contains("layer 1 has an expert 7 and no expert 3"), "{text}");
    let excluding = LayoutOptions { exclude: vec!["*.experts.3.*".into()], ..ep(false) };
    assert!(planned(&qwen3_moe(&sizes()), &excluding).is_ok(), "left out on purpose");
    // Nobody says how many there are; one name alone must not ask for gigabytes.
    let mut model = qwen3_moe(&sizes());
    model.set("model_type", "abacus");
    for expert in [u32::MAX, u32::MAX - 1, 70_000] {
        let mut model = model.clone();
        model.add(&format!("model.layers.0.mlp.experts.{expert}.up_proj.weight"), Dtype::Bf16, &[4, 4]);
        let (what, text) = refused(&model, &ep(true));
        assert!(matches!(what, Refused::Experts { .. }) && text.contains("no expert 8"), "{text}");
    }
    let stacked = "family = \"own\"\nmodel_types = [\"own\"]\nrest = \"replicated\"\nrules = [\n\
        { names = [\"**.experts.up_proj\"], split = \"column\" }]";
    let with_recipe = LayoutOptions { recipe: Some(Recipe::parse("own.toml", stacked).unwrap()), ..ep(true) };
    for (shapes, wanted) in [
        // Experts 4 to 7 of a layer that has four would be its neighbour's bytes.
        ([[4, 8, 4], [8, 8, 4]], "some layers stack 4 experts and others have 8"),
        ([[1 << 40, 8, 0], [1 << 40, 8, 0]], "1099511627776 experts, at most 65536"),
    ] {
        let mut model = Model::default();
        for (layer, shape) in shapes.iter().enumerate() {
            model.add(&format!("model.layers.{layer}.mlp.experts.up_proj"), Dtype::Bf16, shape);
        }
        let (what, text) = refused(&model, &with_recipe);
        assert!(matches!(what, Refused::Experts { .. }) && text.contains(wanted), "{text}");
    }
}

#[test]
fn a_tensor_that_one_expert_lacks_is_named_whatever_the_target() {
    let missing = "model.layers.1.mlp.experts.3.up_proj.weight";
    let mut model = qwen3_moe(&sizes());
    model.tensors.retain(|t| t.name != missing);
    let spread = Parallel { tp: 2, ep: 2, ..Parallel::default() };
    let layouts = [
        tp(2),
        LayoutOptions { parallel: spread, ..LayoutOptions::default() },
        LayoutOptions { target: Target::Transformers, ..tp(2) },
        LayoutOptions { slicing: Some(Slicing::Off), ..tp(2) },
    ];
    for layout in &layouts {
        let (what, text) = refused(&model, layout);
        assert!(matches!(&what, Refused::ExpertsDiffer { layer: 1, names } if names.count == 1), "{what:?}");
        assert!(text.contains(&format!("`{missing}`")), "{text}");
    }
    // A family nobody knows has experts too.
    model.set("model_type", "abacus");
    let (what, _) = refused(&model, &LayoutOptions { experimental: true, ..layouts[1].clone() });
    assert!(matches!(&what, Refused::ExpertsDiffer { layer: 1, .. }), "{what:?}");
    // What calibration left beside some experts only is not missed, nor what is left out on purpose.
    let mut model = qwen3_moe(&sizes());
    model.add("model.layers.1.mlp.experts.3.up_proj.input_scale", Dtype::F32, &[]);
    let off = LayoutOptions { slicing: Some(Slicing::Off), ..tp(2) };
    assert!(planned(&model, &off).is_ok());
    let excluding = LayoutOptions { exclude: vec![missing.into()], ..tp(2) };
    assert!(planned(&qwen3_moe(&sizes()), &excluding).is_ok());
}

#[test]
fn unclaimed_and_doubly_claimed_tensors_are_listed_by_name() {
    let mut model = llama(&sizes());
    model.add("vision.patch.weight", Dtype::Bf16, &[4, 4]);
    model.add("vision.patch.bias", Dtype::Bf16, &[4]);
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(&what, Refused::Unclaimed { names, .. } if names.count == 2), "{what:?}");
    assert!(
        text.contains("`vision.patch.weight`, `vision.patch.bias`") && text.contains("--allow-unclaimed"),
        "{text}"
    );
    let report = planned(&model, &LayoutOptions { allow_unclaimed: true, ..tp(2) }).unwrap();
    assert_eq!(report.ranks[0].target.tensors, model.tensors.len() as u64, "kept, whole");
    let twice = "family = \"own\"\nmodel_types = [\"llama\"]\nrest = \"replicated\"\nrules = [\n\
        { names = [\"**.up_proj\"], split = \"column\" },\n{ names = [\"model.layers.*.mlp.*\"], split = \"row\" }]";
    let recipe = Some(Recipe::parse("own.toml", twice).unwrap());
    let (what, text) = refused(&model, &LayoutOptions { recipe, experimental: true, ..tp(2) });
    assert!(matches!(&what, Refused::ClaimedTwice { names, .. } if names.count == 2), "{what:?}");
    let wanted = "`model.layers.0.mlp.up_proj.weight` (by `**.up_proj` and `model.layers.*.mlp.*`)";
    assert!(text.contains(wanted), "{text}");
}

#[test]
fn worlds_stages_and_maps_that_do_not_work_are_refused() {
    let model = qwen3_moe(&sizes());
    let with = |parallel: Parallel| LayoutOptions { parallel, ..LayoutOptions::default() };
    let one = Parallel::default();
    assert!(matches!(refused(&model, &with(Parallel { tp: 4, ep: 3, ..one })).0, Refused::World { .. }));
    assert!(matches!(refused(&model, &with(Parallel { pp: 3, ..one })).0, Refused::Stages { .. }));
    let uneven = LayoutOptions { stage_layers: Some(vec![2, 1]), ..with(Parallel { pp: 2, ..one }) };
    assert!(matches!(refused(&model, &uneven).0, Refused::Stages { .. }));
    let map = |json: &str| LayoutOptions {
        experts: ExpertMap::parse(json.as_bytes()).unwrap(),
        ..with(Parallel { tp: 2, ep: 2, ..one })
    };
    let (what, text) = refused(&model, &map(r#"{"groups": [[0,1,2,3],[4,5,6]]}"#));
    assert!(matches!(what, Refused::ExpertMap { .. }) && text.contains("leaves out expert 7"), "{text}");
    assert!(planned(&model, &map(r#"{"groups": [[0,1,2,3,7],[4,5,6,7,0]]}"#)).is_ok());
}

#[test]
fn parts_that_do_not_fit_one_parameter_are_refused() {
    let vllm = LayoutOptions { target: Target::Vllm, experimental: true, ..tp(2) };
    // By the family's own recipe a model without the tensor is no model of it.
    let family = include_str!("../src/recipe/families/llama.toml").lines();
    let family = family.filter(|line| !line.starts_with("needs.")).collect::<Vec<_>>().join("\n");
    let vllm = LayoutOptions { recipe: Some(Recipe::parse("llama", &family).unwrap()), ..vllm };
    let mut model = llama(&sizes());
    model.tensors.retain(|t| t.name != "model.layers.1.self_attn.k_proj.weight");
    let dir = TempDir::new().unwrap();
    model.write(dir.path(), 1);
    let pack = |layout: &LayoutOptions| {
        let dest: PathBuf = dir.path().join("i");
        let e =
            pack_ranks(&open(dir.path()).unwrap(), &dest, layout, &PackOptions::default(), &()).unwrap_err();
        assert!(!dest.exists());
        e.to_string()
    };
    let text = pack(&vllm);
    assert!(text.contains("`model.layers.1.self_attn.qkv_proj.weight`") && text.contains("part 1"), "{text}");
    assert!(pack(&LayoutOptions { slicing: Some(Slicing::Off), ..vllm }).contains("slicing is `off`"));
}

#[test]
fn a_stage_that_an_engine_changed_is_neither_resharded_nor_unpacked() {
    let dir = TempDir::new().unwrap();
    let model = llama(&sizes());
    model.write(&dir.path().join("m"), 1);
    let layout = LayoutOptions { target: Target::Transformers, ..tp(2) };
    let path = dir.path().join("i");
    pack_ranks(&open(&dir.path().join("m")).unwrap(), &path, &layout, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&path).unwrap();
    let back =
        flashboot_checkpoint::unpack(&image, &dir.path().join("b"), &Default::default(), &()).unwrap_err();
    assert!(matches!(back, Error::NotUnpackable { .. }), "{back:?}");
    // Parameters of an engine are still the checkpoint's bytes: they serve any layout.
    flashboot_checkpoint::reshard(&image, &dir.path().join("r"), &tp(4), &PackOptions::default(), &())
        .unwrap();
    let kernel = flashboot_checkpoint::Kernel {
        compute_capability: "9.0".into(),
        backends: vec![],
        torch: "2".into(),
        kv_dtype: "bf16".into(),
    };
    support::restage(&path, |f| {
        f.stage = flashboot_checkpoint::Stage::KernelReady;
        f.kernel = Some(kernel);
    });
    let image = Image::open(&path).unwrap();
    let refused =
        flashboot_checkpoint::reshard(&image, &dir.path().join("k"), &tp(4), &PackOptions::default(), &());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("kernel-ready"), "{text}");
}

/// Without the tensors that `gone` says.
fn without(mut model: Model, gone: impl Fn(&str) -> bool) -> Model {
    model.tensors.retain(|t| !gone(&t.name));
    model
}

#[test]
fn a_projection_that_every_expert_lacks_is_named_for_every_layer() {
    let model = without(qwen3_moe(&sizes()), |name| name.ends_with("up_proj.weight"));
    for layout in [tp(1), tp(2)] {
        let (what, text) = refused(&model, &layout);
        assert!(matches!(&what, Refused::Lacking { names, .. } if names.count == 2), "{what:?}");
        assert!(
            text.contains("`model.layers.0.mlp.experts.*.up_proj`, `model.layers.1.mlp.experts.*.up_proj`"),
            "{text}"
        );
    }
    let model = without(qwen3_moe(&sizes()), |name| name.contains(".experts."));
    let (_, text) = refused(&model, &tp(2));
    assert!(
        text.contains("`model.layers.0.mlp.gate_proj`"),
        "a layer without experts is a dense one: {text}"
    );
    let model = without(gpt_oss(&sizes()), |name| name.contains(".down_proj"));
    let (_, text) = refused(&model, &tp(2));
    assert!(text.contains("`model.layers.1.mlp.experts.down_proj`"), "{text}");
}

#[test]
fn a_dense_module_that_is_missing_everywhere_or_in_one_layer_is_named() {
    for (gone, wanted) in [
        (".self_attn.o_proj.weight", "`model.layers.0.self_attn.o_proj`, `model.layers.1.self_attn.o_proj`"),
        (
            "layers.1.mlp.gate_proj.weight",
            "there, and no tensor of the checkpoint is their weight: `model.layers.1.mlp.gate_proj`;",
        ),
        ("model.embed_tokens.weight", ": `model.embed_tokens`;"),
        ("model.norm.weight", ": `model.norm`;"),
    ] {
        let (what, text) = refused(&without(llama(&sizes()), |name| name.ends_with(gone)), &tp(2));
        assert!(matches!(what, Refused::Lacking { .. }), "{what:?}");
        assert!(text.contains(wanted), "{text}");
    }
    // A head may be tied, and what is left out on purpose is there.
    assert!(planned(&without(llama(&sizes()), |name| name.starts_with("lm_head")), &tp(2)).is_ok());
    let layout = LayoutOptions { exclude: vec!["*.o_proj.weight".into()], ..tp(2) };
    assert!(planned(&llama(&sizes()), &layout).is_ok());
}

#[test]
fn a_fused_projection_that_may_stay_whole_is_a_note_in_place_of_what_it_is_fused_of() {
    let mut model =
        without(llama(&sizes()), |name| ["q_proj", "k_proj", "v_proj"].iter().any(|p| name.contains(p)));
    for layer in 0..2 {
        model.add(&format!("model.layers.{layer}.self_attn.qkv_proj.weight"), Dtype::Bf16, &[96, 64]);
    }
    assert!(matches!(refused(&model, &tp(2)).0, Refused::Unclaimed { .. }));
    let allowing = LayoutOptions { allow_unclaimed: true, ..tp(2) };
    let report = planned(&model, &allowing).unwrap();
    let asked = |note: &String| {
        note.contains("`llama` asks for") && note.contains("`model.layers.0.self_attn.q_proj`")
    };
    assert!(report.notes.iter().any(asked), "{:?}", report.notes);
    // Where everything is claimed, leave to keep the unclaimed excuses nothing.
    let model = without(llama(&sizes()), |name| name.contains("q_proj"));
    assert!(matches!(refused(&model, &allowing).0, Refused::Lacking { .. }));
}

#[test]
fn an_image_packed_without_a_module_is_cut_again() {
    let dir = TempDir::new().unwrap();
    llama(&sizes()).write(&dir.path().join("m"), 1);
    let layout = LayoutOptions { exclude: vec!["*.o_proj.weight".into()], ..tp(2) };
    let path = dir.path().join("i");
    pack_ranks(&open(&dir.path().join("m")).unwrap(), &path, &layout, &PackOptions::default(), &()).unwrap();
    let again = LayoutOptions { exclude: layout.exclude.clone(), ..tp(4) };
    let image = Image::open(&path).unwrap();
    let made =
        flashboot_checkpoint::reshard(&image, &dir.path().join("r"), &again, &PackOptions::default(), &());
    assert_eq!(made.unwrap().report.ranks, 4);
}

#[test]
fn a_vocabulary_larger_than_the_embedding_is_refused_and_a_padded_one_is_not() {
    let mut model = llama(&sizes());
    for smaller in [1, 49, 50] {
        model.set("vocab_size", smaller);
        assert!(planned(&model, &tp(2)).is_ok(), "{smaller} tokens in 50 rows");
    }
    model.set("vocab_size", 51);
    let (what, text) = refused(&model, &tp(2));
    assert!(matches!(what, Refused::Vocabulary { said: 51, .. }), "{what:?}");
    assert!(text.contains("`model.embed_tokens.weight (50 rows)`, `lm_head.weight (50 rows)`"), "{text}");
}
