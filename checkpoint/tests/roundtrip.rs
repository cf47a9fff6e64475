//! pack → verify → unpack gives the checkpoint back, whatever the model; the image is what the format says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Coordinate, Error, Image, OpenOptions, PackOptions, Segment, UnpackOptions, VerifyOptions, diff, inspect,
    pack, unpack, verify,
};
use flashboot_core::Dtype;
use proptest::prelude::*;
use std::path::Path;
use support::{Made, file, names, open, packed, sharded, small_moe, tensor, tree};
use tempfile::TempDir;

#[test]
fn a_sharded_model_comes_back_bit_for_bit() {
    let dir = TempDir::new().unwrap();
    let (model, image, back) = (dir.path().join("m"), dir.path().join("i"), dir.path().join("b"));
    sharded(&model, &small_moe());
    let report = pack(&open(&model).unwrap(), &image, &PackOptions::default(), &()).unwrap();
    let opened = Image::open(&image).unwrap();
    assert_eq!(report.id, opened.id());
    assert_eq!(names(&image), ["metadata.json", "target-0-0-0-0.img", "target-0-0-0-0.json"]);
    let verified = verify(&opened, &VerifyOptions::default(), &()).unwrap();
    assert!(verified.ok && verified.bad_blocks.is_empty() && verified.bytes == report.bytes);
    let unpacked = unpack(&opened, &back, &UnpackOptions::default(), &()).unwrap();
    assert_eq!(unpacked.files, 3);
    assert_eq!(tree(&model), tree(&back));
    let same = diff(&model, &image, &OpenOptions::default()).unwrap();
    assert!(same.equal && same.tensors_a == 42 && same.tensors_b == 42, "{same:?}");
    assert_eq!(names(dir.path()), ["b", "i", "m"], "nothing is left beside them");
}

#[test]
fn the_payload_is_experts_by_layer_and_number_then_the_rest_aligned_and_hashed_as_b3sum_does() {
    let dir = TempDir::new().unwrap();
    sharded(&dir.path().join("m"), &small_moe());
    let image = packed(&dir.path().join("m"), &dir.path().join("i"));
    let rank = image.rank(Coordinate::WHOLE).unwrap();
    let payload = std::fs::read(&rank.path).unwrap();
    assert_eq!(payload.len() % 4096, 0);
    let order: Vec<_> = rank.table.iter().map(|t| t.name.to_owned()).collect();
    let mut wanted = Vec::new();
    for layer in 0..3 {
        wanted.extend((0..12).map(|e| format!("model.layers.{layer}.mlp.experts.{e}.up_proj.weight")));
    }
    wanted.extend(["empty", "model.embed_tokens.weight"].map(String::from));
    wanted.extend((0..3).map(|layer| format!("model.layers.{layer}.mlp.gate.weight")));
    wanted.push("scale".into());
    assert_eq!(order, wanted);
    let made: Vec<Made> = small_moe().into_iter().flatten().collect();
    let mut end = 0;
    for t in rank.table.iter() {
        let made = made.iter().find(|m| m.name == t.name).unwrap();
        assert_eq!(t.offset % 512, 0);
        assert!(payload[end as usize..t.offset as usize].iter().all(|&b| b == 0), "padding is zero");
        end = t.offset + t.bytes;
        assert_eq!(&payload[t.offset as usize..end as usize], made.bytes, "{}", t.name);
        assert_eq!(t.segment == Segment::Experts, t.name.contains("experts"));
        assert_eq!(t.segment == Segment::Experts, end <= rank.table.separator() && t.name != "empty");
    }
    let root = blake3::hash(&payload).to_hex().to_string();
    assert_eq!(image.metadata().ranks[0].root, root);
}

