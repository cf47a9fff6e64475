//! What goes wrong outside the header: indices, directories, damaged images. Each is a typed error that names
//! what is wrong, and leaves nothing behind. (Permissions, full disks and kills: `processes.rs`.)
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{Error, Image, UnpackOptions, VerifyOptions, unpack, verify};
use flashboot_core::{Dtype, Kind};
use std::path::Path;
use support::{file, names, open, packed, sharded, small_moe, tensor};
use tempfile::TempDir;

const INDEX: &str = "model.safetensors.index.json";

fn edit_index(dir: &Path, edit: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
    let path = dir.join(INDEX);
    let mut index: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(index["weight_map"].as_object_mut().unwrap());
    std::fs::write(&path, index.to_string()).unwrap();
}

fn model() -> TempDir {
    let dir = TempDir::new().unwrap();
    sharded(dir.path(), &small_moe());
    dir
}

#[test]
fn a_missing_shard_is_named_with_the_place_it_was_looked_for() {
    let dir = model();
    let shard = "model-00002-of-00002.safetensors";
    std::fs::remove_file(dir.path().join(shard)).unwrap();
    let (index, path) = (dir.path().join(INDEX), dir.path().join(shard));
    let found = open(dir.path()).unwrap_err();
    assert_eq!(found, Error::MissingShard { index, shard: shard.into(), path });
    assert_eq!(found.kind(), Kind::Corrupt);
}

#[test]
fn a_stale_index_is_refused_with_the_names() {
    let dir = model();
    edit_index(dir.path(), |map| {
        map.remove("scale");
        map.insert("ghost".into(), "model-00001-of-00002.safetensors".into());
        map.insert("empty".into(), "model-00001-of-00002.safetensors".into());
    });
    let Err(Error::StaleIndex { not_in_shard, elsewhere, not_in_index, .. }) = open(dir.path()) else {
        panic!("refused as stale");
    };
    assert_eq!((not_in_shard.first, elsewhere.first), (vec!["ghost".into()], vec!["empty".into()]));
    assert_eq!((not_in_index.first, not_in_index.count), (vec!["scale".to_owned()], 1));
}

#[test]
fn a_shard_that_the_index_forgets_is_refused_and_a_stranger_is_told() {
    let dir = model();
    let second = "model-00002-of-00002.safetensors";
    edit_index(dir.path(), |map| map.retain(|_, shard| shard != second));
    let found = open(dir.path()).unwrap_err();
    let Error::ShardNotInIndex { index, names } = &found else { panic!("{found:?}") };
    assert_eq!((index, &names.first), (&dir.path().join(INDEX), &vec![second.to_owned()]));
    assert_eq!(found.kind(), Kind::Mismatch);
    std::fs::rename(dir.path().join(second), dir.path().join("consolidated.safetensors")).unwrap();
    let notes = open(dir.path()).unwrap().notes().to_vec();
    assert!(notes.len() == 1 && notes[0].contains("`consolidated.safetensors`"), "{notes:?}");
}

#[test]
fn an_index_that_leaves_its_directory_is_refused() {
    for (entry, problem) in [("../x.safetensors", "`..`"), ("/etc/passwd", "absolute")] {
        let dir = model();
        edit_index(dir.path(), |map| drop(map.insert("scale".into(), entry.into())));
        let error = open(dir.path()).unwrap_err();
        let Error::IndexPath { tensor, entry: found, .. } = &error else { panic!("{error:?}") };
        assert_eq!((tensor.as_str(), found.as_str()), ("scale", entry));
        assert!(error.to_string().contains(problem) && error.kind().is_refusal(), "{error}");
    }
}

