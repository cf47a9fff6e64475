//! What members of the service say, and how soon, when something is wrong: a service that is another or gone, wrong bytes, what
//! cannot be had and what cannot be done.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{Fleet, LIMIT, Proc, until},
    http::{free, get},
    stand_in::Driver,
    text,
};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Long before anybody's patience or time to drain is over, and long enough for a machine that is busy.
const SOON: Duration = Duration::from_secs(20);

fn token(place: &Place, name: &str) -> String {
    let path = place.path(name);
    let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&path).unwrap();
    write!(file, "the secret of {name}, long enough").unwrap();
    text(&path).to_owned()
}

/// A service that protects itself so, and what members dial.
fn serves(place: &Place, at: &str, protection: &[&str]) -> (Proc, String) {
    let args = [&["rendezvous", "--listen", at, "--lease", "2s", "--json"], protection].concat();
    let mut service = Proc::start(place.flashboot(&args));
    let endpoint = service.object()["endpoint"].as_str().unwrap().to_owned();
    (service, endpoint)
}

#[test]
fn a_seed_is_ready_only_while_the_service_has_it_and_says_once_why_not() {
    let mut fleet = Fleet::at("ipc", |_| String::new());
    let (first, second) = (token(&fleet.place, "first"), token(&fleet.place, "second"));
    let pinned = ["--tls", "on"];
    for (own, other, again) in [
        (&["--token-file", &first][..], &["--token-file", &second][..], true),
        // Without certificate files each start has another pin.
        (&pinned, &pinned, false),
    ] {
        let at = free();
        (fleet.service, fleet.endpoint) = serves(&fleet.place, &at, own);
        let http = free();
        let mut seed = fleet.seed(&[&["--http", &http], own].concat());
        assert_eq!(get(&http, "/readyz"), (200, "ready\n".into()));
        fleet.service.kill();
        until("it is silent for a lease", || get(&http, "/readyz").0 == 503);
        assert!(get(&http, "/readyz").1.contains("silent, or has forgotten it"));
        let (mut stranger, _) = serves(&fleet.place, &at, other);
        until("another serves there", || get(&http, "/readyz").1.contains("another than it registered at"));
        let status: Value = serde_json::from_str(&get(&http, "/status").1).unwrap();
        let member = &status["members"][0];
        assert_eq!((&status["ready"], &member["standing"]), (&false.into(), &"stranger".into()), "{status}");
        let why = member["service_error"].as_str().unwrap();
        assert!(why.contains("its pin changed") && why.contains("start"), "{why}");
        stranger.kill();
        if again {
            let _service = serves(&fleet.place, &at, own);
            until("it is registered again", || get(&http, "/readyz").0 == 200);
            thread::sleep(Duration::from_secs(1));
            seed.signal(Signal::TERM);
        } else {
            seed.signal(Signal::TERM);
        }
        assert_eq!(seed.ended().code(), Some(0));
        let log = seed.stderr.recv_timeout(LIMIT).unwrap();
        assert_eq!(log.matches("its pin changed").count(), 1, "once, with what to do: {log}");
    }
}

#[test]
fn going_without_the_service_takes_seconds_and_not_the_time_to_drain() {
    let mut fleet = Fleet::new("tcp");
    let mut seed = fleet.seed(&["--rate", "40MB"]);
    let mut clone = fleet.clone(&["--leave"]);
    fleet.until("it reads", |members| members.len() == 2 && members[1]["upstream"].is_string());
    fleet.service.kill();
    fleet.check(&mut clone);
    let began = Instant::now();
    assert_eq!(clone.0.ended().code(), Some(0));
    assert!(began.elapsed() < SOON, "the clone took {:?}", began.elapsed());
    let log = clone.0.stderr.recv_timeout(LIMIT).unwrap();
    assert!(log.contains("the service does not say who reads from here"), "{log}");
    // It named a reader last: that one's time to drain runs from then on.
    thread::sleep(Duration::from_secs(1));
    let began = Instant::now();
    seed.signal(Signal::TERM);
    assert_eq!(seed.ended().code(), Some(0));
    assert!(began.elapsed() < LIMIT / 2 + SOON, "the seed took {:?}", began.elapsed());
}

