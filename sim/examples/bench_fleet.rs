//! Ten thousand GPUs against a bare event loop: what the model costs beside the least that as many events cost.
//!
//! 1,250 replicas of 8 GPUs, 809 chunks each, as a tree of chains. The bare loop takes as many events out of the same queue and
//! does nothing with them, with as many waiting as the simulator has at a time: an eighth of all, a GPU of each replica. With all waiting in
//! one queue it is slower; that ratio is printed and not judged. The last line is for `cargo xtask bench`.
#![allow(clippy::unwrap_used, reason = "a bench that cannot run ends")]

use flashboot_sim::{Chunk, Profile, Queue, Scenario, Topology, simulate};
use std::{fs, hint::black_box};

const IMAGE: u64 = 217_000_000_000;

/// The most memory that this process had, in MiB.
fn peak_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
}

/// Seconds that this thread has computed: neighbours on a busy machine do not count.
fn computed() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// Seconds of `events` events with `waiting` of them waiting.
fn bare(events: u64, waiting: usize) -> f64 {
    let began = computed();
    let mut queue = Queue::default();
    let mut word = 1u64;
    for n in 0..waiting as u64 {
        queue.push(n * 37 % 1_000_000, (n as u32, 0u32));
    }
    for _ in waiting as u64..events {
        let event = queue.pop().unwrap();
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let later = queue.now() + 300_000 + (word >> 48);
        queue.push(later, black_box(event));
    }
    while let Some(event) = queue.pop() {
        black_box(event);
    }
    computed() - began
}

fn main() {
    let profile = Profile::built_in("h100-roce").unwrap();
    let scenario = Scenario {
        ranks: 8,
        topology: Topology::Tree { length: 16, fanout: 2 },
        chunk: Chunk::Bytes(256 << 20),
        ..Scenario::new(IMAGE, 1250)
    };
    let (mut best, mut least, mut crowded, mut last) = (f64::INFINITY, f64::INFINITY, f64::INFINITY, None);
    for _ in 0..3 {
        let began = computed();
        let outcome = simulate(&profile, &scenario).unwrap();
        best = best.min(computed() - began);
        assert_eq!(outcome.clones.len(), 1250);
        assert_eq!(outcome.chunks, 809);
        least = least.min(bare(outcome.events, outcome.pending / 8));
        crowded = crowded.min(bare(outcome.events, outcome.pending));
        last = Some(outcome);
    }
    let outcome = last.unwrap();
    let (ratio, of_all, peak) = (best / least, best / crowded, peak_mib() / 1024.0);
    println!(
        "{} events, {} waiting at most: {best:.2} s, bare {least:.2} s with as many waiting, {crowded:.2} s ({of_all:.2}) with those of all eight GPUs waiting at once; the last clone after {:.1} s of virtual time",
        outcome.events,
        outcome.pending / 8,
        outcome.filled().unwrap().last_ms / 1e3
    );
    let how = "10,000 GPUs, 809 chunks each, tree of chains of 16";
    println!(
        r#"{{"rows": [{{"name": "simulation ÷ bare event loop", "target": "≤ 4", "measured": {ratio:.2}, "ok": {}, "how": "{how}, as many waiting, the best of 3 of each"}}, {{"name": "the simulator's memory", "target": "≤ 2 GiB", "measured": {peak:.2}, "ok": {}, "how": "{how}, at its peak"}}]}}"#,
        ratio <= 4.0,
        peak <= 2.0,
    );
}
