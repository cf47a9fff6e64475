//! `bench` with real processes: on the stand-in driver, whose figures mean nothing but must be there, and in host memory.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{Place, object, said, stand_in::Driver};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

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
    positive(&report["stages"][0], "seed_export_ms");
    let clone = &report["stages"][0]["clones"][0];
    assert!(clone["map_ms"].as_f64().unwrap() >= clone["driver_ms"].as_f64().unwrap(), "{clone}");

    let report = run(&["hash", "--device", "cuda:1", "--sizes", "16MiB", "--repeats", "2"]);
    positive(&report["hashes"][0], "bytes_per_s");
}

#[test]
fn ranks_wait_for_stages_that_are_not_theirs() {
    let place = Place::new();
    let args = |clones, repeats| {
        [
            "bench",
            "topology",
            "--device",
            "host",
            "--size",
            "1MiB",
            "--repeats",
            repeats,
            "--clones",
            clones,
            "--json",
        ]
    };
    // The last rank has no part in the second half, and nobody shall think that it died.
    let report = object(&place.flashboot(&args("3,1", "2")).output().unwrap());
    assert_eq!(report["stages"].as_array().map(Vec::len), Some(4), "{report}");
    // Its part comes later than its set-up may take.
    let mut command = place.flashboot(&args("1,3", "200"));
    let output = command.env("FLASHBOOT_REPLICATE__SETUP_TIMEOUT", "4s").output().unwrap();
    let report = object(&output);
    assert_eq!(report["stages"].as_array().map(Vec::len), Some(4), "{report}");
}

#[test]
fn what_is_configured_of_a_transport_is_what_is_measured() {
    let place = Place::new();
    let args = ["copy", "--device", "host", "--transport", "tcp", "--sizes", "4MiB", "--repeats", "1"];
    let mut command = place.flashboot(&[&["bench"], &args[..], &["--json"]].concat());
    let report = object(&command.env("FLASHBOOT_TCP__RATE", "8MiB").output().unwrap());
    for stage in report["stages"].as_array().unwrap() {
        // Half a second, less a burst and the last slice.
        let took = stage["last_ms"].as_f64().unwrap();
        assert!(stage["transport"] == "tcp" && took > 400.0, "{stage}");
    }
}

/// A `python3` that does this, before every other.
fn python(place: &Place, script: &str) -> String {
    let bin = place.path("bin");
    fs::create_dir_all(&bin).unwrap();
    fs::write(bin.join("python3"), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(bin.join("python3"), Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", bin.display(), std::env::var("PATH").unwrap())
}

const VS_NCCL: [&str; 10] =
    ["bench", "copy", "--device", "cuda:0,1", "--sizes", "1MiB", "--repeats", "1", "--vs", "nccl"];

#[test]
fn a_rank_of_nccl_that_fails_is_told_without_waiting_for_the_others() {
    let place = Place::new();
    let driver = Driver::new(&place);
    // Arguments: -c SCRIPT RANK …
    let path = python(&place, "[ \"$3\" = 1 ] && { echo no NCCL here >&2; exit 1; }; exec sleep 200");
    let mut command = driver.on(place.flashboot(&[&VS_NCCL[..], &["--json"]].concat()));
    let began = Instant::now();
    let report = object(&command.env("PATH", path).output().unwrap());
    assert!(report["nccl_missing"].as_str().is_some_and(|why| why.contains("no NCCL here")), "{report}");
    assert!(began.elapsed() < Duration::from_secs(100), "{:?}", began.elapsed());
}

#[test]
fn a_signal_ends_it_while_nccl_is_measured_too() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let started = place.path("started");
    let path = python(&place, &format!("echo $$ >> {}; exec sleep 200", started.display()));
    let mut command = driver.on(place.flashboot(&[&VS_NCCL[..], &["--json"]].concat()));
    command.env("PATH", path).stdout(Stdio::piped()).stderr(Stdio::piped());
    let bench = command.spawn().unwrap();
    let began = Instant::now();
    let pids = loop {
        let pids = fs::read_to_string(&started).unwrap_or_default();
        if pids.lines().count() == 2 {
            break pids;
        }
        assert!(began.elapsed() < Duration::from_secs(100), "NCCL's ranks were not started");
        std::thread::sleep(Duration::from_millis(10));
    };
    let asked = Instant::now();
    let pid = Pid::from_raw(bench.id().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let output = bench.wait_with_output().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(100), "{:?}", asked.elapsed());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(object(&output)["error"]["kind"], "cancelled");
    while pids
        .lines()
        .any(|pid| fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.contains("200")))
    {
        assert!(asked.elapsed() < Duration::from_secs(100), "NCCL's ranks live on");
        std::thread::sleep(Duration::from_millis(10));
    }
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
        &["topology", "--device", "host", "--clones", "0"],
        &["chunk", "--device", "host", "--clones", "0"],
        &["chunk", "--device", "host", "--chunks", "17MiB"],
        &["copy", "--device", "host", "--chunk", "17MiB"],
    ] {
        let (exit, report) = bench(&place, None, args);
        assert_eq!(exit, 2, "{args:?}: {report}");
    }
    let (_, report) = bench(&place, None, &["topology", "--clones", "abc"]);
    assert!(report["error"]["message"].as_str().unwrap().contains("`abc` is no whole number"), "{report}");
    let help = place.flashboot(&["bench", "topology", "--help"]).output().unwrap();
    assert!(said(&help).contains("[default: 1,2,4]"), "{}", said(&help));
    let (exit, report) = bench(&place, None, &["copy", "--device", "cuda:0", "--sizes", "1MiB"]);
    assert_eq!(exit, 1, "{report}");
    assert!(report["error"]["remedy"].as_str().is_some_and(|remedy| remedy.contains("driver")), "{report}");
}

