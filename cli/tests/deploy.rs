//! What is under `deploy/` starts a program that exists, with arguments that it takes, in directories that it accepts.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{Place, fleet::Proc, said, text};
use libtest_mimic::{Arguments, Trial};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const PROGRAM: &str = "/usr/local/bin/flashboot";

fn deploy(name: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name);
    let text = fs::read_to_string(&path).unwrap();
    (path, text)
}

/// Starts an agent with `args`, its directory and port moved to `place`, and sees it listen.
#[track_caller]
fn starts(place: &Place, args: &[&str], directory: &str) {
    let sockets = place.path("sockets");
    let mut moved: Vec<&str> = args.to_vec();
    let mut found = false;
    for at in 1..moved.len() {
        match moved[at - 1] {
            "--agent" => {
                assert!(moved[at].starts_with(directory), "{args:?} is not within {directory}");
                (moved[at], found) = (text(&sockets), true);
            }
            "--http" => {
                assert!(moved[at].starts_with("127.0.0.1:"), "{args:?} needs a token off loopback");
                moved[at] = "127.0.0.1:0";
            }
            "--limit" => moved[at] = "1MiB",
            _ => {}
        }
    }
    assert!(found, "{args:?} says where its socket lies");
    let mut agent = Proc::start(place.flashboot(&[&moved[..], &["--json"]].concat()));
    let said = agent.object();
    assert!(said["socket"].is_string(), "{args:?}: {said}");
}

/// A unit's settings, section by section; comments are none.
fn unit(text: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut sections = BTreeMap::<_, BTreeMap<_, _>>::new();
    let mut section = String::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(name) => name.clone_into(&mut section),
            None => {
                let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("{line}"));
                let first =
                    sections.entry(section.clone()).or_default().insert(key.to_owned(), value.to_owned());
                assert_eq!(first, None, "{key} twice");
            }
        }
    }
    sections
}

fn the_unit_starts_an_agent_that_tells_the_manager_when_it_is_ready() {
    let (_, text) = deploy("flashboot-agent.service");
    let unit = unit(&text);
    let service = &unit["Service"];
    let (program, args) = service["ExecStart"].split_once(' ').unwrap();
    assert_eq!((program, service["Type"].as_str()), (PROGRAM, "notify"));
    let directory = format!("/run/{}", service["RuntimeDirectory"]);
    // Nobody else is allowed, so nobody else may enter; see docs/security.md.
    assert!(!args.contains("--allow") && service["RuntimeDirectoryMode"] == "0700");
    assert!(unit["Install"].contains_key("WantedBy") && unit["Unit"].contains_key("Description"));
    starts(&Place::new(), &args.split(' ').collect::<Vec<_>>(), &directory);
}

/// The linter of systemd, with the program where this build has it.
fn systemd_takes_the_unit() {
    let place = Place::new();
    let (_, unit) = deploy("flashboot-agent.service");
    let path = place.path("flashboot-agent.service");
    fs::write(&path, unit.replace(PROGRAM, env!("CARGO_BIN_EXE_flashboot"))).unwrap();
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let about = String::from_utf8_lossy(&output.stderr).into_owned();
    // It looks at what the unit names too, and says of a machine's own units what is wrong with them.
    let ours: Vec<_> = about.lines().filter(|line| line.contains("flashboot-agent")).collect();
    assert!(ours.is_empty(), "{}", said(&output));
}

fn the_daemon_set_starts_an_agent_and_its_probes_are_verbs() {
    let (path, text) = deploy("agent-daemonset.yaml");
    let set: Value = serde_yaml_ng::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!((&set["apiVersion"], &set["kind"]), (&"apps/v1".into(), &"DaemonSet".into()));
    let template = &set["spec"]["template"];
    let labels = set["spec"]["selector"]["matchLabels"].as_object().unwrap();
    for (name, value) in labels {
        assert_eq!(&template["metadata"]["labels"][name], value, "it selects its own pods");
    }
    let pod = &template["spec"];
    let container = &pod["containers"][0];
    let words = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    // Every mount has its volume.
    let volumes: Vec<_> = pod["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
    for mount in container["volumeMounts"].as_array().unwrap() {
        assert!(volumes.contains(&&mount["name"]), "{mount}");
    }
    let mount = container["volumeMounts"][0]["mountPath"].as_str().unwrap();
    let args = words(&container["args"]);
    let directory = args[1 + args.iter().position(|arg| arg == "--agent").unwrap()].clone();
    assert!(
        directory.strip_prefix(mount).is_some_and(|rest| rest.starts_with('/')),
        "one below the volume's"
    );
    starts(&Place::new(), &args.iter().map(String::as_str).collect::<Vec<_>>(), &directory);
    for probe in ["startupProbe", "livenessProbe"] {
        let command = words(&container[probe]["exec"]["command"]);
        assert_eq!(command, [PROGRAM, "ls", "--agent", &directory], "{probe}");
    }
    // What it may keep fits what it may use.
    let number = |text: &str, unit: &str| text.strip_suffix(unit).unwrap().parse::<u64>().unwrap();
    let limit = &args[1 + args.iter().position(|arg| arg == "--limit").unwrap()];
    let memory = container["resources"]["limits"]["memory"].as_str().unwrap();
    assert!(number(limit, "GiB") < number(memory, "Gi"));
}

fn the_image_has_the_program_where_unit_and_daemon_set_look_for_it() {
    let (_, text) = deploy("Dockerfile");
    let mut stages = 0;
    let mut said = BTreeMap::<String, Vec<String>>::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (instruction, rest) = line.split_once(' ').unwrap();
        assert!(
            ["FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"].contains(&instruction),
            "{line}"
        );
        stages += usize::from(instruction == "FROM");
        said.entry(instruction.to_owned()).or_default().push(rest.to_owned());
    }
    assert_eq!(stages, 2, "what is built with is not shipped");
    let list = |name: &str| serde_json::from_str::<Vec<String>>(&said[name][0]).unwrap();
    assert_eq!(list("ENTRYPOINT"), [PROGRAM]);
    assert_eq!(list("CMD"), ["agent"]);
    assert!(said["COPY"].iter().any(|copy| copy.ends_with(PROGRAM)));
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let manifest = fs::read_to_string(manifest).unwrap();
    let oldest = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \"")).unwrap();
    let oldest = oldest.trim_end_matches('"');
    assert!(
        said["FROM"][0].starts_with(&format!("rust:{oldest}-")),
        "the compiler that the workspace asks for"
    );
    assert!(said["RUN"].iter().any(|run| run.contains("--locked") && run.contains("-p flashboot-cli")));
}

fn main() -> ExitCode {
    let run = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let linter = run("systemd_takes_the_unit", systemd_takes_the_unit);
    let linter = match Command::new("systemd-analyze").arg("--version").output() {
        Ok(output) if output.status.success() => linter,
        _ => linter.with_kind("not run here: there is no systemd-analyze").with_ignored_flag(true),
    };
    let trials = vec![
        run(
            "the_unit_starts_an_agent_that_tells_the_manager_when_it_is_ready",
            the_unit_starts_an_agent_that_tells_the_manager_when_it_is_ready,
        ),
        linter,
        run(
            "the_daemon_set_starts_an_agent_and_its_probes_are_verbs",
            the_daemon_set_starts_an_agent_and_its_probes_are_verbs,
        ),
        run(
            "the_image_has_the_program_where_unit_and_daemon_set_look_for_it",
            the_image_has_the_program_where_unit_and_daemon_set_look_for_it,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
