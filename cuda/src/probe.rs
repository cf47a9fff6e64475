//! What works on this machine, rung by rung, found by trying.
//!
//! An attribute that reads 1 proves nothing (fabric handles are refused on machines whose every attribute and fabric
//! state says yes), so the last word is always a trial: create one granule, export it, give it back. The ladder
//! runs on a thread of its own and is cut off at its deadline, because a sick driver blocks for ever.

use crate::{
    Context, Device, Import, device,
    error::code,
    nvml::{self, Fabric, Health, Seen},
    ops::{AllocationKind, Ops, Real, handle_type},
    vmm::Memory,
};
use flashboot_core::{Code, Error, Kind, Location, Locator, Readiness, Result};
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// The rungs' names, in order.
pub const RUNGS: [&str; 10] = [
    LIBCUDA,
    DRIVER,
    DEVICE,
    VMM,
    POSIX_FD,
    FABRIC_ATTRIBUTE,
    FABRIC_STATE,
    FABRIC_HEALTH,
    IMEX_CHANNEL,
    FABRIC,
];
/// `libcuda.so.1` was found.
pub const LIBCUDA: &str = "libcuda";
/// It is recent enough.
pub const DRIVER: &str = "driver version";
/// The GPU is there, and a whole one.
pub const DEVICE: &str = "GPU";
/// It has virtual memory management.
pub const VMM: &str = "virtual memory management";
/// An allocation was exported as a file descriptor: what `ipc` needs.
pub const POSIX_FD: &str = "POSIX_FD export";
/// The driver claims fabric handles.
pub const FABRIC_ATTRIBUTE: &str = "FABRIC attribute";
/// NVML says that the GPU is registered with its fabric.
pub const FABRIC_STATE: &str = "fabric state";
/// NVML says nothing bad of that fabric: a degraded one is not used.
pub const FABRIC_HEALTH: &str = "fabric health";
/// An IMEX channel device can be opened.
pub const IMEX_CHANNEL: &str = "IMEX channel";
/// An allocation was exported as a fabric handle: what `imex` needs on this side.
pub const FABRIC: &str = "FABRIC export";

const NOT_TRIED: &str = "not tried";
const CHANNELS: &str = "/dev/nvidia-caps-imex-channels";

/// One thing that was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rung {
    /// One of [`RUNGS`].
    pub name: &'static str,
    /// What must be there.
    pub needed: &'static str,
    /// What is.
    pub found: String,
    /// Whether that is enough.
    pub ok: bool,
    /// What to do when it is not.
    pub remedy: Option<String>,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", if self.ok { "yes" } else { "no " }, self.name, self.found)?;
        self.remedy.as_ref().map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

/// Climbs every rung for the GPU that `selector` names ([`Device::find`]), in at most `timeout`. Every rung of [`RUNGS`]
/// is in the answer; those that were not reached say so.
pub fn ladder(selector: &str, timeout: Duration) -> Vec<Rung> {
    let selector = selector.to_owned();
    ladder_of(timeout, move |say| {
        let ops = match Real::open() {
            Ok(real) => Arc::new(real) as Arc<dyn Ops>,
            Err(e) => return say(rung(LIBCUDA, Err(e))),
        };
        say(rung(LIBCUDA, Ok("found".to_owned())));
        climb(&ops, || Device::find(&selector), Context::open, nvml::inspect, Path::new(CHANNELS), say);
    })
}

/// Whether the rung `name` was reached and holds.
pub fn holds(rungs: &[Rung], name: &str) -> bool {
    rungs.iter().any(|rung| rung.name == name && rung.ok)
}

