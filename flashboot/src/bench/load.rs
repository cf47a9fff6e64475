//! A load, beside reading the same files and doing nothing with them: with the page cache empty and with everything in it,
//! in the same run and alternated, so that a machine that is slow for a while is slow for both.

use super::median;
use crate::load::{Request, files, load};
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::io::{Io, IoConfig};
use flashboot_memory::{Buffer, uncache};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Bytes one thread reads at a time.
const UNIT: u64 = 16 << 20;

/// Medians in milliseconds, sizes in bytes, rates in bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadFigures {
    /// `cold`: nothing of the files was in the page cache. `warm`: all of it was.
    pub state: &'static str,
    /// Bytes of the files that are read.
    pub file_bytes: u64,
    /// Reading them with the same threads, and doing nothing with them.
    pub raw_ms: f64,
    /// See [`raw_ms`](Self::raw_ms).
    pub raw_bytes_per_s: f64,
    /// Bytes that the rank needs.
    pub bytes: u64,
    /// The load: arena made, every byte there and, where there are digests, verified.
    pub load_ms: f64,
    /// Of it, making the arena: its memory faulted in.
    pub bind_ms: f64,
    /// Bytes by the load less making the arena.
    pub bytes_per_s: f64,
    /// `bytes_per_s` by `raw_bytes_per_s`.
    pub ratio: f64,
    /// How files were read.
    pub engine: &'static str,
    /// How often each was measured.
    pub repeats: u32,
}

/// Measures `request` cold and warm, `repeats` times each.
///
/// # Errors
/// Those of the load; [`Kind::Invalid`] where it reads no files.
pub async fn load_beside_raw(request: &Request, repeats: u32) -> Result<Vec<LoadFigures>> {
    let files = files(request)?;
    if files.is_empty() {
        return Err(Error::new(
            Kind::Invalid,
            "bench",
            "there are no files to be read: name an image or a checkpoint",
        ));
    }
    let mut found = Vec::new();
    for state in ["cold", "warm"] {
        found.push(measure(request, &files, state, repeats).await?);
    }
    Ok(found)
}

async fn measure(
    request: &Request,
    files: &[PathBuf],
    state: &'static str,
    repeats: u32,
) -> Result<LoadFigures> {
    let (mut raw, mut whole, mut bind, mut net) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut bytes, mut file_bytes, mut engine) = (0, 0, "pread");
    // The first is not counted: it warms what is to be warm, and takes what is new only once.
    for repeat in 0..=repeats {
        prepare(files, state)?;
        let began = Instant::now();
        file_bytes = read_all(files, request)?;
        let took = began.elapsed().as_secs_f64() * 1e3;
        prepare(files, state)?;
        let (arena, loaded) = load(request.clone()).await?;
        drop(arena);
        if repeat > 0 {
            raw.push(took);
            whole.push(loaded.engine_visible_ms);
            bind.push(loaded.phases_ms.bind);
            net.push((loaded.engine_visible_ms - loaded.phases_ms.bind).max(1e-6));
        }
        (bytes, engine) = (loaded.bytes_needed, loaded.io.engine);
    }
    let rate = |bytes: u64, ms: f64| bytes as f64 / ms.max(1e-6) * 1e3;
    let (raw_ms, net_ms) = (median(raw), median(net));
    let (raw_bytes_per_s, bytes_per_s) = (rate(file_bytes, raw_ms), rate(bytes, net_ms));
    Ok(LoadFigures {
        state,
        file_bytes,
        raw_ms,
        raw_bytes_per_s,
        bytes,
        load_ms: median(whole),
        bind_ms: median(bind),
        bytes_per_s,
        ratio: bytes_per_s / raw_bytes_per_s.max(1e-6),
        engine,
        repeats,
    })
}

/// Empties the page cache of the files, or fills it with them.
fn prepare(files: &[PathBuf], state: &str) -> Result<()> {
    for path in files {
        let failed = |e: std::io::Error| Error::from_io("read", &e, path.display().to_string());
        let mut file = std::fs::File::open(path).map_err(failed)?;
        if state == "warm" {
            std::io::copy(&mut file, &mut std::io::sink()).map_err(failed)?;
            continue;
        }
        // What is dirty stays: a file that was just written is written out first.
        file.sync_all().map_err(failed)?;
        uncache(&file, 0, file.metadata().map_err(failed)?.len());
    }
    Ok(())
}

/// Reads everything with the threads that a load has, into buffers that are used again.
fn read_all(files: &[PathBuf], request: &Request) -> Result<u64> {
    let io = Io::new(&IoConfig { direct: request.config.load.direct, ..IoConfig::default() })?;
    let files: Vec<_> = files.iter().map(|path: &PathBuf| io.open(Path::new(path))).collect::<Result<_>>()?;
    let units = files.iter().enumerate().flat_map(|(number, file)| {
        (0..file.len()).step_by(usize::try_from(UNIT).unwrap_or(1)).map(move |at| (number, at))
    });
    let units: Vec<_> = units.collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || -> Result<()> {
        let mut lane = io.lane();
        let mut buffer = Buffer::new(usize::try_from(UNIT).unwrap_or(usize::MAX))?;
        while let Some((number, at)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(file) = files.get(*number) else { break };
            let len = (file.len() - at).min(UNIT).next_multiple_of(4096);
            let into = buffer.as_mut_slice().get_mut(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
            lane.read(file, *at, into, &mut |_, _| Ok(()))?;
        }
        Ok(())
    };
    let one = || {
        if let Err(e) = work() {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    };
    let threads = crate::load::threads_of(&request.config)?;
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(one);
        }
        one();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(files.iter().map(|file| file.len()).sum()),
    }
}
