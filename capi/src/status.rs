//! How a call ended: a status, and for the thread that called the text of its last failure.

use flashboot_core::{Error, Kind, Result};
use std::{
    cell::RefCell,
    ffi::{CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

/// How a call ended. The text of a failure is `fb_last_error`'s.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum fb_status {
    /// It did what was asked.
    FB_OK = 0,
    /// The arguments cannot work: a null pointer, a handle that was released, a word that means nothing.
    FB_INVALID = 1,
    /// What is asked for is not there: no file, no agent, no device.
    FB_UNAVAILABLE = 2,
    /// Another image, size or protocol than the one asked for; nothing was moved.
    FB_MISMATCH = 3,
    /// Bytes do not match their digest.
    FB_CORRUPT = 4,
    /// The source's arena holds another filling than it said.
    FB_STALE_GENERATION = 5,
    /// The source died or its connection broke.
    FB_SOURCE_LOST = 6,
    /// The source is there and does not get on.
    FB_STALLED = 7,
    /// The call's time is over.
    FB_DEADLINE = 8,
    /// The caller's own progress function gave it up.
    FB_CANCELLED = 9,
    /// The memory is in use.
    FB_BUSY = 10,
    /// Not permitted.
    FB_PERMISSION = 11,
    /// Out of memory, descriptors, disk space or a configured budget.
    FB_EXHAUSTED = 12,
    /// An operating-system call failed.
    FB_IO = 13,
    /// The peer spoke, but not our protocol.
    FB_PROTOCOL = 14,
    /// This process's context of a GPU is beyond use: only a new process helps.
    FB_CONTEXT_LOST = 15,
    /// A defect of flashboot's; the process may go on.
    FB_PANIC = 16,
}

impl From<Kind> for fb_status {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Invalid => Self::FB_INVALID,
            Kind::Unavailable => Self::FB_UNAVAILABLE,
            Kind::Mismatch => Self::FB_MISMATCH,
            Kind::Corrupt => Self::FB_CORRUPT,
            Kind::StaleGeneration => Self::FB_STALE_GENERATION,
            Kind::SourceLost => Self::FB_SOURCE_LOST,
            Kind::Stalled => Self::FB_STALLED,
            Kind::Deadline => Self::FB_DEADLINE,
            Kind::Cancelled => Self::FB_CANCELLED,
            Kind::Busy => Self::FB_BUSY,
            Kind::Permission => Self::FB_PERMISSION,
            Kind::Exhausted => Self::FB_EXHAUSTED,
            Kind::Protocol => Self::FB_PROTOCOL,
            Kind::ContextLost => Self::FB_CONTEXT_LOST,
            // Kinds to come are failures of some call.
            _ => Self::FB_IO,
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Why the last call of this thread that failed did so, as one sentence with what to do next; empty where none has. It stays until
/// the thread's next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn fb_last_error() -> *const c_char {
    // A thread that is ending has no last error any more.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs a call: its error, or its panic, becomes this thread's last.
pub(crate) fn guard(call: impl FnOnce() -> Result<()>) -> fb_status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => fb_status::FB_OK,
        Ok(Err(error)) => {
            note(&error.to_string());
            error.kind().into()
        }
        Err(_) => {
            note("flashboot panicked: a defect; what it says is on stderr");
            fb_status::FB_PANIC
        }
    }
}

/// The same of a call that gives something else: `otherwise` where it fails.
pub(crate) fn guarded<T>(otherwise: T, call: impl FnOnce() -> Result<T>) -> T {
    let mut given = otherwise;
    guard(|| {
        given = call()?;
        Ok(())
    });
    given
}

fn note(text: &str) {
    let _ = LAST.try_with(|last| *last.borrow_mut() = c_text(text));
}

/// Text for C; what follows a zero in it would not be seen.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// What is wrong with an argument.
pub(crate) fn invalid(op: &'static str, detail: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, op, detail.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn said() -> String {
        // SAFETY: the text of this thread's last error, which ends in a zero and is not changed meanwhile.
        unsafe { CStr::from_ptr(fb_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_stays_on_this_side_and_an_error_is_its_threads_own() {
        assert_eq!(said(), "");
        assert_eq!(guard(|| panic!("a defect")), fb_status::FB_PANIC);
        assert!(said().contains("a defect; what it says is on stderr"), "{}", said());
        assert_eq!(guard(|| Err(invalid("test", "a \0 in it"))), fb_status::FB_INVALID);
        assert!(said().contains("a \u{fffd} in it"), "{}", said());
        assert_eq!(guard(|| Ok(())), fb_status::FB_OK);
        assert!(said().contains("in it"), "it stays until the next failure");
        assert_eq!(std::thread::spawn(said).join().unwrap(), "");
        assert_eq!(guarded(7, || Err(invalid("test", "no"))), 7);
    }
}
