//! Bad input and bad usage: the exit code, one object with a typed error, never a panic, nothing half-made.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{MIB, Place, flip, object, safetensors, said, text};
use std::{fs, os::unix::fs::PermissionsExt as _, process::Command};

/// Runs with `--json`; the exit code must be `code` and the message must have every one of `says`.
fn refused(place: &Place, args: &[&str], code: i32, says: &[&str]) -> serde_json::Value {
    let output = place.flashboot(args).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
    let object = object(&output);
    let error = object.get("error").unwrap_or_else(|| panic!("no error in {object}"));
    for field in ["kind", "op", "detail", "peer", "chunk", "code", "remedy", "message"] {
        assert!(error.get(field).is_some(), "`{field}` is missing in {error}");
    }
    let message = error["message"].as_str().unwrap();
    for part in says {
        assert!(message.contains(part), "{args:?}: `{message}` does not say `{part}`");
    }
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{}", said(&output));
    // The same for people: nothing on stdout, the message on stderr.
    let output = place.flashboot(args).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
    assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{}", said(&output));
    error.clone()
}

fn checkpoint(place: &Place, name: &str, bytes: &[u8]) -> String {
    let dir = place.path(name);
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
    name.to_owned()
}

#[test]
fn paths_that_are_not_what_they_should_be_are_refused() {
    let place = Place::new();
    fs::create_dir_all(place.path("dir/x.safetensors")).unwrap();
    fs::create_dir(place.path("empty")).unwrap();
    refused(&place, &["inspect", "nothing"], 3, &["nothing", "no such file"]);
    refused(&place, &["pack", "nothing", "-o", "image"], 3, &["nothing"]);
    refused(&place, &["pack", "dir", "-o", "image"], 3, &["x.safetensors", "is a directory"]);
    refused(&place, &["pack", "empty", "-o", "image"], 3, &["empty", "no *.safetensors"]);
    for verb in ["verify", "replicate"] {
        refused(&place, &[verb, "nothing"], 3, &["nothing"]);
        refused(&place, &[verb, "empty"], 3, &["is not an image"]);
    }
    checkpoint(&place, "a", &safetensors(&[("t", 1)]));
    for file in ["a/model.safetensors", "/dev/null"] {
        refused(&place, &["verify", file], 3, &["is not an image"]);
    }
    refused(&place, &["unpack", "empty", "-o", "back"], 3, &["is not an image"]);
    refused(&place, &["diff", "empty", "nothing"], 3, &["empty"]);
    refused(&place, &["demo", "--model", "nothing"], 3, &["nothing"]);
    assert!(!place.path("image").exists() && !place.path("back").exists());
}

#[test]
fn broken_checkpoints_are_refused_with_file_tensor_and_sizes() {
    let place = Place::new();
    let whole = safetensors(&[("first", 10), ("second", 1000)]);
    let cut = checkpoint(&place, "cut", &whole[..whole.len() - 1]);
    let sizes = [format!("{} bytes needed", whole.len()), format!("{} found", whole.len() - 1)];
    for args in [&["inspect", &cut][..], &["pack", &cut, "-o", "image"]] {
        refused(&place, args, 3, &["model.safetensors", "second", &sizes[0], &sizes[1]]);
    }
    let short = checkpoint(&place, "short", b"1234");
    refused(&place, &["pack", &short, "-o", "image"], 3, &["needed 8", "found 4"]);
    let huge = checkpoint(&place, "huge", &u64::MAX.to_le_bytes());
    refused(&place, &["pack", &huge, "-o", "image"], 3, &["model.safetensors"]);
    let cap = ["pack", "--header-cap", "16", &cut, "-o", "image"];
    let error = refused(&place, &cap, 3, &["above the cap of 16", "--header-cap"]);
    assert_eq!(error["op"], "parse");
    assert!(error["remedy"].as_str().unwrap().contains("--header-cap"));
    let mut more = whole.clone();
    more.push(0);
    let more = checkpoint(&place, "more", &more);
    refused(&place, &["pack", &more, "-o", "image"], 3, &["1 bytes after", "--allow-trailing"]);

    fs::create_dir(place.path("sharded")).unwrap();
    let index = r#"{"metadata":{},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#;
    fs::write(place.path("sharded/model.safetensors.index.json"), index).unwrap();
    fs::write(place.path("sharded/model-1.safetensors"), safetensors(&[("a", 5)])).unwrap();
    refused(&place, &["pack", "sharded", "-o", "image"], 3, &["model-2.safetensors", "missing"]);
    assert!(!place.path("image").exists());
    let hidden: Vec<_> = fs::read_dir(place.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!hidden.iter().any(|name| name.to_string_lossy().starts_with('.')), "{hidden:?}");
}

