//! `cargo xtask test`: the whole suite, and everything it needs that a machine with the Rust toolchain, a C
//! compiler and Python 3 does not have.
//!
//! Every stage is timed. What cannot run here is shown as skipped with its reason. The last line is
//! `N passed, N failed, N skipped`, counting stages.

pub(crate) mod cache;
mod debian;
pub(crate) mod etcd;
mod fuzz;
mod ignored;
pub(crate) mod python;
mod stand_in;
mod wheel;

use crate::{
    built::Built,
    ptx, rdma_vm, shell,
    stage::{Outcome, Stages},
    verify,
    workspace::Workspace,
};
use anyhow::{Context as _, Result, bail};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

const MODELS: &str = "reference models";
const SHARDS: &str = "reference shards";
const PARTS: &str = "reference parts";
const ENGINES: &str = "reference parameters";
const S3: &str = "an S3 store";
const DEMO: &str = "demo";

/// Where the tests find the reference models.
const MODELS_VARIABLE: &str = "FLASHBOOT_REFERENCE_MODELS";
/// Where they find those that transformers sharded.
const SHARDS_VARIABLE: &str = "FLASHBOOT_REFERENCE_MODELS_PARALLEL";
/// Where they find parts of models that were run and found to make the whole.
const PARTS_VARIABLE: &str = "FLASHBOOT_REFERENCE_MODELS_SPLIT";
/// Where they find what vLLM's parameter classes loaded.
const ENGINES_VARIABLE: &str = "FLASHBOOT_REFERENCE_MODELS_ENGINES";
/// Where they find an S3 store's packages.
const S3_VARIABLE: &str = "FLASHBOOT_CONFORMANCE_S3";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write this run's ignored cases to xtask/ignored.txt instead of comparing them with it
    #[arg(long)]
    bless_ignored: bool,
}

/// Runs every stage; gives whether nothing failed.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let mut stages = Stages::default();
    let has_etcd = etcd::bring(&mut stages);
    for check in &verify::CHECKS {
        stages.run(check.name, || (check.run)(workspace));
    }
    let python = prepare_python(workspace, &mut stages);
    stages.run("ptx", || {
        ptx::check(workspace, needed(python.as_deref())?)?;
        Ok(Outcome::Passed)
    });
    stages.run("iproute2", debian::iproute2);
    let models =
        prepare(MODELS, &mut stages, || python::reference_models(workspace, needed(python.as_deref())?));
    let shards =
        prepare(SHARDS, &mut stages, || python::parallel_references(workspace, needed(python.as_deref())?));
    let parts =
        prepare(PARTS, &mut stages, || python::split_references(workspace, needed(python.as_deref())?));
    let engines =
        prepare(ENGINES, &mut stages, || python::engine_references(workspace, needed(python.as_deref())?));
    let s3 = prepare(S3, &mut stages, || python::object_store(workspace, needed(python.as_deref())?));
    let folders = [
        (MODELS_VARIABLE, models),
        (SHARDS_VARIABLE, shards),
        (PARTS_VARIABLE, parts),
        (ENGINES_VARIABLE, engines),
        (S3_VARIABLE, s3),
    ];
    let said = run_tests(workspace, &folders, args.bless_ignored, &mut stages);
    if has_etcd {
        stages.run("etcd", || etcd::ran(&said));
    }
    let tests = Built::by(workspace, &format!("{} --no-run", test_words()))?;
    stages.run(stand_in::STAGE, || stand_in::run(&tests));
    stages.run(rdma_vm::STAGE, || rdma_vm::stage(workspace, &tests));
    stages.run(wheel::STAGE, || wheel::run(workspace, needed(python.as_deref())?));
    stages.run("loom", || run_loom(workspace));
    run_fuzz(workspace, &mut stages);
    stages.run(DEMO, || run_demo(workspace).map(|()| Outcome::Passed));
    println!("{}", stages.summary());
    Ok(stages.ok())
}

