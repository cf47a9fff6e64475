//! The seals that make a memfd safe to share: nobody shrinks, grows or newly maps it writable.

use crate::errno::failed;
use flashboot_core::{Code, Error, Kind, Result};
use rustix::{
    fs::{SealFlags, fcntl_add_seals, fcntl_get_seals},
    io::Errno,
};
use std::os::fd::AsFd;

/// What a reader insists on.
pub const REQUIRED_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Each seal, its name, and what could happen without it.
const WHY: [(SealFlags, &str, &str); 3] = [
    (SealFlags::SHRINK, "F_SEAL_SHRINK", "a truncation would kill readers with SIGBUS"),
    (SealFlags::GROW, "F_SEAL_GROW", "its size could change under its readers"),
    (SealFlags::FUTURE_WRITE, "F_SEAL_FUTURE_WRITE", "any process that gets the descriptor could write it"),
];

/// Seals the owner's memfd; the owner's writable mapping exists already and stays writable.
pub(crate) fn seal(fd: impl AsFd) -> Result<()> {
    fcntl_add_seals(&fd, REQUIRED_SEALS | SealFlags::SEAL).map_err(|errno| match errno {
        // An unknown seal.
        Errno::INVAL => {
            Error::new(Kind::Unavailable, "fcntl(F_ADD_SEALS)", "this kernel has no F_SEAL_FUTURE_WRITE")
                .with_code(Code::Errno(errno.raw_os_error()))
                .with_remedy("use Linux 5.1 or newer")
        }
        errno => failed("fcntl(F_ADD_SEALS)", errno, "sealing the arena's memfd"),
    })
}

/// Checks that a peer's descriptor is a memfd with [`REQUIRED_SEALS`].
///
/// # Errors
/// [`Kind::Permission`] naming each missing seal and what it would allow, or saying that the descriptor is
/// no sealable memfd at all.
pub fn check_seals(fd: impl AsFd) -> Result<()> {
    let refuse = |detail: String| {
        Error::new(Kind::Permission, "fcntl(F_GET_SEALS)", detail)
            .with_remedy("export the arena by flashboot, which seals it")
    };
    let found = fcntl_get_seals(&fd).map_err(|errno| {
        refuse("the peer's descriptor is not a sealable memfd".into())
            .with_code(Code::Errno(errno.raw_os_error()))
    })?;
    let missing: Vec<String> = WHY
        .iter()
        .filter(|(seal, ..)| !found.contains(*seal))
        .map(|(_, name, why)| format!("{name} ({why})"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(refuse(format!("the peer's memfd lacks {}", missing.join(", "))))
}
