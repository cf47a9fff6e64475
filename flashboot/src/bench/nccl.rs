//! NCCL's collectives on the same GPUs in the same run, where Python, torch and NCCL are there: a process a GPU.

use flashboot_core::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::{net::TcpListener, process::Stdio, time::Duration};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

const SCRIPT: &str = include_str!("nccl.py");

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// From one GPU to the others.
    Broadcast,
    /// Each has a part, all get all.
    AllGather,
}

/// What it took at one size, on the rank that took longest; milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NcclFigures {
    /// Bytes that every rank has afterwards.
    pub bytes: u64,
    /// Communicator and first collective, of the first size only.
    pub cold_ms: Option<f64>,
    /// By events around one call, warm.
    pub event_ms: f64,
    /// From the call to its end as the host sees it, warm.
    pub wall_ms: f64,
    /// One of many queued back to back.
    pub queued_ms: f64,
    /// NCCL's.
    pub version: String,
}

/// Measures `sizes` between the GPUs with these UUIDs.
///
/// # Errors
/// [`Kind::Unavailable`] with what Python said: no torch, no NCCL, fewer than two GPUs.
pub async fn measure(
    collective: Collective,
    gpus: &[String],
    sizes: &[u64],
    repeats: u32,
    limit: Duration,
) -> Result<Vec<NcclFigures>> {
    match gpus.len() {
        0 => return Err(unavailable("it needs two GPUs, and host memory was measured".into())),
        1 => return Err(unavailable("it refuses two ranks on one GPU, and one GPU was measured".into())),
        _ => {}
    }
    let port = free_port()?;
    let mut ranks = Vec::new();
    for (rank, uuid) in gpus.iter().enumerate() {
        let kind = if collective == Collective::Broadcast { "broadcast" } else { "all-gather" };
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, &rank.to_string(), &gpus.len().to_string(), &port.to_string(), kind]);
        command.arg(repeats.to_string()).args(sizes.iter().map(u64::to_string));
        command.env("CUDA_VISIBLE_DEVICES", uuid).stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|e| unavailable(format!("python3: {e}")))?;
        ranks.push(printed(child));
    }
    // The first that fails ends the others, who would wait for it.
    let outputs = timeout(limit, futures_util::future::try_join_all(ranks)).await;
    let outputs =
        outputs.map_err(|_| Error::new(Kind::Deadline, "nccl", format!("not done within {limit:?}")))??;
    let mut slowest: Vec<NcclFigures> = Vec::new();
    for output in outputs {
        let lines = output.split(|b| *b == b'\n').filter(|line| line.starts_with(b"{"));
        for (index, line) in lines.enumerate() {
            let figures: NcclFigures = serde_json::from_slice(line)
                .map_err(|e| Error::new(Kind::Protocol, "nccl", format!("what its process printed: {e}")))?;
            match slowest.get_mut(index) {
                Some(seen) => seen.take_slower(&figures),
                None => slowest.push(figures),
            }
        }
    }
    Ok(slowest)
}

/// What a rank printed, once it has succeeded.
async fn printed(child: Child) -> Result<Vec<u8>> {
    let output = child.wait_with_output().await.map_err(|e| unavailable(format!("python3: {e}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(unavailable(said.lines().last().unwrap_or("python3 said nothing").to_owned()))
}

impl NcclFigures {
    fn take_slower(&mut self, other: &Self) {
        self.event_ms = self.event_ms.max(other.event_ms);
        self.wall_ms = self.wall_ms.max(other.wall_ms);
        self.queued_ms = self.queued_ms.max(other.queued_ms);
        self.cold_ms = self.cold_ms.into_iter().chain(other.cold_ms).reduce(f64::max);
    }
}

/// A port that was free a moment ago: what NCCL's processes meet at.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    Ok(listener.map_err(|e| Error::from_io("bind", &e, "a loopback port"))?.port())
}

fn unavailable(detail: String) -> Error {
    Error::new(Kind::Unavailable, "nccl", detail)
        .with_remedy("install torch with CUDA for python3, and give two GPUs (--device cuda:*)")
}
