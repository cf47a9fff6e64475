//! The fleet of `service_namespaces`, whose members find the service through an etcd on one of the hosts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "../../rendezvous/tests/etcd_server/mod.rs"]
mod etcd_server;
#[path = "common/hosts.rs"]
mod hosts;
#[path = "../../backend-tcp/tests/common/netns.rs"]
#[allow(dead_code, reason = "it is another crate's tests' too")]
mod netns;

use common::MIB;
use etcd_server::EtcdServer;
use hosts::Hosts;

fn main() {
    let test = ("a_fleet_that_an_etcd_brings_together_loses_three_clones_and_gains_two", eight as fn());
    hosts::run(&[test], netns::missing());
}

fn eight() {
    let mut hosts = Hosts::new("e", 3, 70 * MIB);
    // Between hosts it would be TLS; `stores_etcd` has that.
    hosts.variables = vec![("FLASHBOOT_ETCD__TLS", "off")];
    let address = netns::address(0, 4);
    let etcd = EtcdServer::on(&address, |program| hosts.network.command(0, program));
    let store = etcd.address("prod/eu");
    hosts.serve(&["--store", &store]);
    assert_eq!(hosts.fleet.endpoint, store);
    hosts.eight();
}
