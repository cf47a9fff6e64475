//! What the machines' commands do, and how words are seen.

use super::{
    Event, HopId, Id, World, nanos,
    node::{Hop, Job, NEVER, Watch},
};
use crate::{
    Copy, Error, failure,
    members::Member,
    random::{Costs, mix},
};
use flashboot_core::{
    Error as Cause, Kind, PeerId, ShardId,
    replica::{Command, Event as Told},
};
use std::time::Duration;

impl<'p> World<'p> {
    pub(super) fn carry_out(&mut self, id: Id, command: Command) -> Result<(), Error> {
        match command {
            Command::Attach { source } => self.attach(id, source)?,
            Command::Watch { source, shard, at_least, until } => {
                self.watch(id, source, shard, at_least, until);
            }
            Command::Pull { source, chunk } => {
                if let Some(hop) = self.hop_between(id, source) {
                    self.pull(id, hop, chunk);
                }
            }
            Command::Publish { shard, bytes } => self.publish(id, shard, bytes),
            Command::Abort { source } => self.abort(id, source),
            Command::Detach { source } => {
                if let Some(hop) = self.hop_between(id, source) {
                    self.detach(hop);
                }
            }
            Command::Seek { lost, .. } => {
                let lost = u32::try_from(lost.0).unwrap_or(u32::MAX);
                self.seeks(id, lost);
            }
            Command::Complete => {
                self.over(id, None);
                let now = self.now();
                if let Some(placement) = &mut self.placement {
                    placement.finished(now, id)?;
                }
            }
            Command::Fail { cause } => {
                self.over(id, Some(cause.to_string()));
                // Its process ends.
                self.leaves(id);
            }
        }
        Ok(())
    }

    /// The machine is over, well or not.
    fn over(&mut self, id: Id, failed: Option<String>) {
        let now = self.queue.now();
        let Some(node) = self.node(id) else { return };
        node.machine = None;
        node.watch = None;
        match failed {
            None => node.done = Some(now),
            Some(why) => node.failed = Some(why),
        }
        self.left -= 1;
    }

    /// At the release sources are mapped; later it takes its time.
    fn attach(&mut self, id: Id, source: PeerId) -> Result<(), Error> {
        let source = u32::try_from(source.0).unwrap_or(u32::MAX);
        let hop = self.connect(id, source)?;
        let now = self.queue.now();
        let ahead = now == 0;
        let map = self.hop(hop).map_or(0, |hop| hop.map);
        self.queue.push(if ahead { 0 } else { now + map }, Event::Attached(hop));
        Ok(())
    }

    fn connect(&mut self, reader: Id, source: Id) -> Result<HopId, Error> {
        let known = PeerId(u64::from(source));
        if let Some(hop) = self.hop_between(reader, known) {
            return Ok(hop);
        }
        let of = |id: Id| self.members.get(id as usize).copied();
        let (Some(from), Some(to)) = (of(source), of(reader)) else {
            return Err(Error::Placement(format!("no member {source}")));
        };
        let slow = |member: Member| failure::factor(&self.scenario, member.clone);
        let factor =
            slow(from).min(slow(to)) * failure::unevenness(&self.scenario, to.rank, from.replica, to.replica);
        let (flow, copy) = self.site.connect(&mut self.fabric, from.gpu, to.gpu, factor)?;
        let id = u32::try_from(self.hops.len()).unwrap_or(u32::MAX);
        let costs = self.costs_of(copy);
        self.hops.push(Hop {
            reader,
            source,
            flow,
            start: nanos(copy.start_us),
            look: nanos(copy.look_us),
            map: nanos(copy.map_ms * 1e3),
            detect: nanos(copy.detect_ms * 1e3),
            costs,
            reads: false,
            carried: 0,
            attached: false,
        });
        self.hop_of.push(id);
        if let Some(node) = self.node(reader) {
            node.hops.push(id);
        }
        Ok(id)
    }

    fn costs_of(&mut self, copy: &'p Copy) -> usize {
        if let Some(at) = self.costs.iter().position(|(known, _)| std::ptr::eq(*known, copy)) {
            return at;
        }
        // By the kind of link, not by which was met first: that differs with who is simulated together.
        let is = |link: Option<&Copy>| link.is_some_and(|link| std::ptr::eq(link, copy));
        let kind = match (is(self.profile.nvlink.as_ref()), is(self.profile.local.as_ref())) {
            (true, _) => 0,
            (_, true) => 1,
            _ => 2,
        };
        let seed = mix(self.scenario.seed, kind);
        self.costs.push((copy, Costs::new(copy.chunk_us * 1e3, copy.jitter_us * 1e3, seed)));
        self.costs.len() - 1
    }

