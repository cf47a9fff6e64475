//! Nobody reads from one that reads from it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_rendezvous::protocol::MemberId;
use std::collections::{BTreeMap, BTreeSet};

fn check(edges: &BTreeMap<MemberId, MemberId>, whose: &str) {
    for start in edges.keys() {
        let mut seen = BTreeSet::from([*start]);
        let mut at = start;
        while let Some(up) = edges.get(at) {
            assert!(seen.insert(*up), "a cycle through {up} in {whose}: {edges:?}");
            at = up;
        }
    }
}

#[test]
fn no_cycle_is_assigned_and_none_is_read_along() {
    sim::seeds("no_cycle", |seed| {
        let mut world = sim::world(seed);
        world.trouble(1500, true, |world| {
            let known = world.service.iter().flat_map(|service| service.status().members);
            let known = known.filter_map(|m| Some((m.member, m.upstream?))).collect();
            check(&known, "the service");
            let read =
                world.nodes.iter().filter(|(_, n)| n.alive).filter_map(|(id, n)| Some((*id, n.upstream?)));
            check(&read.collect(), "the world");
        });
    });
}
