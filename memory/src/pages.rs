//! What the kernel says about pages and the boot: read at run time, never assumed.

use flashboot_core::{Error, Kind, Result};
use std::{fs, path::Path};

/// Bytes of a base page (4 KiB on most x86_64, 64 KiB on some aarch64 kernels).
pub fn base_page() -> u64 {
    rustix::param::page_size() as u64
}

/// The host's boot id, `/proc/sys/kernel/random/boot_id`.
///
/// # Errors
/// [`Kind::Unavailable`] when `/proc` is not mounted.
pub fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(e) => Err(Error::new(Kind::Unavailable, "boot id", format!("{path} cannot be read: {e}"))
            .with_remedy("mount /proc")),
    }
}

/// Huge pages of the system's default size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePages {
    /// Bytes of one.
    pub bytes: u64,
    /// Pages that a new arena can have: free and not reserved, plus what overcommit allows.
    pub available: u64,
    /// Pages the system has in all.
    pub total: u64,
}

impl HugePages {
    /// Reads the default size from `/proc/meminfo` and the counts from sysfs, those of `node` when given.
    /// `None`: this kernel has no huge pages.
    pub fn read(node: Option<u32>) -> Option<Self> {
        let bytes = parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "Hugepagesize")?;
        if bytes == 0 {
            return None;
        }
        let name = format!("hugepages-{}kB", bytes >> 10);
        let whole = Path::new("/sys/kernel/mm/hugepages").join(&name);
        let total = number(&whole.join("nr_hugepages"))?;
        let free = number(&whole.join("free_hugepages"))?;
        let reserved = number(&whole.join("resv_hugepages")).unwrap_or(0);
        let surplus = number(&whole.join("surplus_hugepages")).unwrap_or(0);
        let overcommit = number(&whole.join("nr_overcommit_hugepages")).unwrap_or(0);
        let mut available = free.saturating_sub(reserved).saturating_add(overcommit.saturating_sub(surplus));
        if let Some(node) = node {
            let of_node = format!("/sys/devices/system/node/node{node}/hugepages/{name}/free_hugepages");
            available = available.min(number(Path::new(&of_node)).unwrap_or(available));
        }
        Some(Self { bytes, available, total })
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The value in bytes of `key` in `/proc/meminfo`'s form (`key:   123 kB`).
pub(crate) fn parse_meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let mut words = line.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => value.checked_mul(1024),
        _ => Some(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_reads_in_bytes() {
        let text = "MemTotal:       24651776 kB\nHugePages_Total:       3\nHugepagesize:       2048 kB\n";
        assert_eq!(parse_meminfo(text, "Hugepagesize"), Some(2 << 20));
        assert_eq!(parse_meminfo(text, "HugePages_Total"), Some(3));
        assert_eq!(parse_meminfo(text, "HugePages"), None);
        assert_eq!(parse_meminfo("Hugepagesize: x kB", "Hugepagesize"), None);
    }

    #[test]
    fn this_host_has_pages_and_a_boot() {
        assert!(base_page().is_power_of_two());
        assert_eq!(boot_id().unwrap().len(), 36);
    }
}
