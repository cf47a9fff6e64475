//! One hop: its lanes (a queue pair on each device), the pulls that go by them, and what completions mean to both.

use super::{
    job::Job,
    lane::{Lane, Posted, What, lane_of},
    look::Look,
    plan::Message,
};
use crate::{
    counters::Counters,
    dial::Link,
    error::{completed, failed, silent},
    extent::Extent,
    rail::{LOOK_ROOM, Rail},
    scratch::Scratch,
    verbs::{Completion, ReadRequest, Refused, Status, VerbsError},
};
use flashboot_core::{Error, Kind};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// What the engine's hops share.
pub(crate) struct Shared {
    pub(crate) rails: Vec<Arc<Rail>>,
    pub(crate) scratch: Scratch,
    pub(crate) free_slots: Vec<usize>,
    pub(crate) pool: rayon::ThreadPool,
    pub(crate) counters: Arc<Counters>,
    pub(crate) grace: Duration,
    /// How long a device may leave a look without an end.
    pub(crate) answer: Duration,
    /// How long a queue pair that was ended may keep what was posted on it.
    pub(crate) drain: Duration,
}

pub(crate) struct Hop {
    pub(crate) id: u32,
    pub(crate) peer: String,
    /// The source's allocation.
    pub(crate) source: Extent,
    /// Ours; `None` for a hop that only looks.
    pub(crate) ours: Option<Extent>,
    pub(crate) lanes: Vec<Lane>,
    jobs: Vec<Job>,
    looks: VecDeque<Look>,
    turn: usize,
    closing: bool,
    /// The control connection, which the source keeps its queue pairs for.
    _link: Option<Link>,
}

impl Hop {
    pub(crate) fn new(
        id: u32,
        peer: String,
        source: Extent,
        ours: Option<Extent>,
        lanes: Vec<Lane>,
        link: Option<Link>,
    ) -> Self {
        let (jobs, looks) = (Vec::new(), VecDeque::new());
        Self { id, peer, source, ours, lanes, jobs, looks, turn: 0, closing: false, _link: link }
    }

