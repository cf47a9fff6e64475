//! Tensors in memory as an image: what goes in comes out, and what cannot be is refused before a byte is written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

use flashboot_checkpoint::{
    Captured, CapturedTensor, Coordinate, Engine, Image, LayoutOptions, ModelConfig, ModelPart, NewView,
    OpenOptions, PackOptions, Stage, VerifyOptions, World, capture, capture_into, diff, is_image, reshard,
    verify,
};
use flashboot_core::{Arena, ArenaSpec, Dtype, Kind};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{path::Path, sync::Arc};

fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> CapturedTensor {
    let bytes = dtype.bytes_of(shape).unwrap();
    let seed = name.len() as u64;
    let bytes: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(7).wrapping_add(seed) % 251) as u8).collect();
    CapturedTensor { name: name.into(), dtype, shape: shape.into(), bytes: Box::new(bytes) }
}

fn view(name: &str, of: &str, offset: u64, shape: &[u64], stride: &[u64]) -> NewView {
    let (name, of) = (name.to_owned(), of.to_owned());
    NewView { name, of, offset, dtype: Dtype::F32, shape: shape.into(), stride: stride.into() }
}

fn model() -> Captured {
    Captured {
        tensors: vec![
            tensor("head.weight", Dtype::F32, &[300, 100]),
            // More than a block, so that pieces and blocks are cut inside it.
            tensor("model.layers.0.mlp.experts.gate_up", Dtype::Bf16, &[3, 1024, 3000]),
            tensor("model.layers.1.mlp.experts.7.w", Dtype::F8E4M3, &[5]),
            tensor("model.empty", Dtype::I64, &[0, 3]),
            tensor("model.scalar", Dtype::F64, &[]),
            tensor("model.packed", Dtype::F4, &[2, 6]),
        ],
        aliases: vec![("embed.weight".into(), "head.weight".into())],
        views: vec![
            view("model.turned", "head.weight", 0, &[100, 300], &[1, 100]),
            view("model.row", "head.weight", 400, &[100], &[1]),
        ],
        part: (Coordinate::WHOLE, World::ONE),
        stage: Stage::EngineParams,
        engine: Some(Engine { name: "test".into(), version: "1".into() }),
        kernel: None,
        config: ModelConfig { model_type: Some("toy".into()), ..ModelConfig::default() },
    }
}

fn write(captured: &Captured, dest: &Path) -> Result<Image, flashboot_checkpoint::Error> {
    capture(captured, dest, &PackOptions::default(), &())?;
    Image::open(dest)
}

#[test]
fn what_is_captured_is_in_the_image_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (dest, model) = (dir.path().join("image"), model());
    let image = write(&model, &dest).unwrap();
    assert!(verify(&image, &VerifyOptions::default(), &()).unwrap().ok);
    let fingerprint = &image.metadata().fingerprint;
    assert_eq!((fingerprint.stage, fingerprint.dtype.as_str()), (Stage::EngineParams, "BF16"));
    let rank = image.rank(Coordinate::WHOLE).unwrap();
    let payload = std::fs::read(&rank.path).unwrap();
    let mut covered = 0;
    for tensor in &model.tensors {
        let found = rank.table.at(rank.table.find(&tensor.name).unwrap()).unwrap();
        assert_eq!((found.dtype, found.shape), (tensor.dtype, tensor.shape.as_slice()));
        let mut bytes = vec![0; tensor.bytes.len() as usize];
        tensor.bytes.copy_out(0, &mut bytes);
        let at = found.offset as usize;
        assert!(payload[at..at + bytes.len()] == bytes, "{}", tensor.name);
        covered += bytes.iter().filter(|b| **b != 0).count();
    }
    assert_eq!(payload.iter().filter(|b| **b != 0).count(), covered, "padding is zero");
    assert_eq!(rank.table.find("embed.weight"), rank.table.find("head.weight"));
    let views: Vec<_> = rank.table.views().iter().map(|v| (v.name.as_str(), v.offset)).collect();
    assert_eq!(views, [("model.row", 400), ("model.turned", 0)]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn the_same_capture_has_the_same_id_and_another_view_another() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let first = write(&model(), &at("a")).unwrap();
    assert_eq!(first.id(), write(&model(), &at("b")).unwrap().id());
    let mut other = model();
    other.views[1].offset = 800;
    assert_ne!(first.id(), write(&other, &at("c")).unwrap().id());
    let found = diff(&at("a"), &at("c"), &OpenOptions::default()).unwrap();
    let names: Vec<_> = found.differences.iter().map(|d| d.tensor.as_str()).collect();
    assert_eq!(names, ["model.row"]);
}

