//! How near loads come to what the same files give without them: pairs taken in turns, medians of seven, ratios of rates.
//!
//! ```text
//! load_ratios warm CHECKPOINT DEVICE   a stock checkpoint in memory: a load, beside its files read in parallel into pinned memory
//! load_ratios cold CHECKPOINT DEVICE   the same from the disk, beside direct reads of its files (and dd)
//! load_ratios slices DIRECTORY         columns of w2-like tensors, beside whole rows of as many bytes
//! ```
//!
//! `DEVICE` is `host` or a GPU such as `cuda:0`; threads are those of a load. A load's time runs from the call to the last byte
//! in place, a GPU's arena and windows included; the host's arena is made and touched before, so that no page is faulted in.
//! `slices` writes a file of 3 GiB. Nothing here is verified: a stock checkpoint has no digests.
#![allow(clippy::print_stdout, reason = "it is a program")]

use flashboot_checkpoint::{Checkpoint, Coordinate, Gather, LayoutOptions, OpenOptions, RankPlan};
use flashboot_core::{Arena, ArenaSpec, ByteRange, Error, Kind, Result};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device, Pinned};
use flashboot_loader::{
    gather::{self, Requested},
    io::{Io, IoConfig, SourceFile},
    pipeline::{FillConfig, Proof},
    source::{CheckpointSource, Load, Source, Wanted},
};
use flashboot_memory::{Buffer, HostArena, HostArenaConfig, uncache};
use std::{
    fs::File,
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const PAIRS: usize = 7;
/// Bytes of one read of the reference.
const READ: u64 = 4 << 20;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["warm", dir, device] => ratios(Path::new(dir), device, false),
        ["cold", dir, device] => ratios(Path::new(dir), device, true),
        ["slices", dir] => slices(Path::new(dir)),
        _ => {
            eprintln!("load_ratios warm|cold CHECKPOINT DEVICE, or load_ratios slices DIRECTORY");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Rates of two ways, in pairs, and what to call them.
fn report(what: &str, (ours, theirs): (&str, &str), pairs: &[(f64, f64)]) {
    let median = |mut rates: Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
    };
    for (one, other) in pairs {
        println!(
            "{what}: {ours} {:.2} GB/s, {theirs} {:.2} GB/s, {:.3} of it",
            one / 1e9,
            other / 1e9,
            one / other
        );
    }
    let (one, other): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let each = median(pairs.iter().map(|(one, other)| one / other).collect());
    let (one, other) = (median(one), median(other));
    println!(
        "{what}: medians of {}: {ours} {:.2} GB/s, {theirs} {:.2} GB/s; ratio of medians {:.3}, median of ratios {each:.3}",
        pairs.len(),
        one / 1e9,
        other / 1e9,
        one / other
    );
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64()
}

/// Where a load goes.
enum Target {
    Host(Arc<HostArena>),
    Gpu(Context),
}

impl Target {
    fn new(device: &str, payload: u64) -> Result<Self> {
        if device != "host" {
            return Ok(Self::Gpu(Context::open(&Device::find(device)?)?));
        }
        let config = HostArenaConfig { prefault_threads: 4, ..HostArenaConfig::default() };
        Ok(Self::Host(HostArena::create(ArenaSpec { payload, shards: 1 }, &config)?.0))
    }

    fn make(&self, payload: u64) -> impl Fn() -> Result<Arc<dyn Arena>> + Send + Sync + 'static {
        let (host, context) = match self {
            Self::Host(arena) => (Some(Arc::clone(arena)), None),
            Self::Gpu(context) => (None, Some(context.clone())),
        };
        move || match (&host, &context) {
            (Some(arena), _) => Ok(Arc::<HostArena>::clone(arena) as Arc<dyn Arena>),
            (None, Some(context)) => {
                let spec = ArenaSpec { payload, shards: 1 };
                Ok(CudaArena::create_in(context, spec, &CudaArenaConfig::default())?.0)
            }
            (None, None) => Err(Error::new(Kind::Invalid, "load", "nowhere to load into")),
        }
    }
}

