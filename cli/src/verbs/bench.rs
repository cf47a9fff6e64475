//! `flashboot bench WHAT`: what moving and hashing cost here, beside what the hardware allows.

mod plan;
mod show;

use crate::{exit::Failure, interrupt, output::Output};
use clap::{Args, Subcommand};
use flashboot::{
    bench::{
        self, Figures, LoadFigures, Plan,
        nccl::{self, Collective, NcclFigures},
    },
    config::{Choice, Chunk, Config, Devices},
};
use flashboot_core::{ByteSize, Error, Kind};
use plan::{Shapes, Sizes};
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode, time::Duration};

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
    /// Whose memory: host, cuda:*, or GPUs such as cuda:0,1; ranks go around them [default: cuda:* where there is a
    /// driver, else host]
    #[arg(long, value_name = "DEVICES")]
    device: Option<Devices>,
    /// How often each is measured; medians are shown
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
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
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
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
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4], value_parser = clap::value_parser!(u32).range(1..))]
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
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64))]
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
    stages: Vec<Figures>,
    hashes: Vec<HashFigures>,
    loads: Vec<LoadFigures>,
    nccl: Option<Vec<NcclFigures>>,
    /// Why there is no NCCL beside it.
    nccl_missing: Option<String>,
}

#[derive(Debug, Serialize)]
struct HashFigures {
    gpu: String,
    bytes: u64,
    hash_ms: f64,
    bytes_per_s: f64,
}

pub(crate) fn run(args: &BenchArgs, config: &Config, output: Output) -> Result<ExitCode, Failure> {
    let runtime = super::replicate::runtime(false)?;
    let report = runtime.block_on(measure(args, config, output));
    runtime.shutdown_background();
    let report = report?;
    output.result(&report, || show::summary(&report))?;
    Ok(ExitCode::SUCCESS)
}

async fn measure(args: &BenchArgs, config: &Config, output: Output) -> Result<Report, Failure> {
    let common = args.what.common();
    let mut gpus = gpus(common, config).await?;
    if matches!(args.what, What::Load(_)) && common.device.is_none() {
        gpus.clear();
    }
    let mut report = Report {
        bench: args.what.name(),
        gpus: gpus.clone(),
        stages: Vec::new(),
        hashes: Vec::new(),
        loads: Vec::new(),
        nccl: None,
        nccl_missing: None,
    };
    if let What::Hash(hash) = &args.what {
        for gpu in &gpus {
            report.hashes.extend(hashes(gpu, hash)?);
        }
        if gpus.is_empty() {
            return Err(Failure::usage("bench hash measures a GPU's hash: give one with --device"));
        }
        return Ok(report);
    }
    if let What::Load(load) = &args.what {
        let mut config = config.clone();
        config.replicate.device = common.device.clone().unwrap_or_default();
        let request = super::load::of_path(&load.path, load.rank.clone(), &config)?;
        report.loads = bench::load_beside_raw(&request, common.repeats).await?;
        return Ok(report);
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
    let mut settings = config.replicate.clone();
    settings.transport = common.transport;
    let plan =
        Plan { stages, gpus: gpus.clone(), memory: config.memory, network: config.network(), settings };
    let counted = gpus.len();
    let table = show::Progress::new(output, args.what.name());
    let measured = bench::run(
        &plan,
        &super::replicate::workers(config, Some("--bench"))?,
        interrupt::signalled(),
        |m| {
            table.stage(&m.figures(counted));
        },
    )
    .await?;
    report.stages = measured.iter().map(|measured| measured.figures(counted)).collect();
    if let Some((collective, sizes)) = args.what.rival() {
        let stopped =
            || Error::new(Kind::Cancelled, "bench", "stopped by a signal; NCCL's processes were ended");
        let measured = tokio::select! {
            biased;
            () = interrupt::signalled() => return Err(stopped().into()),
            measured = nccl::measure(collective, &gpus, &sizes.0, common.repeats.max(7), NCCL) => measured,
        };
        match measured {
            Ok(figures) => report.nccl = Some(figures),
            Err(error) => report.nccl_missing = Some(error.to_string()),
        }
    }
    Ok(report)
}

async fn gpus(common: &Common, config: &Config) -> Result<Vec<String>, Failure> {
    let limit = config.replicate.setup_timeout;
    match &common.device {
        Some(devices) => Ok(bench::gpus(devices, limit).await?),
        None => Ok(bench::gpus(&Devices::All, limit).await.unwrap_or_default()),
    }
}

fn hashes(gpu: &str, args: &HashArgs) -> Result<Vec<HashFigures>, Error> {
    let one = |bytes: &u64| {
        let took = bench::hash(gpu, *bytes, args.common.repeats)?;
        let hash_ms = bench::median(took.iter().map(|took| took.as_secs_f64() * 1e3));
        let bytes_per_s = if hash_ms > 0.0 { (*bytes as f64 / hash_ms * 1e3).round() } else { 0.0 };
        Ok(HashFigures { gpu: gpu.to_owned(), bytes: *bytes, hash_ms, bytes_per_s })
    };
    args.sizes.0.iter().map(one).collect()
}
