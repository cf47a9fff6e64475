//! `flashboot seed IMAGE`.

use super::{Lease, SeatArgs};
use crate::{
    exit::{Code, Failure},
    human, interrupt,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::Args;
use flashboot::{
    config::Config,
    service::{self, SeedFrom, SeedRequest, Serving},
};
use flashboot_checkpoint::{Image, RankImage};
use flashboot_rendezvous::store::Address;
use std::{net::SocketAddr, path::PathBuf};

#[derive(Debug, Args)]
pub(crate) struct SeedArgs {
    /// The image's directory
    image: PathBuf,
    /// Which rank image, by name (target-0-0-0-0) [default: the only one]
    #[arg(long, value_name = "NAME")]
    rank: Option<String>,
    /// The replication service: what `flashboot rendezvous` printed, etcd://HOST:PORT/NAME or dir:PATH
    #[arg(long, value_name = "ADDRESS", required_unless_present = "embed")]
    rendezvous: Option<Address>,
    /// Serve the replication service too, there; with a store, whenever no other does
    #[arg(long, value_name = "ADDRESS:PORT")]
    embed: Option<SocketAddr>,
    /// What clones ask for [default: the image directory's name]
    #[arg(long)]
    model: Option<String>,
    /// Which edition of it
    #[arg(long, default_value = "")]
    revision: String,
    #[command(flatten)]
    lease: Lease,
    #[command(flatten)]
    seat: SeatArgs,
}

impl SeedArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.seat.overrides(into);
    }
}

pub(crate) fn run(args: &SeedArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let image = Image::open(&args.image)?;
    let rank = rank(&image, args.rank.as_deref())?;
    let request = SeedRequest {
        model: args.model.clone().unwrap_or_else(|| name(&image)),
        from: SeedFrom::Image(Box::new((image, rank))),
        revision: args.revision.clone(),
        rendezvous: args.rendezvous.clone(),
        embed: args.embed,
        lease: args.lease.lease,
        seat: args.seat.seat(config),
    };
    let told = |serving: &Serving| {
        // A reader of stdout that is gone ends nothing.
        let _ = output.result(serving, || text(serving));
    };
    let runtime = runtime(false)?;
    let done = runtime.block_on(async {
        let _shown = service::show(config, &request.seat.observed).await?;
        service::seed(request, told, interrupt::signalled()).await
    });
    runtime.shutdown_background();
    done?;
    Ok(Code::SUCCESS)
}

/// The rank image called so, or the only one.
pub(super) fn rank(image: &Image, name: Option<&str>) -> Result<RankImage, Failure> {
    let wanted = crate::verbs::replicate::source(image, name)?.rank;
    let found = image.ranks().iter().find(|rank| rank.coordinate.to_string() == wanted);
    found.cloned().ok_or_else(|| Failure::usage(format!("the image has no rank `{wanted}`")))
}

/// The directory's own name.
fn name(image: &Image) -> String {
    let dir = std::path::absolute(image.dir()).unwrap_or_else(|_| image.dir().to_owned());
    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name.is_empty() { "model".into() } else { name }
}

fn text(serving: &Serving) -> String {
    format!(
        "seeding {} ({}) of {}, loaded and verified in {}\nimage {}\nmember {}, by {}\nrendezvous {}\n",
        serving.model,
        serving.rank,
        human::bytes(serving.bytes),
        human::ms(serving.load_ms),
        serving.image,
        serving.member,
        serving.transports.join(", "),
        serving.rendezvous,
    )
}
