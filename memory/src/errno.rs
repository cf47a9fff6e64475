//! From rustix's errno to the boundary's error.

use flashboot_core::Error;

/// The error of a failed system call `op`.
pub(crate) fn failed(op: &'static str, errno: rustix::io::Errno, detail: impl Into<String>) -> Error {
    Error::from_errno(op, errno.raw_os_error(), detail)
}