const ONE_COPY: [&str; 7] = ["bench", "copy", "--sizes", "1MiB", "--repeats", "1", "--json"];

/// The lines on stderr.
fn lines(output: &std::process::Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect()
}

#[test]
fn host_memory_is_measured_in_place_of_gpus_that_cannot_be_used_with_the_reason() {
    let place = Place::new();
    let mut driver = Driver::new(&place);
    for (variable, value, words) in [
        ("MIG", "1", "MIG instance"),
        ("DRIVER_VERSION", "11000", "CUDA 11.0"),
        ("DEVICES", "0", "NO_DEVICE"),
        ("VISIBLE", "", "NO_DEVICE"),
        ("JUNK", "", "cannot be loaded"),
    ] {
        let mut command = place.flashboot(&[&ONE_COPY[..], &["--vs", "nccl"]].concat());
        driver.only(variable, value);
        command = driver.on(command);
        match variable {
            "VISIBLE" => drop(command.env("CUDA_VISIBLE_DEVICES", "")),
            "JUNK" => {
                let junk = place.path("junk");
                fs::create_dir(&junk).unwrap();
                fs::write(junk.join("libcuda.so.1"), "").unwrap();
                fs::write(junk.join("libcuda.so"), "").unwrap();
                command.env("LD_LIBRARY_PATH", junk);
            }
            _ => {}
        }
        let output = command.output().unwrap();
        let (report, told) = (object(&output), lines(&output));
        assert_eq!(report["gpus"], Value::Array(Vec::new()), "{variable}");
        assert!(report["gpus_missing"].as_str().unwrap().contains(words), "{variable}: {report}");
        assert_eq!(told.len(), 1, "{variable}: {told:?}");
        assert!(told[0].contains("host memory is measured, the GPUs cannot be used"), "{told:?}");
        assert!(told[0].contains(words), "{told:?}");
        let nccl = report["nccl_missing"].as_str().unwrap();
        assert!(nccl.contains("host memory was measured") && !nccl.contains("one GPU"), "{nccl}");
    }
}

#[test]
fn host_memory_is_measured_where_there_is_no_driver_and_one_line_says_so() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let nowhere = place.path("nowhere");
    fs::create_dir(&nowhere).unwrap();
    let output = driver.on(place.flashboot(&ONE_COPY)).env("LD_LIBRARY_PATH", nowhere).output().unwrap();
    let (report, told) = (object(&output), lines(&output));
    // A machine with a driver of its own has GPUs.
    let line = "flashboot: host memory is measured: no libcuda.so.1 on this machine's library path";
    let none = report["gpus"].as_array().unwrap().is_empty();
    assert_eq!(none, told == [line], "{told:?}: {report}");
}

