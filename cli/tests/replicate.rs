//! `replicate` with real processes: every topology and size, and what is left when somebody dies.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{LIMIT, until},
    object, said, text,
};
use serde_json::Value;
use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

fn clones(report: &Value) -> &Vec<Value> {
    report["clones"].as_array().unwrap()
}

fn check(report: &Value, n: usize, blocks: u64, chunks: u64) {
    for field in ["transport", "topology", "processes", "bytes", "chunk_bytes", "setup_ms", "tail_ms"] {
        assert!(!report[field].is_null(), "`{field}` is missing in {report}");
    }
    assert_eq!(clones(report).len(), n);
    for (clone, index) in clones(report).iter().zip(1u64..) {
        for field in ["source", "map_ms", "ready_ms", "bytes_per_s", "chunks", "verified", "repaired"] {
            assert!(!clone[field].is_null(), "`{field}` is missing in {clone}");
        }
        assert_eq!(clone["index"], index);
        assert_eq!((&clone["verified"], &clone["chunks"]), (&blocks.into(), &chunks.into()), "{clone}");
        assert_eq!(clone["repaired"], 0);
        assert!(clone["ready_ms"].as_f64() <= report["tail_ms"].as_f64());
    }
}

fn sources(report: &Value) -> Vec<u64> {
    clones(report).iter().map(|clone| clone["source"].as_u64().unwrap()).collect()
}

