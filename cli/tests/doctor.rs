//! `doctor` reports what works, on a machine without a GPU and on the stand-in driver, and mends nothing.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{Place, object, said, stand_in::Driver};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn diagnosis(mut command: Command) -> Value {
    let output = command.arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let found = object(&output);
    for transport in found["transports"].as_array().unwrap() {
        assert!(!transport["reason"].as_str().unwrap().is_empty(), "{transport}");
        if transport["ready"] == false {
            assert!(!transport["remedy"].as_str().unwrap().is_empty(), "{transport}");
        }
    }
    for check in found["checks"].as_array().unwrap() {
        assert!(check["name"].is_string() && check["needed"].is_string(), "{check}");
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
        assert_eq!(check["ok"] == false, check["remedy"].is_string(), "{check}");
    }
    found
}

fn named<'v>(list: &'v Value, name: &str) -> &'v Value {
    list.as_array().unwrap().iter().find(|one| one["name"] == name).unwrap()
}

/// A library path without a driver, whatever this machine has.
fn without_driver(place: &Place) -> Driver {
    let driver = Driver::new(place);
    let library = place.path("driver/lib/libcuda.so.1");
    fs::remove_file(&library).unwrap();
    // Found first, by either name, and no library.
    fs::write(&library, "").unwrap();
    fs::write(library.with_extension(""), "").unwrap();
    driver
}

#[test]
fn a_machine_without_a_usable_driver_is_a_finding() {
    let place = Place::new();
    let found = diagnosis(without_driver(&place).on(place.flashboot(&["doctor"])));
    let names: Vec<_> = found["transports"].as_array().unwrap().iter().map(|t| &t["name"]).collect();
    assert_eq!(names, ["imex", "ipc", "rdma", "tcp"]);
    assert_eq!(found["devices"], Value::Array(Vec::new()));
    let transports = &found["transports"];
    assert_eq!(named(transports, "ipc")["ready"], true);
    let imex = named(transports, "imex");
    assert_eq!(imex["ready"], false);
    assert!(imex["reason"].as_str().unwrap().contains("libcuda"), "{imex}");
    assert!(named(transports, "rdma")["reason"].as_str().unwrap().contains("libibverbs.so.1"));
    let libcuda = named(&found["checks"], "libcuda");
    assert_eq!(libcuda["ok"], false);
    assert!(libcuda["found"].as_str().unwrap().contains("cannot be loaded"), "{libcuda}");
    assert!(
        libcuda["found"].as_str().unwrap().contains("file too short"),
        "in the loader's words: {libcuda}"
    );
    assert!(libcuda["remedy"].as_str().unwrap().contains("LD_LIBRARY_PATH"), "{libcuda}");
    assert_eq!(named(transports, "tcp")["ready"], true);
    assert!(named(&found["checks"], "memfd sealing")["ok"].as_bool().unwrap());
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_gpu_that_claims_fabric_without_a_channel_is_told_so() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let found = diagnosis(driver.on(place.flashboot(&["doctor"])));
    let devices = found["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    assert!(devices[0]["uuid"].as_str().unwrap().starts_with("GPU-"));
    let imex = named(&found["transports"], "imex");
    assert_eq!(imex["ready"], false);
    let reason = imex["reason"].as_str().unwrap();
    assert!(reason.contains("claims FABRIC handles, but this process can open no IMEX channel"), "{reason}");
    assert!(reason.contains("CUDA_ERROR_NOT_PERMITTED"), "{reason}");
    assert!(imex["remedy"].as_str().unwrap().contains("nvidia-modprobe -c 0"), "{imex}");
    let ipc = named(&found["transports"], "ipc");
    assert_eq!(ipc["memory"].as_array().unwrap().iter().filter(|m| m["ready"] == true).count(), 3, "{ipc}");
    let checks = &found["checks"];
    assert_eq!(named(checks, "FABRIC attribute")["ok"], true);
    assert_eq!(named(checks, "FABRIC export")["ok"], false);
    assert_eq!(named(checks, "peer access")["ok"], true);

    let table = driver.on(place.flashboot(&["doctor"])).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("can open no IMEX channel") && table.contains("nvidia-modprobe -c 0"), "{table}");
}

#[test]
fn with_a_channel_imex_is_ready_and_one_gpu_can_be_chosen() {
    let place = Place::new();
    let driver = Driver::new(&place).with_imex();
    let found = diagnosis(driver.on(place.flashboot(&["doctor", "--device", "cuda:1"])));
    assert_eq!(found["devices"].as_array().unwrap().len(), 1);
    assert_eq!(found["devices"][0]["number"], 1);
    assert_eq!(named(&found["transports"], "imex")["ready"], true);
    for bad in [["--device", "the-big-one"], ["--timeout", "0s"]] {
        let bad = driver.on(place.flashboot(&[&["doctor"], &bad[..]].concat())).output().unwrap();
        assert_eq!(bad.status.code(), Some(2), "{}", said(&bad));
    }
    let ninth = driver.on(place.flashboot(&["doctor", "--device", "cuda:9"])).output().unwrap();
    let head = String::from_utf8_lossy(&ninth.stdout).lines().next().unwrap().to_owned();
    assert_eq!(head, "the GPU asked for is not to be used; this process sees 2 GPUs");
}

