//! The hidden verb that `replicate` starts its seed and clones with.

use crate::{
    exit::{Code, Failure},
    logs,
};
use clap::Args;
use flashboot::{
    config::{Log, LogFormat},
    replicate::{WorkerArgs, worker},
};
use std::path::PathBuf;
use tracing::debug;

#[derive(Debug, Args)]
pub(crate) struct WorkerVerb {
    #[arg(long)]
    board: PathBuf,
    #[arg(long)]
    rank: u32,
    #[arg(long)]
    level: String,
    #[arg(long)]
    json_logs: bool,
    /// A rank of a bench, not of a replication
    #[arg(long)]
    bench: bool,
}

pub(crate) fn run(args: WorkerVerb) -> Result<Code, Failure> {
    let WorkerVerb { board, rank, level, json_logs, bench } = args;
    let format = if json_logs { LogFormat::Json } else { LogFormat::Text };
    logs::install(&Log { level, format })?;
    let runtime = super::replicate::runtime(false)?;
    let args = WorkerArgs { board, rank };
    let done =
        if bench { runtime.block_on(flashboot::bench::worker(args)) } else { runtime.block_on(worker(args)) };
    // Do not wait for anything a transport left running.
    runtime.shutdown_background();
    Ok(match done {
        Ok(()) => Code::SUCCESS,
        Err(error) => {
            // The parent has it from the board and says it.
            debug!(%error, "this rank failed");
            Code::FAILURE
        }
    })
}
