//! Many ranks: whatever the model and the layout, the ranks' images are the checkpoint again, an image of one layout
//! is made into an image of any other, and what ranks share is there once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Coordinate, Error, ExpertMap, Image, LayoutOptions, ModelPart, OpenOptions, PackOptions, Parallel,
    Relayout, Slicing, Target, UnpackOptions, VerifyOptions, inspect, pack, pack_ranks, reshard, unpack,
    verify,
};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use support::models::{Model, Sizes, gpt_oss, llama, mixtral, qwen3_moe};
use support::{names, open, tree};
use tempfile::TempDir;

fn layout(tp: u32, dp: u32, ep: u32, pp: u32) -> LayoutOptions {
    LayoutOptions { parallel: Parallel { tp, dp, ep, pp, moe_tp: None }, ..LayoutOptions::default() }
}

/// A directory with a model `m` in it.
fn model_dir(model: &Model) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let at = dir.path().join("m");
    model.write(&at, 3);
    (dir, at)
}

fn packed(model: &Path, image: &Path, layout: &LayoutOptions) -> Result<Image, Error> {
    pack_ranks(&open(model).unwrap(), image, layout, &PackOptions::default(), &())?;
    Ok(Image::open(image).unwrap())
}

/// A rank's tensor: shape and bytes.
fn held(image: &Image, coordinate: Coordinate, name: &str) -> (Vec<u64>, Vec<u8>) {
    let rank = image.rank(coordinate).unwrap_or_else(|| panic!("no rank {coordinate}"));
    let tensor = rank.table.at(rank.table.find(name).unwrap_or_else(|| panic!("no {name}"))).unwrap();
    let payload = std::fs::read(&rank.path).unwrap();
    (tensor.shape.to_vec(), payload[tensor.offset as usize..(tensor.offset + tensor.bytes) as usize].to_vec())
}

fn at(pp: u32, tp: u32, ep: u32, dp: u32) -> Coordinate {
    Coordinate { model: ModelPart::Target, pp, tp, ep, dp }
}

/// Rows of a made tensor, by hand.
fn rows(model: &Model, name: &str, from: u64, to: u64) -> Vec<u8> {
    let made = model.find(name);
    let row = made.bytes.len() as u64 / made.shape[0];
    made.bytes[(from * row) as usize..(to * row) as usize].to_vec()
}

/// Columns of a made tensor of two dimensions, by hand.
fn columns(model: &Model, name: &str, from: u64, to: u64) -> Vec<u8> {
    let made = model.find(name);
    let width = made.dtype.bits() / 8;
    let row = (made.shape[1] * width) as usize;
    let (from, to) = ((from * width) as usize, (to * width) as usize);
    made.bytes.chunks(row).flat_map(|row| row[from..to].to_vec()).collect()
}

#[test]
fn a_rank_holds_its_rows_its_columns_and_what_everyone_has() {
    let sizes = Sizes::default();
    let model = qwen3_moe(&sizes);
    let (dir, m) = model_dir(&model);
    let image = packed(&m, &dir.path().join("i"), &layout(4, 1, 2, 1)).unwrap();
    for tp in 0..4u64 {
        let (ep, part) = (tp / 2, tp % 2);
        let rank = at(0, tp as u32, ep as u32, 0);
        let is = |name: &str, shape: &[u64], bytes: Vec<u8>| {
            assert_eq!(held(&image, rank, name), (shape.to_vec(), bytes), "{name} of {rank}");
        };
        let l = "model.layers.1";
        let q = format!("{l}.self_attn.q_proj.weight");
        is(&q, &[8, 32], rows(&model, &q, tp * 8, tp * 8 + 8));
        // Two heads for four ranks: each is on two of them.
        let k = format!("{l}.self_attn.k_proj.weight");
        is(&k, &[4, 32], rows(&model, &k, tp / 2 * 4, tp / 2 * 4 + 4));
        let o = format!("{l}.self_attn.o_proj.weight");
        is(&o, &[32, 8], columns(&model, &o, tp * 8, tp * 8 + 8));
        let norm = format!("{l}.self_attn.q_norm.weight");
        is(&norm, &[4], model.find(&norm).bytes.clone());
        // 50 rows of vocabulary: 13, 13, 13, 11.
        let (from, to) = (tp * 13, (tp * 13 + 13).min(50));
        is("lm_head.weight", &[to - from, 32], rows(&model, "lm_head.weight", from, to));
        // Half the experts, and of each half.
        for expert in 0..8 {
            let name = |w: &str| format!("{l}.mlp.experts.{expert}.{w}.weight");
            if expert / 4 != ep {
                assert!(image.rank(rank).unwrap().table.find(&name("up_proj")).is_none());
                continue;
            }
            is(&name("up_proj"), &[24, 32], rows(&model, &name("up_proj"), part * 24, part * 24 + 24));
            is(&name("down_proj"), &[32, 24], columns(&model, &name("down_proj"), part * 24, part * 24 + 24));
        }
    }
}

