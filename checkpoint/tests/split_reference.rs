//! Against parts that work: what packing writes for a rank is, byte for byte, a model that transformers loads and runs,
//! and whose outputs, summed over the ranks, are the whole model's.
//!
//! `xtask/python/make_split_references.py` makes models and parts and proves the parts by running them;
//! `FLASHBOOT_REFERENCE_MODELS_SPLIT` says where they are. Without it every case shows as ignored.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{Image, LayoutOptions, PackOptions, Parallel, pack_ranks};
use libtest_mimic::{Arguments, Failed};
use std::path::Path;
use std::process::ExitCode;
use support::references::{same_tensors, trial};
use tempfile::TempDir;

const WHERE: &str = "FLASHBOOT_REFERENCE_MODELS_SPLIT";
/// Models, and whether they have experts to spread.
const MODELS: [(&str, bool); 10] = [
    ("deepseek_v3", true),
    ("deepseek_v3-fp8", true),
    ("deepseek_v3-no-q-lora", true),
    ("gpt_oss", true),
    ("gpt_oss-mxfp4", true),
    ("llama", false),
    ("mixtral", true),
    ("phi3", false),
    ("qwen3", false),
    ("qwen3_moe", true),
];
/// Layouts, their ranks, and over how many groups experts are spread.
const LAYOUTS: [(&str, u32, u32); 3] = [("tp2", 2, 1), ("tp4", 4, 1), ("tp4-ep2", 4, 2)];

fn main() -> ExitCode {
    let cases = MODELS.iter().flat_map(|model| LAYOUTS.map(|layout| (*model, layout)));
    let trials = cases.filter(|((_, experts), (.., groups))| *experts || *groups == 1).map(
        |((model, _), (layout, tp, ep))| {
            trial(WHERE, format!("split/{model}/{layout}"), move |dir| {
                same_parts(&dir.join(model), layout, tp, ep)
            })
        },
    );
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn same_parts(model: &Path, layout: &str, tp: u32, ep: u32) -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let parallel = Parallel { tp, ep, ..Parallel::default() };
    // Nothing experimental: what is compared here is what counts as proved.
    let options = LayoutOptions { parallel, ..LayoutOptions::default() };
    let checkpoint = support::open(&model.join("model.safetensors"))?;
    pack_ranks(&checkpoint, &dir.path().join("i"), &options, &PackOptions::default(), &())?;
    let image = Image::open(&dir.path().join("i"))?;
    assert_eq!(image.ranks().len(), tp as usize);
    for rank in image.ranks() {
        let tp = rank.coordinate.tp;
        let theirs = model.join(layout).join(format!("rank-{tp}/model.safetensors"));
        let (count, parts) = same_tensors(rank, &theirs, &format!("rank {tp} of {layout}"))?;
        assert_eq!(rank.table.len(), count, "rank {tp} has nothing else");
        assert!(parts >= 10, "{parts} tensors are cut");
    }
    Ok(())
}
