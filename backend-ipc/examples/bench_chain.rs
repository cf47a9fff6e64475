//! A chain of processes over ipc against a plain loop that copies and hashes as often, as one JSON object.
//!
//! `cargo run --release -p flashboot-backend-ipc --example bench_chain -- [MIB] [CLONES] [CHUNK_MIB]` (defaults:
//! 1024, 4, 64). Medians of five; `ratio` is the chain's time, release to last clone verified, over the time
//! of CLONES fused copy + hash loops with all cores over memory that is faulted in. `cpu_ratio` is the same of processor
//! time, for a machine that is busy with other things.

use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Generation, Geometry, HandleExchange, Locator, Pull, ShardId,
    Transport as _, digest,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    error::Error,
    io::{BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

const ROLE: &str = "FLASHBOOT_BENCH_CLONE";
const RUNS: usize = 5;
const BLOCK: u64 = 16 << 20;
const PIECE: usize = 256 << 10;
const LONG: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn number(args: &[String], at: usize, default: u64) -> Outcome<u64> {
    Ok(args.get(at).map_or(Ok(default), |a| a.parse())?)
}

fn arena(payload: u64) -> Outcome<Arc<HostArena>> {
    let threads = std::thread::available_parallelism()?.get();
    let config = HostArenaConfig { prefault_threads: threads, ..HostArenaConfig::default() };
    Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &config)?.0)
}

async fn endpoint(directory: &str) -> Outcome<Arc<dyn HandleExchange>> {
    let config = IpcConfig { directory: directory.into(), ..IpcConfig::default() };
    Ok(IpcTransport::default().open(config).await?)
}

/// Processor time this process has used, which a busy neighbour does not lengthen as it does the clock's.
fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn line(from: &mut impl std::io::BufRead) -> Outcome<String> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// A clone's life: `DIRECTORY CHUNK`, then for each locator on stdin a whole replication.
async fn clone(args: &[String]) -> Outcome<()> {
    let directory = args.first().ok_or("no directory")?;
    let chunk = number(args, 1, 64 << 20)?;
    let exchange = endpoint(directory).await?;
    let mut own: Option<Arc<HostArena>> = None;
    let mut stdin = std::io::stdin().lock();
    loop {
        let text = line(&mut stdin)?;
        if text.is_empty() {
            return Ok(());
        }
        let from: Locator = text.parse()?;
        let into = match own.take() {
            Some(arena) => arena,
            None => arena(from.payload)?,
        };
        into.begin(Generation::from_random(
            u64::from(std::process::id()) << 32 | from.generation.word() & 0xffff,
        ));
        let export = exchange.export(into.clone(), LONG).await?;
        let mover = exchange.import(&from, into.clone(), LONG).await?;
        println!("{}", export.locator());
        let started = processor_time();
        let geometry = Geometry::new(from.payload, BLOCK, chunk, 1)?;
        let mut before = None;
        for next in geometry.chunks(ShardId(0)).map(Some).chain([None]) {
            let mut begun = None;
            if let Some(next) = next {
                mover.observe(ShardId(0), next.range.end, LONG).await?;
                begun = Some((mover.start(Pull { range: next.range, hash: Some(BLOCK) })?, next.range.end));
            }
            if let Some((mut job, end)) = std::mem::replace(&mut before, begun) {
                std::hint::black_box(job.quiesced().await?);
                into.publish(ShardId(0), end)?;
            }
        }
        println!("{}", processor_time().saturating_sub(started).as_nanos());
        // Until the parent says that everyone is.
        line(&mut stdin)?;
        drop((mover, export));
        println!("unmapped");
        own = Some(into);
    }
}

