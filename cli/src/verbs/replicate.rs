//! `flashboot replicate IMAGE --clones N`.

use crate::{
    args::number,
    exit::{Code, Failure},
    human, interrupt,
    output::Output,
    program,
    settings::Overrides,
    table::{Side, Table},
};
use clap::Args;
use flashboot::{
    config::{Choice, Chunk, Config, Devices, LogFormat, Topology},
    replicate::{self, CloneReport, Kill, Outcome, Report, Request, Source, Workers},
};
use flashboot_checkpoint::{Image, RankImage};
use flashboot_core::{ByteSize, Error, TransportName};
use std::{
    fmt::Write as _,
    io::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
};
use tokio::runtime::Runtime;

#[derive(Debug, Args)]
pub(crate) struct ReplicateArgs {
    /// The image's directory
    image: PathBuf,
    /// Number of clones, each a process with an arena of its own [default: 1]
    #[arg(short = 'n', long, value_parser = number(0..=u32::MAX))]
    clones: Option<u32>,
    /// Whose memory: host, cuda:* (every visible GPU), or GPUs such as cuda:0,1, by number, UUID or PCI address; ranks
    /// go around them [default: host]
    #[arg(long, value_name = "DEVICES")]
    device: Option<Devices>,
    /// chain, star or tree [default: chain]
    #[arg(short, long, value_parser = topology)]
    topology: Option<Topology>,
    /// Clones in one chain of a tree [default: 2]
    #[arg(long, value_name = "N")]
    tree_length: Option<u32>,
    /// Chain heads that read from one chain head of a tree [default: 2]
    #[arg(long, value_name = "N")]
    tree_fanout: Option<u32>,
    /// Bytes of one copy, a whole number of 16MiB blocks, or auto [default: auto]
    #[arg(short, long, value_name = "auto|SIZE")]
    chunk: Option<Chunk>,
    /// auto, imex, ipc, rdma, tcp or mock (in-process, virtual time) [default: auto]
    #[arg(long, value_name = "NAME")]
    transport: Option<Choice>,
    /// What auto may choose, such as ipc,tcp [default: everything but mock]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = flashboot::config::transport)]
    allow: Vec<TransportName>,
    /// Do not hash what arrives: for benchmarks, nothing proves the bytes then
    #[arg(long)]
    no_verify: bool,
    /// Pulls in flight at one clone [default: 2]
    #[arg(long, value_name = "N")]
    depth: Option<u32>,
    /// How long a source's progress may stand still [default: 30s]
    #[arg(long, value_name = "DURATION")]
    stall: Option<humantime::Duration>,
    /// The longest the set-up may take [default: 10m]
    #[arg(long, value_name = "DURATION")]
    setup_timeout: Option<humantime::Duration>,
    /// The longest the transfer may take [default: 10m]
    #[arg(long, value_name = "DURATION")]
    transfer_timeout: Option<humantime::Duration>,
    /// auto, base or huge [default: auto]
    #[arg(long, value_parser = ["auto", "base", "huge"])]
    pages: Option<String>,
    /// Bind arenas to this NUMA node
    #[arg(long, value_name = "NODE")]
    numa_node: Option<u32>,
    /// Threads that fault in and copy, at each rank [default: one a core]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// tcp: the address to listen at [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    bind: Option<IpAddr>,
    /// tcp: connections over which a clone stripes what it reads [default: 4]
    #[arg(long, value_name = "N")]
    connections: Option<u32>,
    /// tcp: the most bytes a second that one source sends, as 500MB [default: no bound]
    #[arg(long, value_name = "SIZE")]
    rate: Option<ByteSize>,
    /// auto (off on loopback only), on or off [default: auto]
    #[arg(long, value_parser = ["auto", "on", "off"])]
    tls: Option<String>,
    /// A file of mode 0600 with the secret that seed and clones share
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Which rank image, by name (target-0-0-0-0) [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
    /// For tests: this clone kills itself once it has verified that chunk
    #[arg(long, hide = true, value_name = "RANK@CHUNK")]
    kill: Option<Kill>,
}

fn topology(text: &str) -> Result<Topology, String> {
    match text {
        "chain" => Ok(Topology::Chain),
        "star" => Ok(Topology::Star),
        "tree" => Ok(Topology::Tree),
        other => Err(format!("`{other}` is not a topology: use chain, star or tree")),
    }
}

impl ReplicateArgs {
    pub(super) fn overrides(&self, into: &mut Overrides) {
        into.set("replicate.clones", "--clones", self.clones);
        into.text("replicate.device", "--device", self.device.as_ref());
        into.text("replicate.topology", "--topology", self.topology.as_ref());
        into.set("replicate.tree_length", "--tree-length", self.tree_length);
        into.set("replicate.tree_fanout", "--tree-fanout", self.tree_fanout);
        into.text("replicate.chunk", "--chunk", self.chunk.as_ref());
        into.text("replicate.transport", "--transport", self.transport.as_ref());
        let allow: Vec<String> = self.allow.iter().map(ToString::to_string).collect();
        into.set("replicate.allow", "--allow", (!allow.is_empty()).then_some(allow));
        into.set("replicate.verify", "--no-verify", self.no_verify.then_some(false));
        into.set("replicate.depth", "--depth", self.depth);
        into.text("replicate.stall", "--stall", self.stall.as_ref());
        into.text("replicate.setup_timeout", "--setup-timeout", self.setup_timeout.as_ref());
        into.text("replicate.transfer_timeout", "--transfer-timeout", self.transfer_timeout.as_ref());
        into.text("tcp.bind", "--bind", self.bind.as_ref());
        into.set("tcp.connections", "--connections", self.connections);
        into.text("tcp.rate", "--rate", self.rate.as_ref());
        into.set("security.tls", "--tls", self.tls.clone());
        let token_file = self.token_file.as_ref().map(|path| path.display().to_string());
        into.set("security.token_file", "--token-file", token_file);
        into.set("memory.pages", "--pages", self.pages.clone());
        into.set("memory.numa_node", "--numa-node", self.numa_node);
        into.set("memory.threads", "--threads", self.threads);
    }
}

pub(crate) fn run(args: &ReplicateArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let image = Image::open(&args.image)?;
    let source = source(&image, args.rank.as_deref())?;
    if let Some(kill) = args.kill {
        let chunks = source.digests.values().len();
        if kill.rank > config.replicate.clones || chunks == 0 {
            return Err(Failure::usage(format!(
                "--kill {kill}: there is no such clone, or nothing to verify"
            )));
        }
    }
    let Outcome { report, error } = replicate(source, config, args.kill)?;
    match error {
        None => {
            output.result(&report, || text(&report))?;
            Ok(Code::SUCCESS)
        }
        Some(error) => {
            output.text(&text(&report))?;
            Err(Failure::from(error).beside(&report))
        }
    }
}

/// The rank image called `rank`, or the only one.
pub(super) fn source(image: &Image, rank: Option<&str>) -> Result<Source, Failure> {
    let names = || image.ranks().iter().map(|r| r.coordinate.to_string()).collect::<Vec<_>>().join(", ");
    let found: Option<&RankImage> = match rank {
        Some(name) => image.ranks().iter().find(|r| r.coordinate.to_string() == name),
        None if image.ranks().len() == 1 => image.ranks().first(),
        None => {
            let several = format!("the image has several ranks: say which with --rank ({})", names());
            return Err(Failure::usage(several));
        }
    };
    let Some(found) = found else {
        let name = rank.unwrap_or_default();
        return Err(Failure::usage(format!("the image has no rank `{name}`, but {}", names())));
    };
    Ok(Source {
        image: image.id().to_owned(),
        rank: found.coordinate.to_string(),
        payload: found.path.clone(),
        digests: found.table.digests().clone(),
    })
}

/// Runs one replication to its end, in a runtime of its own.
pub(super) fn replicate(source: Source, config: &Config, kill: Option<Kill>) -> Result<Outcome, Failure> {
    let request = Request {
        source,
        settings: config.replicate.clone(),
        memory: config.memory,
        network: config.network(),
        kill,
        workers: workers(config, None)?,
    };
    let mock = config.replicate.transport == Choice::Only(TransportName::Mock);
    let runtime = runtime(mock)?;
    let outcome = runtime.block_on(async {
        // A signal ends a run of the mock by ending the process: it has no workers.
        let signalled = (!mock).then(interrupt::signalled);
        let stop = async {
            match signalled {
                Some(signalled) => signalled.await,
                None => std::future::pending().await,
            }
        };
        Ok(replicate::run(request, stop).await?)
    });
    // Every worker has ended; a driver that hangs keeps its thread, and is not waited for.
    runtime.shutdown_background();
    outcome
}

/// This program again, as a worker; `part` says of what.
pub(super) fn workers(config: &Config, part: Option<&str>) -> Result<Workers, Failure> {
    let begun = program::other();
    let (program, mut args) = begun.map_err(|e| Error::from_io("readlink", &e, "/proc/self/exe"))?;
    args.extend(["worker".into(), "--level".into(), config.log.level.clone().into()]);
    if config.log.format == LogFormat::Json {
        args.push("--json-logs".into());
    }
    args.extend(part.map(Into::into));
    Ok(Workers { program, args, directory: run_directory(), stderr: forward })
}

/// Where the run's directory goes. Sockets have at most 107 bytes of path, so a long TMPDIR gives way to /tmp.
pub(super) fn run_directory() -> PathBuf {
    const LONGEST: usize = 60;
    let wanted = std::env::temp_dir();
    if wanted.as_os_str().len() > LONGEST { Path::new("/tmp").to_owned() } else { wanted }
}

/// A worker's log lines are the parent's.
fn forward(_rank: u32, line: &str) {
    // Whoever reads stderr may be gone.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A runtime; `paused` makes its time virtual.
pub(super) fn runtime(paused: bool) -> Result<Runtime, Failure> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(paused);
    builder.build().map_err(|e| Error::from_io("epoll_create", &e, "a runtime").into())
}

/// The table.
pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{} to {} by {} over {}, in chunks of {}, {}",
        human::bytes(report.bytes),
        human::count(report.clones.len() as u64, "clone"),
        report.topology,
        report.transport.map_or("no transport", |transport| transport.as_str()),
        ByteSize(report.chunk_bytes),
        proved(report),
    );
    let tail =
        report.tail_ms.map_or_else(|| "no clone became ready".into(), |ms| format!("tail {}", human::ms(ms)));
    let _ = writeln!(
        text,
        "set-up {} (seed: arena {}, load {}), {tail}{}",
        human::ms(report.setup_ms),
        human::ms(report.seed.arena_ms),
        human::ms(report.seed.load_ms),
        if report.virtual_time { ", all in one process and in virtual time" } else { "" },
    );
    for passed in &report.passed_over {
        let _ = writeln!(text, "passed over {}: {}", passed.name, passed.reason);
    }
    text.push('\n');
    let mut table = Table::new(&[
        ("clone", Side::Right),
        ("device", Side::Left),
        ("source", Side::Left),
        ("map", Side::Right),
        ("transfer", Side::Right),
        ("verify", Side::Right),
        ("ready", Side::Right),
        ("rate", Side::Right),
        ("chunks", Side::Right),
        ("verified", Side::Right),
        ("repaired", Side::Right),
        ("lost", Side::Right),
    ]);
    for clone in &report.clones {
        table.row(row(clone, report));
    }
    text += &table.render();
    text
}

