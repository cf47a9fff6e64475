//! One pull as the engine works on it.

use super::{
    landing::Landing,
    plan::{Cutter, Message},
};
use flashboot_core::{Error, Kind};
use std::{sync::Arc, time::Instant};

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: u64,
    /// What no READ was posted for yet; `None` after a cancel or a failure.
    cutter: Option<Cutter>,
    /// What was posted on a device that failed.
    again: Vec<Message>,
    /// READs posted and not completed.
    pub(crate) in_flight: u32,
    /// Bytes that each piece still waits for; empty when none is hashed on the host.
    missing: Vec<u64>,
    pub(crate) landing: Arc<Landing>,
    /// When it was asked to stop.
    pub(crate) stopped: Option<Instant>,
    pub(crate) failed: bool,
}

impl Job {
    pub(crate) fn new(id: u64, cutter: Cutter, landing: Arc<Landing>) -> Self {
        Self {
            id,
            cutter: Some(cutter),
            again: Vec::new(),
            in_flight: 0,
            missing: landing.pieces(),
            landing,
            stopped: None,
            failed: false,
        }
    }

    /// The next READ to post.
    pub(crate) fn next(&mut self) -> Option<Message> {
        let next = self.again.pop().or_else(|| self.cutter.as_mut()?.next())?;
        self.in_flight += 1;
        Some(next)
    }

    pub(crate) fn has_more(&self) -> bool {
        !self.again.is_empty() || self.cutter.as_ref().is_some_and(|cutter| !cutter.is_done())
    }

    /// Posts nothing more.
    pub(crate) fn stop(&mut self) {
        self.cutter = None;
        self.again.clear();
    }

    /// A READ that was posted, or was to be, and has not landed. Nothing is posted again of a pull that is to stop, so that it
    /// has failed then, however much of it has landed.
    pub(crate) fn missed(&mut self, message: Message, peer: &str) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.cutter.is_some() {
            self.again.push(message);
        } else {
            self.cancelled(peer);
        }
    }

    /// It ends as cancelled, unless it has failed of something else.
    pub(crate) fn cancelled(&mut self, peer: &str) {
        self.failed = true;
        let range = self.landing.range();
        let detail = format!("bytes {range} were cancelled; nothing of them will land any more");
        self.landing.fail(Error::new(Kind::Cancelled, "pull", detail).with_peer(peer));
    }

    /// A READ that has landed; gives the pieces that are whole now.
    pub(crate) fn landed(&mut self, message: Message) -> Vec<usize> {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.missing.is_empty() {
            return Vec::new();
        }
        let (start, step) = (self.landing.range().start, self.landing.step().max(1));
        let (from, to) = (message.start.saturating_sub(start), message.end().saturating_sub(start));
        let mut whole = Vec::new();
        for number in from / step..to.div_ceil(step) {
            let piece = (number.saturating_mul(step), (number + 1).saturating_mul(step));
            let bytes = to.min(piece.1).saturating_sub(from.max(piece.0));
            let index = usize::try_from(number).unwrap_or(usize::MAX);
            if let Some(missing) = self.missing.get_mut(index) {
                *missing = missing.saturating_sub(bytes);
                if *missing == 0 && bytes > 0 {
                    whole.push(index);
                }
            }
        }
        whole
    }

    /// Whether nothing of it is posted or will be.
    pub(crate) fn is_over(&self) -> bool {
        self.in_flight == 0 && !self.has_more()
    }
}
