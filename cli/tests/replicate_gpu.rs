//! `replicate --device` with real processes on the stand-in driver: arenas in GPU memory, every block verified there.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{MIB, Place, flip, object, said, stand_in::Driver, text};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    path::PathBuf,
    time::{Duration, Instant},
};

struct Machine {
    place: Place,
    driver: Driver,
    image: PathBuf,
}

impl Machine {
    /// Two GPUs, and an image of five blocks.
    fn new() -> Self {
        let place = Place::new();
        let driver = Driver::new(&place);
        let image = place.image("m", &[("a", 40 * MIB), ("b", 30 * MIB), ("c", 9)]);
        Self { place, driver, image }
    }

    fn replicate(&self, args: &[&str]) -> (i32, Value) {
        let all = [&["replicate", text(&self.image), "--json"], args].concat();
        let output = self.driver.on(self.place.flashboot(&all)).output().unwrap();
        assert_eq!(self.place.left_over(), Vec::<PathBuf>::new(), "{}", said(&output));
        (output.status.code().unwrap_or(-1), object(&output))
    }

    fn ok(&self, args: &[&str]) -> Value {
        let (exit, report) = self.replicate(args);
        assert_eq!(exit, 0, "{args:?}: {report}");
        report
    }

    /// Kind, detail and remedy of a refusal.
    fn refused(&self, args: &[&str], exit: i32) -> (String, String, String) {
        let (found, report) = self.replicate(args);
        assert_eq!(found, exit, "{args:?}: {report}");
        let field = |name: &str| report["error"][name].as_str().unwrap_or_default().to_owned();
        (field("kind"), field("detail"), field("remedy"))
    }
}

fn all_verified(report: &Value) {
    for clone in report["clones"].as_array().unwrap() {
        assert_eq!((&clone["verified"], &clone["repaired"]), (&5.into(), &0.into()), "{clone}");
    }
}

