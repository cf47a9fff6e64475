//! The source's side of a connection: who wants what, and looks at the words. Reads go to a thread of their own.

use crate::{
    arena::Served,
    endpoint::{Exporter, Place},
    error::frame_failed,
    registry::check_current,
    send,
    wire::{Attach, Attached, Lane, Look, MAX_FRAME, MAX_LOOKS, Refusal, Request, Seen},
};
use flashboot_channel::{Channel, Listener, frame};
use flashboot_core::{Error, Generation, Kind, Observed, Result, ShardId};
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, WriteHalf, split},
    task::JoinSet,
    time::{Instant, sleep},
};

/// How often words are looked at for readers that wait: the timer's own step.
const PACE: Duration = Duration::from_millis(1);
/// How long to rest when the listening socket fails.
const REST: Duration = Duration::from_secs(1);
/// The longest that a look may wait; readers ask again.
const LONGEST_LOOK: Duration = Duration::from_secs(60);

/// Takes readers until it is dropped, and drops with it those that are not on threads of their own.
pub(crate) async fn accept(mut listener: Listener, exporter: Arc<Exporter>) {
    let mut readers = JoinSet::new();
    loop {
        tokio::select! {
            taken = listener.accept() => match taken {
                // Who has proved itself, or need not, may still say nothing: those are counted too.
                Ok(channel) if readers.len() >= exporter.most_attending() => {
                    tracing::debug!(peer = channel.peer(), "no place for a reader");
                }
                Ok(channel) => drop(readers.spawn(attend(channel, Arc::clone(&exporter)))),
                Err(error) => {
                    tracing::error!(%error, "cannot take readers");
                    sleep(REST).await;
                }
            },
            Some(_) = readers.join_next() => {}
        }
    }
}

async fn attend(channel: Channel, exporter: Arc<Exporter>) {
    let peer = channel.peer().to_owned();
    match attended(channel, &exporter).await {
        Ok(()) => tracing::trace!(peer, "a reader left"),
        Err(error) => tracing::debug!(%error, "a reader was lost or refused"),
    }
}

async fn attended(mut channel: Channel, exporter: &Arc<Exporter>) -> Result<()> {
    let patience = exporter.handshake;
    let Some(frame) = channel.receive(MAX_FRAME, patience).await? else { return Ok(()) };
    let granted = match Attach::decode(&frame) {
        Ok(attach) => grant(attach, exporter).await.map(|granted| (attach.lane, granted)),
        Err(e) => Err((Refusal::Malformed, e.detail().to_owned())),
    };
    let (lane, Granted { served, generation, place }) = match granted {
        Ok(granted) => granted,
        Err((refusal, text)) => {
            let error = Error::new(Kind::Protocol, "attach", text.clone()).with_peer(channel.peer());
            channel.send(&Attached::refusal(refusal, text).encode(), MAX_FRAME, patience).await?;
            // Closed with bytes unread, a connection is reset, and the refusal may be lost with it: a watcher has asked already.
            let _ = channel.receive(MAX_FRAME, REST).await;
            return Err(error);
        }
    };
    let arena = served.arena();
    let attached = Attached {
        refused: None,
        memory: served.memory(),
        shards: arena.shards(),
        payload: arena.payload(),
        capacity: arena.capacity(),
        generation: generation.word(),
    };
    channel.send(&attached.encode(), MAX_FRAME, patience).await?;
    match lane {
        Lane::Watch => watch(channel, served, generation, place, patience).await,
        Lane::Read => send::start(channel.into_blocking()?, served, generation, place),
    }
}

struct Granted {
    served: Arc<Served>,
    generation: Generation,
    place: Place,
}

