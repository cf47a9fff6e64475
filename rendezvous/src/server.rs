//! The replication service on a TCP port: one task a connection, one machine for all.
//!
//! It keeps nothing on disk: whoever is still there when it comes back says so again.

use crate::{
    Inside,
    protocol::{
        Answer, Greeting, Hello, MAX_ANSWER, MAX_REQUEST, Reason, Refusal, Request, Rules, Status, agree,
        decode, encode,
    },
    store::Fence,
};
use flashboot_channel::{Channel, Endpoint, Host, Listen, Listener, Purpose, Security};
use flashboot_core::{Error, Kind, Result};
use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::task::JoinSet;
use tracing::{debug, info};

/// How long a client may take to say hello, and to take an answer.
const STEP: Duration = Duration::from_secs(10);
/// The longest hello.
const HELLO: usize = 4 << 10;

/// What the channels of this protocol are for.
pub(crate) fn purpose() -> Result<Purpose> {
    Purpose::new("rendezvous").ok_or_else(|| Error::new(Kind::Invalid, "rendezvous", "not a purpose"))
}

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where to listen; port 0 lets the system choose.
    pub at: SocketAddr,
    /// What clients dial; `None`: the address listened at.
    pub advertise: Option<Host>,
    /// What members are held to.
    pub rules: Rules,
    /// The most connections; later ones are refused by name.
    pub connections: usize,
}

/// A service that listens.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    endpoint: Endpoint,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inside: Arc<Inside>,
    open: AtomicUsize,
    most: usize,
    /// Of a service behind a store: it answers only while this stands.
    fence: OnceLock<Fence>,
}

impl Shared {
    /// `None` once another service may be there.
    fn handle(&self, request: Request) -> Option<Answer> {
        self.inside.handle_if(request, || self.fence.get().is_none_or(Fence::stands))
    }
}

impl Server {
    /// Binds. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// [`Kind::Permission`] off loopback when clients would have to prove nothing; the system's own.
    pub async fn bind(config: ServerConfig, security: &Security) -> Result<Self> {
        let listener = Listener::bind(config.at, security, Listen::new(purpose()?)).await?;
        let endpoint = listener.endpoint(config.advertise.as_ref())?;
        let shared = Shared {
            inside: Arc::new(Inside::new(config.rules)),
            open: AtomicUsize::new(0),
            most: config.connections,
            fence: OnceLock::new(),
        };
        Ok(Self { listener, endpoint, shared: Arc::new(shared) })
    }

    /// Answers only as long as `fence` stands. The first is kept.
    #[must_use]
    pub fn fenced(self, fence: Fence) -> Self {
        self.shared.fence.get_or_init(|| fence);
        self
    }

    /// What clients dial.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Serves until `stop`; then every connection ends.
    ///
    /// # Errors
    /// When the listening socket itself is broken.
    pub async fn serve(mut self, stop: impl Future<Output = ()>) -> Result<()> {
        let mut connections = JoinSet::new();
        let mut tick = tokio::time::interval(self.shared.inside.lease() / 10);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => return Ok(()),
                _ = tick.tick() => self.shared.inside.tick(),
                taken = self.listener.accept() => {
                    connections.spawn(connection(taken?, Arc::clone(&self.shared)));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }

    /// Who holds what now, for the process that serves.
    pub fn status(&self) -> impl Fn() -> Status + Send + Sync + 'static {
        let inside = self.inside();
        move || inside.status()
    }

    /// The service itself, for the process that serves it.
    pub fn inside(&self) -> Arc<Inside> {
        Arc::clone(&self.shared.inside)
    }
}

/// Counts a connection as long as it lives.
struct Open<'s>(&'s Shared, usize);

impl<'s> Open<'s> {
    fn new(shared: &'s Shared) -> Self {
        Self(shared, shared.open.fetch_add(1, Ordering::Relaxed))
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn connection(mut channel: Channel, shared: Arc<Shared>) {
    let open = Open::new(&shared);
    let peer = channel.peer().to_owned();
    match talk(&mut channel, &shared, open.1).await {
        Ok(()) => debug!(peer, "a client of the service hung up"),
        Err(error) => info!(peer, %error, "a client of the service is let go"),
    }
}

async fn talk(channel: &mut Channel, shared: &Shared, others: usize) -> Result<()> {
    let Some(hello) = channel.receive(HELLO, STEP).await? else { return Ok(()) };
    let greeted = decode::<Hello>(&hello).and_then(|hello| agree(&hello));
    let full = || Refusal::new(Reason::Full, format!("{others} connections are all that there is room for"));
    let greeted = if others >= shared.most { Err(full()) } else { greeted };
    let greeting = match &greeted {
        Ok(version) => Greeting::Welcome { version: *version, release: env!("CARGO_PKG_VERSION").into() },
        Err(refusal) => Greeting::Refused(refusal.clone()),
    };
    channel.send(&encode(&greeting), MAX_ANSWER, STEP).await?;
    let peer = channel.peer().to_owned();
    greeted.map_err(|refusal| refusal.into_error("hello", &peer))?;
    // Whoever has nothing to renew needs no connection either.
    let idle = shared.inside.lease().saturating_mul(3);
    while let Some(frame) = channel.receive(MAX_REQUEST, idle).await? {
        match decode::<Request>(&frame) {
            Ok(request) => match shared.handle(request) {
                Some(answer) => channel.send(&encode(&answer), MAX_ANSWER, STEP).await?,
                None => {
                    let detail = "this service's term is over; another may be there";
                    return Err(Error::new(Kind::Cancelled, "request", detail).with_peer(&peer));
                }
            },
            Err(refusal) => {
                let answer = Answer::Refused(refusal.clone());
                channel.send(&encode(&answer), MAX_ANSWER, STEP).await?;
                return Err(refusal.into_error("request", &peer));
            }
        }
    }
    Ok(())
}
