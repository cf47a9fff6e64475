//! Seeds and clones that find each other through a real etcd, which is killed in the middle.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "../../rendezvous/tests/etcd_server/mod.rs"]
mod etcd_server;

use common::fleet::{Fleet, Proc};
use etcd_server::EtcdServer;
use rustix::process::Signal;
use serde_json::Value;
use std::{net::TcpListener, thread, time::Duration};

/// So slow that things can happen in the middle: five blocks take some two seconds.
const SLOW: [&str; 2] = ["--rate", "40MB"];

fn stands(fleet: &Fleet, etcd: &str) -> Proc {
    let args = ["rendezvous", "--listen", "127.0.0.1:0", "--store", etcd, "--lease", "4s", "--json"];
    let mut service = Proc::start(fleet.place.flashboot(&args));
    assert_eq!(service.object()["endpoint"], etcd);
    service
}

fn read(members: &[Value]) -> usize {
    members.iter().filter(|m| m["upstream"].is_string()).count()
}

#[test]
fn eight_clones_of_which_three_are_killed_and_two_late_while_the_etcd_and_the_service_die_too() {
    let mut etcd = EtcdServer::start();
    let address = etcd.address("prod/eu");
    let mut fleet = Fleet::at("tcp", |_| address.clone());
    let mut first_service = stands(&fleet, &address);
    let mut seed = fleet.seed(&SLOW);
    let kill = |moment| [&SLOW[..], &["--kill", moment]].concat();
    let mut survivors = vec![fleet.clone(&SLOW)];
    fleet.until("one reads", |members| read(members) == 1);
    let mut victims = Vec::new();
    for moment in ["chunk:1", "pull:3", "chunk:0"] {
        victims.push(fleet.clone(&kill(moment)));
        if survivors.len() < 3 {
            survivors.push(fleet.clone(&SLOW));
        }
    }
    fleet.until("most of them read", |members| read(members) >= 3);
    // The etcd in the middle of it, and who served: the seed takes its place, once the lease is over.
    etcd.kill();
    first_service.kill();
    // Whoever reads goes on; whoever has only begun to ask waits.
    thread::sleep(Duration::from_secs(1));
    etcd.again();
    for (victim, out) in &mut victims {
        assert!(!victim.ended().success());
        assert!(!out.exists(), "a killed clone leaves no payload");
    }
    let mut late = [fleet.clone(&["--revision", "r1"]), fleet.clone(&[])];
    let payload = fleet.payload().len();
    for survivor in survivors.iter_mut().chain(&mut late) {
        let report = fleet.check(survivor);
        assert!(report["losses"].as_u64().unwrap() <= 3, "{report}");
    }
    fleet.until("all that live are known, and hold everything", |members| {
        members.len() == 6 && members.iter().all(|m| m["holds"] == payload)
    });
    assert!(seed.is_running());
    for (clone, _) in survivors.iter_mut().chain(&mut late) {
        clone.signal(Signal::TERM);
        assert_eq!(clone.ended().code(), Some(0));
    }
    fleet.until("the seed is left", |members| members.len() == 1);
    seed.signal(Signal::TERM);
    assert_eq!(seed.ended().code(), Some(0));
}

#[test]
fn with_an_etcd_no_process_but_the_members_is_needed_and_a_clone_takes_the_seeds_place() {
    let etcd = EtcdServer::start();
    let address = etcd.address("small");
    let mut fleet = Fleet::at("ipc", |_| address.clone());
    let mut seed = fleet.seed(&[]);
    let mut first = fleet.clone(&[]);
    fleet.check(&mut first);
    // Nothing is said to anybody.
    seed.kill();
    let mut second = fleet.clone(&["--leave"]);
    let report = fleet.check(&mut second);
    assert_eq!(report["sources"].as_array().unwrap().len(), 1, "{report}");
    assert!(first.0.is_running());
    first.0.signal(Signal::TERM);
    assert_eq!(first.0.ended().code(), Some(0));
    // It gave its post up: whoever asks is told that nobody serves, and how to change that.
    let args = ["status", "--rendezvous", &address];
    let (code, said) = fleet.place.json(&args);
    assert_eq!((code, &said["error"]["kind"]), (1, &"unavailable".into()), "{said}");
    assert!(said["error"]["remedy"].as_str().unwrap().contains("start a seed"), "{said}");
}

#[test]
fn a_leader_that_slept_through_its_lease_answers_nothing_that_was_asked_meanwhile() {
    let etcd = EtcdServer::start();
    let address = etcd.address("sleepy");
    let mut fleet = Fleet::at("ipc", |_| address.clone());
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let lead = ["rendezvous", "--listen", &at, "--store", &address, "--lease", "4s", "--json"];
    let sleepy = Proc::start(fleet.place.flashboot(&lead));
    let known = |fleet: &Fleet| fleet.place.json(&["status", "--rendezvous", &at]).0 == 0;
    while !known(&fleet) {}
    let _seed = fleet.seed(&[]);
    sleepy.signal(Signal::STOP);
    // Asked of who sleeps: it is taken by the kernel, and lies there.
    let asks = ["status", "--rendezvous", &at, "--json"];
    let first = Proc::start(fleet.place.flashboot(&asks));
    fleet.until("the seed took its place, and knows itself", |members| members.len() == 1);
    drop(first);
    let mut second = Proc::start(fleet.place.flashboot(&asks));
    thread::sleep(Duration::from_millis(500));
    sleepy.signal(Signal::CONT);
    let said = second.object();
    assert!(said["members"].is_null() && said["error"]["kind"].is_string(), "{said}");
    assert!(!known(&fleet), "it stands back");
    let mut clone = fleet.clone(&["--leave"]);
    fleet.check(&mut clone);
}