struct Clone {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

#[derive(Debug, Clone, Copy)]
struct Ends(*const u8, *mut u8);
// SAFETY: the threads work on disjoint ranges of memory that outlives them.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}

impl Ends {
    fn at(&self, offset: usize) -> (*const u8, *mut u8) {
        (self.0.wrapping_add(offset), self.1.wrapping_add(offset))
    }
}

fn fused(ends: Ends, len: usize, threads: usize) -> Duration {
    let started = Instant::now();
    let share = len.div_ceil(threads).next_multiple_of(PIECE);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for at in (thread * share..len.min((thread + 1) * share)).step_by(PIECE) {
                    let n = PIECE.min(len - at);
                    let (from, to) = ends.at(at);
                    // SAFETY: within both arenas; nobody else touches them while the loop runs.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
                    // SAFETY: as above, initialised by the copy.
                    let landed = unsafe { std::slice::from_raw_parts(to.cast_const(), n) };
                    std::hint::black_box(digest::piece(len as u64, at as u64, landed));
                }
            });
        }
    });
    started.elapsed()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::NAN, Duration::as_secs_f64)
}

async fn parent(args: &[String]) -> Outcome<()> {
    let payload = number(args, 0, 1024)? << 20;
    let clones = number(args, 1, 4)?;
    let chunk = number(args, 2, 64)? << 20;
    let directory = std::env::temp_dir().join(format!("flashboot-chain-{}", std::process::id()));
    let directory = directory.to_str().ok_or("no UTF-8")?.to_owned();
    let source = arena(payload)?;
    for block in (0..payload).step_by(usize::try_from(BLOCK)?) {
        source.fill(ByteRange::new(block, (block + BLOCK).min(payload)), (block / BLOCK) as u8)?;
    }
    let exchange = endpoint(&directory).await?;
    let mut chain = Vec::new();
    for _ in 0..clones {
        let mut child = Command::new(std::env::current_exe()?)
            .args([&directory, &chunk.to_string()])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take().ok_or("stdin")?, child.stdout.take().ok_or("stdout")?);
        chain.push(Clone { child, stdin, stdout: BufReader::new(stdout) });
    }
    let scratch = arena(payload)?;
    let threads = std::thread::available_parallelism()?.get();
    let ends = Ends(source.base().as_ptr().cast_const(), scratch.base().as_ptr());
    let (mut chain_times, mut loop_times, mut setup_times) = (vec![], vec![], vec![]);
    let (mut chain_used, mut loop_used) = (vec![], vec![]);
    // The first round makes the clones' arenas and counts for nothing.
    for run in 0..=RUNS {
        let started = Instant::now();
        source.begin(Generation::from_random(run as u64 + 1));
        let export = exchange.export(source.clone(), LONG).await?;
        let mut locator = export.locator().to_string();
        for clone in &mut chain {
            writeln!(clone.stdin, "{locator}")?;
            locator = line(&mut clone.stdout)?;
        }
        let setup = started.elapsed();
        let released = Instant::now();
        source.publish(ShardId(0), payload)?;
        let mut used = Duration::ZERO;
        for clone in &mut chain {
            used += Duration::from_nanos(line(&mut clone.stdout)?.parse()?);
        }
        let took = released.elapsed();
        for clone in &mut chain {
            writeln!(clone.stdin, "next")?;
            line(&mut clone.stdout)?;
        }
        if run > 0 {
            chain_times.push(took);
            setup_times.push(setup);
            chain_used.push(used);
            let before = processor_time();
            loop_times.push(fused(ends, usize::try_from(payload)?, threads));
            loop_used.push(processor_time().saturating_sub(before));
        }
    }
    for mut clone in chain {
        drop(clone.stdin);
        clone.child.wait()?;
    }
    drop(exchange);
    let _ = std::fs::remove_dir(&directory);
    let (chain, plain) = (median(chain_times), median(loop_times));
    let (chain_used, loop_used) = (median(chain_used), median(loop_used));
    let report = serde_json::json!({
        "bytes": payload,
        "clones": clones,
        "chunk_bytes": chunk,
        "runs": RUNS,
        "setup_ms": median(setup_times) * 1e3,
        "chain_ms": chain * 1e3,
        "fused_loop_ms": plain * 1e3,
        "ratio": chain / (plain * clones as f64),
        "chain_cpu_ms": chain_used * 1e3,
        "fused_loop_cpu_ms": loop_used * 1e3,
        "cpu_ratio": chain_used / (loop_used * clones as f64),
    });
    println!("{report:#}");
    Ok(())
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if std::env::var_os(ROLE).is_some() {
        return runtime.block_on(clone(&args));
    }
    runtime.block_on(parent(&args))
}