#[test]
fn shards_below_the_directory_and_links_out_of_it_are_followed() {
    let dir = TempDir::new().unwrap();
    let blobs = dir.path().join("blobs");
    sharded(&blobs, &small_moe());
    let snapshot = dir.path().join("snapshot");
    std::fs::create_dir_all(snapshot.join("sub")).unwrap();
    for (i, place) in ["sub/a.safetensors", "b.safetensors"].into_iter().enumerate() {
        let blob = format!("model-{:05}-of-00002.safetensors", i + 1);
        std::os::unix::fs::symlink(blobs.join(blob), snapshot.join(place)).unwrap();
    }
    std::fs::copy(blobs.join(INDEX), snapshot.join(INDEX)).unwrap();
    edit_index(&snapshot, |map| {
        for (_, shard) in map.iter_mut() {
            let first = shard.as_str().unwrap().contains("-00001-");
            *shard = if first { "sub/a.safetensors" } else { "b.safetensors" }.into();
        }
    });
    let image = packed(&snapshot, &dir.path().join("i"));
    unpack(&image, &dir.path().join("back"), &UnpackOptions::default(), &()).unwrap();
    assert_eq!(support::tree(&snapshot), support::tree(&dir.path().join("back")));
}

#[test]
fn a_tensor_in_two_shards_is_refused_with_both() {
    let dir = TempDir::new().unwrap();
    for name in ["a.safetensors", "b.safetensors"] {
        std::fs::write(dir.path().join(name), file(&[tensor("t", Dtype::U8, &[2])], &[], 0)).unwrap();
    }
    let file = dir.path().join("b.safetensors");
    let expected = Error::InTwoShards { file, tensor: "t".into(), other: "a.safetensors".into() };
    assert_eq!(open(dir.path()).unwrap_err(), expected);
}

#[test]
fn an_index_that_is_no_index_or_names_a_tensor_twice_is_refused() {
    let dir = model();
    let path = dir.path().join(INDEX);
    std::fs::write(&path, "{\"weight_map\":").unwrap();
    assert!(matches!(open(dir.path()), Err(Error::NotJson { file, .. }) if file == path));
    std::fs::write(&path, "{}").unwrap();
    assert!(matches!(open(dir.path()), Err(Error::Field { field: "weight_map", .. })));
    let twice = r#"{"weight_map":{"t":"a.safetensors","t":"a.safetensors"}}"#;
    std::fs::write(dir.path().join("a.safetensors"), file(&[tensor("t", Dtype::U8, &[2])], &[], 0)).unwrap();
    std::fs::write(&path, twice).unwrap();
    assert_eq!(open(dir.path()).unwrap_err(), Error::Duplicate { file: path, tensor: "t".into() });
}

#[test]
fn directories_pipes_and_nothing_are_told_apart() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let missing = at("none.safetensors");
    assert_eq!(open(&missing).unwrap_err(), Error::Missing { path: missing });
    assert_eq!(open(dir.path()).unwrap_err(), Error::NoSafetensors { dir: dir.path().into() });
    std::fs::create_dir(at("x.safetensors")).unwrap();
    assert_eq!(open(dir.path()).unwrap_err(), Error::IsDirectory { path: at("x.safetensors") });
    std::fs::remove_dir(at("x.safetensors")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(at("p.safetensors")).status().unwrap();
    assert!(made.success());
    assert_eq!(open(dir.path()).unwrap_err(), Error::NotRegular { path: at("p.safetensors") });
}

#[test]
fn two_indices_are_refused_unless_one_is_the_stock_one() {
    let dir = model();
    std::fs::copy(dir.path().join(INDEX), dir.path().join("other.safetensors.index.json")).unwrap();
    assert!(open(dir.path()).is_ok());
    std::fs::rename(dir.path().join(INDEX), dir.path().join("third.safetensors.index.json")).unwrap();
    assert!(matches!(open(dir.path()), Err(Error::SeveralIndices { names, .. }) if names.count == 2));
    assert!(open(&dir.path().join("third.safetensors.index.json")).is_ok(), "one may be named");
}

