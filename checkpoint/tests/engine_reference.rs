//! Against the engines' own weight loaders: what they make of a model on every rank is, byte for byte, what packing for
//! `--target vllm` or `sglang` writes: fused, grouped heads shared by several ranks, padded vocabularies, stacked experts,
//! and for vLLM quantised.
//!
//! `xtask/python/make_engine_references.py` makes models and parameters; `FLASHBOOT_REFERENCE_MODELS_ENGINES` says where they
//! are. Without it every case shows as ignored.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{Image, LayoutOptions, PackOptions, Parallel, Target, pack_ranks};
use libtest_mimic::{Arguments, Failed};
use std::path::Path;
use std::process::ExitCode;
use support::references::{same_tensors, trial};
use tempfile::TempDir;

const WHERE: &str = "FLASHBOOT_REFERENCE_MODELS_ENGINES";
/// Engines, and the models that they load.
const CASES: [(Target, &[&str]); 2] = [
    (Target::Vllm, &["llama", "llama-fp8-block", "llama-awq", "llama-gptq", "qwen3_moe"]),
    (Target::Sglang, &["llama", "qwen3_moe"]),
];
const RANKS: [u32; 2] = [2, 4];

fn main() -> ExitCode {
    let mut trials = Vec::new();
    for (target, models) in CASES {
        for (model, ranks) in models.iter().flat_map(|model| RANKS.map(|ranks| (*model, ranks))) {
            let name = format!("{target}/{model}/tp{ranks}");
            trials.push(trial(WHERE, name, move |dir| same_parameters(&dir.join(model), target, ranks)));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn same_parameters(model: &Path, target: Target, ranks: u32) -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let parallel = Parallel { tp: ranks, ..Parallel::default() };
    let layout = LayoutOptions { parallel, target, ..LayoutOptions::default() };
    let checkpoint = support::open(&model.join("model.safetensors"))?;
    pack_ranks(&checkpoint, &dir.path().join("i"), &layout, &PackOptions::default(), &())?;
    for rank in Image::open(&dir.path().join("i"))?.ranks() {
        let tp = rank.coordinate.tp;
        let theirs = model.join(format!("{target}/tp-{ranks}/rank-{tp}.safetensors"));
        let (count, _) = same_tensors(rank, &theirs, &format!("rank {tp} of {ranks}"))?;
        // What no engine cuts is not in theirs: norms and routers.
        let whole = |name: &str| name.contains("norm.") || name.ends_with("mlp.gate.weight");
        assert_eq!(rank.table.iter().filter(|t| !whole(t.name)).count(), count, "rank {tp} has nothing else");
    }
    Ok(())
}
