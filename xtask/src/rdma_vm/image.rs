//! What the guest's memory holds when it starts: programs, the libraries they load, soft-RoCE and its modules.

use super::{archive::Archive, packages::Packages, plan};
use crate::shell;
use anyhow::{Context as _, Result};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

const GUEST: &str = include_str!("guest.sh");
const MODULES: [&str; 11] = [
    "crc32_generic",
    "udp_tunnel",
    "ip6_udp_tunnel",
    "ib_core",
    "ib_uverbs",
    "rdma_rxe",
    "veth",
    "llc",
    "stp",
    "bridge",
    "sch_netem",
];
/// Programs of the guest's packages.
const PROGRAMS: [&str; 6] =
    ["bin/ip", "sbin/tc", "usr/bin/rdma", "usr/bin/ibv_devinfo", "usr/bin/ib_read_bw", "usr/bin/ib_read_lat"];
/// libibverbs opens it by what the driver file names.
const PROVIDER: &str = "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so";
const DRIVER: &str = "etc/libibverbs.d/rxe.driver";
const LIBRARIES: [&str; 2] =
    ["usr/lib/x86_64-linux-gnu/libibverbs.so.1", "usr/lib/x86_64-linux-gnu/librdmacm.so.1"];

/// The initramfs for `programs`; `binaries` are ours, by the name they get under `/usr/bin`.
pub(crate) fn build(
    packages: &Packages,
    programs: &[plan::Program],
    binaries: &[(String, PathBuf)],
) -> Result<Vec<u8>> {
    let guest = packages.guest();
    let mut archive = Archive::default();
    archive.copy("bin/busybox", &guest.join("bin/busybox"))?;
    archive.link("bin/sh", "busybox");
    archive.file("init", 0o755, GUEST.as_bytes());
    archive.file("programs", 0o644, plan::lines(programs).as_bytes());
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/:/bin/sh\n");
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n");
    for module in MODULES {
        let name = format!("{module}.ko");
        archive.copy(&format!("modules/{name}"), &packages.module(&name)?)?;
    }
    let mut load: Vec<PathBuf> = Vec::new();
    for program in PROGRAMS {
        let file = guest.join(program);
        let name = Path::new(program).file_name().context("a name")?.to_string_lossy().into_owned();
        archive.copy(&format!("usr/bin/{name}"), &file)?;
        load.push(file);
    }
    for (name, file) in binaries {
        archive.copy(&format!("usr/bin/{name}"), file)?;
        load.push(file.clone());
    }
    archive.copy(PROVIDER, &guest.join(PROVIDER))?;
    archive.copy(DRIVER, &guest.join(DRIVER))?;
    load.push(guest.join(PROVIDER));
    for library in LIBRARIES {
        let file = guest.join(library);
        let name = Path::new(library).file_name().context("a name")?.to_string_lossy().into_owned();
        archive.copy(&format!("lib/x86_64-linux-gnu/{name}"), &file)?;
        load.push(file);
    }
    for library in needed(packages, &load)? {
        let name = library.file_name().context("a library's name")?.to_string_lossy().into_owned();
        let folder = if library.starts_with("/lib64") { "lib64" } else { "lib/x86_64-linux-gnu" };
        archive.copy(&format!("{folder}/{name}"), &library)?;
    }
    Ok(archive.finish())
}

/// What the loader would open for these files, the guest's own libraries first.
fn needed(packages: &Packages, files: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let mut all = BTreeSet::new();
    for file in files {
        let listed =
            shell::quiet(Command::new("ldd").arg(file).env("LD_LIBRARY_PATH", packages.libraries()))?;
        for line in listed.lines() {
            all.extend(library(line).with_context(|| format!("{}: {line}", file.display()))?);
        }
    }
    Ok(all)
}

/// The file that a line of `ldd` names, if any; a library that is nowhere is an error.
fn library(line: &str) -> Result<Option<PathBuf>> {
    let line = line.trim();
    if line.ends_with("not found") {
        anyhow::bail!("a library is not found");
    }
    let path = line.split_once(" => ").map_or(line, |(_, path)| path);
    let path = path.split(" (").next().unwrap_or_default();
    Ok(path.starts_with('/').then(|| PathBuf::from(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_ldd_are_read() {
        let of = |line| library(line).unwrap();
        assert_eq!(of("\tlibm.so.6 => /lib/x/libm.so.6 (0x00007)"), Some("/lib/x/libm.so.6".into()));
        assert_eq!(of("\t/lib64/ld-linux-x86-64.so.2 (0x00007)"), Some("/lib64/ld-linux-x86-64.so.2".into()));
        assert_eq!(of("\tlinux-vdso.so.1 (0x00007)"), None);
        assert!(library("\tlibx.so => not found").is_err());
    }
}
