//! The source's side of the one round trip, and the connections that stay afterwards.
//!
//! A reader that is attached keeps its queue pairs for as long as its connection, and the arena, last. The connection says
//! nothing more: its end tells each side that the other is gone.

use crate::{
    arena::Seen,
    endpoint::Parts,
    held::Held,
    registry::Offer,
    wire::{Attached, Lane, MAX_FRAME, PROTOCOL_VERSION, Refusal, Reply, Request},
};
use flashboot_channel::{Channel, Listener};
use flashboot_core::{Error, Kind};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{io::AsyncReadExt as _, task::spawn_blocking};

/// How often it is looked whether the arenas of attached readers, and those registered, are still there, and whether queue
/// pairs are to be replaced.
const TICK: Duration = Duration::from_millis(250);
/// Between two attempts at a listening socket that is broken.
const REST: Duration = Duration::from_millis(100);

/// Answers readers until it is dropped; without a listener only lets go of what is gone.
pub(crate) async fn run(parts: &Arc<Parts>, listener: Option<Listener>) {
    let readers = Arc::new(AtomicUsize::new(0));
    let sweep = async {
        loop {
            tokio::time::sleep(TICK).await;
            let parts = Arc::clone(parts);
            let _ = spawn_blocking(move || {
                parts.regions.sweep();
                for rail in &parts.rails {
                    if let Err(error) = rail.replenish() {
                        // A connection that needs one tries for itself, and is told.
                        tracing::debug!(%error, "no spare queue pair");
                    }
                }
            })
            .await;
        }
    };
    let accept = async {
        let Some(mut listener) = listener else { return std::future::pending().await };
        loop {
            match listener.accept().await {
                Ok(channel) => {
                    let (parts, readers) = (Arc::clone(parts), Arc::clone(&readers));
                    tokio::spawn(async move { serve(parts, channel, readers).await });
                }
                Err(error) => {
                    tracing::error!(%error, "the responder's socket");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    };
    tokio::select! {
        () = sweep => {}
        () = accept => {}
    }
}

/// One more reader while it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn serve(parts: Arc<Parts>, mut channel: Channel, readers: Arc<AtomicUsize>) {
    let before = readers.fetch_add(1, Ordering::AcqRel);
    let _counted = Counted(readers);
    // Who says nothing is told nothing: no more of them than may be in their handshake.
    if before >= parts.config.max_readers.saturating_add(parts.config.max_pending) {
        return;
    }
    let patience = parts.config.handshake;
    let frame = match channel.receive(MAX_FRAME, patience).await {
        Ok(Some(frame)) => frame,
        Ok(None) => return,
        Err(error) => return tracing::debug!(%error, "a reader that asked nothing"),
    };
    let full = before >= parts.config.max_readers;
    let max = parts.config.max_readers;
    let answered = {
        let parts = Arc::clone(&parts);
        spawn_blocking(move || {
            if full {
                return Err((Refusal::Full, format!("{max} readers are attached")));
            }
            attach(&parts, &Request::decode(&frame)?)
        })
    };
    let (reply, kept) = match answered.await {
        Ok(Ok((attached, pairs, seen))) => (Reply::Attached(Box::new(attached)), Some((pairs, seen))),
        Ok(Err((why, text))) => {
            tracing::debug!(?why, text, peer = channel.peer(), "refused a reader");
            (Reply::refused(why, text), None)
        }
        Err(_) => return,
    };
    if channel.send(&reply.encode(), MAX_FRAME, patience).await.is_err() {
        return;
    }
    if let Some((pairs, seen)) = kept {
        parts.counters.control_round_trips.add(1);
        stay(channel, &seen).await;
        drop(pairs);
    }
}

/// Until the reader goes, says something, or the arena is gone.
async fn stay(mut channel: Channel, arena: &Seen) {
    let mut byte = [0; 1];
    loop {
        tokio::select! {
            _ = channel.read(&mut byte) => return,
            () = tokio::time::sleep(TICK) => {
                if arena.is_gone() {
                    return;
                }
            }
        }
    }
}

/// Connects a queue pair to each of the reader's. Blocks for as long as the driver needs.
fn attach(parts: &Parts, request: &Request) -> Result<(Attached, Vec<Held>, Seen), (Refusal, String)> {
    let offer = parts.registry.find(request.generation).map_err(|why| (Refusal::StaleGeneration, why))?;
    let fabric = |e: &Error| match e.kind() {
        Kind::Exhausted => (Refusal::Full, e.to_string()),
        _ => (Refusal::Fabric, e.to_string()),
    };
    let mut pairs = Vec::new();
    let mut lanes = Vec::new();
    let usable: Vec<_> = parts.rails.iter().enumerate().filter(|(_, rail)| !rail.is_down()).collect();
    for (number, theirs) in request.pairs.iter().enumerate() {
        // The reader's first device to our first, and around.
        let at = number.checked_rem(usable.len()).unwrap_or(0);
        let Some((place, rail)) = usable.get(at) else {
            return Err((Refusal::Fabric, "every port of the exporter's is down".into()));
        };
        let held = Held::new(rail, *place).map_err(|e| fabric(&e))?;
        held.connect(theirs).map_err(|e| fabric(&e))?;
        let Some(address) = held.address() else { continue };
        lanes.push(Lane { address, keys: offer.registration.remote_keys(*place) });
        pairs.push(held);
    }
    Ok((attached(&offer, request.generation, lanes), pairs, offer.seen()))
}

fn attached(offer: &Offer, generation: u64, pairs: Vec<Lane>) -> Attached {
    let arena = offer.arena.arena();
    Attached {
        version: PROTOCOL_VERSION,
        generation,
        payload: arena.payload(),
        capacity: arena.capacity(),
        shards: arena.shards(),
        memory: offer.arena.memory(),
        extent: offer.registration.extent,
        pairs,
    }
}
