//! The Debian packages that the virtual machine is made of: downloaded and unpacked in the cache, never installed.
//!
//! Their versions name the folder, so that a newer kernel or QEMU of the distribution makes a new one. Only the plain
//! apt client is used, with whatever sources this machine has.

use crate::{shell, test::cache};
use anyhow::{Context as _, Result, bail};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Changed when what is unpacked changes.
const RECIPE: &[u8] = b"2";
/// The generic flavour: the cloud one has no soft-RoCE.
const KERNEL: &str = "linux-image-amd64";
const QEMU: &str = "qemu-system-x86";
/// What the guest's programs are and what they load.
const GUEST: [&str; 21] = [
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libbpf1",
    "libbsd0",
    "libcap2",
    "libelf1",
    "libibumad3",
    "libibverbs1",
    "libmd0",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpci3",
    "librdmacm1",
    "libudev1",
    "libxtables12",
    "libzstd1",
    "perftest",
    "zlib1g",
];
/// For the test that compares our structures with the headers.
const HEADERS: &str = "libibverbs-dev";
/// What of the kernel's 400 MB is taken out.
const KERNEL_PARTS: [&str; 10] = [
    "./boot/vmlinuz-*",
    "./lib/modules/*/kernel/crypto/crc32*",
    "./lib/modules/*/kernel/drivers/infiniband/*",
    "./lib/modules/*/kernel/drivers/net/veth.ko",
    "./lib/modules/*/kernel/net/802/stp.ko",
    "./lib/modules/*/kernel/net/bridge/bridge.ko",
    "./lib/modules/*/kernel/net/ipv4/udp_tunnel.ko",
    "./lib/modules/*/kernel/net/ipv6/ip6_udp_tunnel.ko",
    "./lib/modules/*/kernel/net/llc/llc.ko",
    "./lib/modules/*/kernel/net/sched/sch_netem.ko",
];

/// The unpacked packages.
#[derive(Debug)]
pub(crate) struct Packages {
    folder: PathBuf,
}

impl Packages {
    /// The kernel's image.
    pub(crate) fn kernel(&self) -> Result<PathBuf> {
        let boot = self.folder.join("kernel/boot");
        let mut found = fs::read_dir(&boot).with_context(|| boot.display().to_string())?;
        Ok(found.next().context("the kernel package has no image")??.path())
    }

    /// The file of a kernel module.
    pub(crate) fn module(&self, name: &str) -> Result<PathBuf> {
        find(&self.folder.join("kernel/lib/modules"), name)?
            .with_context(|| format!("the kernel package has no {name}"))
    }

    /// The root of what the guest's packages hold.
    pub(crate) fn guest(&self) -> PathBuf {
        self.folder.join("guest")
    }

    /// The folder that holds `infiniband/verbs.h`.
    pub(crate) fn headers(&self) -> PathBuf {
        self.folder.join("headers/usr/include")
    }

    /// QEMU's program and its data: unpacked, or this machine's own where it is installed.
    pub(crate) fn qemu(&self) -> (PathBuf, PathBuf) {
        let unpacked = self.folder.join("qemu");
        let root = if unpacked.join("usr/bin/qemu-system-x86_64").is_file() { unpacked } else { "/".into() };
        (root.join("usr/bin/qemu-system-x86_64"), root.join("usr/share"))
    }

    /// Where programs of `root` find their libraries before this machine's own.
    pub(crate) fn libraries(&self) -> String {
        let of = |root: &str| {
            let root = self.folder.join(root);
            format!(
                "{}:{}",
                root.join("usr/lib/x86_64-linux-gnu").display(),
                root.join("lib/x86_64-linux-gnu").display()
            )
        };
        format!("{}:{}", of("guest"), of("qemu"))
    }
}

/// Why the packages cannot be had here, if so.
pub(crate) fn missing() -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("needs an x86_64 machine: the guest's kernel and programs are its packages".into());
    }
    ["apt-get", "apt-cache", "dpkg", "tar", "ldd"]
        .into_iter()
        .find(|tool| !shell::succeeds(Command::new(tool).arg("--version")))
        .map(|tool| format!("needs Debian's {tool}: the machine is made of Debian's packages"))
}

/// The packages as this machine's sources have them now, fetched if need be.
pub(crate) fn fetch() -> Result<Packages> {
    let wanted = wanted().or_else(|_| {
        // A fresh machine may have no package lists yet.
        shell::run(Command::new("apt-get").args(["update", "-qq"]))?;
        wanted()
    })?;
    let versions: String =
        wanted.iter().map(|(group, list)| format!("{group}: {}\n", list.join(" "))).collect();
    let key = cache::key(&[RECIPE, versions.as_bytes()]);
    let folder = cache::get_or_make(
        &cache::folder()?,
        &format!("rdma-vm-{key}"),
        |_| true,
        |at| {
            println!("fetching the RDMA machine's packages to {} (120 MB, once)", at.display());
            for (group, list) in &wanted {
                unpack(group, list, at)?;
            }
            fs::write(at.join("packages.txt"), &versions)?;
            Ok(())
        },
    )?;
    Ok(Packages { folder })
}

