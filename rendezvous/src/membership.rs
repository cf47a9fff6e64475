//! One member's side: registered, renewed, registered again when the service has forgotten it, and on its own while
//! the service is away.
//!
//! A task of its own renews. Losing a source asks the service first; where nobody answers, the last plan names others.

mod footing;
mod loss;
mod pulse;

pub use footing::Footing;
pub(crate) use footing::explained;
pub use loss::{Fault, Loss};
pub use pulse::Pulse;
pub(crate) use pulse::{Beat, Beats};

use crate::{
    client::{AGAIN, Client, passing},
    ends::Ends,
    protocol::{Answer, Blame, Holder, MemberId, PART, Plan, Reason, Registration, Request},
    readers::Readers,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use flashboot_core::{Error, Kind, Result};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{Instrument as _, debug, info, warn};

/// The longest time between two renewals, and how soon the service is tried again at most.
const SLOWEST: Duration = Duration::from_secs(5);
/// How long another holder is waited for while all that there are gave wrong bytes.
const GRACE: Duration = Duration::from_secs(3);

/// A registered member. Dropping it stops the renewals; the service forgets it a lease later, or at once after
/// [`leave`](Self::leave).
#[derive(Debug)]
pub struct Membership {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    client: Arc<Client>,
    state: Mutex<State>,
    manifest: Arc<Vec<u8>>,
    /// Renew now.
    news: Notify,
}

#[derive(Debug)]
struct State {
    said: Registration,
    lease: Duration,
    membership: u64,
    /// Everybody that a plan has named, by who: where to read them.
    known: BTreeMap<MemberId, Holder>,
    /// As the last plan has them.
    order: Vec<MemberId>,
    lost: BTreeSet<MemberId>,
    /// Why those were refused that were.
    refused: BTreeMap<MemberId, Fault>,
    /// The service will not have us any more.
    evicted: Option<Error>,
    readers: Readers,
    ends: Ends,
    /// What readers say of this member's bytes.
    blame: Blame,
    /// Why the service did not answer last time, if it did not.
    trouble: Option<Error>,
    /// When it last had this member.
    answered: Instant,
}

/// Why a question got no answer of use.
#[derive(Debug)]
enum Trouble {
    /// The service was not reached, or did not answer: it may be back in a moment, or another in its place.
    Unreached(Error),
    /// It said no.
    Refused(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Unreached(error)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, plan: Plan, assigned: bool) {
        let mut state = self.state();
        if plan.epoch < state.said.epoch {
            return;
        }
        state.membership = plan.membership;
        state.order = plan.holders.iter().map(|holder| holder.member).collect();
        if assigned {
            state.ends.tell(plan.upstream, false);
            (state.said.upstream, state.said.epoch) = (Some(plan.upstream), plan.epoch);
        }
        // Who is read from stays known, whatever the plan says of others.
        let keep = state.said.upstream;
        state.known.retain(|member, _| Some(*member) == keep);
        state.known.extend(plan.holders.into_iter().map(|holder| (holder.member, holder)));
    }

    fn answered(&self, lease_ms: u64) {
        let mut state = self.state();
        state.lease = Duration::from_millis(lease_ms);
        state.answered = Instant::now();
    }

    /// The question, and whose end its answer may tell of.
    fn request(&self) -> (Request, Option<MemberId>) {
        let state = self.state();
        let said = &state.said;
        let request = Request::Renew {
            member: said.member,
            secret: said.secret,
            holds: said.holds,
            upstream: said.upstream,
            epoch: said.epoch,
            membership: state.membership,
        };
        (request, said.upstream)
    }

    /// Registers once; `Ok(Some(_))` when it has to be tried again after the time given, and whether whoever holds everything
    /// gave wrong bytes.
    async fn register(&self) -> Result<Option<(Duration, bool)>, Trouble> {
        let said = self.state().said.clone();
        match self.client.ask(&Request::Register(said)).await? {
            Answer::Registered { lease_ms, manifest_has, plan } => {
                self.answered(lease_ms);
                if let Some(plan) = plan {
                    self.take(plan, true);
                }
                self.upload(manifest_has).await?;
                Ok(None)
            }
            Answer::Wait { retry_ms, why, refused } => {
                debug!(why, "the service lets us wait");
                Ok(Some((Duration::from_millis(retry_ms), refused)))
            }
            other => Err(Trouble::Refused(self.client.odd("register", other))),
        }
    }

    async fn upload(&self, has: u64) -> Result<(), Trouble> {
        let hash = self.state().said.content.manifest.clone();
        let mut at = usize::try_from(has).unwrap_or(usize::MAX);
        while let Some(rest) = self.manifest.get(at..).filter(|rest| !rest.is_empty()) {
            let part = rest.get(..PART).unwrap_or(rest);
            let upload =
                Request::Upload { manifest: hash.clone(), offset: at as u64, part: STANDARD.encode(part) };
            match self.client.ask(&upload).await? {
                Answer::Done => at += part.len(),
                // Another seed brings it at the same time: look how far it is.
                Answer::Refused(refusal) if refusal.reason == Reason::Malformed => {
                    debug!(%refusal, "the manifest comes from another");
                    return Ok(());
                }
                other => return Err(Trouble::Refused(self.client.odd("upload", other))),
            }
        }
        Ok(())
    }

    /// Renews until the member is dropped.
    async fn renew(&self) {
        let mut soon = false;
        let mut pause = AGAIN;
        // Said once for each kind of trouble, until the service is back.
        let mut said = Vec::new();
        loop {
            let every = if soon { pause } else { (self.state().lease / 3).min(SLOWEST) };
            let _ = timeout(every, self.news.notified()).await;
            match self.renewed().await {
                Ok(()) => {
                    if soon {
                        info!(peer = self.client.peer(), "the service is back");
                    }
                    (soon, pause) = (false, AGAIN);
                    said.clear();
                    self.state().trouble = None;
                }
                Err(Trouble::Unreached(error)) => {
                    let error = explained(error);
                    if !said.contains(&footing::is_other(&error)) {
                        said.push(footing::is_other(&error));
                        warn!(%error, "the service does not answer; going on without it");
                    }
                    self.state().trouble = Some(error);
                    pause = if soon { (pause * 2).min(SLOWEST / 2) } else { AGAIN };
                    soon = true;
                }
                Err(Trouble::Refused(error)) => {
                    let mut state = self.state();
                    if state.evicted.is_none() {
                        warn!(%error, "the service refuses this member");
                    }
                    state.evicted = Some(error);
                    state.trouble = None;
                    soon = false;
                }
            }
        }
    }

    async fn renewed(&self) -> Result<(), Trouble> {
        let (request, source) = self.request();
        match self.client.ask(&request).await? {
            Answer::Renewed { lease_ms, plan, readers, blame, source_ended } => {
                self.answered(lease_ms);
                {
                    let mut state = self.state();
                    state.blame = blame;
                    if let Some(source) = source {
                        state.ends.tell(source, source_ended);
                    }
                    // Whoever reads is told of its own readers only where something has changed.
                    if plan.is_some() || !readers.is_empty() || state.said.upstream.is_none() {
                        state.readers.take(&readers);
                    }
                }
                if let Some(plan) = plan {
                    self.take(plan, false);
                }
                Ok(())
            }
            Answer::Refused(refusal) if refusal.reason == Reason::UnknownMember => {
                info!(peer = self.client.peer(), "the service has forgotten us; registering again");
                self.register().await.map(drop)
            }
            other => Err(Trouble::Refused(self.client.odd("renew", other))),
        }
    }
}

impl Beats for Shared {
    fn beat(&self) -> Beat {
        let state = self.state();
        Beat {
            silence: state.answered.elapsed(),
            lease: state.lease,
            trouble: state.trouble.clone(),
            evicted: state.evicted.clone(),
            blame: state.blame,
            upstream: state.said.upstream,
        }
    }
}

impl Membership {
    /// Registers, and waits until the service has a place: for a clone until it has a source. `manifest` is what
    /// proves the content, for the service to hand on. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// The service's refusal; [`Kind::Deadline`] after `patience`.
    pub async fn join(
        client: Arc<Client>,
        said: Registration,
        manifest: Arc<Vec<u8>>,
        patience: Duration,
    ) -> Result<Self> {
        let state = State {
            said,
            lease: SLOWEST,
            membership: 0,
            known: BTreeMap::new(),
            order: Vec::new(),
            lost: BTreeSet::new(),
            refused: BTreeMap::new(),
            evicted: None,
            readers: Readers::default(),
            ends: Ends::default(),
            blame: Blame::default(),
            trouble: None,
            answered: Instant::now(),
        };
        let shared = Shared { client, state: Mutex::new(state), manifest, news: Notify::new() };
        let shared = Arc::new(shared);
        let until = Instant::now() + patience;
        let mut refused_since = None;
        loop {
            let wait = match shared.register().await {
                Ok(None) => break,
                Ok(Some((wait, refused))) => {
                    let since = refused.then(|| refused_since.unwrap_or_else(Instant::now));
                    refused_since = since;
                    if since.is_some_and(|since| since.elapsed() >= GRACE) {
                        let detail =
                            "whoever holds all of it gave wrong bytes to others, and is given to nobody";
                        return Err(Error::new(Kind::Corrupt, "register", detail)
                            .with_peer(shared.client.peer())
                            .with_remedy(
                                "start a seed of a sound image; `flashboot status` says who gave them",
                            ));
                    }
                    wait
                }
                Err(Trouble::Unreached(error) | Trouble::Refused(error)) => {
                    if !passing(&error) || Instant::now() >= until {
                        return Err(error);
                    }
                    AGAIN
                }
            };
            if Instant::now() >= until {
                let detail = format!("the service had no place for this member within {patience:?}");
                return Err(Error::new(Kind::Deadline, "register", detail).with_peer(shared.client.peer()));
            }
            sleep(wait.min(until.saturating_duration_since(Instant::now()).max(AGAIN))).await;
        }
        let task = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.renew().await }.in_current_span()
        });
        Ok(Self { shared, task })
    }

    /// A look at it that keeps nothing alive.
    pub fn pulse(&self) -> Pulse {
        let shared: Arc<dyn Beats> = Arc::<Shared>::clone(&self.shared);
        Pulse(Arc::downgrade(&shared))
    }

    /// News of a member that this one reads from: true once the service says that it has ended, without having left.
    pub fn ended(&self, member: MemberId) -> watch::Receiver<bool> {
        self.shared.state().ends.news(member)
    }

    /// Whom to read from.
    pub fn upstream(&self) -> Option<MemberId> {
        self.shared.state().said.upstream
    }

    /// How `member` can be read, if a plan has named it.
    pub fn holder(&self, member: MemberId) -> Option<Holder> {
        self.shared.state().known.get(&member).cloned()
    }

    /// How many members there are between this one and one that holds all, as far as is known.
    pub fn depth(&self) -> u32 {
        let state = self.shared.state();
        let above =
            state.order.iter().filter_map(|id| state.known.get(id)).take_while(|h| !h.complete).count();
        u32::try_from(above).unwrap_or(u32::MAX)
    }

    /// Why the service will not have this member any more, if so.
    pub fn evicted(&self) -> Option<Error> {
        self.shared.state().evicted.clone()
    }

    /// What its readers say of its bytes, as far as the service told.
    pub fn blame(&self) -> Blame {
        self.shared.state().blame
    }

    /// How long ago the service had it.
    pub fn silence(&self) -> Duration {
        self.shared.state().answered.elapsed()
    }

    /// How many read from it when the service answered last.
    pub fn readers(&self) -> usize {
        self.shared.state().readers.reading()
    }

    /// Says how much is verified; it is sent with the next renewal.
    pub fn progress(&self, holds: u64) {
        let mut state = self.shared.state();
        state.said.holds = state.said.holds.max(holds);
    }

    /// Everything is verified: says so at once, and reads from nobody.
    pub fn complete(&self) {
        {
            let mut state = self.shared.state();
            state.said.holds = state.said.content.bytes;
            state.said.upstream = None;
            state.said.epoch = state.said.epoch.saturating_add(1);
        }
        self.shared.news.notify_one();
    }

    /// Says goodbye; nobody is sent here any more. Best effort, within `patience`.
    pub async fn leave(self, patience: Duration) {
        self.task.abort();
        let leave = {
            let state = self.shared.state();
            Request::Leave { member: state.said.member, secret: state.said.secret }
        };
        if !matches!(timeout(patience, self.shared.client.ask(&leave)).await, Ok(Ok(_))) {
            debug!("the service was not told that we go; it forgets us a lease later");
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.task.abort();
    }
}
