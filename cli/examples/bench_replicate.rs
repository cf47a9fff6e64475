//! How fast `replicate` is beside the loops it cannot beat, on this machine, in one run.
//!
//! `cargo run --release -p flashboot-cli --example bench_replicate [-- SIZE [DIR]]` writes a payload of SIZE
//! (2GiB) into DIR (the temporary directory), then in each of five rounds, over pre-faulted memfds and with all
//! cores: a plain copy, a fused copy + hash, and replications to one clone (unverified, verified) and to a chain
//! of four. The last line of stdout is one JSON object with the ratios of the medians.
#![forbid(unsafe_code)]

use flashboot::{
    config::{Choice, Memory, Replicate},
    network::Network,
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
            for (loops, pieces, hash) in
                [(&mut took.copy, [1 << 20, 64 << 20], false), (&mut took.fused, [256 << 10, 1 << 20], true)]
            {
                for (times, piece) in loops.iter_mut().zip(pieces) {
                    times.push(pass(&from, &into, cores, piece, hash)?);
                }
            }
        }
        took.plain.push(Time::of(&replicate(&runtime, &source, 1, false)?)?);
        took.verified.push(Time::of(&replicate(&runtime, &source, 1, true)?)?);
        took.chain.push(Time::of(&replicate(&runtime, &source, CHAIN, true)?)?);
        eprintln!("round {round} of {ROUNDS}: {}", took.last());
    }
    println!("{}", took.report(size, cores));
    Ok(())
}

/// Milliseconds of the clock, and of all processors, which a busy neighbour does not lengthen as it does the
/// clock's.
#[derive(Debug, Clone, Copy)]
struct Time {
    wall: f64,
    processor: f64,
}

impl Time {
    /// From the release to the last clone's commit.
    fn of(report: &Report) -> Result<Self> {
        let processor = report.clones.iter().filter_map(|clone| clone.processor_ms).sum();
        Ok(Self { wall: report.tail_ms.ok_or("no clone became ready")?, processor })
    }
}

/// Round by round; the loops in two piece sizes, of which the faster counts.
#[derive(Debug, Default)]
struct Took {
    copy: [Vec<Time>; 2],
    fused: [Vec<Time>; 2],
    plain: Vec<Time>,
    verified: Vec<Time>,
    chain: Vec<Time>,
}

impl Took {
    fn last(&self) -> String {
        let last = |took: &[Time]| took.last().map_or(f64::NAN, |took| took.wall);
        let [copy, fused] =
            [&self.copy, &self.fused].map(|l| l.iter().map(|t| last(t)).fold(f64::INFINITY, f64::min));
        let [plain, verified, chain] = [&self.plain, &self.verified, &self.chain].map(|took| last(took));
        format!(
            "copy {copy:.0} ms, copy + hash {fused:.0} ms, replicate unverified {plain:.0} ms, verified \
             {verified:.0} ms, chain of {CHAIN} {chain:.0} ms"
        )
    }

    fn report(&self, size: ByteSize, cores: usize) -> serde_json::Value {
        // Round by round, so that what slows the machine for a while slows both sides of a ratio.
        let faster = |loops: &[Vec<Time>; 2]| -> Vec<Time> {
            let [one, other] = loops;
            let faster = |(a, b): (&Time, &Time)| if a.wall <= b.wall { *a } else { *b };
            one.iter().zip(other).map(faster).collect()
        };
        let (copy, fused) = (faster(&self.copy), faster(&self.fused));
        let rounded = |n: f64| (n * 1e3).round() / 1e3;
        let row = |name: &str, target: &str, ok: fn(f64) -> bool, over: Ratio| {
            let measured = rounded(over.wall);
            let how = format!(
                "{:.0} ms against {:.0} ms, by processor time the ratio is {:.2}; median of {ROUNDS} rounds' ratios, {size}, {cores} cores, pre-faulted memfds",
                over.ours, over.loops, over.processor
            );
            serde_json::json!({ "name": name, "target": target, "measured": measured, "ok": ok(measured), "how": how })
        };
        let times = f64::from(CHAIN);
        serde_json::json!({ "rows": [
            row("replicate verified ÷ fused copy + hash loop", "≥ 0.9", |r| r >= 0.9, Ratio::of(&self.verified, &fused, 1.0).inverse()),
            row("replicate unverified ÷ memcpy", "≥ 0.9", |r| r >= 0.9, Ratio::of(&self.plain, &copy, 1.0).inverse()),
            row("chain of 4 ÷ four fused loops", "≤ 1.15", |r| r <= 1.15, Ratio::of(&self.chain, &fused, times)),
        ] })
    }
}

/// How long ours took over how long as many loops took: the median of the rounds' ratios, and the median times.
#[derive(Debug, Clone, Copy)]
struct Ratio {
    wall: f64,
    processor: f64,
    ours: f64,
    loops: f64,
}

impl Ratio {
    fn of(ours: &[Time], loops: &[Time], times: f64) -> Self {
        let of = |value: fn(&Time, &Time, f64) -> f64| {
            let mut sorted: Vec<f64> = ours.iter().zip(loops).map(|(o, l)| value(o, l, times)).collect();
            sorted.sort_by(f64::total_cmp);
            sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
        };
        Self {
            wall: of(|o, l, times| o.wall / (times * l.wall)),
            processor: of(|o, l, times| o.processor / (times * l.processor)),
            ours: of(|o, _, _| o.wall),
            loops: of(|_, l, times| times * l.wall),
        }
    }

    /// As a rate: how fast ours was, the loop being 1.
    fn inverse(self) -> Self {
        Self { wall: 1.0 / self.wall, processor: 1.0 / self.processor, ..self }
    }
}

fn processor_ms() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn arena(payload: u64, threads: usize) -> Result<Arc<HostArena>> {
    let config = HostArenaConfig { prefault_threads: threads, ..HostArenaConfig::default() };
    Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &config)?.0)
}

/// Copies all of `from` to `into`, piece by piece on all cores, and hashes each piece where it landed.
fn pass(from: &HostArena, into: &HostArena, threads: usize, piece: u64, hash: bool) -> Result<Time> {
    let payload = from.payload();
    let next = AtomicU64::new(0);
    let failed = Mutex::new(None);
    let (began, used) = (Instant::now(), processor_ms());
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
    let took = Time { wall: began.elapsed().as_secs_f64() * 1e3, processor: processor_ms() - used };
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
    let outcome = runtime.block_on(run(
        Request {
            source: source.clone(),
            settings: Replicate {
                clones,
                verify,
                transport: Choice::Only(TransportName::Ipc),
                ..Replicate::default()
            },
            memory: Memory::default(),
            network: Network::default(),
            kill: None,
            workers: Workers {
                program: std::env::current_exe()?,
                args: vec!["worker".into()],
                directory: std::env::temp_dir(),
                stderr: |rank, line| eprintln!("rank {rank}: {line}"),
            },
        },
        std::future::pending(),
    ))?;
    match outcome.error {
        None => Ok(outcome.report),
        Some(e) => Err(e.into()),
    }
}
