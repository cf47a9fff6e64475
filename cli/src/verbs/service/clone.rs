//! `flashboot clone`.

use super::SeatArgs;
use crate::{
    again,
    exit::{Code, Failure},
    human, interrupt,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::{ArgGroup, Args};
use flashboot::{
    config::Config,
    service::{self, CloneRequest, Cloned, ClonedRanks, KillAt},
};
use flashboot_rendezvous::{protocol::Wanted, store::Address};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["model", "image"]))]
pub(crate) struct CloneArgs {
    /// The model, as its seed calls it: the service is believed which image that is
    #[arg(long)]
    model: Option<String>,
    /// Which edition of the model [default: any]
    #[arg(long)]
    revision: Option<String>,
    /// The image's id: what is cloned is proved to be this image. The first 8 digits or more do, where one image has them
    #[arg(long, value_name = "ID", value_parser = service::image_id)]
    image: Option<String>,
    /// Which rank image, by name (target-0-0-0-0) [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
    /// Every rank of the image, each in memory of its own, with one commit for all; --device may name several GPUs
    #[arg(long, conflicts_with = "rank")]
    all_ranks: bool,
    /// Of all ranks only these: the node's
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with_all = ["rank", "all_ranks"])]
    ranks: Vec<String>,
    /// The replication service: what `flashboot rendezvous` or `flashboot seed` printed, etcd://… or dir:PATH
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Address,
    /// Begin once so many clones have come [default: at once]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    expect: Option<u32>,
    /// Write the verified payload to this file; of several ranks, to a new directory
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// End once complete and nobody reads from here [default: serve until a signal comes]
    #[arg(long)]
    leave: bool,
    #[command(flatten)]
    seat: SeatArgs,
    /// For tests: kill itself, or @PID, there (registered, pull:N, chunk:N, complete)
    #[arg(long, hide = true, value_name = "WHERE")]
    kill: Option<KillAt>,
    /// How often this process has begun anew, after it had lost its GPU context
    #[arg(long, hide = true, value_name = "N", default_value_t = 0)]
    restarted: u32,
}

impl CloneArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.seat.overrides(into);
    }
}

pub(crate) fn run(args: &CloneArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let wanted = Wanted {
        image: args.image.clone(),
        model: args.model.clone(),
        revision: args.revision.clone(),
        rank: args.rank.clone(),
    };
    let request = CloneRequest {
        wanted,
        rendezvous: args.rendezvous.clone(),
        expect: args.expect,
        output: args.output.clone(),
        leave: args.leave,
        kill: args.kill,
        seat: args.seat.seat(config),
    };
    // A reader of stdout that is gone ends nothing.
    let told = |cloned: &Cloned| drop(output.result(cloned, || text(cloned)));
    let all = |cloned: &ClonedRanks| {
        drop(output.result(cloned, || cloned.ranks.iter().map(text).collect::<String>()));
    };
    let runtime = runtime(false)?;
    let done = runtime.block_on(async {
        let _shown = service::show(config, &request.seat.observed).await?;
        let stop = interrupt::signalled();
        if args.all_ranks || !args.ranks.is_empty() {
            service::clone_ranks(request, &args.ranks, all, stop).await
        } else {
            service::clone(request, told, stop).await
        }
    });
    runtime.shutdown_background();
    if let Err(error) = &done {
        again::instead_of(error, args.restarted);
    }
    done?;
    Ok(Code::SUCCESS)
}

fn text(cloned: &Cloned) -> String {
    let mut text = format!(
        "{} ({}) of {}: {} of {} blocks verified, ready in {} ({}), set-up {}\nimage {}\nmember {}\n",
        cloned.model,
        cloned.rank,
        human::bytes(cloned.bytes),
        cloned.verified,
        cloned.blocks,
        human::ms(cloned.ready_ms),
        human::rate(cloned.bytes_per_s),
        human::ms(cloned.setup_ms),
        cloned.image,
        cloned.member,
    );
    text += &super::hops(&cloned.sources);
    text
}
