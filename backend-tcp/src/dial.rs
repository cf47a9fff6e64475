//! The reader's half of attaching, and what it checks before anything moves.

use crate::{
    config::{TcpConfig, purpose},
    error::closed,
    watch::FIRST,
    wire::{Attach, Attached, Lane, MAX_FRAME, Request},
};
use flashboot_channel::{Channel, Dial, Endpoint, Security, dial};
use flashboot_core::{Error, Generation, Kind, Locator, Result};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How to reach one source.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    endpoint: Endpoint,
    locator: Arc<Locator>,
    security: Security,
    how: Dial,
    until: Instant,
}

impl Route {
    /// To what `locator` names, for a call that began now and may take `timeout`.
    pub(crate) fn new(
        locator: Arc<Locator>,
        config: &TcpConfig,
        security: &Security,
        timeout: Duration,
    ) -> Result<Self> {
        let endpoint: Endpoint = locator.endpoint.parse().map_err(|e| {
            Error::new(Kind::Invalid, "import", format!("the locator names no endpoint of tcp: {e}"))
        })?;
        // Beyond any caller's patience, and within the clock's range.
        let timeout = timeout.min(Duration::from_secs(86_400));
        let how = Dial { purpose: purpose()?, timeout, liveness: config.liveness()? };
        let until = Instant::now() + timeout;
        Ok(Self { endpoint, locator, security: security.clone(), how, until })
    }

    /// The same way once more, for a call that begins now and may take `timeout`.
    pub(crate) fn once_more(&self, timeout: Duration) -> Self {
        Self { until: Instant::now() + timeout, ..self.clone() }
    }

    /// The filling that is asked for.
    pub(crate) fn generation(&self) -> Generation {
        self.locator.generation
    }

    /// As errors name the source.
    pub(crate) fn peer(&self) -> String {
        self.endpoint.place()
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// One connection, attached to the locator's arena. One for watching has its first look under way: asked for before the source
    /// has answered, so that it costs no round trip of its own.
    pub(crate) async fn attach(&self, lane: Lane) -> Result<Channel> {
        let how = Dial { timeout: self.left(), ..self.how };
        let mut channel = dial(&self.endpoint, &self.security, how).await?;
        let attach = Attach { lane, generation: self.locator.generation.word() };
        channel.send(&attach.encode(), MAX_FRAME, self.left()).await?;
        if lane == Lane::Watch {
            channel.send(&Request::Look(FIRST).encode(), MAX_FRAME, self.left()).await?;
        }
        let frame = channel.receive(MAX_FRAME, self.left()).await?;
        let frame = frame.ok_or_else(|| closed("attach", "the source's answer", channel.peer()))?;
        let attached = Attached::decode(&frame).map_err(|e| e.with_peer(channel.peer()))?;
        self.check(attached).map_err(|e| e.with_peer(channel.peer()))?;
        Ok(channel)
    }

    fn check(&self, attached: Attached) -> Result<()> {
        let Attached { refused, memory, shards, payload, capacity, generation } = attached;
        if let Some((refusal, said)) = refused {
            return Err(refusal.into_error("attach", &said, &self.peer()));
        }
        if generation != self.locator.generation.word() {
            let detail = format!("the source answered for generation {generation:016x}");
            return Err(Error::new(Kind::StaleGeneration, "attach", detail));
        }
        let found = (payload, capacity, shards, memory);
        let Locator { payload, capacity, shards, .. } = *self.locator;
        let named = (payload, capacity, shards, self.locator.location.memory());
        if found == named {
            return Ok(());
        }
        let tell = |(payload, capacity, shards, memory)| {
            format!(
                "{payload} bytes of payload, {capacity} bytes and {shards} shards in all, in {memory} memory"
            )
        };
        let detail = format!("the source has {}, the locator says {}", tell(found), tell(named));
        Err(Error::new(Kind::Mismatch, "attach", detail))
    }
}
