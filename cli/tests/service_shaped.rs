//! A chain and a star of eight clones, each on a host of its own, where every host's wire is as narrow: in a chain the last
//! clone is ready one link's time and a chunk for each of the others after the first byte, in a star eight links' times.
//!
//! `FLASHBOOT_PICTURE=docs/results/shaped-chain.svg cargo test -p flashboot-cli --test service_shaped` measures one to eight clones
//! of both instead, draws them and prints the table; it takes some five minutes, on a machine that does nothing else.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "common/hosts.rs"]
mod hosts;
#[path = "../../backend-tcp/tests/common/netns.rs"]
#[allow(dead_code, reason = "it is another crate's tests' too")]
mod netns;
#[path = "common/picture.rs"]
mod picture;

use common::{MIB, fleet::Proc};
use hosts::Hosts;
use picture::{Line, Picture};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
    time::Instant,
};

const CLONES: usize = 8;
const CHUNK: usize = 16 * MIB;
/// What every host sends a second at most, in bytes of frames: slow enough for ten processes on two cores.
const RATE: u64 = 10_000_000;
/// All of them are given their plans within the time after which the service lets them ask again.
const RELEASE_MS: f64 = 50.0;
const TAG: &str = "c";

fn main() {
    if let Ok(path) = std::env::var("FLASHBOOT_PICTURE") {
        return draw(Path::new(&path));
    }
    hosts::run(
        &[
            ("the_last_of_a_chain_of_eight_is_ready_one_link_and_the_fill_after_the_release", chain),
            ("a_star_of_eight_takes_eight_links_times", star),
        ],
        netns::too_wide(),
    );
}

fn chain() {
    let mut wires = Wires::new(6);
    let raw = wires.link();
    // The last by ipc, beside the seventh.
    let last = wires.measure(CLONES, |number| match number {
        8 => (7, "ipc", &[]),
        7 => (7, "ipc,tcp", &[]),
        _ => (number, "tcp", &[]),
    });
    // What the first clone's own link took in the same run: of a machine that is busy that is more than plain sockets take on it.
    let first = last.reports[0]["ready_ms"].as_f64().unwrap();
    let link = Link { bytes_per_s: raw.bytes_per_s.min(wires.payload as f64 / first * 1e3) };
    let bound = link.chain(CLONES, wires.payload, 1.1);
    println!(
        "chain of {CLONES}: {:.0} ms, bound {bound:.0} ms, by plain sockets {:.0} ms; one link {:.0} ms, by plain sockets {:.0} ms",
        last.ms,
        raw.chain(CLONES, wires.payload, 1.1),
        link.ms(wires.payload),
        raw.ms(wires.payload),
    );
    assert!(last.ms <= bound, "{:.0} ms, where {bound:.0} are allowed; {link:?}, {raw:?}: {last:?}", last.ms);
    let sources: BTreeSet<_> = last.reports.iter().map(source).collect();
    assert_eq!(sources.len(), CLONES, "each read from another: {last:?}");
    assert!(last.reports.iter().any(|r| r["sources"][0]["transport"] == "ipc"), "{last:?}");
}

fn star() {
    let mut wires = Wires::new(1);
    let link = wires.link();
    let last = wires.measure(CLONES, |number| (number, "tcp", &["--readers", "0"]));
    let ideal = link.ms(wires.payload) * CLONES as f64;
    println!("star of {CLONES}: {:.0} ms, {ideal:.0} ms are all of it through one link", last.ms);
    assert!(last.ms >= ideal * 0.9, "faster than its wire: {:.0} ms of {ideal:.0}: {last:?}", last.ms);
    assert!(
        last.reports.iter().all(|r| source(r) == source(&last.reports[0])),
        "all from the seed: {last:?}"
    );
}

fn source(report: &Value) -> String {
    report["sources"][0]["source"].as_str().unwrap().to_owned()
}

/// What one link carries, measured.
#[derive(Debug, Clone, Copy)]
struct Link {
    bytes_per_s: f64,
}

impl Link {
    fn ms(self, bytes: usize) -> f64 {
        bytes as f64 / self.bytes_per_s * 1e3
    }

    /// One link's time for `payload`, `slack` times, and a chunk's for every clone but the first.
    fn chain(self, clones: usize, payload: usize, slack: f64) -> f64 {
        slack * self.ms(payload) + self.ms(CHUNK) * (clones - 1) as f64
    }
}

/// What the clones of one run said; when the last was ready.
#[derive(Debug)]
struct Last {
    ms: f64,
    reports: Vec<Value>,
}

/// A seed and a service on the first host of nine, all as narrow.
struct Wires {
    hosts: Hosts,
    payload: usize,
    _seed: Proc,
}

impl Wires {
    fn new(chunks: usize) -> Self {
        // Two pages less, for the second tensor and the padding.
        let mut hosts = Hosts::new(TAG, CLONES + 1, chunks * CHUNK - 8192);
        hosts.serve(&[]);
        hosts.network.shape(RATE);
        let seed = hosts.seed(&["--allow", "tcp", "--readers", "8"]);
        let payload = hosts.fleet.payload().len();
        assert_eq!(payload.div_ceil(CHUNK), chunks);
        Self { hosts, payload, _seed: seed }
    }

