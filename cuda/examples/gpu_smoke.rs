//! Everything this crate does, on a real GPU: one line a check (`ok` or `FAIL`), then the figures as JSON.
//!
//! `cargo build --release -p flashboot-cuda --example gpu_smoke`, copy the binary to the machine with the GPU, run it
//! there; it needs nothing beside it. `gpu_smoke SELECTOR` takes another GPU than `cuda:0`, `gpu_smoke SELECTOR PEER`
//! also pulls from a second one. `--small` before them divides sizes by 16, for a stand-in driver: its figures mean
//! nothing.

use flashboot_core::{
    Arena, ArenaSpec, BlockDigest, ByteRange, Generation, Geometry, Locator, Mover, Pull, ShardId,
    TransportName, digest,
};
use flashboot_cuda::{
    Context, CudaArena, CudaArenaConfig, CudaMover, Device, HostBytes, Import, MoverConfig, NotKnown, Pinned,
    Registered, Stream, probe,
};
use std::{
    env,
    error::Error,
    io::{BufRead as _, BufReader, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const CHUNK: u64 = 256 * MIB;
const BLOCK: u64 = 16 * MIB;
/// What the second process is to do; the socket is its standard input.
const IMPORT: &str = "--import-by-fd";
const EXPORT: &str = "--export-by-fd";

struct Report {
    /// Large sizes are divided by it.
    scale: u64,
    failed: bool,
    figures: Vec<(String, f64)>,
}

impl Report {
    fn check(&mut self, name: &str, outcome: Outcome) {
        match outcome {
            Ok(()) => println!("ok   {name}"),
            Err(e) => {
                self.failed = true;
                println!("FAIL {name}: {e}");
            }
        }
    }

    fn figure(&mut self, name: impl Into<String>, value: f64) {
        self.figures.push((name.into(), value));
    }

    fn json(&self) -> String {
        let fields: Vec<_> = self.figures.iter().map(|(n, v)| format!("  \"{n}\": {v:.3}")).collect();
        format!("{{\n{}\n}}", fields.join(",\n"))
    }
}

fn main() -> Outcome {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some(IMPORT) => return importer(&args),
        Some(EXPORT) => return exporter(&args),
        _ => {}
    }
    let small = args.first().is_some_and(|arg| arg == "--small");
    let args = args.get(usize::from(small)..).unwrap_or_default();
    let mut report = Report { scale: if small { 16 } else { 1 }, failed: false, figures: Vec::new() };
    let selector = args.first().map_or("cuda:0", String::as_str);
    for rung in probe::ladder(selector, Duration::from_secs(20)) {
        println!("     {rung}");
    }
    let device = Device::find(selector)?;
    println!("     {device:?} {} node {:?} {:?}", device.name(), device.numa_node(), device.features());
    report.check("identity", identity(&device));
    let began = Instant::now();
    let context = Context::open(&device)?;
    report.figure("context_ms", ms(began));
    let bytes = bytes_and_digests(&context, &mut report);
    report.check("bytes in and out, digests against the host's", bytes);
    let processes = two_processes(&context, selector, &mut report);
    report.check("a second process imports by descriptor, pulls and verifies", processes);
    report.check("a killed exporter's memory is pulled and verifies", killed_exporter(&context, selector));
    let timed = hop_speed(&context, &context, "same_gpu", &mut report);
    report.check("a hop on one GPU", timed);
    if let Some(peer) = args.get(1) {
        let outcome = Device::find(peer)
            .and_then(|peer| Context::open(&peer))
            .map_err(Into::into)
            .and_then(|peer| hop_speed(&peer, &context, "two_gpus", &mut report));
        report.check("a hop between two GPUs", outcome);
    }
    if !small {
        let large = large_hop(&context, &mut report);
        report.check("a hop of 32 GiB on one GPU", large);
    }
    let uploads = uploads(&context, &mut report);
    report.check("uploads from pinned memory", uploads);
    let rounds = rounds(&context, &mut report);
    report.check("100 arenas made and dropped leave the memory as it was", rounds);
    println!("{}", report.json());
    if report.failed { Err("some checks failed".into()) } else { Ok(()) }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn gb_per_s(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e9
}

fn ensure(holds: bool, what: impl Into<String>) -> Outcome {
    if holds { Ok(()) } else { Err(what.into().into()) }
}

fn identity(device: &Device) -> Outcome {
    for selector in [device.uuid().to_owned(), device.pci_address().to_uppercase()] {
        ensure(Device::find(&selector)?.uuid() == device.uuid(), selector)?;
    }
    ensure(Device::find("cuda:999").is_err(), "a GPU that is not there was found")?;
    ensure(device.can_map(device)?, "cannot map its own memory")
}

fn arena(context: &Context, payload: u64) -> Outcome<Arc<CudaArena>> {
    Ok(CudaArena::create_in(context, ArenaSpec { payload, shards: 1 }, &CudaArenaConfig::default())?.0)
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = vec![0; len as usize];
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.iter_mut().zip(state.to_le_bytes()).for_each(|(to, from)| *to = from);
    }
    bytes
}

fn expected(bytes: &[u8], block: u64) -> Outcome<Vec<BlockDigest>> {
    let geometry = Geometry::new(bytes.len() as u64, block, block, 1)?;
    Ok(bytes.chunks(block as usize).enumerate().map(|(i, b)| digest::block(&geometry, i as u64, b)).collect())
}

fn bytes_and_digests(context: &Context, report: &mut Report) -> Outcome {
    let sizes = [
        0,
        1,
        63,
        64,
        65,
        1023,
        1024,
        1025,
        2047,
        2048,
        2049,
        65_535,
        262_143,
        262_144,
        262_145,
        524_288,
        1_000_003,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        40 * MIB + 7,
        3 * BLOCK,
    ];
    let mut compared = 0;
    for payload in sizes {
        let arena = arena(context, payload)?;
        let bytes = pattern(payload, payload);
        arena.copy_in(0, &bytes)?;
        let mut back = vec![0; bytes.len()];
        arena.copy_out(0, &mut back)?;
        ensure(back == bytes, format!("{payload} bytes came back different"))?;
        for block in [1 << 10, 1 << 12, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 24, 1 << 28, 1 << 29] {
            let all = expected(&bytes, block)?;
            let whole = arena.digests(ByteRange::new(0, payload), block)?;
            ensure(whole == all, format!("digests of {payload} bytes in blocks of {block}"))?;
            let skip = all.len() / 2;
            let part = arena.digests(ByteRange::new(skip as u64 * block, payload), block)?;
            ensure(
                Some(&*part) == all.get(skip..),
                format!("digests of half of {payload} bytes in blocks of {block}"),
            )?;
            compared += all.len() + part.len();
        }
        arena.fill(ByteRange::new(0, payload), 0x5a)?;
        arena.copy_out(0, &mut back)?;
        ensure(back.iter().all(|b| *b == 0x5a), "fill")?;
        drop(arena.dma_buf()?);
        if let Some(reason) = arena.hash_fallback() {
            return Err(format!("the kernel was refused: {reason}").into());
        }
    }
    report.figure("digests_compared", compared as f64);
    let payload = 512 * MIB;
    let arena = arena(context, payload)?;
    let bytes = pattern(payload, 9);
    arena.copy_in(0, &bytes)?;
    let began = Instant::now();
    arena.copy_in(0, &bytes)?;
    report.figure("copy_in_gb_per_s", gb_per_s(payload, began.elapsed()));
    let mut back = vec![1; bytes.len()];
    let began = Instant::now();
    arena.copy_out(0, &mut back)?;
    report.figure("copy_out_gb_per_s", gb_per_s(payload, began.elapsed()));
    ensure(back == bytes, "512 MiB came back different")
}

fn locator(arena: &CudaArena, generation: Generation) -> Locator {
    Locator {
        transport: TransportName::Ipc,
        generation,
        payload: arena.payload(),
        capacity: arena.capacity(),
        shards: arena.shards(),
        location: arena.location(),
        endpoint: String::new(),
    }
}

fn two_processes(context: &Context, selector: &str, report: &mut Report) -> Outcome {
    let payload = 600 * MIB + 12_345;
    let source = arena(context, payload)?;
    let bytes = pattern(payload, 4);
    let generation = Generation::from_random(4711);
    source.begin(generation);
    source.copy_in(0, &bytes)?;
    source.publish(ShardId(0), payload)?;
    let (ours, theirs) = UnixStream::pair()?;
    let theirs = OwnedFd::from(theirs);
    let mut command = Command::new(env::current_exe()?);
    command.args([IMPORT, selector, &locator(&source, generation).encode()]).stdin(theirs);
    let began = Instant::now();
    let mut process = command.spawn()?;
    drop(command);
    let fd = source.export_fd()?;
    send(&ours, fd.as_fd())?;
    let status = process.wait()?;
    report.figure("second_process_ms", ms(began));
    ensure(status.success(), format!("it ended with {status}"))
}

fn send(socket: &UnixStream, fd: std::os::fd::BorrowedFd<'_>) -> Outcome {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure(control.push(SendAncillaryMessage::ScmRights(&fds)), "no room for a descriptor")?;
    sendmsg(socket, &[IoSlice::new(b"f")], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive(socket: impl AsFd) -> Outcome<OwnedFd> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message
            && let Some(fd) = fds.next()
        {
            return Ok(fd);
        }
    }
    Err("no descriptor came".into())
}

fn importer(args: &[String]) -> Outcome {
    let [_, selector, text] = args else { return Err("needs a GPU and a locator".into()) };
    let locator: Locator = text.parse()?;
    let fd = receive(std::io::stdin())?;
    let context = Context::open(&Device::find(selector)?)?;
    let import = Import::from_fd(&context, fd.as_fd(), &locator)?;
    let mut wrong = locator.clone();
    wrong.capacity += 64 * MIB;
    ensure(Import::from_fd(&context, fd.as_fd(), &wrong).is_err(), "a longer locator was believed")?;
    let into = arena(&context, locator.payload)?;
    let mover = CudaMover::open(import, Arc::clone(&into), Arc::new(NotKnown), MoverConfig::default())?;
    let bytes = pattern(locator.payload, 4);
    let all = expected(&bytes, BLOCK)?;
    let found = runtime()?.block_on(pull_all(&mover, locator.payload, CHUNK, Some(BLOCK)))?;
    ensure(found == all, "what landed does not verify")?;
    let mut back = vec![0; bytes.len()];
    into.copy_out(0, &mut back)?;
    ensure(back == bytes, "what landed is different")
}

const KILLED: u64 = 300 * MIB + 1;

fn killed_exporter(context: &Context, selector: &str) -> Outcome {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(env::current_exe()?);
    command.args([EXPORT, selector]).stdin(OwnedFd::from(theirs)).stdout(Stdio::piped());
    let mut process = command.spawn()?;
    drop(command);
    let fd = receive(&ours)?;
    let mut line = String::new();
    BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let locator: Locator = line.trim().parse()?;
    let import = Import::from_fd(context, fd.as_fd(), &locator)?;
    drop(fd);
    process.kill()?;
    process.wait()?;
    let mover = CudaMover::open(import, arena(context, KILLED)?, Arc::new(NotKnown), MoverConfig::default())?;
    let found = runtime()?.block_on(pull_all(&mover, KILLED, CHUNK, Some(BLOCK)))?;
    ensure(found == expected(&pattern(KILLED, 6), BLOCK)?, "what landed does not verify")
}

fn exporter(args: &[String]) -> Outcome {
    let [_, selector] = args else { return Err("needs a GPU".into()) };
    let source = arena(&Context::open(&Device::find(selector)?)?, KILLED)?;
    let generation = Generation::from_random(12);
    source.begin(generation);
    source.copy_in(0, &pattern(KILLED, 6))?;
    source.publish(ShardId(0), KILLED)?;
    send(&UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?), source.export_fd()?.as_fd())?;
    println!("{}", locator(&source, generation).encode());
    std::thread::sleep(Duration::from_secs(60));
    Err("was not killed".into())
}

