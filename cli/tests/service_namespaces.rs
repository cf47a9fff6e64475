//! A fleet over several hosts, each a network namespace: a seed and eight clones over tcp and ipc, of which three die and
//! two come late; all survivors have every byte.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "common/hosts.rs"]
mod hosts;
#[path = "../../backend-tcp/tests/common/netns.rs"]
#[allow(dead_code, reason = "it is another crate's tests' too")]
mod netns;

use common::MIB;
use hosts::Hosts;

fn main() {
    let test = ("a_seed_and_eight_clones_of_which_three_die_and_two_are_late", eight as fn());
    hosts::run(&[test], netns::missing());
}

fn eight() {
    let mut hosts = Hosts::new("f", 3, 70 * MIB);
    hosts.serve(&[]);
    assert!(hosts.fleet.endpoint.contains('#'), "off loopback it has a pin: {}", hosts.fleet.endpoint);
    hosts.eight();
    // Without the token nobody is told anything.
    let stranger = ["status", "--rendezvous", &hosts.fleet.endpoint];
    let stranger = hosts.on(1, &hosts.fleet.place.flashboot(&stranger)).output().unwrap();
    assert_eq!(stranger.status.code(), Some(3), "{}", common::said(&stranger));
}
