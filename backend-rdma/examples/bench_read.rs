//! READs of payload against perftest's `ib_read_bw`, in alternated runs with the same message, MTU and reads in flight.
//! Prints one line of a table a message size, then the counters of the last run.
//!
//! Runs in the machine of `cargo xtask rdma-vm --bench`: two devices of one link, source and reader each a process.

use flashboot_backend_rdma::{Counts, RdmaConfig, RdmaTransport};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Generation, HandleExchange as _, Locator, Pull, ShardId,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    error::Error,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

type Done<T> = Result<T, Box<dyn Error>>;

const SOURCE: &str = "FLASHBOOT_CONFORMANCE_SOURCE";
const BYTES: u64 = 64 << 20;
const ROUNDS: usize = 7;
const OUTSTANDING: u8 = 16;
const SETUP: Duration = Duration::from_secs(20);

fn config(device: &str, message: u64) -> RdmaConfig {
    RdmaConfig {
        devices: vec![device.to_owned()],
        message: ByteSize(message),
        outstanding: OUTSTANDING,
        ..RdmaConfig::default()
    }
}

/// An arena with every page touched.
fn arena() -> Done<Arc<dyn Arena>> {
    let (arena, _) = HostArena::create(ArenaSpec { payload: BYTES, shards: 1 }, &HostArenaConfig::default())?;
    arena.fill(ByteRange::new(0, BYTES), 1)?;
    Ok(arena)
}

async fn source() -> Done<()> {
    let exchange = RdmaTransport::default().open_counted(config("rxe0", 1 << 20)).await?;
    let arena = arena()?;
    arena.begin(Generation::from_random(9));
    arena.publish(ShardId(0), BYTES)?;
    let export = exchange.export(Arc::clone(&arena), SETUP).await?;
    println!("{}", export.locator().encode());
    tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0])).await??;
    Ok(())
}

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Bytes a second of one pull without hashing, and what it counted.
async fn ours(locator: &Locator, into: &Arc<dyn Arena>, message: u64) -> Done<(f64, Counts)> {
    let exchange = RdmaTransport::default().open_counted(config("rxe1", message)).await?;
    let mover = exchange.import(locator, Arc::clone(into), SETUP).await?;
    let began = Instant::now();
    mover.start(Pull { range: ByteRange::new(0, BYTES), hash: None })?.quiesced().await?;
    Ok((BYTES as f64 / began.elapsed().as_secs_f64(), exchange.counts()))
}

/// Bytes a second that perftest reports as its average.
fn perftest(message: u64, port: u32) -> Done<f64> {
    let run = |device: &str, peer: Option<&str>| {
        let mut command = Command::new("ib_read_bw");
        // By events: polling would take an emulated core from the emulated NICs, which run on the same two.
        command.args(["-d", device, "-x", "1", "-m", "4096", "-F", "--events"]);
        command.args(["-o", &OUTSTANDING.to_string(), "-s", &message.to_string()]);
        command.args(["-n", &(BYTES / message).max(5).to_string(), "-p", &port.to_string()]);
        command.args(peer).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command
    };
    let _server = Ends(run("rxe0", None).spawn()?);
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(200));
        let output = run("rxe1", Some("127.0.0.1")).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // `#bytes #iterations peak average rate`, in MiB a second.
        let row = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find(|words| {
            words.len() == 5 && words.first().is_some_and(|bytes| *bytes == message.to_string())
        });
        if let Some(average) = row.as_ref().and_then(|words| words.get(3)) {
            return Ok(average.parse::<f64>()? * 1048576.0);
        }
    }
    Err("ib_read_bw gave no figure".into())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

async fn bench() -> Done<()> {
    let mut child = Ends(
        Command::new(std::env::current_exe()?)
            .env(SOURCE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().ok_or("piped")?).read_line(&mut line)?;
    let locator: Locator = line.trim().parse()?;
    let into = arena()?;
    let mut port = 19_000;
    let mut counts = None;
    for message in [1u64 << 20, 2 << 20, 4 << 20] {
        let (mut own, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let (rate, counted) = ours(&locator, &into, message).await?;
            own.push(rate);
            counts = Some(counted);
            port += 1;
            theirs.push(perftest(message, port)?);
        }
        let (own, theirs) = (median(own), median(theirs));
        println!("| {} | {:.1} | {:.1} | {:.2} |", ByteSize(message), own / 1e6, theirs / 1e6, own / theirs);
    }
    if let Some(Counts { reads_posted, reads_signalled, completions, most_in_flight, .. }) = counts {
        println!(
            "@counters {reads_posted} READs of 4MiB posted, {reads_signalled} signalled (looks included), {completions} \
             completions, at most {most_in_flight} in flight"
        );
    }
    Ok(())
}

fn main() -> Done<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if std::env::var_os(SOURCE).is_some() { runtime.block_on(source()) } else { runtime.block_on(bench()) }
}
