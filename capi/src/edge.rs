//! The edge: where pointers that C gave are read and written. All `unsafe` of this crate is here, but for the words that say so
//! at each function that C calls with pointers.

use crate::status::invalid;
use flashboot_core::Result;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

/// The text at `text`, if there is one.
///
/// # Safety
/// `text` is null, or points to text that ends in a zero and stays as it is during the call.
unsafe fn bytes<'t>(text: *const c_char) -> Option<&'t [u8]> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and the caller of the library vouches for the rest.
    Some(unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// Text that may be missing.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn text(name: &'static str, text: *const c_char) -> Result<Option<String>> {
    // SAFETY: passed on.
    let Some(bytes) = (unsafe { bytes(text) }) else { return Ok(None) };
    let text = std::str::from_utf8(bytes).map_err(|e| invalid(name, format!("no UTF-8: {e}")))?;
    Ok(Some(text.to_owned()))
}

/// Text that must be there.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn needed(name: &'static str, at: *const c_char) -> Result<String> {
    // SAFETY: passed on.
    unsafe { text(name, at) }?.ok_or_else(|| invalid(name, "it is null"))
}

/// A path that may be missing: any bytes but a zero.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn path(at: *const c_char) -> Option<PathBuf> {
    // SAFETY: passed on.
    unsafe { bytes(at) }.map(|bytes| PathBuf::from(OsStr::from_bytes(bytes)))
}

/// Where a result goes, looked at before there is one: null is refused.
pub(crate) fn out<T>(name: &'static str, out: *mut T) -> Result<Out<T>> {
    if out.is_null() {
        return Err(invalid(name, "there is nowhere to put the result: the pointer is null"));
    }
    Ok(Out(out))
}

/// A place for a result.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Puts it there.
    ///
    /// # Safety
    /// The pointer is one to a `T` of the caller's, whatever is in it.
    pub(crate) unsafe fn put(self, value: T) {
        // SAFETY: not null, and the caller of the library vouches that it may be written; unaligned as C may have it.
        unsafe { self.0.write_unaligned(value) };
    }
}

/// A structure that begins with its own size in bytes, and of which a program that was compiled against an older header has the
/// beginning only.
///
/// # Safety
/// Implementors are `repr(C)`, begin with a `usize`, and all of their bytes may be zero.
pub(crate) unsafe trait Sized1: Copy {
    const NAME: &'static str;
}

/// A copy of the structure at `at`, with zeros in what the caller's does not have; all zeros where `at` is null.
///
/// # Safety
/// `at` is null, or points to as many bytes as its first word says.
pub(crate) unsafe fn options<T: Sized1>(at: *const T) -> Result<T> {
    // SAFETY: all zeros are a value of `T`, as it promises.
    let mut mine: T = unsafe { std::mem::zeroed() };
    if at.is_null() {
        return Ok(mine);
    }
    // SAFETY: the caller of the library vouches for the first word.
    let size = unsafe { at.cast::<usize>().read_unaligned() };
    let most = size_of::<T>();
    if !(size_of::<usize>()..=most).contains(&size) {
        let name = T::NAME;
        let detail =
            format!("{name}.size is {size}, this library's has {most} bytes: set it to sizeof({name})");
        return Err(
            invalid("options", detail).with_remedy("run the release that the header is of, or a later one")
        );
    }
    // SAFETY: `size` bytes are the caller's to read, and no more than `T` has.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), (&raw mut mine).cast::<u8>(), size) };
    Ok(mine)
}

/// C's function that hears how far a load is, and what it wants to be given.
#[derive(Clone, Copy)]
pub(crate) struct Listener {
    pub(crate) call: unsafe extern "C" fn(u64, u64, *mut c_void) -> i32,
    pub(crate) data: *mut c_void,
}

impl Listener {
    /// Tells it; whether it wants the load to go on.
    ///
    /// # Safety
    /// The function may be called with its data, on this thread.
    pub(crate) unsafe fn tell(self, done: u64, total: u64) -> bool {
        // SAFETY: the caller of the library gave both for this.
        (unsafe { (self.call)(done, total, self.data) }) == 0
    }
}
