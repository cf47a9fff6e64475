//! How a replica leaves a source, finds another, and ends.

use super::{
    Command, Replica,
    machine::{Link, Phase},
};
use crate::{Error, Kind, PeerId, Retry};
use std::collections::BTreeSet;

impl Replica {
    /// Gives a source up: its pulls are cancelled now, the rest follows when they have quiesced. Where the cause is our
    /// own process's and no source's, the replica itself ends.
    pub(super) fn lose(&mut self, source: PeerId, cause: Error, out: &mut Vec<Command>) {
        if matches!(self.phase, Phase::Stopping(_)) {
            return;
        }
        if cause.retry() == Retry::NewProcess {
            self.stop(cause, out);
            return;
        }
        match self.links.get_mut(&source) {
            Some(link @ (Link::Attaching | Link::Up)) => {
                if matches!(link, Link::Up) && self.in_flight.values().any(|peer| *peer == source) {
                    out.push(Command::Abort { source });
                }
                *link = Link::Draining(cause);
                self.losses = self.losses.saturating_add(1);
                if self.watch.is_some_and(|(peer, ..)| peer == source) {
                    self.watch = None;
                }
            }
            Some(Link::Draining(_) | Link::Seeking(_)) | None => {}
        }
    }

    pub(super) fn on_reassigned(&mut self, lost: PeerId, to: Option<PeerId>, out: &mut Vec<Command>) {
        let Some(Link::Seeking(cause)) = self.links.get(&lost) else { return };
        let cause = cause.clone();
        self.links.remove(&lost);
        let Some(to) = to else {
            // Damage and a refilled source stay what they are; any other loss is a loss.
            let kind = if cause.kind().is_refusal() { cause.kind() } else { Kind::SourceLost };
            let (cause, remedy) = cause.split_remedy();
            let detail = format!("no other holder has what is missing; the last source was lost by: {cause}");
            let error = Error::new(kind, "replicate", detail).with_peer(lost);
            let error = if let Some(remedy) = remedy { error.with_remedy(remedy) } else { error };
            self.stop(error, out);
            return;
        };
        for work in self.work.iter_mut().filter(|work| work.source == lost) {
            work.source = to;
        }
        for (_, tries) in self.damaged.values_mut() {
            *tries = 0;
        }
        if !self.links.contains_key(&to) && self.phase == Phase::Running {
            self.attach(to, out);
        }
    }

    pub(super) fn stop(&mut self, cause: Error, out: &mut Vec<Command>) {
        if matches!(self.phase, Phase::Idle | Phase::Running) {
            self.phase = Phase::Stopping(cause);
            self.watch = None;
            let busy: BTreeSet<_> = self.in_flight.values().copied().collect();
            out.extend(busy.into_iter().map(|source| Command::Abort { source }));
        }
    }

    /// Lets go of lost sources whose pulls have quiesced, and ends a stopping replica.
    pub(super) fn drain(&mut self, out: &mut Vec<Command>) {
        let stopping = matches!(self.phase, Phase::Stopping(_));
        if !stopping && !self.links.values().any(|link| matches!(link, Link::Draining(_))) {
            return;
        }
        let busy: BTreeSet<_> = self.in_flight.values().copied().collect();
        let mut lost = Vec::new();
        for (source, link) in self.links.iter_mut() {
            if let Link::Draining(cause) = link
                && !busy.contains(source)
            {
                let cause = cause.clone();
                lost.push((*source, cause.clone()));
                *link = Link::Seeking(cause);
            }
        }
        for (source, cause) in lost {
            out.push(Command::Detach { source });
            if self.phase != Phase::Running {
                continue;
            }
            // Nothing left to read from it: it is not missed.
            let Some(work) = self.work.iter().find(|work| work.source == source && !work.chunks.is_empty())
            else {
                self.links.remove(&source);
                continue;
            };
            if self.losses > self.policy.max_losses {
                let detail = format!("{} sources were lost, the last one: {cause}", self.losses);
                self.stop(Error::new(Kind::SourceLost, "replicate", detail), out);
                continue;
            }
            let first = work.chunks.first().and_then(|index| self.geometry.chunk_at(work.shard, index));
            let from =
                first.map_or(0, |chunk| chunk.range.start - self.geometry.shard_range(work.shard).start);
            out.push(Command::Seek { lost: source, shard: work.shard, from, cause });
        }
        if let Phase::Stopping(cause) = &self.phase
            && self.in_flight.is_empty()
        {
            let cause = cause.clone();
            self.end(out);
            out.push(Command::Fail { cause });
        }
    }

    pub(super) fn end(&mut self, out: &mut Vec<Command>) {
        for (source, link) in std::mem::take(&mut self.links).into_iter() {
            if matches!(link, Link::Up) {
                out.push(Command::Detach { source });
            }
        }
        self.phase = Phase::Over;
    }
}