/// What the ladder says of whoever needs the rung `name`: what it stumbled over on the way there, and the first thing to
/// do about it.
pub fn verdict(rungs: &[Rung], name: &str) -> Readiness {
    // Handles of a degraded fabric are given all the same.
    let degraded = name == FABRIC && !holds(rungs, FABRIC_HEALTH);
    if holds(rungs, name) && !degraded {
        return Readiness::Ready;
    }
    let wanted = RUNGS.iter().position(|rung| *rung == name).unwrap_or(RUNGS.len());
    let failed = || rungs.iter().take(wanted.saturating_add(1)).filter(|rung| !rung.ok);
    // A rung that was not tried says nothing that the one before it has not said, unless there is none.
    let tried = failed().filter(|rung| !rung.found.starts_with(NOT_TRIED));
    let mut said: Vec<_> = tried.map(|rung| format!("{}: {}", rung.name, rung.found)).collect();
    if said.is_empty() {
        said = failed().take(1).map(|rung| format!("{}: {}", rung.name, rung.found)).collect();
    }
    // A machine without NVML knows nothing of its fabric's state: the channel first.
    let state_last = |rung: &&Rung| rung.name == FABRIC_STATE;
    let known = failed().filter(|rung| !state_last(rung) && rung.name != name);
    let remedies = known.chain(failed().filter(state_last)).chain(failed());
    let mut remedies = remedies.filter_map(|rung| rung.remedy.clone());
    let remedy = remedies.next();
    Readiness::Unavailable {
        reason: said.join("; "),
        remedy: remedy.unwrap_or_else(|| "see what nvidia-smi and dmesg say of the GPU".to_owned()),
    }
}

/// Whether the GPU at `into` can read what `locator` names: the two reach each other, `import` maps it, and the control
/// block's header, read over the fabric, is the locator's. Blocks, as long as the driver does.
///
/// # Errors
/// [`Kind::Unavailable`] when the GPUs do not reach each other, and those of `import`.
pub fn pair(
    into: &Location,
    locator: &Locator,
    import: impl FnOnce(&Context) -> Result<Import>,
) -> Result<()> {
    let Location::Gpu { uuid: ours, .. } = into else {
        return Err(Error::new(Kind::Mismatch, "probe", "the arena to fill is in no GPU's memory"));
    };
    let devices = Device::all()?;
    let device = devices.iter().find(|device| device.uuid() == ours).ok_or_else(|| {
        Error::new(Kind::Unavailable, "device", format!("this process does not see the GPU {ours}"))
            .with_remedy("see CUDA_VISIBLE_DEVICES and the devices of the container")
    })?;
    reaches(device, &devices, &locator.location)?;
    import(&Context::open(device)?)?.check_source()
}

/// Whether `device` can map memory at `there`, as far as `devices`, the process's own, tell. A GPU that this process does not
/// see can be mapped all the same: then the trial alone tells.
///
/// # Errors
/// [`Kind::Unavailable`] when the driver says no.
pub(crate) fn reaches(device: &Device, devices: &[Device], there: &Location) -> Result<()> {
    if let Location::Gpu { uuid: theirs, .. } = there
        && let Some(peer) = devices.iter().find(|device| device.uuid() == theirs)
        && !device.can_map(peer)?
    {
        let detail = format!("the GPU {} cannot map memory of the GPU {theirs}", device.uuid());
        return Err(Error::new(Kind::Unavailable, "cuDeviceCanAccessPeer", detail)
            .with_remedy("use GPUs with NVLink or PCIe peer access, or allow another transport"));
    }
    Ok(())
}

/// Runs `climb` on a thread and gathers what it says until it ends or time is up.
fn ladder_of(timeout: Duration, climb: impl FnOnce(&dyn Fn(Rung)) + Send + 'static) -> Vec<Rung> {
    let (said, heard) = mpsc::channel();
    let began = Instant::now();
    let spawned = thread::Builder::new().name("flashboot-probe".to_owned()).spawn(move || {
        climb(&|rung| {
            // Nobody listens after the deadline.
            let _ = said.send(rung);
        });
    });
    let mut rungs: Vec<Rung> = Vec::new();
    let mut why = match spawned {
        Ok(_) => "an earlier rung failed".to_owned(),
        Err(e) => format!("cannot start a thread: {e}"),
    };
    loop {
        match heard.recv_timeout(timeout.saturating_sub(began.elapsed())) {
            Ok(rung) => rungs.push(rung),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                why = format!("the driver did not answer in {timeout:?}");
                break;
            }
        }
    }
    for name in RUNGS {
        if !rungs.iter().any(|rung| rung.name == name) {
            let found = format!("{NOT_TRIED}: {why}");
            rungs.push(Rung { name, needed: needed(name), found, ok: false, remedy: None });
        }
    }
    rungs.sort_by_key(|rung| RUNGS.iter().position(|name| *name == rung.name));
    rungs
}