fn ratios(dir: &Path, device: &str, cold: bool) -> Result<()> {
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default())?;
    let layout = LayoutOptions { experimental: true, ..LayoutOptions::default() };
    let plan = RankPlan::new(&checkpoint, &layout, Coordinate::WHOLE)?;
    let paths: Vec<PathBuf> = checkpoint.shards().iter().map(|shard| shard.path.clone()).collect();
    let (payload, needed) = (plan.payload, plan.bytes_needed());
    let target = Target::new(device, payload)?;
    let config = FillConfig::new(&IoConfig::default())?;
    let windows = windows(&target, config.threads)?;
    println!("{needed} bytes in {} files, {} threads, into {device}", paths.len(), config.threads);
    let load = |plan: RankPlan| -> Result<Duration> {
        let wanted = Wanted { image: None, rank: "whole".into(), payload, digests: Proof::default() };
        let source: Box<dyn Source> = Box::new(CheckpointSource::new(&checkpoint, plan));
        let load = Load::new(wanted, FillConfig::new(&IoConfig::default())?, target.make(payload));
        let began = Instant::now();
        let (arena, done) = load.run(&[source])?;
        let took = began.elapsed();
        println!("  load {took:.1?}: {:?}", done.phases);
        drop(arena);
        Ok(took)
    };
    let emptied = || if cold { empty(&paths) } else { Ok(()) };
    // Once each for nothing: page cache filled (or what keeps it from being empty), the GPU's clocks up.
    read_all(&paths, &windows, cold)?;
    load(plan.clone())?;
    let (mut pairs, mut beside_dd) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        emptied()?;
        let read = read_all(&paths, &windows, cold)?;
        emptied()?;
        let loaded = rate(needed, load(plan.clone())?);
        pairs.push((loaded, read));
        if cold && device == "host" {
            emptied()?;
            beside_dd.push((loaded, dd(&paths)?));
        }
    }
    let theirs = if cold { "direct reads" } else { "preads into the same windows" };
    report(if cold { "cold" } else { "warm" }, ("load", theirs), &pairs);
    if !beside_dd.is_empty() {
        report("cold", ("load", "dd iflag=direct"), &beside_dd);
    }
    Ok(())
}

/// One buffer a thread: pinned where a GPU is loaded into.
enum Window {
    Pinned(Pinned),
    Plain(Buffer),
}

impl Window {
    fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Pinned(pinned) => pinned.as_mut_slice(),
            Self::Plain(buffer) => buffer.as_mut_slice(),
        }
    }
}

fn windows(target: &Target, threads: usize) -> Result<Vec<Mutex<Window>>> {
    let len = usize::try_from(READ).unwrap_or(usize::MAX);
    let one = |_| {
        let mut window = match target {
            Target::Gpu(context) => Window::Pinned(Pinned::new(context, len)?),
            Target::Host(_) => Window::Plain(Buffer::new(len)?),
        };
        window.as_mut_slice().fill(1);
        Ok(Mutex::new(window))
    };
    (0..threads).map(one).collect()
}

/// Every file, each part once, by one thread a window; the rate. No copy to anywhere.
fn read_all(paths: &[PathBuf], windows: &[Mutex<Window>], direct: bool) -> Result<f64> {
    let failed = |path: &Path, e: std::io::Error| Error::from_io("open", &e, path.display().to_string());
    let mut parts = Vec::new();
    let mut files = Vec::new();
    for path in paths {
        let buffered = File::open(path).map_err(|e| failed(path, e))?;
        let len = buffered.metadata().map_err(|e| failed(path, e))?.len();
        let file = if direct {
            rustix::fs::open(path, rustix::fs::OFlags::DIRECT, rustix::fs::Mode::empty())
                .map(File::from)
                .map_err(|errno| failed(path, errno.into()))?
        } else {
            buffered
        };
        parts.extend((0..len).step_by(READ as usize).map(|at| (files.len(), at, READ.min(len - at))));
        files.push(file);
    }
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let total: u64 = parts.iter().map(|(_, _, len)| len).sum();
    let began = Instant::now();
    thread::scope(|scope| {
        for window in windows {
            let (parts, files, next, failure) = (&parts, &files, &next, &failure);
            scope.spawn(move || {
                let mut window = window.lock().unwrap_or_else(PoisonError::into_inner);
                let bytes = window.as_mut_slice();
                while let Some((number, at, len)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut done = 0;
                    while let (true, Some(file)) = (done < *len, files.get(*number)) {
                        // A direct read asks for whole pages, and gets the file's last bytes all the same.
                        let place = bytes.get_mut(done as usize..).unwrap_or_default();
                        let wanted = if direct { (*len - done).next_multiple_of(4096) } else { *len - done };
                        let place = place.get_mut(..wanted as usize).unwrap_or_default();
                        match file.read_at(place, at + done) {
                            Ok(n) if n > 0 => done += n as u64,
                            other => {
                                let e =
                                    other.err().unwrap_or_else(|| std::io::ErrorKind::UnexpectedEof.into());
                                *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
                                return;
                            }
                        }
                    }
                }
            });
        }
    });
    let took = began.elapsed();
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(Error::from_io("pread", &e, "a reference read")),
        None => Ok(rate(total, took)),
    }
}

