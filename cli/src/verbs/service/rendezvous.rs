//! `flashboot rendezvous`.

use super::{Lease, Protection, Shown};
use crate::{
    exit::{Code, Failure},
    interrupt,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::Args;
use flashboot::{config::Config, network::Advertised, observe::Observed, service};
use flashboot_rendezvous::store::Address;
use std::net::SocketAddr;

#[derive(Debug, Args)]
pub(crate) struct RendezvousArgs {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7400")]
    listen: SocketAddr,
    /// Stand behind this store, and serve while no other does: etcd://HOST:PORT/NAME or dir:PATH
    #[arg(long, value_name = "ADDRESS")]
    store: Option<Address>,
    /// The name or address that members dial [default: the one listened at]
    #[arg(long, value_name = "HOST")]
    advertise: Option<Advertised>,
    #[command(flatten)]
    lease: Lease,
    #[command(flatten)]
    protection: Protection,
    #[command(flatten)]
    shown: Shown,
}

impl RendezvousArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        into.text("tcp.advertise", "--advertise", self.advertise.as_ref());
        self.protection.overrides(into);
        self.shown.overrides(into);
    }
}

pub(crate) fn run(args: &RendezvousArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let network = config.network();
    let told = |endpoint: &Address| {
        // A reader of stdout that is gone ends nothing.
        let _ = output
            .result(&serde_json::json!({ "endpoint": endpoint.to_string() }), || format!("{endpoint}\n"));
    };
    let runtime = runtime(false)?;
    runtime.block_on(async {
        let stop = interrupt::signalled();
        let observed = Observed::default();
        let _shown = service::show(config, &observed).await?;
        let (lease, store) = (args.lease.lease, args.store.as_ref());
        service::rendezvous(args.listen, lease, store, &network, &observed, told, stop).await
    })?;
    Ok(Code::SUCCESS)
}