/// What the clones' own results prove.
fn proved(report: &Report) -> String {
    if !report.verify {
        return "NOT VERIFIED (--no-verify)".into();
    }
    let whole = |clone: &&CloneReport| clone.ready_ms.is_some() && clone.verified == report.blocks;
    let (done, all) = (report.clones.iter().filter(whole).count(), report.clones.len());
    match done {
        _ if done == all => "every block verified".into(),
        0 => "NOTHING VERIFIED".into(),
        _ => format!("every block verified at {done} of them only"),
    }
}

fn row(clone: &CloneReport, report: &Report) -> Vec<String> {
    let ms = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), human::ms);
    let ready = match (clone.ready_ms, clone.killed) {
        (Some(ready), _) if clone.restarts > 0 => format!("{} (restarted)", human::ms(ready)),
        (Some(ready), _) => human::ms(ready),
        (None, true) => "killed".into(),
        (None, false) => "FAILED".into(),
    };
    // Enough of a UUID to tell one from another.
    let device =
        clone.device.as_ref().map_or_else(|| "host".to_owned(), |uuid| uuid.chars().take(12).collect());
    let source = |index: u32| if index == 0 { "seed".to_owned() } else { format!("clone {index}") };
    vec![
        clone.index.to_string(),
        device,
        source(clone.source),
        human::ms(clone.map_ms),
        ms(clone.transfer_ms),
        ms(clone.verify_ms),
        ready,
        clone.bytes_per_s.map_or_else(|| "-".to_owned(), human::rate),
        clone.chunks.to_string(),
        format!("{}/{}", clone.verified, report.blocks),
        clone.repaired.to_string(),
        clone.losses.to_string(),
    ]
}