fn climb(
    ops: &Arc<dyn Ops>,
    find: impl FnOnce() -> Result<Device>,
    open: impl FnOnce(&Device) -> Result<Context>,
    nvml: impl FnOnce(&Device) -> Result<Seen>,
    channels: &Path,
    say: &dyn Fn(Rung),
) {
    let version = Device::version_of(&**ops);
    let usable = version.is_ok();
    say(rung(DRIVER, version.map(|v| format!("CUDA {}.{}", v / 1000, v % 1000 / 10))));
    if !usable {
        return;
    }
    let device = match find() {
        Ok(device) => device,
        Err(e) => return say(rung(DEVICE, Err(e))),
    };
    let who = format!("{} {} at {}", device.name(), device.uuid(), device.pci_address());
    let (mig, fabric) = match nvml(&device) {
        Ok(Seen { mig, fabric }) => (mig, fabric),
        Err(e) => (None, Err(e)),
    };
    if let Some(why) = mig {
        return say(rung(DEVICE, Err(device::mig(&format!("{who}: {why}: it")))));
    }
    say(rung(DEVICE, Ok(who)));
    let features = device.features();
    if !features.vmm {
        return say(no(VMM, "the driver says no", "use a GPU of compute capability 7.0 or later"));
    }
    let context = match open(&device) {
        Ok(context) => context,
        Err(e) => return say(rung(VMM, Err(e))),
    };
    say(rung(VMM, Ok("supported".to_owned())));
    let exported = trial(&context, handle_type::POSIX_FD, |memory| memory.export_fd().map(drop));
    say(rung(POSIX_FD, exported.map(|()| "one granule exported".to_owned())));
    say(if features.fabric {
        rung(FABRIC_ATTRIBUTE, Ok("claimed".to_owned()))
    } else {
        no(
            FABRIC_ATTRIBUTE,
            "not claimed",
            "imex needs GPUs of one NVLink domain (GB200, GH200 NVL, HGX with NVLink)",
        )
    });
    say(health(&fabric));
    say(state(fabric));
    say(channel(channels));
    let exported = trial(&context, handle_type::FABRIC, |memory| memory.export_fabric().map(drop));
    say(rung(FABRIC, exported.map(|()| "one granule exported".to_owned()).map_err(fabric_remedy)));
}

/// Creates one granule with this handle type, exports it, and gives it back.
fn trial(context: &Context, handle_types: u32, export: impl FnOnce(&Memory) -> Result<()>) -> Result<()> {
    let kind = AllocationKind { device: context.device().ordinal, handle_types, gpu_direct_rdma: false };
    let granule = context.call(|ops| ops.mem_granularity(kind))?;
    export(&Memory::create(context, granule, kind)?)
}

fn state(fabric: Result<Fabric>) -> Rung {
    match fabric {
        Ok(fabric) if fabric.is_complete() => rung(FABRIC_STATE, Ok(fabric.to_string())),
        Ok(fabric) => no(
            FABRIC_STATE,
            fabric.to_string(),
            "start nvidia-fabricmanager (or the rack's NVLink control) and wait for nvidia-smi -q to show Fabric: Completed",
        ),
        Err(e) => rung(FABRIC_STATE, Err(e)),
    }
}

/// What is not told does not stand in the way.
fn health(fabric: &Result<Fabric>) -> Rung {
    let health = fabric.as_ref().map_or(Health::Unknown, |fabric| fabric.health());
    match health {
        Health::Unknown | Health::Good => rung(FABRIC_HEALTH, Ok(health.to_string())),
        Health::Degraded(_) => no(
            FABRIC_HEALTH,
            health.to_string(),
            "see nvidia-smi -q (Fabric: Health) and the fabric manager's log, and drain or reset the GPU; until then use ipc or another transport",
        ),
    }
}

fn channel(folder: &Path) -> Rung {
    match open_channel(folder) {
        Ok(path) => rung(IMEX_CHANNEL, Ok(path.display().to_string())),
        Err(e) => no(
            IMEX_CHANNEL,
            format!("{}: {e}", folder.display()),
            "create a channel (nvidia-modprobe -c 0, or NVreg_CreateImexChannel0=1), run nvidia-imex, and give the channel's device to the container",
        ),
    }
}

