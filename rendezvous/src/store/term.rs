//! For how long one service is the only one: a fence that falls by itself.
//!
//! Whoever holds the post renews it at the store. Between two renewals it counts on its own monotone clock, from before
//! the renewal was *sent* and a part less than the lease: so it stops before the store can give the post to
//! another, whatever the clocks of other machines say. A fence that fell never rises again.

use async_trait::async_trait;
use flashboot_core::{Error, Kind, Result};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, warn};

/// Renewals in a lease, when all goes well.
const RENEWALS: u32 = 4;
/// How long giving the post up may take.
const GIVE_UP: Duration = Duration::from_secs(1);

/// Whether one may still act as the only service. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Fence(Arc<Mutex<Option<Instant>>>);

impl Fence {
    /// Until `until`, unless it is moved.
    pub(crate) fn until(until: Instant) -> Self {
        Self(Arc::new(Mutex::new(Some(until))))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it stands at this moment. Once it has not, it never does again.
    pub fn stands(&self) -> bool {
        let mut until = self.lock();
        if until.is_some_and(|until| until <= Instant::now()) {
            *until = None;
        }
        until.is_some()
    }

    /// How long it stands if nobody moves it.
    pub fn left(&self) -> Duration {
        let until = *self.lock();
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    fn extend(&self, later: Instant) {
        if self.stands() {
            let mut until = self.lock();
            *until = until.map(|until| until.max(later));
        }
    }

    fn fall(&self) {
        *self.lock() = None;
    }
}

/// What of a lease the holder itself counts on.
fn counted(lease: Duration) -> Duration {
    lease - lease / 8
}

/// The post as the store has it.
#[async_trait]
pub(crate) trait Hold: Send {
    /// Renews it; `false` when it is another's, or nobody's.
    async fn renew(&mut self) -> Result<bool>;
    /// Gives it up, so that the next need not wait.
    async fn give_up(&mut self);
}

/// A post that is held. Dropping it lets the fence fall and gives nothing up: as if the process had died.
#[derive(Debug)]
pub struct Term {
    fence: Fence,
    over: oneshot::Receiver<Error>,
    resign: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Term {
    /// Holds what was asked for at `asked` with a lease of `lease`. `store` is its name, for errors.
    pub(crate) fn begin(hold: Box<dyn Hold>, store: String, lease: Duration, asked: Instant) -> Self {
        let fence = Fence::until(asked + counted(lease));
        let (tell, over) = oneshot::channel();
        let (resign, resigned) = oneshot::channel();
        let task = tokio::spawn(keep(hold, store, lease, fence.clone(), tell, resigned));
        Self { fence, over, resign: Some(resign), task }
    }

    /// What the service looks at before it answers anything.
    pub fn fence(&self) -> Fence {
        self.fence.clone()
    }

    /// Returns once it is over, and why.
    pub async fn over(&mut self) -> Error {
        let ended = (&mut self.over).await;
        ended.unwrap_or_else(|_| Error::new(Kind::Cancelled, "rendezvous", "the post was given up"))
    }

    /// Gives it up: the fence falls first.
    pub async fn resign(mut self) {
        self.fence.fall();
        drop(self.resign.take());
        // Best effort: whoever does not hear of it waits a lease.
        let _ = timeout(GIVE_UP * 2, &mut self.task).await;
    }
}

impl Drop for Term {
    fn drop(&mut self) {
        self.fence.fall();
        self.task.abort();
    }
}

async fn keep(
    mut hold: Box<dyn Hold>,
    store: String,
    lease: Duration,
    fence: Fence,
    tell: oneshot::Sender<Error>,
    resigned: oneshot::Receiver<()>,
) {
    let every = lease / RENEWALS;
    tokio::pin!(resigned);
    let error = loop {
        // The last bit of a lease is waited out exactly.
        let pause = every.min(fence.left());
        tokio::select! {
            _ = &mut resigned => {
                let _ = timeout(GIVE_UP, hold.give_up()).await;
                return;
            }
            () = sleep(pause) => {}
        }
        if !fence.stands() {
            let detail = format!("the store has renewed nothing for {:?}", counted(lease));
            break Error::new(Kind::Deadline, "rendezvous", detail);
        }
        let sent = Instant::now();
        match timeout(every.min(fence.left()), hold.renew()).await {
            Ok(Ok(true)) => fence.extend(sent + counted(lease)),
            Ok(Ok(false)) => {
                break Error::new(Kind::Cancelled, "rendezvous", "another has the post, or nobody");
            }
            Ok(Err(error)) => {
                debug!(%error, store, "the post is not renewed yet");
                sleep((every / 4).min(fence.left())).await;
            }
            Err(_) => debug!(store, "the store does not answer"),
        }
    };
    fence.fall();
    warn!(%error, store, "this service is not the only one any more, and stops");
    // What is still held there is in the next one's way.
    let _ = timeout(GIVE_UP, hold.give_up()).await;
    let _ = tell.send(error.with_peer(store));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    const LEASE: Duration = Duration::from_millis(400);

    /// Renews so often, and then does as it is told.
    #[derive(Debug)]
    struct Post(u32, fn() -> Result<bool>, Arc<AtomicU32>);

    #[async_trait]
    impl Hold for Post {
        async fn renew(&mut self) -> Result<bool> {
            match self.0.checked_sub(1) {
                Some(left) => {
                    self.0 = left;
                    Ok(true)
                }
                None => (self.1)(),
            }
        }

        async fn give_up(&mut self) {
            self.2.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lost() -> Result<bool> {
        Err(Error::new(Kind::SourceLost, "etcd", "gone"))
    }

    fn term(renewals: u32, then: fn() -> Result<bool>) -> (Term, Arc<AtomicU32>) {
        let given = Arc::new(AtomicU32::new(0));
        let post = Post(renewals, then, Arc::clone(&given));
        (Term::begin(Box::new(post), "s".into(), LEASE, Instant::now()), given)
    }

    #[tokio::test(start_paused = true)]
    async fn a_post_that_nobody_renews_is_over_before_its_lease_is() {
        let began = Instant::now();
        let (mut term, given) = term(0, lost);
        let fence = term.fence();
        assert!(fence.stands() && fence.left() < LEASE, "the store's own count began later, and runs longer");
        assert_eq!(term.over().await.kind(), Kind::Deadline);
        assert!(!fence.stands());
        assert!(began.elapsed() >= LEASE * 3 / 4, "a store may be away for most of a lease");
        assert_eq!(given.load(Ordering::Relaxed), 1, "what is still held there is given up");
    }

    #[tokio::test(start_paused = true)]
    async fn a_post_is_kept_by_renewals_and_over_at_once_when_another_has_it() {
        let began = Instant::now();
        let (mut term, _) = term(6, || Ok(false));
        assert_eq!(term.over().await.kind(), Kind::Cancelled);
        assert!(began.elapsed() > LEASE, "six renewals of a quarter each");
        assert!(!term.fence().stands());
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_resigns_gives_the_post_up_and_whoever_dies_does_not() {
        let (one, given) = term(9, lost);
        let fence = one.fence();
        one.resign().await;
        assert!(!fence.stands());
        assert_eq!(given.load(Ordering::Relaxed), 1);
        let (two, given) = term(9, lost);
        let fence = two.fence();
        drop(two);
        assert!(!fence.stands());
        assert_eq!(given.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fence_that_fell_never_rises_again() {
        let fence = Fence::until(Instant::now() + Duration::from_millis(5));
        sleep(Duration::from_millis(10)).await;
        fence.extend(Instant::now() + Duration::from_secs(60));
        assert!(!fence.stands(), "the one who slept through its lease may not go on");
    }
}
