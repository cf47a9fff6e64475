//! One node's side of an all-gather's ring: in it until it is dropped, whether the service is there or not.

use crate::{
    client::{AGAIN, Client, passing},
    ends::Ends,
    membership::{Beat, Beats, Pulse, explained},
    protocol::{Answer, Blame, MemberId, Request, Ring, RingMember, RingNode},
};
use flashboot_core::{Error, Kind, Result};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, info, warn};

/// The longest time between two questions.
const SLOWEST: Duration = Duration::from_secs(5);

/// A node of a ring that has begun. Dropping it stops its questions; the others hear that it is gone a lease later.
#[derive(Debug)]
pub struct RingSeat {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    client: Arc<Client>,
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug)]
struct State {
    said: RingNode,
    ring: Ring,
    ends: Ends,
    /// Whom it reads from.
    upstream: Option<MemberId>,
    /// Why the service did not answer last time, if it did not.
    trouble: Option<Error>,
    /// Why it will not have this node any more.
    evicted: Option<Error>,
    /// When it last had it.
    answered: Instant,
}

impl Beats for Shared {
    fn beat(&self) -> Beat {
        let state = self.state();
        Beat {
            silence: state.answered.elapsed(),
            lease: Duration::from_millis(state.ring.lease_ms),
            trouble: state.trouble.clone(),
            evicted: state.evicted.clone(),
            blame: Blame::default(),
            upstream: state.upstream,
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a service that came back does not know yet stays known.
    fn take(&self, ring: Ring) {
        let mut state = self.state();
        state.answered = Instant::now();
        (state.evicted, state.ring.lease_ms) = (None, ring.lease_ms);
        if state.trouble.take().is_some() {
            info!(peer = self.client.peer(), "the service is back");
        }
        if !ring.nodes.iter().map(|n| n.member).eq(state.ring.nodes.iter().map(|n| n.member)) {
            debug!("the service tells of another ring");
            return;
        }
        let state = &mut *state;
        for (kept, new) in state.ring.nodes.iter_mut().zip(ring.nodes) {
            // One that was done keeps its memory until it is drained, whatever a service that came back knows of it.
            state.ends.tell(new.member, new.gone && !(kept.done || new.done));
            let locators =
                if new.locators.is_empty() { std::mem::take(&mut kept.locators) } else { new.locators };
            *kept = RingMember { locators, done: kept.done || new.done, ..new };
        }
    }

    async fn ask_on(&self) {
        let mut every = AGAIN;
        loop {
            let _ = timeout(every, self.news.notified()).await;
            let said = self.state().said.clone();
            every = match self.client.ask(&Request::Ring(said)).await {
                Ok(Answer::Ring(ring)) => {
                    let lease = Duration::from_millis(ring.lease_ms);
                    self.take(ring);
                    // The end of the others is waited for.
                    if self.state().said.done { AGAIN } else { (lease / 3).min(SLOWEST) }
                }
                other => {
                    self.troubled(other);
                    AGAIN * 5
                }
            };
        }
    }

    /// Notes why the service tells nothing of the ring; said when it begins.
    fn troubled(&self, answer: Result<Answer>) {
        let mut state = self.state();
        match answer {
            Err(error) => {
                let error = explained(error);
                if state.trouble.replace(error.clone()).is_none() {
                    warn!(%error, "the service does not answer; going on without it");
                }
            }
            Ok(answer) => {
                let error = self.client.odd("ring", answer);
                if state.evicted.replace(error.clone()).is_none() {
                    warn!(%error, "the service refuses this node; going on without it");
                }
            }
        }
    }
}

impl RingSeat {
    /// Comes in, and waits until all nodes have. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// The service's refusal; [`Kind::Deadline`] after `patience`.
    pub async fn join(client: Arc<Client>, node: RingNode, patience: Duration) -> Result<Self> {
        let until = Instant::now() + patience;
        let ring = loop {
            let (wait, error) = match client.ask(&Request::Ring(node.clone())).await {
                Ok(Answer::Ring(ring)) => break ring,
                Ok(Answer::Wait { retry_ms, why, .. }) => {
                    let detail = format!("no ring within {patience:?}: {why}");
                    let error = Error::new(Kind::Deadline, "ring", detail).with_peer(client.peer());
                    (Duration::from_millis(retry_ms), error)
                }
                Ok(other) => return Err(client.odd("ring", other)),
                Err(error) if passing(&error) => (AGAIN, error),
                Err(error) => return Err(error),
            };
            if Instant::now() >= until {
                return Err(error);
            }
            sleep(wait).await;
        };
        let here = ring.nodes.iter().any(|n| n.member == node.member);
        if !here || u32::try_from(ring.nodes.len()) != Ok(node.nodes) {
            let detail = format!("a ring of {} nodes that is not this one", ring.nodes.len());
            return Err(Error::new(Kind::Protocol, "ring", detail).with_peer(client.peer()));
        }
        let order = ring.nodes.iter().map(|n| n.member).collect();
        let said = RingNode { order, ..node };
        let state = State {
            said,
            ring,
            ends: Ends::default(),
            upstream: None,
            trouble: None,
            evicted: None,
            answered: Instant::now(),
        };
        let shared = Arc::new(Shared { client, state: Mutex::new(state), news: Notify::new() });
        let task = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.ask_on().await }
        });
        Ok(Self { shared, task })
    }

    /// The nodes in their order, as last heard.
    pub fn nodes(&self) -> Vec<RingMember> {
        self.shared.state().ring.nodes.clone()
    }

    /// How `member` can be read.
    pub fn locators(&self, member: MemberId) -> Vec<String> {
        let state = self.shared.state();
        let found = state.ring.nodes.iter().find(|n| n.member == member);
        found.map(|n| n.locators.clone()).unwrap_or_default()
    }

    /// A look at it that keeps nothing alive.
    pub fn pulse(&self) -> Pulse {
        let shared: Arc<dyn Beats> = Arc::<Shared>::clone(&self.shared);
        Pulse(Arc::downgrade(&shared))
    }

    /// News of `member`: true once the service says that it is gone before it was done.
    pub fn ended(&self, member: MemberId) -> watch::Receiver<bool> {
        self.shared.state().ends.news(member)
    }

    /// It reads from `upstream` now; for who watches.
    pub fn reads(&self, upstream: Option<MemberId>) {
        self.shared.state().upstream = upstream;
    }

    /// It has every shard: the others are told at once.
    pub fn done(&self) {
        self.shared.state().said.done = true;
        self.shared.news.notify_one();
    }

    /// Whether no other node reads any more, as far as the service says.
    pub fn is_over(&self) -> bool {
        let state = self.shared.state();
        let me = state.said.member;
        state.ring.nodes.iter().all(|n| n.member == me || n.done || n.gone)
    }
}

impl Drop for RingSeat {
    fn drop(&mut self) {
        self.task.abort();
    }
}
