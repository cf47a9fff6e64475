//! `simulate` and `advise`: their contract, their refusals, their files.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::{Place, said};
use serde_json::Value;
use std::{fs, process::Command};

fn ms(object: &Value, field: &str) -> f64 {
    object[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {object}"))
}

#[test]
fn simulate_prints_the_contracts_fields() {
    let place = Place::new();
    let args = ["simulate", "-p", "gb300", "-s", "2GiB", "-n", "4", "--chunk", "128MiB"];
    let found = place.ok(&args);
    let clones = found["clones"].as_array().unwrap();
    assert_eq!(clones.len(), 4);
    for (index, clone) in clones.iter().enumerate() {
        assert_eq!(clone["index"], index);
        let rate = (2u64 << 30) as f64 / ms(clone, "ms") * 1e3;
        assert!((ms(clone, "bytes_per_s") / rate - 1.0).abs() < 1e-9);
    }
    assert_eq!(found["first_ms"], clones[0]["ms"]);
    assert_eq!(found["last_ms"], clones[3]["ms"]);
    assert_eq!(found["chunk_bytes"], 128u64 << 20);
    assert_eq!(found, place.ok(&args), "one seed is one history");
}

#[test]
fn every_topology_and_option_runs() {
    let place = Place::new();
    let base = ["simulate", "-p", "h100-roce", "-s", "1GiB", "-n", "6", "--ranks", "2"];
    for more in [
        &["-t", "star", "--chunk", "whole"][..],
        &["-t", "tree", "--tree-length", "2", "--tree-fanout", "1"],
        &["-t", "placed", "--seeds", "2"],
        &["-t", "ring", "--load", "disk"],
        &["-t", "staggered", "--load", "staged"],
        &["-t", "whole-chunk-ring"],
        &["--fail", "0.3", "--slow", "0.5x0.5", "--seed", "7", "--uneven", "0.1"],
        &["--per-host", "1", "--depth", "1", "--no-verify"],
    ] {
        let found = place.ok(&[&base[..], more].concat());
        let (first, last) = (ms(&found, "first_ms"), ms(&found, "last_ms"));
        assert!(0.0 < first && first <= last, "{more:?}: {found}");
        assert_eq!(found.get("load").is_some(), more.contains(&"--load"), "{more:?}");
    }
}

#[test]
fn a_sweep_gives_its_points_and_the_best_of_them() {
    let place = Place::new();
    let svg = place.path("curve.svg");
    let base = ["simulate", "-p", "gb300", "-s", "8GiB", "-n", "8", "--no-verify", "--sweep"];
    let found = place.ok(&[&base[..], &["chunk", "--svg", common::text(&svg)]].concat());
    let points = found["points"].as_array().unwrap();
    assert_eq!(points.len(), 8, "16 MiB to 2 GiB");
    let least = points.iter().map(|p| ms(p, "last_ms")).fold(f64::INFINITY, f64::min);
    assert!((ms(&found, "last_ms") - least).abs() < 1e-9);
    assert!(fs::read_to_string(&svg).unwrap().contains("<polyline"));
    let found = place.ok(&[&base[..], &["clones"]].concat());
    let clones: Vec<_> = found["points"].as_array().unwrap().iter().map(|p| p["clones"].as_u64()).collect();
    assert_eq!(clones, [1, 2, 4, 8].map(Some));
}

#[test]
fn a_timeline_is_written_and_people_are_told_what_was_never_measured() {
    let place = Place::new();
    let svg = place.path("time.svg");
    let run = |profile: &str| {
        let args = ["simulate", "-p", profile, "-s", "256MiB", "-n", "3", "--svg", common::text(&svg)];
        let output = place.flashboot(&args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    for profile in ["h100-roce", "racks8"] {
        assert!(run(profile).contains("unvalidated"), "{profile}");
    }
    for profile in ["gb300", "h200", "h200x2"] {
        assert!(run(profile).contains("validated against"), "{profile}");
    }
    assert!(fs::read_to_string(&svg).unwrap().contains("<title>chunk 0 from a seed"));
}

#[test]
fn a_profile_of_ones_own_is_read_from_its_file() {
    let place = Place::new();
    let built_in = include_str!("../../sim/profiles/gb300.toml");
    let path = place.path("mine.toml");
    fs::write(&path, built_in.replace("rate = 825.9e9", "rate = 100e9")).unwrap();
    let last = |profile: &str| {
        ms(&place.ok(&["simulate", "-p", profile, "-s", "8GiB", "-n", "1", "--no-verify"]), "last_ms")
    };
    let slower = last(common::text(&path)) / last("gb300");
    assert!((7.0..9.0).contains(&slower), "{slower}");
    let object = place.ok(&["simulate", "-p", common::text(&path), "-s", "1GiB", "-n", "1"]);
    assert_eq!(object["validated"], Value::Null, "what the file says of itself is not believed");
}

#[test]
fn what_cannot_be_is_bad_usage_and_one_object() {
    let place = Place::new();
    let good = ["simulate", "-p", "gb300", "-s", "1GiB"];
    fs::write(place.path("broken.toml"), "name = [").unwrap();
    fs::write(place.path("long.toml"), "# ".repeat(1 << 20)).unwrap();
    // Nobody writes into it: who opens it waits for ever.
    assert!(Command::new("mkfifo").arg(place.path("pipe.toml")).status().unwrap().success());
    for (args, named) in [
        (&["simulate", "-p", "dgx", "-s", "1GiB"][..], "gb300"),
        (&["simulate", "-p", "broken.toml", "-s", "1GiB"], "broken.toml"),
        (&[&good[..], &["-n", "100"]].concat(), "72"),
        (&[&good[..], &["--chunk", "1MB"]].concat(), "chunk"),
        (&[&good[..], &["--fail", "2"]].concat(), "--fail"),
        (&[&good[..], &["-t", "ring", "--fail", "0.1"]].concat(), "all-gather"),
        (&["simulate", "-p", "gb300", "-s", "1024TiB", "--chunk", "16MiB"], "--chunk"),
        (&["simulate", "-p", "h200", "-s", "1GiB", "-n", "1000"], "64 processes"),
        (&[&good[..], &["--tree-length", "4"]].concat(), "--topology tree"),
        (&[&good[..], &["-t", "ring", "--seeds", "2"]].concat(), "--seeds"),
        (&[&good[..], &["--sweep", "chunk", "--chunk", "64MiB"]].concat(), "--chunk"),
        (&["simulate", "-p", "pipe.toml", "-s", "1GiB"], "a file"),
        (&["simulate", "-p", "long.toml", "-s", "1GiB"], "1 MiB"),
        (&[&good[..], &["--slow", "half"]].concat(), "0.05x0.5"),
        (&[&good[..], &["--load", "disk"]].concat(), "--load"),
        (&[&good[..], &["-t", "ring", "--load", "disk"]].concat(), "memory.disk"),
        (&["advise", "-p", "gb300", "-s", "1GiB", "--seeds", "0"], "--seeds"),
    ] {
        let (code, object) = place.json(args);
        assert_eq!(code, 2, "{args:?}: {object}");
        assert!(object["error"]["message"].as_str().unwrap().contains(named), "{args:?}: {object}");
    }
    let (code, object) = place.json(&["simulate", "-p", "absent.toml", "-s", "1GiB"]);
    assert_eq!((code, object["error"]["kind"].as_str()), (1, Some("io")), "{object}");
    let (code, object) = place.json(&["simulate", "-p", "gb300", "-s", "1GiB", "--fail", "1"]);
    assert_eq!((code, object["error"]["kind"].as_str()), (1, Some("source-lost")), "{object}");
}

#[test]
fn advise_names_a_topology_a_chunk_and_seeds_and_says_why() {
    let place = Place::new();
    let base = ["advise", "-p", "gb300", "-s", "8GiB", "-n", "8"];
    let found = place.ok(&base);
    assert_ne!(found["topology"], "star");
    assert_eq!((&found["seeds"], &found["meets"]), (&Value::from(1), &Value::Null));
    assert!(found["why"].as_array().unwrap().len() >= 3, "{found}");
    let tried = found["tried"].as_array().unwrap();
    assert!(tried.iter().any(|t| t["topology"] == "star" && ms(t, "last_ms") > ms(&found, "last_ms")));
    let found = place.ok(&[&base[..], &["--within", "1ms"]].concat());
    assert_eq!(found["meets"], false, "no wire is so quick");
    let output = place.flashboot(&base).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("and not star") && text.contains("busiest link"), "{text}");
}
