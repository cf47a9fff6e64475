//! How fast `replicate` is beside the loops it cannot beat, on this machine, in one run.
//!
//! `cargo run --release -p flashboot-cli --example bench_replicate [-- SIZE [DIR]]` writes a payload of SIZE
//! (2GiB) into DIR (the temporary directory), then in each of five rounds, over pre-faulted memfds and with all
//! cores: a plain copy, a fused copy + hash, and replications to one clone (unverified, verified) and to a chain
//! of four. The last line of stdout is one JSON object with the ratios of the medians.
#![forbid(unsafe_code)]

use flashboot::{
    config::{Choice, Memory, Replicate},
    replicate::{Report, Request, Source, WorkerArgs, Workers, run, worker},
};
use flashboot_core::{
    Arena as _, ArenaSpec, BLOCK, BlockDigest, ByteRange, ByteSize, Digests, Geometry, TransportName, digest,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    error::Error,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

const ROUNDS: usize = 5;
const CHAIN: u32 = 4;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let [verb, _, board, _, rank] = arguments.as_slice()
        && verb == "worker"
    {
        return Ok(runtime.block_on(worker(WorkerArgs { board: board.into(), rank: rank.parse()? }))?);
    }
    let size: ByteSize = arguments.first().map_or("2GiB", String::as_str).parse()?;
    let directory = arguments.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let scratch = tempfile::Builder::new().prefix("flashboot-bench-").tempdir_in(&directory)?;
    let source = payload(&scratch.path().join("payload.img"), size.0)?;
    let cores = std::thread::available_parallelism()?.get();
    eprintln!("{size} on {cores} cores, {ROUNDS} rounds");

    let mut took = Took::default();
    for round in 0..ROUNDS {
        {
            let from = arena(size.0, cores)?;
            let into = arena(size.0, cores)?;
            from.fill(ByteRange::new(0, size.0), 0x5a)?;
            // The first pass over fresh page tables is not measured.
            pass(&from, &into, cores, 1 << 20, false)?;
            // Each loop in the better of two piece sizes.
            took.copy.push(best(|piece| pass(&from, &into, cores, piece, false), [1 << 20, 64 << 20])?);
            let used = processor_ms();
            let fused = |piece| pass(&from, &into, cores, piece, true);
            let pieces = [256 << 10, 1 << 20];
            took.fused.push(best(fused, pieces)?);
            took.fused_processor.push((processor_ms() - used) / pieces.len() as f64);
        }
        took.plain.push(ready(&replicate(&runtime, &source, 1, false)?)?);
        took.verified.push(ready(&replicate(&runtime, &source, 1, true)?)?);
        let chain = replicate(&runtime, &source, CHAIN, true)?;
        took.chain.push(chain.tail_ms.ok_or("no clone became ready")?);
        took.chain_processor.push(chain.clones.iter().filter_map(|clone| clone.processor_ms).sum());
        eprintln!(
            "round {round}: copy {:.0} ms, copy + hash {:.0} ms, replicate unverified {:.0} ms, verified {:.0} ms, chain of {CHAIN} {:.0} ms",
            last(&took.copy),
            last(&took.fused),
            last(&took.plain),
            last(&took.verified),
            last(&took.chain),
        );
    }
    println!("{}", took.report(size, cores));
    Ok(())
}

/// Milliseconds, round by round.
#[derive(Default)]
struct Took {
    copy: Vec<f64>,
    fused: Vec<f64>,
    plain: Vec<f64>,
    verified: Vec<f64>,
    chain: Vec<f64>,
    /// Processor time, which a busy neighbour does not lengthen as it does the clock's.
    fused_processor: Vec<f64>,
    chain_processor: Vec<f64>,
}

impl Took {
    fn report(&self, size: ByteSize, cores: usize) -> serde_json::Value {
        let (copy, fused) = (median(&self.copy), median(&self.fused));
        let (plain, verified, chain) = (median(&self.plain), median(&self.verified), median(&self.chain));
        let how =
            |what: String| format!("{what}; medians of {ROUNDS}, {size}, {cores} cores, pre-faulted memfds");
        let rounded = |n: f64| (n * 1e3).round() / 1e3;
        let row = |name: &str, target: f64, measured: f64, ok: bool, how: String| serde_json::json!({ "name": name, "target": target, "measured": rounded(measured), "ok": ok, "how": how });
        let (against_fused, against_copy) = (fused / verified, copy / plain);
        let chained = chain / (f64::from(CHAIN) * fused);
        let chained_processor =
            median(&self.chain_processor) / (f64::from(CHAIN) * median(&self.fused_processor));
        serde_json::json!({ "rows": [
            row("replicate verified ÷ fused copy + hash loop (at least)", 0.9, against_fused, against_fused >= 0.9,
                how(format!("release → ready {verified:.0} ms, loop {fused:.0} ms"))),
            row("replicate unverified ÷ memcpy (at least)", 0.9, against_copy, against_copy >= 0.9,
                how(format!("release → ready {plain:.0} ms, memcpy {copy:.0} ms"))),
            row("chain of 4 ÷ four fused loops (at most)", 1.15, chained, chained <= 1.15,
                how(format!("release → last ready {chain:.0} ms, loop {fused:.0} ms, of processor time {chained_processor:.2} times as much"))),
        ] })
    }
}