/// `NAME=VERSION` by the folder they are unpacked in.
fn wanted() -> Result<BTreeMap<&'static str, Vec<String>>> {
    let mut wanted = BTreeMap::new();
    let depends = shell::quiet(Command::new("apt-cache").args(["depends", KERNEL]))?;
    let kernel = depends
        .lines()
        .find_map(|line| {
            line.trim().strip_prefix("Depends: ").filter(|name| name.starts_with("linux-image-"))
        })
        .with_context(|| format!("{KERNEL} names no kernel"))?;
    wanted.insert("kernel", candidates(&[kernel])?);
    wanted.insert("guest", candidates(&GUEST)?);
    wanted.insert("headers", candidates(&[HEADERS])?);
    // Installing it for real may remove other packages, so only what it would bring is asked for.
    let mut simulate = Command::new("apt-get");
    simulate.args(["-s", "install", "--no-install-recommends", QEMU]);
    let closure = shell::quiet(&mut simulate)?;
    wanted.insert("qemu", closure.lines().filter_map(installed_by).collect());
    Ok(wanted)
}

/// Of `Inst NAME [OLD] (VERSION SOURCE [ARCH])`.
fn installed_by(line: &str) -> Option<String> {
    let (name, rest) = line.strip_prefix("Inst ")?.split_once(' ')?;
    let (_, rest) = rest.split_once('(')?;
    Some(format!("{name}={}", rest.split_whitespace().next()?))
}

fn candidates(names: &[&str]) -> Result<Vec<String>> {
    let policy = shell::quiet(Command::new("apt-cache").arg("policy").args(names).env("LC_ALL", "C"))?;
    let found: Vec<_> = parse_policy(&policy);
    if found.len() != names.len() {
        bail!("apt knows {} of {}", found.join(" "), names.join(" "));
    }
    Ok(found)
}

fn parse_policy(policy: &str) -> Vec<String> {
    let mut name = "";
    let mut found = Vec::new();
    for line in policy.lines() {
        if let Some(head) = line.strip_suffix(':').filter(|head| !head.starts_with(' ')) {
            name = head;
        } else if let Some(version) = line.trim().strip_prefix("Candidate: ")
            && version != "(none)"
        {
            found.push(format!("{name}={version}"));
        }
    }
    found
}

fn unpack(group: &str, packages: &[String], at: &Path) -> Result<()> {
    let (archives, into) = (at.join(format!("{group}-archives")), at.join(group));
    fs::create_dir_all(&archives)?;
    fs::create_dir_all(&into)?;
    if !packages.is_empty() {
        let mut download = Command::new("apt-get");
        download.args(["download", "-qq"]).args(packages).current_dir(&archives);
        shell::quiet(&mut download)?;
    }
    for archive in fs::read_dir(&archives)? {
        let archive = archive?.path();
        if group == "kernel" {
            take_parts(&archive, &into)?;
        } else {
            shell::quiet(Command::new("dpkg").arg("-x").arg(&archive).arg(&into))?;
        }
    }
    fs::remove_dir_all(archives)?;
    Ok(())
}

fn take_parts(archive: &Path, into: &Path) -> Result<()> {
    let mut whole = Command::new("dpkg").arg("--fsys-tarfile").arg(archive).stdout(Stdio::piped()).spawn()?;
    let stream = whole.stdout.take().context("dpkg's output")?;
    let mut tar = Command::new("tar");
    tar.arg("-x").arg("-C").arg(into).arg("--wildcards").args(KERNEL_PARTS).stdin(stream);
    let taken = tar.status()?;
    if !(whole.wait()?.success() && taken.success()) {
        bail!("{} does not unpack", archive.display());
    }
    Ok(())
}

fn find(folder: &Path, name: &str) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if let Some(found) = find(&entry.path(), name)? {
                return Ok(Some(found));
            }
        } else if entry.file_name() == name {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_apt_says_is_read() {
        let line = "Inst libfdt1 (1.6.1-4+b1 Debian:12.15/oldstable [amd64])";
        assert_eq!(installed_by(line).as_deref(), Some("libfdt1=1.6.1-4+b1"));
        let newer = "Inst libfdt1 [1.6.0] (1.6.1-4+b1 Debian:12.15/oldstable [amd64])";
        assert_eq!(installed_by(newer).as_deref(), Some("libfdt1=1.6.1-4+b1"));
        assert_eq!(installed_by("Conf libfdt1 (1.6.1-4+b1 x)"), None);
        let policy = "a:\n  Installed: (none)\n  Candidate: 1:2\n  Version table:\n     1:2 500\nb:\n  Candidate: (none)\n";
        assert_eq!(parse_policy(policy), ["a=1:2"]);
    }
}
