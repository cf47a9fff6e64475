//! `flashboot load` with real processes: every source, and going on elsewhere in the middle.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{Fleet, Proc},
    flip, object, said,
    stand_in::Driver,
    text,
};
use serde_json::Value;
use std::{fs, path::PathBuf};

const TENSORS: [(&str, usize); 3] = [("a", 40 * MIB), ("b", 30 * MIB), ("c", 9)];

/// A checkpoint `m` and its image.
fn place() -> (Place, PathBuf, PathBuf) {
    let place = Place::new();
    let image = place.image("m", &TENSORS);
    let checkpoint = place.path("m");
    (place, checkpoint, image)
}

fn payload(image: &std::path::Path) -> PathBuf {
    image.join("target-0-0-0-0.img")
}

#[test]
fn an_image_is_loaded_verified_and_accounted_for() {
    let (place, _, image) = place();
    let out = place.path("out");
    let bytes = fs::metadata(payload(&image)).unwrap().len();
    for engine in ["auto", "pread"] {
        let report = place.ok(&["load", text(&image), "--engine", engine, "-o", text(&out)]);
        assert!(fs::read(&out).unwrap() == fs::read(payload(&image)).unwrap());
        assert_eq!((&report["source"], &report["verified"]), (&"image".into(), &true.into()));
        for field in ["bytes_needed", "bytes_read", "bytes_copied"] {
            assert_eq!(report[field], bytes, "{field}: {report}");
        }
        assert!(report["engine_visible_ms"].as_f64().unwrap() > 0.0);
        assert!(report["bytes_per_s"].as_f64().unwrap() > 0.0 && report["peak_host_bytes"].is_u64());
        for phase in ["connect", "io_wait", "read", "verify", "pin", "h2d", "unpin", "bind"] {
            assert!(report["phases_ms"][phase].is_f64(), "{phase}: {report}");
        }
        assert!(report["phases_ms"]["read"].as_f64().unwrap() > 0.0);
    }
    let output = place.flashboot(&["load", text(&image), "--memlog"]).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("every block verified"), "{}", said(&output));
    assert_eq!(stderr.lines().filter(|line| line.contains("unaccounted")).count(), 3, "{}", said(&output));
}

#[test]
fn a_damaged_image_is_refused_and_with_the_checkpoint_at_hand_mended() {
    let (place, checkpoint, image) = place();
    flip(&payload(&image), 20 << 20);
    let (exit, report) = place.json(&["load", text(&image)]);
    assert_eq!((exit, &report["error"]["kind"]), (3, &"corrupt".into()), "{report}");
    let out = place.path("out");
    let all = ["load", text(&image), "--checkpoint", text(&checkpoint), "--threads", "1", "-o", text(&out)];
    let report = place.ok(&all);
    flip(&payload(&image), 20 << 20);
    assert!(fs::read(&out).unwrap() == fs::read(payload(&image)).unwrap());
    assert_eq!((&report["source"], &report["failovers"]), (&"checkpoint".into(), &1.into()), "{report}");
    assert_eq!(report["verified"], true, "held to the image's digests");
    assert!(report["skips"][0]["reason"].as_str().unwrap().contains("block 1"), "{report}");
    // The other way round nothing is skipped.
    let report = place.ok(&[&all[..], &["--sources", "checkpoint,image"]].concat());
    assert_eq!((&report["source"], &report["failovers"]), (&"checkpoint".into(), &0.into()), "{report}");
}

#[test]
fn a_checkpoint_alone_is_loaded_and_not_called_verified() {
    let (place, checkpoint, image) = place();
    let out = place.path("out");
    let report = place.ok(&["load", text(&checkpoint), "-o", text(&out)]);
    assert!(fs::read(&out).unwrap() == fs::read(payload(&image)).unwrap(), "as packed");
    assert_eq!((&report["source"], &report["verified"]), (&"checkpoint".into(), &false.into()));
    let tensors: usize = TENSORS.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(
        (&report["bytes_needed"], &report["bytes_read"]),
        (&tensors.into(), &tensors.into()),
        "{report}"
    );
    assert!(report["peak_host_bytes"].as_u64().unwrap() > 0, "bounce buffers");
}

