//! `flashboot bench WHAT`: what moving and hashing cost here, beside what the hardware allows.

mod plan;
mod show;

use crate::{
    args::number,
    exit::{Code, Failure},
    interrupt,
    output::Output,
};
use clap::{Args, Subcommand};
use flashboot::{
    bench::{
        self, Figures, LoadFigures, Plan, Stage,
        nccl::{self, Collective, NcclFigures},
    },
    config::{Choice, Chunk, Config, Devices},
};
use flashboot_core::{ByteSize, Error, Kind};
use plan::{Shapes, Sizes};
use serde::Serialize;
use std::{collections::BTreeSet, path::PathBuf, time::Duration};

/// How long NCCL's processes may take, import of torch included.
const NCCL: Duration = Duration::from_secs(300);

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// One clone, by size: set-up, transfer with and without verification, beside a raw copy
    Copy(CopyArgs),
    /// A chain (or a star) by chunk
    Chunk(ChunkArgs),
    /// Star and chain side by side, by number of clones
    Topology(TopologyArgs),
    /// The GPU's hash, by size
    Hash(HashArgs),
    /// All-gather in a ring, by size
    Gather(GatherArgs),
    /// Importing an arena and letting it go, by size, beside the driver's own calls
    Setup(SetupArgs),
    /// Loading an image or a checkpoint, cold and warm, beside only reading the same files
    Load(LoadArgs),
}

/// What every bench takes.
#[derive(Debug, Args)]
struct Common {
    /// Whose memory: host, cuda:*, or GPUs such as cuda:0,1; ranks go around them [default: cuda:* where there are GPUs
    /// that can be used, else host, and why]
    #[arg(long, value_name = "DEVICES")]
    device: Option<Devices>,
    /// How often each is measured; medians are shown
    #[arg(long, default_value_t = 7, value_parser = number(1..=1000))]
    repeats: u32,
    /// auto, ipc, imex, rdma or tcp
    #[arg(long, value_name = "NAME", default_value = "auto")]
    transport: Choice,
}

#[derive(Debug, Args)]
struct CopyArgs {
    #[command(flatten)]
    common: Common,
    /// Sizes, such as 1MiB..8GiB (doubling) or 1MiB,1GiB
    #[arg(long, default_value = "1MiB..8GiB")]
    sizes: Sizes,
    /// Bytes of one copy, or auto
    #[arg(long, value_name = "auto|SIZE", default_value = "auto")]
    chunk: Chunk,
    /// Also measure NCCL's broadcast between the same GPUs
    #[arg(long, value_parser = ["nccl"])]
    vs: Option<String>,
}

#[derive(Debug, Args)]
struct ChunkArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the image
    #[arg(long, default_value = "8GiB")]
    size: ByteSize,
    /// Chunks, such as 16MiB..2GiB (doubling)
    #[arg(long, default_value = "16MiB..2GiB")]
    chunks: Sizes,
    /// Number of clones
    #[arg(long, default_value_t = 4, value_parser = number(1..=u32::MAX))]
    clones: u32,
    /// chain or star
    #[arg(long, default_value = "chain", value_parser = ["chain", "star"])]
    topology: String,
    /// Only move, without hashing on arrival
    #[arg(long)]
    no_verify: bool,
}

#[derive(Debug, Args)]
struct TopologyArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the image
    #[arg(long, default_value = "8GiB")]
    size: ByteSize,
    /// Numbers of clones
    #[arg(long, value_delimiter = ',', default_value = "1,2,4", value_parser = number(1..=u32::MAX))]
    clones: Vec<u32>,
    /// Bytes of one copy, or auto
    #[arg(long, value_name = "auto|SIZE", default_value = "auto")]
    chunk: Chunk,
    /// Only move, without hashing on arrival
    #[arg(long)]
    no_verify: bool,
}

#[derive(Debug, Args)]
struct HashArgs {
    #[command(flatten)]
    common: Common,
    /// Sizes
    #[arg(long, default_value = "16MiB..8GiB")]
    sizes: Sizes,
}

#[derive(Debug, Args)]
struct GatherArgs {
    #[command(flatten)]
    common: Common,
    /// Sizes of the whole
    #[arg(long, default_value = "1MiB..8GiB")]
    sizes: Sizes,
    /// Number of nodes, each with its part
    #[arg(long, default_value_t = 2, value_parser = number(2..=64))]
    nodes: u32,
    /// Bytes of one copy, or auto
    #[arg(long, value_name = "auto|SIZE", default_value = "auto")]
    chunk: Chunk,
    /// Also measure NCCL's all-gather between the same GPUs
    #[arg(long, value_parser = ["nccl"])]
    vs: Option<String>,
}

#[derive(Debug, Args)]
struct SetupArgs {
    #[command(flatten)]
    common: Common,
    /// Sizes
    #[arg(long, default_value = "8GiB,64GiB")]
    sizes: Sizes,
}

