//! `flashboot evict`.

use super::Which;
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::{ArgGroup, Args};
use flashboot::{agent, config::Config};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["image", "all"]))]
pub(crate) struct EvictArgs {
    /// The image's id, or how it begins
    #[arg(conflicts_with = "all")]
    image: Option<String>,
    /// Only this rank image, by name
    #[arg(long, value_name = "NAME", requires = "image")]
    rank: Option<String>,
    /// Everything that nobody has attached
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    which: Which,
}

impl EvictArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.which.overrides(into);
    }
}

pub(crate) fn run(args: &EvictArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let runtime = runtime(false)?;
    let gone = runtime.block_on(agent::evict(config, args.image.clone(), args.rank.clone()));
    runtime.shutdown_background();
    let gone = gone?;
    let bytes: u64 = gone.iter().map(|entry| entry.bytes).sum();
    let object = serde_json::json!({ "evicted": gone, "bytes": bytes });
    output.result(&object, || {
        format!("gave up {} of {}\n", human::count(gone.len() as u64, "arena"), human::bytes(bytes))
    })?;
    Ok(Code::SUCCESS)
}
