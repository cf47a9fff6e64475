//! Losing a source: what the service says, and what the last plan says while nobody answers.

use super::{GRACE, Membership};
use crate::{
    client::AGAIN,
    protocol::{Answer, Cause, MemberId, Reason, Request},
};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How long a question waits for the service when there are others to turn to.
const IMPATIENT: Duration = Duration::from_millis(500);

/// Why a source was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is gone, does not answer, stands still, or is too slow.
    Lost,
    /// It holds another filling.
    Refused,
    /// Blocks of it do not match their digests.
    Corrupt,
    /// It cannot be read from here, however often that is tried.
    Unreachable,
}

impl Fault {
    /// As the service is told.
    fn cause(self) -> (Cause, bool) {
        let cause = if self == Self::Lost { Cause::Lost } else { Cause::Refused };
        (cause, self == Self::Corrupt)
    }

    /// How long another holder is waited for, of `patience`, while none of those that there are will do.
    fn grace(self, patience: Duration) -> Duration {
        match self {
            Self::Corrupt => patience.min(GRACE),
            Self::Unreachable => Duration::ZERO,
            Self::Lost | Self::Refused => patience,
        }
    }
}

/// What a lost source leaves to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Who was lost.
    pub source: MemberId,
    /// Why.
    pub fault: Fault,
}

impl Membership {
    /// Another source, within `patience`: what the service says; while it does not answer, one that the last plan named,
    /// first of all one that holds everything. Where the service says that nobody is left but holders that will not do, those of
    /// wrong bytes are waited for another for 3 s only, and those that cannot be read from here not at all.
    pub async fn lost(&self, loss: Loss, patience: Duration) -> Option<MemberId> {
        let until = Instant::now() + patience;
        let mut source = loss.source;
        let mut refused_since = None;
        {
            let mut state = self.shared.state();
            state.lost.insert(source);
            if loss.fault != Fault::Lost {
                state.refused.insert(source, loss.fault);
            }
        }
        loop {
            let asked = {
                let state = self.shared.state();
                let (cause, corrupt) = state.refused.get(&source).copied().unwrap_or(loss.fault).cause();
                Request::Lost {
                    member: state.said.member,
                    secret: state.said.secret,
                    source,
                    epoch: state.said.epoch,
                    cause,
                    corrupt,
                    holds: state.said.holds,
                }
            };
            let answer = timeout(IMPATIENT, self.shared.client.ask(&asked)).await;
            let wait = match answer {
                Ok(Ok(Answer::Registered { plan: Some(plan), .. })) => {
                    let next = plan.upstream;
                    self.shared.take(plan, true);
                    if !self.shared.state().refused.contains_key(&next) {
                        self.shared.state().lost.remove(&next);
                        return Some(next);
                    }
                    // A service that came back does not know what this one gave us.
                    source = next;
                    Duration::ZERO
                }
                Ok(Ok(Answer::Wait { retry_ms, refused, .. })) => {
                    refused_since = refused.then(|| refused_since.unwrap_or_else(Instant::now));
                    if refused_since.is_some_and(|since| since.elapsed() >= loss.fault.grace(patience)) {
                        return None;
                    }
                    Duration::from_millis(retry_ms.min(500))
                }
                Ok(Ok(Answer::Refused(refusal))) if refusal.reason == Reason::UnknownMember => {
                    self.shared.state().said.upstream = None;
                    match self.shared.register().await {
                        Ok(None) => match self.upstream() {
                            Some(next) if !self.shared.state().lost.contains(&next) => return Some(next),
                            Some(next) => {
                                source = next;
                                AGAIN
                            }
                            None => return None,
                        },
                        Ok(Some((wait, _))) => wait,
                        Err(_) => AGAIN,
                    }
                }
                Ok(Ok(_)) => return None,
                Ok(Err(_)) | Err(_) => match self.alone() {
                    Some(next) => return Some(next),
                    None => AGAIN,
                },
            };
            if Instant::now() >= until {
                return None;
            }
            sleep(wait).await;
        }
    }

    /// The next of the last plan that is not lost: one that holds everything, else the nearest above.
    fn alone(&self) -> Option<MemberId> {
        let mut state = self.shared.state();
        let there = |id: &&MemberId| !state.lost.contains(id) && state.known.contains_key(id);
        let complete = |id: &&MemberId| state.known.get(id).is_some_and(|h| h.complete);
        let next = state.order.iter().filter(there).find(complete).or_else(|| state.order.iter().find(there));
        let next = *next?;
        state.said.upstream = Some(next);
        state.said.epoch = state.said.epoch.saturating_add(1);
        Some(next)
    }
}