/// The first channel that can be opened as the driver opens it.
fn open_channel(folder: &Path) -> io::Result<PathBuf> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no channel there");
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match fs::OpenOptions::new().read(true).write(true).open(&path) {
            Ok(_) => return Ok(path),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// The code says little: what it means here is known.
fn fabric_remedy(error: Error) -> Error {
    let remedy = match error.code() {
        Some(Code::Cuda(code::NOT_PERMITTED)) => {
            "make an IMEX channel usable by this process (see the rung above), then run nvidia-imex on every node"
        }
        Some(Code::Cuda(code::NOT_SUPPORTED | code::INVALID_VALUE)) => {
            "this GPU or driver has no fabric handles: use ipc on one host and rdma between hosts"
        }
        _ => return error,
    };
    error.with_remedy(remedy)
}

fn needed(name: &str) -> &'static str {
    match name {
        LIBCUDA => "libcuda.so.1 on the library path",
        DRIVER => "CUDA 12.2 (driver 535) or later",
        DEVICE => "the GPU visible to this process, not a MIG instance",
        VMM => "the attribute",
        POSIX_FD => "create and export one granule",
        FABRIC_ATTRIBUTE => "the attribute; it proves nothing",
        FABRIC_STATE => "registration completed with success; it proves nothing either",
        FABRIC_HEALTH => "nothing degraded, as far as NVML tells",
        IMEX_CHANNEL => "a channel device that opens for reading and writing",
        FABRIC => "create and export one granule",
        _ => "",
    }
}

fn rung(name: &'static str, found: Result<String>) -> Rung {
    let needed = needed(name);
    match found {
        Ok(found) => Rung { name, needed, found, ok: true, remedy: None },
        Err(e) => {
            let code = e.code().map(|code| format!(" ({code})")).unwrap_or_default();
            let found = format!("{}: {}{code}", e.op(), e.detail());
            Rung { name, needed, found, ok: false, remedy: e.remedy().map(str::to_owned) }
        }
    }
}