#[test]
fn blocks_that_a_cut_goes_through_keep_their_scale_on_both_sides() {
    // 48 outputs in blocks of 16 over two ranks: the cut at 24 goes through the second block.
    let model = llama(&Sizes { block: Some(16), ..Sizes::default() });
    let (dir, m) = model_dir(&model);
    let image = packed(&m, &dir.path().join("i"), &layout(2, 1, 1, 1)).unwrap();
    let name = |p: &str| format!("model.layers.0.mlp.up_proj.{p}");
    for (tp, from, to) in [(0, 0, 2), (1, 1, 3)] {
        let (shape, bytes) = held(&image, at(0, tp, 0, 0), &name("weight_scale_inv"));
        assert_eq!((shape, bytes), (vec![2, 2], rows(&model, &name("weight_scale_inv"), from, to)));
        let down = "model.layers.0.mlp.down_proj.weight_scale_inv";
        assert_eq!(held(&image, at(0, tp, 0, 0), down).1, columns(&model, down, from, to));
    }
    let back = dir.path().join("b");
    unpack(&image, &back, &UnpackOptions::default(), &()).unwrap();
    same_checkpoint(&m, &back);
}

/// Everything but what is no part of an image.
fn same_checkpoint(model: &Path, back: &Path) {
    let mut files = tree(model);
    files.retain(|path, _| path != Path::new("config.json"));
    assert!(files == tree(back), "unpacked ranks are the checkpoint, bit for bit");
}

#[test]
fn ranks_that_hold_the_same_share_a_file_and_all_are_counted() {
    let (dir, m) = model_dir(&qwen3_moe(&Sizes::default()));
    let i = dir.path().join("i");
    // Two data-parallel groups, and one expert group of two ranks: the groups are the same.
    let mut wanted = layout(2, 2, 1, 1);
    wanted.parallel.moe_tp = Some(2);
    let report = pack_ranks(&open(&m).unwrap(), &i, &wanted, &PackOptions::default(), &()).unwrap();
    assert_eq!((report.report.ranks, report.files), (4, 2));
    assert_eq!(names(&i).iter().filter(|n| n.ends_with(".img")).count(), 2);
    let image = Image::open(&i).unwrap();
    assert_eq!(image.ranks().len(), 4);
    assert_eq!(image.rank(at(0, 1, 0, 1)).unwrap().path, image.rank(at(0, 1, 0, 0)).unwrap().path);
    assert!(verify(&image, &VerifyOptions::default(), &()).unwrap().ok);
    assert_eq!(inspect(&i, &OpenOptions::default()).unwrap().ranks, 4);
    assert_eq!(image.metadata().layout.world.moe_tp, Some(2));
}