fn devices(report: &Value) -> Vec<String> {
    let clones = report["clones"].as_array().unwrap().iter();
    let all = std::iter::once(&report["seed"]).chain(clones);
    all.map(|rank| rank["device"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn chains_and_stars_go_around_the_gpus() {
    let machine = Machine::new();
    for (topology, n) in [("chain", "3"), ("star", "2")] {
        let report = machine.ok(&["-n", n, "--topology", topology, "--device", "cuda:*", "--chunk", "16MiB"]);
        assert_eq!(report["transport"], "ipc");
        all_verified(&report);
        let devices = devices(&report);
        assert!(devices.iter().all(|uuid| uuid.starts_with("GPU-")), "{devices:?}");
        assert_eq!(devices.iter().collect::<BTreeSet<_>>().len(), 2, "{devices:?}");
        assert_eq!((&devices[0], devices[0] == devices[1]), (&devices[2], false), "{devices:?}");
        let passed = report["passed_over"].as_array().unwrap();
        assert!(passed.iter().any(|p| p["name"] == "imex"), "FABRIC is refused without a channel: {report}");
    }
    let report = machine.ok(&["-n", "1", "--device", "cuda:1"]);
    all_verified(&report);
    assert_eq!(devices(&report).iter().collect::<BTreeSet<_>>().len(), 1);
    let host = machine.ok(&["-n", "1"]);
    assert_eq!((&host["seed"]["device"], &host["clones"][0]["device"]), (&Value::Null, &Value::Null));
}

#[test]
fn with_a_channel_auto_takes_imex() {
    let mut machine = Machine::new();
    machine.driver = machine.driver.with_imex();
    let report = machine.ok(&["-n", "3", "--device", "cuda:0,1", "--chunk", "16MiB"]);
    assert_eq!((&report["transport"], &report["fallbacks"]), (&"imex".into(), &0.into()));
    all_verified(&report);
}

#[test]
fn survivors_finish_when_a_clone_on_a_gpu_is_killed() {
    let machine = Machine::new();
    let report = machine.ok(&["-n", "3", "--device", "cuda:*", "--chunk", "16MiB", "--kill", "2@1"]);
    let clones = report["clones"].as_array().unwrap();
    assert_eq!((&clones[1]["killed"], &clones[1]["ready_ms"]), (&true.into(), &Value::Null));
    for clone in [&clones[0], &clones[2]] {
        assert_eq!((&clone["verified"], &clone["killed"]), (&5.into(), &false.into()), "{clone}");
    }
}

#[test]
fn every_size_arrives_also_where_the_gpu_cannot_hash() {
    let mut machine = Machine::new();
    for (name, tensors, blocks) in [
        ("none", &[][..], 0),
        ("one", &[("t", 1)], 1),
        ("block", &[("t", 16 * MIB)], 1),
        ("more", &[("t", 16 * MIB), ("u", 1)], 2),
    ] {
        machine.image = machine.place.image(name, tensors);
        for (variable, value) in [("SEED", "1"), ("NO_KERNEL", "1")] {
            machine.driver.only(variable, value);
            let report = machine.ok(&["-n", "2", "--device", "cuda:*"]);
            for clone in report["clones"].as_array().unwrap() {
                assert_eq!(clone["verified"], blocks, "{name}, {variable}: {clone}");
            }
        }
    }
}

/// Replicates over two GPUs while the context of the second, and of clone 1 on it, is lost by `fault` after more and more of
/// its calls. Whenever that falls into the transfer clone 1 alone fails, and it says what by; gives how often it did.
fn loses_clone_1(machine: &mut Machine, topology: &str, fault: impl Fn(u32) -> String, words: &str) -> usize {
    let mut in_transfer = 0;
    for after in [350, 450, 550, 650] {
        let fault = fault(after);
        machine.driver.only("FAULTS", &fault);
        let (exit, report) =
            machine.replicate(&["-n", "2", "--topology", topology, "--device", "cuda:*", "--chunk", "16MiB"]);
        if exit == 0 {
            // It had its last chunk before.
            continue;
        }
        let error = &report["error"];
        assert_eq!((exit, &error["kind"]), (1, &"context-lost".into()), "{fault}: {report}");
        let detail = error["detail"].as_str().unwrap();
        assert!(detail.starts_with("clone 1: ") && detail.contains(words), "{fault}: {detail}");
        assert!(error["remedy"].as_str().unwrap().contains("run replicate again"), "{fault}: {error}");
        let Some(clones) = report["clones"].as_array() else { continue };
        in_transfer += 1;
        assert_eq!((&clones[0]["ready_ms"], &clones[0]["killed"]), (&Value::Null, &false.into()), "{report}");
        assert_eq!(
            (&clones[1]["verified"], &clones[1]["source"]),
            (&5.into(), &0.into()),
            "{fault}: {report}"
        );
    }
    in_transfer
}

#[test]
fn a_clone_whose_own_context_is_lost_ends_at_once_and_the_others_finish() {
    let mut machine = Machine::new();
    for (topology, code) in [("star", "ECC_UNCORRECTABLE"), ("star", "LAUNCH_FAILED"), ("chain", "CONTAINED")]
    {
        let fault = |after| format!("poison:device=1:after={after}:{code}");
        let times = loses_clone_1(&mut machine, topology, fault, &format!("CUDA_ERROR_{code}"));
        assert!(times > 0, "{topology}, {code}: never in the transfer");
    }
}

#[test]
fn a_clone_whose_context_is_lost_once_is_started_again_and_completes() {
    let mut machine = Machine::new();
    let mut restarted = 0;
    for after in [250, 350, 450, 550] {
        machine.driver.strike_once(&format!("poison:device=1:after={after}:ECC_UNCORRECTABLE"));
        let (exit, report) =
            machine.replicate(&["-n", "2", "--topology", "star", "--device", "cuda:*", "--chunk", "16MiB"]);
        let Some(clones) = report["clones"].as_array().filter(|_| exit == 0) else {
            // Before the release nothing is started again.
            assert_eq!(report["error"]["kind"], "context-lost", "{report}");
            continue;
        };
        all_verified(&report);
        assert_eq!(clones[1]["restarts"], 0, "{report}");
        restarted += clones[0]["restarts"].as_u64().unwrap();
    }
    assert!(restarted > 0, "never in the transfer");
}

#[test]
fn a_gpu_that_dies_takes_its_clone_along_with_its_cause_and_nobody_else() {
    let mut machine = Machine::new();
    let fault = |after| format!("die:device=1:after={after}");
    let times = loses_clone_1(&mut machine, "star", fault, "CUDA_ERROR_LAUNCH_FAILED");
    assert!(times > 0, "never in the transfer");
}

/// Whoever has memory of the dead GPU mapped and reads it loses its own context: an error each, and no hang.
#[test]
fn a_gpu_that_dies_under_a_chain_is_an_error_and_no_hang() {
    let mut machine = Machine::new();
    machine.driver.only("FAULTS", "die:device=1:after=400");
    let (exit, report) = machine.replicate(&["-n", "3", "--device", "cuda:*", "--chunk", "16MiB"]);
    assert_eq!((exit, &report["error"]["kind"]), (1, &"context-lost".into()), "{report}");
    assert!(report["error"]["detail"].as_str().unwrap().contains("clone"), "{report}");
}

#[test]
fn damage_on_disk_is_found_on_the_gpu() {
    let machine = Machine::new();
    flip(&machine.image.join("target-0-0-0-0.img"), 20 * MIB as i64);
    let (kind, detail, remedy) = machine.refused(&["-n", "1", "--device", "cuda:0"], 3);
    assert_eq!(kind, "corrupt");
    assert!(detail.contains("block 1") && detail.contains("on the GPU"), "{detail}");
    assert!(remedy.contains("again"), "{remedy}");
}

#[test]
fn what_a_gpu_cannot_do_is_refused_with_a_remedy_before_anyone_starts() {
    let mut machine = Machine::new();
    for (variable, value, device, kind, words) in [
        ("DEVICES", "0", "cuda:*", "unavailable", "NO_DEVICE"),
        ("MIG", "1", "cuda:*", "unavailable", "MIG instance"),
        ("DEVICES", "2", "cuda:7", "unavailable", "cuda:7"),
        ("MEM", "100MiB", "cuda:0", "exhausted", "free"),
        // Four arenas of 70 MiB would fit; four processes do not.
        ("MEM", "1GiB", "cuda:0", "exhausted", "about 512MiB for the driver's context of each process"),
    ] {
        machine.driver.only(variable, value);
        let (found, detail, remedy) = machine.refused(&["-n", "3", "--device", device], 1);
        assert_eq!(found, kind, "{variable}: {detail}");
        assert!(detail.contains(words), "{variable}: {detail}");
        assert!(!remedy.is_empty(), "{variable}: {detail}");
    }
    let (kind, ..) = machine.refused(&["--device", "cuda:0", "--transport", "mock"], 2);
    assert_eq!(kind, "invalid");
    let (kind, ..) = machine.refused(&["--device", "the-big-one"], 2);
    assert_eq!(kind, "usage");
    // A driver that says so only when it comes to the arena: two trials of the probe go before.
    machine.driver.only("FAULTS", "cuMemCreate:3:OUT_OF_MEMORY");
    let (kind, detail, remedy) = machine.refused(&["--device", "cuda:0", "--transport", "ipc"], 1);
    assert_eq!(kind, "exhausted", "{detail}");
    assert!(!remedy.is_empty(), "{detail}");
}

#[test]
fn without_peer_access_ipc_alone_says_what_auto_says() {
    let mut machine = Machine::new();
    machine.driver.only("P2P", "none");
    let (kind, detail, remedy) =
        machine.refused(&["-n", "1", "--device", "cuda:0,1", "--transport", "ipc"], 1);
    assert_eq!(kind, "unavailable", "{detail}");
    assert!(detail.contains("cuDeviceCanAccessPeer") && detail.contains("cannot map memory"), "{detail}");
    assert!(remedy.contains("peer access"), "{remedy}");
}

#[test]
fn without_peer_access_imex_does_not_reach_the_next_gpu_of_one_host_either() {
    let mut machine = Machine::new();
    machine.driver = machine.driver.with_imex();
    machine.driver.only("P2P", "none");
    let (_, detail, _) = machine.refused(&["-n", "1", "--device", "cuda:0,1", "--transport", "imex"], 1);
    assert!(detail.contains("cuDeviceCanAccessPeer"), "{detail}");
}

#[test]
fn the_transport_is_the_one_chosen_though_no_clone_finished() {
    let mut machine = Machine::new();
    let args = ["-n", "1", "--device", "cuda:0,1", "--chunk", "16MiB", "--kill", "1@1"];
    let (_, report) = machine.replicate(&args);
    assert_eq!((&report["transport"], &report["clones"][0]["killed"]), (&"ipc".into(), &true.into()));
    assert!(report["passed_over"].as_array().unwrap().iter().any(|p| p["name"] == "imex"), "{report}");
    machine.driver = machine.driver.with_imex();
    let (_, report) = machine.replicate(&args);
    assert_eq!((&report["transport"], &report["clones"][0]["killed"]), (&"imex".into(), &true.into()));
}

#[test]
fn a_missing_kernel_is_told_with_the_drivers_words() {
    let mut machine = Machine::new();
    // ipc has the words of a source on its own host.
    machine.driver = machine.driver.with_imex();
    machine.driver.only("NO_KERNEL", "1");
    let args = ["replicate", text(&machine.image), "-n", "1", "--device", "cuda:0,1"];
    let output = machine.driver.on(machine.place.flashboot(&args)).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let look = told.lines().find(|line| line.contains("no kernel to look at sources with"));
    assert!(look.is_some_and(|line| line.contains("cuModuleLoadData")), "{told}");
}

/// Nothing of imex notices that an exporter has died; the parent does.
#[test]
fn a_dead_source_costs_no_stall_where_the_transport_does_not_notice() {
    let mut machine = Machine::new();
    machine.driver = machine.driver.with_imex();
    let args = ["-n", "2", "--device", "cuda:0,1", "--chunk", "16MiB", "--kill", "1@1", "--stall", "5m"];
    let began = Instant::now();
    let report = machine.ok(&args);
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
    let second = &report["clones"][1];
    assert_eq!(
        (&second["verified"], &second["losses"], &second["source"]),
        (&5.into(), &1.into(), &0.into())
    );
    assert_eq!(report["transport"], "imex");
}