#[test]
fn damaged_images_are_refused_before_a_byte_moves() {
    let place = Place::new();
    let image = place.image("m", &[("t", MIB)]);
    let copy = |name: &str| {
        let to = place.path(name);
        fs::create_dir(&to).unwrap();
        for entry in fs::read_dir(&image).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        to
    };
    let table = copy("table");
    flip(&table.join("target-0-0-0-0.json"), 40);
    let metadata = copy("metadata");
    flip(&metadata.join("metadata.json"), -20);
    let cut = copy("short");
    let payload = cut.join("target-0-0-0-0.img");
    fs::write(&payload, &fs::read(&payload).unwrap()[..MIB - 1]).unwrap();
    let gone = copy("gone");
    fs::remove_file(gone.join("target-0-0-0-0.img")).unwrap();
    for (dir, says) in [
        (&table, &["target-0-0-0-0.json"][..]),
        (&metadata, &["metadata.json"]),
        (&cut, &["target-0-0-0-0.img", "1048575 found"]),
        (&gone, &["target-0-0-0-0.img"]),
    ] {
        for verb in ["verify", "replicate", "inspect"] {
            refused(&place, &[verb, text(dir)], 3, says);
        }
        refused(&place, &["unpack", text(dir), "-o", "back"], 3, says);
    }
    assert!(!place.path("back").exists());
}

#[test]
fn what_is_there_is_not_overwritten_unasked() {
    let place = Place::new();
    let image = place.image("m", &[("t", 100)]);
    refused(&place, &["pack", "m", "-o", text(&image)], 3, &["already exists", "--replace"]);
    refused(&place, &["pack", text(&image), "-o", "again"], 3, &["is an image already"]);
    let long = "n".repeat(255);
    place.ok(&["pack", "m", "-o", &long]);
    place.ok(&["pack", "m", "-o", text(&image), "--replace"]);
    fs::create_dir(place.path("mine")).unwrap();
    fs::write(place.path("mine/thesis.txt"), "x").unwrap();
    refused(&place, &["pack", "m", "-o", "mine", "--replace"], 3, &["mine", "will not be replaced"]);
    refused(
        &place,
        &["unpack", text(&image), "-o", "mine", "--replace"],
        3,
        &["mine", "will not be replaced"],
    );
    assert_eq!(fs::read_to_string(place.path("mine/thesis.txt")).unwrap(), "x");
    refused(&place, &["demo", "--model", "m", "--keep", "mine"], 2, &["already exists"]);
}

#[test]
fn bad_usage_exits_with_2() {
    let place = Place::new();
    let image = place.image("m", &[("t", 100)]);
    let image = text(&image);
    for (args, says) in [
        (
            &["replicate", image, "--clones", "0"][..],
            &["replicate.clones", "--clones", "between 1 and 256"][..],
        ),
        (&["replicate", image, "--clones", "257"], &["replicate.clones"]),
        (&["replicate", image, "--clones", "-1"], &[]),
        (&["replicate", image, "--topology", "ring"], &["ring", "chain, star or tree"]),
        (&["replicate", image, "--chunk", "5 parsec"], &["parsec"]),
        (&["replicate", image, "--chunk", "1MiB"], &["whole number of 16MiB blocks"]),
        (&["replicate", image, "--chunk", "0"], &["whole number"]),
        (&["replicate", image, "--transport", "pigeon"], &["pigeon"]),
        (&["replicate", image, "--allow", "ipc,pigeon"], &["pigeon"]),
        (&["replicate", image, "--depth", "0"], &["replicate.depth"]),
        (&["replicate", image, "--stall", "soon"], &["soon"]),
        (&["replicate", image, "--stall", "0s"], &["replicate.stall", "--stall"]),
        (&["replicate", image, "--setup-timeout", "0s"], &["--setup-timeout"]),
        (&["replicate", image, "--transfer-timeout", "0ms"], &["--transfer-timeout"]),
        (&["replicate", image, "--rank", "target-9-0-0-0"], &["target-9-0-0-0", "target-0-0-0-0"]),
        (&["replicate", image, "--kill", "0@0"], &["seed"]),
        (&["replicate", image, "--kill", "2@0"], &["no such clone"]),
        (&["replicate", image, "--pages", "large"], &["large"]),
        (&["pack", "m", "-o", "x", "--header-cap", "x"], &["--header-cap", "size"]),
        (&["pack", "m"], &["--output"]),
        (&["frobnicate"], &["frobnicate"]),
        (&["inspect", image, "--config", "nothing.toml"], &["nothing.toml"]),
        (&["inspect", image, "--log-level", "a=b=c"], &["log.level"]),
        (&["inspect", image, "--log-level", "banana"], &["log.level", "banana"]),
    ] {
        refused(&place, args, 2, says);
    }
    assert_eq!(place.flashboot(&[]).output().unwrap().status.code(), Some(2));
    assert_eq!(place.flashboot(&["--help"]).output().unwrap().status.code(), Some(0));
    assert_eq!(place.flashboot(&["--version"]).output().unwrap().status.code(), Some(0));
}