fn runtime() -> Outcome<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_time().build()?)
}

/// Two chunks in flight, as the driver does it: wait for one, look at the generation, start the next.
async fn pull_all(
    mover: &CudaMover,
    payload: u64,
    chunk: u64,
    hash: Option<u64>,
) -> Outcome<Vec<BlockDigest>> {
    let mut found = Vec::new();
    let mut under_way = std::collections::VecDeque::new();
    let mut at = 0;
    loop {
        while under_way.len() < 2 && at < payload {
            let end = (at + chunk).min(payload);
            mover.observe(ShardId(0), end, Duration::from_secs(5)).await?;
            under_way.push_back(mover.start(Pull { range: ByteRange::new(at, end), hash })?);
            at = end;
        }
        let Some(mut pull) = under_way.pop_front() else { return Ok(found) };
        found.extend(pull.quiesced().await?.digests);
        let seen = mover.observe(ShardId(0), 0, Duration::ZERO).await?;
        ensure(seen.generation == Some(mover.generation()), "the filling went")?;
    }
}

fn hop_speed(from: &Context, to: &Context, name: &str, report: &mut Report) -> Outcome {
    let (payload, gib, chunk) = (8 * GIB / report.scale, GIB / report.scale, CHUNK / report.scale);
    let began = Instant::now();
    let source = arena(from, payload)?;
    report.figure(format!("{name}_arena_8g_ms"), ms(began));
    report.figure(format!("{name}_create_ms"), source.report().create.as_secs_f64() * 1e3);
    println!("     dropped: {:?}", source.report().dropped);
    let generation = Generation::from_random(99);
    source.begin(generation);
    let part = pattern(64 * MIB, 11);
    for at in (0..payload).step_by(part.len()) {
        source.copy_in(at, &part)?;
        source.copy_in(at, &at.to_le_bytes())?;
    }
    let publishing = Instant::now();
    source.publish(ShardId(0), payload)?;
    report.figure(format!("{name}_publish_us"), ms(publishing) * 1e3);
    let into = arena(to, payload)?;
    into.fill(ByteRange::new(0, payload), 0)?;
    let fd = source.export_fd()?;
    let began = Instant::now();
    let import = Import::from_fd(to, fd.as_fd(), &locator(&source, generation))?;
    report.figure(format!("{name}_import_map_ms"), ms(began));
    let began = Instant::now();
    let mover = CudaMover::open(import, Arc::clone(&into), Arc::new(NotKnown), MoverConfig::default())?;
    report.figure(format!("{name}_open_ms"), ms(began));
    let mut raw = Duration::MAX;
    for _ in 0..5 {
        raw = raw.min(mover.measure_raw(ByteRange::new(0, payload), payload)?);
    }
    for (label, chunk) in [("64m", 64 * MIB), ("256m", chunk), ("1g", gib)] {
        let mut best = Duration::MAX;
        for _ in 0..5 {
            best = best.min(mover.measure_raw(ByteRange::new(0, payload), chunk)?);
        }
        report.figure(format!("{name}_raw_in_{label}_gb_per_s"), gb_per_s(payload, best));
    }
    report.figure(format!("{name}_raw_gb_per_s"), gb_per_s(payload, raw));
    let all = source.digests(ByteRange::new(0, payload), BLOCK)?;
    let began = Instant::now();
    source.digests(ByteRange::new(0, payload), BLOCK)?;
    report.figure(format!("{name}_hash_gb_per_s"), gb_per_s(payload, began.elapsed()));
    let runtime = runtime()?;
    let speeds = [
        ("mover_64m", 64 * MIB, None),
        ("mover_256m", chunk, None),
        ("mover_1g", gib, None),
        ("mover_64m_hashed", 64 * MIB, Some(BLOCK)),
        ("mover_256m_hashed", chunk, Some(BLOCK)),
        ("mover_1g_hashed", gib, Some(BLOCK)),
    ];
    for (label, chunk, hash) in speeds {
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let began = Instant::now();
            let found = runtime.block_on(pull_all(&mover, payload, chunk, hash))?;
            best = best.min(began.elapsed());
            ensure(hash.is_none() || found == all, "what landed does not verify")?;
        }
        report.figure(format!("{name}_{label}_gb_per_s"), gb_per_s(payload, best));
        report.figure(format!("{name}_{label}_of_raw"), raw.as_secs_f64() / best.as_secs_f64());
    }
    ensure(into.digests(ByteRange::new(0, payload), BLOCK)? == all, "the clone differs from its source")?;
    let looks = 2000;
    let began = Instant::now();
    runtime.block_on(async {
        for _ in 0..looks {
            mover.observe(ShardId(0), 0, Duration::ZERO).await?;
        }
        Ok::<(), flashboot_core::Error>(())
    })?;
    report.figure(format!("{name}_observe_us"), ms(began) * 1e3 / f64::from(looks));
    latencies(&mover, &runtime, name, report)
}

