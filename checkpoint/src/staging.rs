//! A directory that appears whole or not at all.
//!
//! Everything is written into `.NAME.partial-<random>` (a hash for a long name) beside the destination, synced, and renamed into place.
//! The writer holds a lock on that directory, so a later writer can tell a dead one's leavings from a live
//! one's work. Whatever fails or is killed leaves at most such a directory, which no reader looks for.

use crate::error::{Error, Result};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Bytes of a destination's name that a partial's repeats.
const LONGEST: usize = 100;

/// A destination being made.
#[derive(Debug)]
pub(crate) struct Staging {
    dest: PathBuf,
    parent: PathBuf,
    partial: PathBuf,
    /// Given when there is something to replace: whether all of it is of our making.
    replaced: Option<fn(&Path) -> Result<()>>,
    /// Whether what was written is kept when it is not published.
    keep: std::cell::Cell<bool>,
    /// Holds the lock; dropped last.
    _lock: File,
}

impl Staging {
    /// Prepares `dest`. An existing one is refused, unless `replaceable` (given when replacing is allowed) finds
    /// that it is of our making.
    pub(crate) fn begin(dest: &Path, replaceable: Option<fn(&Path) -> Result<()>>) -> Result<Self> {
        let (parent, prefix, replaced) = prepare(dest, replaceable)?;
        remove_leavings(&parent, &prefix, None)?;
        let (partial, lock) = make_locked(&parent, &prefix)?;
        let keep = std::cell::Cell::new(false);
        Ok(Self { dest: dest.into(), parent, partial, replaced, keep, _lock: lock })
    }

    /// Prepares `dest` in a directory whose name says by `key` (16 hexadecimal digits) what is being made, so that
    /// another call may go on. With `resume` what a dead writer of the same left is taken over, and is kept again if
    /// it is not published; without, it begins empty and is removed.
    pub(crate) fn resumable(
        dest: &Path,
        replaceable: Option<fn(&Path) -> Result<()>>,
        key: &str,
        resume: bool,
    ) -> Result<Self> {
        let (parent, prefix, replaced) = prepare(dest, replaceable)?;
        let named = parent.join(format!("{prefix}{key}"));
        remove_leavings(&parent, &prefix, resume.then_some(named.as_path()))?;
        let made = match std::fs::create_dir(&named) {
            // Its name can be guessed: in a directory that others write to, it and what it links to may be theirs.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                lock(&named).filter(|dir| resume && is_ours(dir))
            }
            Err(e) => return Err(Error::io("mkdir", &named, &e)),
            Ok(()) => lock(&named),
        };
        let (partial, lock) = match made {
            Some(lock) => (named, lock),
            // A live writer makes the same, or somebody else made it: it is not disturbed.
            None => make_locked(&parent, &prefix)?,
        };
        let keep = std::cell::Cell::new(resume);
        Ok(Self { dest: dest.into(), parent, partial, replaced, keep, _lock: lock })
    }

    /// Where to write.
    pub(crate) fn dir(&self) -> &Path {
        &self.partial
    }

    /// Refuses a destination whose file system has not `needed` bytes left.
    pub(crate) fn check_space(&self, needed: u64) -> Result<()> {
        let found = available(&self.partial)?;
        if found < needed {
            return Err(Error::NoSpace { path: self.dest.clone(), needed, found });
        }
        Ok(())
    }

    /// Gives an error of a write that ran out of space its numbers.
    pub(crate) fn explain(&self, e: Error, needed: u64) -> Error {
        match &e {
            Error::Io { cause, .. } if cause.kind == std::io::ErrorKind::StorageFull => {
                let found = available(&self.partial).unwrap_or(0);
                // With room for all of it something else ran out: inodes, or another's file took the space.
                if found >= needed { e } else { Error::NoSpace { path: self.dest.clone(), needed, found } }
            }
            _ => e,
        }
    }

    /// Makes it appear. Files must be synced already.
    pub(crate) fn publish(self) -> Result<()> {
        sync_dirs(&self.partial)?;
        let rename = |flags| rustix::fs::renameat_with(CWD, &self.partial, CWD, &self.dest, flags);
        let flags = match self.replaced {
            // Looked at again: it is removed whole, and somebody may have put a file of theirs there meanwhile.
            Some(check) => {
                check(&self.dest)?;
                RenameFlags::EXCHANGE
            }
            None => RenameFlags::NOREPLACE,
        };
        let renamed = match rename(flags) {
            // A file system without the flag: a plain rename puts a directory only where none, or an empty one, is.
            Err(Errno::INVAL | Errno::NOSYS) if self.replaced.is_none() => {
                rustix::fs::renameat(CWD, &self.partial, CWD, &self.dest)
            }
            other => other,
        };
        match renamed {
            Ok(()) => {}
            Err(Errno::EXIST | Errno::NOTEMPTY) => return Err(Error::Exists { path: self.dest.clone() }),
            Err(e) => return Err(Error::io("rename", &self.dest, &e.into())),
        }
        self.keep.set(false);
        sync_dir(&self.parent)
        // Dropping removes what was replaced, which lies at the partial's name now.
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.keep.get() {
            return;
        }
        // What cannot be removed is removed by the next writer.
        let _ = std::fs::remove_dir_all(&self.partial);
    }
}

