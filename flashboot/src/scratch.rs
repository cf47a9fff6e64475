//! A temporary directory that a killed run does not leave for ever: the next run of its kind removes it.
//!
//! The owner holds a lock on the directory from before it writes the marker until it is gone. So a directory of ours
//! with the marker and without the lock is a dead owner's. Must never remove anything else.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
};
use tempfile::TempDir;

const MARKER: &str = ".flashboot-scratch";
/// Random letters and digits after the prefix.
const RANDOM: usize = 6;

/// The directory; removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
    /// Holds the lock; dropped last.
    _lock: File,
}

impl Scratch {
    /// Removes what dead owners left in `parent`, and makes a directory of its own there, of mode 0700: `prefix` and
    /// six random letters and digits. Blocks.
    ///
    /// # Errors
    /// The system's own, of the new directory; what cannot be removed stays without a word.
    pub fn new(parent: &Path, prefix: &str) -> io::Result<Self> {
        sweep(parent, prefix);
        let dir = tempfile::Builder::new()
            .prefix(prefix)
            .rand_bytes(RANDOM)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)?;
        let lock = open(dir.path())?;
        // Without locks on this file system nothing is marked, and so nothing removed.
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            File::options().write(true).create_new(true).open(dir.path().join(MARKER))?;
        }
        Ok(Self { dir, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Removes it.
    ///
    /// # Errors
    /// The system's own, which dropping keeps to itself.
    pub fn close(self) -> io::Result<()> {
        self.dir.close()
    }
}

fn open(path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}

/// Best effort: what cannot be looked at or removed stays.
fn sweep(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(prefix));
        if random.is_some_and(|r| r.len() == RANDOM && r.bytes().all(|b| b.is_ascii_alphanumeric())) {
            let path = entry.path();
            if is_dead(&path) {
                let _ = fs::remove_dir_all(path);
            }
        }
    }
}

fn is_dead(path: &Path) -> bool {
    let uid = rustix::process::geteuid().as_raw();
    let Ok(dir) = open(path) else { return false };
    let Ok(held) = dir.metadata() else { return false };
    let marked = || fs::symlink_metadata(path.join(MARKER)).is_ok_and(|m| m.is_file() && m.uid() == uid);
    // The lock is let go with `dir`; that the directory is still the one that was opened is looked at under it.
    held.uid() == uid
        && flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok()
        && marked()
        && fs::symlink_metadata(path).is_ok_and(|m| (m.dev(), m.ino()) == (held.dev(), held.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_dead_owner_marked_is_removed() {
        let parent = TempDir::new().unwrap();
        let at = |name: &str| parent.path().join(name);
        for name in ["x-aaaaaa", "x-bbbbbb", "x-toolong", "y-aaaaaa"] {
            fs::create_dir(at(name)).unwrap();
            if name != "x-bbbbbb" {
                fs::write(at(name).join(MARKER), "").unwrap();
            }
        }
        std::os::unix::fs::symlink(at("y-aaaaaa"), at("x-cccccc")).unwrap();
        let live = Scratch::new(parent.path(), "x-").unwrap();
        let other = Scratch::new(parent.path(), "x-").unwrap();
        assert!(!at("x-aaaaaa").exists(), "a dead owner's");
        for kept in ["x-bbbbbb", "x-toolong", "y-aaaaaa", "x-cccccc"] {
            assert!(at(kept).exists(), "{kept}");
        }
        assert!(live.path().exists() && live.path() != other.path());
        let gone = live.path().to_owned();
        drop(live);
        assert!(!gone.exists());
    }
}
