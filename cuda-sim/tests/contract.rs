//! The stand-in answers as real GPUs did, row by row, or more strictly where a table here says so.

mod stand_in;

use stand_in::{Host, rows};
use std::{collections::BTreeMap, process::Command};

const TRANSCRIPT: &str = include_str!("../transcript-h200.txt");

/// Rows where the stand-in refuses what the driver bears: case, its outcome, why.
const STRICTER: &[(&str, &str, &str)] = &[
    (
        "no-context-stream-of-another-thread",
        "memset=INVALID_CONTEXT record=INVALID_CONTEXT wait=INVALID_CONTEXT event-sync=INVALID_CONTEXT \
         query=INVALID_CONTEXT sync=INVALID_CONTEXT",
        "older drivers want a current context on every thread, so flashboot always sets one",
    ),
    (
        "create-bad-properties",
        "kind=INVALID_VALUE location=INVALID_VALUE device=INVALID_DEVICE handle-type=INVALID_VALUE",
        "a handle type that is none is a mistake, though the driver ignores it",
    ),
    (
        "map-across-reservations",
        "map=INVALID_VALUE",
        "that two reservations are neighbours is luck: an arena has one",
    ),
    (
        "map-two-in-one-reservation",
        "first=01 second=02 across=INVALID_VALUE sync=SUCCESS",
        "a range lies in one mapping: an arena is one allocation",
    ),
    (
        "map-part-of-reservation",
        "map=SUCCESS access=SUCCESS access-whole-range=INVALID_VALUE free-front=INVALID_VALUE \
         unmap-whole-range=INVALID_VALUE free=INVALID_VALUE",
        "what is unmapped is one mapping, whole",
    ),
    ("unmap-two-at-once", "both=INVALID_VALUE", "what is unmapped is one mapping, whole"),
    (
        "unmap-twice",
        "first=SUCCESS second=INVALID_VALUE nothing-there=INVALID_VALUE",
        "unmapping what is unmapped is a mistake of ownership",
    ),
    ("access-two-mappings", "both=INVALID_VALUE", "access is set for one mapping, whole"),
    (
        "copy-across-mappings",
        "from=INVALID_VALUE to=INVALID_VALUE sync=SUCCESS",
        "a range lies in one mapping: an arena is one allocation",
    ),
    (
        "stream-of-other-device",
        "memset=INVALID_VALUE record-own-event=INVALID_HANDLE record-other-event=INVALID_HANDLE \
         wait=SUCCESS sync=INVALID_HANDLE",
        "a stream is used with its own context",
    ),
    (
        "copy-before-registration",
        "h2d=INVALID_VALUE d2h=INVALID_VALUE sync=SUCCESS",
        "half registered is a slow copy by mistake, and fails when it begins in the registered half",
    ),
    ("unmap-under-pending-copy", DIES, "the driver poisons the context, later and without saying why"),
    ("release-under-pending-copy", DIES, "memory is released after its work is done"),
    ("host-free-under-pending-copy", DIES, "the driver happens to wait; who frees has not looked"),
    ("unregister-under-pending-copy", DIES, "the driver happens to wait; who unregisters has not looked"),
    ("module-unload-under-pending-kernel", DIES, "the driver happens to wait; who unloads has not looked"),
    ("primary-release-under-pending-copy", DIES, "the driver drops the work without a word"),
    (
        "access-change-under-pending-copy",
        DIES,
        "the driver poisons the context, later and without saying why",
    ),
];

/// Aborted, with words on the standard error.
const DIES: &str = "died";

/// Outcomes with an IMEX channel, **never run on hardware**: what documentation says, and what this tree needs.
const NEVER_ON_HARDWARE: &[(&str, &str)] = &[
    ("create-fabric", "alone=SUCCESS with-fd=SUCCESS"),
    ("fabric-exchange", "export=SUCCESS import=SUCCESS byte=91"),
    ("sim-fabric-killed", "import=SUCCESS byte-after-death=92 import-late=INVALID_HANDLE"),
    ("sim-fabric-descriptor", "import=SUCCESS byte=95"),
];

/// The driver crashes by a bad address where the stand-in aborts; either way the process is gone.
fn normal(outcome: &str) -> &str {
    if outcome.starts_with("killed by signal") { DIES } else { outcome }
}

#[test]
fn every_row_of_the_real_transcript_holds_or_is_stricter_for_a_reason() {
    let stricter: BTreeMap<_, _> = STRICTER.iter().map(|(case, outcome, _)| (*case, *outcome)).collect();
    let said = Host::new().ask(&["--transcript"]);
    let real = rows(TRANSCRIPT);
    let names = |rows: &[(String, String)]| rows.iter().map(|(case, _)| case.clone()).collect::<Vec<_>>();
    assert_eq!(names(&said), names(&real), "the transcript is of another set of cases: run it again");
    let mut wrong = Vec::new();
    for ((case, said), (_, real)) in said.iter().zip(&real) {
        let expected = stricter.get(case.as_str()).copied().unwrap_or(normal(real));
        if normal(said) != expected {
            wrong.push(format!("{case}\n  real:     {real}\n  expected: {expected}\n  said:     {said}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_row_is_called_stricter_only_where_it_differs_from_the_real_one() {
    let real: BTreeMap<_, _> = rows(TRANSCRIPT).into_iter().collect();
    for (case, outcome, reason) in STRICTER {
        let real = real.get(*case).unwrap_or_else(|| panic!("{case} is no row"));
        assert_ne!(normal(real), *outcome, "{case}");
        assert!(!reason.is_empty(), "{case} has no reason");
    }
}

#[test]
fn every_row_that_the_code_cites_is_in_the_transcript() {
    let real: BTreeMap<_, _> = rows(TRANSCRIPT).into_iter().collect();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let mut cited = 0;
    for file in std::fs::read_dir(source).unwrap() {
        let path = file.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for line in text.lines().filter(|line| line.trim_start().starts_with("//")) {
            let words = line.split('`').skip(1).step_by(2);
            for word in words.filter(|word| word.contains('-') && word.chars().all(is_of_a_name)) {
                if *word != *"flashboot-cuda-sim" {
                    assert!(real.contains_key(word), "{}: no row {word}", path.display());
                    cited += 1;
                }
            }
        }
    }
    assert!(cited > 80, "only {cited} citations were found");
}

fn is_of_a_name(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'
}

#[test]
fn with_a_channel_fabric_memory_is_exchanged_though_no_hardware_ever_showed_it() {
    let host = Host::new().with_imex();
    for (case, outcome) in NEVER_ON_HARDWARE {
        assert_eq!(host.answer(case), *outcome, "{case}");
    }
}

#[test]
fn the_verdicts_do_not_depend_on_the_seed() {
    let order = [
        "copy-round-trip",
        "stream-in-order",
        "wait-event-orders",
        "wait-event-captures-record",
        "stream-destroy-pending",
        "copy-pageable-staged",
        "hash-blocks",
    ];
    let first = Host::new().ask(&order);
    for seed in ["1", "2", "3"] {
        assert_eq!(Host::new().with("SEED", seed).ask(&order), first, "seed {seed}");
    }
}

#[test]
fn a_driver_that_is_not_there_is_said_so() {
    let nowhere = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_driver-contract");
    let listed = Command::new(program).arg("--list").env("LD_LIBRARY_PATH", nowhere.path()).output();
    assert_eq!(String::from_utf8(listed.unwrap().stdout).unwrap().lines().count(), rows(TRANSCRIPT).len());
}
