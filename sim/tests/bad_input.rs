//! What cannot be simulated is refused by name, with numbers, as the boundary's own error.
#![allow(clippy::unwrap_used)]

use flashboot_core::Kind;
use flashboot_sim::{Chunk, Error, Goal, Profile, Scenario, Sweep, Topology, advise, simulate, sweep};

#[test]
fn every_refusal_is_typed_and_becomes_bad_usage() {
    let profile = Profile::built_in("gb300").unwrap();
    let good = Scenario::new(1 << 30, 4);
    let refusals = [
        simulate(&profile, &Scenario { clones: 100, ..good }).unwrap_err(),
        simulate(&profile, &Scenario { chunk: Chunk::Bytes(5), ..good }).unwrap_err(),
        simulate(&profile, &Scenario { fail: 2.0, ..good }).unwrap_err(),
        simulate(&profile, &Scenario { fail: 0.1, topology: Topology::Ring, ..good }).unwrap_err(),
        simulate(&Profile { nvlink: None, ..profile.clone() }, &good).unwrap_err(),
        sweep(&profile, &Scenario { image: 0, ..good }, Sweep::Chunk).unwrap_err(),
        advise(&profile, &Scenario { clones: 0, ..good }, Goal { within_ms: None, most_seeds: 1 })
            .unwrap_err(),
        Profile::built_in("nvl144").unwrap_err(),
        Profile::parse("mine", "name = 3").unwrap_err(),
    ];
    for refusal in refusals {
        let text = refusal.to_string();
        let error = flashboot_core::Error::from(refusal);
        assert_eq!(error.kind(), Kind::Invalid, "{text}");
        assert!(error.to_string().contains(&text), "{error}");
    }
    let lonely = Scenario { topology: Topology::Ring, ..Scenario::new(1 << 30, 1) };
    assert_eq!(simulate(&profile, &lonely).unwrap().bytes, 0, "one node has everything");
}

#[test]
fn what_there_is_no_room_for_is_said_in_numbers() {
    let profile = Profile::built_in("h100-roce").unwrap();
    let found = simulate(&profile, &Scenario { ranks: 8, ..Scenario::new(1 << 30, 2048) });
    assert_eq!(found, Err(Error::Room { profile: "h100-roce".into(), wanted: 2049 * 8, has: 2048 * 8 }));
}

#[test]
fn what_no_clock_counts_is_refused_and_not_wrapped() {
    let mut slow = Profile::built_in("gb300").unwrap();
    let crawling = |copy: flashboot_sim::Copy| flashboot_sim::Copy { rate: 1e3, ..copy };
    (slow.gpu.egress, slow.gpu.ingress, slow.nvlink) = (1e3, 1e3, slow.nvlink.map(crawling));
    for verify in [false, true] {
        let whole = Scenario { chunk: Chunk::Whole, verify, ..Scenario::new(1 << 50, 1) };
        assert_eq!(simulate(&slow, &whole), Err(Error::Endless { profile: "gb300".into() }));
    }
    // A hash that ends after the clock does; and one that takes more turns than anybody counts.
    let mut hashing = Profile::built_in("gb300").unwrap();
    hashing.gpu.hash = Some(1e3);
    let two = Scenario { chunk: Chunk::Bytes(1 << 44), ..Scenario::new(1 << 50, 2) };
    assert_eq!(simulate(&hashing, &two), Err(Error::Endless { profile: "gb300".into() }));
    let mut turns = Profile::built_in("h200").unwrap();
    turns.gpu.hash = Some(1e3);
    assert_eq!(simulate(&turns, &two), Err(Error::Endless { profile: "h200".into() }));
}