#[test]
fn a_seed_without_readers_that_is_asked_to_go_while_the_service_is_gone_ends_soon() {
    let mut fleet = Fleet::new("tcp");
    let mut seed = fleet.seed(&["--drain", "50s"]);
    fleet.service.kill();
    let began = Instant::now();
    seed.signal(Signal::TERM);
    assert_eq!(seed.ended().code(), Some(0));
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

/// Flips a bit in the memory that `pid` serves, as a bad memory cell would.
fn damage(pid: u32, payload: usize, at: usize) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let arena = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (number(start)?, number(end)?);
        (rest.starts_with("rw-s") && rest.contains("memfd:") && end - start > payload as u64).then_some(start)
    });
    let mut memory = fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let at = arena.unwrap() + at as u64;
    let mut byte = [0];
    memory.seek(SeekFrom::Start(at)).unwrap();
    memory.read_exact(&mut byte).unwrap();
    memory.seek(SeekFrom::Start(at)).unwrap();
    memory.write_all(&[byte[0] ^ 1]).unwrap();
}

#[test]
fn wrong_bytes_end_a_clone_soon_as_corrupt_and_the_seed_that_finds_them_in_its_own_memory() {
    for transport in ["ipc", "tcp"] {
        let mut fleet = Fleet::new(transport);
        let mut seed = fleet.seed(&[]);
        damage(seed.child.id(), fleet.payload().len(), 50 * MIB);
        let began = Instant::now();
        let (mut clone, out) = fleet.clone(&[]);
        let error = clone.object()["error"].clone();
        assert_eq!(error["kind"], "corrupt", "{transport}: {error}");
        assert_eq!(clone.ended().code(), Some(3));
        assert!(began.elapsed() < SOON, "{transport}: {:?}, with a patience of 30 s", began.elapsed());
        assert!(!out.exists());
        // The service told it; it looked, and goes.
        let error = seed.object()["error"].clone();
        assert!(error["detail"].as_str().unwrap().contains("do not match their digests any more"), "{error}");
        assert_eq!((seed.ended().code(), &error["kind"]), (Some(3), &"corrupt".into()), "{transport}");
        fleet.until("nobody is given it any more", |members| members.iter().all(|m| m["role"] != "seed"));
    }
}

#[test]
fn a_clone_that_met_wrong_bytes_completes_from_another_seed() {
    let mut fleet = Fleet::new("tcp");
    let bad = fleet.seed(&[]);
    damage(bad.child.id(), fleet.payload().len(), 50 * MIB);
    let mut clone = fleet.clone(&["--rate", "40MB"]);
    let _good = fleet.seed(&[]);
    let report = fleet.check(&mut clone);
    assert!(report["losses"].as_u64() <= Some(1), "{report}");
}

fn image_id(image: &Path) -> String {
    let metadata: Value = serde_json::from_slice(&fs::read(image.join("metadata.json")).unwrap()).unwrap();
    metadata["id"].as_str().unwrap().to_owned()
}

#[test]
fn what_is_no_image_id_is_refused_at_once_and_its_beginning_will_do() {
    let mut fleet = Fleet::new("ipc");
    let _seed = fleet.seed(&[]);
    let id = image_id(&fleet.image);
    let began = Instant::now();
    let ask = |image: &str| {
        fleet.place.json(&["clone", "--image", image, "--rendezvous", &fleet.endpoint, "--leave"])
    };
    for bad in ["zzz", &id[..7], &format!("{id}0")] {
        let (code, said) = ask(bad);
        assert_eq!((code, &said["error"]["kind"]), (2, &"usage".into()), "{said}");
        assert!(said["error"]["detail"].as_str().unwrap().contains("64 hexadecimal digits"), "{said}");
    }
    let other = if id.starts_with('0') { "11111111" } else { "00000000" };
    let (code, said) = ask(other);
    assert_eq!((code, &said["error"]["kind"]), (1, &"unavailable".into()), "{said}");
    assert!(said["error"]["detail"].as_str().unwrap().contains(other), "{said}");
    assert!(began.elapsed() < SOON, "{:?}, with a patience of a minute", began.elapsed());
    let mut clone = fleet.clone(&["--image", &id[..12], "--leave"]);
    assert_eq!(fleet.check(&mut clone)["image"], id);
}

