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
                fail: f64::from(fail) * 0.15,
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
    prop::sample::select(Profile::names().collect::<Vec<_>>())
        .prop_map(|name| Profile::built_in(name).unwrap())
}

/// The least time in which a clone can have its bytes: its fastest link's rate.
fn fastest(profile: &Profile) -> f64 {
    let rates = [profile.local, profile.nvlink, profile.network.map(|network| network.copy)];
    rates.into_iter().flatten().map(|copy| copy.rate).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_clone_ends_full_dead_or_without_a_source(profile in any_profile(), scenario in any_scenario()) {
        let outcome = simulate(&profile, &scenario).unwrap();
        let ended = outcome.clones.len() + outcome.dead.len() + outcome.failed.len();
        prop_assert_eq!(ended, scenario.clones as usize, "{:?}", outcome);
        // A broadcast's seeds live, so who lives is full; of a gather nobody else has a dead node's part.
        if !scenario.topology.is_gather() || outcome.dead.is_empty() {
            prop_assert_eq!(&outcome.failed, &[]);
        }
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
        let profile = Profile { nvlink: profile.nvlink.map(still), ..profile };
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
    let scenario = Scenario { fail: 0.3, seed: 5, per_host: Some(4), ..Scenario::new(20 << 30, 20) };
    let outcome = simulate(&profile, &scenario).unwrap();
    assert!(!outcome.dead.is_empty() && outcome.moves > 0, "{outcome:?}");
    assert_eq!(outcome.clones.len() + outcome.dead.len(), 20);
    // What is verified is never pulled again: all copies together are the survivors' images, what the dead had, and
    // what was under way when somebody died.
    let survivors = outcome.clones.len() as u64 * scenario.image;
    let most = survivors + outcome.dead.len() as u64 * scenario.image;
    assert!((survivors..=most).contains(&outcome.bytes), "{}", outcome.bytes);
    let calm = simulate(&profile, &Scenario { fail: 0.0, ..scenario }).unwrap();
    assert!(
        outcome.filled().unwrap().last_ms > calm.filled().unwrap().last_ms + 10.0,
        "a death costs its notice"
    );
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
fn the_service_places_better_than_a_chain_knows_how_where_hosts_share_a_wire() {
    let profile = Profile::built_in("h100-roce").unwrap();
    let scenario = Scenario { topology: Topology::Placed, ..Scenario::new(4 << 30, 23) };
    let placed = simulate(&profile, &scenario).unwrap().filled().unwrap();
    let star =
        simulate(&profile, &Scenario { topology: Topology::Star, ..scenario }).unwrap().filled().unwrap();
    assert!(placed.last_ms < star.last_ms, "{placed:?} {star:?}");
}