    /// Whether anything is posted.
    pub(crate) fn is_busy(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.posted.is_empty())
    }

    pub(crate) fn start(&mut self, job: Job) {
        self.jobs.push(job);
    }

    pub(crate) fn look(&mut self, look: Look) {
        self.looks.push_back(look);
    }

    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Whether there is something to post and a lane to post it on.
    pub(crate) fn can_post(&self) -> bool {
        let payload = self.jobs.iter().any(Job::has_more) && self.lanes.iter().any(|lane| lane.room() > 0);
        payload || !self.looks.is_empty() || self.lanes.iter().any(Lane::needs_marker)
    }

    /// Stops a pull: nothing more is posted of it.
    pub(crate) fn cancel(&mut self, job: u64, now: Instant) {
        if let Some(job) = self.jobs.iter_mut().find(|j| j.id == job && j.stopped.is_none()) {
            job.stopped = Some(now);
            if job.has_more() {
                job.cancelled(&self.peer);
            }
            job.stop();
        }
    }

    /// Ends every lane.
    pub(crate) fn abort(&mut self, why: &Error) {
        for lane in &mut self.lanes {
            lane.fail(why.clone());
        }
    }

    /// When the first of what waits has had its time: a cancelled pull, a look, a lane that was ended.
    pub(crate) fn next_deadline(&self, shared: &Shared) -> Option<Instant> {
        let cancelled = self.jobs.iter().filter(|job| job.in_flight > 0).filter_map(|job| job.stopped);
        let cancelled = cancelled.filter_map(|at| at.checked_add(shared.grace));
        let looks = self.lanes.iter().filter_map(|lane| lane.answers_by(shared.answer));
        let ended = self.lanes.iter().filter_map(|lane| lane.drained_by(shared.drain));
        cancelled.chain(looks).chain(ended).min()
    }

    /// Ends what has had its time: the lanes of cancelled pulls and of devices that say nothing, and then the queue pairs that
    /// do not even give back what was posted on them.
    pub(crate) fn expire(&mut self, now: Instant, shared: &mut Shared) {
        self.end_cancelled(now, shared);
        for lane in &mut self.lanes {
            if lane.answers_by(shared.answer).is_some_and(|by| now >= by) {
                let rail = shared.rails.get(lane.rail);
                let (name, port) = rail.map_or(("a device", 0), |rail| (rail.name(), rail.port()));
                lane.fail(silent(shared.answer, name, port).with_peer(&self.peer));
            }
            if lane.drained_by(shared.drain).is_some_and(|by| now >= by) {
                shared.counters.pairs_destroyed_unheard.add(1);
                if !self.closing {
                    shared.counters.rails_lost.add(1);
                }
                for Posted { what, .. } in lane.destroy() {
                    release(lane, &mut self.jobs, &self.peer, what, None, shared);
                }
            }
        }
    }

    fn end_cancelled(&mut self, now: Instant, shared: &Shared) {
        let late: Vec<u64> = self
            .jobs
            .iter()
            .filter(|job| job.in_flight > 0)
            .filter(|job| job.stopped.is_some_and(|at| now.saturating_duration_since(at) >= shared.grace))
            .map(|job| job.id)
            .collect();
        if late.is_empty() {
            return;
        }
        for lane in &mut self.lanes {
            let of_late = |p: &Posted| matches!(p.what, What::Payload { job, .. } if late.contains(&job));
            if lane.is_up() && lane.posted.iter().any(of_late) {
                shared.counters.pairs_ended_by_cancel.add(1);
                let detail = "the queue pair was ended to stop a cancelled pull";
                lane.fail(Error::new(Kind::SourceLost, "pull", detail).with_peer(&self.peer));
            }
        }
    }

    /// A device whose port went down: its share goes by the others, where there are any.
    pub(crate) fn rail_down(&mut self, rail: usize, error: &Error) {
        if self.lanes.iter().any(|lane| lane.is_up() && lane.rail != rail) {
            for lane in self.lanes.iter_mut().filter(|lane| lane.rail == rail) {
                lane.fail(error.clone().with_peer(&self.peer));
            }
        }
    }

    /// A device that is beyond use.
    pub(crate) fn lose(&mut self, rail: usize, error: &Error) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.rail == rail) {
            lane.fail(error.clone().with_peer(&self.peer));
        }
    }

    /// Posts what there is room for, lane by lane in turn.
    pub(crate) fn pump(&mut self, shared: &mut Shared) {
        let lanes = self.lanes.len();
        let mut batches: Vec<Vec<(ReadRequest, What)>> = (0..lanes).map(|_| Vec::new()).collect();
        self.take_looks(&mut batches, shared);
        if let Some(ours) = self.ours {
            let mut idle = 0;
            while idle < lanes {
                let at = self.turn % lanes;
                self.turn = (self.turn + 1) % lanes;
                let room = self.lanes.get(at).is_some_and(|lane| lane.room() > 0);
                let next = if room { self.next_message() } else { None };
                match next {
                    Some((job, message)) => {
                        idle = 0;
                        self.add(at, job, message, ours, &mut batches);
                    }
                    None => idle += 1,
                }
            }
        }
        for (at, batch) in batches.into_iter().enumerate() {
            self.post(at, batch, shared);
        }
    }

    fn next_message(&mut self) -> Option<(u64, Message)> {
        self.jobs.iter_mut().find_map(|job| Some((job.id, job.next()?)))
    }

    fn take_looks(&mut self, batches: &mut [Vec<(ReadRequest, What)>], shared: &mut Shared) {
        let mut waiting = std::mem::take(&mut self.looks);
        while let Some(look) = waiting.pop_front() {
            let fits = |lane: &Lane| {
                lane.is_up() && lane.words_posted + look.words.reads().len() as u32 <= LOOK_ROOM
            };
            let lane = match look.lane {
                Some(at) => self.lanes.get(at).is_some_and(fits).then_some(at),
                None => self.lanes.iter().position(fits),
            };
            let up = match look.lane {
                Some(at) => self.lanes.get(at).is_some_and(Lane::is_up),
                None => self.lanes.iter().any(Lane::is_up),
            };
            if !up {
                let _ = look.tell.send(Err(self.why_down(look.lane)));
                continue;
            }
            let Some((at, slot)) = lane.and_then(|at| Some((at, shared.free_slots.pop()?))) else {
                self.looks.push_back(look);
                continue;
            };
            self.add_look(at, slot, look, batches, shared);
        }
    }

    fn add_look(
        &mut self,
        at: usize,
        slot: usize,
        look: Look,
        batches: &mut [Vec<(ReadRequest, What)>],
        shared: &Shared,
    ) {
        let (hop, source) = (self.id, self.source);
        let (Some(lane), Some(batch)) = (self.lanes.get_mut(at), batches.get_mut(at)) else { return };
        let reads = look.words.reads().to_vec();
        let (mut word, mut look) = (0, Some(look));
        for (number, (offset, words)) in reads.iter().enumerate() {
            let last = number + 1 == reads.len();
            let request = ReadRequest {
                from: source.address.wrapping_add(*offset),
                remote_key: lane.remote_keys.get(source.region(*offset)).copied().unwrap_or(0),
                to: shared.scratch.address(slot, word),
                len: words * 8,
                local_key: shared.scratch.local_key(lane.rail),
                ..lane.request(hop, at, last)
            };
            word += *words as usize;
            lane.words_posted += 1;
            batch.push((request, What::Words { slot, look: if last { look.take() } else { None } }));
        }
    }

    fn add(
        &mut self,
        at: usize,
        job: u64,
        message: Message,
        ours: Extent,
        batches: &mut [Vec<(ReadRequest, What)>],
    ) {
        let (hop, source) = (self.id, self.source);
        let (Some(lane), Some(batch)) = (self.lanes.get_mut(at), batches.get_mut(at)) else { return };
        lane.unsignalled += 1;
        let signalled = lane.unsignalled >= lane.window.signal_every;
        if signalled {
            lane.unsignalled = 0;
        }
        let request = ReadRequest {
            from: source.address.wrapping_add(message.start),
            remote_key: lane.remote_keys.get(source.region(message.start)).copied().unwrap_or(0),
            to: ours.address.wrapping_add(message.start),
            len: message.len,
            local_key: lane.local_keys.get(ours.region(message.start)).copied().unwrap_or(0),
            ..lane.request(hop, at, signalled)
        };
        lane.payload_posted += 1;
        batch.push((request, What::Payload { job, message }));
    }

    /// Posts a batch on one lane. Its last READ is signalled whatever the count says: nothing may wait for a completion
    /// that nobody is told of.
    fn post(&mut self, at: usize, mut batch: Vec<(ReadRequest, What)>, shared: &mut Shared) {
        let Some(lane) = self.lanes.get_mut(at) else { return };
        let Some((last, _)) = batch.last_mut() else { return };
        last.signalled = true;
        lane.unsignalled = 0;
        let requests: Vec<ReadRequest> = batch.iter().map(|(request, _)| *request).collect();
        let posted = match lane.pair() {
            // SAFETY: each READ writes a range that its job's landing owns until the job's READs have completed, inside
            // the region whose key it has, or a slot of the scratch page that is taken until then.
            Some(pair) => unsafe { pair.read(&requests) },
            None => Err(Refused { accepted: 0, error: VerbsError { call: "ibv_post_send", errno: 22 } }),
        };
        let accepted = posted.err().map_or(requests.len(), |refused| refused.accepted);
        for (number, (request, what)) in batch.into_iter().enumerate() {
            if number < accepted {
                let (total, counters) = (lane.payload_posted, &shared.counters);
                match &what {
                    What::Payload { .. } => {
                        counters.reads_posted.add(1);
                        counters.most_in_flight.at_least(u64::from(total));
                    }
                    What::Words { .. } => counters.looks_posted.add(1),
                    What::Marker => {}
                }
                counters.reads_signalled.add(u64::from(request.signalled));
                let (sequence, signalled) = (request.id as u32, request.signalled);
                lane.push(Posted { sequence, signalled, what });
            } else {
                release(lane, &mut self.jobs, &self.peer, what, None, shared);
            }
        }
        if let Err(Refused { error, .. }) = posted {
            let rail = shared.rails.get(lane.rail);
            let (name, port) = rail.map_or(("a device", 0), |rail| (rail.name(), rail.port()));
            let error = failed(error, name, Some(port), "posting READs").with_peer(&self.peer);
            lane.fail(error);
        }
    }

    /// What a completion means: the request it names has ended so; success of it is success of those before it.
    pub(crate) fn completed(&mut self, done: Completion, shared: &mut Shared) {
        let at = lane_of(done.id);
        let Some(lane) = self.lanes.get_mut(at) else { return };
        lane.heard();
        let ok = done.status == Status::SUCCESS;
        if !ok {
            let rail = shared.rails.get(lane.rail);
            let (name, port) = rail.map_or(("a device", 0), |rail| (rail.name(), rail.port()));
            let error = completed(done.status, done.vendor, name, port, &self.peer);
            lane.fail(error);
        }
        let sequence = done.id as u32;
        while let Some(front) = lane.posted.front() {
            // Sequences wrap; a lane has few posted.
            if sequence.wrapping_sub(front.sequence) > u32::MAX / 2 {
                break;
            }
            let last = front.sequence == sequence;
            let Some(Posted { what, .. }) = lane.posted.pop_front() else { break };
            let outcome = if ok { Some(()) } else { None };
            release(lane, &mut self.jobs, &self.peer, what, outcome, shared);
            if last {
                break;
            }
        }
    }

    /// Ends what has ended: lanes, then pulls. `false`: the hop itself has.
    pub(crate) fn settle(&mut self, shared: &mut Shared) -> bool {
        let hop = self.id;
        for (at, lane) in self.lanes.iter_mut().enumerate() {
            if lane.needs_marker() {
                lane.mark(hop, at);
            }
        }
        let quiet_and_closed =
            self.closing && self.jobs.is_empty() && self.looks.is_empty() && !self.is_busy();
        for lane in &mut self.lanes {
            let failed = lane.why_down().is_some();
            if lane.posted.is_empty() && (failed || quiet_and_closed) && lane.has_pair() {
                if failed && !self.closing {
                    shared.counters.rails_lost.add(1);
                }
                lane.give_back();
            }
        }
        if !self.lanes.iter().any(Lane::is_up) && !quiet_and_closed {
            let why = self.why_down(None);
            for job in &mut self.jobs {
                if job.has_more() {
                    job.failed = true;
                    job.landing.fail(why.clone());
                    job.stop();
                }
            }
        }
        let over = |job: &Job| job.is_over();
        let (ended, going): (Vec<Job>, Vec<Job>) = std::mem::take(&mut self.jobs).into_iter().partition(over);
        self.jobs = going;
        for job in ended {
            finish(job, shared);
        }
        !(self.closing
            && self.jobs.is_empty()
            && self.looks.is_empty()
            && !self.is_busy()
            && !self.lanes.iter().any(Lane::has_pair))
    }

    fn why_down(&self, lane: Option<usize>) -> Error {
        let of = |lane: &Lane| lane.why_down().cloned();
        let why = match lane {
            Some(at) => self.lanes.get(at).and_then(of),
            None => self.lanes.iter().find_map(of),
        };
        why.unwrap_or_else(|| {
            Error::new(Kind::SourceLost, "RDMA READ", "no queue pair of the hop is left")
                .with_peer(&self.peer)
        })
    }
}

