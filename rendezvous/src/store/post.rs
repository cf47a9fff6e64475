//! A service behind a store: it stands by until the post is vacant, serves for its term, and stands by again.

use super::{Store, term::Term};
use crate::{
    protocol::Status,
    server::{Server, ServerConfig},
};
use flashboot_channel::Security;
use flashboot_core::Result;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::sleep;
use tracing::{debug, info, warn};

/// How soon a store that does not answer is asked again.
const AGAIN: Duration = Duration::from_millis(500);
/// The shortest lease of a post.
const SHORTEST: Duration = Duration::from_secs(2);

type Ask = Arc<dyn Fn() -> Status + Send + Sync>;

/// Whether a service has the post, and what it knows then. Cloning shares it.
#[derive(Clone, Default)]
pub struct Post(Arc<Mutex<Option<Ask>>>);

impl fmt::Debug for Post {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Post {{ held: {} }}", self.is_held())
    }
}

impl Post {
    fn set(&self, ask: Option<Ask>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = ask;
    }

    fn ask(&self) -> Option<Ask> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it has.
    pub fn is_held(&self) -> bool {
        self.ask().is_some()
    }

    /// Who holds what, from whoever has the post.
    pub fn status(&self) -> Option<Status> {
        self.ask().map(|ask| ask())
    }
}

/// Stands by and serves in turns, until `stop`. A store that is away is waited for. `post` tells whether it serves.
///
/// # Errors
/// What keeps it from listening: [`flashboot_core::Kind::Permission`] off loopback when clients would have to prove nothing,
/// a port that is taken when it begins.
pub async fn stand(
    store: Arc<dyn Store>,
    config: ServerConfig,
    security: Security,
    post: Post,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    // What cannot work is said now, and not when the post falls vacant.
    drop(Server::bind(config.clone(), &security).await?);
    tokio::pin!(stop);
    loop {
        let (server, mut term) = tokio::select! {
            () = &mut stop => return Ok(()),
            taken = campaign(&*store, &config, &security) => taken,
        };
        info!(store = store.name(), endpoint = %server.endpoint(), "this is the service now");
        post.set(Some(Arc::new(server.status())));
        let server = server.fenced(term.fence());
        let ended = server.serve(async {
            tokio::select! {
                () = &mut stop => {}
                _ = term.over() => {}
            }
        });
        let ended = ended.await;
        post.set(None);
        term.resign().await;
        if let Err(error) = ended {
            warn!(%error, "the service ended");
            sleep(AGAIN).await;
        }
        tokio::select! {
            biased;
            () = &mut stop => return Ok(()),
            () = std::future::ready(()) => {}
        }
    }
}

/// Until this service has the post.
async fn campaign(store: &dyn Store, config: &ServerConfig, security: &Security) -> (Server, Term) {
    let lease = (config.rules.lease / 2).max(SHORTEST);
    loop {
        match turn(store, config, security, lease).await {
            Ok(Some(taken)) => return taken,
            Ok(None) => debug!(store = store.name(), "another was quicker"),
            Err(error) => {
                warn!(%error, store = store.name(), "no campaign yet");
                sleep(AGAIN).await;
            }
        }
    }
}

async fn turn(
    store: &dyn Store,
    config: &ServerConfig,
    security: &Security,
    lease: Duration,
) -> Result<Option<(Server, Term)>> {
    store.vacant().await?;
    // Bound only now: nobody is to dial one that stands by, and wait.
    let server = Server::bind(config.clone(), security).await?;
    Ok(store.take(server.endpoint(), lease).await?.map(|term| (server, term)))
}
