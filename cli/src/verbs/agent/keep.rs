//! `flashboot stage IMAGE` and `flashboot hold IMAGE`.

use super::Which;
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    progress::Bar,
    settings::Overrides,
    verbs::{load::credentials, replicate::runtime},
};
use clap::{ArgGroup, Args};
use flashboot::{
    agent::{self, Entry, KeepFrom, KeepRequest, State},
    config::{Config, Devices},
    load::FromObject,
};
use flashboot_checkpoint::Progress as _;
use std::path::PathBuf;

/// What both are told alike.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["image", "object"]))]
pub(crate) struct Keep {
    /// The image's directory
    image: Option<PathBuf>,
    /// An image in an object store or behind an HTTP server, which the agent fetches: s3://bucket/path, https://host/path.
    /// Credentials are taken from AWS_… variables
    #[arg(long, value_name = "URL")]
    object: Option<String>,
    /// Fetch objects over plain HTTP from another host too
    #[arg(long)]
    allow_http: bool,
    /// Which rank image, by name (target-0-0-0-0) [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
    /// Higher ones push lower ones out, and are filled first
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    priority: i32,
    /// Come back at once, and not when it is ready
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    which: Which,
}

#[derive(Debug, Args)]
pub(crate) struct StageArgs {
    #[command(flatten)]
    keep: Keep,
}

#[derive(Debug, Args)]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    keep: Keep,
    /// Where: host or one GPU such as cuda:0, by number, UUID or PCI address [default: host]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Devices>,
    /// Give it up once nobody has used it for so long [default: never]
    #[arg(long, value_name = "DURATION")]
    lease: Option<humantime::Duration>,
}

impl Keep {
    fn overrides(&self, into: &mut Overrides) {
        self.which.overrides(into);
        into.set("load.allow_http", "--allow-http", self.allow_http.then_some(true));
    }

    /// What was named.
    fn from(&self) -> String {
        let image = self.image.as_ref().map(|path| path.display().to_string());
        image.or_else(|| self.object.clone()).unwrap_or_default()
    }
}

impl StageArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.keep.overrides(into);
    }
}

impl HoldArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.keep.overrides(into);
        into.text("replicate.device", "--device", self.device.as_ref());
    }
}

pub(crate) fn stage(args: &StageArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let StageArgs { keep } = args;
    run(keep, KeepRequest { hold: None, ..request(keep) }, config, output)
}

pub(crate) fn hold(args: &HoldArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let HoldArgs { keep, lease, .. } = args;
    let hold = Some(lease.map(Into::into));
    run(keep, KeepRequest { hold, ..request(keep) }, config, output)
}

fn request(keep: &Keep) -> KeepRequest {
    let objects = |url: &String| KeepFrom::Objects(FromObject { url: url.clone(), options: credentials() });
    let directory = || KeepFrom::Directory(keep.image.clone().unwrap_or_default());
    KeepRequest {
        from: keep.object.as_ref().map_or_else(directory, objects),
        rank: keep.rank.clone(),
        priority: keep.priority,
        hold: None,
        wait: !keep.no_wait,
    }
}

fn run(keep: &Keep, request: KeepRequest, config: &Config, output: Output) -> Result<Code, Failure> {
    let runtime = runtime(false)?;
    let bar = Bar::new(output, "in memory");
    let kept = runtime.block_on(agent::keep(config, request, move |done, total| bar.advance(done, total)));
    runtime.shutdown_background();
    let entry = kept?;
    output.result(&entry, || text(keep, &entry))?;
    Ok(Code::SUCCESS)
}

fn text(keep: &Keep, entry: &Entry) -> String {
    let what = if entry.held { "held" } else { "staged" };
    let how = match entry.state {
        State::Ready => format!("{what}, every block verified"),
        State::Filling | State::Waiting => format!("being {what}"),
    };
    format!(
        "{} of {} ({}) at {}: {how}\nimage {}\n",
        entry.rank,
        keep.from(),
        human::bytes(entry.bytes),
        entry.place,
        entry.image
    )
}
