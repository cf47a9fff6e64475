//! What the benches of this crate share: times, medians, memory of a child, bytes that no file system makes smaller, and
//! a header as plain serde_json parses it. Each bench uses a part of this.
#![allow(dead_code, unreachable_pub, reason = "each bench uses a part of it")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

pub type Failure = Box<dyn std::error::Error>;

/// Seconds that it takes.
pub fn seconds(run: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let begun = Instant::now();
    run()?;
    Ok(begun.elapsed().as_secs_f64())
}

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Lets the disk finish what it was given before, so that no measurement pays for another's writes.
pub fn settle() {
    rustix::fs::sync();
}

/// Seconds that `cp` takes, until the copy is on the disk; the copy is removed.
pub fn copy(from: &Path, to: &Path) -> Result<f64, Failure> {
    let copied = seconds(|| {
        let status = Command::new("cp").arg("--reflink=never").arg(from).arg(to).status()?;
        if !status.success() {
            return Err("cp failed".into());
        }
        Ok(File::open(to)?.sync_all()?)
    })?;
    std::fs::remove_file(to)?;
    Ok(copied)
}

/// Peak resident bytes of this binary, started again with `--child WHAT PATH`.
pub fn peak(what: &str, path: &Path) -> Result<u64, Failure> {
    let output = Command::new(std::env::current_exe()?).args(["--child", what]).arg(path).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Prints what [`peak`] reads: the most this process ever had resident.
pub fn print_peak() -> Result<(), Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    println!("{}", kib * 1024);
    Ok(())
}

/// Writes as much noise behind what a file has, and waits for the disk.
pub fn fill(file: File, bytes: u64) -> Result<(), Failure> {
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut noise = vec![0; 1 << 20];
    let mut xof = blake3::Hasher::new().finalize_xof();
    let mut left = bytes;
    while left > 0 {
        let now = left.min(noise.len() as u64);
        let part = noise.get_mut(..usize::try_from(now)?).unwrap_or_default();
        xof.fill(part);
        out.write_all(part)?;
        left -= now;
    }
    out.into_inner()?.sync_all()?;
    Ok(())
}

/// What a plain serde_json reader makes of one tensor.
#[derive(serde::Deserialize)]
pub struct Plain {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// A header without metadata as serde_json parses it.
pub fn parse_plain(json: &str) -> Result<HashMap<String, Plain>, Failure> {
    Ok(serde_json::from_str(json)?)
}

pub fn shard_name(i: u64, of: u64) -> String {
    format!("model-{:05}-of-{of:05}.safetensors", i + 1)
}