#[test]
fn packing_twice_gives_one_id_and_another_name_or_byte_gives_another() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    sharded(&at("m"), &small_moe());
    let (one, two) = (packed(&at("m"), &at("1")), packed(&at("m"), &at("2")));
    assert_eq!(one.id(), two.id());
    assert_eq!(tree(&at("1")), tree(&at("2")));
    let mut other = small_moe();
    other[0][0].bytes[0] ^= 1;
    sharded(&at("n"), &other);
    assert_ne!(packed(&at("n"), &at("3")).id(), one.id());
    let report = diff(&at("1"), &at("3"), &OpenOptions::default()).unwrap();
    assert_eq!((report.equal, report.count), (false, 1));
    let json = serde_json::to_value(&report.differences).unwrap();
    let name = "model.layers.0.mlp.experts.0.up_proj.weight";
    assert_eq!(json, serde_json::json!([{ "tensor": name, "kind": "bytes", "first_at": 0 }]));
}

#[test]
fn diff_names_what_is_missing_and_what_has_another_form() {
    let dir = TempDir::new().unwrap();
    let write = |name: &str, tensors: &[Made]| {
        let path = dir.path().join(name);
        std::fs::write(&path, file(tensors, &[], 0)).unwrap();
        path
    };
    let a =
        [tensor("d", Dtype::F16, &[2]), tensor("only.a", Dtype::U8, &[1]), tensor("s", Dtype::U8, &[2, 3])];
    let b = [tensor("d", Dtype::Bf16, &[2]), tensor("only.b", Dtype::U8, &[1]), tensor("s", Dtype::U8, &[6])];
    let (a, b) = (write("a.safetensors", &a), write("b.safetensors", &b));
    let report = diff(&a, &b, &OpenOptions::default()).unwrap();
    assert_eq!(
        serde_json::to_value(&report.differences).unwrap(),
        serde_json::json!([
            { "tensor": "d", "kind": "dtype", "a": "F16", "b": "BF16" },
            { "tensor": "only.a", "kind": "only_in_a" },
            { "tensor": "only.b", "kind": "only_in_b" },
            { "tensor": "s", "kind": "shape", "a": [2, 3], "b": [6] },
        ])
    );
    assert!(diff(&a, &a, &OpenOptions::default()).unwrap().equal);
}

#[test]
fn tied_weights_are_names_of_the_same_bytes() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let embed = tensor("model.embed_tokens.weight", Dtype::F32, &[4, 2]);
    std::fs::create_dir(at("saved")).unwrap();
    let kept = [("format", "pt"), ("lm_head.weight", "model.embed_tokens.weight"), ("note", "x")];
    std::fs::write(at("saved/model.safetensors"), file(std::slice::from_ref(&embed), &kept, 0)).unwrap();
    std::fs::create_dir(at("tied")).unwrap();
    std::fs::write(at("tied/model.safetensors"), file(std::slice::from_ref(&embed), &[], 0)).unwrap();
    std::fs::write(at("tied/config.json"), r#"{"text_config":{"tie_word_embeddings":true}}"#).unwrap();
    for name in ["saved", "tied"] {
        let image = packed(&at(name), &at(&format!("{name}.image")));
        let table = &image.ranks()[0].table;
        assert_eq!(table.aliases(), [("lm_head.weight".to_owned(), 0)], "{name}");
        assert_eq!(table.find("lm_head.weight"), Some(0));
        let back = at(&format!("{name}.back"));
        unpack(&image, &back, &UnpackOptions::default(), &()).unwrap();
        let model = std::fs::read(at(name).join("model.safetensors")).unwrap();
        assert_eq!(std::fs::read(back.join("model.safetensors")).unwrap(), model);
        let inspection = inspect(&at(&format!("{name}.image")), &OpenOptions::default()).unwrap();
        assert_eq!(inspection.aliases["lm_head.weight"], "model.embed_tokens.weight");
        assert_eq!((inspection.ranks, inspection.tensors), (1, 1));
    }
}

