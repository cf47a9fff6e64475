//! Virtual memory: memory, addresses, mappings, access.
//!
//! A device address is never readable by the host: its range stays PROT_NONE, and the stand-in reaches the memory
//! through a mapping of its own, whose protection is the access that was set.

use crate::{
    abi::{ACCESS_READ, ACCESS_READ_WRITE, AccessDesc, AllocationProp, FABRIC, LOCATION_DEVICE, POSIX_FD},
    abi::{PINNED, code},
    host::{Fabric, Taken},
    loud,
    work::{Place, Touch},
    world::{State, World, fresh, was_given},
};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    ptr,
    sync::Arc,
};

/// Row `granularity`.
pub(crate) const GRANULE: usize = 2 << 20;
/// dma-buf ranges are whole pages of the host.
const PAGE: usize = 4096;
/// A descriptor of ours is known by its memfd's name: this, the host, the device and a random name.
const MARK: &str = "flashboot-cuda-sim";
const FABRIC_MARK: &[u8; 8] = b"FBSIMFAB";

/// Memory, addresses and mappings.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    handles: BTreeMap<u64, Arc<Memory>>,
    /// Start to size.
    reservations: BTreeMap<u64, usize>,
    mappings: BTreeMap<u64, Mapping>,
    /// Devices of the host that are gone.
    lost: BTreeSet<usize>,
}

/// Physical memory, here or imported.
#[derive(Debug)]
struct Memory {
    /// The same in every process.
    name: String,
    size: usize,
    /// Its device's index on this host; none for another host's.
    device: Option<usize>,
    types: u32,
    imported: bool,
    backing: Backing,
    _taken: Option<Taken>,
}

#[derive(Debug)]
enum Backing {
    Fd(OwnedFd),
    Fabric(Fabric),
}

impl Memory {
    fn fd(&self) -> BorrowedFd<'_> {
        match &self.backing {
            Backing::Fd(fd) => fd.as_fd(),
            Backing::Fabric(fabric) => fabric.file.as_fd(),
        }
    }
}

#[derive(Debug)]
struct Mapping {
    name: u64,
    handle: u64,
    memory: Arc<Memory>,
    /// Where the stand-in reaches it.
    alias: usize,
    /// By ordinal.
    access: BTreeMap<i32, u32>,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the alias is this mapping's own, of that size, and no pending work needs it: `unmap` looked.
        let gone = unsafe { munmap(ptr::with_exposed_provenance_mut(self.alias), self.memory.size) };
        if gone.is_err() {
            loud::stop("munmap of a mapping failed");
        }
    }
}

fn whole(size: usize) -> bool {
    size > 0 && size.is_multiple_of(GRANULE)
}

