//! The Python package: its wheel built with maturin, installed into an environment of its own outside the clone, and tested there.
//!
//! The environment has the wheel and nothing else; torch, transformers and pytest are the tests' environment's, which a path file
//! names. It is kept by the hash of the wheel and of both locks.

use super::{cache, python};
use crate::{shell, stage::Outcome, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

pub(crate) const STAGE: &str = "python package";
const LOCK: &str = "xtask/python/wheel.lock";
/// Where `python/tests` and its settings are.
const FOLDER: &str = "python";
/// Where its tests find the engines' packages.
const ENGINES_VARIABLE: &str = "FLASHBOOT_CONFORMANCE_ENGINES";
/// Below the clone's build folder.
const WHEELS: &str = "target/wheels/test";

/// Builds, installs, tests.
pub(super) fn run(workspace: &Workspace, python: &Path) -> Result<Outcome> {
    let tools = tools(workspace, python)?;
    let wheel = build(workspace, &tools)?;
    let installed = install(workspace, python, &tools, &wheel)?;
    let mut pytest = Command::new(python::python_in(&installed));
    pytest.args(["-m", "pytest", "-rs"]).current_dir(workspace.path(FOLDER));
    pytest.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("PYTHONPATH");
    pytest.env("HF_HUB_OFFLINE", "1").env("TOKENIZERS_PARALLELISM", "false");
    pytest.env(ENGINES_VARIABLE, python::engine_packages(workspace, python)?);
    pytest.env(super::SHARDS_VARIABLE, python::parallel_references(workspace, python)?);
    let (passed, said) = shell::tee(&mut pytest)?;
    if !passed {
        bail!("tests of the Python package failed; they are named above");
    }
    let unexplained: Vec<_> = said.lines().filter(|line| is_unexplained(line)).collect();
    if !unexplained.is_empty() {
        bail!("cases were skipped without saying what they need:\n{}", unexplained.join("\n"));
    }
    Ok(Outcome::Passed)
}

/// Whether pytest's line is of a case that was skipped for another reason than what this machine lacks:
/// `SKIPPED [4] tests/test_gpu.py:20: needs a GPU` says what it needs.
fn is_unexplained(line: &str) -> bool {
    line.starts_with("SKIPPED ") && !line.contains(": needs ")
}

/// maturin and pytest.
fn tools(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    let lock = workspace.path(LOCK);
    let key = cache::key(&[&fs::read(&lock).context(LOCK)?]);
    let make = |at: &Path| python::install(python, &lock, at);
    cache::get_or_make(&cache::folder()?, &format!("wheel-{key}"), |_| true, make)
}

/// The wheel, of the profile that the tests have built already.
fn build(workspace: &Workspace, tools: &Path) -> Result<PathBuf> {
    let out = workspace.path(WHEELS);
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| WHEELS.to_owned())?;
    }
    let mut maturin = Command::new(tools.join("bin/maturin"));
    maturin.args(["build", "--quiet", "--profile", "dev", "--interpreter", "python3", "--manifest-path"]);
    maturin.arg(workspace.path(FOLDER).join("Cargo.toml")).arg("--out").arg(&out);
    shell::quiet(maturin.current_dir(workspace.root()))?;
    let entries = fs::read_dir(&out).with_context(|| WHEELS.to_owned())?;
    let wheels: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    match wheels.as_slice() {
        [wheel] => Ok(wheel.clone()),
        other => bail!("maturin made {} wheels in {WHEELS}, one was wanted", other.len()),
    }
}

/// An environment with the wheel installed as anybody would, and the tests' packages in sight.
fn install(workspace: &Workspace, python: &Path, tools: &Path, wheel: &Path) -> Result<PathBuf> {
    let read = |name: &str| fs::read(workspace.path(name)).with_context(|| name.to_owned());
    let wheel_bytes = fs::read(wheel).with_context(|| wheel.display().to_string())?;
    let key = cache::key(&[&wheel_bytes, &read(python::LOCK)?, &read(LOCK)?]);
    let (folder, name) = (cache::folder()?, format!("package-{key}"));
    let whole = |at: &Path| {
        shell::succeeds(Command::new(python::python_in(at)).args(["-c", "import flashboot, torch, pytest"]))
            && shell::succeeds(Command::new(at.join("bin/flashboot")).arg("--version"))
    };
    let make = |at: &Path| {
        shell::run(Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(at))?;
        let own = site(&python::python_in(at))?;
        let seen = format!("{}\n{}\n", site(python)?.display(), tools.display());
        fs::write(own.join("tests.pth"), seen).context("the path file")?;
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "--python"]).arg(python::python_in(at));
        pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]);
        shell::run(pip.arg(wheel))?;
        // The command's first line names its interpreter, which is where it is made and moves.
        let command = at.join("bin/flashboot");
        let text = fs::read_to_string(&command).with_context(|| command.display().to_string())?;
        let there = text.replace(&at.display().to_string(), &folder.join(&name).display().to_string());
        fs::write(&command, there).with_context(|| command.display().to_string())
    };
    cache::get_or_make(&folder, &name, whole, make)
}

/// Where an interpreter's packages are.
fn site(python: &Path) -> Result<PathBuf> {
    let mut ask = Command::new(python);
    ask.args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]);
    Ok(PathBuf::from(shell::stdout_of(&mut ask)?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_case_says_what_it_needs() {
        assert!(!is_unexplained("SKIPPED [4] tests/test_gpu.py:20: needs a GPU"));
        assert!(is_unexplained("SKIPPED [1] tests/test_gpu.py:20: could not import 'torch'"));
        assert!(!is_unexplained("62 passed, 4 skipped in 134.56s"));
    }
}
