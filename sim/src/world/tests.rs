//! Laws that hold of every simulation; that no link is overfull is asserted at every change of rates.

use super::*;
use crate::{Chunk, Slow, Topology};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn any_topology() -> impl Strategy<Value = Topology> {
    prop_oneof![
        Just(Topology::Star),
        Just(Topology::Chain),
        Just(Topology::Placed),
        (1u32..5, 1u32..4).prop_map(|(length, fanout)| Topology::Tree { length, fanout }),
        Just(Topology::Ring),
        Just(Topology::Staggered),
        Just(Topology::WholeChunkRing),
    ]
}

fn any_scenario() -> impl Strategy<Value = Scenario> {
    let sizes = (1u64..600 << 20, 1u64..6, 1u32..10, 1u32..4);
    let faults = (0u32..3, 0u32..2, 0u32..3, any::<u64>());
    (any_topology(), sizes, 1u32..4, 1u32..4, any::<bool>(), faults).prop_map(
        |(topology, (image, blocks, clones, seeds), ranks, depth, verify, (fail, slow, uneven, seed))| {
            Scenario {
                topology,
                chunk: Chunk::Bytes(blocks << 24),
                seeds: seeds.min(clones),
                ranks,
                depth,
                verify,
                fail: if topology.is_gather() { 0.0 } else { f64::from(fail) * 0.15 },
                slow: (slow > 0).then_some(Slow { share: 0.3, factor: 0.4 }),
                uneven: f64::from(uneven) * 0.1,
                seed,
                spans: true,
                ..Scenario::new(image, clones)
            }
        },
    )
}

fn any_profile() -> impl Strategy<Value = Profile> {
    let built_in = |name| Profile::built_in(name).unwrap();
    let turns = built_in("h200").gpu.turns.unwrap();
    // Turns on several GPUs, in slices from much shorter than a copy to much longer.
    let in_turns = (1.0f64..5000.0, 0.0f64..500.0).prop_map(move |(slice_us, change_us)| {
        let mut profile = built_in("h200x2");
        profile.gpu.turns = Some(crate::Turns { slice_us, change_us, ..turns });
        profile
    });
    let one = prop::sample::select(Profile::names().collect::<Vec<_>>()).prop_map(built_in);
    prop_oneof![5 => one, 1 => in_turns]
}

