//! How an image was cut for its ranks is no difference between models; what is in it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    DiffReport, DifferenceKind, Error, Image, LayoutOptions, OpenOptions, PackOptions, Parallel, Target,
    diff, pack_ranks,
};
use std::path::{Path, PathBuf};
use support::models::{Model, Sizes, llama, qwen3_moe};
use tempfile::TempDir;

struct Models(TempDir);

impl Models {
    fn write(&self, name: &str, model: &Model) -> PathBuf {
        let path = self.0.path().join(name);
        model.write(&path, 2);
        path
    }

    fn pack(&self, name: &str, checkpoint: &Path, layout: &LayoutOptions) -> PathBuf {
        let path = self.0.path().join(name);
        pack_ranks(&support::open(checkpoint).unwrap(), &path, layout, &PackOptions::default(), &()).unwrap();
        path
    }
}

fn differences(a: &Path, b: &Path) -> DiffReport {
    diff(a, b, &OpenOptions::default()).unwrap()
}

fn over(tp: u32, ep: u32) -> LayoutOptions {
    LayoutOptions { parallel: Parallel { tp, ep, ..Parallel::default() }, ..LayoutOptions::default() }
}

/// The first tensor of that name, changed in its last byte.
fn changed(model: &Model, name: &str) -> Model {
    let mut model = model.clone();
    let tensor = model.tensors.iter_mut().find(|t| t.name == name).unwrap();
    *tensor.bytes.last_mut().unwrap() ^= 1;
    model
}

#[test]
fn an_image_of_many_ranks_is_its_checkpoint_and_any_other_image_of_it() {
    let models = Models(TempDir::new().unwrap());
    let checkpoint = models.write("m", &qwen3_moe(&Sizes::default()));
    let fused = LayoutOptions { target: Target::Transformers, ..over(2, 1) };
    let two = models.pack("two", &checkpoint, &over(2, 1));
    let four = models.pack("four", &checkpoint, &over(4, 2));
    let fused = models.pack("fused", &checkpoint, &fused);
    let tensors = support::open(&checkpoint).unwrap().tensors().len() as u64;
    for (a, b) in
        [(&two, &checkpoint), (&checkpoint, &four), (&fused, &checkpoint), (&two, &four), (&four, &fused)]
    {
        let report = differences(a, b);
        assert!(report.equal, "{a:?} {b:?}: {:?}", report.differences);
        assert_eq!((report.tensors_a, report.tensors_b), (tensors, tensors), "{a:?} {b:?}");
    }
}

#[test]
fn a_byte_that_differs_is_found_where_it_is_in_the_checkpoint() {
    let models = Models(TempDir::new().unwrap());
    let model = qwen3_moe(&Sizes::default());
    let image = models.pack("i", &models.write("m", &model), &over(4, 2));
    for name in ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.5.down_proj.weight"] {
        let other = changed(&model, name);
        let last = other.tensors.iter().find(|t| t.name == name).unwrap().bytes.len() as u64 - 1;
        let checkpoint = models.write(name, &other);
        let other_image = models.pack(&format!("{name}-image"), &checkpoint, &over(2, 1));
        for b in [&checkpoint, &other_image] {
            let report = differences(&image, b);
            assert_eq!(report.count, 1, "{:?}", report.differences);
            assert_eq!(report.differences[0].tensor, name);
            assert_eq!(report.differences[0].what, DifferenceKind::Bytes { first_at: last });
        }
        // Of one layout, rank by rank.
        let same_layout = models.pack(&format!("{name}-same"), &checkpoint, &over(4, 2));
        let report = differences(&image, &same_layout);
        assert!(report.count >= 1);
        assert!(
            report.differences.iter().all(|d| d.tensor.starts_with("target-")),
            "{:?}",
            report.differences
        );
    }
}

#[test]
fn what_an_image_leaves_out_is_only_in_the_checkpoint_and_damage_is_no_difference() {
    let models = Models(TempDir::new().unwrap());
    let checkpoint = models.write("m", &llama(&Sizes::default()));
    let without = LayoutOptions { exclude: vec!["model.norm.weight".into()], ..over(2, 1) };
    let image = models.pack("i", &checkpoint, &without);
    let report = differences(&checkpoint, &image);
    assert_eq!((report.count, &report.differences[0].what), (1, &DifferenceKind::OnlyInA));
    assert_eq!(report.differences[0].tensor, "model.norm.weight");
    let file = Image::open(&image).unwrap().ranks()[1].path.clone();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let damaged = diff(&checkpoint, &image, &OpenOptions::default()).unwrap_err();
    assert!(matches!(damaged, Error::BadBlock { block: 0, .. }), "{damaged:?}");
}
