//! `cargo xtask fix`: what a tool can repair, it repairs; the rest `cargo xtask verify` names.

use crate::{dependencies, shell, workspace::Workspace};
use anyhow::{Context as _, Result};
use std::fs;

/// Repairs lints, then formatting, then the computed column of the dependency table.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    shell::run(
        &mut workspace.cargo("clippy --quiet --fix --allow-dirty --allow-staged --workspace --all-targets"),
    )?;
    shell::run(&mut workspace.cargo("fmt --all"))?;
    shell::run(&mut workspace.cargo("fmt --all --manifest-path fuzz/Cargo.toml"))?;
    let document = dependencies::repaired(workspace)?;
    fs::write(workspace.path(dependencies::DOCUMENT), document).context(dependencies::DOCUMENT)?;
    Ok(true)
}
