//! Three layouts that people run, written down: which rank holds which layers, experts and shapes. The tables in
//! `golden/` were worked out by hand from what those layouts mean, and are compared with real images.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{Image, LayoutOptions, PackOptions, Parallel, RankImage, pack_ranks};
use std::collections::BTreeSet;
use support::models::{Sizes, qwen3_moe};
use support::open;
use tempfile::TempDir;

/// 4 layers, hidden 32, 8 heads of 4 with 2 key heads, 16 experts of 48, a vocabulary of 64.
fn sizes() -> Sizes {
    Sizes { experts: 16, vocab: 64, ..Sizes::default() }
}

/// One line: rank, tensors, layers, experts, and the shapes of one layer.
fn line(rank: &RankImage) -> String {
    let (mut layers, mut experts) = (BTreeSet::new(), BTreeSet::new());
    for tensor in rank.table.iter() {
        let parts: Vec<_> = tensor.name.split('.').collect();
        if parts[1] == "layers" {
            layers.insert(parts[2].parse::<u64>().unwrap());
        }
        if parts.len() > 6 {
            experts.insert(parts[5].parse::<u64>().unwrap());
        }
    }
    let first = layers.first().unwrap();
    let shape = |name: &str| match rank.table.find(name).and_then(|i| rank.table.at(i)) {
        Some(tensor) => format!("{:?}", tensor.shape),
        None => "-".into(),
    };
    let of_layer = |name: &str| shape(&format!("model.layers.{first}.{name}.weight"));
    let expert = experts.first().unwrap();
    format!(
        "{} | {} | {layers:?} | {experts:?} | q {} k {} o {} | up {} down {} | embed {} head {}",
        rank.coordinate,
        rank.table.len(),
        of_layer("self_attn.q_proj"),
        of_layer("self_attn.k_proj"),
        of_layer("self_attn.o_proj"),
        of_layer(&format!("mlp.experts.{expert}.up_proj")),
        of_layer(&format!("mlp.experts.{expert}.down_proj")),
        shape("model.embed_tokens.weight"),
        shape("lm_head.weight"),
    )
}

fn check(parallel: Parallel, golden: &str) {
    let dir = TempDir::new().unwrap();
    qwen3_moe(&sizes()).write(&dir.path().join("m"), 3);
    let layout = LayoutOptions { parallel, ..LayoutOptions::default() };
    let path = dir.path().join("i");
    pack_ranks(&open(&dir.path().join("m")).unwrap(), &path, &layout, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&path).unwrap();
    let found: Vec<_> = image.ranks().iter().map(line).collect();
    let wanted: Vec<_> = golden.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
    assert_eq!(found, wanted, "\n{}", found.join("\n"));
}

#[test]
fn eight_data_parallel_ranks_that_share_out_experts() {
    let parallel = Parallel { dp: 8, ep: 8, ..Parallel::default() };
    check(parallel, include_str!("golden/dp8-tp1-ep8.txt"));
}

#[test]
fn eight_tensor_parallel_ranks_that_share_out_experts() {
    let parallel = Parallel { tp: 8, ep: 8, ..Parallel::default() };
    check(parallel, include_str!("golden/tp8-ep8.txt"));
}

#[test]
fn four_tensor_parallel_ranks_on_each_of_two_stages() {
    let parallel = Parallel { tp: 4, pp: 2, ..Parallel::default() };
    check(parallel, include_str!("golden/tp4-pp2.txt"));
}
