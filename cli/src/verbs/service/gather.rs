//! `flashboot gather IMAGE`.

use super::{SeatArgs, seed};
use crate::{
    exit::{Code, Failure},
    human, interrupt,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::Args;
use flashboot::{
    config::{Chunk, Config},
    service::{self, GatherRequest, Gathered, KillAt},
};
use flashboot_checkpoint::Image;
use flashboot_rendezvous::store::Address;
use std::{fmt::Write as _, path::PathBuf};

#[derive(Debug, Args)]
pub(crate) struct GatherArgs {
    /// The image's directory, on each node's disk
    image: PathBuf,
    /// How many nodes there are; each is started like this one, and all begin when all have come
    #[arg(short = 'N', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    nodes: u32,
    /// Which rank image, by name (target-0-0-0-0) [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
    /// The replication service: what `flashboot rendezvous` printed, etcd://… or dir:PATH
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Address,
    /// Which ring, where several gather the same at one service
    #[arg(long, default_value = "", hide_default_value = true)]
    ring: String,
    /// Write the verified payload to this file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    seat: SeatArgs,
    /// For tests: kill itself, or @PID, there (registered, pull:N, chunk:N, complete)
    #[arg(long, hide = true, value_name = "WHERE")]
    kill: Option<KillAt>,
}

impl GatherArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.seat.overrides(into);
    }
}

pub(crate) fn run(args: &GatherArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let image = Image::open(&args.image)?;
    let request = GatherRequest {
        rank: seed::rank(&image, args.rank.as_deref())?,
        image,
        nodes: args.nodes,
        name: args.ring.clone(),
        chunk: match config.replicate.chunk {
            Chunk::Auto => None,
            Chunk::Bytes(size) => Some(size.0),
        },
        rendezvous: args.rendezvous.clone(),
        output: args.output.clone(),
        kill: args.kill,
        seat: args.seat.seat(config),
    };
    let told = |gathered: &Gathered| {
        // A reader of stdout that is gone ends nothing.
        let _ = output.result(gathered, || text(gathered));
    };
    let runtime = runtime(false)?;
    let done = runtime.block_on(async {
        let _shown = service::show(config, &request.seat.observed).await?;
        service::gather(request, told, interrupt::signalled()).await
    });
    runtime.shutdown_background();
    done?;
    Ok(Code::SUCCESS)
}

fn text(gathered: &Gathered) -> String {
    let mut text = format!(
        "{} of {}, node {} of {}: {} of {} blocks verified, read in {}, gathered in {} ({})\nimage {}\nmember {}\n",
        gathered.rank,
        human::bytes(gathered.bytes),
        gathered.index + 1,
        gathered.nodes,
        gathered.verified,
        gathered.blocks,
        human::ms(gathered.read_ms),
        human::ms(gathered.gather_ms),
        human::rate(gathered.bytes_per_s),
        gathered.image,
        gathered.member,
    );
    text += &super::hops(&gathered.sources);
    if gathered.from_disk.len() > 1 {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "shards from disk: {:?}", gathered.from_disk);
    }
    text
}
