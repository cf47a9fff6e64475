//! What works on this machine: every transport with its reason, every rung of every GPU, and what the host gives.
//!
//! Owns: the order of the questions and their deadline. It reports and never fails because something does not work: a
//! machine without a GPU is a finding.

pub mod peer;
mod rdma;

use crate::{
    config::{Memory, TRANSPORTS},
    network::Network,
    registry::{Registry, Settings},
};
use flashboot_core::{ArenaSpec, Kind, Result, TransportName};
use flashboot_cuda::{Device, bounded, probe};
use flashboot_memory::{HostArena, HostArenaConfig, PageKind, check_seals, pages::HugePages};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// What to look at.
#[derive(Debug, Clone)]
pub struct Request {
    /// One GPU by UUID, PCI address or `cuda:N`; `None`: every one that is visible.
    pub device: Option<String>,
    /// Where a directory for sockets would be made.
    pub directory: PathBuf,
    /// What crosses between hosts.
    pub network: Network,
    /// How long all of it may take. What was not reached by then says so.
    pub timeout: Duration,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// How many GPUs this process sees, whether or not they were looked at.
    pub visible: usize,
    /// The GPUs that were looked at.
    pub devices: Vec<Gpu>,
    /// The transports, in `auto`'s order.
    pub transports: Vec<TransportState>,
    /// What was looked for, in the order of need.
    pub checks: Vec<Check>,
    /// What works between this host and a peer; empty where none was asked for.
    pub paths: Vec<peer::Path>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Its number in this process, for `cuda:N`.
    pub number: usize,
    /// As the driver names the product.
    pub name: String,
    /// `GPU-…`.
    pub uuid: String,
    /// `0000:1b:00.0`.
    pub pci: String,
    /// The host NUMA node of its slot.
    pub numa_node: Option<u32>,
    /// Bytes of memory on the board.
    pub bytes: u64,
}

/// One transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TransportState {
    /// Its name.
    pub name: TransportName,
    /// Whether it serves any memory of this machine.
    pub ready: bool,
    /// What it serves, and what was found where it does not.
    pub reason: String,
    /// What to do; `None` where it serves everything it could.
    pub remedy: Option<String>,
    /// Each memory that was tried.
    pub memory: Vec<Served>,
}

/// One transport on one memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Served {
    /// `host`, or a GPU as it was named.
    pub memory: String,
    /// Whether it is served.
    pub ready: bool,
    /// Why not; `None` where it is.
    pub reason: Option<String>,
    /// What to do about it.
    pub remedy: Option<String>,
}

/// One thing that was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: &'static str,
    /// The GPU it is about, as it was named; `None`: the host.
    pub device: Option<String>,
    /// What must be there.
    pub needed: &'static str,
    /// What is.
    pub found: String,
    /// Whether that is enough.
    pub ok: bool,
    /// What to do when it is not.
    pub remedy: Option<String>,
}

/// Looks at this machine. Needs a tokio runtime with time, which should be shut down without waiting: a driver that
/// hangs keeps its thread.
///
/// # Errors
/// [`Kind::Invalid`] when `device` is no way to name a GPU. What does not work is in the answer instead.
pub async fn doctor(request: Request) -> Result<Diagnosis> {
    let until = Instant::now() + request.timeout;
    let seen = bounded("device", "an answer of the driver", left(until), Device::all).await;
    let visible = seen.as_ref().map_or(0, Vec::len);
    let (chosen, devices) = choose(seen, request.device.as_deref())?;
    let mut checks = Vec::new();
    let mut fabric_without_channel = Vec::new();
    for selector in &chosen {
        let limit = left(until);
        let at = selector.clone();
        // The ladder keeps its own deadline, and says then how far it came.
        let climb = move || Ok(probe::ladder(&at, limit));
        let rungs =
            bounded("probe", "an answer of the driver", limit + Duration::from_secs(1), climb).await?;
        let ok = |name| probe::holds(&rungs, name);
        if ok(probe::FABRIC_ATTRIBUTE) && !ok(probe::IMEX_CHANNEL) && !ok(probe::FABRIC) {
            let channel = rungs.iter().find(|rung| rung.name == probe::IMEX_CHANNEL);
            fabric_without_channel.push((selector.clone(), channel.and_then(|rung| rung.remedy.clone())));
        }
        for rung in rungs {
            // Library and driver are the host's: once is enough.
            let common = [probe::LIBCUDA, probe::DRIVER].contains(&rung.name);
            if common && checks.iter().any(|check: &Check| check.name == rung.name) {
                continue;
            }
            let above = || "mend what failed above it first".to_owned();
            checks.push(Check {
                name: rung.name,
                device: (!common).then(|| selector.clone()),
                needed: rung.needed,
                remedy: (!rung.ok).then(|| rung.remedy.unwrap_or_else(above)),
                found: rung.found,
                ok: rung.ok,
            });
        }
    }
    checks.extend(peers(&devices));
    checks.extend(host());
    checks.extend(rdma::checks(&request.network, &devices, until).await);
    let mut transports = Vec::new();
    for name in TRANSPORTS.into_iter().filter(|name| *name != TransportName::Mock) {
        let mut memory = Vec::new();
        let gpus = chosen.iter().map(|selector| Some(selector.as_str()));
        for device in std::iter::once(None).chain(gpus) {
            // What it says of host memory is enough where there is no GPU.
            if device.is_some() && devices.is_empty() && name != TransportName::Imex {
                continue;
            }
            memory.extend(served(name, device, &request.directory, &request.network, until).await);
        }
        if name == TransportName::Imex {
            memory.iter_mut().for_each(|served| name_the_channel(served, &fabric_without_channel));
        }
        transports.push(state(name, memory));
    }
    Ok(Diagnosis {
        visible,
        devices: devices.iter().map(|(number, device)| gpu(*number, device)).collect(),
        transports,
        checks,
        paths: Vec::new(),
    })
}