/// What is lost at the ends of a hop matters less the larger it is.
fn large_hop(context: &Context, report: &mut Report) -> Outcome {
    let payload = 32 * GIB;
    let source = arena(context, payload)?;
    let generation = Generation::from_random(8);
    source.begin(generation);
    source.fill(ByteRange::new(0, payload), 0x3c)?;
    source.publish(ShardId(0), payload)?;
    let into = arena(context, payload)?;
    into.fill(ByteRange::new(0, payload), 0)?;
    let fd = source.export_fd()?;
    let import = Import::from_fd(context, fd.as_fd(), &locator(&source, generation))?;
    let mover = CudaMover::open(import, into, Arc::new(NotKnown), MoverConfig::default())?;
    let whole = ByteRange::new(0, payload);
    let mut raw = Duration::MAX;
    for _ in 0..3 {
        raw = raw.min(mover.measure_raw(whole, payload)?);
    }
    for (label, chunk) in [("256m", CHUNK), ("512m", 2 * CHUNK), ("1g", GIB), ("2g", 2 * GIB)] {
        let mut best = Duration::MAX;
        let mut in_chunks = Duration::MAX;
        for _ in 0..3 {
            in_chunks = in_chunks.min(mover.measure_raw(whole, chunk)?);
            let began = Instant::now();
            runtime()?.block_on(pull_all(&mover, payload, chunk, None))?;
            best = best.min(began.elapsed());
        }
        report.figure(format!("large_mover_{label}_of_raw"), raw.as_secs_f64() / best.as_secs_f64());
        report.figure(
            format!("large_mover_{label}_of_raw_in_chunks"),
            in_chunks.as_secs_f64() / best.as_secs_f64(),
        );
    }
    Ok(())
}

