//! What an endpoint keeps for as long as it lives: devices, registrations, the engine, and the thread that talks.
//!
//! The talking thread runs a tokio runtime of its own: the responder, the dials of this side, and the connections of both,
//! whatever the caller's runtime does.

use crate::{
    config::RdmaConfig,
    counters::{Counters, Counts},
    engine::Engine,
    rail::{Rail, open_all},
    regions::Regions,
    registry::Registry,
    responder,
    verbs::Verbs,
};
use flashboot_channel::{Listen, Listener, Purpose, Security};
use flashboot_core::{Error, Kind, Result};
use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
};
use tokio::sync::watch;

/// What our channels are for, as the other end must say too.
pub(crate) const PURPOSE: Option<Purpose> = Purpose::new("rdma");

pub(crate) fn purpose() -> Result<Purpose> {
    PURPOSE.ok_or_else(|| Error::new(Kind::Invalid, "rdma", "the purpose of its channels has no form"))
}

/// What responder, dials and exchange share.
#[derive(Debug)]
pub(crate) struct Parts {
    // The engine ends first, then what its queue pairs use.
    pub(crate) engine: Engine,
    pub(crate) registry: Registry,
    pub(crate) regions: Regions,
    pub(crate) rails: Vec<Arc<Rail>>,
    pub(crate) counters: Arc<Counters>,
    /// Remarks that were made of hops, with whose they are: each is told once.
    pub(crate) remarked: Mutex<HashSet<(String, String)>>,
    pub(crate) config: RdmaConfig,
    pub(crate) security: Security,
}

pub(crate) struct Endpoint {
    // Before the parts: the thread's tasks use them.
    talk: Talk,
    parts: Arc<Parts>,
    address: Option<String>,
}

impl Endpoint {
    /// Opens the devices and, if `listens`, the responder. Blocks for as long as the driver needs.
    pub(crate) fn open(verbs: &Arc<dyn Verbs>, config: &RdmaConfig, listens: bool) -> Result<Self> {
        config.check()?;
        let security = Security::load(&config.security)?;
        let counters = Arc::new(Counters::default());
        let rails = open_all(verbs, config, &counters)?;
        for rail in &rails {
            tracing::info!(rail = rail.describe(), "opened a device");
        }
        let engine = Engine::start(rails.clone(), config, Arc::clone(&counters))?;
        let parts = Arc::new(Parts {
            engine,
            registry: Registry::default(),
            regions: Regions::default(),
            rails,
            counters,
            remarked: Mutex::default(),
            config: config.clone(),
            security,
        });
        let (talk, address) = Talk::start(&parts, listens)?;
        Ok(Self { talk, parts, address })
    }

    pub(crate) fn parts(&self) -> &Arc<Parts> {
        &self.parts
    }

    /// Where tasks of the endpoint's own run.
    pub(crate) fn runtime(&self) -> &tokio::runtime::Handle {
        &self.talk.runtime
    }

    /// What readers dial; nothing where nobody listens.
    pub(crate) fn address(&self) -> &str {
        self.address.as_deref().unwrap_or_default()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.parts.counters.read()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("address", &self.address).field("rails", &self.parts.rails).finish()
    }
}

/// The talking thread.
struct Talk {
    runtime: tokio::runtime::Handle,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Talk {
    fn start(parts: &Arc<Parts>, listens: bool) -> Result<(Self, Option<String>)> {
        let (tell, told) = mpsc::sync_channel(1);
        let (stop, stopped) = watch::channel(false);
        let parts = Arc::clone(parts);
        let thread = std::thread::Builder::new()
            .name("flashboot-talk".into())
            .spawn(move || talk(&parts, listens, tell, stopped))
            .map_err(|e| Error::new(Kind::Exhausted, "clone", format!("the responder's thread: {e}")))?;
        let opened = told.recv().unwrap_or_else(|_| {
            Err(Error::new(Kind::Exhausted, "clone", "the responder's thread ended at once"))
        });
        match opened {
            Ok((runtime, address)) => Ok((Self { runtime, stop, thread: Some(thread) }, address)),
            Err(e) => {
                let _ = thread.join();
                Err(e)
            }
        }
    }
}

type Opened = Result<(tokio::runtime::Handle, Option<String>)>;

fn talk(
    parts: &Arc<Parts>,
    listens: bool,
    tell: mpsc::SyncSender<Opened>,
    mut stopped: watch::Receiver<bool>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            let _ = tell.send(Err(Error::new(Kind::Exhausted, "runtime", e.to_string())));
            return;
        }
    };
    runtime.block_on(async {
        let listener = if listens { Some(listen(parts).await) } else { None };
        let (listener, address) = match listener.transpose() {
            Ok(Some((listener, address))) => (Some(listener), Some(address)),
            Ok(None) => (None, None),
            Err(e) => {
                let _ = tell.send(Err(e));
                return;
            }
        };
        let _ = tell.send(Ok((tokio::runtime::Handle::current(), address)));
        let serve = responder::run(parts, listener);
        tokio::select! {
            () = serve => {}
            _ = stopped.wait_for(|stop| *stop) => {}
        }
    });
    // Ends every task; a driver that does not come back is left alone.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
}

async fn listen(parts: &Parts) -> Result<(Listener, String)> {
    let config = &parts.config;
    let how = Listen {
        handshake: config.handshake,
        max_pending: config.max_pending,
        liveness: config.liveness,
        ..Listen::new(purpose()?)
    };
    let listener = Listener::bind(config.listen, &parts.security, how).await?;
    let address = listener.endpoint(config.advertise.as_ref())?.to_string();
    Ok((listener, address))
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        let Some(thread) = self.thread.take() else { return };
        // The last handle may go on a task of the thread itself, which cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the responder's thread panicked");
        }
    }
}
