//! One line of where a machine's memory is: what the kernel counts, what GPUs' processes have, and what nobody accounts
//! for. Engines size their caches from what is left, so what a loader leaves behind must be seen.

use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// Counters of `/proc/meminfo` that do not overlap: together with what drivers keep to themselves they are all of it.
const PARTS: [&str; 11] = [
    "MemFree",
    "Buffers",
    "Cached",
    "SwapCached",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "SecPageTables",
    "Percpu",
    "HugetlbTotal",
];

/// Memory at one moment, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct MemLog {
    /// When: `before`, `after the target`.
    pub phase: String,
    /// All of the machine's.
    pub total: u64,
    /// What can be had without swapping.
    pub available: u64,
    /// Counters by the kernel's names.
    pub counters: BTreeMap<String, u64>,
    /// Resident in this process.
    pub resident: u64,
    /// GPU memory by process, where NVML says.
    pub gpu: Vec<GpuUse>,
    /// What no counter has: drivers' own, above all.
    pub unaccounted: u64,
}

/// What one process has of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuUse {
    /// The GPU's UUID.
    pub gpu: String,
    /// The host's number of the process.
    pub process: u32,
    /// Bytes; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

impl MemLog {
    /// Looks now. What cannot be read is left out; `gpu` is what the caller knows of GPUs.
    pub fn now(phase: &str, gpu: Vec<GpuUse>) -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self::of(phase, &meminfo, &status, gpu)
    }

    fn of(phase: &str, meminfo: &str, status: &str, gpu: Vec<GpuUse>) -> Self {
        let mut all = lines(meminfo);
        let get = |name: &str| all.get(name).copied().unwrap_or(0);
        // `Cached` has shared memory in it, `AnonPages` transparent huge pages; huge pages of their own are outside all of them.
        let huge = lines_plain(meminfo, "HugePages_Total").saturating_mul(get("Hugepagesize"));
        let (total, available) = (get("MemTotal"), get("MemAvailable"));
        all.insert("HugetlbTotal".into(), if all.contains_key("Hugetlb") { get("Hugetlb") } else { huge });
        let counted: u64 = PARTS.iter().filter_map(|name| all.get(*name)).sum();
        let wanted = |name: &str| {
            PARTS.contains(&name) || matches!(name, "Shmem" | "Mapped" | "Unevictable" | "Mlocked")
        };
        all.retain(|name, _| wanted(name));
        Self {
            phase: phase.to_owned(),
            total,
            available,
            resident: lines(status).get("VmRSS").copied().unwrap_or(0),
            gpu,
            unaccounted: total.saturating_sub(counted),
            counters: all,
        }
    }

    /// What has gone from what is available since `before`, beyond what this process itself has grown by; negative: it came
    /// back.
    pub fn lost_since(&self, before: &Self) -> i64 {
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let gone = signed(before.available).saturating_sub(signed(self.available));
        gone.saturating_sub(signed(self.resident).saturating_sub(signed(before.resident)))
    }
}

/// `Name:   123 kB` by name, in bytes.
fn lines(text: &str) -> BTreeMap<String, u64> {
    let one = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some((name.to_owned(), kib.checked_mul(1024)?))
    };
    text.lines().filter_map(one).collect()
}

fn lines_plain(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
}

impl fmt::Display for MemLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
        write!(
            f,
            "memory {}: total {:.2} GiB, available {:.2}, resident {:.2}, unaccounted {:.2}",
            self.phase,
            gib(self.total),
            gib(self.available),
            gib(self.resident),
            gib(self.unaccounted)
        )?;
        self.counters.iter().try_for_each(|(name, bytes)| write!(f, ", {name} {:.2}", gib(*bytes)))?;
        for GpuUse { gpu, process, bytes } in &self.gpu {
            match bytes {
                Some(bytes) => write!(f, ", {gpu} process {process} {:.2}", gib(*bytes))?,
                None => write!(f, ", {gpu} process {process} not told")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  1000 kB\nMemFree:  300 kB\nMemAvailable:  400 kB\nBuffers: 10 kB\nCached: 90 kB\n\
        Shmem: 50 kB\nAnonPages: 200 kB\nSlab: 40 kB\nKernelStack: 5 kB\nPageTables: 5 kB\nHugePages_Total: 2\n\
        Hugepagesize: 50 kB\nnonsense\nBad: x kB\n";

    #[test]
    fn what_no_counter_has_is_unaccounted() {
        let log = MemLog::of("before", MEMINFO, "VmRSS:\t 7 kB\n", Vec::new());
        assert_eq!((log.total, log.available, log.resident), (1000 << 10, 400 << 10, 7 << 10));
        assert_eq!(log.unaccounted, (1000 - 300 - 10 - 90 - 200 - 40 - 5 - 5 - 100) << 10);
        let gpu = vec![GpuUse { gpu: "GPU-1".into(), process: 7, bytes: Some(1 << 30) }];
        let line = MemLog { gpu, ..log.clone() }.to_string();
        assert!(line.contains("memory before") && line.contains("GPU-1 process 7 1.00"), "{line}");
        let later = MemLog::of("after", &MEMINFO.replace("400", "380"), "VmRSS:\t 12 kB\n", Vec::new());
        assert_eq!(later.lost_since(&log), 15 << 10);
        assert_eq!(log.lost_since(&later), -(15 << 10));
    }

    #[test]
    fn this_machine_says_something() {
        let log = MemLog::now("now", Vec::new());
        assert!(log.total > log.available && log.resident > 0 && log.unaccounted < log.total, "{log}");
        assert_eq!(MemLog::of("x", "", "", Vec::new()).unaccounted, 0);
    }
}
