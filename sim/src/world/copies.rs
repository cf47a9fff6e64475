//! Copies: one at a time at each reader, in the order in which they were asked for, at the rate that its flow has.

use super::{
    Event, HopId, Id, World,
    node::{Copying, Job, NEVER},
};
use crate::{Span, svg::ROWS};
use flashboot_core::{ChunkRef, PeerId, replica::Event as Told};

impl World<'_> {
    /// Asks for a copy. Its start runs beside the copies before it.
    pub(super) fn pull(&mut self, id: Id, hop: HopId, chunk: ChunkRef) {
        let now = self.queue.now();
        let Some(h) = self.hops.get_mut(hop as usize) else { return };
        let ready = now + h.start;
        let turns = self.profile.gpu.turns.is_some();
        if !std::mem::replace(&mut h.reads, true) && !turns {
            self.fabric.begin(h.flow);
        }
        let dead = !self.nodes.get(h.source as usize).is_some_and(|from| from.alive);
        let Some(node) = self.nodes.get_mut(id as usize) else { return };
        let job = Job { hop, chunk, ready };
        if dead {
            node.broken.push(job);
            return;
        }
        node.queue.push_back(job);
        if turns {
            // Only what can begin stands in line for the GPU.
            self.queue.push(ready, Event::Ready(id));
        } else {
            self.next_copy(id);
        }
    }

    /// Begins the next copy of `id`, if none is under way.
    fn next_copy(&mut self, id: Id) {
        self.begin_copy(id, self.queue.now(), 0);
    }

    /// Begins the next copy of `id`, if none is under way, at `now` or when it is ready; it takes `tail` more than its bytes.
    pub(super) fn begin_copy(&mut self, id: Id, now: u64, tail: u64) {
        let Some(node) = self.nodes.get(id as usize) else { return };
        let (None, Some(job)) = (node.copying, node.queue.front().copied()) else { return };
        let Some(hop) = self.hop(job.hop).copied() else { return };
        let bytes = job.chunk.range.len();
        let began = now.max(job.ready) + self.cost_of(&hop, job.chunk);
        let rate = self.fabric.rate(hop.flow);
        if let Some(node) = self.node(id) {
            node.queue.pop_front();
            node.copying = Some(Copying { job, began, since: began, left: bytes as f64, rate, tail });
        }
        self.ends(id);
    }

    /// Says when the copy under way ends, at the rate that it has now; without a rate it does not.
    pub(super) fn ends(&mut self, id: Id) {
        let Some(node) = self.nodes.get_mut(id as usize) else { return };
        let Some(copying) = node.copying else { return };
        node.due = NEVER;
        if copying.rate > 0.0 {
            let at = copying.since.saturating_add((copying.left / copying.rate * 1e9).ceil() as u64);
            let at = at.saturating_add(copying.tail);
            node.due = at.max(self.queue.now());
            self.queue.push(at, Event::Copied(id));
        }
    }

    /// Rates changed: copies under way go on at the new ones.
    pub(super) fn settle(&mut self) {
        let now = self.queue.now();
        let changed = self.fabric.settle();
        #[cfg(test)]
        assert_eq!(self.fabric.overfull(), [], "at {now}");
        for flow in changed {
            let Some(hop) = self.hop_of.get(flow as usize).copied() else { continue };
            let Some(reader) = self.hop(hop).map(|hop| hop.reader) else { continue };
            let rate = self.fabric.rate(flow);
            let Some(copying) = self.node(reader).and_then(|node| node.copying.as_mut()) else { continue };
            if copying.job.hop != hop {
                continue;
            }
            copying.advance(now);
            copying.rate = rate;
            self.ends(reader);
        }
    }

    pub(super) fn copied(&mut self, id: Id) {
        let now = self.queue.now();
        let Some(node) = self.node(id) else { return };
        if node.due != now {
            return;
        }
        node.due = NEVER;
        let Some(copying) = node.copying.take() else { return };
        let bytes = copying.job.chunk.range.len();
        self.bytes += bytes;
        let Some(hop) = self.hops.get_mut(copying.job.hop as usize) else { return };
        hop.carried += bytes;
        let flow = hop.flow;
        if self.scenario.spans {
            self.spanned(id, &copying, now);
        }
        if let Some(turns) = self.profile.gpu.turns {
            self.fabric.end(flow);
            self.notice_later(id, copying.job, turns);
            self.goes_on(id);
            return;
        }
        self.next_copy(id);
        let hash = self.hash_time(bytes);
        if hash == 0 {
            self.landed(id, copying.job);
            return;
        }
        let Some(gpu) = self.members.get(id as usize).map(|m| m.gpu) else { return };
        let Some(until) = self.hashing.get_mut(gpu as usize) else { return };
        *until = now.max(*until).saturating_add(hash);
        self.queue.push(*until, Event::Hashed(id));
        if let Some(node) = self.node(id) {
            node.hashing.push_back(copying.job);
        }
    }

    pub(super) fn hashed(&mut self, id: Id) {
        let job = self.node(id).and_then(|node| node.hashing.pop_front());
        if let Some(job) = job {
            self.landed(id, job);
        }
    }

    fn landed(&mut self, id: Id, job: Job) {
        let Some(source) = self.hop(job.hop).map(|hop| PeerId(u64::from(hop.source))) else { return };
        self.told.push_back((id, Told::Verified { source, chunk: job.chunk }));
    }

    /// Nanoseconds of hashing `bytes`; 0 where nothing is verified.
    pub(super) fn hash_time(&self, bytes: u64) -> u64 {
        let rate = self.profile.gpu.hash.filter(|_| self.scenario.verify);
        rate.map_or(0, |rate| (bytes as f64 / rate * 1e9).ceil() as u64)
    }

    /// Takes the copies of `hop` at `id` off its list, the one under way too: they are for `broken`.
    pub(super) fn break_copies(&mut self, id: Id, hop: HopId) {
        let Some(node) = self.nodes.get_mut(id as usize) else { return };
        let of = |job: &Job| job.hop == hop;
        node.broken.extend(node.queue.iter().copied().filter(of));
        node.queue.retain(|job| !of(job));
        if let Some(copying) = node.copying.filter(|copying| of(&copying.job)) {
            node.broken.push(copying.job);
            node.copying = None;
            node.due = NEVER;
        }
        if self.profile.gpu.turns.is_some() {
            self.breaks_in_turn(id, hop);
        } else {
            self.next_copy(id);
        }
    }

    fn spanned(&mut self, id: Id, copying: &Copying, now: u64) {
        let of = |id: Id| self.members.get(id as usize);
        let (Some(hop), Some(member)) = (self.hop(copying.job.hop), of(id)) else { return };
        let Some(clone) = member.clone else { return };
        // What no timeline has room for is not kept.
        if u64::from(clone) * u64::from(self.scenario.ranks) + u64::from(member.rank) >= ROWS as u64 {
            return;
        }
        let span = Span {
            clone,
            rank: member.rank,
            source: of(hop.source).and_then(|member| member.clone),
            chunk: copying.job.chunk.index,
            from_ms: copying.began as f64 / 1e6,
            to_ms: now as f64 / 1e6,
        };
        self.spans.push(span);
    }
}