#[derive(Debug, Args)]
struct LoadArgs {
    #[command(flatten)]
    common: Common,
    /// An image's directory, or a stock checkpoint of one rank
    path: PathBuf,
    /// Which rank image, by name [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
}

impl What {
    fn common(&self) -> &Common {
        match self {
            Self::Copy(args) => &args.common,
            Self::Chunk(args) => &args.common,
            Self::Topology(args) => &args.common,
            Self::Hash(args) => &args.common,
            Self::Gather(args) => &args.common,
            Self::Setup(args) => &args.common,
            Self::Load(args) => &args.common,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Copy(_) => "copy",
            Self::Chunk(_) => "chunk",
            Self::Topology(_) => "topology",
            Self::Hash(_) => "hash",
            Self::Gather(_) => "gather",
            Self::Setup(_) => "setup",
            Self::Load(_) => "load",
        }
    }

    /// NCCL's part, where it is asked for.
    fn rival(&self) -> Option<(Collective, &Sizes)> {
        match self {
            Self::Copy(CopyArgs { vs: Some(_), sizes, .. }) => Some((Collective::Broadcast, sizes)),
            Self::Gather(GatherArgs { vs: Some(_), sizes, .. }) => Some((Collective::AllGather, sizes)),
            _ => None,
        }
    }
}

/// What is printed. Times in milliseconds, medians; rates in bytes per second.
#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    /// UUIDs; none: host memory.
    gpus: Vec<String>,
    /// Why host memory is measured though nobody asked for it.
    gpus_missing: Option<String>,
    stages: Vec<Figures>,
    hashes: Vec<HashFigures>,
    loads: Vec<LoadFigures>,
    /// What there is no room for.
    skipped: Vec<Skipped>,
    nccl: Option<Vec<NcclFigures>>,
    /// Why there is no NCCL beside it.
    nccl_missing: Option<String>,
}

/// One that is not measured.
#[derive(Debug, PartialEq, Serialize)]
struct Skipped {
    /// None of a hash.
    topology: Option<&'static str>,
    /// Processes that it takes.
    ranks: u32,
    bytes: u64,
    reason: String,
}

#[derive(Debug, Serialize)]
struct HashFigures {
    gpu: String,
    bytes: u64,
    hash_ms: f64,
    bytes_per_s: f64,
}

impl Report {
    fn new(bench: &'static str) -> Self {
        let (stages, hashes, skipped) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            bench,
            gpus: Vec::new(),
            gpus_missing: None,
            stages,
            hashes,
            loads: Vec::new(),
            skipped,
            nccl: None,
            nccl_missing: None,
        }
    }

    fn has_rows(&self) -> bool {
        !self.stages.is_empty() || !self.hashes.is_empty()
    }

    /// Notes, and says on stderr, that there is no room for one; once for all rows of a size.
    fn skip(&mut self, skipped: Skipped) {
        if !self.skipped.contains(&skipped) {
            show::skipped(&skipped);
            self.skipped.push(skipped);
        }
    }
}

pub(crate) fn run(args: &BenchArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let runtime = super::replicate::runtime(false)?;
    let mut report = Report::new(args.what.name());
    let measured = runtime.block_on(measure(args, config, output, &mut report));
    runtime.shutdown_background();
    match measured {
        Ok(()) => {
            output.result(&report, || show::summary(&report))?;
            Ok(Code::SUCCESS)
        }
        // What was measured before stays measured.
        Err(failure) if report.has_rows() => {
            output.text(&show::summary(&report))?;
            Err(failure.beside(&report))
        }
        Err(failure) if report.skipped.is_empty() => Err(failure),
        Err(failure) => Err(failure.beside(&report)),
    }
}

