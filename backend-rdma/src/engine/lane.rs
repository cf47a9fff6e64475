//! One lane: a queue pair of one hop on one device, and what is posted on it.

use super::{look::Look, plan::Message, plan::Window};
use crate::{
    held::Held,
    verbs::{Pair, ReadRequest, VerbsError},
};
use flashboot_core::Error;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// A queue pair of one hop on one device.
#[derive(Debug)]
pub(crate) struct Lane {
    /// The device's place among the endpoint's.
    pub(crate) rail: usize,
    /// `None` once it was given back.
    held: Option<Held>,
    pub(super) window: Window,
    pub(super) remote_keys: Vec<u32>,
    pub(super) local_keys: Vec<u32>,
    pub(super) posted: VecDeque<Posted>,
    sequence: u32,
    pub(super) payload_posted: u32,
    pub(super) words_posted: u32,
    pub(super) unsignalled: u32,
    /// When something of it last completed, or was posted while nothing was.
    heard: Instant,
    /// Why nothing goes by it any more, and since when.
    failed: Option<(Error, Instant)>,
}

#[derive(Debug)]
pub(super) struct Posted {
    pub(super) sequence: u32,
    pub(super) signalled: bool,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Payload {
        job: u64,
        message: Message,
    },
    /// Nothing but the end of what was posted before it.
    Marker,
    /// One READ of a look; the last has the look.
    Words {
        slot: usize,
        look: Option<Look>,
    },
}

impl Lane {
    pub(crate) fn new(held: Held, window: Window, remote_keys: Vec<u32>, local_keys: Vec<u32>) -> Self {
        Self {
            rail: held.number,
            held: Some(held),
            window,
            remote_keys,
            local_keys,
            posted: VecDeque::new(),
            sequence: 0,
            payload_posted: 0,
            words_posted: 0,
            unsignalled: 0,
            heard: Instant::now(),
            failed: None,
        }
    }

    pub(super) fn pair(&self) -> Option<&Pair> {
        self.held.as_ref().and_then(Held::pair)
    }

    pub(super) fn has_pair(&self) -> bool {
        self.held.is_some()
    }

    pub(super) fn is_up(&self) -> bool {
        self.failed.is_none() && self.has_pair()
    }

    /// Why nothing goes by it any more.
    pub(super) fn why_down(&self) -> Option<&Error> {
        self.failed.as_ref().map(|(why, _)| why)
    }

    pub(super) fn room(&self) -> u32 {
        if self.is_up() { self.window.reads.saturating_sub(self.payload_posted) } else { 0 }
    }

    /// Ends the lane: whatever is posted will complete.
    pub(super) fn fail(&mut self, error: Error) {
        if self.failed.is_some() {
            return;
        }
        tracing::debug!(%error, pair = ?self.pair(), "a lane failed");
        self.failed = Some((error, Instant::now()));
        if let Some(pair) = self.pair()
            && let Err(e) = pair.fail()
        {
            // A device that is gone completes nothing more: its pairs are destroyed instead, a little later.
            tracing::warn!(device = pair.device_name(), errno = e.errno, "a queue pair cannot be ended");
        }
    }

    /// Something of it completed.
    pub(super) fn heard(&mut self) {
        self.heard = Instant::now();
    }

    pub(super) fn push(&mut self, posted: Posted) {
        if self.posted.is_empty() {
            self.heard();
        }
        self.posted.push_back(posted);
    }

    /// When a look on it has waited long enough for a device that answers, or ends it, within `limit`. Looks only: how long
    /// payload may take is for its owner to say.
    pub(super) fn answers_by(&self, limit: Duration) -> Option<Instant> {
        if self.is_up() && self.words_posted > 0 { self.heard.checked_add(limit) } else { None }
    }

    /// When a lane that has ended must have given back what was posted on it.
    pub(super) fn drained_by(&self, limit: Duration) -> Option<Instant> {
        let (_, since) = self.failed.as_ref().filter(|_| self.has_pair() && !self.posted.is_empty())?;
        since.checked_add(limit)
    }

    /// Destroys a queue pair that does not give back what was posted on it: its device is done with that then, and it is
    /// given here. Nothing where even that fails: what was posted stays owned for ever.
    pub(super) fn destroy(&mut self) -> VecDeque<Posted> {
        let Some(held) = self.held.take() else { return VecDeque::new() };
        let device = held.rail().name().to_owned();
        match held.destroy() {
            Ok(()) => {
                tracing::warn!(
                    device,
                    posted = self.posted.len(),
                    "a queue pair that said nothing was destroyed"
                );
                std::mem::take(&mut self.posted)
            }
            Err(VerbsError { call, errno }) => {
                tracing::error!(
                    device,
                    call,
                    errno,
                    "a queue pair cannot be destroyed; its memory stays owned"
                );
                VecDeque::new()
            }
        }
    }

    /// Gives its queue pair back, on which nothing is posted.
    pub(super) fn give_back(&mut self) {
        self.held = None;
    }

    /// Whether its last request ends without anybody being told: a success of it makes no completion, and after a failure
    /// nothing follows that would.
    pub(super) fn needs_marker(&self) -> bool {
        self.failed.is_some() && self.has_pair() && self.posted.back().is_some_and(|last| !last.signalled)
    }

    /// Posts a request that is flushed at once; its completion is that of all before it. A queue that is full takes it
    /// later.
    pub(super) fn mark(&mut self, hop: u32, at: usize) {
        let request = self.request(hop, at, true);
        let Some(pair) = self.pair() else { return };
        // SAFETY: a READ of no bytes, on a queue pair that was ended.
        if unsafe { pair.read(&[request]) }.is_ok() {
            self.push(Posted { sequence: request.id as u32, signalled: true, what: What::Marker });
        }
    }

    pub(super) fn request(&mut self, hop: u32, lane: usize, signalled: bool) -> ReadRequest {
        self.sequence = self.sequence.wrapping_add(1);
        ReadRequest {
            id: id(hop, lane, self.sequence),
            from: 0,
            remote_key: 0,
            to: 0,
            len: 0,
            local_key: 0,
            signalled,
        }
    }
}

/// The id of a request: which hop, which of its lanes, which of that one's requests.
fn id(hop: u32, lane: usize, sequence: u32) -> u64 {
    (u64::from(hop) << 40) | ((lane as u64 & 0xff) << 32) | u64::from(sequence)
}

/// The hop of an id, which is 24 bits.
pub(crate) fn hop_of(id: u64) -> u32 {
    (id >> 40) as u32
}

pub(super) fn lane_of(id: u64) -> usize {
    (id >> 32) as usize & 0xff
}
