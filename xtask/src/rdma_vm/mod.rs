//! `cargo xtask rdma-vm`: the rdma tests on a real verbs provider, soft-RoCE in a small virtual machine.
//!
//! No RDMA card, no kernel module and no installed package is needed: Debian's generic kernel, QEMU and the guest's
//! programs are fetched as packages and unpacked in the cache. The machine runs under software emulation, so every figure
//! from it is an emulator's: good for correctness and for ratios within one run.

mod archive;
mod image;
mod machine;
pub(crate) mod packages;
mod plan;
mod report;

use crate::{
    built::{Built, Target},
    shell,
    stage::Outcome,
    workspace::Workspace,
};
use anyhow::{Result, bail};
use std::{fs, time::Duration};

pub(crate) use plan::{CLI, release};

pub(crate) const STAGE: &str = "rdma in a virtual machine";
/// The whole machine's time.
const LIMIT: Duration = Duration::from_secs(900);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run these parts only (a name's beginning), instead of all that `cargo xtask test` runs
    parts: Vec<String>,
    /// Run this shell command in the guest, after the parts named
    #[arg(long)]
    command: Option<String>,
    /// Measure against perftest and write docs/results/rdma-vm.md
    #[arg(long)]
    bench: bool,
    /// Show the guest's whole console
    #[arg(long)]
    console: bool,
}

/// Runs what is asked for; gives whether it passed.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    if let Some(reason) = packages::missing() {
        bail!("{reason}");
    }
    let mut programs: Vec<_> = if args.bench { plan::benches() } else { plan::tests() };
    if !args.parts.is_empty() || args.command.is_some() {
        programs.retain(|program| {
            args.parts.iter().any(|part| program.name == *part || program.name.starts_with(part.as_str()))
        });
    }
    if args.command.is_some() {
        programs.extend(plan::tests().into_iter().map(plan::Program::idle));
    }
    programs.extend(args.command.iter().map(|command| plan::Program::own(command)));
    compare_layouts(&Built::by(workspace, "test --no-run -p flashboot-backend-rdma --lib")?)?;
    let log = boot(workspace, &programs)?;
    if args.console {
        println!("{log}");
    }
    let parts = report::parts(&log);
    println!("{}", report::table(&programs, &parts));
    if args.bench {
        report::write_bench(workspace, &parts)?;
    }
    Ok(report::failures(&programs, &parts).is_empty())
}

/// The stage of `cargo xtask test`; `tests` are its debug builds.
pub(crate) fn stage(workspace: &Workspace, tests: &Built) -> Result<Outcome> {
    if let Some(reason) = packages::missing() {
        return Ok(Outcome::Skipped(reason));
    }
    compare_layouts(tests)?;
    let programs = plan::tests();
    let log = boot(workspace, &programs)?;
    let parts = report::parts(&log);
    println!("{}", report::table(&programs, &parts));
    let failures = report::failures(&programs, &parts);
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(Outcome::Passed)
}

/// Builds what the programs need, boots, and gives the console of a machine that ended by itself.
fn boot(workspace: &Workspace, programs: &[plan::Program]) -> Result<String> {
    let packages = packages::fetch()?;
    let folder = tempfile::tempdir()?;
    let binaries = plan::binaries(workspace, programs)?;
    let image = folder.path().join("initramfs");
    fs::write(&image, image::build(&packages, programs, &binaries)?)?;
    let ran = machine::run(&packages, &image, &folder.path().join("console"), LIMIT)?;
    if ran.status >= 120 {
        bail!("the guest could not be set up (status {}); its console:\n{}", ran.status, ran.log);
    }
    Ok(ran.log)
}

/// Our structures against the headers, by this machine's C compiler.
fn compare_layouts(tests: &Built) -> Result<()> {
    const CASES: Target = ("flashboot-backend-rdma", "lib", "flashboot_backend_rdma");
    let mut test = tests.command(CASES)?;
    test.args(["--ignored", "headers_say"])
        .env("FLASHBOOT_CONFORMANCE_HEADERS", packages::fetch()?.headers());
    let said = shell::quiet(&mut test)?;
    if !said.contains("1 passed") {
        bail!("the layouts were not compared:\n{said}");
    }
    Ok(())
}
