//! Losing a source: what the service says, and what the last plan says while nobody answers.

use super::Membership;
use crate::{
    client::AGAIN,
    protocol::{Answer, Cause, MemberId, Reason, Request},
};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How long a question waits for the service when there are others to turn to.
const IMPATIENT: Duration = Duration::from_millis(500);

/// What a lost source leaves to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Who was lost.
    pub source: MemberId,
    /// Why.
    pub cause: Cause,
}

impl Membership {
    /// Another source, within `patience`: what the service says; while it does not answer, one that the last plan named,
    /// first of all one that holds everything.
    pub async fn lost(&self, loss: Loss, patience: Duration) -> Option<MemberId> {
        let until = Instant::now() + patience;
        let mut source = loss.source;
        {
            let mut state = self.shared.state();
            state.lost.insert(source);
            if loss.cause == Cause::Refused {
                state.refused.insert(source);
            }
        }
        loop {
            let asked = {
                let state = self.shared.state();
                let refused = state.refused.contains(&source);
                Request::Lost {
                    member: state.said.member,
                    secret: state.said.secret,
                    source,
                    epoch: state.said.epoch,
                    cause: if refused { Cause::Refused } else { loss.cause },
                    holds: state.said.holds,
                }
            };
            let answer = timeout(IMPATIENT, self.shared.client.ask(&asked)).await;
            let wait = match answer {
                Ok(Ok(Answer::Registered { plan: Some(plan), .. })) => {
                    let next = plan.upstream;
                    self.shared.take(plan, true);
                    if !self.shared.state().refused.contains(&next) {
                        self.shared.state().lost.remove(&next);
                        return Some(next);
                    }
                    // A service that came back does not know what this one gave us.
                    source = next;
                    Duration::ZERO
                }
                Ok(Ok(Answer::Wait { retry_ms, .. })) => Duration::from_millis(retry_ms.min(500)),
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
                        Ok(Some(wait)) => wait,
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