/// What a destination's directory is, how its partials' names begin, and whether there is something to replace.
type Prepared = (PathBuf, String, Option<fn(&Path) -> Result<()>>);

fn prepare(dest: &Path, replaceable: Option<fn(&Path) -> Result<()>>) -> Result<Prepared> {
    let exists = || Error::Exists { path: dest.into() };
    let name = dest.file_name().ok_or_else(exists)?;
    let parent = match dest.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let replaced = match (std::fs::symlink_metadata(dest), replaceable) {
        (Err(e), _) if e.kind() == std::io::ErrorKind::NotFound => None,
        (Err(e), _) => return Err(Error::io("stat", dest, &e)),
        (Ok(meta), Some(check)) if meta.is_dir() => {
            check(dest)?;
            Some(check)
        }
        (Ok(_), _) => return Err(exists()),
    };
    Ok((parent, prefix(&name.to_string_lossy()), replaced))
}

/// How the names of partials of `name` begin: a long name is shortened, so that theirs are no longer than a file
/// system allows.
fn prefix(name: &str) -> String {
    if name.len() <= LONGEST {
        return format!(".{name}.partial-");
    }
    let hash = blake3::hash(name.as_bytes()).to_hex();
    format!(".flashboot-{}.partial-", hash.get(..16).unwrap_or_default())
}

/// Creates and syncs one small file.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file =
        File::options().write(true).create_new(true).open(path).map_err(|e| Error::io("create", path, &e))?;
    std::io::Write::write_all(&mut file, bytes).map_err(|e| Error::io("write", path, &e))?;
    file.sync_all().map_err(|e| Error::io("fsync", path, &e))
}

fn available(path: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(path).map_err(|e| Error::io("statvfs", path, &e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn sync_dir(dir: &Path) -> Result<()> {
    let file = File::open(dir).map_err(|e| Error::io("open", dir, &e))?;
    file.sync_all().map_err(|e| Error::io("fsync", dir, &e))
}

/// Syncs `dir` and the directories below it.
fn sync_dirs(dir: &Path) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io("readdir", dir, &e))? {
        let entry = entry.map_err(|e| Error::io("readdir", dir, &e))?;
        if entry.file_type().map_err(|e| Error::io("stat", &entry.path(), &e))?.is_dir() {
            sync_dirs(&entry.path())?;
        }
    }
    sync_dir(dir)
}

fn open_dir(path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}

fn make_locked(parent: &Path, prefix: &str) -> Result<(PathBuf, File)> {
    loop {
        let random =
            getrandom::u64().map_err(|e| Error::io("getrandom", parent, &std::io::Error::other(e)))?;
        let path = parent.join(format!("{prefix}{random:016x}"));
        match std::fs::create_dir(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(Error::io("mkdir", &path, &e)),
        }
        // Another writer may take it for a dead one's between mkdir and lock; then it is gone, and we try again.
        if let Some(dir) = lock(&path) {
            return Ok((path, dir));
        }
    }
}

/// Locks the directory `path`, unless somebody else has it or it is gone by then.
fn lock(path: &Path) -> Option<File> {
    let dir = open_dir(path).ok()?;
    // Any other failure is a file system without locks on directories: nobody can lock, so nobody removes.
    if rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        return None;
    }
    let same = |there: std::fs::Metadata| dir.metadata().is_ok_and(|m| m.ino() == there.ino());
    std::fs::symlink_metadata(path).is_ok_and(same).then_some(dir)
}

/// Whether only this user could put anything into a directory.
fn is_ours(dir: &File) -> bool {
    dir.metadata().is_ok_and(|m| m.uid() == rustix::process::geteuid().as_raw() && m.mode() & 0o002 == 0)
}

/// Removes what writers to the same destination left when they were killed, all of it `but` one directory; a live one
/// holds its lock.
fn remove_leavings(parent: &Path, prefix: &str, but: Option<&Path>) -> Result<()> {
    for entry in std::fs::read_dir(parent).map_err(|e| Error::io("readdir", parent, &e))? {
        let entry = entry.map_err(|e| Error::io("readdir", parent, &e))?;
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(prefix));
        if !random.is_some_and(|r| r.len() == 16 && r.bytes().all(|b| b.is_ascii_hexdigit())) {
            continue;
        }
        if but == Some(entry.path().as_path()) {
            continue;
        }
        if let Ok(dir) = open_dir(&entry.path())
            && rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            // Best effort: one that belongs to another user stays.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}
