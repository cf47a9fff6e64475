//! Which programs run in the guest, and what is built for them.

use crate::{shell, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use cargo_metadata::Message;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io::BufReader,
    path::PathBuf,
    process::{Command, Stdio},
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

type Target = (&'static str, &'static str, &'static str);

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
const CLI: Target = ("flashboot-cli", "bin", "flashboot");
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

/// Of which a program's target may be. All are named at every build: what they share is compiled once then, with one set of
/// features, whichever programs are asked for.
const PACKAGES: [&str; 4] = ["flashboot", "flashboot-backend-rdma", "flashboot-backend-tcp", "flashboot-cli"];

/// Builds the targets of `programs` and gives their executables, stripped where `strip` is at hand: what the guest's
/// memory holds twice should be small.
pub(crate) fn build(workspace: &Workspace, programs: &[Program]) -> Result<Vec<(String, PathBuf)>> {
    let targets: BTreeSet<Target> = programs.iter().filter_map(|program| program.target).collect();
    let (libraries, others): (Vec<&Target>, Vec<&Target>) =
        targets.iter().partition(|(_, kind, _)| *kind == "lib");
    let mut built = BTreeMap::new();
    if !others.is_empty() {
        let flags: Vec<String> = others.iter().map(|(_, kind, name)| format!(" --{kind} {name}")).collect();
        executables(workspace, &format!("build{}", flags.concat()), &mut built)?;
    }
    if !libraries.is_empty() {
        executables(workspace, "test --no-run --lib", &mut built)?;
    }
    let executable = |(package, kind, name): &Target| {
        let file = built.get(&((*package).to_owned(), (*name).to_owned()));
        let file = file.with_context(|| format!("{package} has no {kind} {name}"))?;
        Ok(((*name).to_owned(), stripped(file.clone())))
    };
    targets.iter().map(executable).collect()
}

/// Runs cargo over all packages, and notes each executable by its package and target.
fn executables(
    workspace: &Workspace,
    words: &str,
    built: &mut BTreeMap<(String, String), PathBuf>,
) -> Result<()> {
    let packages = workspace.metadata()?.packages;
    // An emulated processor is some twenty times slower: what is not optimised misses the suite's deadlines there.
    let mut cargo = workspace.cargo(words);
    cargo.args(["--profile", "guest", "--quiet", "--message-format=json-render-diagnostics"]);
    cargo.args(PACKAGES.iter().flat_map(|package| ["-p", package]));
    let mut child =
        cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().with_context(|| shell::line(&cargo))?;
    let stream = BufReader::new(child.stdout.take().context("cargo's messages")?);
    for message in Message::parse_stream(stream) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        let package = packages.iter().find(|package| package.id == artifact.package_id);
        if let (Some(package), Some(executable)) = (package, artifact.executable) {
            let key = (package.name.to_string(), artifact.target.name);
            built.insert(key, executable.into_std_path_buf());
        }
    }
    if !child.wait()?.success() {
        bail!("{} failed", shell::line(&cargo));
    }
    Ok(())
}

fn stripped(file: PathBuf) -> PathBuf {
    let small = file.with_extension("stripped");
    let done = shell::succeeds(Command::new("strip").arg("-o").arg(&small).arg(&file));
    if done { small } else { file }
}
