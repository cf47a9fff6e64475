//! Who owns a socket: whoever holds the lock on the file beside it.
//!
//! A refused connection does not prove that an owner is dead (its backlog may be full, it may be about to
//! listen); the kernel's lock does, since it ends with the process that holds it.

use super::failed;
use flashboot_core::{Error, Kind, Result};
use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock, fstat, ftruncate, open, stat},
    io::{Errno, pread, pwrite},
};
use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

/// A sweeper holds a dead owner's lock for some microseconds; only a lock held for longer has an owner.
const ATTEMPTS: u32 = 10;
const BETWEEN: Duration = Duration::from_millis(5);

/// How an owner's lock file begins, whatever it serves; its process id follows. Other programs have `*.lock` files too.
const MARK: &str = "flashboot-ipc ";

/// The lock on `NAME.lock`, held until dropped; then both files are gone.
#[derive(Debug)]
pub struct Lock {
    // Closing it gives the lock back, after the files are removed.
    _held: OwnedFd,
    lock: PathBuf,
    socket: PathBuf,
}

impl Lock {
    /// Takes the lock of the endpoint `name` and removes what a dead owner left.
    ///
    /// # Errors
    /// [`Kind::Busy`] when a living owner holds it, with its process id when known.
    pub fn take(directory: &Path, name: &str) -> Result<Self> {
        let lock = directory.join(format!("{name}.lock"));
        let socket = directory.join(format!("{name}.sock"));
        for _ in 0..ATTEMPTS {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file = open(&lock, flags, Mode::RUSR | Mode::WUSR)
                .map_err(|errno| failed("open", errno, lock.display().to_string()))?;
            if !try_lock(&file, &lock)? {
                std::thread::sleep(BETWEEN);
                continue;
            }
            ftruncate(&file, 0).map_err(|errno| failed("ftruncate", errno, lock.display().to_string()))?;
            let owner = format!("{MARK}{}\n", std::process::id());
            // For people and for `sweep`: the lock itself is the proof that somebody lives.
            let _ = pwrite(&file, owner.as_bytes(), 0);
            let taken = Self { _held: file, lock, socket };
            taken.remove_socket();
            return Ok(taken);
        }
        let text = fs::read_to_string(&lock).unwrap_or_default();
        let owner = match text.strip_prefix(MARK).and_then(|pid| pid.trim().parse::<u32>().ok()) {
            Some(pid) => format!("process {pid}"),
            None => "another process".to_owned(),
        };
        Err(Error::new(
            Kind::Busy,
            "open",
            format!("{} belongs to {owner}, which is alive", socket.display()),
        )
        .with_remedy("choose another name for the endpoint, or end that process"))
    }

    fn remove_socket(&self) {
        if let Err(e) = fs::remove_file(&self.socket)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(socket = %self.socket.display(), "cannot be removed: {e}");
        }
    }

    /// The socket's path; nobody else binds it while this lives.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.remove_socket();
        let _ = fs::remove_file(&self.lock);
    }
}

/// Whether we hold the lock now, and on the file that `path` names: it may have been removed since.
fn try_lock(file: &OwnedFd, path: &Path) -> Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(false),
        Err(errno) => return Err(failed("flock", errno, path.display().to_string())),
    }
    let (Ok(held), Ok(named)) = (fstat(file), stat(path)) else { return Ok(false) };
    Ok((held.st_dev, held.st_ino) == (named.st_dev, named.st_ino))
}

/// Removes the sockets of dead owners. What cannot be removed is left for the next one.
pub fn sweep(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let lock = entry.path();
        if lock.extension().is_none_or(|e| e != "lock") {
            continue;
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let Ok(file) = open(&lock, flags, Mode::empty()) else { continue };
        let ours = fstat(&file).is_ok_and(|s| s.st_uid == rustix::process::geteuid().as_raw());
        // Without the mark it is another program's, or its owner has just made it and not locked it yet.
        let mut start = [0; MARK.len()];
        let marked = pread(&file, &mut start, 0).is_ok() && start == *MARK.as_bytes();
        if ours && marked && matches!(try_lock(&file, &lock), Ok(true)) {
            tracing::debug!(lock = %lock.display(), "removing a dead owner's socket");
            drop(Lock { _held: file, socket: lock.with_extension("sock"), lock });
        }
    }
}
