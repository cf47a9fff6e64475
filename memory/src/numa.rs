//! Binding pages to a NUMA node by mbind(2).

use crate::{config::NumaReport, mapping::Mapping};
use flashboot_core::{Code, Error, Kind, Result};

const MPOL_BIND: libc::c_int = 2;
/// The kernel's largest node number (`MAX_NUMNODES` is 1024 at most).
const MAX_NODE: u32 = 1023;
const BITS: u32 = u64::BITS;

/// Binds every page of `mapping`, none of which is touched yet, to `node`.
///
/// A kernel that has no NUMA or does not let us is a warning. A node that does not exist is
/// [`Kind::Invalid`].
pub(crate) fn bind(mapping: &Mapping, node: u32) -> Result<NumaReport> {
    let invalid = |errno: Option<i32>| {
        let e = Error::new(Kind::Invalid, "mbind", format!("this host has no NUMA node {node} with memory"))
            .with_remedy("choose a node listed in /sys/devices/system/node/has_memory");
        match errno {
            Some(n) => e.with_code(Code::Errno(n)),
            None => e,
        }
    };
    if node > MAX_NODE {
        return Err(invalid(None));
    }
    let mut mask = [0u64; ((MAX_NODE + 1) / BITS) as usize];
    if let Some(word) = mask.get_mut((node / BITS) as usize) {
        *word |= 1 << (node % BITS);
    }
    // SAFETY: the range is one mapping of ours, the mask has as many bits as told (the kernel reads one bit
    // fewer than `maxnode`), and mbind writes no memory.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.base().as_ptr(),
            mapping.len(),
            MPOL_BIND,
            mask.as_ptr(),
            u64::from(MAX_NODE) + 2,
            0u32,
        )
    };
    if rc == 0 {
        return Ok(NumaReport::Bound(node));
    }
    let errno = std::io::Error::last_os_error();
    match errno.raw_os_error() {
        Some(code @ (libc::EPERM | libc::ENOSYS)) => {
            let remedy = if code == libc::EPERM {
                "allow mbind in the container's seccomp profile"
            } else {
                "use a kernel with CONFIG_NUMA"
            };
            Ok(NumaReport::Refused { node, why: format!("mbind: {errno}; {remedy}") })
        }
        code => Err(invalid(code)),
    }
}
