//! The Python environment of the tests, and the reference models made with it.
//!
//! Both lie in the cache, outside the clone. The environment was made under another name, so the scripts in
//! its `bin` point nowhere: use `python -m`.

use super::{cache, debian};
use crate::{shell, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

pub(super) const LOCK: &str = "xtask/python/requirements.lock";
/// `make_reference_models.py OUTDIR` makes every model the tests compare with in a folder that is there and
/// empty; the same each time it runs.
pub(crate) const SCRIPT: &str = "xtask/python/make_reference_models.py";
/// `make_parallel_references.py OUTDIR` makes models and their shards under transformers' tensor parallelism.
const PARALLEL_SCRIPT: &str = "xtask/python/make_parallel_references.py";
/// `make_split_references.py OUTDIR` makes models and ranks' parts of them, and runs transformers' modules on the parts.
const SPLIT_SCRIPT: &str = "xtask/python/make_split_references.py";
/// `make_engine_references.py OUTDIR` makes models and what vLLM's parameter classes load of them.
const ENGINES_SCRIPT: &str = "xtask/python/make_engine_references.py";
const ENGINES_LOCK: &str = "xtask/python/engines.lock";
const S3_LOCK: &str = "xtask/python/s3.lock";
/// What the environment is for; also what it must be able to do to count as whole.
const IMPORTS: &str = "import accelerate, safetensors.torch, torch, transformers";

/// The interpreter of an environment that has what the lock file lists, made if need be.
pub(crate) fn interpreter(workspace: &Workspace) -> Result<PathBuf> {
    let lock = workspace.path(LOCK);
    let key = cache::key(&[&fs::read(&lock).context(LOCK)?]);
    // A system Python that was replaced since leaves an environment that no longer starts.
    let starts = |at: &Path| shell::succeeds(Command::new(python_in(at)).args(["-c", "pass"]));
    let folder =
        cache::get_or_make(&cache::folder()?, &format!("python-{key}"), starts, |at| make(at, &lock))?;
    Ok(python_in(&folder))
}

/// The folder of reference models that belongs to the script and lock file as they are, made if need be.
pub(crate) fn reference_models(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    made_by(workspace, python, SCRIPT, "models", None)
}

/// The same of the models that transformers shards.
pub(crate) fn parallel_references(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    made_by(workspace, python, PARALLEL_SCRIPT, "parallel", None)
}

/// The same of the parts that were proved by running them.
pub(crate) fn split_references(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    made_by(workspace, python, SPLIT_SCRIPT, "parts", None)
}

/// The same of the parameters that vLLM loads.
pub(crate) fn engine_references(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    let packages = engine_packages(workspace, python)?;
    made_by(workspace, python, ENGINES_SCRIPT, "parameters", Some(&packages))
}

/// The engines' packages, in a folder of their own beside the environment.
pub(super) fn engine_packages(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    let lock = workspace.path(ENGINES_LOCK);
    let key = cache::key(&[
        &fs::read(&lock).context(ENGINES_LOCK)?,
        &fs::read(workspace.path(LOCK)).context(LOCK)?,
    ]);
    let install = |at: &Path| install(python, &lock, at);
    cache::get_or_make(&cache::folder()?, &format!("engines-{key}"), |_| true, install)
}

/// The folder of packages that an S3 store runs from.
pub(crate) fn object_store(workspace: &Workspace, python: &Path) -> Result<PathBuf> {
    let lock = workspace.path(S3_LOCK);
    let key = cache::key(&[&fs::read(&lock).context(S3_LOCK)?]);
    cache::get_or_make(&cache::folder()?, &format!("s3-{key}"), |_| true, |at| install(python, &lock, at))
}

/// Puts what a lock file lists into a folder of its own, beside the environment.
pub(super) fn install(python: &Path, lock: &Path, at: &Path) -> Result<()> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    pip.args(["--no-deps", "--no-compile", "--only-binary", ":all:", "--target"]).arg(at);
    shell::run(pip.arg("--requirement").arg(lock))
}

/// The folder that `script` makes, with more packages if it needs them.
fn made_by(
    workspace: &Workspace,
    python: &Path,
    script: &str,
    kind: &str,
    packages: Option<&Path>,
) -> Result<PathBuf> {
    let read = |name: &str| fs::read(workspace.path(name)).with_context(|| name.to_owned());
    let mut parts = vec![read(script)?, read(LOCK)?];
    if packages.is_some() {
        parts.push(read(ENGINES_LOCK)?);
    }
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let key = cache::key(&parts);
    let script = workspace.path(script);
    let make = |at: &Path| {
        fs::create_dir(at)?;
        let mut command = Command::new(python);
        command.arg(&script).arg(at).env("HF_HUB_OFFLINE", "1").env("TOKENIZERS_PARALLELISM", "false");
        if let Some(packages) = packages {
            command.env("PYTHONPATH", packages);
        }
        shell::run(&mut command)
    };
    cache::get_or_make(&cache::folder()?, &format!("{kind}-{key}"), |_| true, make)
}

pub(super) fn python_in(environment: &Path) -> PathBuf {
    environment.join("bin/python")
}

fn make(at: &Path, lock: &Path) -> Result<()> {
    println!("making a Python environment in {} (torch is 3 GB to fetch, once)", at.display());
    ensure_venv()?;
    shell::run(Command::new("python3").args(["-m", "venv"]).arg(at))?;
    let python = python_in(at);
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    // What is needed at run time is compiled when it is first imported; all of torch takes minutes.
    install.args(["--no-deps", "--no-compile", "--only-binary", ":all:", "--requirement"]).arg(lock);
    shell::run(&mut install)?;
    shell::quiet(Command::new(&python).args(["-c", IMPORTS]))?;
    Ok(())
}

/// Debian packages `venv` apart from `python3`; root may bring it, others are told.
fn ensure_venv() -> Result<()> {
    if !shell::succeeds(Command::new("python3").arg("--version")) {
        bail!("there is no python3; install Python 3.11 or later");
    }
    if shell::succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"])) {
        return Ok(());
    }
    if !debian::may_install()? {
        bail!("python3 has no venv module; install it (Debian: `apt-get install python3-venv`)");
    }
    debian::install("python3-venv")
}
