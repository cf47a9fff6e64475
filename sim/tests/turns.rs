//! How processes take turns on one H200, read off a timeline that was measured: the `h200` profile's turns are what it shows.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use flashboot_sim::Profile;
use serde_json::Value;

const TIMELINE: &str = include_str!("../../docs/results/one-h200-timeline.json");

/// A copy's first and last byte in microseconds, and whose it was.
#[derive(Debug, Clone, Copy)]
struct Copied {
    from: f64,
    to: f64,
    clone: u64,
}

fn timeline() -> (f64, Vec<Copied>) {
    let all: Value = serde_json::from_str(TIMELINE).unwrap();
    let mut copies = Vec::new();
    for clone in all["clones"].as_array().unwrap() {
        for copy in clone["copies_ms"].as_array().unwrap() {
            let at = |n: usize| copy[n].as_f64().unwrap() * 1e3;
            copies.push(Copied { from: at(0), to: at(1), clone: clone["index"].as_u64().unwrap() });
        }
    }
    copies.sort_by(|a, b| a.from.total_cmp(&b.from));
    (all["chunk_bytes"].as_f64().unwrap(), copies)
}

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len() as f64
}

#[track_caller]
fn near(found: f64, held: f64, within: f64) {
    assert!((found / held - 1.0).abs() <= within, "the timeline shows {found}, the profile holds {held}");
}

#[test]
fn slice_change_and_pace_are_those_of_the_timeline() {
    let (chunk, copies) = timeline();
    let profile = Profile::built_in("h200").unwrap();
    let (turns, local) = (profile.gpu.turns.unwrap(), profile.local.unwrap());
    assert_eq!(copies.len(), 4 * 16);
    let pace = local.chunk_us + chunk / local.rate * 1e6;
    // A copy that took much longer than others was interrupted by the end of a slice.
    let interrupted = |copy: &Copied| copy.to - copy.from > 1.5 * pace;
    let (mut paces, mut slices, mut gaps) = (Vec::new(), Vec::new(), Vec::new());
    let mut turn = copies[0].from;
    for pair in copies.windows(2) {
        let (before, now) = (pair[0], pair[1]);
        if before.clone != now.clone {
            turn = now.from;
            if !interrupted(&before) {
                gaps.push(now.from - before.to);
            }
        } else if !interrupted(&before) && now.from - before.to < 20.0 {
            paces.push(now.from - before.from);
        }
        // What a slice held before the copy that its end interrupted.
        if interrupted(&now) {
            slices.push(now.from - turn);
        }
    }
    assert!(paces.len() >= 40 && slices.len() == 2 && gaps.len() >= 8, "{paces:?} {slices:?} {gaps:?}");
    near(mean(&paces), pace, 0.005);
    slices.iter().for_each(|slice| near(*slice, turns.slice_us, 0.01));
    // Between two clones is one change, or one more for each that is done and is passed.
    let changes: f64 = gaps.iter().map(|gap| (gap / turns.change_us).round()).sum();
    assert!(gaps.iter().any(|gap| gap / turns.change_us > 1.5), "none was passed: {gaps:?}");
    near(gaps.iter().sum::<f64>() / changes, turns.change_us, 0.05);
}