    pub(super) fn attached(&mut self, id: HopId) {
        let Some(hop) = self.hops.get_mut(id as usize) else { return };
        let (reader, source) = (hop.reader, hop.source);
        let Some(from) = self.nodes.get_mut(source as usize) else { return };
        let peer = PeerId(u64::from(source));
        if !from.alive {
            self.told.push_back((reader, Told::Lost { source: peer, cause: gone() }));
            return;
        }
        hop.attached = true;
        from.readers.push(id);
        // As the driver: what the first look shows comes first.
        let first = from.words.iter().position(|bytes| *bytes > 0).unwrap_or(0);
        let shard = ShardId(u32::try_from(first).unwrap_or(0));
        let bytes = from.word(shard);
        self.told.push_back((reader, Told::Seen { source: peer, shard, bytes }));
        self.told.push_back((reader, Told::Attached { source: peer }));
    }

    fn detach(&mut self, id: HopId) {
        let Some(hop) = self.hops.get_mut(id as usize) else { return };
        let Hop { reader, source, flow, .. } = *hop;
        (hop.attached, hop.reads) = (false, false);
        self.fabric.end(flow);
        if let Some(from) = self.node(source) {
            from.readers.retain(|other| *other != id);
        }
        if let Some(node) = self.node(reader) {
            node.watch = node.watch.filter(|watch| watch.hop != id);
        }
    }

    fn watch(&mut self, id: Id, source: PeerId, shard: ShardId, at_least: u64, until: Duration) {
        let Some(hop) = self.hop_between(id, source) else { return };
        let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        let now = self.queue.now();
        let Some(node) = self.nodes.get_mut(id as usize) else { return };
        node.watch = Some(Watch { hop, shard, at_least, until, seen: NEVER });
        if !std::mem::replace(&mut node.ticks, true) {
            self.queue.push(until.max(now), Event::Tick(id));
        }
        self.look(id);
    }

    /// Looks at the word that `id` waits for, if it has come.
    fn look(&mut self, id: Id) {
        let Some(watch) = self.nodes.get(id as usize).and_then(|node| node.watch) else { return };
        let Some(hop) = self.hop(watch.hop).copied() else { return };
        let there = self
            .nodes
            .get(hop.source as usize)
            .is_some_and(|from| from.alive && from.word(watch.shard) >= watch.at_least);
        if !there || watch.seen != NEVER {
            return;
        }
        let seen = self.queue.now() + hop.look;
        self.queue.push(seen, Event::Seen(id));
        if let Some(watch) = self.node(id).and_then(|node| node.watch.as_mut()) {
            watch.seen = seen;
        }
    }

    pub(super) fn seen(&mut self, id: Id) {
        let now = self.queue.now();
        let Some(watch) = self.nodes.get(id as usize).and_then(|node| node.watch) else { return };
        if watch.seen != now {
            return;
        }
        let Some(hop) = self.hop(watch.hop).copied() else { return };
        let Some(from) = self.nodes.get(hop.source as usize).filter(|from| from.alive) else { return };
        let bytes = from.word(watch.shard);
        if let Some(node) = self.node(id) {
            node.watch = None;
        }
        let source = PeerId(u64::from(hop.source));
        self.told.push_back((id, Told::Seen { source, shard: watch.shard, bytes }));
    }

    /// One look at the time is under way at most: the watch that is then there says when the next is due.
    pub(super) fn tick(&mut self, id: Id) {
        let now = self.queue.now();
        let Some(node) = self.node(id) else { return };
        node.ticks = false;
        let Some(watch) = node.watch else { return };
        if watch.until > now {
            node.ticks = true;
            self.queue.push(watch.until, Event::Tick(id));
        } else {
            self.told.push_back((id, Told::Tick));
        }
    }

    fn publish(&mut self, id: Id, shard: ShardId, bytes: u64) {
        let Some(node) = self.nodes.get_mut(id as usize) else { return };
        if let Some(word) = node.words.get_mut(shard.0 as usize) {
            *word = bytes;
        }
        for at in 0..node.readers.len() {
            let hop = self.nodes.get(id as usize).and_then(|node| node.readers.get(at).copied());
            let Some(hop) = hop.and_then(|hop| self.hop(hop).map(|h| (hop, h.reader))) else { continue };
            let waits = |watch: &Watch| watch.hop == hop.0 && watch.shard == shard;
            if self.nodes.get(hop.1 as usize).and_then(|node| node.watch.as_ref()).is_some_and(waits) {
                self.look(hop.1);
            }
        }
    }

    /// Copies that are asked for and those whose source is gone end here; what is being hashed lands.
    fn abort(&mut self, id: Id, source: PeerId) {
        let Some(hop) = self.hop_between(id, source) else { return };
        self.break_copies(id, hop);
        let Some(node) = self.node(id) else { return };
        let (ended, rest): (Vec<Job>, _) = node.broken.drain(..).partition(|job| job.hop == hop);
        node.broken = rest;
        for job in ended {
            let cause = Cause::new(Kind::Cancelled, "simulate", "the pull was cancelled");
            self.told.push_back((id, Told::Failed { source, chunk: job.chunk, cause }));
        }
    }
}

pub(super) fn gone() -> Cause {
    Cause::new(Kind::SourceLost, "simulate", "the source died")
}
