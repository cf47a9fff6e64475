//! `flashboot agent`.

use super::Which;
use crate::{
    exit::{Code, Failure},
    human, interrupt,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
    verbs::service::Shown,
};
use clap::Args;
use flashboot::{
    agent::{self, Notify, Running},
    config::Config,
    observe::Observed,
    service,
};
use flashboot_core::ByteSize;

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    which: Which,
    /// The most host memory that it keeps [default: three quarters of what there is]
    #[arg(long, value_name = "SIZE")]
    limit: Option<ByteSize>,
    /// A user, besides its own, that may use it; again for more
    #[arg(long, value_name = "UID")]
    allow_uid: Vec<u32>,
    /// A group that may; again for more
    #[arg(long, value_name = "GID")]
    allow_gid: Vec<u32>,
    /// Pin what was staged at once, for this GPU and others, such as cuda:0 [default: when it is pushed first]
    #[arg(long, value_name = "DEVICE")]
    pin: Option<String>,
    /// auto, base or huge [default: auto]
    #[arg(long, value_parser = ["auto", "base", "huge"])]
    pages: Option<String>,
    #[command(flatten)]
    shown: Shown,
}

impl AgentArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.which.overrides(into);
        self.shown.overrides(into);
        into.text("agent.limit", "--limit", self.limit.as_ref());
        let listed = |numbers: &[u32]| (!numbers.is_empty()).then(|| numbers.to_vec());
        into.set("agent.allow_uids", "--allow-uid", listed(&self.allow_uid));
        into.set("agent.allow_gids", "--allow-gid", listed(&self.allow_gid));
        into.set("agent.pin", "--pin", self.pin.clone());
        into.set("memory.pages", "--pages", self.pages.clone());
    }
}

pub(crate) fn run(_: &AgentArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let notify = Notify::new(std::env::var_os("NOTIFY_SOCKET").as_deref());
    let told = |running: &Running| {
        // A reader of stdout that is gone ends nothing.
        let _ = output.result(running, || {
            format!(
                "an agent at {}, which keeps at most {} in host memory\n",
                running.socket.display(),
                human::bytes(running.limit)
            )
        });
    };
    let runtime = runtime(false)?;
    let done = runtime.block_on(async {
        let stop = interrupt::signalled();
        let observed = Observed::default();
        let _shown = service::show(config, &observed).await?;
        agent::run(config, &observed, &notify, told, stop).await
    });
    runtime.shutdown_background();
    done?;
    Ok(Code::SUCCESS)
}
