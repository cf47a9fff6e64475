//! How an arena becomes readable by peers, and a locator a mover.

use crate::{Arena, Locator, Mover, Result};
use async_trait::async_trait;
use std::{fmt, sync::Arc, time::Duration};

/// Keeps an arena readable. Dropping it stops new readers; readers that are attached keep what they have.
pub trait Export: Send + Sync + fmt::Debug {
    /// What to publish: any number of readers may use it, any number of times.
    fn locator(&self) -> &Locator;
}

/// One transport's endpoint on this host: exports arenas and imports locators.
///
/// The exporter is passive in the data path; in set-up its responder answers each reader once, on a thread
/// of the endpoint's own, so that a busy owner never delays a reader.
#[async_trait]
pub trait HandleExchange: Send + Sync + fmt::Debug {
    /// Makes `arena` readable. The arena's current generation is what the locator names.
    async fn export(&self, arena: Arc<dyn Arena>, timeout: Duration) -> Result<Box<dyn Export>>;

    /// Dials the exporter's responder, negotiates what this reader needs, maps the peer's memory read-only
    /// and checks its control block against the locator; nothing is moved.
    ///
    /// # Errors
    /// [`crate::Kind::Mismatch`] when `into` has another payload length or `locator` is of another
    /// transport, [`crate::Kind::StaleGeneration`] when the arena holds another filling,
    /// [`crate::Kind::SourceLost`] when nobody answers, [`crate::Kind::Permission`] when a check of identity
    /// or of seals fails, [`crate::Kind::Deadline`] after `timeout`.
    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>>;
}