#[test]
fn bad_usage_and_what_is_not_there_say_what_to_do() {
    let (place, checkpoint, image) = place();
    assert_eq!(place.json(&["load"]).0, 2);
    assert_eq!(place.json(&["load", text(&image), "--rank", "target-0-1-0-0"]).0, 2);
    assert_eq!(place.json(&["load", text(&image), "--sources", "floppy"]).0, 2);
    assert_eq!(place.json(&["load", text(&checkpoint), "--checkpoint", text(&checkpoint)]).0, 2);
    let (exit, report) = place.json(&["load", text(&image), "--image", &"0".repeat(64)]);
    assert_eq!((exit, &report["error"]["kind"]), (3, &"mismatch".into()), "{report}");
    let (exit, report) = place.json(&["load", text(&image), "--sources", "peer"]);
    assert_eq!(exit, 2, "no source is left: {report}");
    fs::remove_file(payload(&image)).unwrap();
    let report = place.ok(&["load", text(&image), "--checkpoint", text(&checkpoint)]);
    assert!(report["source"] == "checkpoint" && report["skips"][0]["kind"] == "image", "{report}");
    let (exit, report) = place.json(&["load", text(&image)]);
    assert!(exit == 3 && report["error"]["detail"].as_str().unwrap().contains("no such file"), "{report}");
}

#[test]
fn into_a_gpu_within_the_budget() {
    let (place, checkpoint, image) = place();
    let mut driver = Driver::new(&place);
    // Memory that cannot be pinned is an error with the driver's call, and nothing hangs.
    driver.only("FAULTS", "cuMemHostAlloc:*:OUT_OF_MEMORY");
    let output =
        driver.on(place.flashboot(&["load", text(&image), "--device", "cuda:0", "--json"])).output().unwrap();
    let report = object(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report["error"]["message"].as_str().unwrap().contains("cuMemHostAlloc"), "{report}");
    driver.only("LATE_US", "500");
    let load = |args: &[&str]| -> Value {
        let all = [&["load", "--device", "cuda:0", "--json"], args].concat();
        let output = driver.on(place.flashboot(&all)).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        object(&output)
    };
    let out = place.path("out");
    let budget = 64 * MIB as u64;
    let report = load(&[text(&image), "-o", text(&out), "--budget", "64MiB", "--window", "16MiB"]);
    assert!(fs::read(&out).unwrap() == fs::read(payload(&image)).unwrap());
    assert_eq!(report["verified"], true);
    assert!(report["peak_host_bytes"].as_u64().unwrap() <= budget, "{report}");
    for phase in ["pin", "h2d", "read", "verify"] {
        assert!(report["phases_ms"][phase].as_f64().unwrap() > 0.0, "{phase}: {report}");
    }
    load(&[text(&checkpoint), "-o", text(&out)]);
    assert!(fs::read(&out).unwrap() == fs::read(payload(&image)).unwrap());
}

#[test]
fn from_other_ranks_and_on_from_the_image_when_the_only_one_dies() {
    let fleet = Fleet::new("tcp");
    let out = fleet.place.path("loaded");
    let mut seed = fleet.seed(&["--rate", "40MB"]);
    let args = ["load", "--model", "tiny", "-o", text(&out)];
    let report = Proc::start(fleet.member(&args)).object();
    assert!(fs::read(&out).unwrap() == fleet.payload());
    assert_eq!((&report["source"], &report["verified"]), (&"peer".into(), &true.into()), "{report}");
    assert!(report["phases_ms"]["connect"].as_f64().unwrap() > 0.0);
    // The same with the image at hand, which says what is asked for, and a seed that dies in the middle.
    fs::remove_file(&out).unwrap();
    let mut args = vec!["load", text(&fleet.image), "-o", text(&out), "--json"];
    args.extend([
        "--rendezvous",
        &fleet.endpoint,
        "--transport",
        "tcp",
        "--chunk",
        "16MiB",
        "--patience",
        "2s",
    ]);
    let mut loading = Proc::start(fleet.place.flashboot(&args));
    fleet.until("it has something", |members| {
        members.iter().any(|m| m["role"] == "clone" && m["holds"].as_u64() > Some(0))
    });
    seed.kill();
    let report = loading.object();
    assert!(fs::read(&out).unwrap() == fleet.payload());
    assert_eq!((&report["source"], &report["failovers"]), (&"image".into(), &1.into()), "{report}");
    let used = report["used"].as_array().unwrap();
    let bytes: Vec<u64> = used.iter().map(|used| used["bytes"].as_u64().unwrap()).collect();
    assert!(bytes[0] > 0 && bytes.iter().sum::<u64>() == fleet.payload().len() as u64, "{report}");
    // Nobody is left: with the image at hand that is a skip.
    let report = fleet.place.ok(&[
        "load",
        text(&fleet.image),
        "--rendezvous",
        &fleet.endpoint,
        "--model",
        "other",
        "--patience",
        "1s",
    ]);
    assert_eq!((&report["source"], &report["failovers"]), (&"image".into(), &0.into()), "{report}");
    assert_eq!(report["skips"][0]["kind"], "peer");
}
