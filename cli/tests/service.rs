//! Seeds, clones and the service as real processes on loopback: who dies, who joins late, and what the others lose by it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{Fleet, Proc, service},
    text,
};
use rustix::process::Signal;
use serde_json::Value;
use std::{fs, path::Path};

/// So slow that things can happen in the middle: five blocks take some two seconds.
const SLOW: [&str; 2] = ["--rate", "40MB"];

fn a_seed_and_four_clones(transport: &'static str) {
    let mut fleet = Fleet::new(transport);
    let _seed = fleet.seed(&SLOW);
    let mut first = fleet.clone(&SLOW);
    fleet.until("one clone", |members| members.len() == 2);
    let mut victim = fleet.clone(&[&SLOW[..], &["--kill", "chunk:1"]].concat());
    fleet.until("two clones", |members| members.len() == 3 || transport == "ipc");
    let mut third = fleet.clone(&SLOW);
    assert!(!victim.0.ended().success());
    assert!(!victim.1.exists(), "a killed clone leaves no payload");
    let mut late = fleet.clone(&["--revision", "r1"]);
    let reports = [&mut first, &mut third, &mut late].map(|clone| fleet.check(clone));
    for report in &reports {
        assert_eq!(report["sources"][0]["transport"], transport, "{report}");
    }
    fleet.until("the victim is forgotten, the others are holders", |members| {
        members.len() == 4 && members.iter().all(|m| m["holds"] == fleet.payload().len())
    });
    for clone in [&mut first, &mut third, &mut late] {
        clone.0.signal(Signal::TERM);
        assert_eq!(clone.0.ended().code(), Some(0));
    }
    fleet.until("only the seed is left", |members| members.len() == 1);
}

#[test]
fn four_clones_over_tcp_of_which_one_is_killed_and_one_is_late() {
    a_seed_and_four_clones("tcp");
}

#[test]
fn four_clones_over_ipc_of_which_one_is_killed_and_one_is_late() {
    a_seed_and_four_clones("ipc");
}

#[test]
fn a_clone_may_die_at_any_moment_and_its_reader_completes() {
    for transport in ["ipc", "tcp"] {
        let mut fleet = Fleet::new(transport);
        let _seed = fleet.seed(&["--rate", "60MB"]);
        let mut losses = 0;
        for moment in ["registered", "pull:0", "chunk:0", "chunk:2", "pull:4", "chunk:4", "complete"] {
            let mut victim = fleet.clone(&["--kill", moment]);
            if moment != "registered" && transport == "tcp" {
                let reads = |members: &[Value]| members.iter().any(|m| m["upstream"].is_string());
                fleet.until_or("the victim reads", reads, || !victim.0.is_running());
            }
            let mut reader = fleet.clone(&["--leave"]);
            let report = fleet.check(&mut reader);
            losses += report["losses"].as_u64().unwrap();
            assert!(report["losses"].as_u64().unwrap() <= 2, "{transport} {moment}: {report}");
            assert!(!victim.0.ended().success(), "{transport} {moment}: the victim lives");
            assert!(!victim.1.exists(), "{transport} {moment}");
            assert_eq!(reader.0.ended().code(), Some(0));
        }
        assert!(losses > 0 || transport == "ipc", "no reader ever had a victim for a source");
    }
}

#[test]
fn the_seed_may_die_once_everything_has_another_holder() {
    for transport in ["ipc", "tcp"] {
        let mut fleet = Fleet::new(transport);
        let mut seed = fleet.seed(&[]);
        let mut first = fleet.clone(&SLOW);
        fleet.check(&mut first);
        // It reads from either, slowly.
        let mut second = fleet.clone(&SLOW);
        seed.kill();
        fleet.check(&mut second);
        let mut third = fleet.clone(&["--leave"]);
        fleet.check(&mut third);
        assert!(first.0.is_running() && second.0.is_running());
    }
}

#[test]
fn of_two_seeds_one_dies_in_the_middle_and_its_reader_goes_on_at_the_other() {
    let mut fleet = Fleet::new("tcp");
    let mut seeds = [fleet.seed(&SLOW), fleet.seed(&SLOW)];
    let members = fleet.until("both seeds", |members| members.len() == 2);
    let mut clone = fleet.clone(&["--leave"]);
    let reads = |members: &[Value]| {
        members.get(2).is_some_and(|m| m["upstream"].is_string() && m["holds"].as_u64() >= Some(16 << 20))
    };
    let at = fleet.until("it has a block and reads on", reads);
    let source = members.iter().position(|m| m["member"] == at[2]["upstream"]).unwrap();
    seeds[source].kill();
    let report = fleet.check(&mut clone);
    assert_eq!((&report["losses"], &report["chunks"]), (&1.into(), &5.into()), "{report}");
    let sources = report["sources"].as_array().unwrap();
    assert_eq!(sources.len(), 2);
    assert_eq!(sources[1]["source"], members[1 - source]["member"], "the other seed");
}

