//! Turns on a GPU that processes share: one copies at a time, round and round, each for a slice.

use super::{
    Event, HopId, Id, World, nanos,
    node::{Job, NEVER},
};
use crate::{Profile, Scenario, members::Member, profile::Turns, random::mix};

/// More slices than this are none of a simulation that ends.
pub(super) const MOST: u64 = 1 << 20;

/// Whose turn it is on a GPU whose members take turns.
#[derive(Debug, Clone, Default)]
pub(super) struct Turn {
    /// Members in the order of their turns.
    ring: Vec<Id>,
    of: Option<Id>,
    last: Option<Id>,
    /// When its slice ends: an event of another time is out of date.
    ends: u64,
    /// Whether the slice is over and nobody else had anything to do.
    over: bool,
}

/// The turns of each GPU. In which order a driver goes round is not known: it is drawn.
pub(super) fn turns(profile: &Profile, scenario: &Scenario, members: &[Member], gpus: usize) -> Vec<Turn> {
    let mut turns = vec![Turn::default(); gpus];
    if profile.gpu.turns.is_none() {
        return turns;
    }
    for (id, member) in (0..).zip(members) {
        if let Some(turn) = turns.get_mut(member.gpu as usize) {
            turn.ring.push(id);
        }
    }
    for turn in &mut turns {
        turn.ring.sort_by_key(|id| mix(scenario.seed, u64::from(*id)));
    }
    turns
}

