//! The conformance suite of the GPU transports, on the stand-in driver: a simulated host of two GPUs with an IMEX
//! channel, for as long as the stage runs. Here absence is a failure.

use crate::{
    built::{Built, Target},
    shell,
    stage::Outcome,
};
use anyhow::{Result, bail};
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

pub(crate) const STAGE: &str = "conformance on the stand-in";

/// The targets, and what `FLASHBOOT_REQUIRE` calls their transports.
const SUITES: [(Target, &str); 3] = [
    (("flashboot-backend-ipc", "test", "conformance_cuda"), "ipc-cuda"),
    (("flashboot-backend-imex", "test", "conformance"), "imex"),
    (("flashboot-backend-tcp", "test", "conformance_cuda"), "tcp-cuda"),
];

/// What rdma does with a GPU's memory, as far as a stand-in for both driver and card shows it: what the cases' names have
/// in common, and how many there are.
const RDMA: Target = ("flashboot-backend-rdma", "lib", "flashboot_backend_rdma");
const REGISTERED: (&str, usize) = ("regions::tests::gpu_memory", 5);
const LIBRARY: &str = "libflashboot_cuda_sim.so";

pub(super) fn run(tests: &Built) -> Result<Outcome> {
    let host = tempfile::tempdir()?;
    let state = prepare(host.path(), tests.library(LIBRARY)?)?;
    for (target, name) in SUITES {
        let mut suite = tests.command(target)?;
        shell::quiet(on_host(&mut suite, host.path(), &state).env("FLASHBOOT_REQUIRE", name))?;
    }
    let (name, count) = REGISTERED;
    let mut cases = tests.command(RDMA)?;
    let said = shell::quiet(on_host(cases.args(["--ignored", name]), host.path(), &state))?;
    if !said.contains(&format!(" {count} passed")) {
        bail!("not all {count} cases of {name} ran:\n{said}");
    }
    Ok(Outcome::Passed)
}

/// The folder's content: the driver under the name that is looked for, and the host's state.
fn prepare(host: &Path, library: &Path) -> Result<PathBuf> {
    let (lib, state) = (host.join("lib"), host.join("state"));
    fs::create_dir(&lib)?;
    fs::create_dir_all(state.join("imex"))?;
    symlink(library, lib.join("libcuda.so.1"))?;
    Ok(state)
}

fn on_host<'a>(command: &'a mut Command, host: &Path, state: &Path) -> &'a mut Command {
    // What else a developer may have set is for other hosts.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FLASHBOOT_CUDA_SIM_") {
            command.env_remove(name);
        }
    }
    command
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("LD_LIBRARY_PATH", host.join("lib"))
        .env("FLASHBOOT_CUDA_SIM_DIR", state)
}
