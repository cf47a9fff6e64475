//! The etcd store: what is behind the feature `etcd`, which the workspace is built without, because its build needs `protoc`.
//! Its tests start Debian's etcd on ports of their own.

use super::debian;
use crate::{
    shell,
    stage::{Outcome, Stages},
    workspace::Workspace,
};
use anyhow::Result;
use std::{path::Path, process::Command};

/// The server, the compiler of its protocol, and the files that this one includes.
const PACKAGES: [&str; 3] = ["etcd-server", "protobuf-compiler", "libprotobuf-dev"];
/// Package and test target.
const SUITES: [(&str, &str); 3] = [
    ("flashboot-rendezvous", "stores_etcd"),
    ("flashboot-cli", "service_etcd"),
    ("flashboot-cli", "service_etcd_namespaces"),
];

pub(crate) fn run(workspace: &Workspace, stages: &mut Stages) {
    if !stages.run("etcd and protoc", || debian::brought("the tests of the etcd store", &PACKAGES, there)) {
        return;
    }
    stages.run("etcd", || suites(workspace));
}

fn there() -> bool {
    let starts = |tool: &str| shell::succeeds(Command::new(tool).arg("--version"));
    starts("etcd") && starts("protoc") && Path::new("/usr/include/google/protobuf/descriptor.proto").exists()
}

fn suites(workspace: &Workspace) -> Result<Outcome> {
    for (package, test) in SUITES {
        let with = format!("-p {package} --features etcd");
        shell::quiet(&mut workspace.cargo(&format!("clippy --quiet {with} --all-targets -- -D warnings")))?;
        shell::run(&mut workspace.cargo(&format!("test --quiet {with} --test {test}")))?;
    }
    Ok(Outcome::Passed)
}