/// Says of a GPU that claims fabric handles and lacks the channel just that: the other rungs prove nothing.
fn name_the_channel(served: &mut Served, lacking: &[(String, Option<String>)]) {
    if let (Some((_, remedy)), Some(reason)) =
        (lacking.iter().find(|(gpu, _)| *gpu == served.memory), &mut served.reason)
    {
        *reason =
            format!("the GPU claims FABRIC handles, but this process can open no IMEX channel: {reason}");
        served.remedy = remedy.clone().or_else(|| served.remedy.take());
    }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

type Numbered = (usize, Device);

/// The GPUs to look at, by UUID; the one that is wanted, or the first, as it was named where it is not there, so that its
/// ladder says why.
fn choose(seen: Result<Vec<Device>>, wanted: Option<&str>) -> Result<(Vec<String>, Vec<Numbered>)> {
    let named = || vec![wanted.unwrap_or("cuda:0").to_owned()];
    let Ok(seen) = seen else { return Ok((named(), Vec::new())) };
    let mut devices: Vec<Numbered> = seen.into_iter().enumerate().collect();
    if let Some(wanted) = wanted {
        match Device::find(wanted) {
            Ok(found) => devices.retain(|(_, device)| device.uuid() == found.uuid()),
            Err(e) if e.kind() == Kind::Invalid => return Err(e),
            Err(_) => devices.clear(),
        }
    }
    if devices.is_empty() {
        return Ok((named(), devices));
    }
    Ok((devices.iter().map(|(_, device)| device.uuid().to_owned()).collect(), devices))
}

fn gpu(number: usize, device: &Device) -> Gpu {
    Gpu {
        number,
        name: device.name().to_owned(),
        uuid: device.uuid().to_owned(),
        pci: device.pci_address().to_owned(),
        numa_node: device.numa_node(),
        bytes: device.total_memory(),
    }
}

/// One transport on host memory or on one GPU's; `None` where it has nothing to do with that memory.
async fn served(
    name: TransportName,
    device: Option<&str>,
    directory: &Path,
    network: &Network,
    until: Instant,
) -> Option<Served> {
    let settings = Settings {
        // It need not be there: the probe asks whether it could be made.
        sockets: directory.join("flashboot-doctor"),
        memory: Memory::default(),
        device: device.map(str::to_owned),
        network: network.clone(),
    };
    let mut memory = device.unwrap_or("host").to_owned();
    let registry = match Registry::standard(&settings) {
        Ok(registry) => registry,
        Err(e) => return Some(refused(memory, e.detail().to_owned(), e.remedy().unwrap_or_default())),
    };
    match (registry.carries(name), device) {
        (true, _) if registry.serves(name, &settings) => {}
        // What is not there serves no memory: once is enough.
        (false, None) => "any".clone_into(&mut memory),
        _ => return None,
    }
    let asked = registry.probe(name, &settings);
    Some(match tokio::time::timeout(left(until), asked).await {
        Ok(Ok(())) => Served { memory, ready: true, reason: None, remedy: None },
        Ok(Err(passed)) => refused(memory, passed.reason, &passed.remedy),
        Err(_) => refused(memory, "the time for all of it was up".into(), "see the checks; raise --timeout"),
    })
}

fn refused(memory: String, reason: String, remedy: &str) -> Served {
    let remedy = if remedy.is_empty() { "see the reason" } else { remedy };
    Served { memory, ready: false, reason: Some(reason), remedy: Some(remedy.to_owned()) }
}

fn state(name: TransportName, memory: Vec<Served>) -> TransportState {
    let works: Vec<_> = memory.iter().filter(|m| m.ready).map(|m| m.memory.as_str()).collect();
    let fails = memory.iter().filter(|m| !m.ready);
    let mut reasons = Vec::new();
    if !works.is_empty() {
        reasons.push(format!("serves memory of {}", works.join(", ")));
    }
    for failed in fails {
        let reason = failed.reason.as_deref().unwrap_or_default();
        // Of a transport that is not there, all memory says the same.
        let text = if memory.len() == 1 { reason.to_owned() } else { format!("{}: {reason}", failed.memory) };
        if !reasons.iter().any(|said: &String| said.ends_with(reason)) {
            reasons.push(text);
        }
    }
    TransportState {
        name,
        ready: !works.is_empty(),
        reason: reasons.join("; "),
        remedy: memory.iter().find_map(|m| m.remedy.clone()),
        memory,
    }
}

/// Whether every GPU maps every other's memory: what a chain over several needs.
fn peers(devices: &[Numbered]) -> Option<Check> {
    if devices.len() < 2 {
        return None;
    }
    let mut apart = Vec::new();
    for (a, one) in devices {
        for (b, other) in devices.iter().filter(|(b, _)| a != b) {
            match one.can_map(other) {
                Ok(true) => {}
                Ok(false) => apart.push(format!("cuda:{a} cannot map cuda:{b}")),
                Err(e) => apart.push(format!("cuda:{a}, cuda:{b}: {}", e.detail())),
            }
        }
    }
    let ok = apart.is_empty();
    let found = if ok { format!("{} GPUs, every pair", devices.len()) } else { apart.join("; ") };
    let remedy = "put clones on GPUs that reach one another, or see what nvidia-smi topo -p2p r says";
    Some(Check {
        name: "peer access",
        device: None,
        needed: "every GPU maps every other's memory",
        found,
        ok,
        remedy: (!ok).then(|| remedy.to_owned()),
    })
}

/// What the host gives.
fn host() -> Vec<Check> {
    vec![sealing(), huge_pages(), memlock()]
}

fn sealing() -> Check {
    let config = HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() };
    let made = HostArena::create(ArenaSpec { payload: 0, shards: 1 }, &config);
    let found = made.and_then(|(arena, _)| check_seals(&*arena));
    let (ok, remedy) = (found.is_ok(), "allow memfd_create (a seccomp profile may forbid it)");
    Check {
        name: "memfd sealing",
        device: None,
        needed: "a memfd that takes the seals of a host arena",
        found: found.map_or_else(|e| format!("{}: {}", e.op(), e.detail()), |()| "sealed".to_owned()),
        ok,
        remedy: (!ok).then(|| remedy.to_owned()),
    }
}