impl World<'_> {
    /// `id` may have something to do now.
    pub(super) fn is_ready(&mut self, id: Id) {
        let Some(gpu) = self.gpu_of(id) else { return };
        let late = |turn: &Turn| turn.over.then_some(turn.of).flatten().filter(|of| *of != id);
        if let Some(of) = self.turns.get(gpu as usize).and_then(late)
            && self.has_work(id)
        {
            self.interrupt(gpu, of);
            self.give_turn(gpu, true);
        } else {
            self.give_turn(gpu, false);
        }
    }

    /// `id`, whose turn it is, goes on with its next copy, or gives its turn up.
    pub(super) fn goes_on(&mut self, id: Id) {
        let Some(gpu) = self.gpu_of(id) else { return };
        if self.turns.get(gpu as usize).is_none_or(|turn| turn.of != Some(id)) {
            return;
        }
        if self.has_work(id) {
            self.works(id, self.queue.now());
        } else {
            self.end_turn(gpu);
            self.give_turn(gpu, false);
        }
    }

    pub(super) fn slice_ends(&mut self, gpu: u32) {
        let now = self.queue.now();
        let Some(turn) = self.turns.get(gpu as usize) else { return };
        let (Some(of), true) = (turn.of, turn.ends == now) else { return };
        let others = turn.ring.iter().any(|id| *id != of && (self.has_work(*id) || self.is_done(*id)));
        if others {
            self.interrupt(gpu, of);
            self.give_turn(gpu, true);
        } else if let Some(turn) = self.turns.get_mut(gpu as usize) {
            turn.over = true;
        }
    }

    /// The source of what `id` copies over `hop` is gone.
    pub(super) fn breaks_in_turn(&mut self, id: Id, hop: HopId) {
        let Some(node) = self.node(id) else { return };
        if let Some(paused) = node.paused.take_if(|paused| paused.job.hop == hop) {
            node.broken.push(paused.job);
        }
        let idle = node.copying.is_none();
        if idle {
            if let Some(flow) = self.hop(hop).map(|hop| hop.flow) {
                self.fabric.end(flow);
            }
            self.goes_on(id);
        }
    }

    /// Its host knows of the end of `job` a moment later, in the order of the copies.
    pub(super) fn notice_later(&mut self, id: Id, job: Job, turns: Turns) {
        let now = self.queue.now();
        let bytes = job.chunk.range.len();
        let Some(hop) = self.hop(job.hop) else { return };
        let alone = bytes as f64 / self.fabric.limit(hop.flow) * 1e9;
        let alone =
            (alone as u64).saturating_add(self.hash_time(bytes)).saturating_add(self.cost_of(hop, job.chunk));
        let waited = now.saturating_sub(job.ready).saturating_sub(alone);
        // As `cuda` does: it expects a copy to take what it takes alone.
        let patience = nanos(turns.patience_us).max(alone.saturating_mul(6));
        let late = if waited > patience { turns.late_us } else { 0.0 };
        let Some(node) = self.node(id) else { return };
        node.noticed = node.noticed.max(now + nanos(turns.notice_us + late));
        node.hashing.push_back(job);
        let at = node.noticed;
        self.queue.push(at, Event::Hashed(id));
    }

    fn gpu_of(&self, id: Id) -> Option<u32> {
        self.members.get(id as usize).map(|member| member.gpu)
    }

    fn has_work(&self, id: Id) -> bool {
        let now = self.queue.now();
        let queued = |job: &Job| job.ready <= now;
        self.nodes
            .get(id as usize)
            .is_some_and(|node| node.paused.is_some() || node.queue.front().is_some_and(queued))
    }

    fn is_done(&self, id: Id) -> bool {
        self.nodes.get(id as usize).is_some_and(|node| node.done.is_some())
    }

    fn end_turn(&mut self, gpu: u32) {
        if let Some(turn) = self.turns.get_mut(gpu as usize) {
            (turn.of, turn.over) = (None, false);
        }
    }

    /// Ends the turn of `id` in the middle of a copy, which goes on in its next one.
    fn interrupt(&mut self, gpu: u32, id: Id) {
        let now = self.queue.now();
        self.end_turn(gpu);
        let Some(node) = self.node(id) else { return };
        let Some(mut copying) = node.copying.take() else { return };
        node.due = NEVER;
        copying.advance(now);
        // What of its own cost is left, until it goes on.
        copying.since = copying.since.saturating_sub(now);
        node.paused = Some(copying);
        if let Some(flow) = self.hop(copying.job.hop).map(|hop| hop.flow) {
            self.fabric.end(flow);
        }
    }

    /// Gives the turn, where it is nobody's, to the next in the ring who has something to do.
    fn give_turn(&mut self, gpu: u32, interrupted: bool) {
        let (now, Some(turns)) = (self.queue.now(), self.profile.gpu.turns) else { return };
        let Some(turn) = self.turns.get(gpu as usize).filter(|turn| turn.of.is_none()) else { return };
        let after = turn.ring.iter().position(|id| Some(*id) == turn.last).map_or(0, |at| at + 1);
        let mut passed = 0;
        let mut around = turn.ring.iter().cycle().skip(after).take(turn.ring.len());
        let next = around.find(|id| {
            let works = self.has_work(**id);
            passed += u32::from(!works && self.is_done(**id));
            works
        });
        let Some(next) = next.copied() else { return };
        let changes = match turn.last {
            Some(last) if last != next => passed + 1,
            Some(_) if interrupted => passed,
            _ => 0,
        };
        let begins = now + nanos(turns.change_us * f64::from(changes));
        let Some(turn) = self.turns.get_mut(gpu as usize) else { return };
        let ends = begins + nanos(turns.slice_us);
        (turn.of, turn.last, turn.ends) = (Some(next), Some(next), ends);
        self.slices += 1;
        self.queue.push(ends, Event::Slice(gpu));
        self.works(next, begins);
    }

    /// Goes on with the interrupted copy of `id`, or begins the next, at `begins`.
    fn works(&mut self, id: Id, begins: u64) {
        let Some(node) = self.node(id) else { return };
        let (paused, queued) = (node.paused.take(), node.queue.front().copied());
        let Some(job) = paused.map(|paused| paused.job).or(queued) else { return };
        let Some(flow) = self.hop(job.hop).map(|hop| hop.flow) else { return };
        // Whose turn it is has the GPU's memory to itself.
        self.fabric.begin(flow);
        let rate = self.fabric.rate(flow);
        let Some(mut copying) = paused else {
            // The hash needs the same memory.
            let tail = self.hash_time(job.chunk.range.len());
            return self.begin_copy(id, begins, tail);
        };
        (copying.since, copying.rate) = (begins.saturating_add(copying.since), rate);
        if let Some(node) = self.node(id) {
            node.copying = Some(copying);
        }
        self.ends(id);
    }
}
