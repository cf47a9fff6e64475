//! Which programs run in the guest, and what is built for them.

use crate::{
    built::{Built, Target},
    shell,
    workspace::Workspace,
};
use anyhow::Result;
use std::{
    collections::BTreeSet,
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

/// One line of the guest's work.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// What it is called in the report.
    pub(crate) name: String,
    /// Seconds that it may take.
    limit: u32,
    /// A shell command.
    command: String,
    /// The test or example target it executes: package, kind, name. It lies in the guest's path under its name.
    target: Option<Target>,
}

impl Program {
    fn new(name: &str, limit: u32, target: Target, command: &str) -> Self {
        Self { name: name.into(), limit, command: command.into(), target: Some(target) }
    }

    /// The same, not executed: a person's command finds it in the guest's path.
    pub(crate) fn idle(self) -> Self {
        Self { name: format!("{}-idle", self.name), command: "true".into(), ..self }
    }

    /// A person's own command.
    pub(crate) fn own(command: &str) -> Self {
        Self { name: "command".into(), limit: 600, command: command.into(), target: None }
    }
}

const CONFORMANCE: Target = ("flashboot-backend-rdma", "test", "conformance");
const PROVIDER: Target = ("flashboot-backend-rdma", "test", "provider");
const VERBS: Target = ("flashboot-backend-rdma", "lib", "flashboot_backend_rdma");
pub(crate) const CLI: Target = ("flashboot-cli", "bin", "flashboot");
const WIRES: Target = ("flashboot-backend-tcp", "test", "namespaces");
const MIXED: Target = ("flashboot", "test", "mixed_chain");

/// Several hosts as namespaces of this kernel, which delays and loses by `tc netem`; a build machine's may have to make do with
/// a relay. None may be left out.
const NAMESPACES: &str = "\
    namespaces | tee said; grep -q 'by tc netem on veth pairs: ' said && \
    grep -q 'test result: ok. 4 passed; 0 failed; 0 ignored' said";

/// Two doctors meet, and each must have read the other by rdma; the floor is an emulator's.
const DOCTORS: &str = "\
    flashboot doctor --listen 127.0.0.1:0 --timeout 2m >listens & listener=$!; \
    for i in 1 2 3 4 5 6 7 8 9 10; do [ -s listens ] || sleep 1; done; \
    flashboot doctor --peer \"$(cat listens)\" --floor 1MB --timeout 2m | tee said; kill $listener; \
    grep -q 'rdma device .*rxe0 port 1 (ACTIVE, MTU 4096, GID 1 10.77.0.1, traffic class 0' said && \
    grep -qE '^rdma +here +yes' said && grep -qE '^rdma +peer +yes' said";

/// What `cargo xtask test` runs. The whole suite with every rank on one device, which answers itself; and again with the
/// ranks on the two devices of a link in turn.
pub(crate) fn tests() -> Vec<Program> {
    let suite = |devices: &str| {
        format!(
            "export FLASHBOOT_REQUIRE=rdma FLASHBOOT_CONFORMANCE_DEVICES={devices}; conformance --test-threads 2"
        )
    };
    vec![
        Program::new("verbs", 60, VERBS, "flashboot_backend_rdma a_reader_s_key --ignored"),
        Program::new("provider", 150, PROVIDER, "FLASHBOOT_REQUIRE=rdma provider"),
        Program::new("doctor", 150, CLI, DOCTORS),
        Program::new("namespaces", 150, WIRES, NAMESPACES),
        Program::new("mixed-chain", 60, MIXED, "FLASHBOOT_REQUIRE=rdma mixed_chain"),
        Program::new("conformance-one-device", 600, CONFORMANCE, &suite("rxe0")),
        Program::new("conformance-two-devices", 600, CONFORMANCE, &suite("rxe0,rxe1")),
    ]
}

/// What `cargo xtask rdma-vm --bench` runs.
pub(crate) fn benches() -> Vec<Program> {
    vec![Program::new("bench", 500, ("flashboot-backend-rdma", "example", "bench_read"), "bench_read")]
}

/// `/programs`, as the guest reads it.
pub(crate) fn lines(programs: &[Program]) -> String {
    let mut text = String::new();
    for Program { name, limit, command, .. } in programs {
        let _ = writeln!(text, "{name} {limit} {command}");
    }
    text
}

/// The release build of what may run in the guest, and of the tool, which is what the README's first command builds. All
/// packages are named each time: what they share is compiled once then, with one set of features, whichever programs are
/// asked for.
pub(crate) fn release(workspace: &Workspace) -> Result<Built> {
    // An emulated processor is some twenty times slower: what is not optimised misses the suite's deadlines there.
    let mut built = Built::by(
        workspace,
        "build --release -p flashboot -p flashboot-backend-rdma -p flashboot-backend-tcp -p flashboot-cli \
         --bin flashboot --test conformance --test provider --test namespaces --test mixed_chain --example bench_read",
    )?;
    // The same features as the four have, and no other library's tests.
    built.and(workspace, "test --release --no-run --lib -p flashboot-backend-rdma -p flashboot-cli")?;
    Ok(built)
}

/// The executables of `programs`, stripped where `strip` is at hand: what the guest's memory holds twice should be small.
pub(crate) fn binaries(workspace: &Workspace, programs: &[Program]) -> Result<Vec<(String, PathBuf)>> {
    let built = release(workspace)?;
    let targets: BTreeSet<Target> = programs.iter().filter_map(|program| program.target).collect();
    targets.iter().map(|target| Ok((target.2.to_owned(), stripped(built.file(*target)?)))).collect()
}

fn stripped(file: &Path) -> PathBuf {
    let small = file.with_extension("stripped");
    let done = shell::succeeds(Command::new("strip").arg("-o").arg(&small).arg(file));
    if done { small } else { file.to_path_buf() }
}
