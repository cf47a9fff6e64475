//! Where configuration comes from, which source wins, and that unknown keys are errors.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{Place, object, said};
use std::fs;

#[test]
fn flags_win_over_environment_over_file_over_defaults() {
    let place = Place::new();
    fs::write(
        place.path("flashboot.toml"),
        "[replicate]\nclones = 2\ndepth = 3\nstall = \"7s\"\nallow = [\"ipc\"]\n",
    )
    .unwrap();
    let run = |env: &[(&str, &str)], args: &[&str]| {
        let mut command = place.flashboot(args);
        command.envs(env.iter().copied()).args(["config", "show", "--origin", "--json"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        object(&output)
    };
    let shown = run(
        &[
            ("FLASHBOOT_REPLICATE__DEPTH", "4"),
            ("FLASHBOOT_REPLICATE__STALL", "8s"),
            ("FLASHBOOT_LOG__LEVEL", "error"),
            ("FLASHBOOT_CACHE", "/c"),
        ],
        &["--log-level", "info"],
    );
    for (key, value, origin) in [
        ("replicate.clones", serde_json::json!(2), "flashboot.toml"),
        ("replicate.allow", serde_json::json!(["ipc"]), "flashboot.toml"),
        ("replicate.depth", serde_json::json!(4), "FLASHBOOT_REPLICATE__DEPTH"),
        ("replicate.stall", serde_json::json!("8s"), "FLASHBOOT_REPLICATE__STALL"),
        ("log.level", serde_json::json!("info"), "--log-level"),
        ("cache", serde_json::json!("/c"), "FLASHBOOT_CACHE"),
        ("replicate.repairs", serde_json::json!(2), "default"),
        ("memory.numa_node", serde_json::json!(null), "default"),
    ] {
        assert_eq!(shown[key]["value"], value, "{key}");
        let found = shown[key]["origin"].as_str().unwrap();
        assert!(
            found == origin || found.ends_with(&format!("/{origin}")),
            "{key} is said to be from {found}"
        );
    }
}

#[test]
fn what_is_shown_can_be_read_back() {
    let place = Place::new();
    let shown = place.flashboot(&["config", "show"]).output().unwrap();
    fs::write(place.path("flashboot.toml"), shown.stdout).unwrap();
    let again = place.flashboot(&["config", "show", "--json"]).output().unwrap();
    assert!(again.status.success(), "{}", said(&again));
    fs::remove_file(place.path("flashboot.toml")).unwrap();
    assert_eq!(object(&again), place.ok(&["config", "show"]));
}

#[test]
fn unknown_keys_and_wrong_values_name_key_and_place() {
    let place = Place::new();
    let refused = |file: Option<&str>, env: &[(&str, &str)], says: &[&str]| {
        match file {
            Some(toml) => fs::write(place.path("flashboot.toml"), toml).unwrap(),
            None => drop(fs::remove_file(place.path("flashboot.toml"))),
        }
        let mut command = place.flashboot(&["config", "show", "--json"]);
        let output = command.envs(env.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        let message = object(&output)["error"]["message"].as_str().unwrap().to_owned();
        for part in says {
            assert!(message.contains(part), "`{message}` does not say `{part}`");
        }
    };
    refused(Some("[replicate]\nclone = 2\n"), &[], &["`replicate.clone`", "flashboot.toml"]);
    refused(Some("[replicator]\nclones = 2\n"), &[], &["`replicator.clones`", "flashboot.toml"]);
    refused(Some("replicate = 3\n"), &[], &["`replicate`", "flashboot.toml", "a section"]);
    let said = ["`replicate.clones`", "flashboot.toml", "`many` is not a whole number"];
    refused(Some("[replicate]\nclones = \"many\"\n"), &[], &said);
    refused(Some("[load]\nbudget = true\n"), &[], &["`load.budget`", "`true` is not a size such as 256MiB"]);
    refused(Some("[load]\nbudget = \"many\"\n"), &[], &["`load.budget`", "`many` is not a size", "256MiB"]);
    refused(
        Some("[replicate]\nstall = 5\n"),
        &[],
        &["`replicate.stall`", "`5` is not a duration such as 30s"],
    );
    refused(Some("[http]\nlisten = 9400\n"), &[], &["`http.listen`", "such as 127.0.0.1:9400"]);
    refused(Some("[tcp]\nbind = \"nowhere\"\n"), &[], &["`tcp.bind`", "not an IP address"]);
    refused(Some("[load]\nsources = 3\n"), &[], &["`load.sources`", "`3` is not a list of sources"]);
    refused(
        Some("[memory]\npages = \"small\"\n"),
        &[],
        &["`memory.pages`", "`small` is none of auto, base, huge"],
    );
    refused(Some("[replicate]\nverify = \"yes\"\n"), &[], &["`replicate.verify`", "`true` or `false`"]);
    refused(Some("[replicate]\nclones = 0\n"), &[], &["`replicate.clones`", "flashboot.toml"]);
    refused(Some("[replicate]\nchunk = \"3MiB\"\n"), &[], &["`replicate.chunk`", "16MiB"]);
    refused(Some("[replicate\n"), &[], &["flashboot.toml"]);
    refused(
        None,
        &[("FLASHBOOT_REPLICATE__CLONE", "1")],
        &["`replicate.clone`", "FLASHBOOT_REPLICATE__CLONE"],
    );
    refused(None, &[("FLASHBOOT_LOGLEVEL", "x")], &["`loglevel`", "FLASHBOOT_LOGLEVEL"]);
    refused(
        None,
        &[("FLASHBOOT_REPLICATE__STALL", "soon")],
        &["`replicate.stall`", "soon", "FLASHBOOT_REPLICATE__STALL"],
    );
    refused(None, &[("FLASHBOOT_CONFIG", "/nothing.toml")], &["/nothing.toml"]);
}

#[test]
fn logs_are_json_on_request_and_on_stderr() {
    let place = Place::new();
    let image = place.image("m", &[("t", 100)]);
    let mut command =
        place.flashboot(&["replicate", common::text(&image), "-v", "--log-format", "json", "--json"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    object(&output);
    let logs = String::from_utf8(output.stderr).unwrap();
    assert!(logs.contains("passed_over"), "auto says what it passed over: {logs}");
    for line in logs.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    }
}

#[test]
fn a_pipe_is_refused_and_empty_paths_are_not_set() {
    let place = Place::new();
    let run = |place: &Place| {
        let mut command = place.flashboot(&["config", "show", "--json"]);
        command.env("FLASHBOOT_CONFIG", "").env("FLASHBOOT_CACHE", "").output().unwrap()
    };
    let output = run(&place);
    assert!(output.status.success(), "{}", said(&output));
    assert!(object(&output)["cache"].is_null());
    let made = std::process::Command::new("mkfifo").arg(place.path("flashboot.toml")).status().unwrap();
    assert!(made.success());
    let output = run(&place);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn every_setting_is_documented_by_its_name() {
    let document = common::document("docs/cli.md");
    let shown = Place::new().ok(&["config", "show", "--origin"]);
    let keys: Vec<_> = shown.as_object().unwrap().keys().collect();
    assert!(keys.len() > 60, "{keys:?}");
    let missing: Vec<_> = keys.iter().filter(|key| !document.contains(&format!("`{key}`"))).collect();
    assert_eq!(missing, Vec::<&&String>::new());
}
