//! The reader's view of the source's words, over a connection of its own.

use crate::{
    error::{closed, frame_failed},
    runtime::{Ended, handle},
    wire::{Look, MAX_FRAME, Request, Seen},
};
use flashboot_channel::{Channel, frame};
use flashboot_core::{Error, Generation, Kind, Observed, Result, ShardId};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};
use tokio::{
    io::{ReadHalf, WriteHalf, split},
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

/// How long one question waits at the source; a longer look asks again, which also shows that the source answers.
const ONE_LOOK: Duration = Duration::from_secs(2);
/// How long the answer may be under way beyond that: a few retransmissions on a bad link.
const UNDER_WAY: Duration = Duration::from_secs(5);
/// The look that is asked for while attaching.
pub(crate) const FIRST: Look = Look { id: 0, shard: 0, at_least: 0, wait_ms: 0 };
/// For how long after attaching its answer tells how the source is.
const FRESH: Duration = Duration::from_secs(1);
/// The most questions that may wait to be sent.
const QUEUE: usize = 32;

/// A question and where its answer goes.
#[derive(Debug)]
struct Question {
    shard: ShardId,
    at_least: u64,
    wait_ms: u32,
    answer: oneshot::Sender<Seen>,
}

/// One hop's watch. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Watch {
    questions: mpsc::Sender<Question>,
    /// Why there are no answers any more.
    lost: Arc<OnceLock<Error>>,
    peer: String,
    /// The answer to the first look, and when that was asked for at the earliest.
    first: Mutex<Option<(oneshot::Receiver<Seen>, Instant)>>,
    _task: Ended<()>,
}

impl Watch {
    /// Over a connection on which [`FIRST`] was asked, not before `asked_at`.
    pub(crate) fn new(channel: Channel, asked_at: Instant) -> Result<Self> {
        let peer = channel.peer().to_owned();
        let (questions, asked) = mpsc::channel(QUEUE);
        let lost = Arc::new(OnceLock::new());
        let (tell, first) = oneshot::channel();
        let waiting = Waiting::new(HashMap::from([(FIRST.id, tell)]));
        let run = run(channel, asked, waiting, Arc::clone(&lost));
        let first = Mutex::new(Some((first, asked_at)));
        Ok(Self { questions, lost, peer, first, _task: Ended(handle()?.spawn(run)) })
    }

    /// As [`flashboot_core::Mover::observe`]. Needs a tokio runtime with time.
    pub(crate) async fn look(
        &self,
        shard: ShardId,
        at_least: u64,
        wait: Duration,
        ours: Generation,
    ) -> Result<Observed> {
        let began = Instant::now();
        let far_enough = |seen: &Observed| seen.progress >= at_least || seen.generation != Some(ours);
        if let Some(seen) = self.first(shard).await?.filter(far_enough) {
            return Ok(seen);
        }
        loop {
            let left = wait.saturating_sub(began.elapsed());
            let seen = observed(self.ask(shard, at_least, left.min(ONE_LOOK)).await?);
            if far_enough(&seen) || began.elapsed() >= wait {
                return Ok(seen);
            }
        }
    }

    /// From now on every look is asked for anew.
    pub(crate) fn forget_first(&self) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// What the look showed that was asked for while attaching: once, and while that is not long ago.
    async fn first(&self, shard: ShardId) -> Result<Option<Observed>> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        match first {
            Some((answer, attached)) if shard.0 == FIRST.shard && attached.elapsed() <= FRESH => {
                match timeout(UNDER_WAY, answer).await {
                    // A connection that has ended says so to the next question.
                    Ok(seen) => Ok(seen.ok().map(observed)),
                    Err(_) => Err(self.silent()),
                }
            }
            _ => Ok(None),
        }
    }

    fn silent(&self) -> Error {
        let detail = format!("the source does not answer a look, {UNDER_WAY:?} after it should have");
        Error::new(Kind::Stalled, "observe", detail).with_peer(&self.peer)
    }

    async fn ask(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Seen> {
        let (answer, answered) = oneshot::channel();
        // Rounded up, so that the last one does not become a storm of short ones.
        let wait_ms = u32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
        let question = Question { shard, at_least, wait_ms, answer };
        let ask = async {
            self.questions.send(question).await.ok()?;
            answered.await.ok()
        };
        match timeout(wait.saturating_add(UNDER_WAY), ask).await {
            Ok(Some(seen)) => Ok(seen),
            Ok(None) => Err(self.lost()),
            Err(_) => Err(self.silent()),
        }
    }

    fn lost(&self) -> Error {
        let gone = || closed("observe", "watching the source's words", &self.peer);
        self.lost.get().cloned().unwrap_or_else(gone)
    }
}

type Waiting = Mutex<HashMap<u32, oneshot::Sender<Seen>>>;

fn observed(seen: Seen) -> Observed {
    Observed { generation: Generation::from_word(seen.generation), progress: seen.progress }
}

async fn run(
    channel: Channel,
    mut asked: mpsc::Receiver<Question>,
    waiting: Waiting,
    lost: Arc<OnceLock<Error>>,
) {
    let peer = channel.peer().to_owned();
    let (from, to) = split(channel);
    let error = carried(from, to, &mut asked, &waiting, &peer).await;
    tracing::debug!(%error, "the watch on a source ended");
    // Before the questions are dropped, by which whoever waits learns it. Nobody else sets it.
    let _ = lost.set(error);
}

/// Carries questions and answers until the connection ends, and says why it did.
async fn carried(
    mut from: ReadHalf<Channel>,
    mut to: WriteHalf<Channel>,
    asked: &mut mpsc::Receiver<Question>,
    waiting: &Waiting,
    peer: &str,
) -> Error {
    let locked = || waiting.lock().unwrap_or_else(PoisonError::into_inner);
    let sending = async {
        let mut id: u32 = 0;
        while let Some(Question { shard, at_least, wait_ms, answer }) = asked.recv().await {
            id = id.wrapping_add(1);
            // Who has stopped waiting needs no place.
            locked().retain(|_, answer| !answer.is_closed());
            locked().insert(id, answer);
            let look = Request::Look(Look { id, shard: shard.0, at_least, wait_ms });
            if let Err(e) = frame::send(&mut to, &look.encode(), MAX_FRAME).await {
                return frame_failed("observe", e, peer);
            }
        }
        // Nobody can ask any more; the task is about to be ended.
        std::future::pending().await
    };
    let receiving = async {
        loop {
            let seen = match frame::receive(&mut from, MAX_FRAME).await {
                Ok(Some(frame)) => Seen::decode(&frame),
                Ok(None) => return closed("observe", "watching the source's words", peer),
                Err(e) => return frame_failed("observe", e, peer),
            };
            let seen = match seen {
                Ok(seen) => seen,
                Err(e) => return e.with_peer(peer),
            };
            if let Some(answer) = locked().remove(&seen.id) {
                // It may have stopped waiting.
                let _ = answer.send(seen);
            }
        }
    };
    tokio::select! {
        error = sending => error,
        error = receiving => error,
    }
}
