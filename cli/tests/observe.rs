//! What seeds, clones and the service show of themselves: metrics, health, status; and one trace in the logs of both ends.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    fleet::{Fleet, LIMIT, Proc, until},
    http::{free, get},
    text,
};
use rustix::process::Signal;
use serde_json::Value;
use std::{thread, time::Duration};

/// The value of the metric that begins so.
#[track_caller]
fn metric(at: &str, name: &str) -> f64 {
    let (code, metrics) = get(at, "/metrics");
    assert_eq!(code, 200);
    let line = metrics.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in\n{metrics}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_fleet_shows_what_it_does_and_is_ready_once_it_is_verified() {
    let service_at = free();
    let mut fleet = Fleet::at("auto", |_| free());
    let listen = ["--listen", &fleet.endpoint, "--lease", "2s", "--http", &service_at, "--json"];
    fleet.service = Proc::start(fleet.place.flashboot(&[&["rendezvous"][..], &listen].concat()));
    fleet.service.object();
    assert_eq!(get(&service_at, "/readyz").0, 200);
    let (seed_at, clone_at) = (free(), free());
    let payload = fleet.payload().len() as f64;

    let mut command =
        fleet.member(&["seed", text(&fleet.image), "--model", "tiny", "--rate", "40MB", "--http", &seed_at]);
    command.env("FLASHBOOT_LOG__LEVEL", "info");
    let mut seed = Proc::start(command);
    let said = seed.object();
    assert_eq!(get(&seed_at, "/readyz"), (200, "ready\n".into()));
    assert!((metric(&seed_at, "flashboot_bytes_total{from=\"disk\"}") - payload).abs() < 0.5);
    let seed_status: Value = serde_json::from_str(&get(&seed_at, "/status").1).unwrap();
    assert_eq!(seed_status["members"][0]["member"], said["member"]);
    assert_eq!(seed_status["members"][0]["trace"], said["trace"]);

    let mut clone = fleet.clone(&["--allow", "tcp,rdma", "--http", &clone_at]);
    until("it has a block", || metric_or(&clone_at, "flashboot_verified_bytes") > 0.0);
    assert_eq!(get(&clone_at, "/livez").0, 200);
    assert_eq!(get(&clone_at, "/readyz").0, 503, "not before everything is verified");
    until("the service sees it read", || {
        metric(&service_at, "flashboot_clones{state=\"reading\"}") as u32 == 1
    });
    let report = fleet.check(&mut clone);
    until("it is ready", || get(&clone_at, "/readyz").0 == 200);
    assert!((metric(&clone_at, "flashboot_bytes_total{from=\"tcp\"}") - payload).abs() < 0.5);
    assert!(metric(&clone_at, "flashboot_phase_seconds_total{phase=\"transfer\"}") > 0.5);
    assert!(metric(&clone_at, "flashboot_read_bytes_per_second") > 1e6);
    // The lease is of 2 s, and renewed in a third of it.
    let age = metric(&clone_at, "flashboot_lease_age_seconds");
    assert!((0.0..10.0).contains(&age), "{age}");
    until("the service counts it as complete", || {
        metric(&service_at, "flashboot_clones{state=\"complete\"}") as u32 == 1
    });
    let status: Value = serde_json::from_str(&get(&service_at, "/status").1).unwrap();
    assert_eq!(status["service"]["members"][1]["trace"], report["trace"], "{status}");
    for at in [&service_at, &seed_at, &clone_at] {
        let (_, everything) = get(at, "/status");
        assert!(!everything.contains("127.0.0.1:"), "no locator is shown: {everything}");
    }

    // The seed's log has the clone's trace, which the clone never sent it.
    thread::sleep(Duration::from_secs(1));
    clone.0.signal(Signal::TERM);
    seed.signal(Signal::TERM);
    assert_eq!(seed.ended().code(), Some(0));
    let log = seed.stderr.recv_timeout(LIMIT).unwrap();
    let trace = report["trace"].as_str().unwrap();
    let served = log.lines().find(|line| line.contains(trace) && line.contains("serve{"));
    let served = served.unwrap_or_else(|| panic!("no span of {trace} in\n{log}"));
    assert!(served.contains(said["trace"].as_str().unwrap()), "and its own: {served}");
    assert!(served.contains(report["member"].as_str().unwrap()), "{served}");
}

fn metric_or(at: &str, name: &str) -> f64 {
    let (_, metrics) = get(at, "/metrics");
    let line = metrics.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

#[test]
fn off_loopback_nothing_is_shown_to_who_proves_nothing() {
    let fleet = Fleet::at("tcp", |_| String::new());
    let listen = ["rendezvous", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0"];
    let (code, said) = fleet.place.json(&listen);
    assert_eq!((code, &said["error"]["kind"]), (3, &"permission".into()), "{said}");
    assert!(said["error"]["remedy"].as_str().unwrap().contains("http.token_file"), "{said}");
}