/// Drops the files from the page cache.
fn empty(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        let file = File::open(path).map_err(|e| Error::from_io("open", &e, path.display().to_string()))?;
        uncache(&file, 0, u64::MAX >> 1);
        if let Some(left @ 1..) = flashboot_memory::cached(&file, 0, u64::MAX >> 1) {
            let detail = format!("{}: {left} pages stay in the page cache: is it in memory?", path.display());
            return Err(Error::new(Kind::Invalid, "cold", detail));
        }
    }
    Ok(())
}

fn dd(paths: &[PathBuf]) -> Result<f64> {
    let began = Instant::now();
    let mut bytes = 0;
    for path in paths {
        let failed = |e| Error::from_io("dd", &e, path.display().to_string());
        bytes += std::fs::metadata(path).map_err(failed)?.len();
        let from = format!("if={}", path.display());
        let args = [&from, "of=/dev/null", "bs=16M", "iflag=direct", "status=none"];
        if !Command::new("dd").args(args).status().map_err(failed)?.success() {
            return Err(Error::new(Kind::Io, "dd", format!("{} is not read directly", path.display())));
        }
    }
    Ok(rate(bytes, began.elapsed()))
}

/// `[5120, 1152]` bytes, as of a w2: one of four ranks takes 288 columns.
const ROWS: u64 = 5120;
const ROW: u64 = 1152;
const COLUMNS: u64 = 288;
const TENSORS: u64 = 544;

fn slices(dir: &Path) -> Result<()> {
    let path = dir.join("load_ratios.w2");
    let failed = |e: std::io::Error| Error::from_io("write", &e, path.display().to_string());
    let tensor: Vec<u8> = (0..ROWS * ROW).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    let mut file = File::create(&path).map_err(failed)?;
    for _ in 0..TENSORS {
        file.write_all(&tensor).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    drop(file);
    let done = compare_slices(&path);
    let removed = std::fs::remove_file(&path).map_err(failed);
    done.and(removed)
}

fn compare_slices(path: &Path) -> Result<()> {
    let config = FillConfig::new(&IoConfig::default())?;
    let paths = [path.to_owned()];
    let whole = |n: u64| Gather::contiguous(0, n * ROWS * ROW, 0, ROWS * ROW);
    let slice = |n: u64| Gather { run: COLUMNS, count: ROWS, from_step: ROW, at_step: COLUMNS, ..whole(n) };
    let mut pairs = Vec::new();
    for round in 0..=PAIRS {
        empty(&paths)?;
        let whole = gathered(path, config.threads, &whole)?;
        empty(&paths)?;
        let slice = gathered(path, config.threads, &slice)?;
        // The first is for nothing.
        if round > 0 {
            pairs.push((slice, whole));
        }
    }
    report("w2-like", ("columns", "whole rows"), &pairs);
    Ok(())
}

/// Every tensor's part, into a buffer a thread that is there already; the rate of what was read.
fn gathered(path: &Path, threads: usize, part: &(dyn Fn(u64) -> Gather + Sync)) -> Result<f64> {
    let io = Io::new(&IoConfig::default())?;
    let files: [SourceFile; 1] = [io.open(path)?];
    let (next, requested) = (AtomicUsize::new(0), Requested::default());
    let buffers: Vec<Result<Buffer>> = (0..threads)
        .map(|_| {
            let mut buffer = Buffer::new((ROWS * ROW) as usize)?;
            buffer.as_mut_slice().fill(1);
            Ok(buffer)
        })
        .collect();
    let began = Instant::now();
    let done: Vec<Result<()>> = thread::scope(|scope| {
        let work = |buffer: Result<Buffer>| {
            let (io, files, next, requested) = (&io, &files, &next, &requested);
            scope.spawn(move || {
                let (mut buffer, mut lane) = (buffer?, io.lane());
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed) as u64;
                    if number >= TENSORS {
                        return Ok(());
                    }
                    let part = part(number);
                    let len = ByteRange::new(part.at, part.at_end().unwrap_or(0)).len() as usize;
                    let into = buffer.as_mut_slice().get_mut(..len).unwrap_or_default();
                    gather::read(&mut lane, files, &[part], into, requested)?;
                }
            })
        };
        let threads: Vec<_> = buffers.into_iter().map(work).collect();
        let panicked = |_| Err(Error::new(Kind::Io, "read", "a thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let took = began.elapsed();
    done.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(rate(requested.requested(), took))
}