#[test]
fn it_ends_in_time_and_says_what_it_did_not_reach() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let began = Instant::now();
    let found = diagnosis(driver.on(place.flashboot(&["doctor", "--timeout", "1ms"])));
    // By itself it may take a minute.
    assert!(began.elapsed() < Duration::from_secs(40));
    let fabric = named(&found["checks"], "FABRIC export");
    assert!(fabric["found"].as_str().unwrap().starts_with("not tried: "), "{fabric}");
    assert_eq!(named(&found["transports"], "imex")["ready"], false);
}

#[test]
fn what_is_wrong_with_a_gpu_is_named() {
    for (variable, value, check, words) in [
        ("MIG", "1", "GPU", "MIG instance"),
        ("DEVICES", "0", "GPU", "NO_DEVICE"),
        ("DRIVER_VERSION", "12010", "driver version", "12.1"),
    ] {
        let place = Place::new();
        let mut driver = Driver::new(&place);
        driver.only(variable, value);
        let found = diagnosis(driver.on(place.flashboot(&["doctor"])));
        let check = named(&found["checks"], check);
        assert_eq!(check["ok"], false, "{variable}");
        assert!(check["found"].as_str().unwrap().contains(words), "{variable}: {check}");
        assert_eq!(named(&found["transports"], "ipc")["ready"], true, "{variable}: host memory works");
    }
}

/// A `doctor --listen` that ends with the test.
struct Listening(std::process::Child);

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// And what it is to be dialled at.
fn listens(place: &Place, more: &[&str]) -> (Listening, String) {
    let mut command = place.flashboot(&[&["doctor", "--listen", "127.0.0.1:0", "--json"], more].concat());
    let mut listening = Listening(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(listening.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let endpoint = serde_json::from_str::<Value>(&line).unwrap()["endpoint"].as_str().unwrap().to_owned();
    (listening, endpoint)
}

#[test]
fn two_doctors_read_each_other_and_a_slow_path_is_degraded() {
    let place = Place::new();
    let (listening, endpoint) = listens(&place, &[]);
    let paths = |floor: &str| {
        let found = place.ok(&["doctor", "--peer", &endpoint, "--floor", floor]);
        found["paths"].as_array().unwrap().clone()
    };
    let of = |paths: &[Value], name: &str| -> Vec<Value> {
        paths.iter().filter(|path| path["transport"] == name).cloned().collect()
    };
    let found = paths("1");
    for name in ["ipc", "tcp"] {
        let both = of(&found, name);
        let readers: Vec<_> = both.iter().map(|path| path["reader"].as_str().unwrap()).collect();
        assert_eq!(readers, ["here", "peer"]);
        for path in both {
            assert_eq!((&path["ready"], &path["degraded"]), (&true.into(), &false.into()), "{path}");
            assert!(
                path["latency_us"].as_f64().unwrap() > 0.0 && path["bytes_per_s"].as_f64().unwrap() > 0.0
            );
        }
    }
    for path in of(&found, "rdma") {
        assert!(path["ready"] == false && !path["reason"].as_str().unwrap().is_empty(), "{path}");
    }
    for path in of(&paths("1TiB"), "tcp") {
        assert_eq!((&path["ready"], &path["degraded"]), (&false.into(), &true.into()), "{path}");
        assert!(path["reason"].as_str().unwrap().contains("floor"), "{path}");
    }
    let (code, nobody) = place.json(&["doctor", "--peer", "127.0.0.1:1"]);
    assert_eq!((code, &nobody["error"]["peer"]), (1, &"127.0.0.1:1".into()));
    drop(listening);
}

#[test]
fn doctors_that_have_a_token_meet_only_who_has_it_too() {
    let place = Place::new();
    let token = |name: &str| {
        let path = place.path(name);
        let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&path).unwrap();
        write!(file, "the secret of {name}, long enough").unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (ours, another) = (token("ours"), token("another"));
    let (_listening, endpoint) = listens(&place, &["--token-file", &ours]);
    let (code, refused) = place.json(&["doctor", "--peer", &endpoint, "--token-file", &another]);
    assert_eq!((code, &refused["error"]["kind"]), (3, &"permission".into()), "{refused}");
    let met = place.ok(&["doctor", "--peer", &endpoint, "--token-file", &ours]);
    assert!(met["paths"].as_array().is_some_and(|paths| !paths.is_empty()), "{met}");
}

/// In the middle of a driver's call: no verb but those that write looks after signals by itself.
#[test]
fn a_signal_is_said_where_a_verb_does_not_look_after_it() {
    let place = Place::new();
    let driver = Driver::new(&place);
    let held = driver.hang();
    for (json, signal) in [(true, Signal::TERM), (false, Signal::INT)] {
        let mut verb = driver.on(place.flashboot(&["doctor"]));
        let verb = if json { verb.arg("--json") } else { &mut verb };
        let verb = verb.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let began = Instant::now();
        while !has_thread(verb.id(), "flashboot-probe") {
            assert!(began.elapsed() < Duration::from_secs(20), "it does not come to the driver");
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&verb), signal).unwrap();
        let output = verb.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        if json {
            let error = &object(&output)["error"];
            assert_eq!(
                (&error["kind"], &error["detail"]),
                (&"cancelled".into(), &"stopped by a signal".into())
            );
        } else {
            assert!(output.stdout.is_empty(), "{}", said(&output));
            assert!(
                String::from_utf8_lossy(&output.stderr).contains("stopped by a signal"),
                "{}",
                said(&output)
            );
        }
    }
    drop(held);
}

fn has_thread(pid: u32, name: &str) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.any(|comm| comm.trim_end() == name)
}