#[test]
fn every_flipped_byte_of_an_image_is_found() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let made = [tensor("layers.0.experts.1.w", Dtype::F4, &[4]), tensor("b", Dtype::Bf16, &[2, 3])];
    std::fs::write(at("m.safetensors"), file(&made, &[("alias", "b")], 0)).unwrap();
    let id = packed(&at("m.safetensors"), &at("i")).id().to_owned();
    for name in ["metadata.json", "target-0-0-0-0.json", "target-0-0-0-0.img"] {
        let path = at("i").join(name);
        let sound = std::fs::read(&path).unwrap();
        for byte in 0..sound.len() {
            // One bit each, another for each byte, so that all eight are tried many times over.
            let mut damaged = sound.clone();
            damaged[byte] ^= 1 << (byte % 8);
            std::fs::write(&path, &damaged).unwrap();
            match Image::open(&at("i")) {
                Err(e) => assert!(e.kind().is_refusal(), "{name} byte {byte}: {e:?}"),
                Ok(image) => {
                    let report = verify(&image, &VerifyOptions { workers: Some(1) }, &()).unwrap();
                    assert!(!report.ok && report.bad_blocks == [0], "{name} byte {byte}: {report:?}");
                    if byte % 997 == 0 {
                        let refused = unpack(&image, &at("back"), &UnpackOptions::default(), &());
                        assert!(matches!(refused, Err(Error::BadBlock { block: 0, .. })), "{refused:?}");
                    }
                }
            }
        }
        std::fs::write(&path, &sound).unwrap();
    }
    assert_eq!(names(dir.path()), ["i", "m.safetensors"]);
    assert_eq!(Image::open(&at("i")).unwrap().id(), id);
}

#[test]
fn a_flipped_byte_names_its_block_and_a_cut_payload_its_sizes() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("m.safetensors"), file(&[tensor("b", Dtype::U8, &[40 << 20])], &[], 0)).unwrap();
    let image = packed(&at("m.safetensors"), &at("i"));
    let path = image.ranks()[0].path.clone();
    let mut payload = std::fs::read(&path).unwrap();
    payload[(16 << 20) + 5] ^= 4;
    payload[(40 << 20) - 1] ^= 1;
    std::fs::write(&path, &payload).unwrap();
    let report = verify(&image, &VerifyOptions::default(), &()).unwrap();
    assert_eq!((report.ok, report.bad_blocks.as_slice()), (false, [1, 2].as_slice()));
    std::fs::write(&path, &payload[..payload.len() - 1]).unwrap();
    let needed = payload.len() as u64;
    let cut = Image::open(&at("i")).map(|_| ());
    assert_eq!(cut, Err(Error::ImageSize { file: path.clone(), needed, found: needed - 1 }));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(Image::open(&at("i")).map(|_| ()), Err(Error::Missing { path }));
}

#[test]
fn a_payload_that_strayed_beside_a_checkpoint_does_not_make_it_half_an_image() {
    use flashboot_checkpoint::{OpenOptions, Opened};
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("target-0-0-0-0.img"), [0; 8]).unwrap();
    let open = || Opened::open(dir.path(), &OpenOptions::default());
    assert!(matches!(open(), Err(Error::NoMetadata { .. })));
    let sound = file(&[tensor("b", Dtype::U8, &[8])], &[], 0);
    std::fs::write(dir.path().join("model.safetensors"), sound).unwrap();
    assert!(matches!(open(), Ok(Opened::Checkpoint(_))));
}

#[test]
fn what_is_no_image_says_why_and_another_version_is_a_mismatch() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("none");
    assert_eq!(Image::open(&missing).map(|_| ()), Err(Error::Missing { path: missing }));
    assert!(matches!(Image::open(dir.path()), Err(Error::NoMetadata { .. })));
    let path = dir.path().join("metadata.json");
    std::fs::write(&path, "{\"flashboot_image\":2,\"id\":\"\"}").unwrap();
    let version = Image::open(dir.path()).map(|_| ()).unwrap_err();
    assert_eq!(version, Error::ImageVersion { file: path.clone(), found: 2, needed: 1 });
    assert_eq!(version.kind(), Kind::Mismatch);
    for text in ["{}", "{\"flashboot_image\":1}", "{\"flashboot_image\":x", "\u{0}"] {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Image::open(dir.path()), Err(Error::NotAnImage { .. })), "{text}");
    }
}
