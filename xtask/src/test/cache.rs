//! Folders outside the clone that are costly to make and the same for the same inputs.
//!
//! A folder's name carries the hash of what it was made from. It is made under a temporary name and renamed, so
//! that an interrupted run leaves nothing that is taken for whole, and under a lock, so that two runs make it
//! once.

use anyhow::{Context as _, Result};
use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
};

/// `$FLASHBOOT_CACHE`, or `flashboot` in the user's cache folder.
pub(crate) fn folder() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = set("FLASHBOOT_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("flashboot")))
        .or_else(|| Some(set("HOME")?.join(".cache/flashboot")))
        .context("neither FLASHBOOT_CACHE nor XDG_CACHE_HOME nor HOME is set")?;
    // Python run from another folder must find it.
    std::path::absolute(folder).context("the cache folder's path")
}

/// The first 16 hexadecimal digits of the BLAKE3 hash of `parts`, each with its length before it.
pub(crate) fn key(parts: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    let mut key = hasher.finalize().to_hex().to_string();
    key.truncate(16);
    key
}

/// The folder `name` in `cache`: as it is when `whole` says so, made anew by `make` otherwise.
pub(crate) fn get_or_make(
    cache: &Path,
    name: &str,
    whole: impl Fn(&Path) -> bool,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let lock = File::create(cache.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("waiting for another run to make {name}"))?;
    let done = cache.join(name);
    if done.is_dir() {
        if whole(&done) {
            return Ok(done);
        }
        fs::remove_dir_all(&done)?;
    }
    // We hold the lock, so any part that is there was left by a run that was killed.
    remove_parts(cache, name)?;
    let part = cache.join(format!("{name}.part-{}", std::process::id()));
    make(&part)?;
    fs::rename(&part, &done).with_context(|| format!("renaming {} into place", part.display()))?;
    Ok(done)
}

/// Removes what it can: a child that outlived its run may still be writing to the part of that run, which
/// harms nobody, since every run's part has a name of its own.
fn remove_parts(cache: &Path, name: &str) -> Result<()> {
    let prefix = format!("{name}.part-");
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn write(folder: &Path, text: &str) -> Result<()> {
        fs::create_dir(folder)?;
        fs::write(folder.join("x"), text)?;
        Ok(())
    }

    #[test]
    fn an_interrupted_set_up_is_not_taken_for_whole() {
        let cache = tempfile::tempdir().unwrap();
        let broken = get_or_make(
            cache.path(),
            "a",
            |_| true,
            |at| {
                write(at, "half")?;
                bail!("cut")
            },
        );
        assert_eq!(broken.unwrap_err().to_string(), "cut");
        fs::create_dir(cache.path().join("a.part-0")).unwrap();
        let made = get_or_make(cache.path(), "a", |_| true, |at| write(at, "whole")).unwrap();
        assert_eq!(fs::read_to_string(made.join("x")).unwrap(), "whole");
        assert!(!cache.path().join("a.part-0").exists(), "a killed run's part is removed");
        let again = get_or_make(cache.path(), "a", |_| true, |_| bail!("made twice")).unwrap();
        assert_eq!(again, made);
        get_or_make(cache.path(), "a", |_| false, |at| write(at, "new")).unwrap();
        assert_eq!(fs::read_to_string(made.join("x")).unwrap(), "new");
    }

    #[test]
    fn two_runs_make_it_once() {
        let cache = tempfile::tempdir().unwrap();
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    get_or_make(
                        cache.path(),
                        "a",
                        |_| true,
                        |at| {
                            made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            write(at, "x")
                        },
                    )
                    .unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn a_key_tells_where_one_part_ends() {
        assert_ne!(key(&[b"ab", b"c"]), key(&[b"a", b"bc"]));
        assert_eq!(key(&[b"a"]).len(), 16);
    }
}