async fn grant(attach: Attach, exporter: &Arc<Exporter>) -> Result<Granted, (Refusal, String)> {
    let (served, generation) = exporter.registry.find(attach.generation)?;
    let looked = on_its_own(&served, move |served| check_current(served, generation)).await;
    looked.unwrap_or_else(|e| Err((Refusal::Failed, e.to_string())))?;
    let place = exporter.enter().ok_or_else(|| (Refusal::Full, "as many readers as may be".to_owned()))?;
    Ok(Granted { served, generation, place })
}

/// Looks at an arena: a GPU's on a thread that its driver may hold up.
async fn on_its_own<T: Send + 'static>(
    served: &Arc<Served>,
    look: impl FnOnce(&Served) -> T + Send + 'static,
) -> Result<T> {
    match &**served {
        Served::Host(_) => Ok(look(served)),
        Served::Gpu(_) => {
            let served = Arc::clone(served);
            let looked = tokio::task::spawn_blocking(move || look(&served)).await;
            looked.map_err(|e| Error::new(Kind::Cancelled, "observe", format!("the look ended: {e}")))
        }
    }
}

/// A look that has no answer yet.
struct Pending {
    look: Look,
    until: Instant,
}

async fn watch(
    channel: Channel,
    served: Arc<Served>,
    generation: Generation,
    place: Place,
    patience: Duration,
) -> Result<()> {
    // Held until the reader leaves.
    let _place = place;
    let peer = channel.peer().to_owned();
    let (from, mut to) = split(channel);
    let mut next = Box::pin(next_frame(from));
    let mut pending: Vec<Pending> = Vec::new();
    loop {
        tokio::select! {
            biased;
            (from, frame) = &mut next => {
                let Some(frame) = frame.map_err(|e| frame_failed("serve", e, &peer))? else { return Ok(()) };
                let look = match Request::decode(&frame) {
                    Ok(Request::Look(look)) if pending.len() < MAX_LOOKS => look,
                    Ok(_) => {
                        let detail = "a reader asks for what this connection is not for, or for too much at once";
                        return Err(Error::new(Kind::Protocol, "serve", detail).with_peer(peer));
                    }
                    Err(e) => return Err(e.with_peer(peer)),
                };
                let wait = Duration::from_millis(look.wait_ms.into()).min(LONGEST_LOOK);
                pending.push(Pending { look, until: Instant::now() + wait });
                next.set(next_frame(from));
            }
            () = sleep(PACE), if !pending.is_empty() => {}
        }
        answer(&mut pending, &mut to, &served, generation, patience).await.map_err(|e| e.with_peer(&peer))?;
    }
}

/// Owns what it reads from, so that a frame that is half read is kept over other events.
async fn next_frame<R: AsyncRead + Unpin>(mut from: R) -> (R, Result<Option<Vec<u8>>, frame::FrameError>) {
    let frame = frame::receive(&mut from, MAX_FRAME).await;
    (from, frame)
}

/// Answers every look that has an answer now.
async fn answer(
    pending: &mut Vec<Pending>,
    to: &mut WriteHalf<Channel>,
    served: &Arc<Served>,
    generation: Generation,
    patience: Duration,
) -> Result<()> {
    let now = Instant::now();
    let mut left = Vec::new();
    for waiting in pending.drain(..) {
        let look = waiting.look;
        let seen = on_its_own(served, move |served| served.arena().observe(ShardId(look.shard))).await?;
        let Observed { generation: found, progress } = seen;
        if progress < look.at_least && found == Some(generation) && now < waiting.until {
            left.push(waiting);
            continue;
        }
        let seen = Seen { id: look.id, generation: found.map_or(0, Generation::word), progress };
        let sent = tokio::time::timeout(patience, frame::send(to, &seen.encode(), MAX_FRAME)).await;
        match sent {
            Ok(sent) => sent.map_err(|e| frame_failed("serve", e, ""))?,
            Err(_) => {
                let detail = format!("a reader took no answer for {patience:?}");
                return Err(Error::new(Kind::Deadline, "serve", detail));
            }
        }
    }
    *pending = left;
    Ok(())
}
