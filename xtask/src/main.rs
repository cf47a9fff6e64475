//! The repository's own commands: `cargo xtask VERB`, one module a verb.
//!
//! Owns: what must hold of the repository as a whole (arrows, documents, the test command). Must never: be
//! needed by a crate that ships, or change anything outside the clone but the cache of `cargo xtask test`.
#![forbid(unsafe_code)]

mod arrows;
mod bench;
mod built;
mod dependencies;
mod fix;
mod hygiene;
mod ptx;
mod rdma_vm;
mod shell;
mod stage;
mod test;
mod verify;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The repository's own commands")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Check that our crates' dependencies point one way, and where `unsafe` and anyhow may be
    Arrows,
    /// Everything cheap that must be green before a commit
    Verify,
    /// Repair what a tool can: lints, formatting, the tables of docs/dependencies.md
    Fix,
    /// The whole suite; sets up what it needs outside the clone
    Test(test::Args),
    /// The rdma tests on soft-RoCE, in a virtual machine made of Debian's packages
    RdmaVm(rdma_vm::Args),
    /// Build the Python package's wheel, install it outside the clone and run its tests
    Python,
    /// Run the benches that exist and write docs/results/foundation.md
    Bench,
    /// Compile the hash kernel anew: cuda/kernels/blake3.ptx from blake3.cu
    Ptx,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = Workspace::find().and_then(|workspace| match cli.verb {
        Verb::Arrows => verify::only(&workspace, &verify::ARROWS),
        Verb::Verify => verify::all(&workspace),
        Verb::Fix => fix::run(&workspace),
        Verb::Test(args) => test::run(&workspace, &args),
        Verb::RdmaVm(args) => rdma_vm::run(&workspace, &args),
        Verb::Python => test::python_package(&workspace),
        Verb::Bench => bench::run(&workspace),
        Verb::Ptx => ptx::run(&workspace),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