#[test]
fn packing_for_many_ranks_twice_gives_one_image_and_one_rank_is_what_it_was() {
    let (dir, m) = model_dir(&mixtral(&Sizes::default()));
    let path = |name: &str| dir.path().join(name);
    let one = packed(&m, &path("1"), &layout(2, 1, 1, 2)).unwrap();
    let two = packed(&m, &path("2"), &layout(2, 1, 1, 2)).unwrap();
    assert_eq!((one.id(), tree(&path("1"))), (two.id(), tree(&path("2"))));
    // The whole model as a layout of one rank has the payload that plain packing writes.
    packed(&m, &path("3"), &layout(1, 1, 1, 1)).unwrap();
    pack(&open(&m).unwrap(), &path("4"), &PackOptions::default(), &()).unwrap();
    let payload = |name: &str| std::fs::read(path(name).join("target-0-0-0-0.img")).unwrap();
    let table = |name: &str| std::fs::read(path(name).join("target-0-0-0-0.json")).unwrap();
    assert_eq!((payload("3"), table("3")), (payload("4"), table("4")));
}

#[test]
fn a_rank_of_another_layout_is_gathered_straight_out_of_an_image() {
    let (dir, m) = model_dir(&qwen3_moe(&Sizes { kv_heads: 8, ..Sizes::default() }));
    let four = packed(&m, &dir.path().join("4"), &layout(4, 1, 1, 1)).unwrap();
    let eight = packed(&m, &dir.path().join("8"), &layout(8, 1, 1, 1)).unwrap();
    let wanted = layout(8, 1, 1, 1);
    let relayout = Relayout::new(&four, &wanted).unwrap();
    let ranks = relayout.ranks().unwrap();
    assert_eq!(ranks.len(), 8);
    for (coordinate, bytes) in ranks {
        let payload = Mutex::new(vec![0u8; bytes as usize]);
        let take = |start: u64, bytes: &[u8]| {
            payload.lock().unwrap()[start as usize..start as usize + bytes.len()].copy_from_slice(bytes);
            Ok(())
        };
        assert_eq!(relayout.gather(coordinate, &take, &()).unwrap(), bytes);
        let there = std::fs::read(&eight.rank(coordinate).unwrap().path).unwrap();
        assert!(payload.into_inner().unwrap() == there, "{coordinate}");
    }
    assert!(relayout.gather(at(0, 8, 0, 0), &|_, _| Ok(()), &()).is_err());
}

#[test]
fn a_tied_head_is_on_both_ends_of_the_pipeline() {
    let mut model = llama(&Sizes::default());
    model.tensors.retain(|t| t.name != "lm_head.weight");
    model.set("tie_word_embeddings", true);
    let (dir, m) = model_dir(&model);
    let image = packed(&m, &dir.path().join("i"), &layout(1, 1, 1, 3)).unwrap();
    let has = |pp| image.rank(at(pp, 0, 0, 0)).unwrap().table.find("lm_head.weight").is_some();
    assert_eq!([has(0), has(1), has(2)], [true, false, true]);
    unpack(&image, &dir.path().join("b"), &UnpackOptions::default(), &()).unwrap();
    same_checkpoint(&m, &dir.path().join("b"));
}

#[test]
fn what_is_left_out_makes_an_image_that_is_not_unpacked() {
    let (dir, m) = model_dir(&llama(&Sizes::default()));
    let excluding = LayoutOptions { exclude: vec!["lm_head.*".into()], ..layout(2, 1, 1, 1) };
    let image = packed(&m, &dir.path().join("i"), &excluding).unwrap();
    assert!(image.ranks().iter().all(|rank| rank.table.find("lm_head.weight").is_none()));
    let refused = unpack(&image, &dir.path().join("b"), &UnpackOptions::default(), &()).unwrap_err();
    assert!(matches!(&refused, Error::NotUnpackable { .. }), "{refused:?}");
    assert!(refused.to_string().contains("`lm_head.weight`"), "{refused}");
    let refused = reshard(&image, &dir.path().join("r"), &layout(4, 1, 1, 1), &PackOptions::default(), &());
    assert!(refused.unwrap_err().to_string().contains("`lm_head.weight`"));
}

