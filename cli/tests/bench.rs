//! `bench` with real processes: on the stand-in driver, whose figures mean nothing but must be there, and in host memory.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{Place, object, said, stand_in::Driver};
use serde_json::Value;
use std::path::PathBuf;

fn bench(place: &Place, driver: Option<&Driver>, args: &[&str]) -> (i32, Value) {
    let all = [&["bench"], args, &["--json"]].concat();
    let command = place.flashboot(&all);
    let mut command = driver.map_or(command, |driver| driver.on(place.flashboot(&all)));
    let output = command.output().unwrap();
    assert_eq!(place.left_over(), Vec::<PathBuf>::new(), "{}", said(&output));
    (output.status.code().unwrap_or(-1), object(&output))
}

fn ok(place: &Place, driver: Option<&Driver>, args: &[&str]) -> Value {
    let (exit, report) = bench(place, driver, args);
    assert_eq!(exit, 0, "{args:?}: {report}");
    report
}

fn positive(of: &Value, name: &str) {
    assert!(of[name].as_f64().is_some_and(|figure| figure > 0.0), "{name}: {of}");
}

#[test]
fn a_copy_stands_beside_what_the_gpu_allows_verified_and_not() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let report = ok(
        &place,
        Some(&driver),
        &["copy", "--device", "cuda:0,1", "--sizes", "1MiB,40MiB", "--repeats", "2", "--chunk", "16MiB"],
    );
    assert_eq!(report["gpus"].as_array().unwrap().len(), 2);
    let stages = report["stages"].as_array().unwrap();
    let rows: Vec<_> = stages.iter().map(|s| (s["bytes"].as_u64().unwrap(), s["verify"] == true)).collect();
    assert_eq!(rows, [(1 << 20, false), (1 << 20, true), (40 << 20, false), (40 << 20, true)]);
    for stage in stages {
        for figure in
            ["raw_ms", "raw_chunks_ms", "hash_ms", "bound_ms", "last_ms", "total_ms", "seed_arena_ms"]
        {
            if figure != "seed_arena_ms" || stage["verify"] == false {
                positive(stage, figure);
            }
        }
        assert_eq!((&stage["transport"], &stage["repeats"]), (&"ipc".into(), &2.into()));
        let clone = &stage["clones"][0];
        for figure in
            ["export_ms", "map_ms", "driver_ms", "copy_ms", "transfer_ms", "ready_ms", "bytes_per_s"]
        {
            positive(clone, figure);
        }
        assert_eq!(clone["verified_ms"].is_null(), stage["verify"] == false);
        let sum = clone["export_ms"].as_f64().unwrap() + clone["map_ms"].as_f64().unwrap();
        assert!(stage["total_ms"].as_f64().unwrap() > sum, "set-up is in the total: {stage}");
    }
}

#[test]
fn chains_stars_rings_and_imports_are_measured_to_the_last_rank() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let run = |args: &[&str]| ok(&place, Some(&driver), args);
    let shapes = |report: &Value| -> Vec<(String, usize)> {
        let stages = report["stages"].as_array().unwrap().iter();
        let shape =
            |s: &Value| (s["topology"].as_str().unwrap().to_owned(), s["clones"].as_array().unwrap().len());
        stages.map(shape).collect()
    };
    let named = |all: &[(&str, usize)]| all.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect::<Vec<_>>();

    let report = run(&[
        "topology",
        "--device",
        "cuda:*",
        "--size",
        "48MiB",
        "--clones",
        "1,3",
        "--repeats",
        "1",
        "--chunk",
        "16MiB",
    ]);
    assert_eq!(shapes(&report), named(&[("star", 1), ("chain", 1), ("star", 3), ("chain", 3)]));
    let chain = &report["stages"][3];
    positive(chain, "raw_together_ms");
    positive(chain, "ideal_ms");

    let report = run(&[
        "chunk",
        "--device",
        "cuda:0",
        "--size",
        "48MiB",
        "--clones",
        "2",
        "--chunks",
        "16MiB..32MiB",
        "--repeats",
        "1",
    ]);
    let chunks: Vec<_> =
        report["stages"].as_array().unwrap().iter().map(|s| s["chunk_bytes"].as_u64().unwrap()).collect();
    assert_eq!(chunks, [16 << 20, 32 << 20]);

    let report = run(&[
        "gather",
        "--device",
        "cuda:*",
        "--sizes",
        "32MiB",
        "--nodes",
        "3",
        "--repeats",
        "2",
        "--vs",
        "nccl",
    ]);
    assert_eq!(shapes(&report), named(&[("ring", 3), ("ring", 3)]));
    // No torch here, or no NCCL that takes these GPUs: said, not left out.
    assert_eq!(report["nccl"].is_null(), report["nccl_missing"].is_string());

    let report = run(&["setup", "--device", "cuda:0", "--sizes", "16MiB", "--repeats", "2"]);
    let clone = &report["stages"][0]["clones"][0];
    assert!(clone["map_ms"].as_f64().unwrap() >= clone["driver_ms"].as_f64().unwrap(), "{clone}");

    let report = run(&["hash", "--device", "cuda:1", "--sizes", "16MiB", "--repeats", "2"]);
    positive(&report["hashes"][0], "bytes_per_s");
}

#[test]
fn host_memory_has_no_gpus_times() {
    let place = Place::new();
    let report = ok(&place, None, &["copy", "--device", "host", "--sizes", "1MiB", "--repeats", "2"]);
    let stage = &report["stages"][0];
    positive(stage, "last_ms");
    assert!(stage["raw_ms"].is_null() && stage["clones"][0]["copy_ms"].is_null(), "{stage}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let place = Place::new();
    for args in [
        &["copy", "--sizes", "8GiB..1MiB"][..],
        &["copy", "--repeats", "0"],
        &["gather", "--nodes", "1"],
        &["copy", "--vs", "mpi"],
        &["hash", "--device", "host"],
    ] {
        let (exit, report) = bench(&place, None, args);
        assert_eq!(exit, 2, "{args:?}: {report}");
    }
    let (exit, report) = bench(&place, None, &["copy", "--device", "cuda:0", "--sizes", "1MiB"]);
    assert_eq!(exit, 1, "{report}");
    assert!(report["error"]["remedy"].as_str().is_some_and(|remedy| remedy.contains("driver")), "{report}");
}
