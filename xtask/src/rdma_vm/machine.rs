//! One boot of the virtual machine: QEMU under software emulation, its console a file, its exit code the guest's.

use super::packages::Packages;
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How long the kernel may take to its first program. It takes three seconds; a few of a hundred boots under emulation
/// never come there.
const BOOT: Duration = Duration::from_secs(45);
const BOOTS: u32 = 2;
const LOOK: Duration = Duration::from_millis(100);
/// What the guest's first program says first.
pub(super) const STARTED: &str = "@started";

/// What a machine that ended by itself left.
#[derive(Debug)]
pub(crate) struct Ran {
    /// The status of the guest's first program.
    pub(crate) status: i32,
    /// Its console.
    pub(crate) log: String,
}

/// Boots the machine with `initramfs` and waits for its end, at most for `limit`. A boot that hangs is tried once more.
pub(crate) fn run(packages: &Packages, initramfs: &Path, log: &Path, limit: Duration) -> Result<Ran> {
    for boot in 1..=BOOTS {
        fs::write(log, "")?;
        let mut machine = Machine(start(packages, initramfs, log)?);
        let began = Instant::now();
        let mut up = false;
        let status = loop {
            if let Some(status) = machine.0.try_wait()? {
                break Some(status);
            }
            up = up || fs::read(log)?.windows(STARTED.len()).any(|w| w == STARTED.as_bytes());
            if !up && began.elapsed() > BOOT {
                break None;
            }
            if began.elapsed() > limit {
                bail!("the machine was still at work after {limit:?}; its console:\n{}", console(log)?);
            }
            thread::sleep(LOOK);
        };
        let Some(status) = status else {
            println!("boot {boot} of the machine hung for {BOOT:?}");
            continue;
        };
        let log = console(log)?;
        // The device at 0xf4 ends QEMU with twice the value and one.
        return match status.code() {
            Some(code) if code & 1 == 1 && up => Ok(Ran { status: code >> 1, log }),
            _ => bail!("QEMU ended with {status} and not by the guest's word; the console:\n{log}"),
        };
    }
    bail!("the machine did not come up in {BOOTS} boots; the last one's console:\n{}", console(log)?)
}

fn start(packages: &Packages, initramfs: &Path, log: &Path) -> Result<Child> {
    let (program, data) = packages.qemu();
    let mut qemu = Command::new(&program);
    qemu.env("LD_LIBRARY_PATH", packages.libraries());
    qemu.arg("-L").arg(data.join("qemu")).arg("-L").arg(data.join("seabios"));
    // Never KVM: that its device is there does not mean that it works.
    qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "1024"]);
    qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"]);
    qemu.arg("-chardev").arg(format!("file,id=console,path={}", log.display()));
    qemu.args(["-serial", "chardev:console", "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]);
    qemu.arg("-kernel").arg(packages.kernel()?).arg("-initrd").arg(initramfs);
    qemu.args([
        "-append",
        "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check random.trust_cpu=on",
    ]);
    qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    qemu.spawn().with_context(|| program.display().to_string())
}

/// The console as people read it.
fn console(log: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(log)?).replace('\r', ""))
}

/// A machine that ends with its owner.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
