//! The kill matrix: every role (service, seed, head, middle and tail of a chain) is killed in every phase (registered, first,
//! middle and last chunk, verified, commit), in seeded runs of real processes over ipc and tcp.
//!
//! In each run the survivors complete, with every block verified and the image's very bytes; nobody hangs; the killed leave no
//! payload. `KILL_SEED=N` repeats one run, `KILL_RUNS=N` makes another number of them than 200.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{Proc, service},
    text,
};
use std::{
    collections::BTreeMap,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

const RUNS: u64 = 200;
/// Runs at one time: their processes wait for one another most of the time.
const LANES: usize = 3;
const ROLES: [&str; 5] = ["service", "seed", "head", "middle", "tail"];
const PHASES: [&str; 6] = ["registered", "pull:0", "pull:1", "pull:2", "chunk:2", "complete"];
const BLOCKS: u64 = 3;

/// What one run does, all of it from its seed.
#[derive(Debug, Clone, Copy)]
struct Run {
    seed: u64,
    role: usize,
    phase: usize,
    transport: &'static str,
    /// Which clone kills the service.
    by: usize,
    /// Which survivor writes its payload.
    writer: usize,
}

impl Run {
    /// Thirty seeds in a row are every role in every phase.
    fn of(seed: u64) -> Self {
        let cell = usize::try_from(seed % 30).unwrap();
        let mut dice = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut roll = |sides: u64| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            usize::try_from((dice >> 16) % sides).unwrap()
        };
        let transport = ["ipc", "tcp"][roll(2)];
        Self { seed, role: cell / 6, phase: cell % 6, transport, by: roll(3), writer: roll(3) }
    }
}

/// Processes of one run, in a directory of its own.
struct Stage<'a> {
    place: &'a Place,
    image: &'a Path,
    run: Run,
    endpoint: String,
}

impl Stage<'_> {
    fn member(&self, args: &[&str], more: &[&str]) -> Proc {
        let common = ["--rendezvous", &self.endpoint, "--transport", self.run.transport, "--json"];
        let small = ["--chunk", "16MiB", "--stall", "5s", "--threads", "1", "--patience", "30s"];
        Proc::start(self.place.flashboot(&[args, &common, &small, more].concat()))
    }

    fn seed(&self) -> Proc {
        let mut seed = self.member(&["seed", text(self.image), "--model", "m"], &[]);
        assert!(seed.object()["error"].is_null());
        seed
    }

    fn out(&self, clone: usize) -> PathBuf {
        self.place.path(&format!("out-{}-{clone}", self.run.seed))
    }

    /// The racks put them into one chain, in their order.
    fn clone(&self, number: usize, kill: Option<&str>) -> Proc {
        let mut more = vec!["--expect", "3", "--rack", ["a", "b", "c"][number]];
        let out = self.out(number);
        let killed = self.run.role == number + 2;
        if killed || self.run.writer == number {
            more.extend(["-o", text(&out)]);
        }
        if let Some(kill) = kill {
            more.extend(["--kill", kill]);
        }
        self.member(&["clone", "--model", "m"], &more)
    }
}

fn go(place: &Place, image: &Path, payload: &[u8], run: Run) {
    let (mut service_, endpoint) = service(place, "127.0.0.1:0");
    let stage = Stage { place, image, run, endpoint };
    let mut seeds = vec![stage.seed()];
    let (role, phase) = (ROLES[run.role], PHASES[run.phase]);
    if role == "seed" {
        seeds.push(stage.seed());
    }
    let mut clones: Vec<Proc> = (0..3)
        .map(|number| {
            let kill = match role {
                "service" if run.by == number => Some(format!("{phase}@{}", service_.child.id())),
                // The first seed is the head's source.
                "seed" if number == 0 => Some(format!("{phase}@{}", seeds[0].child.id())),
                _ if run.role == number + 2 => Some(phase.to_owned()),
                _ => None,
            };
            stage.clone(number, kill.as_deref())
        })
        .collect();
    if role == "service" {
        assert!(!service_.ended().success(), "the service lives");
        service_ = service(place, &stage.endpoint).0;
    }
    let mut alive = seeds.len();
    for (number, clone) in clones.iter_mut().enumerate() {
        let out = stage.out(number);
        if run.role == number + 2 {
            assert!(!clone.ended().success(), "the victim lives");
            assert!(clone.line.try_recv().is_err(), "it said that it has everything");
            assert!(!out.exists(), "a killed clone leaves no payload");
            continue;
        }
        alive += 1;
        let report = clone.object();
        assert_eq!((&report["verified"], &report["blocks"]), (&BLOCKS.into(), &BLOCKS.into()), "{report}");
        if run.writer == number {
            assert!(fs::read(&out).unwrap() == payload, "other bytes than the image's");
            fs::remove_file(out).unwrap();
        }
    }
    if role == "seed" {
        assert!(!seeds[0].ended().success(), "the seed lives");
        alive -= 1;
    }
    if role == "service" {
        // Whoever lives is there again, the seed too.
        let until = std::time::Instant::now() + common::fleet::LIMIT;
        loop {
            let status = place.ok(&["status", "--rendezvous", &stage.endpoint]);
            let members = status["members"].as_array().unwrap();
            if members.iter().filter(|m| m["holds"] == payload.len()).count() == alive {
                break;
            }
            assert!(std::time::Instant::now() < until, "not all are back: {status}");
        }
    }
    assert!(clones.iter_mut().enumerate().all(|(n, clone)| run.role == n + 2 || clone.is_running()));
    drop(service_);
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn whoever_is_killed_whenever_the_others_complete_verified_and_nobody_hangs() {
    let place = Place::in_memory();
    let image = place.image("m", &[("a", 32 * MIB), ("b", 9)]);
    let payload = fs::read(image.join("target-0-0-0-0.img")).unwrap();
    let seeds: Vec<u64> = match number("KILL_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("KILL_RUNS").unwrap_or(RUNS)).collect(),
    };
    let next = AtomicU64::new(0);
    let (failed, done) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::<(usize, usize), u32>::new()));
    let lane = || {
        while let Some(&seed) = seeds.get(usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap()) {
            let run = Run::of(seed);
            match catch_unwind(AssertUnwindSafe(|| go(&place, &image, &payload, run))) {
                Ok(()) => *done.lock().unwrap().entry((run.role, run.phase)).or_default() += 1,
                Err(_) => {
                    eprintln!(
                        "{} killed at {} over {}; again: KILL_SEED={seed} cargo test -p flashboot-cli --test kill_matrix",
                        ROLES[run.role], PHASES[run.phase], run.transport
                    );
                    failed.lock().unwrap().push(seed);
                }
            }
        }
    };
    thread::scope(|scope| (0..LANES).for_each(|_| drop(scope.spawn(lane))));
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "of {} runs these failed: {failed:?}", seeds.len());
    if seeds.len() as u64 >= 30 {
        assert_eq!(done.into_inner().unwrap().len(), 30, "not every role in every phase");
    }
}
