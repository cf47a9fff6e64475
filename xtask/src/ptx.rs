//! `cargo xtask ptx`: the kernel's PTX from its source, and whether the committed one is the source's.
//!
//! PTX is the one generated file in the repository: compiling it needs NVRTC, which a plain build must not.

use crate::{shell, test::python, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const SCRIPT: &str = "xtask/python/make_ptx.py";
const SOURCE: &str = "cuda/kernels/blake3.cu";
const PTX: &str = "cuda/kernels/blake3.ptx";

/// Writes the PTX anew.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    make(workspace, &python::interpreter(workspace)?, &workspace.path(PTX))?;
    Ok(true)
}

/// Whether the PTX is what its source compiles to, byte for byte.
pub(crate) fn check(workspace: &Workspace, python: &Path) -> Result<()> {
    let folder = workspace.path("target/ptx");
    fs::create_dir_all(&folder)?;
    let made = folder.join("blake3.ptx");
    make(workspace, python, &made)?;
    if fs::read(&made)? != fs::read(workspace.path(PTX)).context(PTX)? {
        bail!("{PTX} is not what {SOURCE} compiles to; run `cargo xtask ptx` and commit both");
    }
    Ok(())
}

fn make(workspace: &Workspace, python: &Path, to: &PathBuf) -> Result<()> {
    let mut command = Command::new(python);
    command.arg(workspace.path(SCRIPT)).arg(workspace.path(SOURCE)).arg(to);
    shell::quiet(&mut command).map(drop)
}