#[test]
fn what_does_not_fit_is_left_out_and_said_and_the_rest_is_measured() {
    let place = Place::new();
    let mut driver = Driver::new(&place);
    driver.only("MEM", "256MiB");
    let args = ["copy", "--device", "cuda:0,1", "--repeats", "1", "--sizes"];
    let report = ok(&place, Some(&driver), &[&args[..], &["1MiB,512MiB"]].concat());
    let sizes: Vec<_> =
        report["stages"].as_array().unwrap().iter().map(|s| s["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1 << 20, 1 << 20]);
    let skipped = report["skipped"].as_array().unwrap();
    assert_eq!((skipped.len(), &skipped[0]["bytes"]), (1, &(512_u64 << 20).into()), "{report}");
    let command = driver.on(place.flashboot(&[&["bench"], &args[..], &["1MiB,512MiB"]].concat()));
    let output = { command }.output().unwrap();
    assert!(
        lines(&output).iter().any(|line| line.contains("not measured: star of 2, 512MiB")),
        "{}",
        said(&output)
    );
    let (exit, report) = bench(&place, Some(&driver), &[&args[..], &["512MiB,1GiB"]].concat());
    assert_eq!((exit, &report["error"]["kind"]), (1, &"exhausted".into()), "{report}");
    let report = ok(
        &place,
        Some(&driver),
        &["hash", "--device", "cuda:0", "--repeats", "1", "--sizes", "16MiB,512MiB"],
    );
    assert_eq!(
        (report["hashes"].as_array().unwrap().len(), &report["skipped"][0]["bytes"]),
        (1, &(512_u64 << 20).into())
    );
}

#[test]
fn what_was_measured_before_an_error_is_printed_with_it() {
    let place = Place::new();
    let mut driver = Driver::new(&place);
    let args =
        ["copy", "--device", "cuda:0,1", "--transport", "ipc", "--repeats", "1", "--sizes", "1MiB,17MiB"];
    let mut in_the_middle = 0;
    for nth in 4..10 {
        driver.only("FAULTS", &format!("cuMemCreate:{nth}:LAUNCH_FAILED"));
        let (exit, report) = bench(&place, Some(&driver), &args);
        if exit == 0 {
            break;
        }
        let message = report["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("bench: "), "{message}");
        let Some(stages) = report["stages"].as_array() else { continue };
        in_the_middle += 1;
        assert_eq!((stages.len(), &stages[1]["bytes"]), (2, &(1 << 20).into()), "{report}");
        let output = driver.on(place.flashboot(&[&["bench"], &args[..]].concat())).output().unwrap();
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(table.contains("1MiB") && !table.contains("17MiB"), "{}", said(&output));
        assert!(lines(&output).last().unwrap().starts_with("flashboot: bench: "), "{}", said(&output));
    }
    assert!(in_the_middle > 0, "no error fell into the middle");
}

#[test]
fn a_hash_without_its_kernel_says_what_to_do_and_set_up_says_what_it_measured() {
    let place = Place::new();
    let mut driver = Driver::new(&place);
    let setup = ["bench", "setup", "--device", "cuda:0", "--sizes", "16MiB", "--repeats", "1"];
    let output = driver.on(place.flashboot(&setup)).output().unwrap();
    let told = lines(&output);
    assert!(told.iter().any(|line| line.contains("imported in")), "{told:?}");
    assert!(told.iter().all(|line| !line.contains("last ready")), "{told:?}");
    driver.only("NO_KERNEL", "1");
    let (exit, report) = bench(&place, Some(&driver), &["hash", "--device", "cuda:0", "--sizes", "16MiB"]);
    assert_eq!(exit, 1, "{report}");
    assert!(report["error"]["remedy"].as_str().unwrap().contains("compute capability"), "{report}");
}
