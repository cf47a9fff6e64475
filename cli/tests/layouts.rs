//! `plan`, `pack` with a layout, and `reshard`: the fields that are promised, and what is refused with which exit code.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{Place, said};
use serde_json::Value;
use std::fs;

/// A small mixture of experts in two shards, with a draft.
fn model(place: &Place, name: &str) {
    let dir = place.path(name);
    fs::create_dir_all(&dir).unwrap();
    let config = r#"{"model_type":"deepseek_v4","n_routed_experts":4,"num_hidden_layers":2}"#;
    fs::write(dir.join("config.json"), config).unwrap();
    for (shard, prefix) in [(1, "layers.0"), (2, "layers.1"), (3, "mtp.0")] {
        let mut header = Vec::new();
        let mut at = 0;
        let mut add = |name: String, shape: [u64; 2]| {
            let end = at + shape[0] * shape[1];
            header.push(format!(
                "\"{name}\":{{\"dtype\":\"I8\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
            ));
            at = end;
        };
        add(format!("{prefix}.attn.weight"), [16, 8]);
        for expert in 0..4 {
            for (w, shape) in [("w1", [16, 8]), ("w2", [8, 16]), ("w3", [16, 8])] {
                add(format!("{prefix}.ffn.experts.{expert}.{w}.weight"), shape);
            }
        }
        let header = format!("{{{}}}", header.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend((0..at).map(|i| (i * 7 + shard) as u8));
        fs::write(dir.join(format!("model-{shard:05}-of-00003.safetensors")), bytes).unwrap();
    }
}

#[test]
fn plan_has_every_field_it_promises_and_reads_no_tensor() {
    let place = Place::new();
    model(&place, "m");
    let plan = place.ok(&["plan", "m", "--tp", "2", "--ep", "2", "--slice", "off", "--draft"]);
    let ranks = plan["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    for rank in ranks {
        for field in [
            "coordinate",
            "tensors",
            "bytes_needed",
            "bytes_read",
            "bytes_device",
            "bytes_kept",
            "largest_shard_kept",
            "window_bytes",
            "slabs",
            "pinned_requests",
            "host_allocs_without_slabs",
            "host_allocs_with_slabs",
            "peak_pinned",
            "draft",
        ] {
            assert!(rank.get(field).is_some(), "`{field}` is missing in {rank}");
        }
        // Two layers of two experts of three weights of 128 bytes, and two others.
        assert_eq!((&rank["tensors"], &rank["bytes_kept"]), (&14.into(), &1792.into()));
        for field in ["tensors", "bytes_read", "bytes_kept", "slabs"] {
            assert!(rank["draft"].get(field).is_some(), "`draft.{field}` is missing in {rank}");
        }
        assert_eq!(rank["draft"]["tensors"], 13, "a draft's experts are on every group");
    }
    assert_eq!(
        ranks[1]["coordinate"],
        serde_json::json!({ "model": "target", "pp": 0, "tp": 1, "ep": 1, "dp": 0 })
    );
    assert!(place.ok(&["plan", "m", "--tp", "2"])["ranks"][0]["draft"].is_null());
    let table = place.flashboot(&["plan", "m", "--tp", "2"]).output().unwrap();
    assert!(String::from_utf8_lossy(&table.stdout).contains("target-0-1-0-0"), "{}", said(&table));
}

#[test]
fn an_image_of_all_ranks_goes_to_another_layout_and_back_to_its_checkpoint() {
    let place = Place::new();
    model(&place, "m");
    let packed = place.ok(&["pack", "m", "-o", "two", "--tp", "2", "--draft"]);
    assert_eq!((&packed["ranks"], &packed["files"]), (&4.into(), &4.into()));
    assert_eq!(place.ok(&["inspect", "two"])["ranks"], 4);
    assert_eq!(place.ok(&["verify", "two"])["ok"], true);
    let resharded = place.ok(&["reshard", "two", "-o", "four", "--tp", "4", "--ep", "2", "--draft"]);
    let direct = place.ok(&["pack", "m", "-o", "direct", "--tp", "4", "--ep", "2", "--draft"]);
    assert_eq!(resharded["id"], direct["id"], "resharding gives what packing does");
    place.ok(&["unpack", "four", "-o", "back"]);
    for shard in 1..=3 {
        let name = format!("model-{shard:05}-of-00003.safetensors");
        assert_eq!(
            fs::read(place.path("m").join(&name)).unwrap(),
            fs::read(place.path("back").join(&name)).unwrap()
        );
    }
    // One rank and no layout is what it always was.
    assert_eq!(place.ok(&["pack", "m", "-o", "one"])["ranks"], 1);
}

#[test]
fn what_cannot_be_planned_is_refused_and_what_is_no_layout_is_bad_usage() {
    let place = Place::new();
    model(&place, "m");
    let refused = |args: &[&str], exit: i32, wanted: &str| {
        let (code, object) = place.json(args);
        let message = object["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert_eq!(code, exit, "{args:?}: {object}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    };
    refused(&["plan", "m", "--tp", "4", "--ep", "3"], 3, "no multiple");
    refused(&["plan", "m", "--tp", "32"], 3, "cannot be cut into 32 parts");
    refused(&["plan", "m", "--tp", "2", "--target", "vllm"], 3, "says nothing about the target vllm");
    refused(&["plan", "m", "--tp", "2", "--target", "abacus"], 2, "abacus");
    refused(&["plan", "m", "--slice", "half"], 2, "half");
    refused(&["plan", "m", "--window", "0"], 2, "--window");
    refused(&["plan", "m", "--tp", "2", "--recipe", "nowhere.toml"], 3, "nowhere.toml");
    fs::write(place.path("bad.toml"), "family = \"x\"\nmodel_types = []\ncolour = 1").unwrap();
    refused(&["plan", "m", "--tp", "2", "--recipe", "bad.toml"], 3, "colour");
    fs::write(place.path("map.json"), r#"{"groups": [[0, 1], [2]]}"#).unwrap();
    refused(&["plan", "m", "--tp", "2", "--ep", "2", "--expert-map", "map.json"], 3, "leaves out expert 3");
    let plan: Value = place.ok(&[
        "plan",
        "m",
        "--tp",
        "2",
        "--ep",
        "2",
        "--expert-map",
        "round-robin",
        "--exclude",
        "*.attn.*",
    ]);
    assert_eq!(plan["ranks"][0]["tensors"], 12, "experts only");
}
