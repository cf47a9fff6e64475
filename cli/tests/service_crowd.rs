//! Two thousand members, each with a connection, at `flashboot rendezvous`: what each costs it in memory.
//! `rendezvous/examples/bench_server.rs` has ten thousand, and the processor time.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "../../rendezvous/tests/crowd/mod.rs"]
mod crowd;

use common::{Place, fleet::Proc, text};
use crowd::{Crowd, Used};
use flashboot_channel::{Security, SecurityConfig};
use flashboot_rendezvous::descriptors;
use std::{fs, os::unix::fs::PermissionsExt as _, process::Command, time::Duration};

const CLONES: u64 = 2000;
/// 200 MiB for ten thousand.
const EACH: u64 = (200 << 20) / 10_000;
/// So long that a machine at its limits loses nobody.
const LEASE: Duration = Duration::from_secs(60);

#[test]
fn two_thousand_members_are_held_in_twenty_kibibytes_each_from_a_thousand_descriptors() {
    let needed = CLONES + 64;
    assert!(descriptors(needed) >= needed, "this test needs {needed} descriptors (ulimit -Hn)");
    let place = Place::new();
    let token = place.path("token");
    fs::write(&token, "a secret of enough bytes\n").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let lease = format!("{}s", LEASE.as_secs());
    let token_file = ["--token-file", text(&token)];
    let serve = ["rendezvous", "--listen", "127.0.0.1:0", "--json", "--lease", &lease];
    let serve = place.flashboot(&[&serve[..], &token_file].concat());
    // As a process begins on most systems; it raises this itself.
    let mut limited = Command::new("prlimit");
    limited.arg("--nofile=1024:").arg(serve.get_program()).args(serve.get_args());
    limited.current_dir(place.path("."));
    for (name, value) in serve.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    let mut service = Proc::start(limited);
    let endpoint = service.object()["endpoint"].as_str().unwrap().to_owned();
    let pid = service.child.id();
    let before = Used::by(pid).unwrap();
    let config = SecurityConfig { token_file: Some(token.clone()), ..SecurityConfig::default() };
    let security = Security::load(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let crowd = runtime
        .block_on(Crowd::join(&endpoint.parse().unwrap(), &security, CLONES))
        .expect("all of them join");
    let status = ["status", "--rendezvous", &endpoint];
    let (code, status) = place.json(&[&status[..], &token_file].concat());
    assert_eq!((code, status["members"].as_array().unwrap().len() as u64), (0, CLONES + 1));
    assert_eq!(crowd.astray(LEASE), None);
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64;
    assert!(open > CLONES, "a connection each: {open} descriptors");
    let each = (Used::by(pid).unwrap().peak - before.peak) / CLONES;
    eprintln!("{each} bytes a member at the peak, from {} KiB", before.peak >> 10);
    assert!(each <= EACH, "{each} bytes a member, of {EACH}");
    drop(crowd);
}
