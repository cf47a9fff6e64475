//! Against vLLM's own parameter classes: what they load of a linear layer on every rank is, byte for byte, what packing for
//! `--target vllm` writes: fused, grouped heads shared by several ranks, and quantised.
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
const MODELS: [&str; 4] = ["llama", "llama-fp8-block", "llama-awq", "llama-gptq"];
const RANKS: [u32; 2] = [2, 4];

fn main() -> ExitCode {
    let cases = MODELS.iter().flat_map(|model| RANKS.map(|ranks| (*model, ranks)));
    let trials = cases.map(|(model, ranks)| {
        trial(WHERE, format!("vllm/{model}/tp{ranks}"), move |dir| same_parameters(&dir.join(model), ranks))
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn same_parameters(model: &Path, ranks: u32) -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let parallel = Parallel { tp: ranks, ..Parallel::default() };
    // Experimental: embeddings, whose loader needs what is not there, are not compared.
    let layout =
        LayoutOptions { parallel, target: Target::Vllm, experimental: true, ..LayoutOptions::default() };
    let checkpoint = support::open(&model.join("model.safetensors"))?;
    pack_ranks(&checkpoint, &dir.path().join("i"), &layout, &PackOptions::default(), &())?;
    for rank in Image::open(&dir.path().join("i"))?.ranks() {
        let tp = rank.coordinate.tp;
        let theirs = model.join(format!("tp-{ranks}/rank-{tp}.safetensors"));
        let (count, _) = same_tensors(rank, &theirs, &format!("rank {tp} of {ranks}"))?;
        assert!(count >= 8, "four linear layers of two layers at least");
    }
    Ok(())
}
