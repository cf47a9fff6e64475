//! Packages that the tests need and a fresh Debian does not have.

use crate::{shell, stage::Outcome};
use anyhow::Result;
use std::{path::Path, process::Command};

/// Whether this user may bring a package: root, where there is apt.
pub(crate) fn may_install() -> Result<bool> {
    let apt = Path::new("/usr/bin/apt-get").exists();
    Ok(apt && shell::quiet(Command::new("id").arg("-u"))?.trim() == "0")
}

/// Installs one package.
pub(crate) fn install(package: &str) -> Result<()> {
    let install = || {
        let mut command = Command::new("apt-get");
        command.args(["install", "-y", "--no-install-recommends", package]);
        shell::run(command.env("DEBIAN_FRONTEND", "noninteractive"))
    };
    // A fresh machine may have no package lists yet.
    install().or_else(|_| {
        shell::run(Command::new("apt-get").arg("update"))?;
        install()
    })
}

/// `ip` and `tc`, for the tests of several hosts.
pub(crate) fn iproute2() -> Result<Outcome> {
    let there = || ["ip", "tc"].iter().all(|tool| shell::succeeds(Command::new(tool).arg("-V")));
    brought("the tests of several hosts", &["iproute2"], there)
}

/// Brings `packages` unless what they bring is `there`; skipped where this user may not.
pub(crate) fn brought(what: &str, packages: &[&str], there: impl Fn() -> bool) -> Result<Outcome> {
    if there() {
        return Ok(Outcome::Passed);
    }
    let list = packages.join(" ");
    if !may_install()? {
        let why = format!("{what} need {list} (Debian: `apt-get install {list}`) and root");
        return Ok(Outcome::Skipped(why));
    }
    packages.iter().try_for_each(|package| install(package))?;
    Ok(Outcome::Passed)
}
