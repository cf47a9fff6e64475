//! Against vLLM's own parameter classes: what they load of a linear layer on every rank is, byte for byte, what packing for
//! `--target vllm` writes: fused, grouped heads shared by several ranks, and quantised.
//!
//! `xtask/python/make_engine_references.py` makes models and parameters; `FLASHBOOT_REFERENCE_MODELS_ENGINES` says where they
//! are. Without it every case shows as ignored.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Coordinate, Image, LayoutOptions, ModelPart, PackOptions, Parallel, Target, pack_ranks,
};
use libtest_mimic::{Arguments, Failed, Trial};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tempfile::TempDir;

const WHERE: &str = "FLASHBOOT_REFERENCE_MODELS_ENGINES";
const MODELS: [&str; 4] = ["llama", "llama-fp8-block", "llama-awq", "llama-gptq"];
const RANKS: [u32; 2] = [2, 4];

fn main() -> ExitCode {
    let dir = std::env::var_os(WHERE).map(PathBuf::from);
    let cases = MODELS.iter().flat_map(|model| RANKS.map(|ranks| (*model, ranks)));
    let trials = cases.map(|(model, ranks)| {
        let name = format!("vllm/{model}/tp{ranks}");
        match &dir {
            Some(dir) => {
                let dir = dir.join(model);
                Trial::test(name, move || same_parameters(&dir, ranks))
            }
            None => {
                let reason = format!("{WHERE} is not set");
                let kind = format!("not run here: {reason}");
                Trial::test(name, move || Err(Failed::from(reason))).with_kind(kind).with_ignored_flag(true)
            }
        }
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
    let image = Image::open(&dir.path().join("i"))?;
    for tp in 0..ranks {
        let coordinate = Coordinate { model: ModelPart::Target, pp: 0, tp, ep: 0, dp: 0 };
        let rank = image.rank(coordinate).ok_or("no such rank")?;
        let payload = std::fs::read(&rank.path)?;
        let path = model.join(format!("tp-{ranks}/rank-{tp}.safetensors"));
        let (theirs, file) = (support::open(&path)?, std::fs::read(&path)?);
        let start = theirs.shards()[0].data_start();
        assert!(theirs.tensors().len() >= 8, "four linear layers of two layers at least");
        for tensor in theirs.tensors().iter() {
            let found = rank.table.find(tensor.name).and_then(|i| rank.table.at(i));
            let ours = found.ok_or_else(|| format!("{} is not on rank {tp}", tensor.name))?;
            let what = format!("{} on rank {tp} of {ranks}", tensor.name);
            assert_eq!((ours.dtype, ours.shape), (tensor.dtype, tensor.shape), "{what}");
            let bytes = |file: &[u8], at: u64| file[at as usize..(at + tensor.bytes) as usize].to_vec();
            assert!(bytes(&payload, ours.offset) == bytes(&file, start + tensor.begin), "{what}");
        }
    }
    Ok(())
}
