//! How a member is, for who watches it from elsewhere in its process.

use super::Footing;
use crate::protocol::{Blame, MemberId};
use flashboot_core::Error;
use std::{fmt, sync::Weak, time::Duration};

/// What renews at a service.
pub(crate) trait Beats: fmt::Debug + Send + Sync {
    /// How it is now.
    fn beat(&self) -> Beat;
}

/// A member at one moment.
#[derive(Debug)]
pub(crate) struct Beat {
    /// Since the service had it.
    pub(crate) silence: Duration,
    /// How long that may be.
    pub(crate) lease: Duration,
    pub(crate) trouble: Option<Error>,
    pub(crate) evicted: Option<Error>,
    pub(crate) blame: Blame,
    pub(crate) upstream: Option<MemberId>,
}

/// A look at a member, or at a node of a ring, from elsewhere in its process; it keeps nothing alive.
#[derive(Debug, Clone)]
pub struct Pulse(pub(crate) Weak<dyn Beats>);

impl Pulse {
    fn beat(&self) -> Option<Beat> {
        self.0.upgrade().map(|member| member.beat())
    }

    /// How long ago the service had it; `None` once the membership is gone.
    pub fn silence(&self) -> Option<Duration> {
        self.beat().map(|beat| beat.silence)
    }

    /// Where it stands with the service; `None` once the membership is gone.
    pub fn footing(&self) -> Option<Footing> {
        self.beat().map(|beat| Footing::of(&beat))
    }

    /// Why the service did not answer last time, if it did not.
    pub fn trouble(&self) -> Option<Error> {
        self.beat()?.trouble
    }

    /// What its readers say of its bytes.
    pub fn blame(&self) -> Blame {
        self.beat().map(|beat| beat.blame).unwrap_or_default()
    }

    /// Whether the service answered last time.
    pub fn is_reached(&self) -> bool {
        self.beat().is_some_and(|beat| beat.trouble.is_none())
    }

    /// Whom it reads from.
    pub fn upstream(&self) -> Option<MemberId> {
        self.beat()?.upstream
    }

    /// Why the service will not have it any more, if so.
    pub fn evicted(&self) -> Option<Error> {
        self.beat()?.evicted
    }
}