/// Only the Python package; gives whether its tests passed.
pub(crate) fn python_package(workspace: &Workspace) -> Result<bool> {
    let mut stages = Stages::default();
    let python = prepare_python(workspace, &mut stages);
    stages.run(wheel::STAGE, || wheel::run(workspace, needed(python.as_deref())?));
    Ok(stages.ok())
}

/// The Python of the tests, or `None` when its stage has said why there is none.
fn prepare_python(workspace: &Workspace, stages: &mut Stages) -> Option<PathBuf> {
    let mut python = None;
    stages.run("python environment", || {
        python = Some(python::interpreter(workspace)?);
        Ok(Outcome::Passed)
    });
    python
}

fn needed(python: Option<&Path>) -> Result<&Path> {
    python.context("there is no Python environment to do it with")
}

/// A folder that a stage makes, or `None` when the stage has said why there is none.
fn prepare(stage: &str, stages: &mut Stages, make: impl FnOnce() -> Result<PathBuf>) -> Option<PathBuf> {
    let mut folder = None;
    stages.run(stage, || {
        folder = Some(make()?);
        Ok(Outcome::Passed)
    });
    folder
}

/// The workspace's tests, as cargo's arguments.
fn test_words() -> String {
    format!("test --workspace {}", etcd::feature())
}

/// `cargo test`, then what it said about ignored cases. Gives what it said.
fn run_tests(
    workspace: &Workspace,
    folders: &[(&str, Option<PathBuf>)],
    bless: bool,
    stages: &mut Stages,
) -> String {
    let mut output = String::new();
    let mut complete = false;
    stages.run("cargo test", || {
        let mut test = workspace.cargo(&format!("{} --no-fail-fast", test_words()));
        for (variable, folder) in folders {
            match folder {
                Some(folder) => test.env(variable, folder),
                None => test.env_remove(variable),
            };
        }
        (complete, output) = shell::tee(&mut test)?;
        if !complete {
            bail!("cases failed; they are named above");
        }
        Ok(Outcome::Passed)
    });
    stages.run("ignored cases", || {
        let cases = ignored::parse(&output)?;
        for case in &cases {
            println!("ignored: {case}");
        }
        if !complete {
            return Ok(Outcome::Skipped("cargo test did not succeed".into()));
        }
        if ignored::has_gpu() {
            return Ok(Outcome::Skipped("this machine has a GPU; the list is of one without".into()));
        }
        if !ignored::is_root() {
            return Ok(Outcome::Skipped("this user is not root; the list is of one who is".into()));
        }
        ignored::compare(workspace, &cases, bless)?;
        Ok(Outcome::Passed)
    });
    output
}

/// The control block's protocol under every interleaving.
fn run_loom(workspace: &Workspace) -> Result<Outcome> {
    let mut loom =
        workspace.cargo("test --quiet -p flashboot-core --release --lib --target-dir target/loom loom");
    let output = shell::quiet(loom.env("RUSTFLAGS", "--cfg loom"))?;
    if output.contains("running 0 tests") {
        bail!("no loom test was found:\n{output}");
    }
    Ok(Outcome::Passed)
}

fn run_fuzz(workspace: &Workspace, stages: &mut Stages) {
    let mut built = None;
    stages.run("fuzz: build", || {
        if let Some(reason) = fuzz::missing() {
            return Ok(Outcome::Skipped(reason));
        }
        built = Some(fuzz::build(workspace)?);
        Ok(Outcome::Passed)
    });
    let Some(built) = built else { return };
    let names: Vec<String> = built.targets.iter().map(|target| format!("fuzz: {target}")).collect();
    stages.run_together(&names, |name| {
        fuzz::run(workspace, &built, name.trim_start_matches("fuzz: "))?;
        Ok(Outcome::Passed)
    });
}

/// A seed and its clones on this host, as the README shows it; of the release build that the virtual machine's programs are
/// part of.
fn run_demo(workspace: &Workspace) -> Result<()> {
    let built = rdma_vm::release(workspace)?;
    shell::run(Command::new(built.file(rdma_vm::CLI)?).arg("demo").current_dir(workspace.root()))
}