fn processor_ms() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn last(values: &[f64]) -> f64 {
    values.last().copied().unwrap_or(f64::NAN)
}

fn best(run: impl Fn(u64) -> Result<f64>, pieces: [u64; 2]) -> Result<f64> {
    pieces.into_iter().map(run).try_fold(f64::INFINITY, |best, ms| ms.map(|ms| best.min(ms)))
}

fn arena(payload: u64, threads: usize) -> Result<Arc<HostArena>> {
    let config = HostArenaConfig { prefault_threads: threads, ..HostArenaConfig::default() };
    Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &config)?.0)
}

/// Copies all of `from` to `into`, piece by piece on all cores, and hashes each piece where it landed.
fn pass(from: &HostArena, into: &HostArena, threads: usize, piece: u64, hash: bool) -> Result<f64> {
    let payload = from.payload();
    let next = AtomicU64::new(0);
    let failed = Mutex::new(None);
    let began = Instant::now();
    let work = || -> flashboot_core::Result<()> {
        loop {
            let start = next.fetch_add(piece, Ordering::Relaxed);
            if start >= payload {
                return Ok(());
            }
            let range = ByteRange::new(start, (start + piece).min(payload));
            let (mut source, mut target) = (from.own(range)?, into.own(range)?);
            target.as_mut_slice().copy_from_slice(source.as_mut_slice());
            if hash {
                std::hint::black_box(digest::piece(payload, start, target.as_mut_slice()));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                if let (Err(e), Ok(mut failed)) = (work(), failed.lock()) {
                    *failed = Some(e);
                }
            });
        }
    });
    let took = began.elapsed().as_secs_f64() * 1e3;
    match failed.into_inner() {
        Ok(None) => Ok(took),
        Ok(Some(e)) => Err(e.into()),
        Err(_) => Err("a thread panicked".into()),
    }
}

/// Writes a payload of `bytes` and hashes it.
fn payload(path: &Path, bytes: u64) -> Result<Source> {
    let geometry = Geometry::new(bytes, BLOCK, BLOCK, 1)?;
    let mut file = File::create(path)?;
    let mut values: Vec<BlockDigest> = Vec::new();
    let mut block: Vec<u8> = (0..BLOCK).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    for index in 0..geometry.blocks() {
        let len = usize::try_from(geometry.block_range(index).len())?;
        // Every block differs from the others.
        for (byte, new) in block.iter_mut().zip(index.to_le_bytes()) {
            *byte = new;
        }
        let part = block.get(..len).ok_or("a block longer than a block")?;
        values.push(digest::block(&geometry, index, part));
        file.write_all(part)?;
    }
    file.sync_all()?;
    let digests = Digests::new(bytes, BLOCK, values)?;
    Ok(Source { image: "bench".into(), rank: "bench".into(), payload: path.to_owned(), digests })
}

fn replicate(
    runtime: &tokio::runtime::Runtime,
    source: &Source,
    clones: u32,
    verify: bool,
) -> Result<Report> {
    let outcome = runtime.block_on(run(Request {
        source: source.clone(),
        settings: Replicate {
            clones,
            verify,
            transport: Choice::Only(TransportName::Ipc),
            ..Replicate::default()
        },
        memory: Memory::default(),
        kill: None,
        workers: Workers {
            program: std::env::current_exe()?,
            args: vec!["worker".into()],
            directory: std::env::temp_dir(),
            stderr: |rank, line| eprintln!("rank {rank}: {line}"),
        },
    }))?;
    match outcome.error {
        None => Ok(outcome.report),
        Some(e) => Err(e.into()),
    }
}

fn ready(report: &Report) -> Result<f64> {
    Ok(report.clones.first().and_then(|clone| clone.ready_ms).ok_or("the clone did not become ready")?)
}
