//! A pull over loopback, without hashes, against plain blocking senders and receivers over as many sockets between the same
//! memfds, all faulted in.
//!
//! `cargo run --release -p flashboot-backend-tcp --example bench_loopback -- [MIB] [CONNECTIONS]` (defaults: 1024, 4).
//! Medians of seven, the two in turn. Both ends are threads of this process, so that its processor time is that of
//! both. The last line is one JSON object for `cargo xtask bench`.

use flashboot_backend_tcp::{TcpConfig, TcpTransport};
use flashboot_core::{Arena as _, ArenaSpec, ByteRange, Generation, Pull, ShardId, Transport as _};
use flashboot_memory::{HostArena, HostArenaConfig, OwnedPart};
use std::{
    error::Error,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    num::NonZeroU64,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const RUNS: usize = 7;
/// What the plain ones send and receive at once.
const STEP: usize = 256 << 10;
const LONG: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(Ok(default), |text| text.parse());
    let (mib, connections) = (number(0, 1024)?, number(1, 4)?);
    let bytes = mib << 20;
    let (source, into) = (arena(bytes)?, arena(bytes)?);
    let pattern: Vec<u8> = (0..1 << 20).map(|at: u32| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    for at in (0..bytes).step_by(1 << 20) {
        source.copy_in(at, &pattern)?;
    }
    source.publish(ShardId(0), bytes)?;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let config = TcpConfig { connections: usize::try_from(connections)?, ..TcpConfig::default() };
    let (exchange, export) = runtime.block_on(async {
        let exchange = TcpTransport::default().open(config).await?;
        let export = exchange.export(Arc::clone(&source) as _, LONG).await?;
        Ok::<_, flashboot_core::Error>((exchange, export))
    })?;
    let mover = runtime.block_on(exchange.import(export.locator(), Arc::clone(&into) as _, LONG))?;
    let pull = || -> Outcome<()> {
        let mut under_way = mover.start(Pull { range: ByteRange::new(0, bytes), hash: None })?;
        runtime.block_on(under_way.quiesced())?;
        Ok(())
    };
    let pairs = (0..connections).map(|_| pair()).collect::<Outcome<Vec<_>>>()?;
    let plain = || send_plainly(&source, &into, &pairs);

    pull()?;
    same(&source, &into, bytes)?;
    plain()?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        ours.push(timed(&pull)?);
        theirs.push(timed(&plain)?);
    }
    let (ours, theirs) = (Took::median(&ours), Took::median(&theirs));
    let rate = |took: f64| bytes as f64 / took / 1e9;
    println!(
        "pull {:.2} GB/s, {:.2} s of processor; plain {:.2} GB/s, {:.2} s of processor",
        rate(ours.wall),
        ours.cpu,
        rate(theirs.wall),
        theirs.cpu
    );
    let how =
        format!("{mib} MiB over loopback, {connections} sockets, no hashes, medians of {RUNS} alternated");
    let (speed, cpu) = (theirs.wall / ours.wall, ours.cpu / theirs.cpu);
    let row = |name: &str, target: &str, measured: f64, ok: bool| {
        format!(
            r#"{{"name": "{name}", "target": "{target}", "measured": {measured:.3}, "ok": {ok}, "how": "{how}"}}"#
        )
    };
    // As printed, so that the two agree at the edge.
    let printed = |value: f64| (value * 1e3).round() / 1e3;
    println!(
        r#"{{"rows": [{}, {}]}}"#,
        row("tcp pull ÷ plain sockets", "≥ 0.9", speed, printed(speed) >= 0.9),
        row("tcp processor time a byte ÷ plain sockets'", "≤ 1.2", cpu, printed(cpu) <= 1.2)
    );
    Ok(())
}

fn arena(payload: u64) -> Outcome<Arc<HostArena>> {
    let threads = thread::available_parallelism()?.get();
    let config = HostArenaConfig { prefault_threads: threads, ..HostArenaConfig::default() };
    let (arena, _) = HostArena::create(ArenaSpec { payload, shards: 1 }, &config)?;
    arena.begin(Generation::from_random(payload));
    Ok(arena)
}

fn same(one: &HostArena, two: &HostArena, bytes: u64) -> Outcome<()> {
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for at in (0..bytes).step_by(1 << 20) {
        one.copy_out(at, &mut left)?;
        two.copy_out(at, &mut right)?;
        if left != right {
            return Err(format!("a byte after {at} differs").into());
        }
    }
    Ok(())
}

/// Two ends of one connection.
fn pair() -> Outcome<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let dialled = TcpStream::connect(listener.local_addr()?)?;
    let (taken, _) = listener.accept()?;
    Ok((dialled, taken))
}

/// Each pair carries its share of the memory, one thread at each end.
fn send_plainly(source: &HostArena, into: &HostArena, pairs: &[(TcpStream, TcpStream)]) -> Outcome<()> {
    let whole = ByteRange::new(0, source.payload());
    let share = NonZeroU64::new(whole.len().div_ceil(pairs.len() as u64)).ok_or("nothing to send")?;
    let (from, to) = (source.own(whole)?.into_parts(share), into.own(whole)?.into_parts(share));
    let moved = thread::scope(|scope| {
        let mut ends = Vec::new();
        for (((sender, receiver), from), to) in pairs.iter().zip(from).zip(to) {
            ends.push(scope.spawn(move || send(sender, from)));
            ends.push(scope.spawn(move || receive(receiver, to)));
        }
        ends.into_iter()
            .try_for_each(|end| end.join().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into())))
    });
    Ok(moved?)
}

fn send(mut socket: &TcpStream, mut from: OwnedPart) -> std::io::Result<()> {
    from.as_mut_slice().chunks(STEP).try_for_each(|step| socket.write_all(step))
}

fn receive(mut socket: &TcpStream, mut to: OwnedPart) -> std::io::Result<()> {
    to.as_mut_slice().chunks_mut(STEP).try_for_each(|step| socket.read_exact(step))
}

/// Seconds.
#[derive(Clone, Copy)]
struct Took {
    wall: f64,
    cpu: f64,
}

impl Took {
    fn median(all: &[Self]) -> Self {
        let middle = |of: fn(&Self) -> f64| {
            let mut sorted: Vec<f64> = all.iter().map(of).collect();
            sorted.sort_by(f64::total_cmp);
            sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
        };
        Self { wall: middle(|took| took.wall), cpu: middle(|took| took.cpu) }
    }
}

fn timed(work: &impl Fn() -> Outcome<()>) -> Outcome<Took> {
    let (began, before) = (Instant::now(), processor_time());
    work()?;
    Ok(Took { wall: began.elapsed().as_secs_f64(), cpu: (processor_time() - before).as_secs_f64() })
}

/// Processor time that this process has used, by all its threads.
fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
