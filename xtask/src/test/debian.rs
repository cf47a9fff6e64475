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
    if ["ip", "tc"].iter().all(|tool| shell::succeeds(Command::new(tool).arg("-V"))) {
        return Ok(Outcome::Passed);
    }
    if !may_install()? {
        let why =
            "no iproute2; the tests of several hosts need it (Debian: `apt-get install iproute2`) and root";
        return Ok(Outcome::Skipped(why.into()));
    }
    install("iproute2").map(|()| Outcome::Passed)
}