#[test]
fn every_topology_reaches_every_clone() {
    let place = Place::new();
    let image = place.image("m", &[("a", 16 * MIB), ("b", 17 * MIB), ("c", 9)]);
    let image = text(&image);
    for (topology, n, expected) in [
        ("chain", "1", &[0][..]),
        ("chain", "5", &[0, 1, 2, 3, 4]),
        ("star", "3", &[0, 0, 0]),
        ("tree", "5", &[0, 1, 1, 3, 1]),
    ] {
        let report = place.ok(&["replicate", image, "-n", n, "--topology", topology, "--chunk", "16MiB"]);
        check(&report, expected.len(), 3, 3);
        assert_eq!((&report["topology"], &report["transport"]), (&topology.into(), &"ipc".into()));
        assert_eq!(report["processes"], true);
        assert_eq!(sources(&report), expected, "{topology}");
    }
    let whole = place.ok(&["replicate", image, "--chunk", "64MiB"]);
    check(&whole, 1, 3, 1);
    let fast = place.ok(&["replicate", image, "--no-verify", "--transport", "ipc"]);
    check(&fast, 1, 0, 1);
    assert_eq!((&fast["verify"], &fast["fallbacks"]), (&false.into(), &0.into()));
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn tcp_comes_last_and_serves_where_nothing_better_may() {
    let place = Place::new();
    let image = place.image("m", &[("a", 40 * MIB)]);
    let image = text(&image);
    let token = place.path("token");
    fs::write(&token, "a secret of enough bytes\n").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let run = |more: &[&str]| {
        let report = place.ok(&[&["replicate", image, "-n", "3", "--chunk", "16MiB"], more].concat());
        check(&report, 3, 3, 3);
        report
    };
    assert_eq!(run(&[])["transport"], "ipc");
    for more in [
        &["--transport", "tcp"][..],
        &["--transport", "tcp", "--topology", "star", "--connections", "1", "--bind", "::1"],
        &["--transport", "tcp", "--tls", "on", "--token-file", text(&token)],
    ] {
        let report = run(more);
        assert_eq!((&report["transport"], &report["fallbacks"]), (&"tcp".into(), &0.into()), "{report}");
    }
    let fallen = run(&["--allow", "imex,tcp"]);
    assert_eq!(fallen["transport"], "tcp");
    let passed = fallen["passed_over"].as_array().unwrap();
    assert!(
        passed.iter().any(|p| p["name"] == "imex" && !p["reason"].as_str().unwrap().is_empty()),
        "{fallen}"
    );
    assert_ne!(fallen["fallbacks"], 0, "a fallback is counted");
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn every_size_arrives() {
    let place = Place::new();
    for (name, tensors, blocks) in [
        ("none", &[][..], 0),
        ("empty", &[("t", 0)], 0),
        ("one", &[("t", 1)], 1),
        ("block", &[("t", 16 * MIB)], 1),
        ("more", &[("t", 16 * MIB), ("u", 1)], 2),
    ] {
        let image = place.image(name, tensors);
        for transport in ["ipc", "tcp", "mock"] {
            let report = place.ok(&["replicate", text(&image), "-n", "2", "--transport", transport]);
            check(&report, 2, blocks, blocks);
        }
    }
}

#[test]
fn the_mock_is_one_process_in_virtual_time_and_repeats_itself() {
    let place = Place::new();
    let image = place.image("m", &[("a", 40 * MIB)]);
    let run = || place.ok(&["replicate", text(&image), "-n", "4", "--transport", "mock", "--chunk", "16MiB"]);
    let report = run();
    check(&report, 4, 3, 3);
    assert_eq!((&report["processes"], &report["virtual_time"]), (&false.into(), &true.into()));
    assert_eq!(run(), report);
}

#[test]
fn survivors_finish_when_a_clone_is_killed() {
    let place = Place::new();
    let image = place.image("m", &[("a", 8 * 16 * MIB)]);
    for transport in ["ipc", "tcp", "mock"] {
        let args = [
            "replicate",
            text(&image),
            "-n",
            "4",
            "--chunk",
            "16MiB",
            "--transport",
            transport,
            "--kill",
            "2@2",
        ];
        let report = place.ok(&args);
        let [one, two, three, four] = clones(&report).as_slice() else { panic!("{report}") };
        assert_eq!(
            (&two["killed"], &two["verified"], &two["ready_ms"]),
            (&true.into(), &0.into(), &Value::Null)
        );
        for clone in [one, three, four] {
            assert_eq!((&clone["verified"], &clone["killed"]), (&8.into(), &false.into()), "{clone}");
        }
        // The dead clone's reader went on at another holder: the first, or the seed once that has nobody else. Nobody else
        // was disturbed.
        assert_eq!(three["losses"], 1, "{transport}: {three}");
        assert!(three["source"].as_u64() <= Some(1), "{transport}: {three}");
        assert_eq!((&one["losses"], &four["losses"]), (&0.into(), &0.into()));
    }
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

/// Processes whose command line has `needle`.
fn processes(needle: &Path) -> Vec<u32> {
    let found = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        String::from_utf8_lossy(&line).contains(text(needle)).then_some(pid)
    });
    found.collect()
}

fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

/// A replication that hangs, since one of its workers is stopped; the pid of that worker. On a busy machine the
/// whole replication may pass between two looks: then another is tried.
fn stuck(place: &Place, image: &Path, extra: &[&str]) -> (std::process::Child, u32) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        let mut command = place.flashboot(&["replicate", text(image), "-n", "3", "--json"]);
        let mut parent = command.args(extra).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while parent.try_wait().unwrap().is_none() {
            if let Some(worker) = second_clone(&place.path("run"))
                && Command::new("kill").args(["-STOP", &worker.to_string()]).status().unwrap().success()
                && parent.try_wait().unwrap().is_none()
            {
                return (parent, worker);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    panic!("no replication was caught while it ran");
}

fn second_clone(run: &Path) -> Option<u32> {
    processes(run).into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.ends_with(b"--rank\x002\x00")
    })
}

#[test]
fn no_worker_outlives_its_parent() {
    let place = Place::new();
    let image = place.image("m", &[("a", 64 * MIB)]);
    let (mut parent, stopped) = stuck(&place, &image, &[]);
    parent.kill().unwrap();
    parent.wait().unwrap();
    // A stopped process cannot act on anything but a kill; the others go at once.
    signal(stopped, "-CONT");
    until("every worker is gone", || processes(&place.path("run")).is_empty());
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new(), "the run's directory goes with them");
}