async fn measure(
    args: &BenchArgs,
    config: &Config,
    output: Output,
    report: &mut Report,
) -> Result<(), Failure> {
    let common = args.what.common();
    let gpus = gpus(common, config, report).await?;
    report.gpus.clone_from(&gpus);
    if let What::Hash(args) = &args.what {
        return hash(args, report);
    }
    if let What::Load(load) = &args.what {
        let mut config = config.clone();
        config.replicate.device = common.device.clone().unwrap_or_default();
        let request = super::load::of_path(&load.path, load.rank.clone(), &config)?;
        report.loads = bench::load_beside_raw(&request, common.repeats).await?;
        return Ok(());
    }
    let shapes = Shapes { gpus: gpus.len(), repeats: common.repeats };
    let stages = match &args.what {
        What::Copy(args) => shapes.copy(&args.sizes, args.chunk),
        What::Chunk(args) => {
            shapes.chunks(args.size.0, &args.chunks, &args.topology, args.clones, !args.no_verify)
        }
        What::Topology(args) => shapes.topologies(args.size.0, &args.clones, args.chunk, !args.no_verify),
        What::Gather(args) => shapes.gather(&args.sizes, args.nodes, args.chunk),
        What::Setup(args) => shapes.setup(&args.sizes),
        What::Hash(_) | What::Load(_) => Vec::new(),
    };
    let stages = room(stages, &gpus, config, report).await?;
    let fitting: BTreeSet<u64> = stages.iter().map(|stage| stage.bytes).collect();
    let mut settings = config.replicate.clone();
    settings.transport = common.transport;
    let plan =
        Plan { stages, gpus: gpus.clone(), memory: config.memory, network: config.network(), settings };
    let table = show::Progress::new(output, args.what.name());
    bench::run(
        &plan,
        &super::replicate::workers(config, Some("--bench"))?,
        interrupt::signalled(),
        |measured| {
            let figures = measured.figures(gpus.len());
            table.stage(&figures);
            report.stages.push(figures);
        },
    )
    .await?;
    if let Some((collective, sizes)) = args.what.rival() {
        let stopped =
            || Error::new(Kind::Cancelled, "bench", "stopped by a signal; NCCL's processes were ended");
        let sizes: Vec<u64> = sizes.0.iter().copied().filter(|bytes| fitting.contains(bytes)).collect();
        let measured = tokio::select! {
            biased;
            () = interrupt::signalled() => return Err(stopped().into()),
            measured = nccl::measure(collective, &gpus, &sizes, common.repeats.max(7), NCCL) => measured,
        };
        match measured {
            Ok(figures) => report.nccl = Some(figures),
            Err(error) => report.nccl_missing = Some(error.to_string()),
        }
    }
    Ok(())
}

/// The GPUs that are asked for; those that are here where nothing is, or why there are none.
async fn gpus(common: &Common, config: &Config, report: &mut Report) -> Result<Vec<String>, Failure> {
    let limit = config.replicate.setup_timeout;
    if let Some(devices) = &common.device {
        return Ok(bench::gpus(devices, limit).await?);
    }
    if report.bench == "load" {
        // Into host memory where nothing else is asked for.
        return Ok(Vec::new());
    }
    match bench::gpus(&Devices::All, limit).await {
        Ok(gpus) => Ok(gpus),
        // A hash of nothing is no figure.
        Err(error) if report.bench == "hash" => Err(error.into()),
        Err(error) => {
            show::no_gpus(&error);
            report.gpus_missing = Some(error.to_string());
            Ok(Vec::new())
        }
    }
}

/// What of `stages` there is room for; an error where there is none for any.
async fn room(
    stages: Vec<Stage>,
    gpus: &[String],
    config: &Config,
    report: &mut Report,
) -> Result<Vec<Stage>, Failure> {
    // What cannot be is refused, whatever its size.
    stages.iter().try_for_each(|stage| stage.geometry().map(drop))?;
    let (stages, left) = bench::admit(stages, gpus, config.memory, config.replicate.setup_timeout).await?;
    let none = stages.is_empty().then(|| left.first().map(|(_, why)| why.clone())).flatten();
    for (stage, why) in left {
        let ranks = stage.shape.schedule().ranks();
        let topology = Some(stage.shape.name());
        report.skip(Skipped { topology, ranks, bytes: stage.bytes, reason: why.to_string() });
    }
    none.map_or(Ok(stages), |why| Err(why.into()))
}

fn hash(args: &HashArgs, report: &mut Report) -> Result<(), Failure> {
    if report.gpus.is_empty() {
        return Err(Failure::usage("bench hash measures a GPU's hash: give one with --device"));
    }
    let mut last = None;
    for gpu in report.gpus.clone() {
        for bytes in &args.sizes.0 {
            match one_hash(&gpu, *bytes, args.common.repeats) {
                Ok(figures) => report.hashes.push(figures),
                Err(why) if why.kind() == Kind::Exhausted => {
                    let skipped =
                        Skipped { topology: None, ranks: 1, bytes: *bytes, reason: why.to_string() };
                    report.skip(skipped);
                    last = Some(why);
                }
                Err(why) => return Err(why.into()),
            }
        }
    }
    match last {
        Some(why) if report.hashes.is_empty() => Err(why.into()),
        _ => Ok(()),
    }
}

fn one_hash(gpu: &str, bytes: u64, repeats: u32) -> Result<HashFigures, Error> {
    let took = bench::hash(gpu, bytes, repeats)?;
    let hash_ms = bench::median(took.iter().map(|took| took.as_secs_f64() * 1e3));
    let bytes_per_s = if hash_ms > 0.0 { (bytes as f64 / hash_ms * 1e3).round() } else { 0.0 };
    Ok(HashFigures { gpu: gpu.to_owned(), bytes, hash_ms, bytes_per_s })
}