/// Takes one READ off a lane: `outcome` says whether it has landed.
fn release(
    lane: &mut Lane,
    jobs: &mut [Job],
    peer: &str,
    what: What,
    outcome: Option<()>,
    shared: &mut Shared,
) {
    match what {
        What::Payload { job, message } => {
            lane.payload_posted = lane.payload_posted.saturating_sub(1);
            let Some(job) = jobs.iter_mut().find(|j| j.id == job) else { return };
            if outcome.is_none() {
                shared.counters.reads_repeated.add(1);
                return job.missed(message, peer);
            }
            shared.counters.bytes_read.add(u64::from(message.len));
            for piece in job.landed(message) {
                job.landing.hold();
                let landing = Arc::clone(&job.landing);
                shared.pool.spawn(move || {
                    landing.hash_piece(piece);
                    landing.account();
                });
            }
        }
        What::Marker => {}
        What::Words { slot, look } => {
            lane.words_posted = lane.words_posted.saturating_sub(1);
            let Some(look) = look else { return };
            let told = match (outcome, lane.why_down()) {
                (Some(()), _) => Ok(shared.scratch.words(slot)),
                (None, Some(why)) => Err(why.clone()),
                (None, None) => Err(Error::new(Kind::SourceLost, "RDMA READ", "the READ was not posted")),
            };
            shared.free_slots.push(slot);
            // Whoever asked may have gone.
            let _ = look.tell.send(told);
        }
    }
}

/// Nothing of the pull is posted any more.
fn finish(job: Job, shared: &Shared) {
    let landing = job.landing;
    if !job.failed && landing.is_gpu() {
        shared.pool.spawn(move || {
            landing.settle_on_gpu();
            landing.account();
        });
    } else {
        landing.account();
    }
}
