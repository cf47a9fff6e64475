//! What the death of one clone of a chain costs the others: finding it, and at most two chunks, the ones that were on their way.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB,
    fleet::{Fleet, Proc},
};
use serde_json::Value;
use std::{path::PathBuf, thread};

const CLONES: usize = 4;
const CHUNK: f64 = 16.0 * MIB as f64;

/// A chain over tcp in which every member sends at one rate, so that a chunk takes two seconds on whatever machine; and when each
/// was ready, in milliseconds since it was given its plan. One is killed with two chunks verified, if any.
fn chain(victim: Option<usize>) -> Vec<Option<Value>> {
    let paced = ["--rate", "8MB"];
    let mut fleet = Fleet::new("tcp");
    let _seed = fleet.seed(&paced);
    let expect = CLONES.to_string();
    let mut clones: Vec<(Proc, PathBuf)> = (0..CLONES)
        .map(|number| {
            // The racks put them into the order of their numbers.
            let rack = format!("r{number}");
            let place = ["--expect", &expect, "--rack", &rack];
            let kill: &[&str] = if victim == Some(number) { &["--kill", "chunk:1"] } else { &[] };
            fleet.clone(&[&paced[..], &place, kill].concat())
        })
        .collect();
    let mut reports = Vec::new();
    for (number, clone) in clones.iter_mut().enumerate() {
        reports.push(if victim == Some(number) {
            assert!(!clone.0.ended().success());
            None
        } else {
            Some(fleet.check(clone))
        });
    }
    reports
}

fn ready(report: &Value) -> f64 {
    report["ready_ms"].as_f64().unwrap()
}

#[test]
fn killing_any_one_clone_costs_the_others_the_finding_and_two_chunks() {
    let (undisturbed, killed) = thread::scope(|scope| {
        // At one time, so that whatever else the machine does befalls all of them.
        let runs: Vec<_> = (0..CLONES).map(|victim| scope.spawn(move || chain(Some(victim)))).collect();
        let undisturbed: Vec<_> = chain(None).into_iter().flatten().collect();
        (undisturbed, runs.into_iter().map(|run| run.join().unwrap()).collect::<Vec<_>>())
    });
    let first = &undisturbed[0];
    let chunk = first["transfer_ms"].as_f64().unwrap() * CHUNK / first["bytes"].as_f64().unwrap();
    // A process that is killed on a host that lives is found by its connection, which ends at once; a chunk's time for a machine
    // that has other things to do.
    let detection = chunk;
    for (victim, reports) in killed.iter().enumerate() {
        for (number, report) in reports.iter().enumerate() {
            let Some(report) = report else { continue };
            let cost = ready(report) - ready(&undisturbed[number]);
            println!(
                "{victim} killed: {number} takes {cost:+.0} ms, {:+.2} chunks of {chunk:.0} ms",
                cost / chunk
            );
            assert!(
                cost <= detection + 2.0 * chunk,
                "{victim} killed costs {number} {cost:.0} ms, {:.2} chunks: {report}",
                cost / chunk
            );
            // Its reader finds another source; nobody else has to.
            let losses = u64::from(number == victim + 1);
            assert_eq!(report["losses"], losses, "{victim} killed, {number}: {report}");
        }
    }
}
