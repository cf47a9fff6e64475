//! What the processes of one simulated host share: how much of each device's memory is taken, and the IMEX domain.
//!
//! `DIR/device-N/ID` is an allocation: a file whose content is its size, with a shared `flock` of every process that
//! has a handle or a mapping. The kernel drops a lock with its process, so a killed one needs no clean-up: an
//! entry that nobody has locked is dead, and whoever finds it removes it. `DIR/lock` makes looking and
//! entering one step. `DIR/imex/`, where it exists, is the IMEX domain (it may be a link to a folder that several
//! simulated hosts share): fabric memory is a file there. Never run on hardware.

use crate::{abi::code, loud};
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// What the driver itself takes of a device.
const DRIVERS_OWN: usize = 16 << 20;

/// The shared state of one simulated host.
#[derive(Debug)]
pub(crate) struct Host {
    dir: PathBuf,
    memory: usize,
    /// Distinguishes this host's devices from another's.
    identity: [u8; 32],
}

/// Memory that is accounted for as long as this lives.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Holds the lock.
    _entry: File,
}

fn or_stop<T>(what: &str, result: io::Result<T>) -> T {
    result.unwrap_or_else(|e| loud::stop(&format!("{what}: {e}")))
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl Host {
    /// Opens or makes the state.
    pub(crate) fn open(dir: &Path, devices: usize, memory: usize) -> Self {
        for device in 0..devices {
            or_stop("the shared directory", fs::create_dir_all(dir.join(format!("device-{device}"))));
        }
        let dir = or_stop("the shared directory", dir.canonicalize());
        let identity = *blake3::hash(dir.as_os_str().as_encoded_bytes()).as_bytes();
        Self { dir, memory, identity }
    }

    /// A device's UUID: its own for every host and index, the same in every process.
    pub(crate) fn uuid(&self, device: usize) -> [u8; 16] {
        let mut input = self.identity.to_vec();
        input.extend(device.to_le_bytes());
        let mut uuid = [0; 16];
        uuid.iter_mut().zip(blake3::hash(&input).as_bytes()).for_each(|(to, from)| *to = *from);
        uuid
    }

    fn locked<T>(&self, body: impl FnOnce() -> T) -> T {
        let lock = or_stop("the shared lock", open(&self.dir.join("lock")));
        or_stop("the shared lock", flock(&lock, FlockOperation::LockExclusive).map_err(io::Error::from));
        body()
    }

    fn folder(&self, device: usize) -> PathBuf {
        self.dir.join(format!("device-{device}"))
    }

    /// Bytes taken of a device; removes entries whose processes are gone.
    fn used(&self, device: usize) -> usize {
        let entries = or_stop("the shared directory", fs::read_dir(self.folder(device)));
        entries
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let mut file = File::open(&path).ok()?;
                let mut text = String::new();
                file.read_to_string(&mut text).ok()?;
                let (size, fabric) = text.split_once(' ')?;
                // The memory of a fabric handle outlives its entry's process in the file's own readers.
                let watched = if fabric.is_empty() { Some(file) } else { File::open(fabric).ok() };
                let dead =
                    watched.is_none_or(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok());
                if dead {
                    // Another process may have been as fast; it is gone either way.
                    let _ = fs::remove_file(&path);
                    if !fabric.is_empty() {
                        let _ = fs::remove_file(fabric);
                    }
                    return None;
                }
                size.parse::<usize>().ok()
            })
            .sum()
    }

    /// Free and total bytes of a device.
    pub(crate) fn info(&self, device: usize) -> (usize, usize) {
        let used = self.locked(|| self.used(device));
        (self.memory.saturating_sub(used + DRIVERS_OWN), self.memory)
    }

    /// Takes memory of a device under a fresh name, or OUT_OF_MEMORY.
    pub(crate) fn take(
        &self,
        device: usize,
        name: &str,
        size: usize,
        fabric: Option<&Fabric>,
    ) -> Result<Taken, u32> {
        self.locked(|| {
            let free = self.memory.saturating_sub(self.used(device) + DRIVERS_OWN);
            if size > free {
                return Err(code::OUT_OF_MEMORY);
            }
            Ok(self.enter(device, name, size, fabric.map(|f| f.path.as_path())))
        })
    }

    /// Shares memory that another process took. Where the entry is gone with its process, it is made again.
    pub(crate) fn share(&self, device: usize, name: &str, size: usize) -> Taken {
        self.locked(|| self.enter(device, name, size, None))
    }

    fn enter(&self, device: usize, name: &str, size: usize, fabric: Option<&Path>) -> Taken {
        let mut entry = or_stop("an allocation's entry", open(&self.folder(device).join(name)));
        or_stop("an allocation's entry", flock(&entry, FlockOperation::LockShared).map_err(io::Error::from));
        let text = format!("{size} {}", fabric.map(Path::display).map(|p| p.to_string()).unwrap_or_default());
        or_stop("an allocation's entry", entry.write_all(text.as_bytes()));
        Taken { _entry: entry }
    }

    /// A new fabric allocation's file, or NOT_PERMITTED where there is no channel (row `create-fabric`).
    pub(crate) fn fabric_new(&self, name: &str, size: usize) -> Result<Fabric, u32> {
        let folder = self.dir.join("imex").canonicalize().map_err(|_| code::NOT_PERMITTED)?;
        let path = folder.join(name);
        let file = open(&path).map_err(|_| code::NOT_PERMITTED)?;
        file.set_len(size as u64).map_err(|_| code::OUT_OF_MEMORY)?;
        or_stop("fabric memory", flock(&file, FlockOperation::LockShared).map_err(io::Error::from));
        Ok(Fabric { path, file })
    }

    /// The name of a fabric allocation, where a path is its file.
    pub(crate) fn fabric_name(&self, path: &Path) -> Option<String> {
        let folder = self.dir.join("imex").canonicalize().ok()?;
        let name = path.strip_prefix(folder).ok()?.to_str()?;
        (!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| name.to_owned())
    }

    /// Which device of this host a fabric allocation is of; none: another host's, or nobody here knows it any more.
    pub(crate) fn fabric_device(&self, name: &str) -> Option<usize> {
        (0..)
            .map(|device| (device, self.folder(device)))
            .take_while(|(_, folder)| folder.is_dir())
            .find_map(|(device, folder)| folder.join(name).exists().then_some(device))
    }

    /// The file of a peer's fabric allocation.
    pub(crate) fn fabric_open(&self, name: &str) -> Result<Fabric, u32> {
        let folder = self.dir.join("imex").canonicalize().map_err(|_| code::NOT_PERMITTED)?;
        let path = folder.join(name);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|_| code::INVALID_HANDLE)?;
        // Memory that nobody holds any more is gone, whether or not its file was tidied away.
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Err(code::INVALID_HANDLE);
        }
        or_stop("fabric memory", flock(&file, FlockOperation::LockShared).map_err(io::Error::from));
        Ok(Fabric { path, file })
    }
}