#[test]
fn an_engines_parameters_are_put_together_and_padded() {
    let model = qwen3_moe(&Sizes::default());
    let (dir, m) = model_dir(&model);
    let wanted = LayoutOptions { target: Target::Vllm, experimental: true, ..layout(4, 1, 2, 1) };
    let image = packed(&m, &dir.path().join("i"), &wanted).unwrap();
    let engine = image.metadata().fingerprint.engine.clone().unwrap();
    assert_eq!((engine.name.as_str(), engine.version.as_str()), ("vllm", "0.33.0"));
    for tp in 0..4u64 {
        let (ep, part) = (tp / 2, tp % 2);
        let rank = at(0, tp as u32, ep as u32, 0);
        let name = |e: u64, w: &str| format!("model.layers.2.mlp.experts.{e}.{w}.weight");
        let half = |e: u64, w: &str| rows(&model, &name(e, w), part * 24, part * 24 + 24);
        let own = ep * 4..ep * 4 + 4;
        let w13: Vec<u8> =
            own.clone().flat_map(|e| [half(e, "gate_proj"), half(e, "up_proj")].concat()).collect();
        assert!(
            held(&image, rank, "model.layers.2.mlp.experts.routed_experts.w13_weight")
                == (vec![4, 48, 32], w13),
            "{rank}"
        );
        let w2: Vec<u8> =
            own.flat_map(|e| columns(&model, &name(e, "down_proj"), part * 24, part * 24 + 24)).collect();
        assert!(
            held(&image, rank, "model.layers.2.mlp.experts.routed_experts.w2_weight")
                == (vec![4, 32, 24], w2),
            "{rank}"
        );
        // 50 rows of vocabulary are padded to 64: the last rank has two of its own.
        let mut embed = rows(&model, "model.embed_tokens.weight", tp * 16, (tp * 16 + 16).min(50));
        embed.resize(16 * 32 * 2, 0);
        assert!(held(&image, rank, "model.embed_tokens.weight") == (vec![16, 32], embed), "{rank}");
    }
    // Parameters of an engine serve another layout, and the checkpoint's own names.
    reshard(&image, &dir.path().join("r"), &layout(2, 1, 1, 2), &PackOptions::default(), &()).unwrap();
    packed(&m, &dir.path().join("p"), &layout(2, 1, 1, 2)).unwrap();
    assert!(tree(&dir.path().join("r")) == tree(&dir.path().join("p")));
}

#[test]
fn a_map_of_experts_says_which_slot_each_is_in() {
    let model = qwen3_moe(&Sizes { experts: 4, ..Sizes::default() });
    let (dir, m) = model_dir(&model);
    // Redundant and out of order, and another one for layer 3.
    let map = br#"{"groups": [[3, 0, 1], [2, 3, 0]], "layers": {"3": [[2, 1], [0, 3]]}}"#;
    let experts = ExpertMap::parse(map).unwrap();
    let wanted = LayoutOptions { target: Target::Vllm, experimental: true, experts, ..layout(2, 1, 2, 1) };
    let image = packed(&m, &dir.path().join("i"), &wanted).unwrap();
    for (layer, ep, slots) in
        [(0, 0, vec![3, 0, 1]), (0, 1, vec![2, 3, 0]), (3, 0, vec![2, 1]), (3, 1, vec![0, 3])]
    {
        let name = format!("model.layers.{layer}.mlp.experts.routed_experts.w2_weight");
        let down = |e: &u64| {
            model.find(&format!("model.layers.{layer}.mlp.experts.{e}.down_proj.weight")).bytes.clone()
        };
        let bytes: Vec<u8> = slots.iter().flat_map(down).collect();
        let found = held(&image, at(0, ep, ep, 0), &name);
        assert!(found == (vec![slots.len() as u64, 32, 48], bytes), "layer {layer}, group {ep}");
    }
}

#[test]
fn a_damaged_image_is_not_made_into_another() {
    let (dir, m) = model_dir(&llama(&Sizes::default()));
    let image = packed(&m, &dir.path().join("i"), &layout(2, 1, 1, 1)).unwrap();
    let path = image.rank(at(0, 1, 0, 0)).unwrap().path.clone();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[700] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let dest = dir.path().join("r");
    for refused in [
        reshard(&image, &dest, &layout(4, 1, 1, 1), &PackOptions::default(), &()).map(drop),
        unpack(&image, &dest, &UnpackOptions::default(), &()).map(drop),
    ] {
        assert!(matches!(refused, Err(Error::BadBlock { block: 0, .. })), "{refused:?}");
    }
    assert!(!dest.exists());
}

