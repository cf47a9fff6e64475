//! The verbs, one file each: arguments, what to call, what to print.

pub(crate) mod advise;
pub(crate) mod agent;
pub(crate) mod bench;
pub(crate) mod config;
pub(crate) mod demo;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod layout;
pub(crate) mod load;
pub(crate) mod pack;
pub(crate) mod plan;
pub(crate) mod replicate;
pub(crate) mod reshard;
pub(crate) mod service;
pub(crate) mod simulate;
pub(crate) mod unpack;
pub(crate) mod verify;
pub(crate) mod worker;

use crate::{
    args::{Cli, Verb},
    exit::{Code, Failure},
    interrupt, logs,
    output::Output,
    settings::{Overrides, Settings},
};
use flashboot::config::Config;
use flashboot_checkpoint::OpenOptions;

pub(crate) fn run(cli: Cli, output: Output) -> Result<Code, Failure> {
    let Cli { global, verb } = cli;
    interrupt::survive_file_limit();
    // A worker has its settings from its parent and reads none.
    if let Verb::Worker(args) = verb {
        return worker::run(args);
    }
    let mut overrides = Overrides::default();
    global.overrides(&mut overrides);
    match &verb {
        Verb::Pack(args) => args.reading.overrides(&mut overrides),
        Verb::Plan(args) => args.reading.overrides(&mut overrides),
        Verb::Inspect(args) => args.reading.overrides(&mut overrides),
        Verb::Diff(args) => args.reading.overrides(&mut overrides),
        Verb::Load(args) => args.overrides(&mut overrides),
        Verb::Agent(args) => args.overrides(&mut overrides),
        Verb::Stage(args) => args.overrides(&mut overrides),
        Verb::Hold(args) => args.overrides(&mut overrides),
        Verb::Evict(args) => args.overrides(&mut overrides),
        Verb::Ls(args) => args.overrides(&mut overrides),
        Verb::Replicate(args) => args.overrides(&mut overrides),
        Verb::Rendezvous(args) => args.overrides(&mut overrides),
        Verb::Seed(args) => args.overrides(&mut overrides),
        Verb::Clone(args) => args.overrides(&mut overrides),
        Verb::Gather(args) => args.overrides(&mut overrides),
        Verb::Status(args) => args.overrides(&mut overrides),
        Verb::Doctor(args) => args.overrides(&mut overrides),
        _ => {}
    }
    let settings = Settings::load(global.config.as_deref(), &overrides)?;
    logs::install(&settings.config.log)?;
    if matches!(verb, Verb::Demo(_) | Verb::Pack(_) | Verb::Reshard(_) | Verb::Unpack(_) | Verb::Verify(_)) {
        interrupt::watch();
    }
    let config = &settings.config;
    match verb {
        Verb::Demo(args) => demo::run(&args, config, output),
        Verb::Pack(args) => pack::run(&args, config, output),
        Verb::Plan(args) => plan::run(&args, config, output),
        Verb::Reshard(args) => reshard::run(&args, output),
        Verb::Unpack(args) => unpack::run(&args, output),
        Verb::Inspect(args) => inspect::run(&args, config, output),
        Verb::Verify(args) => verify::run(&args, output),
        Verb::Diff(args) => diff::run(&args, config, output),
        Verb::Load(args) => load::run(&args, config, output),
        Verb::Agent(args) => agent::serve::run(&args, config, output),
        Verb::Stage(args) => agent::keep::stage(&args, config, output),
        Verb::Hold(args) => agent::keep::hold(&args, config, output),
        Verb::Evict(args) => agent::evict::run(&args, config, output),
        Verb::Ls(args) => agent::ls::run(&args, config, output),
        Verb::Replicate(args) => replicate::run(&args, config, output),
        Verb::Rendezvous(args) => service::rendezvous::run(&args, config, output),
        Verb::Seed(args) => service::seed::run(&args, config, output),
        Verb::Clone(args) => service::clone::run(&args, config, output),
        Verb::Gather(args) => service::gather::run(&args, config, output),
        Verb::Status(args) => service::status::run(&args, config, output),
        Verb::Bench(args) => bench::run(&args, config, output),
        Verb::Simulate(args) => simulate::run(&args, output),
        Verb::Advise(args) => advise::run(&args, output),
        Verb::Doctor(args) => doctor::run(&args, config, output),
        Verb::Config(args) => config::run(&args, &settings, output),
        Verb::Worker(args) => worker::run(args),
    }
}

/// How checkpoints are read.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Reading {
    /// The longest safetensors header that is read
    #[arg(long, value_name = "SIZE")]
    header_cap: Option<flashboot_core::ByteSize>,
    /// Accept bytes after a shard's last tensor
    #[arg(long)]
    allow_trailing: bool,
}

impl Reading {
    fn overrides(&self, into: &mut Overrides) {
        into.text("pack.header_cap", "--header-cap", self.header_cap.as_ref());
        into.set("pack.allow_trailing", "--allow-trailing", self.allow_trailing.then_some(true));
    }
}

pub(crate) fn open_options(config: &Config) -> OpenOptions {
    OpenOptions {
        header_cap: config.pack.header_cap,
        allow_trailing_bytes: config.pack.allow_trailing,
        ..OpenOptions::default()
    }
}