#[test]
fn a_service_that_is_killed_and_comes_back_loses_nobody() {
    let mut fleet = Fleet::new("tcp");
    let seed = fleet.seed(&SLOW);
    let mut first = fleet.clone(&SLOW);
    fleet.until("one clone reads", |members| members.len() == 2 && members[1]["upstream"].is_string());
    // The one between dies while nobody answers: its reader finds another by itself.
    let mut victim = fleet.clone(&[&SLOW[..], &["--kill", "chunk:1"]].concat());
    fleet.until("two clones read", |members| members.len() == 3 && members[2]["upstream"].is_string());
    let mut third = fleet.clone(&SLOW);
    fleet.until("three clones read", |members| members.len() == 4 && members[3]["upstream"].is_string());
    fleet.service.kill();
    assert!(!victim.0.ended().success());
    let third_report = fleet.check(&mut third);
    fleet.check(&mut first);
    assert!(third_report["losses"].as_u64() <= Some(2), "{third_report}");
    let at = fleet.endpoint.clone();
    (fleet.service, fleet.endpoint) = service(&fleet.place, &at);
    let whole = fleet.payload().len();
    fleet.until("everybody that lives is back", |members| {
        members.len() == 3 && members.iter().all(|m| m["holds"] == whole)
    });
    let mut late = fleet.clone(&["--leave"]);
    fleet.check(&mut late);
    drop(seed);
}

#[test]
fn a_seed_that_is_asked_to_go_lets_its_readers_end() {
    let mut fleet = Fleet::new("tcp");
    let mut seed = fleet.seed(&SLOW);
    let mut clone = fleet.clone(&[]);
    fleet.until("it reads", |members| members.len() == 2 && members[1]["upstream"].is_string());
    seed.signal(Signal::TERM);
    let report = fleet.check(&mut clone);
    assert_eq!(report["losses"], 0, "{report}");
    assert_eq!(seed.ended().code(), Some(0));
    fleet.until("it is gone", |members| members.len() == 1);
}

#[test]
fn an_embedded_service_goes_with_its_seed_and_clones_end_without_it() {
    let place = Place::new();
    let image = place.image("m", &[("a", 70 * MIB), ("b", 9)]);
    let embed =
        ["seed", text(&image), "--model", "tiny", "--embed", "127.0.0.1:0", "--lease", "2s", "--json"];
    let mut seed = Proc::start(place.flashboot(&[&embed[..], &SLOW, &["--transport", "tcp"]].concat()));
    let endpoint = seed.object()["rendezvous"].as_str().unwrap().to_owned();
    let service = Proc::start(place.flashboot(&["rendezvous", "--listen", "127.0.0.1:0", "--json"]));
    let mut fleet = Fleet { place, image, endpoint, transport: "tcp", service, clones: 0 };
    let mut first = fleet.clone(&SLOW);
    fleet.check(&mut first);
    // From the first, which has everything; or from the seed, until that is gone.
    let mut second = fleet.clone(&SLOW);
    fleet.until("it reads", |members| members.len() == 3 && members[2]["upstream"].is_string());
    seed.kill();
    fleet.check(&mut second);
}

#[test]
fn clones_that_expect_each_other_begin_together() {
    let mut fleet = Fleet::new("ipc");
    let _seed = fleet.seed(&[]);
    let mut first = fleet.clone(&["--expect", "3"]);
    let mut second = fleet.clone(&["--expect", "3"]);
    let waiting = fleet.until("two wait", |members| members.len() == 3);
    assert!(waiting.iter().all(|m| m["upstream"].is_null() && (m["role"] == "seed" || m["holds"] == 0)));
    let mut third = fleet.clone(&["--expect", "3"]);
    for clone in [&mut first, &mut second, &mut third] {
        fleet.check(clone);
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name_at_both_ends() {
    let mut fleet = Fleet::new("ipc");
    let mut seed = fleet.seed(&["--name", "node-1"]);
    let other = ["seed", text(&fleet.image), "--model", "another"];
    let refused = |fleet: &Fleet, args: &[&str]| {
        let mut ended = Proc::start(fleet.member(args));
        let error = ended.object()["error"].clone();
        (ended.ended().code(), error["kind"].as_str().unwrap_or_default().to_owned(), error)
    };
    let (code, kind, error) = refused(&fleet, &other);
    assert_eq!((code, kind.as_str()), (Some(3), "mismatch"), "{error}");
    assert!(error["detail"].as_str().unwrap().contains("model `tiny`, not `another`"), "{error}");
    let nobody = ["clone", "--image", &"ab".repeat(32)];
    let mut nobody = Proc::start({
        let mut command = fleet.member(&nobody);
        command.args(["--patience", "1s"]);
        command
    });
    // The flag was given twice: usage.
    assert_eq!(nobody.ended().code(), Some(2));
    let quick = fleet.place.json(&[
        "clone",
        "--image",
        &"ab".repeat(32),
        "--rendezvous",
        &fleet.endpoint,
        "--patience",
        "1s",
    ]);
    assert_eq!((quick.0, &quick.1["error"]["kind"]), (1, &"unavailable".into()), "{}", quick.1);
    // A later member of the name replaces the earlier, which says so and ends.
    let _later = fleet.seed(&["--name", "node-1"]);
    assert_eq!(seed.ended().code(), Some(1));
    let mut clone = fleet.clone(&["--image", &image_id(&fleet.image), "--leave"]);
    fleet.check(&mut clone);
}

fn image_id(image: &Path) -> String {
    let metadata: Value = serde_json::from_slice(&fs::read(image.join("metadata.json")).unwrap()).unwrap();
    metadata["id"].as_str().unwrap().to_owned()
}
