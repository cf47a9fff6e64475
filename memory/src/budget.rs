//! How much memory this process can still have.
//!
//! A memfd lives on a mount without a size limit, and neither `fallocate` nor a touch fails politely when
//! memory runs out: the kernel kills a process. So a request is compared with what the machine and the
//! control groups leave *before* a page is taken. The answer is a snapshot; others may take memory meanwhile.

use crate::pages::parse_meminfo;
use flashboot_core::{ByteSize, Error, Kind, Result};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The least of what sets a limit, in bytes, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// Bytes.
    pub bytes: u64,
    /// What sets the limit: `/proc/meminfo`, or a control group's directory.
    pub by: String,
}

/// Reads `MemAvailable` and the memory limits of this process's control groups, versions 1 and 2; `None`
/// when none can be read.
pub fn available() -> Option<Available> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let bytes = parse_meminfo(&text, "MemAvailable")?;
        Some(Available { bytes, by: "MemAvailable of /proc/meminfo".into() })
    });
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    group_directories(&groups)
        .into_iter()
        .filter_map(|directory| in_group(&directory))
        .chain(meminfo)
        .min_by_key(|a| a.bytes)
}

/// Refuses `bytes` when they are more than there is.
///
/// # Errors
/// [`Kind::Exhausted`], with both sizes, what sets the limit, and a remedy.
pub fn admit(bytes: u64) -> Result<()> {
    match available() {
        Some(limit) if bytes > limit.bytes => Err(Error::new(
            Kind::Exhausted,
            "arena",
            format!(
                "{} ({bytes} bytes) asked for, {} bytes available by {}",
                ByteSize(bytes),
                limit.bytes,
                limit.by
            ),
        )
        .with_remedy("free memory, raise the limit, or give each rank a smaller image")),
        _ => Ok(()),
    }
}

/// The memory control group's directories of a process, innermost first, from `/proc/self/cgroup`.
fn group_directories(text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let root = if controllers.is_empty() {
            Path::new("/sys/fs/cgroup")
        } else if controllers.split(',').any(|c| c == "memory") {
            Path::new("/sys/fs/cgroup/memory")
        } else {
            continue;
        };
        // In a container the path may be the host's while the mount shows only ours: the root is asked too.
        let inner = root.join(path.trim_start_matches('/'));
        found.extend(inner.ancestors().take_while(|d| d.starts_with(root)).map(Path::to_path_buf));
    }
    found
}

fn in_group(directory: &Path) -> Option<Available> {
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    // Page cache is given back on demand.
    let cache: u64 = read("memory.stat")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            let key = key.strip_prefix("total_").unwrap_or(key);
            // Version 1 prints each key twice, its own and the subtree's: the larger total is the last one.
            matches!(key, "inactive_file" | "active_file")
                .then(|| (key.to_owned(), value.parse::<u64>().ok()))
        })
        .filter_map(|(key, value)| Some((key, value?)))
        .collect::<std::collections::BTreeMap<_, _>>()
        .values()
        .sum();
    let bytes = limit.saturating_sub(used.saturating_sub(cache));
    Some(Available { bytes, by: format!("the memory limit of {}", directory.display()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_control_groups_are_asked_up_to_the_root() {
        let found = group_directories("4:memory:/a/b\n3:cpuset:/\n0::/x\n");
        let want = ["memory/a/b", "memory/a", "memory", "x", ""]
            .map(|p| Path::new("/sys/fs/cgroup").join(p).components().collect::<PathBuf>());
        let found: Vec<PathBuf> = found.iter().map(|p| p.components().collect()).collect();
        assert_eq!(found, want);
    }

    #[test]
    fn more_than_there_is_is_refused_with_sizes_and_remedy() {
        let e = admit(1 << 60).unwrap_err();
        assert_eq!(e.kind(), Kind::Exhausted);
        assert!(e.to_string().contains("1048576TiB") && e.remedy().is_some(), "{e}");
        admit(4096).unwrap();
    }
}
