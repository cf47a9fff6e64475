//! A fleet over several hosts, each a network namespace of one machine.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part; tests panic")]

use crate::{
    common::{
        Place,
        fleet::{Fleet, Proc, bring_up},
        text,
    },
    netns::{self, FAIR, Network},
};
use libtest_mimic::{Arguments, Failed, Trial};
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

pub(crate) struct Hosts {
    pub(crate) network: Network,
    pub(crate) fleet: Fleet,
    pub(crate) token: PathBuf,
    /// Set for every process.
    pub(crate) variables: Vec<(&'static str, &'static str)>,
}

/// Runs `tests`, where there can be namespaces.
pub(crate) fn run(tests: &[(&'static str, fn())], missing: Option<String>) -> ! {
    let trials = tests.iter().map(|(name, test)| {
        let test = *test;
        let trial = Trial::test(*name, move || {
            test();
            Ok::<(), Failed>(())
        });
        match &missing {
            Some(why) => trial.with_kind(format!("not run here: {why}")).with_ignored_flag(true),
            None => trial,
        }
    });
    // One after the other: what they do takes all of a machine, and some of them measure.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials.collect()).exit()
}

impl Hosts {
    /// So many, with an image of a tensor of so many bytes and one more; nobody serves yet.
    pub(crate) fn new(tag: &str, hosts: usize, bytes: usize) -> Self {
        let network = Network::new(tag, hosts, FAIR);
        let place = Place::in_memory();
        let token = place.path("token");
        fs::write(&token, "a secret of enough bytes\n").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        let image = place.image("m", &[("a", bytes), ("b", 9)]);
        let service = Proc::start(Command::new("true"));
        let fleet = Fleet { place, image, endpoint: String::new(), transport: "auto", service, clones: 0 };
        Self { network, fleet, token, variables: Vec::new() }
    }

    /// `command` on a host.
    pub(crate) fn on(&self, host: usize, command: &Command) -> Command {
        let mut there = self.network.command(host, Path::new(command.get_program()));
        there.args(command.get_args()).current_dir(command.get_current_dir().unwrap());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => there.env(name, value),
                None => there.env_remove(name),
            };
        }
        there.envs(self.variables.iter().copied());
        there
    }

    /// Serves on the first host.
    pub(crate) fn serve(&mut self, more: &[&str]) {
        let at = format!("{}:7400", netns::address(0, 4));
        let token = text(&self.token);
        let listen = ["rendezvous", "--listen", &at, "--lease", "2s", "--json", "--token-file", token];
        let command = self.fleet.place.flashboot(&[&listen[..], more].concat());
        self.fleet.service = Proc::start(self.on(0, &command));
        let said = self.fleet.service.object();
        self.fleet.endpoint = said["endpoint"].as_str().unwrap_or_else(|| panic!("{said}")).to_owned();
    }

    pub(crate) fn member(&self, host: usize, args: &[&str]) -> Proc {
        let bind = netns::address(host, 4);
        let common = ["--bind", &bind, "--token-file", text(&self.token)];
        Proc::start(self.on(host, &self.fleet.member(&[args, &common].concat())))
    }

    /// A seed on the first host.
    pub(crate) fn seed(&self, more: &[&str]) -> Proc {
        let image = text(&self.fleet.image);
        let mut seed = self.member(0, &[&["seed", image, "--model", "tiny"], more].concat());
        let said = seed.object();
        assert!(said["error"].is_null(), "{said}");
        seed
    }

    pub(crate) fn clone(&mut self, host: usize, allow: &str, more: &[&str]) -> (Proc, PathBuf) {
        self.fleet.clones += 1;
        let out = self.fleet.place.path(&format!("out-{}", self.fleet.clones));
        let args = ["clone", "--model", "tiny", "-o", text(&out), "--allow", allow];
        (self.member(host, &[&args[..], more].concat()), out)
    }

    /// A seed and eight clones over tcp and ipc: three die, two are late, all others have every byte.
    pub(crate) fn eight(&mut self) {
        let paced = ["--rate", "40MB"];
        let seed = self.seed(&paced);
        let mut survivors =
            bring_up(|host, allow, kill| self.clone(host, allow, &[&paced[..], kill].concat()));
        let mut by = Vec::new();
        for survivor in &mut survivors {
            let report = self.fleet.check(survivor);
            by.push(report["sources"][0]["transport"].as_str().unwrap().to_owned());
        }
        assert!(by.iter().any(|t| t == "tcp") && by.iter().any(|t| t == "ipc"), "{by:?}");
        drop(seed);
    }
}