fn huge_pages() -> Check {
    let pages = HugePages::read(None);
    let ok = pages.is_some_and(|pages| pages.available > 0);
    let remedy = "reserve some (sysctl vm.nr_hugepages=N); without them arenas in host memory use base pages, and pinning \
                  takes twice as long";
    Check {
        name: "huge pages",
        device: None,
        needed: "as many as host arenas have, free or by overcommit; base pages work too",
        found: pages.map_or_else(
            || "this kernel has none".to_owned(),
            |p| format!("{} of {} available, {} KiB each", p.available, p.total, p.bytes >> 10),
        ),
        ok,
        remedy: (!ok).then(|| remedy.to_owned()),
    }
}

fn memlock() -> Check {
    /// A window of pinned slabs.
    const ENOUGH: u64 = 1 << 30;
    let limit = getrlimit(Resource::Memlock).current;
    let ok = limit.is_none_or(|bytes| bytes >= ENOUGH);
    let remedy =
        "ulimit -l unlimited, LimitMEMLOCK=infinity for a service, or --ulimit memlock=-1 for a container";
    Check {
        name: "memlock",
        device: None,
        needed: "1 GiB or more to lock host memory; ipc does without",
        found: limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10)),
        ok,
        remedy: (!ok).then(|| remedy.to_owned()),
    }
}