fn no(name: &'static str, found: impl Into<String>, remedy: &str) -> Rung {
    let needed = needed(name);
    Rung { name, needed, found: found.into(), ok: false, remedy: Some(remedy.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, FakeDevice};

    fn climbed(fake: &Fake, channels: &Path) -> Vec<Rung> {
        climbed_with(fake, channels, || Ok(Seen { mig: None, fabric: Ok(Fabric::completed(0)) }))
    }

    fn climbed_with(
        fake: &Fake,
        channels: &Path,
        nvml: impl Fn() -> Result<Seen> + Send + 'static,
    ) -> Vec<Rung> {
        let (fake, channels) = (fake.clone(), channels.to_owned());
        ladder_of(Duration::from_secs(10), move |say| {
            say(rung(LIBCUDA, Ok("found".into())));
            let ops = fake.ops();
            climb(
                &ops,
                || Ok(Device::all_of(&ops)?.remove(0)),
                Context::unshared,
                |_| nvml(),
                &channels,
                say,
            );
        })
    }

    fn failing(rungs: &[Rung]) -> Vec<&str> {
        rungs.iter().filter(|rung| !rung.ok).map(|rung| rung.name).collect()
    }

    #[test]
    fn every_rung_holds_where_everything_works_and_nothing_is_left() {
        let fake = Fake::new();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("channel0"), "").unwrap();
        let rungs = climbed(&fake, folder.path());
        assert_eq!(failing(&rungs), Vec::<&str>::new());
        assert_eq!(rungs.iter().map(|rung| rung.name).collect::<Vec<_>>(), RUNGS);
        assert!(holds(&rungs, FABRIC));
        assert_eq!(fake.leaks(), Vec::<String>::new());
    }

    #[test]
    fn a_degraded_fabric_is_not_ready_though_its_handles_are_given() {
        let fake = Fake::new();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("channel0"), "").unwrap();
        let with = |mask| {
            let seen = move || Ok(Seen { mig: None, fabric: Ok(Fabric::completed(mask)) });
            climbed_with(&fake, folder.path(), seen)
        };
        let rungs = with(1);
        assert_eq!(failing(&rungs), [FABRIC_HEALTH]);
        let Readiness::Unavailable { reason, remedy } = verdict(&rungs, FABRIC) else { panic!("ready") };
        assert_eq!(reason, "fabric health: degraded: degraded bandwidth");
        assert!(remedy.contains("nvidia-smi -q"), "{remedy}");
        assert_eq!(verdict(&rungs, POSIX_FD), Readiness::Ready, "ipc on one host");
        // Told to be well, and not told.
        for mask in [2, 0] {
            assert_eq!(verdict(&with(mask), FABRIC), Readiness::Ready);
        }
        let nowhere = || Err(Error::new(Kind::Unavailable, "dlopen", "no NVML"));
        let rungs = climbed_with(&fake, folder.path(), nowhere);
        assert_eq!(failing(&rungs), [FABRIC_STATE]);
        assert_eq!(
            verdict(&rungs, FABRIC),
            Readiness::Ready,
            "nothing is known of it, and the trial says yes"
        );
    }

    #[test]
    fn mig_that_only_nvml_knows_of_is_refused_with_the_reason() {
        let seen = || Ok(Seen { mig: Some("its MIG mode is on"), fabric: Ok(Fabric::completed(0)) });
        let rungs = climbed_with(&Fake::new(), Path::new("/nowhere"), seen);
        assert_eq!(failing(&rungs), RUNGS[2..]);
        let device = rungs.iter().find(|rung| rung.name == DEVICE).unwrap();
        assert!(device.found.contains("its MIG mode is on: it is a MIG instance"), "{device}");
        assert!(device.remedy.as_ref().unwrap().contains("nvidia-smi -mig 0"), "{device}");
    }

    #[test]
    fn a_claimed_attribute_is_not_believed() {
        let fake = Fake::new();
        fake.refuse_fabric();
        let rungs = climbed(&fake, Path::new("/nowhere/at/all"));
        assert_eq!(failing(&rungs), [IMEX_CHANNEL, FABRIC]);
        assert!(holds(&rungs, FABRIC_ATTRIBUTE));
        let last = rungs.last().unwrap();
        assert!(last.found.contains("CUDA_ERROR_NOT_PERMITTED"), "{last}");
        assert!(last.remedy.as_ref().unwrap().contains("IMEX channel"), "{last}");
        assert_eq!(fake.leaks(), Vec::<String>::new());
        let Readiness::Unavailable { reason, remedy } = verdict(&rungs, FABRIC) else { panic!("ready") };
        assert!(reason.starts_with("IMEX channel: /nowhere/at/all: No such file"), "{reason}");
        assert!(reason.contains("; FABRIC export: cuMemCreate: CUDA_ERROR_NOT_PERMITTED"), "{reason}");
        assert!(remedy.contains("nvidia-modprobe"), "{remedy}");
        assert_eq!(verdict(&rungs, POSIX_FD), Readiness::Ready);
        let unknown = no(FABRIC_STATE, "no NVML", "install NVML");
        let rungs: Vec<_> =
            rungs.into_iter().map(|r| if r.name == FABRIC_STATE { unknown.clone() } else { r }).collect();
        let Readiness::Unavailable { reason, remedy } = verdict(&rungs, FABRIC) else { panic!("ready") };
        assert!(reason.starts_with("fabric state: no NVML; IMEX channel:"), "{reason}");
        assert!(remedy.contains("nvidia-modprobe"), "{remedy}");
    }

    #[test]
    fn what_is_not_reached_says_so() {
        let fake = Fake::new();
        fake.set_driver_version(12_010);
        assert_eq!(failing(&climbed(&fake, Path::new("/nowhere"))), RUNGS[1..]);
        let mig = FakeDevice { without: vec![102], ..FakeDevice::default() };
        let rungs = climbed(&Fake::with_devices(vec![mig]), Path::new("/nowhere"));
        assert_eq!(failing(&rungs), RUNGS[3..]);
        assert!(rungs.last().unwrap().found.contains("not tried"));
    }

    #[test]
    fn a_driver_that_hangs_does_not_hang_the_probe() {
        let rungs = ladder_of(Duration::from_millis(20), |say| {
            say(rung(LIBCUDA, Ok("found".into())));
            thread::sleep(Duration::from_secs(2));
        });
        assert_eq!(failing(&rungs), RUNGS[1..]);
        assert!(rungs[1].found.contains("did not answer"));
        let Readiness::Unavailable { reason, .. } = verdict(&rungs, POSIX_FD) else { panic!("ready") };
        assert!(reason.contains("driver version: not tried: the driver did not answer"), "{reason}");
    }

    #[test]
    fn without_libcuda_the_ladder_says_what_to_install() {
        let rungs = ladder("cuda:0", Duration::from_secs(20));
        assert_eq!(rungs.len(), RUNGS.len());
        if !rungs[0].ok {
            assert_eq!(failing(&rungs), RUNGS);
            assert!(rungs[0].remedy.as_ref().unwrap().contains("NVIDIA driver"));
        }
    }
}