/// What one small pull takes, and what all chunks take when they are queued at once.
fn latencies(
    mover: &CudaMover,
    runtime: &tokio::runtime::Runtime,
    name: &str,
    report: &mut Report,
) -> Outcome {
    let mut whole = Vec::new();
    let mut start = Vec::new();
    for _ in 0..200 {
        let began = Instant::now();
        runtime.block_on(async {
            let mut pull = mover.start(Pull { range: ByteRange::new(0, BLOCK), hash: None })?;
            start.push(began.elapsed());
            pull.quiesced().await
        })?;
        whole.push(began.elapsed());
    }
    for (label, mut times) in [("start", start), ("pull_16m", whole)] {
        times.sort();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        report.figure(format!("{name}_{label}_us"), median.as_secs_f64() * 1e6);
    }
    let (payload, chunk) = (8 * GIB / report.scale, CHUNK / report.scale);
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let began = Instant::now();
        runtime.block_on(async {
            let chunks = (0..payload / chunk).map(|i| ByteRange::new(i * chunk, (i + 1) * chunk));
            let pulls: Result<Vec<_>, _> =
                chunks.map(|range| mover.start(Pull { range, hash: None })).collect();
            for mut pull in pulls? {
                pull.quiesced().await?;
            }
            Ok::<(), flashboot_core::Error>(())
        })?;
        best = best.min(began.elapsed());
    }
    report.figure(format!("{name}_all_queued_256m_gb_per_s"), gb_per_s(payload, best));
    Ok(())
}