#[test]
fn what_cannot_be_an_image_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("image");
    let refused = |change: &dyn Fn(&mut Captured)| {
        let mut model = model();
        change(&mut model);
        let e = write(&model, &dest).unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{e}");
        e.to_string()
    };
    let said = refused(&|m| m.aliases.push(("model.row".into(), "head.weight".into())));
    assert!(said.contains("model.row"), "{said}");
    let said = refused(&|m| m.aliases.push(("x".into(), "nowhere".into())));
    assert!(said.contains("`x` means `nowhere`"), "{said}");
    let said = refused(&|m| m.views.push(view("past", "head.weight", 400, &[300, 100], &[100, 1])));
    assert!(said.contains("view `past`"), "{said}");
    let said = refused(&|m| m.tensors[0].shape = vec![300, 101]);
    assert!(said.contains("120000 bytes") && said.contains("121200"), "{said}");
    let said = refused(&|m| m.engine = None);
    assert!(said.contains("engine-params"), "{said}");
}

#[test]
fn a_capture_with_views_is_not_cut_again() {
    let dir = tempfile::tempdir().unwrap();
    let image = write(&model(), &dir.path().join("image")).unwrap();
    let options = PackOptions::default();
    let cut = reshard(&image, &dir.path().join("cut"), &LayoutOptions::default(), &options, &());
    let e = cut.unwrap_err();
    assert_eq!(e.kind(), Kind::Mismatch, "{e}");
    assert!(e.to_string().contains("is a view"), "{e}");
}

#[test]
fn a_file_is_no_image_and_neither_is_nothing() {
    let dir = tempfile::tempdir().unwrap();
    write(&model(), &dir.path().join("image")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), "x").unwrap();
    for (name, found) in [("image", true), ("model.safetensors", false), ("nothing", false), ("", false)] {
        assert_eq!(is_image(&dir.path().join(name)), Ok(found), "{name}");
    }
}

fn host(payload: u64) -> flashboot_core::Result<Arc<dyn Arena>> {
    Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &HostArenaConfig::default())?.0)
}

#[test]
fn what_is_captured_into_an_arena_is_the_image_that_would_have_been_written() {
    let dir = tempfile::tempdir().unwrap();
    let image = write(&model(), &dir.path().join("image")).unwrap();
    let (arena, manifest) = capture_into(&model(), host, None, &()).unwrap();
    let rank = image.rank(Coordinate::WHOLE).unwrap();
    assert_eq!(manifest.metadata.id, image.id());
    assert_eq!(manifest.bytes(), flashboot_checkpoint::Manifest::read(&image, rank).unwrap());
    let payload = std::fs::read(&rank.path).unwrap();
    let mut found = vec![0; payload.len()];
    arena.copy_out(0, &mut found).unwrap();
    assert!(found == payload);
}

#[test]
fn a_rank_of_several_is_an_image_of_that_rank() {
    let world = World { tp: 2, ..World::ONE };
    let coordinate: Coordinate = "target-0-1-0-0".parse().unwrap();
    assert_eq!(coordinate, Coordinate { tp: 1, ..Coordinate::WHOLE });
    let dir = tempfile::tempdir().unwrap();
    let image = write(&Captured { part: (coordinate, world), ..model() }, &dir.path().join("image")).unwrap();
    assert!(image.rank(coordinate).is_some() && image.rank(Coordinate::WHOLE).is_none());
    assert_eq!(image.metadata().layout.world, world);
    assert_ne!(image.metadata().fingerprint.layout, "experts-then-rest");
    let outside = Captured { part: (Coordinate { tp: 2, ..coordinate }, world), ..model() };
    let refused = write(&outside, &dir.path().join("other")).unwrap_err().to_string();
    assert!(refused.contains("target-0-2-0-0") && refused.contains("2 tensor-parallel"), "{refused}");
    for text in [
        "",
        "target",
        "target-0-0-0",
        "target-0-0-0-0-0",
        "target-0-00-0-0",
        "other-0-0-0-0",
        "target-0--1-0-0",
    ] {
        assert!(text.parse::<Coordinate>().is_err(), "{text}");
    }
    let draft: Coordinate = "draft-3-0-7-1".parse().unwrap();
    assert_eq!((draft.model, draft.to_string().as_str()), (ModelPart::Draft, "draft-3-0-7-1"));
}

#[test]
fn what_an_arena_refuses_ends_the_capture() {
    let full = |_| Err(flashboot_core::Error::new(Kind::Exhausted, "mmap", "no memory"));
    let refused = capture_into(&model(), full, None, &()).unwrap_err();
    assert_eq!(flashboot_core::Error::from(refused).kind(), Kind::Exhausted);
}