    /// What plain sockets carry from one host to the next.
    fn link(&self) -> Link {
        let bytes = 2 * CHUNK;
        let at = format!("{}:7500", netns::address(1, 4));
        thread::scope(|scope| {
            let (ready, listens) = std::sync::mpsc::channel();
            let address = at.clone();
            let reader = scope.spawn(move || {
                netns::enter(std::process::id(), TAG, 1);
                let listener = TcpListener::bind(address).unwrap();
                ready.send(()).unwrap();
                let mut from = listener.accept().unwrap().0;
                let mut buffer = vec![0; MIB];
                let mut got = from.read(&mut buffer).unwrap();
                let (began, first) = (Instant::now(), got);
                while got < bytes {
                    let some = from.read(&mut buffer).unwrap();
                    assert_ne!(some, 0, "the sender ended early");
                    got += some;
                }
                (bytes - first) as f64 / began.elapsed().as_secs_f64()
            });
            scope.spawn(move || {
                netns::enter(std::process::id(), TAG, 0);
                listens.recv().unwrap();
                TcpStream::connect(at).unwrap().write_all(&vec![7; bytes]).unwrap();
            });
            Link { bytes_per_s: reader.join().unwrap() }
        })
    }

    /// Brings so many clones up together: for each from 1, on which host, by what, and what else it is told.
    fn measure(
        &mut self,
        clones: usize,
        how: impl Fn(usize) -> (usize, &'static str, &'static [&'static str]),
    ) -> Last {
        let expect = clones.to_string();
        let mut started: Vec<_> = (1..=clones)
            .map(|number| {
                let (host, allow, more) = how(number);
                // The racks put them into the order of their numbers.
                let rack = format!("r{number}");
                // One connection: several share a narrow wire unevenly, and a chunk waits for the slowest.
                let more = [&["--connections", "1"], more].concat();
                self.hosts.clone(host, allow, &[&["--expect", &expect, "--rack", &rack], &more[..]].concat())
            })
            .collect();
        let reports: Vec<_> = started
            .iter_mut()
            .map(|(clone, _)| {
                let report = clone.object();
                assert_eq!(
                    (&report["verified"], report["blocks"].is_u64()),
                    (&report["blocks"], true),
                    "{report}"
                );
                report
            })
            .collect();
        // They go, so that the next ones do not read from them.
        started.iter().for_each(|(clone, _)| clone.signal(Signal::TERM));
        for (clone, out) in &mut started {
            assert_eq!(clone.ended().code(), Some(0));
            assert!(
                std::fs::read(&*out).unwrap() == self.hosts.fleet.payload(),
                "other bytes than the image's"
            );
            std::fs::remove_file(out).unwrap();
        }
        let ready = reports.iter().map(|report| report["ready_ms"].as_f64().unwrap());
        Last { ms: ready.fold(0.0, f64::max) + RELEASE_MS, reports }
    }
}

/// Both, of one to eight clones, by one link's time.
fn draw(path: &Path) {
    if let Some(why) = netns::too_wide() {
        panic!("nothing can be measured here: {why}");
    }
    let mut wires = Wires::new(4);
    let link = wires.link();
    let ideal = link.ms(wires.payload);
    println!("one link: {:.1} MB/s, {ideal:.0} ms for {} chunks of 16 MiB", link.bytes_per_s / 1e6, 4);
    println!(
        "| clones | chain, ms | ÷ (link + fill) | star, ms | ÷ (clones × link) |\n|---|---|---|---|---|"
    );
    let (mut chains, mut stars) = (Vec::new(), Vec::new());
    for clones in [1, 2, 4, 6, CLONES] {
        let chain = wires.measure(clones, |number| (number, "tcp", &[])).ms;
        let star = wires.measure(clones, |number| (number, "tcp", &["--readers", "0"])).ms;
        let whole = ideal * clones as f64;
        let filled = link.chain(clones, wires.payload, 1.0);
        println!("| {clones} | {chain:.0} | {:.3} | {star:.0} | {:.3} |", chain / filled, star / whole);
        chains.push((clones as f64, chain / ideal));
        stars.push((clones as f64, star / ideal));
    }
    let model = |of: &dyn Fn(usize) -> f64| (1..=CLONES).map(|n| (n as f64, of(n) / ideal)).collect();
    let lines = [
        Line { name: "star, measured", colour: "#b5482a", dashed: false, points: stars },
        Line {
            name: "star: clones × link",
            colour: "#b5482a",
            dashed: true,
            points: model(&|n| ideal * n as f64),
        },
        Line { name: "chain, measured", colour: "#1f5fa8", dashed: false, points: chains },
        Line {
            name: "chain: link + fill",
            colour: "#1f5fa8",
            dashed: true,
            points: model(&|n| link.chain(n, wires.payload, 1.0)),
        },
    ];
    let picture = Picture {
        title: "Time until the last clone is verified, every link shaped to the same rate",
        across: "clones",
        up: "times one link's own time",
        lines: &lines,
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path);
    std::fs::write(&path, picture.svg()).unwrap();
    println!("drawn: {}", path.display());
}
