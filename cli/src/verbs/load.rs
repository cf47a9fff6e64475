//! `flashboot load`.

use super::{Reading, agent::Which, layout::LayoutArgs, service::SeatArgs};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::{ArgGroup, Args};
use flashboot::{
    config::Config,
    load::{self, FromCheckpoint, FromObject, FromPeer, Loaded, Request},
    service::CloneRequest,
};
use flashboot_checkpoint::{LayoutOptions, is_image};
use flashboot_core::{ByteSize, Kind};
use flashboot_rendezvous::{protocol::Wanted, store::Address};
use std::{
    fmt::Write as _,
    io::Write as _,
    path::{Path, PathBuf},
};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("from").required(true).multiple(true).args(["path", "checkpoint", "object", "rendezvous", "id"]))]
pub(crate) struct LoadArgs {
    /// An image's directory, or a stock checkpoint
    path: Option<PathBuf>,
    /// A stock checkpoint: goes on where an image fails in the middle
    #[arg(long, value_name = "CKPT")]
    checkpoint: Option<PathBuf>,
    /// An image in an object store or behind an HTTP server: s3://bucket/path, https://host/path. Credentials are taken
    /// from AWS_… variables
    #[arg(long, value_name = "URL")]
    object: Option<String>,
    /// The replication service that knows other ranks that have it: as of `clone`
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Option<Address>,
    /// The model at the service, as its seed calls it [default: whichever has the image's id]
    #[arg(long, requires = "rendezvous")]
    model: Option<String>,
    /// Which rank image, by name (target-0-0-0-0) [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
    /// The image's id, or its first 8 digits or more: nothing else is loaded. Alone, the node agent is asked for it
    #[arg(long = "image", value_name = "ID", value_parser = flashboot::service::image_id)]
    id: Option<String>,
    /// What is tried, in order, such as peer,image,checkpoint [default: held,peer,staged,image,object,checkpoint]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    sources: Vec<flashboot::config::SourceKind>,
    /// auto, pread or io-uring [default: auto]
    #[arg(long, value_parser = ["auto", "pread", "io-uring"])]
    engine: Option<String>,
    /// Read through the page cache even where files could be read past it
    #[arg(long)]
    buffered: bool,
    /// Bytes in flight beside the arena [default: 6GB]
    #[arg(long, value_name = "SIZE")]
    budget: Option<ByteSize>,
    /// Bytes of one pinned window, for GPUs [default: 4MiB]
    #[arg(long, value_name = "SIZE")]
    window: Option<ByteSize>,
    /// Fetch objects over plain HTTP from another host too
    #[arg(long)]
    allow_http: bool,
    /// Write the payload to this file, once all of it is there
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Log where the machine's memory is, before and after
    #[arg(long)]
    memlog: bool,
    /// How an arena is used that the node agent holds: shared (where it is, read-only) or private (a copy) [default: shared]
    #[arg(long, value_parser = ["shared", "private"])]
    attach: Option<String>,
    /// Copy what the node agent has staged by itself, and not have the agent push it
    #[arg(long)]
    no_push: bool,
    /// What the node agent gives up for this load's memory has a lower one, or the same and is not held [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    #[command(flatten)]
    agent: Which,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    pub(super) reading: Reading,
    #[command(flatten)]
    seat: SeatArgs,
}

impl LoadArgs {
    pub(super) fn overrides(&self, into: &mut Overrides) {
        self.seat.overrides(into);
        self.agent.overrides(into);
        into.set("load.attach", "--attach", self.attach.clone());
        into.set("load.push", "--no-push", self.no_push.then_some(false));
        into.set("load.priority", "--priority", self.priority);
        self.reading.overrides(into);
        let sources: Vec<String> = self.sources.iter().map(ToString::to_string).collect();
        into.set("load.sources", "--sources", (!sources.is_empty()).then_some(sources));
        into.set("load.engine", "--engine", self.engine.clone());
        into.set("load.direct", "--buffered", self.buffered.then_some(false));
        into.text("load.budget", "--budget", self.budget.as_ref());
        into.text("load.window", "--window", self.window.as_ref());
        into.set("load.allow_http", "--allow-http", self.allow_http.then_some(true));
    }
}