#[test]
fn a_worker_without_a_parent_removes_nothing_that_is_not_a_runs() {
    let place = Place::new();
    for directory in ["precious", "flashboot-precious"] {
        let kept = place.path(directory).join("kept");
        fs::create_dir_all(kept.parent().unwrap()).unwrap();
        fs::write(&kept, "mine").unwrap();
        let board = format!("{directory}/board");
        // Its stdin is at its end: the parent is dead.
        let output = place
            .flashboot(&["worker", "--level", "warn", "--board", &board, "--rank", "0"])
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert_eq!(fs::read_to_string(&kept).unwrap(), "mine");
    }
}

#[test]
fn a_parent_that_is_asked_to_stop_ends_its_workers() {
    let place = Place::new();
    let image = place.image("m", &[("a", 64 * MIB)]);
    let (parent, _) = stuck(&place, &image, &[]);
    signal(parent.id(), "-TERM");
    let output = parent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(object(&output)["error"]["kind"], "cancelled");
    until("every worker is gone", || processes(&place.path("run")).is_empty());
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_worker_that_dies_in_set_up_is_named_with_its_end() {
    let place = Place::new();
    let image = place.image("m", &[("a", 64 * MIB)]);
    let (parent, worker) = stuck(&place, &image, &[]);
    signal(worker, "-KILL");
    let output = parent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let message = object(&output)["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("clone 2") && message.contains("signal 9"), "{message}");
    assert!(processes(&place.path("run")).is_empty());
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_worker_that_hangs_is_named_at_the_deadline() {
    let place = Place::new();
    let image = place.image("m", &[("a", 64 * MIB)]);
    let (parent, _) = stuck(&place, &image, &["--setup-timeout", "3s", "--transfer-timeout", "3s"]);
    let output = parent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let object = object(&output);
    let error = &object["error"];
    assert_eq!(error["kind"], "deadline", "{error}");
    assert!(error["message"].as_str().unwrap().contains("clone 2"), "{error}");
    assert!(processes(&place.path("run")).is_empty(), "a stopped worker is killed all the same");
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_seed_that_dies_before_anyone_has_everything_ends_the_run_soon_and_is_named() {
    let place = Place::new();
    let image = place.image("m", &[("a", 64 * MIB)]);
    let slow = ["--transport", "tcp", "--rate", "500KB", "-n", "2", "--chunk", "16MiB", "--json"];
    let mut command = place.flashboot(&[&["replicate", text(&image)][..], &slow].concat());
    let parent = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let seed = || {
        let is_seed = |pid: &u32| {
            fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().ends_with(b"--rank\x000\x00")
        };
        processes(&place.path("run")).into_iter().find(is_seed)
    };
    until("the seed is there", || seed().is_some());
    // Into the transfer, of two minutes, or the set-up: either is to end.
    thread::sleep(Duration::from_secs(2));
    signal(seed().unwrap(), "-KILL");
    let killed = Instant::now();
    let output = parent.wait_with_output().unwrap();
    assert!(killed.elapsed() < LIMIT, "{:?}", killed.elapsed());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let message = object(&output)["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("seed") && message.contains("signal 9"), "{message}");
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn two_replications_do_not_disturb_each_other() {
    let place = Place::new();
    let image = place.image("m", &[("a", 40 * MIB)]);
    let both: Vec<_> = (0..2)
        .map(|_| {
            let mut command = place.flashboot(&["replicate", text(&image), "-n", "2", "--json"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in both {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        check(&object(&output), 2, 3, 3);
    }
}

#[test]
fn a_reader_that_goes_away_early_is_no_panic() {
    let place = Place::new();
    let image = place.image("m", &[("a", MIB)]);
    for args in
        [&["replicate", text(&image)][..], &["inspect", text(&image)], &["config", "show"], &["--help"]]
    {
        let mut command = place.flashboot(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let status = child.wait().unwrap();
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
        assert_eq!(status.code(), Some(0), "{args:?}: {stderr}");
    }
}
