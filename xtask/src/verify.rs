//! `cargo xtask verify`: everything cheap that must be green before a commit. `cargo xtask test` begins with
//! the same checks.

use crate::{
    arrows, dependencies, hygiene, shell,
    stage::{Outcome, Stages},
    test::etcd,
    workspace::Workspace,
};
use anyhow::{Result, bail};

/// A check by name.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Workspace) -> Result<Outcome>,
}

/// The check that `cargo xtask arrows` is.
pub(crate) const ARROWS: Check = Check { name: "arrows", run: check_arrows };

/// The cheapest first.
pub(crate) const CHECKS: [Check; 7] = [
    Check { name: "fmt", run: check_fmt },
    ARROWS,
    Check { name: "dependencies", run: check_dependencies },
    Check { name: "hygiene", run: check_hygiene },
    Check { name: "deny", run: check_deny },
    Check { name: "clippy", run: check_clippy },
    Check { name: "doc", run: check_doc },
];

/// Runs every check; gives whether nothing failed.
pub(crate) fn all(workspace: &Workspace) -> Result<bool> {
    let mut stages = Stages::default();
    for check in &CHECKS {
        stages.run(check.name, || (check.run)(workspace));
    }
    println!("{}", stages.summary());
    Ok(stages.ok())
}

/// Runs one check.
pub(crate) fn only(workspace: &Workspace, check: &Check) -> Result<bool> {
    let mut stages = Stages::default();
    stages.run(check.name, || (check.run)(workspace));
    Ok(stages.ok())
}

fn check_fmt(workspace: &Workspace) -> Result<Outcome> {
    shell::quiet(&mut workspace.cargo("fmt --all --check"))?;
    shell::quiet(&mut workspace.cargo("fmt --all --check --manifest-path fuzz/Cargo.toml"))?;
    Ok(Outcome::Passed)
}

fn check_clippy(workspace: &Workspace) -> Result<Outcome> {
    let words = format!("clippy --quiet --workspace --all-targets {} -- -D warnings", etcd::feature());
    shell::quiet(&mut workspace.cargo(&words))?;
    Ok(Outcome::Passed)
}

fn check_doc(workspace: &Workspace) -> Result<Outcome> {
    let mut doc = workspace.cargo(&format!("doc --quiet --workspace --no-deps {}", etcd::feature()));
    shell::quiet(doc.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Passed)
}

fn check_arrows(workspace: &Workspace) -> Result<Outcome> {
    none_wrong(&arrows::check(&workspace.graph()?))
}

fn check_dependencies(workspace: &Workspace) -> Result<Outcome> {
    none_wrong(&dependencies::check(workspace)?)
}

fn check_hygiene(workspace: &Workspace) -> Result<Outcome> {
    match hygiene::check(workspace) {
        Some(wrong) => none_wrong(&wrong),
        None => Ok(Outcome::Skipped("not a git checkout".into())),
    }
}

fn check_deny(workspace: &Workspace) -> Result<Outcome> {
    if !shell::succeeds(&mut workspace.cargo("deny --version")) {
        return Ok(Outcome::Skipped("cargo-deny not installed".into()));
    }
    // Advisories need their database from the network; the other checks do not.
    shell::quiet(&mut workspace.cargo("deny --workspace check bans licenses sources"))?;
    Ok(Outcome::Passed)
}

fn none_wrong(wrong: &[String]) -> Result<Outcome> {
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(Outcome::Passed)
}