#[test]
fn models_without_tensors_or_with_trailing_bytes_come_back_too() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let options = OpenOptions { allow_trailing_bytes: true, ..OpenOptions::default() };
    let mut long = file(&[tensor("a", Dtype::U8, &[3])], &[], 0);
    long.extend(b"after the end");
    for (name, bytes) in [("none", file(&[], &[], 0)), ("long", long)] {
        let path = at(&format!("{name}.safetensors"));
        std::fs::write(&path, &bytes).unwrap();
        let checkpoint = flashboot_checkpoint::Checkpoint::open(&path, &options).unwrap();
        pack(&checkpoint, &at(name), &PackOptions::default(), &()).unwrap();
        let image = Image::open(&at(name)).unwrap();
        assert!(verify(&image, &VerifyOptions::default(), &()).unwrap().ok);
        let back = at(&format!("{name}.back"));
        unpack(&image, &back, &UnpackOptions::default(), &()).unwrap();
        assert_eq!(std::fs::read(back.join(format!("{name}.safetensors"))).unwrap(), bytes);
    }
}

#[test]
fn a_payload_of_several_blocks_comes_back() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    // A tensor across three blocks between two small ones, and one that ends a block exactly.
    let shards = vec![
        vec![tensor("b.big", Dtype::U8, &[(40 << 20) + 13]), tensor("a.small", Dtype::F32, &[3])],
        vec![tensor("c.small", Dtype::U8, &[5]), tensor("layers.0.experts.0.w", Dtype::U8, &[16 << 20])],
    ];
    sharded(&at("m"), &shards);
    let image = packed(&at("m"), &at("i"));
    assert_eq!(image.ranks()[0].table.digests().values().len(), 4);
    assert!(verify(&image, &VerifyOptions { workers: Some(3) }, &()).unwrap().ok);
    unpack(&image, &at("b"), &UnpackOptions::default(), &()).unwrap();
    assert!(tree(&at("m")) == tree(&at("b")));
}

#[test]
fn an_existing_destination_is_refused_and_replaced_only_when_it_is_ours() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    sharded(&at("m"), &small_moe());
    let checkpoint = open(&at("m")).unwrap();
    let replace = PackOptions { replace: true, ..PackOptions::default() };
    let first = pack(&checkpoint, &at("i"), &replace, &()).unwrap();
    let again = pack(&checkpoint, &at("i"), &PackOptions::default(), &());
    assert_eq!(again, Err(Error::Exists { path: at("i") }));
    assert_eq!(pack(&checkpoint, &at("i"), &replace, &()).unwrap().id, first.id);
    assert!(Image::open(&at("i")).is_ok());
    std::fs::write(at("i/notes.txt"), "mine").unwrap();
    let refused = pack(&checkpoint, &at("i"), &replace, &());
    assert!(
        matches!(&refused, Err(Error::NotReplaceable { entry, .. }) if entry == "notes.txt"),
        "{refused:?}"
    );
    assert!(matches!(pack(&checkpoint, &at("m"), &replace, &()), Err(Error::NotReplaceable { .. })));
    let image = Image::open(&at("i")).unwrap();
    let onto_model = unpack(&image, &at("m"), &UnpackOptions { replace: true, workers: None }, &());
    assert!(onto_model.is_ok(), "it holds safetensors and an index only");
    std::fs::write(at("m/tokenizer.json"), "{}").unwrap();
    let refused = unpack(&image, &at("m"), &UnpackOptions { replace: true, workers: None }, &());
    assert!(matches!(refused, Err(Error::NotReplaceable { .. })));
    assert_eq!(names(dir.path()), ["i", "m"]);
}

#[test]
fn a_file_put_into_an_image_while_it_is_replaced_is_not_lost() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    sharded(&at("m"), &small_moe());
    let checkpoint = open(&at("m")).unwrap();
    let replace = PackOptions { replace: true, ..PackOptions::default() };
    pack(&checkpoint, &at("i"), &replace, &()).unwrap();
    let notes = at("i/notes.txt");
    let write = |_: u64, _: u64| std::fs::write(&notes, "mine").unwrap();
    let refused = pack(&checkpoint, &at("i"), &replace, &write);
    assert!(
        matches!(&refused, Err(Error::NotReplaceable { entry, .. }) if entry == "notes.txt"),
        "{refused:?}"
    );
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "mine");
    assert!(Image::open(&at("i")).is_ok());
    assert_eq!(names(dir.path()), ["i", "m"]);
}