fn random_name() -> String {
    let mut bytes = [0_u8; 12];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(bytes.len()) {
        loud::stop("no random numbers");
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// This host, in descriptors' names: one of another host is as foreign as any.
fn host_name(world: &World) -> String {
    world.host.uuid(usize::MAX).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

fn memfd(world: &World, device: usize, name: &str, size: usize) -> OwnedFd {
    let full = format!("{MARK}:{}:{device}:{name}", host_name(world));
    let made = memfd_create(full, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).and_then(|fd| {
        ftruncate(&fd, size as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    });
    made.unwrap_or_else(|e| loud::stop(&format!("memfd of {size} bytes: {e}")))
}

impl Vmm {
    /// Rows `create-sizes`, `create-bad-properties`, `create-too-large`, `create-fabric`. Stricter: handle types
    /// that are none are refused.
    pub(crate) fn create(
        &mut self,
        world: &World,
        size: usize,
        prop: Option<&AllocationProp>,
        flags: u64,
    ) -> Result<u64, u32> {
        let prop = prop.ok_or(code::INVALID_VALUE)?;
        if flags != 0 || prop.kind != PINNED || prop.location.kind != LOCATION_DEVICE {
            return Err(code::INVALID_VALUE);
        }
        if prop.handle_types & !(POSIX_FD | FABRIC) != 0 {
            return Err(code::INVALID_VALUE);
        }
        let (_, device) = world.device(prop.location.id)?;
        if !whole(size) {
            return Err(code::INVALID_VALUE);
        }
        let device = device.physical;
        let name = random_name();
        let fabric =
            if prop.handle_types & FABRIC != 0 { Some(world.host.fabric_new(&name, size)?) } else { None };
        let taken = world.host.take(device, &name, size, fabric.as_ref());
        if let (Err(_), Some(fabric)) = (&taken, &fabric) {
            fabric.remove();
        }
        let taken = taken?;
        let backing = match fabric {
            Some(fabric) => Backing::Fabric(fabric),
            None => Backing::Fd(memfd(world, device, &name, size)),
        };
        Ok(self.hold(Memory {
            name,
            size,
            device: Some(device),
            types: prop.handle_types,
            imported: false,
            backing,
            _taken: Some(taken),
        }))
    }

    /// Memory of that device of the host is gone.
    pub(crate) fn lose(&mut self, physical: usize) {
        self.lost.insert(physical);
    }

    fn is_gone(&self, memory: &Memory) -> bool {
        memory.device.is_some_and(|device| self.lost.contains(&device))
    }

    /// Whether any of it is memory of a device that is gone.
    pub(crate) fn is_lost(&self, touches: &[Touch]) -> bool {
        touches.iter().any(|touch| match touch {
            Touch::Handle(handle) => {
                // The handle may be released while its memory is mapped.
                self.mappings.values().any(|one| one.handle == *handle && self.is_gone(&one.memory))
            }
            _ => false,
        })
    }

    fn hold(&mut self, memory: Memory) -> u64 {
        let handle = fresh();
        self.handles.insert(handle, Arc::new(memory));
        handle
    }

    /// A handle; where the driver crashes, so does this, with words (rows `map-garbage-handle`,
    /// `map-released-handle`, `export-garbage`).
    fn handle(&self, handle: u64) -> Result<Arc<Memory>, u32> {
        // Row `export-zero`.
        if handle == 0 {
            return Err(code::INVALID_VALUE);
        }
        let memory = self.handles.get(&handle);
        Ok(Arc::clone(memory.unwrap_or_else(|| {
            loud::stop(&format!("{handle:#x} is no memory handle, or one that was released"))
        })))
    }

    /// Row `export-private`, `export-bad`, `import-exported-again`, `export-fabric-of-fd-memory`.
    fn exportable(&self, handle: u64, kind: u32, flags: u64) -> Result<Arc<Memory>, u32> {
        let memory = self.handle(handle)?;
        if flags != 0 || memory.imported || !kind.is_power_of_two() || memory.types & kind == 0 {
            return Err(code::INVALID_VALUE);
        }
        Ok(memory)
    }

    /// A descriptor of its own for each call (row `export-twice`).
    pub(crate) fn export_fd(&self, handle: u64, flags: u64) -> Result<OwnedFd, u32> {
        let memory = self.exportable(handle, POSIX_FD, flags)?;
        memory.fd().try_clone_to_owned().map_err(|_| code::OPERATING_SYSTEM)
    }

    /// 64 bytes that name a file of the domain. Never run on hardware.
    pub(crate) fn export_fabric(&self, handle: u64, flags: u64) -> Result<[u8; 64], u32> {
        let memory = self.exportable(handle, FABRIC, flags)?;
        let mut bytes = [0; 64];
        let text = FABRIC_MARK.iter().chain(memory.name.as_bytes());
        bytes.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
        Ok(bytes)
    }

    /// Row `import-garbage-fd`: UNKNOWN for what is none of ours. Rows `import-keeps-fd`, `import-own`,
    /// `fd-after-exporter-released`.
    pub(crate) fn import_fd(&mut self, world: &World, fd: i32) -> Result<u64, u32> {
        let link = fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| code::UNKNOWN)?;
        let text = link.to_str().ok_or(code::UNKNOWN)?;
        if let Some(name) = world.host.fabric_name(&link) {
            // SAFETY: /proc just showed that the descriptor is open; the program keeps it so during the call.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let fd = fd.try_clone_to_owned().map_err(|_| code::UNKNOWN)?;
            return self.hold_fabric(world, Fabric::new(link.clone(), fd), name, POSIX_FD);
        }
        let ours = text.strip_prefix("/memfd:").and_then(|rest| rest.strip_suffix(" (deleted)"));
        let parts: Vec<&str> = ours.unwrap_or_default().split(':').collect();
        let [mark, host, device, name] = *parts.as_slice() else { return Err(code::UNKNOWN) };
        if mark != MARK || host != host_name(world) {
            return Err(code::UNKNOWN);
        }
        let device: usize = device.parse().map_err(|_| code::UNKNOWN)?;
        // SAFETY: /proc just showed that the descriptor is open; the program keeps it so during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let fd = fd.try_clone_to_owned().map_err(|_| code::UNKNOWN)?;
        let size = rustix::fs::fstat(&fd).map_err(|_| code::UNKNOWN)?.st_size as usize;
        let taken = world.host.share(device, name, size);
        Ok(self.hold(Memory {
            name: name.to_owned(),
            size,
            device: Some(device),
            types: POSIX_FD,
            imported: true,
            backing: Backing::Fd(fd),
            _taken: Some(taken),
        }))
    }

    /// Row `import-fabric-garbage`; the rest was never run on hardware.
    pub(crate) fn import_fabric(&mut self, world: &World, bytes: &[u8; 64]) -> Result<u64, u32> {
        let Some(rest) = bytes.strip_prefix(FABRIC_MARK) else { return Err(code::NOT_SUPPORTED) };
        let name: Vec<u8> = rest.iter().copied().take_while(|byte| *byte != 0).collect();
        if name.is_empty() || !name.iter().all(u8::is_ascii_hexdigit) {
            return Err(code::INVALID_VALUE);
        }
        let name = String::from_utf8(name).map_err(|_| code::INVALID_VALUE)?;
        let fabric = world.host.fabric_open(&name)?;
        self.hold_fabric(world, fabric, name, FABRIC)
    }

    /// A peer's fabric memory, by whatever handle it came.
    fn hold_fabric(&mut self, world: &World, fabric: Fabric, name: String, types: u32) -> Result<u64, u32> {
        let size = fabric.file.metadata().map_err(|_| code::UNKNOWN)?.len() as usize;
        Ok(self.hold(Memory {
            device: world.host.fabric_device(&name),
            name,
            size,
            types,
            imported: true,
            backing: Backing::Fabric(fabric),
            _taken: None,
        }))
    }

    /// Rows `reserve-sizes` and `reserve-alignment`.
    pub(crate) fn reserve(&mut self, size: usize, align: usize, at: u64, flags: u64) -> Result<u64, u32> {
        let align = align.max(GRANULE);
        if flags != 0 || !whole(size) || !align.is_power_of_two() {
            return Err(code::INVALID_VALUE);
        }
        let start = reserve_at(at, size).map_or_else(|| reserve_anywhere(size, align), Ok)?;
        self.reservations.insert(start, size);
        Ok(start)
    }

    /// Rows `address-free-part`, `address-free-unknown`, `address-free-twice`, `address-free-while-mapped`.
    pub(crate) fn free(&mut self, at: u64, size: usize) -> Result<(), u32> {
        if self.reservations.get(&at) != Some(&size) || self.mapped_in(at, size).is_some() {
            return Err(code::INVALID_VALUE);
        }
        self.reservations.remove(&at);
        // SAFETY: the range is a reservation of ours without mappings, and nobody can follow its addresses.
        let gone = unsafe { munmap(ptr::with_exposed_provenance_mut(at as usize), size) };
        gone.map_err(|_| code::OPERATING_SYSTEM)
    }

    fn mapped_in(&self, at: u64, size: usize) -> Option<&Mapping> {
        let end = at.saturating_add(size as u64);
        let (start, last) = self.mappings.range(..end).next_back()?;
        (start + last.memory.size as u64 > at).then_some(last)
    }

    /// Rows `map-part-of-handle`, `map-beyond-handle`, `map-offset`, `map-misaligned`, `map-unreserved`,
    /// `map-over-mapping`, `map-twice-elsewhere`, `import-size`. Stricter than `map-across-reservations`: a
    /// mapping lies in one reservation.
    pub(crate) fn map(
        &mut self,
        at: u64,
        size: usize,
        offset: usize,
        handle: u64,
        flags: u64,
    ) -> Result<(), u32> {
        if at == 0 || size == 0 || flags != 0 || !at.is_multiple_of(GRANULE as u64) {
            return Err(code::INVALID_VALUE);
        }
        let inside = self
            .reservations
            .range(..=at)
            .next_back()
            .is_some_and(|(start, length)| at.saturating_add(size as u64) <= start + *length as u64);
        let memory = self.handle(handle)?;
        if !inside {
            return Err(code::INVALID_VALUE);
        }
        if size != memory.size || offset != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        if self.mapped_in(at, size).is_some() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let alias =
            unsafe { mmap(ptr::null_mut(), size, ProtFlags::empty(), MapFlags::SHARED, memory.fd(), 0) };
        let alias = alias.map_err(|_| code::MAP_FAILED)?.expose_provenance();
        self.mappings.insert(at, Mapping { name: fresh(), handle, memory, alias, access: BTreeMap::new() });
        Ok(())
    }

    /// The mapping that begins at `at` and is as large. Stricter than rows `unmap-two-at-once`, `unmap-twice`,
    /// `access-two-mappings`: not several, and not what is unmapped already.
    fn exactly(&mut self, at: u64, size: usize) -> Result<&mut Mapping, u32> {
        let mapping = self.mappings.get_mut(&at).ok_or(code::INVALID_VALUE)?;
        // Rows `unmap-part` and `access-part`.
        if mapping.memory.size == size { Ok(mapping) } else { Err(code::INVALID_VALUE) }
    }

    /// The place of a range that lies in one mapping, as a device sees it (rows `copy-past-end`, `copy-nowhere`,
    /// `copy-no-access`, `access-none`, `access-read-own`, `import-read-only`,
    /// `copy-no-access-of-other-device`). Stricter than `copy-across-mappings`.
    pub(crate) fn resolve(
        &self,
        at: u64,
        size: usize,
        device: usize,
        write: bool,
    ) -> Result<(Place, [Touch; 2]), u32> {
        let (start, mapping) = self.mappings.range(..=at).next_back().ok_or(code::INVALID_VALUE)?;
        let offset = (at - start) as usize;
        if offset.checked_add(size).is_none_or(|end| end > mapping.memory.size) {
            return Err(code::INVALID_VALUE);
        }
        let allowed = i32::try_from(device).ok().and_then(|device| mapping.access.get(&device).copied());
        let needed = if write { ACCESS_READ_WRITE } else { ACCESS_READ };
        if allowed.unwrap_or(0) & needed != needed {
            return Err(code::INVALID_VALUE);
        }
        let touches = [Touch::Mapping(mapping.name), Touch::Handle(mapping.handle)];
        Ok((Place(mapping.alias + offset), touches))
    }

    /// Rows `dma-buf` and `dma-buf-ranges`. From the start of a mapping on, a stand-in for a card may map the descriptor: it
    /// is of the memory itself, so that, unlike a driver's, it could be imported as well. From elsewhere it stands for one,
    /// and nothing can be done with it.
    pub(crate) fn dma_buf(&self, at: u64, size: usize, kind: u32, flags: u64) -> Result<OwnedFd, u32> {
        let end = at.checked_add(size as u64).ok_or(code::INVALID_VALUE)?;
        let below = self.mappings.range(..=at).next_back();
        let inside = below.filter(|(start, mapping)| end <= *start + mapping.memory.size as u64);
        let whole = size > 0 && size.is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64);
        let (start, mapping) =
            inside.filter(|_| kind == 1 && flags <= 1 && whole).ok_or(code::INVALID_VALUE)?;
        if *start == at {
            return mapping.memory.fd().try_clone_to_owned().map_err(|_| code::OPERATING_SYSTEM);
        }
        memfd_create("flashboot-cuda-sim-dma-buf", MemfdFlags::CLOEXEC).map_err(|_| code::OPERATING_SYSTEM)
    }
}

impl State {
    fn must_be_free(&self, call: &str, touch: &Touch) {
        if let Some(what) = self.streams.pending(touch) {
            loud::stop(&format!("{call} while {what} is pending on the same memory"));
        }
    }

    /// Rows `release-zero`, `release-garbage`, `release-twice`, `released-memory-stays-while-mapped`. Stricter than
    /// `release-under-pending-copy`.
    pub(crate) fn mem_release(&mut self, handle: u64) -> Result<(), u32> {
        if !self.vmm.handles.contains_key(&handle) {
            if handle == 0 || was_given(handle) {
                return Err(code::INVALID_VALUE);
            }
            loud::stop(&format!("{handle:#x} is no memory handle"));
        }
        self.must_be_free("cuMemRelease", &Touch::Handle(handle));
        let memory = self.vmm.handles.remove(&handle);
        self.answer_for(memory.is_some_and(|memory| self.vmm.is_gone(&memory)))
    }

    /// Stricter than row `unmap-under-pending-copy`, where the context is poisoned later.
    pub(crate) fn mem_unmap(&mut self, at: u64, size: usize) -> Result<(), u32> {
        let name = self.vmm.exactly(at, size)?.name;
        self.must_be_free("cuMemUnmap", &Touch::Mapping(name));
        let mapping = self.vmm.mappings.remove(&at);
        self.answer_for(mapping.is_some_and(|mapping| self.vmm.is_gone(&mapping.memory)))
    }

    /// Teardown of memory whose device is gone is done and says that it is not: stricter than row `poison-every-call`,
    /// where the device is there. Never run on hardware.
    fn answer_for(&self, gone: bool) -> Result<(), u32> {
        if gone { Err(code::LAUNCH_FAILED) } else { Ok(()) }
    }

    /// Rows `access-part`, `access-unmapped`, `access-bad`, `access-changes`. Stricter than
    /// `access-change-under-pending-copy`.
    pub(crate) fn set_access(
        &mut self,
        world: &World,
        at: u64,
        size: usize,
        descs: &[AccessDesc],
    ) -> Result<(), u32> {
        let name = self.vmm.exactly(at, size)?.name;
        for desc in descs {
            let known = matches!(desc.flags, 0 | ACCESS_READ | ACCESS_READ_WRITE);
            if !known || desc.location.kind != LOCATION_DEVICE {
                return Err(code::INVALID_VALUE);
            }
            // Row `access-bad`.
            let (_, device) = world.device(desc.location.id).map_err(|_| code::INVALID_VALUE)?;
            let own = self.vmm.exactly(at, size)?.memory.device;
            // A host without peer access. Never run on hardware; the manual lists INVALID_DEVICE.
            if own.is_some_and(|own| own != device.physical) && !world.config.p2p {
                return Err(code::INVALID_DEVICE);
            }
        }
        self.must_be_free("cuMemSetAccess", &Touch::Mapping(name));
        let mapping = self.vmm.exactly(at, size)?;
        for desc in descs {
            mapping.access.insert(desc.location.id, desc.flags);
        }
        let protection = match mapping.access.values().fold(0, |all, flags| all | flags) {
            0 => MprotectFlags::empty(),
            ACCESS_READ => MprotectFlags::READ,
            _ => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        let alias = ptr::with_exposed_provenance_mut(mapping.alias);
        // SAFETY: the alias is this mapping's own, of that size, and no pending work uses it.
        unsafe { mprotect(alias, size, protection) }.map_err(|_| code::OPERATING_SYSTEM)
    }
}

fn reserve_at(at: u64, size: usize) -> Option<u64> {
    if at == 0 || !at.is_multiple_of(GRANULE as u64) {
        return None;
    }
    let hint = ptr::with_exposed_provenance_mut(at as usize);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: nothing that is mapped is replaced.
    let got = unsafe { mmap_anonymous(hint, size, ProtFlags::empty(), flags) }.ok()?;
    (got == hint).then_some(at)
}

/// Reserves with room to align, and gives the rest back.
fn reserve_anywhere(size: usize, align: usize) -> Result<u64, u32> {
    let room = size.checked_add(align).ok_or(code::OUT_OF_MEMORY)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let got = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags) };
    let got = got.map_err(|_| code::OUT_OF_MEMORY)?.expose_provenance();
    let start = got.next_multiple_of(align);
    for (from, to) in [(got, start), (start + size, got + room)] {
        if to > from {
            // SAFETY: the part of the new mapping that nobody was told about.
            let cut = unsafe { munmap(ptr::with_exposed_provenance_mut(from), to - from) };
            cut.map_err(|_| code::OPERATING_SYSTEM)?;
        }
    }
    Ok(start as u64)
}

/// The descriptor in the place of a pointer.
pub(crate) fn fd_of(value: usize) -> Result<i32, u32> {
    i32::try_from(value).map_err(|_| code::UNKNOWN)
}

/// Gives a descriptor to the program, by its number.
pub(crate) fn give(fd: OwnedFd) -> i32 {
    let number = fd.as_raw_fd();
    // The program closes it.
    std::mem::forget(fd);
    number
}