#[derive(Debug, Clone)]
struct Case {
    family: usize,
    sizes: Sizes,
    a: LayoutOptions,
    b: LayoutOptions,
    shards: usize,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let divisors = (prop::sample::select(vec![4u64, 8]), prop::sample::select(vec![1u64, 2, 4]), 1u64..4);
    let counts = (1u64..5, prop::sample::select(vec![4u64, 6, 8]), 3u64..40);
    (divisors, counts, prop::option::of(prop::sample::select(vec![4u64, 16]))).prop_map(
        |((heads, kv_heads, mlp), (layers, experts, vocab), block)| Sizes {
            layers,
            hidden: 16,
            heads,
            kv_heads,
            head: 4,
            mlp: 16 * mlp,
            experts,
            vocab,
            block,
        },
    )
}

fn layouts() -> impl Strategy<Value = LayoutOptions> {
    let power = || prop::sample::select(vec![1u32, 2, 4]);
    (power(), 1u32..3, power(), 1u32..4, any::<bool>(), 0usize..4, 0usize..4).prop_map(
        |(tp, dp, ep, pp, alone, map, slicing)| {
            let moe_tp = alone.then_some(1);
            let experts = match map {
                0 => ExpertMap::RoundRobin,
                // Redundant, out of order: every group has the first expert, at another place.
                1 => ExpertMap::Explicit {
                    groups: (0..ep)
                        .map(|g| {
                            let mut own: Vec<u32> = (0..4).filter(|e| e % ep == g || *e == 0).collect();
                            let by = g as usize % own.len().max(1);
                            own.rotate_left(by);
                            own
                        })
                        .collect(),
                    layers: Default::default(),
                },
                _ => ExpertMap::Contiguous,
            };
            let slicing = [None, None, Some(Slicing::Experts), Some(Slicing::Off)][slicing];
            LayoutOptions {
                parallel: Parallel { tp, dp, ep, moe_tp, pp },
                experts,
                slicing,
                // gpt-oss' attention and experts are proved here only.
                experimental: true,
                ..LayoutOptions::default()
            }
        },
    )
}

fn cases() -> impl Strategy<Value = Case> {
    (0usize..4, sizes(), layouts(), layouts(), 1usize..4).prop_map(|(family, mut sizes, a, b, shards)| {
        // The explicit maps above are of four experts.
        if [&a, &b].iter().any(|l| matches!(l.experts, ExpertMap::Explicit { .. })) {
            sizes.experts = 4;
        }
        Case { family, sizes, a, b, shards }
    })
}

/// Whether a layout was refused for its numbers, which random ones may be.
fn is_refused_for_its_numbers(e: &Error) -> bool {
    use flashboot_checkpoint::Refused as R;
    matches!(e, Error::Refused(R::World { .. } | R::Indivisible { .. } | R::Stages { .. }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn random_models_in_random_layouts_come_back_and_become_one_another(case in cases()) {
        let make = [llama, qwen3_moe, mixtral, gpt_oss][case.family];
        let model = make(&case.sizes);
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        model.write(&path("m"), case.shards);
        let images: Vec<_> = [("a", &case.a), ("b", &case.b)]
            .into_iter()
            .map(|(name, layout)| packed(&path("m"), &path(name), layout))
            .collect();
        for image in &images {
            match image {
                Ok(image) => {
                    prop_assert!(verify(image, &VerifyOptions::default(), &()).unwrap().ok);
                    unpack(image, &path("back"), &UnpackOptions { replace: true, ..UnpackOptions::default() }, &()).unwrap();
                    same_checkpoint(&path("m"), &path("back"));
                }
                Err(e) => prop_assert!(is_refused_for_its_numbers(e), "{e}"),
            }
        }
        if let [Ok(a), Ok(_)] = images.as_slice() {
            reshard(a, &path("r"), &case.b, &PackOptions::default(), &()).unwrap();
            prop_assert!(tree(&path("r")) == tree(&path("b")), "what resharding writes is what packing does");
        }
    }
}