/// The least time in which a clone can have its bytes: its fastest link's rate.
fn fastest(profile: &Profile) -> f64 {
    let network = profile.network.as_ref().map(|network| &network.copy);
    let rates = [profile.local.as_ref(), profile.nvlink.as_ref(), network];
    rates.into_iter().flatten().map(|copy| copy.rate).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_clone_ends_full_dead_or_without_a_source(profile in any_profile(), scenario in any_scenario()) {
        let outcome = simulate(&profile, &scenario).unwrap();
        let ended = outcome.clones.len() + outcome.dead.len() + outcome.failed.len();
        prop_assert_eq!(ended, scenario.clones as usize, "{:?}", outcome);
        // Seeds live, so who lives is full.
        prop_assert_eq!(&outcome.failed, &[]);
        if scenario.fail == 0.0 {
            prop_assert_eq!(outcome.clones.len(), scenario.clones as usize);
            prop_assert_eq!(outcome.moves, 0);
        }
    }

    #[test]
    fn bytes_are_neither_made_nor_lost(profile in any_profile(), scenario in any_scenario()) {
        let calm = Scenario { fail: 0.0, ..scenario };
        let outcome = simulate(&profile, &calm).unwrap();
        let nodes = u64::from(calm.clones) * u64::from(calm.ranks);
        let wanted = if calm.topology.is_gather() {
            // Everybody holds its own part: together one image a rank.
            (nodes - u64::from(calm.ranks)) * calm.image
        } else {
            nodes * calm.image
        };
        prop_assert_eq!(outcome.bytes, wanted);
        // Each link carried no more than it can in that time.
        for link in &outcome.links {
            prop_assert!(link.used <= 1.0 + 1e-6, "{:?}", link);
        }
        let best = fastest(&profile) * f64::from(calm.ranks) * (1.0 + 1e-6);
        for clone in &outcome.clones {
            prop_assert!(clone.bytes_per_s <= best, "{:?}", clone);
        }
    }

    #[test]
    fn copies_of_a_reader_follow_one_another_and_none_comes_before_its_source(
        profile in any_profile(), scenario in any_scenario(),
    ) {
        let scenario = Scenario { fail: 0.0, ..scenario };
        let outcome = simulate(&profile, &scenario).unwrap();
        let mut last = BTreeMap::new();
        let mut landed = BTreeMap::new();
        for span in &outcome.spans {
            prop_assert!(span.from_ms <= span.to_ms);
            let before = last.insert((span.clone, span.rank), span.to_ms).unwrap_or(0.0);
            prop_assert!(span.from_ms >= before, "{:?} begins before {}", span, before);
            landed.insert((span.clone, span.rank, span.chunk), span.to_ms);
            if let (Some(source), false) = (span.source, scenario.topology.is_gather()) {
                let there = landed.get(&(source, span.rank, span.chunk));
                prop_assert!(there.is_some_and(|at| *at <= span.from_ms), "{:?} after {:?}", span, there);
            }
        }
    }

    #[test]
    fn one_seed_is_one_history(profile in any_profile(), scenario in any_scenario()) {
        let found = simulate(&profile, &scenario).unwrap();
        prop_assert_eq!(&found, &simulate(&profile, &scenario).unwrap());
    }

    #[test]
    fn more_bytes_never_take_less_time(profile in any_profile(), scenario in any_scenario(), more in 1u64..64 << 20) {
        let calm = Scenario { fail: 0.0, slow: None, ..scenario };
        // Draws aside: a chunk more must not change what the others cost.
        let still = |copy: Copy| Copy { jitter_us: 0.0, ..copy };
        let mut profile = Profile { nvlink: profile.nvlink.map(still), ..profile };
        // Nor does a host's patience, which is longer for a larger copy.
        profile.gpu.turns = profile.gpu.turns.map(|turns| crate::Turns { late_us: 0.0, ..turns });
        if calm.topology.is_gather() {
            return Ok(());
        }
        let star = Scenario { topology: Topology::Star, ..calm };
        let last = |image| simulate(&profile, &Scenario { image, ..star }).unwrap().filled().unwrap().last_ms;
        prop_assert!(last(calm.image + more) >= last(calm.image) - 1e-6);
    }
}

#[test]
fn a_dead_links_readers_go_on_elsewhere_and_start_nothing_over() {
    let profile = Profile::built_in("gb300").unwrap();
    // Of three times only the notice is long here.
    let slow_to_notice = |copy: Copy| Copy { detect_ms: 500.0, ..copy };
    let profile = Profile { nvlink: profile.nvlink.map(slow_to_notice), ..profile };
    let scenario =
        Scenario { fail: 0.3, seed: 5, per_host: Some(4), spans: true, ..Scenario::new(20 << 30, 20) };
    let outcome = simulate(&profile, &scenario).unwrap();
    assert!(!outcome.dead.is_empty() && outcome.moves > 0, "{outcome:?}");
    assert_eq!(outcome.clones.len() + outcome.dead.len(), 20);
    // What is verified is never pulled again: of each chunk a survivor has one copy, and one more at most for each that was in
    // flight when its source was lost.
    let chunk = scenario.geometry(&profile).unwrap().chunk();
    let mut copies = BTreeMap::<(u32, u64), u64>::new();
    for span in &outcome.spans {
        *copies.entry((span.clone, span.chunk)).or_default() += 1;
    }
    let lives = |clone: &u32| outcome.clones.iter().any(|c| c.index == *clone);
    let chunks = scenario.image.div_ceil(chunk);
    for clone in (0..20).filter(lives) {
        let had = copies.iter().filter(|((of, _), _)| *of == clone);
        assert_eq!(had.clone().count() as u64, chunks, "clone {clone}");
        let twice: u64 = had.map(|(_, times)| times - 1).sum();
        assert!(twice <= outcome.moves * u64::from(scenario.depth), "clone {clone}: {twice} copies again");
        assert!(twice * 4 < chunks, "clone {clone}: {twice} of {chunks} again, as if it had started over");
    }
    let calm = simulate(&profile, &Scenario { fail: 0.0, ..scenario }).unwrap();
    let late = outcome.filled().unwrap().last_ms - calm.filled().unwrap().last_ms;
    assert!((500.0..5000.0).contains(&late), "a death costs its notice: {late}");
}

