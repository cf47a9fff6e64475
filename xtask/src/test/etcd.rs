//! The etcd store: what is behind the feature `etcd`, which a user builds without, because its build needs `protoc`. Where that
//! and a server are at hand, everything is linted and tested with it; its tests start Debian's etcd on ports of their own.

use super::debian;
use crate::{
    shell,
    stage::{Outcome, Stages},
};
use anyhow::{Result, bail};
use std::{path::Path, process::Command};

/// The server, the compiler of its protocol, and the files that this one includes.
const PACKAGES: [&str; 3] = ["etcd-server", "protobuf-compiler", "libprotobuf-dev"];
/// What `cargo test` runs of it.
const SUITES: [&str; 2] = ["tests/stores_etcd.rs", "tests/service_etcd.rs"];

/// Brings what it needs; gives whether it is there.
pub(super) fn bring(stages: &mut Stages) -> bool {
    stages.run("etcd and protoc", || debian::brought("the tests of the etcd store", &PACKAGES, there))
}

/// The feature as cargo's argument, where it can be built and tested.
pub(crate) fn feature() -> &'static str {
    if there() { "--features flashboot-cli/etcd" } else { "" }
}

/// Whether its suites were among what ran.
pub(super) fn ran(output: &str) -> Result<Outcome> {
    let missing: Vec<_> =
        SUITES.iter().filter(|suite| !output.contains(&format!("Running {suite}"))).collect();
    if !missing.is_empty() {
        bail!("`cargo test` did not run {missing:?}");
    }
    Ok(Outcome::Passed)
}

fn there() -> bool {
    let starts = |tool: &str| shell::succeeds(Command::new(tool).arg("--version"));
    starts("etcd") && starts("protoc") && Path::new("/usr/include/google/protobuf/descriptor.proto").exists()
}
