//! A short run of every fuzz target from its committed seeds.
//!
//! The targets are in the layout of cargo-fuzz and work with it; here they are built with plain cargo and
//! libFuzzer's coverage instrumentation, without a sanitizer: what they fuzz holds no `unsafe`. So the stable
//! toolchain and a C++ compiler (libFuzzer is C++) are all that is needed.

use crate::{shell, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use std::{fs, process::Command};

const MANIFEST: &str = "fuzz/Cargo.toml";
const SECONDS: u32 = 12;
/// What `cargo fuzz build --sanitizer none` passes too.
const INSTRUMENTATION: &str = "--cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// The instrumented targets, built.
pub(crate) struct Built {
    host: String,
    pub(crate) targets: Vec<String>,
}

/// Why the targets cannot be built here, if so.
pub(crate) fn missing() -> Option<String> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    (!shell::succeeds(Command::new(&compiler).arg("--version")))
        .then(|| format!("no C++ compiler (`{compiler}`), which libFuzzer needs"))
}

/// The targets that `fuzz/Cargo.toml` names, in its order.
pub(crate) fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let manifest: toml::Table = workspace.read(MANIFEST)?.parse().context(MANIFEST)?;
    let bins = manifest.get("bin").and_then(toml::Value::as_array).into_iter().flatten();
    Ok(bins.filter_map(|bin| bin.get("name")?.as_str().map(str::to_owned)).collect())
}

/// Builds every target.
pub(crate) fn build(workspace: &Workspace) -> Result<Built> {
    let version = shell::quiet(Command::new("rustc").arg("-vV").current_dir(workspace.root()))?;
    let host = version.lines().find_map(|l| l.strip_prefix("host: ")).context("rustc -vV names no host")?;
    let mut build = workspace.cargo("build --quiet --release --target-dir target/fuzz --manifest-path");
    // With --target, build scripts and procedural macros are left without the instrumentation.
    build.args([MANIFEST, "--target", host]).env("RUSTFLAGS", INSTRUMENTATION);
    shell::run(&mut build)?;
    Ok(Built { host: host.to_owned(), targets: targets(workspace)? })
}

/// Runs one target for [`SECONDS`]; a crash is an error that ends with what libFuzzer said, and the input
/// that did it stays in `fuzz/artifacts/`.
pub(crate) fn run(workspace: &Workspace, built: &Built, target: &str) -> Result<()> {
    // libFuzzer adds what it finds to the first folder: a fresh one, so that every run begins the same.
    let found = format!("target/fuzz/found/{target}");
    if workspace.path(&found).exists() {
        fs::remove_dir_all(workspace.path(&found))?;
    }
    fs::create_dir_all(workspace.path(&found))?;
    let artifacts = format!("fuzz/artifacts/{target}/");
    fs::create_dir_all(workspace.path(&artifacts))?;
    let seeds = format!("fuzz/seeds/{target}");
    if !workspace.path(&seeds).is_dir() {
        bail!("{target} has no seeds: put a few inputs into {seeds}");
    }
    let mut fuzz = Command::new(workspace.path(format!("target/fuzz/{}/release/{target}", built.host)));
    fuzz.current_dir(workspace.root()).args([&found, &seeds]);
    fuzz.args(["-seed=1", "-timeout=10", "-rss_limit_mb=1024", "-verbosity=0"]);
    fuzz.arg(format!("-max_total_time={SECONDS}")).arg(format!("-artifact_prefix={artifacts}"));
    shell::quiet(&mut fuzz).with_context(|| format!("an input broke {target}; it is in {artifacts}"))?;
    Ok(())
}
