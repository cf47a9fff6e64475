//! The node agent as configuration means it: [`run`] serves one, [`keep`], [`status`] and [`evict`] are its clients. What it does
//! is [`flashboot_loader::agent`]'s.

mod client;
mod notify;

pub use client::{KeepFrom, KeepRequest, evict, keep, status};
pub(crate) use client::{at, make_room, manifest, of_load, place_of};
pub use flashboot_loader::agent::{Entry, Place, State, Status};
pub use notify::Notify;

use crate::{
    config::{self, Config, Devices},
    load::fill_config,
    observe::Observed,
    replicate::{arena_config, resolve_devices},
    service::blocking,
};
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::agent::{Agent, AgentConfig, ServeConfig, Serving, serve};
use flashboot_memory::budget;
use serde::Serialize;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// An agent that serves.
#[derive(Debug, Clone, Serialize)]
pub struct Running {
    /// Its socket.
    pub socket: PathBuf,
    /// The most bytes of host memory that it keeps.
    pub limit: u64,
    /// Its process.
    pub pid: u32,
}

/// Serves an agent until `stop`; `told` hears of it once it listens, and `notify`, where a service manager waits, too. Needs a tokio runtime.
///
/// # Errors
/// [`Kind::Busy`] while another agent lives on the socket; [`Kind::Permission`] for a directory that others can write; without a
/// GPU that was named.
pub async fn run(
    config: &Config,
    observed: &Observed,
    notify: &Notify,
    told: impl FnOnce(&Running),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let pin_for = match &config.agent.pin {
        None => None,
        Some(device) => {
            let these = Devices::These(vec![device.clone()]);
            resolve_devices(&these, config.replicate.setup_timeout).await?.pop()
        }
    };
    let limit = match config.agent.limit {
        Some(limit) => limit.0,
        None => available()? / 4 * 3,
    };
    let agent_config =
        AgentConfig { limit, memory: arena_config(config.memory, 0), fill: fill_config(config)?, pin_for };
    let serve_config = serve_config(&config.agent);
    let started = blocking(move || {
        let agent = Agent::new(agent_config)?;
        let serving = serve(&agent, &serve_config)?;
        Ok((Arc::new(agent), serving))
    });
    let (agent, serving): (Arc<Agent>, Serving) = started.await?;
    let shown = Arc::downgrade(&agent);
    observed.agent(move || shown.upgrade().map(|agent| agent.status()));
    let running = Running { socket: serving.socket().to_owned(), limit, pid: std::process::id() };
    tracing::info!(socket = %running.socket.display(), limit, "an agent");
    told(&running);
    notify.tell("READY=1");
    stop.await;
    notify.tell("STOPPING=1");
    blocking(move || {
        // Nobody comes in any more, then memory is given back.
        drop(serving);
        // A status may be asked for at this moment: its handle goes soon.
        let mut agent = agent;
        for _ in 0..100 {
            match Arc::try_unwrap(agent) {
                Ok(last) => {
                    drop(last);
                    break;
                }
                Err(shared) => agent = shared,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    })
    .await
}

fn available() -> Result<u64> {
    budget::available().map(|available| available.bytes).ok_or_else(|| {
        Error::new(Kind::Unavailable, "agent", "this system does not say how much memory it has")
            .with_remedy("set agent.limit")
    })
}

fn serve_config(config: &config::Agent) -> ServeConfig {
    let usual = ServeConfig::default();
    ServeConfig {
        directory: config.directory.clone().unwrap_or(usual.directory),
        allow_uids: config.allow_uids.clone(),
        allow_gids: config.allow_gids.clone(),
        most: usize::try_from(config.clients).unwrap_or(usual.most),
    }
}
