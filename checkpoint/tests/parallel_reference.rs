//! Against transformers' own tensor parallelism: every parameter's local shard on every rank is, byte for byte, what
//! packing for that rank writes.
//!
//! The default cuts, of the checkpoint's own names, are held against the same shards; what transformers leaves whole and they
//! cut is listed here, family by family.
//!
//! `xtask/python/make_parallel_references.py` makes models and shards; `FLASHBOOT_REFERENCE_MODELS_PARALLEL` says where
//! they are. Without it every case shows as ignored.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Coordinate, Image, LayoutOptions, ModelPart, PackOptions, Parallel, Slicing, Target, UnpackOptions,
    VerifyOptions, pack_ranks, unpack, verify,
};
use libtest_mimic::{Arguments, Failed};
use std::path::Path;
use std::process::ExitCode;
use support::references::{same_tensors, trial};
use tempfile::TempDir;

const WHERE: &str = "FLASHBOOT_REFERENCE_MODELS_PARALLEL";
const FAMILIES: [&str; 6] = ["deepseek_v3", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe"];
const RANKS: [u32; 2] = [2, 4];

fn main() -> ExitCode {
    let mut trials = Vec::new();
    for family in FAMILIES {
        for ranks in RANKS {
            let name = format!("transformers/{family}/tp{ranks}");
            trials.push(trial(WHERE, name, move |dir| same_shards(&dir.join(family), ranks)));
        }
        for ranks in RANKS {
            let name = format!("checkpoint/{family}/tp{ranks}");
            trials.push(trial(WHERE, name, move |dir| same_cuts(&dir.join(family), family, ranks)));
        }
        trials.push(trial(WHERE, format!("round-trip/{family}"), move |dir| comes_back(&dir.join(family))));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn same_shards(model: &Path, ranks: u32) -> Result<(), Failed> {
    let shards = model.join(format!("tp-{ranks}"));
    if let Ok(said) = std::fs::read_to_string(shards.join("refused.txt")) {
        return Err(format!("transformers refused to shard it: {said}").into());
    }
    let dir = TempDir::new()?;
    let parallel = Parallel { tp: ranks, ..Parallel::default() };
    let layout = LayoutOptions { parallel, target: Target::Transformers, ..LayoutOptions::default() };
    pack_ranks(&support::open(model)?, &dir.path().join("i"), &layout, &PackOptions::default(), &())?;
    let image = Image::open(&dir.path().join("i"))?;
    assert!(verify(&image, &VerifyOptions::default(), &())?.ok);
    let mut cut = 0;
    for rank in image.ranks() {
        let tp = rank.coordinate.tp;
        let theirs = shards.join(format!("rank-{tp}.safetensors"));
        let (count, parts) = same_tensors(rank, &theirs, &format!("rank {tp} of {ranks}"))?;
        cut += parts;
        // Buffers are in the checkpoint and no parameters; everything else must be there.
        let buffers = rank.table.iter().filter(|t| t.name.ends_with("e_score_correction_bias")).count();
        assert_eq!(rank.table.len() - buffers, count, "rank {tp} has what theirs has");
    }
    assert!(cut > 0, "something was cut");
    Ok(())
}

/// What transformers leaves whole and the default cuts do not: that is proved in `split_reference.rs`.
fn left_whole(family: &str) -> &'static [&'static str] {
    match family {
        "deepseek_v3" => &["self_attn.q_b_proj.", "self_attn.kv_b_proj.", "self_attn.o_proj."],
        "gpt_oss" => &[
            "self_attn.q_proj.",
            "self_attn.k_proj.",
            "self_attn.v_proj.",
            "self_attn.o_proj.weight",
            "self_attn.sinks",
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        ],
        _ => &[],
    }
}

/// The default cuts, of the checkpoint's own tensors: each is the shard that transformers has of it, but for what
/// [`left_whole`] lists, and for keys and values where transformers cuts through a head.
fn same_cuts(model: &Path, family: &str, ranks: u32) -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let parallel = Parallel { tp: ranks, ..Parallel::default() };
    let layout = LayoutOptions { parallel, ..LayoutOptions::default() };
    pack_ranks(&support::open(model)?, &dir.path().join("i"), &layout, &PackOptions::default(), &())?;
    let image = Image::open(&dir.path().join("i"))?;
    // Two key heads in every model that has them: whole on two ranks, cut through by transformers on four.
    let through_heads = |name: &str| {
        ranks > 2 && (name.contains(".self_attn.k_proj.") || name.contains(".self_attn.v_proj."))
    };
    for tp in 0..ranks {
        let rank = image
            .rank(Coordinate { model: ModelPart::Target, pp: 0, tp, ep: 0, dp: 0 })
            .ok_or("no such rank")?;
        let payload = std::fs::read(&rank.path)?;
        let path = model.join(format!("tp-{ranks}/rank-{tp}.safetensors"));
        let (theirs, file) = (support::open(&path)?, std::fs::read(&path)?);
        let (mut same, mut others) = (0, std::collections::BTreeSet::new());
        for ours in rank.table.iter() {
            if ours.name.ends_with("e_score_correction_bias") || through_heads(ours.name) {
                continue;
            }
            let (name, part) = in_transformers(ours.name);
            let there = theirs.tensors().find(&name).and_then(|i| theirs.tensors().at(i));
            let there = there.ok_or_else(|| format!("{name} is not in transformers"))?;
            let start = (theirs.shards()[0].data_start() + there.begin) as usize;
            let mut bytes = &file[start..start + there.bytes as usize];
            if let Some((expert, half)) = part {
                let each = bytes.len() / there.shape[0] as usize;
                bytes = &bytes[expert * each..][..each];
                bytes = half.map_or(bytes, |half| &bytes[half * each / 2..][..each / 2]);
            }
            let own = &payload[ours.offset as usize..(ours.offset + ours.bytes) as usize];
            if own == bytes && (part.is_some() || ours.shape == there.shape) {
                same += 1;
            } else {
                let listed = left_whole(family).iter().find(|listed| ours.name.contains(*listed));
                others.insert(*listed.ok_or_else(|| format!("{} on rank {tp} of {ranks}", ours.name))?);
            }
        }
        assert!(same > 10, "{same} tensors are the same");
        let listed: std::collections::BTreeSet<_> =
            left_whole(family).iter().copied().filter(|name| !through_heads(&format!(".{name}"))).collect();
        assert_eq!(others, listed, "what is listed is what differs");
    }
    Ok(())
}

/// Where transformers has a tensor of the checkpoint: under which name, and of an expert's which one it is and which
/// half of gate and up.
fn in_transformers(name: &str) -> (String, Option<(usize, Option<usize>)>) {
    let name = name.replace(".block_sparse_moe.", ".mlp.");
    let Some((front, rest)) = name.split_once(".mlp.experts.") else { return (name, None) };
    let Some((expert, which)) = rest.split_once('.') else { return (name, None) };
    let (fused, half) = match which.trim_end_matches(".weight") {
        "gate_proj" | "w1" => ("gate_up_proj", Some(0)),
        "up_proj" | "w3" => ("gate_up_proj", Some(1)),
        _ => ("down_proj", None),
    };
    (format!("{front}.mlp.experts.{fused}"), Some((expert.parse().unwrap(), half)))
}

/// Real checkpoints through an expert-parallel, pipelined layout and back.
fn comes_back(model: &Path) -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let parallel = Parallel { tp: 2, dp: 2, ep: 2, pp: 2, moe_tp: None };
    let layout = LayoutOptions { parallel, slicing: Some(Slicing::All), ..LayoutOptions::default() };
    pack_ranks(&support::open(model)?, &dir.path().join("i"), &layout, &PackOptions::default(), &())?;
    let image = Image::open(&dir.path().join("i"))?;
    unpack(&image, &dir.path().join("b"), &UnpackOptions::default(), &())?;
    let mut files = support::tree(model);
    files.retain(|path, _| {
        let name = path.to_string_lossy();
        path.components().count() == 1
            && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"))
    });
    assert!(
        !files.is_empty() && support::tree(&dir.path().join("b")) == files,
        "what comes back is the checkpoint"
    );
    Ok(())
}
