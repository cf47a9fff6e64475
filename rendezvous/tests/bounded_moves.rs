//! A clone moves once when it comes, and at most once for every source that it loses.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use std::time::Duration;

#[test]
fn nobody_moves_more_often_than_it_lost_a_source() {
    sim::seeds("bounded_moves", |seed| {
        let mut world = sim::world(seed);
        world.trouble(1500, true, |_| ());
        assert!(world.settle(Duration::from_secs(60), |_| ()));
        for (id, node) in &world.nodes {
            assert!(
                node.moves <= node.losses + 1,
                "{id} moved {} times for {} losses",
                node.moves,
                node.losses
            );
        }
    });
}

#[test]
fn in_a_quiet_world_everybody_moves_once() {
    sim::seeds("bounded_moves", |seed| {
        let mut world = sim::world(seed);
        assert!(world.settle(Duration::from_secs(60), |_| ()));
        for node in world.nodes.values().filter(|n| n.said.holds == 0) {
            assert_eq!((node.moves, node.losses), (1, 0));
        }
    });
}
