//! The command line.

use crate::{settings::Overrides, verbs};
use clap::{ArgAction, Args, Parser, Subcommand};
use flashboot::config::LogFormat;
use std::{ops::RangeInclusive, path::PathBuf};

/// Gets a model's weights into memory, byte-exact: packs a checkpoint into an image, replicates it, verifies
/// every block.
#[derive(Debug, Parser)]
#[command(name = "flashboot", version, propagate_version = true, max_term_width = 100, after_help = EXITS)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

const EXITS: &str = "Exit codes: 0 done, 1 failed (diff: they differ), 2 bad usage, 3 refused (mismatch, \
                     damage, no permission).\nConfiguration: defaults < flashboot.toml < FLASHBOOT_… < flags; \
                     see `flashboot config show --origin`.";

/// What every verb takes.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Print one JSON object on stdout, also on failure
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Read this configuration file instead of ./flashboot.toml
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Log more: -v info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log at this level or by this filter
    #[arg(long, global = true, value_name = "FILTER", conflicts_with = "verbose")]
    pub(crate) log_level: Option<String>,
    /// How log lines look
    #[arg(long, global = true, value_name = "text|json", value_parser = log_format)]
    pub(crate) log_format: Option<LogFormat>,
}

/// A whole number of this range.
pub(crate) fn number(range: RangeInclusive<u32>) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| match text.parse::<u64>() {
        Ok(n) if range.contains(&u32::try_from(n).unwrap_or(u32::MAX)) && n <= u64::from(u32::MAX) => {
            Ok(n as u32)
        }
        _ if *range.end() == u32::MAX => {
            Err(format!("`{text}` is no whole number from {} on", range.start()))
        }
        _ => Err(format!("`{text}` is no whole number from {} to {}", range.start(), range.end())),
    }
}

fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        other => Err(format!("`{other}` is not text or json")),
    }
}

impl Global {
    pub(crate) fn overrides(&self, into: &mut Overrides) {
        let verbose = match self.verbose {
            0 => None,
            1 => Some("info"),
            2 => Some("debug"),
            _ => Some("trace"),
        };
        into.set("log.level", "--verbose", verbose);
        into.set("log.level", "--log-level", self.log_level.clone());
        let format = self.log_format.map(|format| match format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        });
        into.set("log.format", "--log-format", format);
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Show it all on a real model: pack, verify, replicate to 4 processes by chain and by star, unpack
    Demo(verbs::demo::DemoArgs),
    /// Say what loading a checkpoint costs each rank of a layout, from its headers alone
    Plan(verbs::plan::PlanArgs),
    /// Pack a checkpoint into an image, for one rank or for every rank of a layout
    Pack(verbs::pack::PackArgs),
    /// Make an image of another layout out of an image
    Reshard(verbs::reshard::ReshardArgs),
    /// Turn an image back into its checkpoint, bit for bit
    Unpack(verbs::unpack::UnpackArgs),
    /// Say what a checkpoint or an image holds
    Inspect(verbs::inspect::InspectArgs),
    /// Read an image and compare every block with its digest
    Verify(verbs::verify::VerifyArgs),
    /// Compare two checkpoints or images, tensor by tensor (exit 1 when they differ)
    Diff(verbs::diff::DiffArgs),
    /// Load one rank into memory: from an image, an object store, other ranks, or a stock checkpoint
    Load(Box<verbs::load::LoadArgs>),
    /// Serve the node agent: it keeps images in memory between loads
    Agent(verbs::agent::serve::AgentArgs),
    /// Have the node agent read an image into host memory, ahead of who loads it
    Stage(verbs::agent::keep::StageArgs),
    /// Have the node agent hold an image in a GPU's or the host's memory, for engines to attach
    Hold(verbs::agent::keep::HoldArgs),
    /// Have the node agent give an image up
    Evict(verbs::agent::evict::EvictArgs),
    /// Say what the node agent keeps
    Ls(verbs::agent::ls::LsArgs),
    /// Start a seed and N clones of an image on this host, and verify every block
    Replicate(Box<verbs::replicate::ReplicateArgs>),
    /// Serve the replication service: who holds what, who reads from whom
    Rendezvous(verbs::service::rendezvous::RendezvousArgs),
    /// Load an image into memory and serve it to clones, until a signal comes
    Seed(Box<verbs::service::seed::SeedArgs>),
    /// Clone an image that others hold, verify every block, and serve it on
    Clone(Box<verbs::service::clone::CloneArgs>),
    /// As one of N nodes read 1/N of an image from disk, and complete it from the others in a ring
    Gather(Box<verbs::service::gather::GatherArgs>),
    /// Say who holds what, and who reads from whom
    Status(verbs::service::status::StatusArgs),
    /// What moving and hashing cost here, beside what the hardware allows
    Bench(verbs::bench::BenchArgs),
    /// Say what a replication would take on a machine that is not here
    Simulate(Box<verbs::simulate::SimulateArgs>),
    /// Say which topology, chunk and number of seeds would fill such a machine soonest, and why
    Advise(Box<verbs::advise::AdviseArgs>),
    /// Say which transports and GPUs work on this machine, and what to do where they do not
    Doctor(verbs::doctor::DoctorArgs),
    /// Show the configuration
    Config(verbs::config::ConfigArgs),
    /// One rank of a replication; `replicate` starts these
    #[command(hide = true)]
    Worker(verbs::worker::WorkerVerb),
}
