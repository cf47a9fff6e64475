//! The verbs of the node agent: `agent` serves it; `stage`, `hold`, `evict` and `ls` ask it.

pub(crate) mod evict;
pub(crate) mod keep;
pub(crate) mod ls;
pub(crate) mod serve;

use crate::settings::Overrides;
use clap::Args;
use std::path::PathBuf;

/// Which agent.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Where the agent's socket lies [default: /run/user/UID/flashboot, or /tmp/flashboot-UID]
    #[arg(long = "agent", value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

impl Which {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        let directory = self.directory.as_ref().map(|path| path.display().to_string());
        into.set("agent.directory", "--agent", directory);
    }
}