#[test]
fn a_transport_that_is_not_there_is_an_error_with_its_reason() {
    let place = Place::new();
    let image = place.image("m", &[("t", 100)]);
    refused(
        &place,
        &["replicate", text(&image), "--transport", "imex"],
        1,
        &["imex", "the arenas are in host memory"],
    );
    refused(
        &place,
        &["replicate", text(&image), "--allow", "imex"],
        1,
        &["imex", "the arenas are in host memory"],
    );
    let open = ["replicate", text(&image), "--transport", "tcp", "--bind", "0.0.0.0"];
    refused(&place, &open, 1, &["asked for neither a token nor a certificate", "security.token_file"]);
    let token = place.path("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    let readable = ["replicate", text(&image), "--transport", "tcp", "--token-file", text(&token)];
    refused(&place, &readable, 1, &["others may read it", "chmod 0600"]);
    refused(
        &place,
        &["replicate", text(&image), "--transport", "ipc", "--allow", "tcp"],
        2,
        &["ipc is not among"],
    );
    assert_eq!(place.left_over(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn what_may_not_be_read_is_not_taken_for_missing() {
    let place = Place::new();
    let image = place.image("m", &[("t", 100)]);
    for file in [place.path("m/model.safetensors"), image.join("metadata.json")] {
        fs::set_permissions(file, fs::Permissions::from_mode(0o000)).unwrap();
    }
    fs::set_permissions(place.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for args in [["inspect", "m"], ["verify", text(&image)], ["replicate", text(&image)]] {
        let mut command = as_nobody(&place, place.flashboot(&args).arg("--json"));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert_eq!(object(&output)["error"]["kind"], "permission");
    }
    // And an unwritable destination.
    fs::set_permissions(place.path("m/model.safetensors"), fs::Permissions::from_mode(0o644)).unwrap();
    let output =
        as_nobody(&place, place.flashboot(&["pack", "m", "-o", "image2"]).arg("--json")).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(!place.path("image2").exists());
}

#[test]
fn a_limit_on_file_sizes_is_an_error_with_a_remedy() {
    let place = Place::new();
    place.image("m", &[("t", MIB)]);
    let command = place.flashboot(&["pack", "m", "-o", "big", "--json"]);
    let mut limited = Command::new("prlimit");
    limited.args(["--fsize=65536", "--"]).arg(command.get_program()).args(command.get_args());
    let output = limited.current_dir(place.0.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let error = &object(&output)["error"];
    assert_eq!((&error["kind"], &error["code"]), (&"exhausted".into(), &27.into()), "{error}");
    assert!(error["remedy"].as_str().unwrap().contains("ulimit -f"));
    assert!(!place.path("big").exists());
}

#[test]
fn without_threads_the_work_is_done_all_the_same() {
    let place = Place::new();
    let image = place.image("m", &[("t", 40 * MIB)]);
    fs::set_permissions(place.0.path(), fs::Permissions::from_mode(0o777)).unwrap();
    for args in
        [&["verify", text(&image)][..], &["pack", "m", "-o", "i"], &["unpack", text(&image), "-o", "b"]]
    {
        let command = as_nobody(&place, &place.flashboot(args));
        let mut limited = Command::new("prlimit");
        limited.args(["--nproc=1", "--"]).arg(command.get_program()).args(command.get_args());
        let output = limited.current_dir(place.0.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", said(&output));
    }
}

/// The same command without root's powers, when this is root.
fn as_nobody(place: &Place, command: &Command) -> Command {
    let root = fs::metadata("/proc/self").map(|m| std::os::unix::fs::MetadataExt::uid(&m)).unwrap() == 0;
    let mut other = if root {
        // The build may lie where nobody else may go.
        let reachable = place.path("flashboot");
        if !reachable.exists() && fs::hard_link(command.get_program(), &reachable).is_err() {
            fs::copy(command.get_program(), &reachable).unwrap();
        }
        let mut other = Command::new("setpriv");
        other.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(reachable);
        other
    } else {
        Command::new(command.get_program())
    };
    other.args(command.get_args()).current_dir(place.0.path()).env("TMPDIR", place.path("run"));
    other
}