#[test]
fn two_hops_of_one_chunk_take_what_their_parts_take() {
    let profile = Profile::built_in("h100-roce").unwrap();
    let one = Scenario { chunk: Chunk::Bytes(16 << 20), per_host: Some(1), ..Scenario::new(16 << 20, 2) };
    let times = |verify: bool| -> Vec<f64> {
        let outcome = simulate(&profile, &Scenario { verify, ..one }).unwrap();
        outcome.clones.iter().map(|clone| clone.ms * 1e3).collect()
    };
    // A start, a chunk's cost, the bytes; then the word, and the same again.
    let hop = 10.0 + 5.0 + (16u64 << 20) as f64 / 48e9 * 1e6;
    let near = |found: &[f64], expected: [f64; 2]| {
        assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 0.01), "{found:?}, not {expected:?}");
    };
    near(&times(false), [hop, hop + 5.0 + hop]);
    let hash = (16u64 << 20) as f64 / 1.1e12 * 1e6;
    near(&times(true), [hop + hash, 2.0 * (hop + hash) + 5.0]);
}

/// One GPU that processes share, and clones that read whole images of 8 GiB in chunks of 8 GiB.
fn in_turns(image: u64, clones: u32, topology: Topology) -> Outcome {
    let profile = Profile::built_in("h200").unwrap();
    let whole = Chunk::Bytes(8 << 30);
    let scenario =
        Scenario { topology, chunk: whole, verify: false, spans: true, ..Scenario::new(image, clones) };
    simulate(&profile, &scenario).unwrap()
}

/// Microseconds of one such copy without turns: the chunk's cost and the bytes.
const COPY: f64 = 8.3 + (8u64 << 30) as f64 / 2133e9 * 1e6;

#[track_caller]
fn near(found: impl IntoIterator<Item = f64>, expected: &[f64]) {
    let found: Vec<f64> = found.into_iter().map(|ms| ms * 1e3).collect();
    let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs()).fold(0.0, f64::max);
    assert!(found.len() == expected.len() && off < 0.05, "{found:?}, not {expected:?}");
}

#[test]
fn two_who_share_a_gpu_take_turns_and_go_on_where_they_were_interrupted() {
    let outcome = in_turns(8 << 30, 2, Topology::Star);
    // A slice each, then what is left of the first, and what is left of the second; a change before each of the three.
    let first = 8.4 + 2090.0 + 140.0 + 2090.0 + 140.0 + (COPY - 2090.0);
    let second = first + 140.0 + (COPY - 2090.0);
    // Both waited for less than six times what a copy takes: their hosts look closely all the while.
    let mut times: Vec<f64> = outcome.clones.iter().map(|clone| clone.ms).collect();
    times.sort_by(f64::total_cmp);
    near(times, &[first + 35.0, second + 35.0]);
}

#[test]
fn a_clone_that_is_done_is_passed_at_the_cost_of_a_change() {
    let outcome = in_turns(8 << 30, 2, Topology::Chain);
    // Nobody interrupts the first. The second has its change, and at the end of its slice the first is passed.
    let first = 8.4 + COPY + 35.0;
    let second = first + 12.0 + 8.4 + 140.0 + COPY + 140.0 + 35.0;
    near(outcome.clones.iter().map(|clone| clone.ms), &[first, second]);
}

#[test]
fn who_is_ready_while_a_slice_is_over_comes_at_once() {
    let outcome = in_turns(16 << 30, 2, Topology::Chain);
    let span = |clone, chunk| outcome.spans.iter().find(|s| s.clone == clone && s.chunk == chunk).unwrap();
    // The first has begun its second copy when the second sees the first's first.
    let copied = 8.4 + COPY;
    let seen = copied + 35.0 + 12.0 + 8.4;
    let left = COPY - (seen - copied);
    let began = seen + 140.0;
    let ended = began + 2090.0 + 140.0 + 2090.0 + 140.0 + (COPY - 2090.0);
    near([span(1, 0).from_ms, span(1, 0).to_ms], &[began + 8.3, ended]);
    near([span(0, 1).from_ms, span(0, 1).to_ms], &[copied + 8.3, ended + 140.0 + (left - 2090.0)]);
}

