//! How close the copy engine comes to a plain loop over the same memory, printed as one JSON object.
//!
//! `cargo run --release -p flashboot-memory --example bench_copy -- [GIB] [THREADS]` (defaults: 2, all cores).
//! Every figure is the median of five runs over two pre-faulted memfds; the ways are measured in turn within
//! each run, so that a busy neighbour hits all of them. Rates are bytes per second.

use flashboot_core::{Arena as _, ArenaSpec, ByteRange, Pull, digest};
use flashboot_memory::{CopyEngine, CopyEngineConfig, Expected, HostArena, HostArenaConfig, ImportedArena};
use std::{
    error::Error,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

const RUNS: usize = 5;
const BLOCK: u64 = 16 << 20;

/// One half of the memory each thread works on.
#[derive(Clone, Copy)]
struct Ends {
    from: *const u8,
    to: *mut u8,
}
// SAFETY: the threads work on disjoint ranges of memory that outlives them.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}

impl Ends {
    fn at(&self, offset: usize) -> (*const u8, *mut u8) {
        (self.from.wrapping_add(offset), self.to.wrapping_add(offset))
    }
}

/// `work(offset, length)` on every thread's contiguous share.
fn on_all(threads: usize, len: usize, work: impl Fn(usize, usize) + Sync) -> Duration {
    let started = Instant::now();
    let share = len.div_ceil(threads).next_multiple_of(BLOCK as usize);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            let start = (thread * share).min(len);
            scope.spawn(move || work(start, share.min(len - start)));
        }
    });
    started.elapsed()
}

fn fused(ends: Ends, payload: u64, start: usize, len: usize, piece: usize) {
    for at in (start..start + len).step_by(piece) {
        let n = piece.min(start + len - at);
        let (from, to) = ends.at(at);
        // SAFETY: within both arenas; nobody else touches them while the loop runs.
        unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
        // SAFETY: as above, initialised by the copy.
        let landed = unsafe { std::slice::from_raw_parts(to.cast_const(), n) };
        std::hint::black_box(digest::piece(payload, at as u64, landed));
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::NAN, Duration::as_secs_f64)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let gib: f64 = args.next().map_or(Ok(2.0), |a| a.parse())?;
    let cores = std::thread::available_parallelism()?.get();
    let threads: usize = args.next().map_or(Ok(cores), |a| a.parse())?;
    let bytes = (gib * f64::from(1u32 << 30)) as u64 / BLOCK * BLOCK;
    let len = usize::try_from(bytes)?;

    let spec = ArenaSpec { payload: bytes, shards: 1 };
    let config = HostArenaConfig { prefault_threads: cores, ..HostArenaConfig::default() };
    let (source, report) = HostArena::create(spec, &config)?;
    let (sink, _) = HostArena::create(spec, &config)?;
    for (index, block) in (0..bytes).step_by(BLOCK as usize).enumerate() {
        source.fill(ByteRange::new(block, block + BLOCK), index as u8)?;
    }
    let expected = Expected { payload: bytes, capacity: source.capacity(), shards: 1 };
    let import = || -> Result<Arc<ImportedArena>, Box<dyn Error>> {
        Ok(Arc::new(ImportedArena::map(source.as_fd().try_clone_to_owned()?, expected)?))
    };
    let peer = import()?;
    let started = Instant::now();
    peer.populate(started + Duration::from_secs(60));
    let populate = started.elapsed();
    let engine = CopyEngine::new(&CopyEngineConfig { threads: Some(threads) })?;
    let ends = Ends { from: peer.base().as_ptr().cast_const(), to: sink.base().as_ptr() };

    let chunks_of =
        |peer: &Arc<ImportedArena>, hash: Option<u64>, chunk: u64| -> Result<Duration, Box<dyn Error>> {
            let started = Instant::now();
            let jobs: Vec<_> = (0..bytes)
                .step_by(usize::try_from(chunk)?)
                .map(|at| {
                    let range = ByteRange::new(at, (at + chunk).min(bytes));
                    engine.pull(peer, &sink, Pull { range, hash })
                })
                .collect::<Result<_, _>>()?;
            for job in jobs {
                job.wait()?;
            }
            Ok(started.elapsed())
        };
    let chunks = |hash, chunk| chunks_of(&peer, hash, chunk);
    let pieces: Vec<usize> = [64, 128, 256, 512, 1024].map(|kib| kib << 10).to_vec();
    let mut fused_times = vec![Vec::new(); pieces.len()];
    let (mut memcpy, mut verified, mut plain, mut plain_chunked) = (vec![], vec![], vec![], vec![]);
    let mut first_pass = vec![];
    for _ in 0..RUNS {
        for (piece, times) in pieces.iter().zip(&mut fused_times) {
            times.push(on_all(threads, len, |start, n| {
                fused(ends, bytes, start, n, *piece);
            }));
        }
        verified.push(chunks(Some(BLOCK), 256 << 20)?);
        first_pass.push(chunks_of(&import()?, Some(BLOCK), 256 << 20)?);
        memcpy.push(on_all(threads, len, |start, n| {
            let (from, to) = ends.at(start);
            // SAFETY: within both arenas; nobody else touches them while the copy runs.
            unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
        }));
        plain.push(chunks(None, bytes)?);
        plain_chunked.push(chunks(None, 256 << 20)?);
    }

    let rate = |times: Vec<Duration>| bytes as f64 / median(times);
    let fused_rates: Vec<f64> = fused_times.into_iter().map(rate).collect();
    let best_fused = fused_rates.iter().copied().fold(0.0, f64::max);
    let (memcpy, verified) = (rate(memcpy), rate(verified));
    let first_pass = rate(first_pass);
    let (plain, plain_chunked) = (rate(plain), rate(plain_chunked));
    let by_piece: serde_json::Map<String, serde_json::Value> = pieces
        .iter()
        .zip(&fused_rates)
        .map(|(piece, rate)| (format!("{}KiB", piece >> 10), rate.round().into()))
        .collect();
    let report = serde_json::json!({
        "bytes": bytes,
        "threads": threads,
        "runs": RUNS,
        "pages": report.to_string(),
        "prefault_bytes_per_s": report.prefault.map(|t| (bytes as f64 / t.as_secs_f64()).round()),
        "import_populate_ms": populate.as_secs_f64() * 1e3,
        "fused_loop_bytes_per_s": best_fused.round(),
        "fused_loop_by_piece_bytes_per_s": by_piece,
        "verified_bytes_per_s": verified.round(),
        "verified_over_fused_loop": verified / best_fused,
        "verified_first_pass_of_an_import_bytes_per_s": first_pass.round(),
        "memcpy_bytes_per_s": memcpy.round(),
        "unverified_bytes_per_s": plain.round(),
        "unverified_over_memcpy": plain / memcpy,
        "unverified_256mib_chunks_bytes_per_s": plain_chunked.round(),
        "unverified_256mib_chunks_over_memcpy": plain_chunked / memcpy,
    });
    println!("{report:#}");
    let how = format!("{gib} GiB pre-faulted memfds, {threads} threads, medians of {RUNS}");
    let row = |name: &str, measured: f64| {
        let measured = (measured * 1e3).round() / 1e3;
        serde_json::json!({ "name": name, "target": "≥ 0.9", "measured": measured, "ok": measured >= 0.9, "how": how })
    };
    println!(
        "{}",
        serde_json::json!({ "rows": [
        row("copy engine, verified ÷ fused copy + hash loop", verified / best_fused),
        row("copy engine, unverified ÷ memcpy", plain / memcpy),
    ] })
    );
    Ok(())
}