pub(crate) fn run(args: &LoadArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let request = request(args, config)?;
    let memlog = |phase| args.memlog.then(|| load::memory(phase));
    let before = memlog("before");
    let runtime = runtime(false)?;
    let done = runtime.block_on(load::load(request));
    let (arena, loaded) = match done {
        Ok(done) => done,
        Err(e) => {
            runtime.shutdown_background();
            // An input that is not there is refused, as every verb does.
            let absent =
                e.kind() == Kind::Unavailable && ["open", "stat", "load", "object"].contains(&e.op());
            let failure = Failure::from(e);
            return Err(if absent { Failure { exit: 3, ..failure } } else { failure });
        }
    };
    let full = memlog("with the arena");
    drop(arena);
    runtime.shutdown_background();
    for log in before.into_iter().chain(full).chain(memlog("after")) {
        // Whoever closed stderr does not want it.
        let _ = writeln!(std::io::stderr(), "{log}");
    }
    output.result(&loaded, || text(&loaded))?;
    Ok(Code::SUCCESS)
}

fn request(args: &LoadArgs, config: &Config) -> Result<Request, Failure> {
    let open = super::open_options(config);
    let (mut image, mut checkpoint) = (None, args.checkpoint.clone());
    if let Some(path) = &args.path {
        if is_image(path)? {
            image = Some(path.clone());
        } else if checkpoint.replace(path.clone()).is_some() {
            return Err(Failure::usage("two checkpoints were named"));
        }
    }
    let from_checkpoint = |path: PathBuf| -> Result<FromCheckpoint, Failure> {
        Ok(FromCheckpoint { path, open: open.clone(), layout: args.layout.options()? })
    };
    let object = args.object.as_ref().map(|url| FromObject { url: url.clone(), options: credentials() });
    let id = args.id.clone();
    let peer = args.rendezvous.as_ref().map(|rendezvous| FromPeer {
        request: CloneRequest {
            wanted: Wanted {
                image: id.clone(),
                model: args.model.clone(),
                revision: None,
                rank: args.rank.clone(),
            },
            rendezvous: rendezvous.clone(),
            expect: None,
            output: None,
            leave: true,
            kill: None,
            seat: args.seat.seat(config),
        },
    });
    Ok(Request {
        rank: args.rank.clone(),
        id,
        image,
        object,
        checkpoint: checkpoint.map(from_checkpoint).transpose()?,
        peer,
        output: args.output.clone(),
        config: config.clone(),
    })
}

/// One rank of what lies at `path`, from there alone.
pub(in crate::verbs) fn of_path(
    path: &Path,
    rank: Option<String>,
    config: &Config,
) -> Result<Request, Failure> {
    let mut request = Request {
        rank,
        id: None,
        image: None,
        object: None,
        checkpoint: None,
        peer: None,
        output: None,
        config: config.clone(),
    };
    if is_image(path)? {
        request.image = Some(path.to_owned());
    } else {
        let open = super::open_options(config);
        request.checkpoint =
            Some(FromCheckpoint { path: path.to_owned(), open, layout: LayoutOptions::default() });
    }
    Ok(request)
}

/// What the environment says about S3, as its own tools read it.
pub(in crate::verbs) fn credentials() -> Vec<(String, String)> {
    let variables =
        std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    variables
        .filter(|(key, _)| key.starts_with("AWS_"))
        .map(|(key, value)| (key.to_lowercase(), value))
        .collect()
}

fn text(loaded: &Loaded) -> String {
    let phases = &loaded.phases_ms;
    let source = loaded.source.map_or_else(|| "nowhere".to_owned(), |source| source.to_string());
    let verified =
        if loaded.verified { "every block verified" } else { "not verified: nothing proves a checkpoint" };
    let mut text = format!(
        "{} of {} from {source} in {} ({}), {verified}\nread {} by {}, {} beside the arena at most\n",
        loaded.rank,
        human::bytes(loaded.bytes),
        human::ms(loaded.engine_visible_ms),
        human::rate(loaded.bytes_per_s),
        human::bytes(loaded.bytes_read),
        loaded.io.engine,
        human::bytes(loaded.peak_host_bytes),
    );
    let phases = [
        ("connect", phases.connect),
        ("io wait", phases.io_wait),
        ("read", phases.read),
        ("verify", phases.verify),
        ("pin", phases.pin),
        ("h2d", phases.h2d),
        ("unpin", phases.unpin),
        ("bind", phases.bind),
    ];
    let phases: Vec<_> = phases
        .iter()
        .filter(|(_, ms)| *ms > 0.0)
        .map(|(name, ms)| format!("{name} {}", human::ms(*ms)))
        .collect();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "overlapping: {}", phases.join(", "));
    for skip in &loaded.skips {
        let what = if skip.failover { "left in the middle" } else { "passed over" };
        let _ = writeln!(text, "{what}: {} {}: {}", skip.kind, skip.name, skip.reason);
    }
    text
}