/// Fabric memory's file, locked by whoever has it open.
#[derive(Debug)]
pub(crate) struct Fabric {
    path: PathBuf,
    pub(crate) file: File,
}

impl Fabric {
    /// From a descriptor that its exporter locked.
    pub(crate) fn new(path: PathBuf, fd: OwnedFd) -> Self {
        Self { path, file: fd.into() }
    }

    /// It was never used.
    pub(crate) fn remove(&self) {
        // Nobody else knows it.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: usize = 64 << 20;

    #[test]
    fn memory_is_counted_over_all_openings_until_the_last_holder_goes() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (Host::open(dir.path(), 1, MEMORY), Host::open(dir.path(), 1, MEMORY));
        let taken = one.take(0, "a", 8 << 20, None).unwrap();
        let shared = other.share(0, "a", 8 << 20);
        assert_eq!(other.info(0), (MEMORY - DRIVERS_OWN - (8 << 20), MEMORY));
        assert_eq!(other.take(0, "b", 48 << 20, None).unwrap_err(), code::OUT_OF_MEMORY);
        drop(taken);
        assert_eq!(one.info(0).0, MEMORY - DRIVERS_OWN - (8 << 20));
        drop(shared);
        assert_eq!(one.info(0).0, MEMORY - DRIVERS_OWN);
    }

    #[test]
    fn uuids_differ_by_host_and_device_and_stay() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (a, b) = (Host::open(a.path(), 2, MEMORY), Host::open(b.path(), 2, MEMORY));
        assert_ne!(a.uuid(0), a.uuid(1));
        assert_ne!(a.uuid(0), b.uuid(0));
        assert_eq!(a.uuid(0), a.uuid(0));
    }

    #[test]
    fn without_a_domain_fabric_memory_is_not_permitted() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::open(dir.path(), 1, MEMORY);
        assert_eq!(host.fabric_new("a", 4096).unwrap_err(), code::NOT_PERMITTED);
        fs::create_dir(dir.path().join("imex")).unwrap();
        let memory = host.fabric_new("a", 4096).unwrap();
        assert!(host.fabric_open("a").is_ok());
        drop(memory);
        assert_eq!(host.fabric_open("a").unwrap_err(), code::INVALID_HANDLE);
    }

    #[test]
    fn fabric_memory_has_a_device_on_its_own_host_only() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (host, other) = (Host::open(here.path(), 2, MEMORY), Host::open(there.path(), 2, MEMORY));
        fs::create_dir(here.path().join("imex")).unwrap();
        std::os::unix::fs::symlink(here.path().join("imex"), there.path().join("imex")).unwrap();
        let memory = host.fabric_new("a", 4096).unwrap();
        let _taken = host.take(1, "a", 4096, Some(&memory)).unwrap();
        assert_eq!((host.fabric_device("a"), other.fabric_device("a")), (Some(1), None));
        assert!(other.fabric_open("a").is_ok());
    }
}