fn uploads(context: &Context, report: &mut Report) -> Outcome {
    let chunk = CHUNK / report.scale;
    let arena = arena(context, 4 * chunk)?;
    let stream = Arc::new(Stream::new(context)?);
    let began = Instant::now();
    let mut pinned = Pinned::new(context, chunk as usize)?;
    report.figure("pin_256m_ms", ms(began));
    let bytes = pattern(chunk, 21);
    pinned.as_mut_slice().copy_from_slice(&bytes);
    let host = HostBytes::Pinned(Arc::new(pinned));
    let began = Instant::now();
    let queued: Result<Vec<_>, _> =
        (0..4).map(|i| arena.upload(&stream, i * chunk, &host, 0, chunk as usize)).collect();
    for upload in queued? {
        upload.wait()?;
    }
    report.figure("upload_gb_per_s", gb_per_s(4 * chunk, began.elapsed()));
    let mut back = vec![0; bytes.len()];
    arena.copy_out(3 * chunk, &mut back)?;
    ensure(back == bytes, "what was uploaded is different")?;
    registered(context, &arena, &stream, report)
}

/// Ordinary memory, registered in segments; one upload crosses them.
fn registered(
    context: &Context,
    arena: &Arc<CudaArena>,
    stream: &Arc<Stream>,
    report: &mut Report,
) -> Outcome {
    let page = rustix::param::page_size();
    let len = (CHUNK / report.scale) as usize;
    let memory = Arc::new(pattern(len as u64 + page as u64, 31));
    let skip = memory.as_ptr().align_offset(page);
    let bytes = memory.get(skip..skip + len).ok_or("no aligned part")?;
    let began = Instant::now();
    // SAFETY: the bytes are the vector's, which `memory` keeps where they are and nobody writes.
    let registered = unsafe {
        Registered::new(context, NonNull::from(bytes).cast(), len, len / 8, Arc::clone(&memory) as _)
    }?;
    report.figure("register_256m_ms", ms(began));
    ensure(registered.segments() == 8, "not in 8 segments")?;
    let host = HostBytes::Registered(Arc::new(registered));
    let began = Instant::now();
    arena.upload(stream, 100, &host, 7, len - 7)?.wait()?;
    report.figure("upload_registered_gb_per_s", gb_per_s(len as u64, began.elapsed()));
    let mut back = vec![0; len - 7];
    arena.copy_out(100, &mut back)?;
    ensure(Some(&*back) == bytes.get(7..), "what was uploaded from registered memory is different")
}

fn rounds(context: &Context, report: &mut Report) -> Outcome {
    let (size, chunk) = (GIB / report.scale, CHUNK / report.scale);
    let round = || -> Outcome {
        let source = arena(context, size)?;
        let generation = Generation::from_random(3);
        source.begin(generation);
        let into = arena(context, size)?;
        let fd = source.export_fd()?;
        let import = Import::from_fd(context, fd.as_fd(), &locator(&source, generation))?;
        let mover = CudaMover::open(import, into, Arc::new(NotKnown), MoverConfig::default())?;
        let pull = Pull { range: ByteRange::new(0, chunk), hash: Some(BLOCK) };
        drop(mover.start(pull)?);
        Ok(())
    };
    // What the driver keeps for itself it has after the first.
    round()?;
    std::thread::sleep(Duration::from_millis(100));
    let before = context.memory()?.0;
    let began = Instant::now();
    for _ in 0..100 {
        round()?;
    }
    report.figure("round_ms", ms(began) / 100.0);
    std::thread::sleep(Duration::from_millis(200));
    let after = context.memory()?.0;
    report.figure("leaked_bytes", before as f64 - after as f64);
    ensure(before == after, format!("{before} bytes were free before, {after} after"))
}
