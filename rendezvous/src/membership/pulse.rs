//! How a member is, for who watches it from elsewhere in its process.

use super::{Footing, Shared, State};
use crate::protocol::{Blame, MemberId};
use flashboot_core::Error;
use std::{sync::Weak, time::Duration};

/// A look at a member from elsewhere in its process; it keeps nothing alive.
#[derive(Debug, Clone)]
pub struct Pulse(pub(super) Weak<Shared>);

impl Pulse {
    fn of<T>(&self, look: impl FnOnce(&State) -> T) -> Option<T> {
        self.0.upgrade().map(|shared| look(&shared.state()))
    }

    /// How long ago the service had it; `None` once the membership is gone.
    pub fn silence(&self) -> Option<Duration> {
        self.of(|state| state.answered.elapsed())
    }

    /// Where it stands with the service; `None` once the membership is gone.
    pub fn footing(&self) -> Option<Footing> {
        self.of(Footing::of)
    }

    /// Why the service did not answer last time, if it did not.
    pub fn trouble(&self) -> Option<Error> {
        self.of(|state| state.trouble.clone()).flatten()
    }

    /// What its readers say of its bytes.
    pub fn blame(&self) -> Blame {
        self.of(|state| state.blame).unwrap_or_default()
    }

    /// Whether the service answered last time.
    pub fn is_reached(&self) -> bool {
        self.of(|state| state.trouble.is_none()).unwrap_or(false)
    }

    /// Whom it reads from.
    pub fn upstream(&self) -> Option<MemberId> {
        self.of(|state| state.said.upstream).flatten()
    }

    /// Why the service will not have it any more, if so.
    pub fn evicted(&self) -> Option<Error> {
        self.of(|state| state.evicted.clone()).flatten()
    }
}