#[test]
fn where_nothing_can_be_written_is_said_before_anything_is_read() {
    let fleet = Fleet::new("ipc");
    let began = Instant::now();
    let missing = fleet.place.path("no/such/directory/out");
    let there = fleet.place.path("");
    // Nobody seeds: it would wait for a minute.
    for (out, word) in [(text(&missing), "nothing can be written in"), (text(&there), "is a directory")] {
        let args = ["clone", "--model", "tiny", "--rendezvous", &fleet.endpoint, "-o", out];
        let (code, said) = fleet.place.json(&args);
        assert_ne!(code, 0, "{said}");
        let error = &said["error"];
        assert!(error["detail"].as_str().unwrap().contains(word) && error["remedy"].is_string(), "{said}");
    }
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn a_transport_that_can_never_work_between_a_pair_is_tried_once_and_refused_with_a_remedy() {
    let mut fleet = Fleet::new("ipc");
    let _seed = fleet.seed(&[]);
    let driver = Driver::new(&fleet.place);
    let began = Instant::now();
    fleet.clones += 1;
    let mut clone = Proc::start(driver.on(fleet.member(&["clone", "--model", "tiny", "--device", "cuda:0"])));
    let error = clone.object()["error"].clone();
    assert_eq!(error["kind"], "mismatch", "{error}");
    assert_eq!(error["remedy"], "allow a transport that serves both ends", "{error}");
    assert!(error["detail"].as_str().unwrap().contains("not host to GPU"), "{error}");
    assert_eq!(clone.ended().code(), Some(3));
    assert!(began.elapsed() < SOON, "{:?}, with a patience of 30 s", began.elapsed());
    let log = clone.stderr.recv_timeout(LIMIT).unwrap_or_default();
    assert_eq!(log.matches("source lost; looking for another holder").count(), 1, "{log}");
}

#[test]
fn a_clone_that_loses_its_gpu_context_begins_anew_and_joins_again() {
    let fleet = Fleet::new("tcp");
    let _seed = fleet.seed(&["--rate", "60MB"]);
    let mut driver = Driver::new(&fleet.place);
    let mut anew = 0;
    for after in [150, 300, 450] {
        driver.strike_once(&format!("poison:after={after}:ECC_UNCORRECTABLE"));
        let out = fleet.place.path(&format!("gpu-{after}"));
        let args = ["clone", "--model", "tiny", "--device", "cuda:0", "--leave", "-o", text(&out)];
        let mut clone = (Proc::start(driver.on(fleet.member(&args))), out);
        fleet.check(&mut clone);
        assert_eq!(clone.0.ended().code(), Some(0));
        let log = clone.0.stderr.recv_timeout(LIMIT).unwrap();
        anew += log.matches("only a new process helps: beginning anew").count();
    }
    assert!(anew > 0, "never lost on the way");
}

#[test]
fn status_says_who_keeps_to_a_seeds_bound() {
    let fleet = Fleet::new("tcp");
    let _bound = fleet.seed(&["--rate", "40MB"]);
    let _free = fleet.seed(&[]);
    let status = fleet.status();
    let egress = |n: usize| status["members"][n]["egress"][0].clone();
    assert_eq!(egress(0)["bound"], "enforced", "{status}");
    assert_eq!(egress(0)["bytes_per_s"], 40_000_000, "{status}");
    assert_eq!(egress(1)["bound"], "cooperative", "{status}");
    let shown = fleet.place.flashboot(&["status", "--rendezvous", &fleet.endpoint]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("tcp (enforced, 40.0 MB/s)") && shown.contains("tcp (cooperative)"), "{shown}");
}

#[test]
fn a_source_slower_than_the_floor_is_left_for_a_faster_one_and_kept_where_there_is_none() {
    let mut fleet = Fleet::new("tcp");
    // Alone, at some 35 s for five blocks, it would be read to the end.
    let _slow = fleet.seed(&["--rate", "2MB"]);
    let start = |fleet: &mut Fleet, more: &[&str]| {
        fleet.clones += 1;
        let out = fleet.place.path(&format!("out-{}", fleet.clones));
        let args = [&["clone", "--model", "tiny", "-o", text(&out), "--floor", "10MB"], more].concat();
        let mut command = fleet.member(&args);
        command.env("FLASHBOOT_REPLICATE__FLOOR_WINDOW", "3s");
        (Proc::start(command), out)
    };
    let mut clone = start(&mut fleet, &[]);
    fleet.until("it reads from the slow one", |members| {
        members.len() == 2 && members[1]["upstream"].is_string()
    });
    let slow = fleet.status()["members"][0]["member"].clone();
    let _fast = fleet.seed(&[]);
    let report = fleet.check(&mut clone);
    assert_eq!(report["losses"], 1, "{report}");
    let sources = report["sources"].as_array().unwrap();
    assert_eq!((sources.len(), &sources[0]["source"]), (2, &slow), "{report}");
    clone.0.signal(Signal::TERM);
    clone.0.ended();
    let log = clone.0.stderr.recv_timeout(LIMIT).unwrap();
    assert!(log.contains("below the floor of 10000000B a second"), "{log}");
    // Where nobody is faster, the slow one is read on.
    let mut only = Fleet::new("tcp");
    let _seed = only.seed(&["--rate", "4MB"]);
    let mut clone = start(&mut only, &["--leave"]);
    let report = only.check(&mut clone);
    assert_eq!(report["losses"], 1, "left once, and taken again: {report}");
}

#[test]
fn a_dead_source_whose_memory_outlives_it_is_left_when_the_service_says_so() {
    let fleet = Fleet::new("auto");
    let driver = Driver::new(&fleet.place).with_imex();
    let start = |args: &[&str]| {
        let common = ["--rendezvous", &fleet.endpoint, "--device", "cuda:0", "--chunk", "16MiB", "--json"];
        // Nothing but the service's word ends the wait for a word that stands still.
        let patient = ["--stall", "10m", "--threads", "1", "--patience", "30s"];
        Proc::start(driver.on(fleet.place.flashboot(&[args, &common, &patient].concat())))
    };
    let image = text(&fleet.image);
    let mut seed = start(&["seed", image, "--model", "tiny", "--transport", "tcp", "--rate", "5MB"]);
    assert!(seed.object()["error"].is_null());
    let by_both = ["clone", "--model", "tiny", "--allow", "imex,tcp"];
    let mut first = start(&by_both);
    fleet.until("it reads", |members| members.len() == 2 && members[1]["upstream"].is_string());
    let out = fleet.place.path("out");
    let mut second = (start(&[&by_both[..], &["-o", text(&out)]].concat()), out.clone());
    fleet.until("the second has a chunk of the first", |members| {
        members.len() == 3
            && members[2]["upstream"] == members[1]["member"]
            && members[2]["holds"].as_u64() > Some(0)
    });
    first.kill();
    let report = fleet.check(&mut second);
    assert_eq!(report["losses"], 1, "{report}");
    let by: Vec<_> = report["sources"].as_array().unwrap().iter().map(|hop| &hop["transport"]).collect();
    assert_eq!(by, ["imex", "tcp"], "{report}");
    second.0.signal(Signal::TERM);
    assert_eq!(second.0.ended().code(), Some(0));
    let log = second.0.stderr.recv_timeout(LIMIT).unwrap();
    assert!(log.contains("the source has ended with"), "{log}");
}
