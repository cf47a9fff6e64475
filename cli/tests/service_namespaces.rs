//! A fleet over several hosts, each a network namespace: a seed and eight clones over tcp and ipc, of which three die and
//! two come late; all survivors have every byte.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "../../backend-tcp/tests/common/netns.rs"]
#[allow(dead_code, reason = "it is another crate's tests' too")]
mod netns;

use common::{
    MIB, Place,
    fleet::{Fleet, Proc},
    text,
};
use libtest_mimic::{Arguments, Failed, Trial};
use netns::{FAIR, Network};
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    let trial = Trial::test("a_seed_and_eight_clones_of_which_three_die_and_two_are_late", || {
        eight();
        Ok::<(), Failed>(())
    });
    let trial = match netns::missing() {
        Some(why) => trial.with_kind(format!("not run here: {why}")).with_ignored_flag(true),
        None => trial,
    };
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

const HOSTS: usize = 3;

struct Hosts {
    network: Network,
    fleet: Fleet,
    token: PathBuf,
}

/// `command` on a host of the network.
fn on(network: &Network, host: usize, command: &Command) -> Command {
    let mut there = network.command(host, Path::new(command.get_program()));
    there.args(command.get_args()).current_dir(command.get_current_dir().unwrap());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => there.env(name, value),
            None => there.env_remove(name),
        };
    }
    there
}

impl Hosts {
    fn new() -> Self {
        let network = Network::new("f", HOSTS, FAIR);
        let place = Place::new();
        let token = place.path("token");
        fs::write(&token, "a secret of enough bytes\n").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        let image = place.image("m", &[("a", 70 * MIB), ("b", 9)]);
        let at = format!("{}:7400", netns::address(0, 4));
        let listen = ["rendezvous", "--listen", &at, "--lease", "2s", "--json", "--token-file", text(&token)];
        let mut service = Proc::start(on(&network, 0, &place.flashboot(&listen)));
        let endpoint = service.object()["endpoint"].as_str().unwrap().to_owned();
        assert!(endpoint.contains('#'), "off loopback it has a pin: {endpoint}");
        let fleet = Fleet { place, image, endpoint, transport: "auto", service, clones: 0 };
        Self { network, fleet, token }
    }

    fn member(&self, host: usize, args: &[&str]) -> Proc {
        let bind = netns::address(host, 4);
        let common = ["--bind", &bind, "--token-file", text(&self.token)];
        let command = self.fleet.member(&[args, &common].concat());
        Proc::start(on(&self.network, host, &command))
    }

    fn clone(&mut self, host: usize, allow: &str, more: &[&str]) -> (Proc, PathBuf) {
        self.fleet.clones += 1;
        let out = self.fleet.place.path(&format!("out-{}", self.fleet.clones));
        let args = ["clone", "--model", "tiny", "-o", text(&out), "--allow", allow, "--rate", "40MB"];
        (self.member(host, &[&args[..], more].concat()), out)
    }
}

fn eight() {
    let mut hosts = Hosts::new();
    let image = text(&hosts.fleet.image).to_owned();
    let mut seed = hosts.member(0, &["seed", &image, "--model", "tiny", "--rate", "40MB"]);
    assert!(seed.object()["error"].is_null());
    let mut victims = Vec::new();
    let mut survivors = Vec::new();
    for (host, allow, kill) in [
        (1, "tcp", None),
        (1, "ipc,tcp", Some("chunk:1")),
        (2, "tcp", Some("chunk:0")),
        (2, "tcp", None),
        (1, "tcp", Some("pull:3")),
        (2, "ipc,tcp", None),
    ] {
        match kill {
            Some(kill) => victims.push(hosts.clone(host, allow, &["--kill", kill])),
            None => survivors.push(hosts.clone(host, allow, &[])),
        }
    }
    for victim in &mut victims {
        assert!(!victim.0.ended().success());
        assert!(!victim.1.exists());
    }
    for (host, allow) in [(2, "tcp"), (0, "ipc")] {
        survivors.push(hosts.clone(host, allow, &[]));
    }
    let mut by = Vec::new();
    for survivor in &mut survivors {
        let report = hosts.fleet.check(survivor);
        by.push(report["sources"][0]["transport"].as_str().unwrap().to_owned());
    }
    assert!(by.iter().any(|t| t == "tcp") && by.iter().any(|t| t == "ipc"), "{by:?}");
    // Without the token nobody is told anything.
    let stranger = ["status", "--rendezvous", &hosts.fleet.endpoint];
    let stranger = on(&hosts.network, 1, &hosts.fleet.place.flashboot(&stranger)).output().unwrap();
    assert_eq!(stranger.status.code(), Some(3), "{}", common::said(&stranger));
    drop(seed);
}