#[test]
fn a_cancelled_pack_leaves_nothing() {
    struct Stop;
    impl flashboot_checkpoint::Progress for Stop {
        fn advance(&self, _: u64, _: u64) {}
        fn cancelled(&self) -> bool {
            true
        }
    }
    let dir = TempDir::new().unwrap();
    sharded(&dir.path().join("m"), &small_moe());
    let checkpoint = open(&dir.path().join("m")).unwrap();
    let stopped = pack(&checkpoint, &dir.path().join("i"), &PackOptions::default(), &Stop);
    assert!(matches!(stopped, Err(Error::Cancelled { .. })));
    assert_eq!(names(dir.path()), ["m"]);
}

#[test]
fn a_live_packer_is_left_alone_by_another_to_the_same_place() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    sharded(&at("m"), &small_moe());
    let checkpoint = open(&at("m")).unwrap();
    std::fs::create_dir(at(".i.partial-0123456789abcdef")).unwrap();
    std::fs::create_dir(at(".i.partial-mine")).unwrap();
    // While the first is in the middle, a second packs to the same place and is done.
    let second = |_: u64, _: u64| {
        pack(&checkpoint, &at("i"), &PackOptions::default(), &()).unwrap();
        assert_eq!(
            names(dir.path()).len(),
            4,
            "the first's work, the second's image, the model, another's directory"
        );
    };
    let first = pack(&checkpoint, &at("i"), &PackOptions::default(), &second);
    assert_eq!(first, Err(Error::Exists { path: at("i") }));
    assert!(Image::open(&at("i")).is_ok());
    assert_eq!(
        names(dir.path()),
        [".i.partial-mine", "i", "m"],
        "a dead one's is removed, a stranger's is not"
    );
}

#[test]
fn a_source_that_changed_since_it_was_opened_is_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.safetensors");
    std::fs::write(&path, file(&[tensor("a", Dtype::U8, &[3])], &[], 0)).unwrap();
    let checkpoint = open(&path).unwrap();
    std::fs::write(&path, file(&[tensor("a", Dtype::U8, &[4])], &[], 0)).unwrap();
    let refused = pack(&checkpoint, &dir.path().join("i"), &PackOptions::default(), &());
    assert_eq!(refused, Err(Error::Changed { path }));
    assert_eq!(names(dir.path()), ["a.safetensors"]);
}

fn any_tensor() -> impl Strategy<Value = (String, usize, Vec<u64>)> {
    let name = prop_oneof![
        (0u64..4, 0u64..12).prop_map(|(l, e)| format!("layers.{l}.experts.{e}.w")),
        (0u64..2, 0u64..3).prop_map(|(l, e)| format!("mtp.{l}.ffn.experts.{e}.w1.weight")),
        "[a-z\"\\\\/é.]{1,8}",
    ];
    (name, 0..Dtype::ALL.len(), prop::collection::vec(0u64..9, 0..3))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn random_models_come_back_bit_for_bit(
        given in prop::collection::vec((any_tensor(), 0usize..3), 0..24), indexed: bool,
    ) {
        let dir = TempDir::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut shards = vec![Vec::new(); 3];
        let mut seen = std::collections::HashSet::new();
        for ((name, dtype, shape), shard) in given {
            let dtype = Dtype::ALL[dtype];
            if dtype.bytes_of(&shape).is_ok() && seen.insert(name.clone()) {
                shards[shard].push(tensor(&name, dtype, &shape));
            }
        }
        shards.retain(|s| !s.is_empty());
        if shards.is_empty() {
            shards.push(vec![tensor("one", Dtype::U8, &[1])]);
        }
        sharded(&at("m"), &shards);
        if !indexed {
            std::fs::remove_file(at("m/model.safetensors.index.json")).unwrap();
        }
        let image = packed(&at("m"), &at("i"));
        prop_assert!(verify(&image, &VerifyOptions::default(), &()).unwrap().ok);
        unpack(&image, &at("b"), &UnpackOptions::default(), &()).unwrap();
        prop_assert_eq!(tree(&at("m")), tree(&at("b")));
        prop_assert!(diff(Path::new(&at("b")), &at("i"), &OpenOptions::default()).unwrap().equal);
    }
}
