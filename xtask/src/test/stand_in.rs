//! The conformance suite of the GPU transports, on the stand-in driver: a simulated host of two GPUs with an IMEX
//! channel, for as long as the stage runs. Here absence is a failure.

use crate::{shell, stage::Outcome, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

pub(crate) const STAGE: &str = "conformance on the stand-in";

/// Package and test target, and what `FLASHBOOT_REQUIRE` calls the transport.
const SUITES: [(&str, &str, &str); 3] = [
    ("flashboot-backend-ipc", "conformance_cuda", "ipc-cuda"),
    ("flashboot-backend-imex", "conformance", "imex"),
    ("flashboot-backend-tcp", "conformance_cuda", "tcp-cuda"),
];

/// What rdma does with a GPU's memory, as far as a stand-in for both driver and card shows it: what the cases' names have
/// in common, and how many there are.
const REGISTERED: (&str, usize) = ("regions::tests::gpu_memory", 5);

pub(crate) fn run(workspace: &Workspace) -> Result<Outcome> {
    shell::quiet(&mut workspace.cargo("build --quiet -p flashboot-cuda-sim --lib"))?;
    let host = tempfile::tempdir()?;
    let library = library(workspace)?;
    let state = prepare(host.path(), &library)?;
    for (package, target, name) in SUITES {
        let mut suite = workspace.cargo(&format!("test --quiet -p {package} --test {target}"));
        shell::quiet(on_host(&mut suite, host.path(), &state).env("FLASHBOOT_REQUIRE", name))?;
    }
    let (name, count) = REGISTERED;
    let mut cases =
        workspace.cargo(&format!("test --quiet -p flashboot-backend-rdma --lib -- --ignored {name}"));
    let said = shell::quiet(on_host(&mut cases, host.path(), &state))?;
    if !said.contains(&format!(" {count} passed")) {
        bail!("not all {count} cases of {name} ran:\n{said}");
    }
    Ok(Outcome::Passed)
}

/// Where cargo has put it.
fn library(workspace: &Workspace) -> Result<PathBuf> {
    let target = workspace.metadata()?.target_directory;
    let library = target.join("debug/libflashboot_cuda_sim.so").into_std_path_buf();
    fs::metadata(&library).with_context(|| library.display().to_string())?;
    Ok(library)
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
