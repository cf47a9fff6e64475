//! Seeds and clones that find the service through a shared directory; and what is no store at all.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    fleet::{Fleet, Proc},
    text,
};
use std::fs;

#[test]
fn a_directory_names_the_service_and_another_takes_its_place() {
    let mut fleet = Fleet::at("ipc", |place| {
        fs::create_dir(place.path("shared")).unwrap();
        format!("dir:{}", text(&place.path("shared")))
    });
    let address = fleet.endpoint.clone();
    let stands = |fleet: &Fleet| {
        let args = ["rendezvous", "--listen", "127.0.0.1:0", "--store", &address, "--lease", "4s", "--json"];
        Proc::start(fleet.place.flashboot(&args))
    };
    let (mut first, second) = (stands(&fleet), stands(&fleet));
    let _seed = fleet.seed(&[]);
    let mut clone = fleet.clone(&[]);
    fleet.check(&mut clone);
    first.kill();
    let mut late = fleet.clone(&["--leave"]);
    fleet.check(&mut late);
    fleet.until("both are known", |members| members.len() >= 2);
    drop(second);
}

#[test]
fn a_seed_that_embeds_a_service_tells_the_directory_where() {
    let mut fleet = Fleet::at("ipc", |place| {
        fs::create_dir(place.path("shared")).unwrap();
        format!("dir:{}", text(&place.path("shared")))
    });
    let _seed = fleet.seed(&["--embed", "127.0.0.1:0"]);
    let mut clone = fleet.clone(&["--leave"]);
    fleet.check(&mut clone);
}

#[test]
fn what_is_no_store_is_refused_by_name() {
    let fleet = Fleet::at("ipc", |_| "127.0.0.1:1".into());
    let usage = |args: &[&str]| {
        let output = fleet.place.flashboot(args).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = usage(&["status", "--rendezvous", "zookeeper://a:1"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("neither tcp:// nor etcd:// nor dir:"), "{said}");
    let (code, said) = usage(&["rendezvous", "--store", "127.0.0.1:7400"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("no store that names one"), "{said}");
    let nobody = ["status", "--rendezvous", "dir:/nonexistent/place"];
    let (code, said) = fleet.place.json(&nobody);
    assert_eq!((code, &said["error"]["kind"]), (1, &"unavailable".into()), "{said}");
}

#[cfg(not(feature = "etcd"))]
#[test]
fn a_build_without_etcd_says_so() {
    let fleet = Fleet::at("ipc", |_| "etcd://127.0.0.1:1".into());
    let (code, said) = fleet.place.json(&["status", "--rendezvous", &fleet.endpoint]);
    assert_eq!((code, &said["error"]["kind"]), (1, &"unavailable".into()), "{said}");
    assert!(said["error"]["remedy"].as_str().unwrap().contains("--features etcd"), "{said}");
}
