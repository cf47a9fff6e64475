//! `clone --all-ranks` with real processes: every rank in its own chain, and one commit for all.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    Place,
    fleet::{Proc, service},
    stand_in::Driver,
    text,
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn ranks(image: &Path) -> Vec<String> {
    let metadata: Value = serde_json::from_slice(&fs::read(image.join("metadata.json")).unwrap()).unwrap();
    let ranks = metadata["ranks"].as_array().unwrap().iter();
    ranks.map(|rank| rank["payload"].as_str().unwrap().trim_end_matches(".img").to_owned()).collect()
}

struct Fleet {
    place: Place,
    image: PathBuf,
    ranks: Vec<String>,
    endpoint: String,
    _service: Proc,
}

impl Fleet {
    fn new() -> Self {
        let place = Place::in_memory();
        // Two ranks of three blocks and a bit.
        let image = place.two_ranks("m", [2048, 8192]);
        let ranks = ranks(&image);
        assert_eq!(ranks.len(), 2, "{ranks:?}");
        let (service, endpoint) = service(&place, "127.0.0.1:0");
        Self { place, image, ranks, endpoint, _service: service }
    }

    fn args<'a>(&'a self, args: &[&'a str]) -> Vec<&'a str> {
        let common = ["--rendezvous", &self.endpoint, "--json", "--threads", "1", "--chunk", "16MiB"];
        [args, &common, &["--patience", "20s"]].concat()
    }

    fn seed(&self, rank: &str, more: &[&str]) -> Proc {
        let args = [&["seed", text(&self.image), "--model", "m", "--rank", rank], more].concat();
        let mut seed = Proc::start(self.place.flashboot(&self.args(&args)));
        assert!(seed.object()["error"].is_null());
        seed
    }

    fn is_whole(&self, out: &Path, ranks: &[String]) {
        let names: BTreeSet<_> =
            fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(names, ranks.iter().map(|rank| format!("{rank}.img")).collect());
        for name in names {
            assert!(
                fs::read(out.join(&name)).unwrap() == fs::read(self.image.join(&name)).unwrap(),
                "{name}"
            );
        }
    }
}

#[test]
fn all_ranks_are_committed_at_once_or_none() {
    let fleet = Fleet::new();
    let out = fleet.place.path("out");
    let clone = |more: &[&str]| {
        let args = [&["clone", "--model", "m", "--all-ranks", "-o", text(&out), "--leave"], more].concat();
        Proc::start(fleet.place.flashboot(&fleet.args(&args)))
    };
    let _first = fleet.seed(&fleet.ranks[0], &[]);
    // Only one of the two ranks has a seed: it comes, and is not committed.
    let mut waiting = clone(&[]);
    let until = std::time::Instant::now() + common::fleet::LIMIT;
    loop {
        let status = fleet.place.ok(&["status", "--rendezvous", &fleet.endpoint]);
        let whole = |m: &Value| m["role"] == "clone" && m["holds"].as_u64() > Some(48 << 20);
        if status["members"].as_array().unwrap().iter().any(whole) {
            break;
        }
        assert!(std::time::Instant::now() < until, "{status}");
    }
    assert!(!out.exists() && waiting.line.try_recv().is_err() && waiting.is_running());
    // One that dies when its first rank is complete leaves nothing.
    let mut victim = clone(&["--kill", "complete"]);
    assert!(!victim.ended().success());
    assert!(!out.exists());
    let _second = fleet.seed(&fleet.ranks[1], &[]);
    let report = waiting.object();
    assert!(report["error"].is_null(), "{report}");
    let each = report["ranks"].as_array().unwrap();
    let names: Vec<_> = each.iter().map(|r| r["rank"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names, fleet.ranks);
    assert!(each.iter().all(|r| r["verified"] == r["blocks"] && r["blocks"].as_u64() >= Some(3)), "{report}");
    assert!(waiting.ended().success());
    fleet.is_whole(&out, &fleet.ranks);
    let mut again = clone(&[]);
    assert_eq!(again.object()["error"]["kind"], "invalid", "a directory that is there is not replaced");
}

#[test]
fn a_rank_that_nobody_holds_is_named() {
    let fleet = Fleet::new();
    let _first = fleet.seed(&fleet.ranks[0], &[]);
    let at = ["--rendezvous", &fleet.endpoint, "--threads", "1", "--patience", "2s"];
    let (code, said) = fleet.place.json(&[&["clone", "--model", "m", "--all-ranks"], &at[..]].concat());
    let error = &said["error"];
    assert_eq!((code, &error["kind"]), (1, &"unavailable".into()), "{said}");
    let missing = &fleet.ranks[1];
    assert!(error["detail"].as_str().unwrap().contains(&format!("rank {missing}: nobody holds")), "{said}");
    let remedy = error["remedy"].as_str().unwrap();
    assert!(remedy.ends_with(&format!("nobody holds: {missing}")), "{said}");
}

#[test]
fn a_nodes_own_ranks_go_around_its_gpus() {
    let fleet = Fleet::new();
    let driver = Driver::new(&fleet.place);
    let _seeds: Vec<_> = fleet.ranks.iter().map(|rank| fleet.seed(rank, &[])).collect();
    let start = |args: &[&str]| Proc::start(driver.on(fleet.place.flashboot(&fleet.args(args))));
    let mut both = start(&[
        "clone",
        "--model",
        "m",
        "--all-ranks",
        "--device",
        "cuda:*",
        "--allow",
        "tcp",
        "--name",
        "n",
    ]);
    let report = both.object();
    assert!(report["error"].is_null(), "{report}");
    let status = fleet.place.ok(&["status", "--rendezvous", &fleet.endpoint]);
    let clones = status["members"].as_array().unwrap().iter().filter(|m| m["role"] == "clone");
    let gpus: BTreeSet<_> = clones.map(|m| m["place"]["gpu"].as_str().unwrap().to_owned()).collect();
    assert_eq!(gpus.len(), 2, "{status}");
    let out = fleet.place.path("one");
    let own = &fleet.ranks[1];
    let mut one = start(&["clone", "--model", "m", "--ranks", own, "-o", text(&out), "--leave"]);
    let report = one.object();
    assert_eq!(report["ranks"].as_array().map(Vec::len), Some(1), "{report}");
    assert!(one.ended().success());
    fleet.is_whole(&out, std::slice::from_ref(own));
    let mut none = start(&["clone", "--model", "m", "--ranks", "target-9-0-0-0"]);
    assert_eq!(none.object()["error"]["kind"], "invalid");
}
