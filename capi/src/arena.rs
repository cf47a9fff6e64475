//! `fb_arena`: one rank's bytes in memory, and what lies where in them.

use crate::{
    edge, handle,
    status::{c_text, fb_status, guard, guarded, invalid},
};
use flashboot::load::{Contents, Entry, Placed, Seen, What, verify};
use flashboot_core::{Arena as Memory, Dtype, Result};
use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_void},
    sync::Arc,
};

/// One rank's bytes in memory. A handle: nothing may be read through it.
pub struct fb_arena {
    _private: [u8; 0],
}

/// What a name is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum fb_what {
    /// A tensor.
    FB_TENSOR = 0,
    /// Another name of a tensor.
    FB_ALIAS = 1,
    /// A tensor's bytes seen otherwise.
    FB_VIEW = 2,
}

/// One name of an arena. All pointers stay until the arena is released.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fb_tensor {
    /// The name.
    pub name: *const c_char,
    /// The type of its elements, as safetensors spells it: `BF16`, `F8_E4M3`.
    pub dtype: *const c_char,
    /// Its first byte: an address of this process, or of the GPU.
    pub data: *const c_void,
    /// That byte, counted from the arena's first.
    pub offset: u64,
    /// Bytes of all its elements, each counted once.
    pub bytes: u64,
    /// Number of dimensions.
    pub dims: usize,
    /// Its dimensions.
    pub shape: *const u64,
    /// Its strides, in elements.
    pub stride: *const u64,
    /// What the name is.
    pub what: fb_what,
}

/// What the handle is of.
pub(crate) struct Arena {
    memory: Arc<dyn Memory>,
    seen: Seen,
    contents: Contents,
    device: CString,
    report: CString,
    names: Vec<CString>,
    dtypes: BTreeMap<&'static str, CString>,
    by_name: BTreeMap<String, usize>,
}

impl Arena {
    /// What a load has placed.
    pub(crate) fn new(placed: Placed) -> Result<Self> {
        let Placed { arena, loaded, contents } = placed;
        let seen = Seen::of(&arena)?;
        let report = serde_json::to_string(&loaded).map_err(|e| invalid("report", e.to_string()))?;
        let entries = contents.entries();
        let dtype = |dtype: Dtype| (dtype.name(), c_text(dtype.name()));
        Ok(Self {
            device: c_text(&seen.device()),
            report: c_text(&report),
            names: entries.iter().map(|entry| c_text(&entry.name)).collect(),
            dtypes: entries.iter().map(|entry| dtype(entry.dtype)).collect(),
            by_name: entries.iter().enumerate().map(|(i, entry)| (entry.name.clone(), i)).collect(),
            memory: arena,
            seen,
            contents,
        })
    }

    fn base(&self) -> *const c_void {
        std::ptr::with_exposed_provenance(usize::try_from(self.seen.address()).unwrap_or(0))
    }

    fn tensor(&self, index: usize) -> Option<fb_tensor> {
        let entry: &Entry = self.contents.entries().get(index)?;
        let elements: u64 = entry.shape.iter().product();
        Some(fb_tensor {
            name: self.names.get(index)?.as_ptr(),
            dtype: self.dtypes.get(entry.dtype.name())?.as_ptr(),
            data: self.base().wrapping_byte_add(usize::try_from(entry.offset).ok()?),
            offset: entry.offset,
            bytes: elements.saturating_mul(entry.dtype.bits()) / 8,
            dims: entry.shape.len(),
            shape: entry.shape.as_ptr(),
            stride: entry.stride.as_ptr(),
            what: match entry.what {
                What::Tensor => fb_what::FB_TENSOR,
                What::Alias => fb_what::FB_ALIAS,
                What::View => fb_what::FB_VIEW,
            },
        })
    }
}

/// The arena's first byte: an address of this process, or of the GPU; NULL for no arena. It stays until the arena is released.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_base(arena: *const fb_arena) -> *const c_void {
    guarded(std::ptr::null(), || Ok(handle::find::<Arena>("base", arena)?.base()))
}

/// Its bytes; 0 for no arena.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_len(arena: *const fb_arena) -> u64 {
    guarded(0, || Ok(handle::find::<Arena>("len", arena)?.memory.payload()))
}

/// `cpu`, or `cuda:N` by the GPU's number in this process; NULL for no arena. It stays until the arena is released.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_device(arena: *const fb_arena) -> *const c_char {
    guarded(std::ptr::null(), || Ok(handle::find::<Arena>("device", arena)?.device.as_ptr()))
}

/// Whether it is another process's memory, attached where it is: a write to it ends this process. False for no arena.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_read_only(arena: *const fb_arena) -> bool {
    guarded(false, || Ok(handle::find::<Arena>("read_only", arena)?.seen.is_read_only()))
}

/// The account of the load as a JSON object, with the fields of `flashboot load --json`; NULL for no arena. It stays until the arena
/// is released.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_report(arena: *const fb_arena) -> *const c_char {
    guarded(std::ptr::null(), || Ok(handle::find::<Arena>("report", arena)?.report.as_ptr()))
}

/// Compares every block, as it is in memory now, with the image's digests.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_verify(arena: *const fb_arena) -> fb_status {
    guard(|| {
        let arena = handle::find::<Arena>("verify", arena)?;
        let table = arena.contents.table();
        let table =
            table.ok_or_else(|| invalid("verify", "nothing proves a stock checkpoint: pack it first"))?;
        verify(&*arena.memory, table.digests()).map(drop)
    })
}

/// How many names it has: tensors in the order of their bytes, then aliases, then views; 0 for no arena.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_tensors(arena: *const fb_arena) -> usize {
    guarded(0, || Ok(handle::find::<Arena>("tensors", arena)?.names.len()))
}

/// What lies under a name.
///
/// # Safety
/// `name` is text, `tensor` points to such a structure of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_arena_tensor(
    arena: *const fb_arena,
    name: *const c_char,
    tensor: *mut fb_tensor,
) -> fb_status {
    guard(|| {
        let out = edge::out("tensor", tensor)?;
        let arena = handle::find::<Arena>("tensor", arena)?;
        // SAFETY: the caller's promise.
        let name = unsafe { edge::needed("name", name) }?;
        let found = arena.by_name.get(&name).and_then(|index| arena.tensor(*index));
        let found =
            found.ok_or_else(|| invalid("tensor", format!("the arena has nothing called `{name}`")))?;
        // SAFETY: the caller's promise.
        unsafe { out.put(found) };
        Ok(())
    })
}

/// What lies under the name of this number.
///
/// # Safety
/// `tensor` points to such a structure of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_arena_tensor_at(
    arena: *const fb_arena,
    index: usize,
    tensor: *mut fb_tensor,
) -> fb_status {
    guard(|| {
        let out = edge::out("tensor", tensor)?;
        let arena = handle::find::<Arena>("tensor", arena)?;
        let found = arena.tensor(index);
        let found =
            found.ok_or_else(|| invalid("tensor", format!("name {index} of {}", arena.names.len())))?;
        // SAFETY: the caller's promise.
        unsafe { out.put(found) };
        Ok(())
    })
}

/// Releases the arena and its memory; nothing of it may be used any more.
#[unsafe(no_mangle)]
pub extern "C" fn fb_arena_release(arena: *mut fb_arena) -> fb_status {
    guard(|| handle::take::<Arena>("release", arena).map(drop))
}