#[test]
fn slow_clones_slow_those_behind_them_in_a_chain_and_nobody_in_a_star() {
    let profile = Profile::built_in("h100-roce").unwrap();
    let slow = Some(Slow { share: 0.2, factor: 0.25 });
    let scenario = Scenario { slow, seed: 3, per_host: Some(1), ..Scenario::new(4 << 30, 10) };
    let late = |topology| {
        let outcome = simulate(&profile, &Scenario { topology, ..scenario }).unwrap();
        let first = outcome.filled().unwrap().first_ms;
        outcome.clones.iter().filter(|clone| clone.ms > first * 2.0).count()
    };
    let (star, chain) = (late(Topology::Star), late(Topology::Chain));
    assert!(chain > star, "{chain} late in a chain, {star} in a star");
}

#[test]
fn the_service_places_better_than_a_star_where_hosts_share_a_wire() {
    let profile = Profile::built_in("h100-roce").unwrap();
    let scenario = Scenario { topology: Topology::Placed, ..Scenario::new(4 << 30, 23) };
    let placed = simulate(&profile, &scenario).unwrap().filled().unwrap();
    let star =
        simulate(&profile, &Scenario { topology: Topology::Star, ..scenario }).unwrap().filled().unwrap();
    assert!(placed.last_ms < star.last_ms, "{placed:?} {star:?}");
}

#[test]
fn unequal_hops_are_the_same_whoever_is_simulated_together() {
    let whole = Profile::built_in("h100-roce").unwrap();
    // One device for all GPUs of a host joins its ranks in one part. Nothing else is different, as only one of them is wide.
    let wide = |rails| {
        let network = whole.network.clone().map(|n| crate::Network { rails, rail: 1e15, ..n });
        Profile { network, ..whole.clone() }
    };
    let scenario = Scenario {
        ranks: 8,
        uneven: 0.2,
        chunk: Chunk::Bytes(64 << 20),
        verify: false,
        ..Scenario::new(1 << 30, 3)
    };
    let times = |rails| simulate(&wide(rails), &scenario).unwrap().clones;
    assert_eq!(times(1), times(8));
}

#[test]
fn a_links_curve_is_what_copies_of_that_size_run_at() {
    let text = "name = 'two'\nabout = 'two GPUs'\n\
        [shape]\ngpus_per_host = 2\nhosts = 1\nhosts_per_domain = 1\nhosts_per_rack = 1\n\
        [gpu]\negress = 400e9\ningress = 400e9\nduplex = 1.0\n\
        [nvlink]\nrate = 400e9\nstart_us = 0.0\nchunk_us = 0.0\nlook_us = 0.0\nmap_ms = 0.0\ndetect_ms = 1.0\n\
        curve = [[16777216, 346e9], [67108864, 384e9]]";
    let profile = Profile::parse("two.toml", text).unwrap();
    for (chunk, rate) in [(16 << 20, 346e9), (64 << 20, 384e9)] {
        let scenario = Scenario {
            chunk: Chunk::Bytes(chunk),
            topology: Topology::Chain,
            verify: false,
            ..Scenario::new(1 << 30, 1)
        };
        let found = simulate(&profile, &scenario).unwrap().clones[0].bytes_per_s;
        assert!((found / rate - 1.0).abs() < 1e-3, "{chunk}: {found}");
    }
}

#[test]
fn the_service_places_clones_of_a_large_image_as_a_chain_would() {
    for (profile, clones, ranks, image) in [("gb300", 8, 1, 41_400_000_000), ("h100-roce", 64, 8, 20 << 30)] {
        let profile = Profile::built_in(profile).unwrap();
        let chunk = Chunk::Bytes(64 << 20);
        let last = |topology| {
            let scenario = Scenario { topology, ranks, chunk, ..Scenario::new(image, clones) };
            simulate(&profile, &scenario).unwrap().filled().unwrap().last_ms
        };
        let (placed, chain) = (last(Topology::Placed), last(Topology::Chain));
        assert!(placed <= chain * 1.02, "{placed} ms, where a chain takes {chain}");
    }
}
