//! Every live clone completes while every chunk has a live holder, whatever happens to messages, members and the service.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use std::time::Duration;

#[test]
fn every_live_clone_completes_while_a_holder_of_everything_lives() {
    let (mut lost, mut done) = (0, 0);
    sim::seeds("completes", |seed| {
        let mut world = sim::world(seed);
        world.trouble(1500, true, |_| ());
        let settled = world.settle(Duration::from_secs(60), |_| ());
        let late: Vec<_> = world.nodes.values().filter(|n| n.alive && n.have < sim::CHUNKS).collect();
        assert!(settled, "not complete after a minute of quiet: {late:#?}");
    });
    // The worlds were no idle ones.
    let mut world = sim::world(1);
    world.trouble(1500, true, |_| ());
    for node in world.nodes.values() {
        lost += node.losses;
        done += u64::from(node.have == sim::CHUNKS);
    }
    assert!(lost > 0 && done > 5, "{lost} sources lost, {done} clones done");
}

#[test]
fn a_clock_that_leaps_or_goes_back_costs_nobody_the_transfer() {
    sim::seeds("completes", |seed| {
        let mut world = sim::world(seed);
        world.trouble(100, false, |_| ());
        for leap in [86_400, 0, 7_000_000, 5] {
            world.leap = Duration::from_secs(leap);
            world.trouble(100, false, |_| ());
        }
        assert!(world.settle(Duration::from_secs(60), |_| ()));
    });
}
