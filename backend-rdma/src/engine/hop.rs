//! One hop: its lanes (a queue pair on each device), the pulls that go by them, and what completions mean to both.

use super::{
    job::Job,
    look::Look,
    plan::{Message, Window},
};
use crate::{
    counters::Counters,
    dial::Link,
    error::{completed, failed},
    extent::Extent,
    rail::{LOOK_ROOM, Rail},
    scratch::Scratch,
    verbs::{Completion, Pair, ReadRequest, Refused, Status, VerbsError},
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
}

/// A queue pair of one hop on one device.
#[derive(Debug)]
pub(crate) struct Lane {
    /// The device's place among the endpoint's.
    pub(crate) rail: usize,
    /// `None` once it was given back.
    pair: Option<Pair>,
    window: Window,
    remote_keys: Vec<u32>,
    local_keys: Vec<u32>,
    posted: VecDeque<Posted>,
    sequence: u32,
    payload_posted: u32,
    words_posted: u32,
    unsignalled: u32,
    /// Why nothing goes by it any more.
    failed: Option<Error>,
}

#[derive(Debug)]
struct Posted {
    sequence: u32,
    signalled: bool,
    what: What,
}

#[derive(Debug)]
enum What {
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
    pub(crate) fn new(
        rail: usize,
        pair: Pair,
        window: Window,
        remote_keys: Vec<u32>,
        local_keys: Vec<u32>,
    ) -> Self {
        Self {
            rail,
            pair: Some(pair),
            window,
            remote_keys,
            local_keys,
            posted: VecDeque::new(),
            sequence: 0,
            payload_posted: 0,
            words_posted: 0,
            unsignalled: 0,
            failed: None,
        }
    }

    fn is_up(&self) -> bool {
        self.failed.is_none() && self.pair.is_some()
    }

    fn room(&self) -> u32 {
        if self.is_up() { self.window.reads.saturating_sub(self.payload_posted) } else { 0 }
    }

    /// Ends the lane: whatever is posted will complete.
    fn fail(&mut self, error: Error) {
        if self.failed.is_some() {
            return;
        }
        tracing::debug!(%error, pair = ?self.pair, "a lane failed");
        self.failed = Some(error);
        if let Some(pair) = &self.pair
            && let Err(e) = pair.fail()
        {
            // A device that is gone completes nothing more, and writes nothing either; what it owned stays owned.
            tracing::warn!(device = pair.device_name(), errno = e.errno, "a queue pair cannot be ended");
        }
    }

    /// Whether its last request ends without anybody being told: a success of it makes no completion, and after a failure
    /// nothing follows that would.
    fn needs_marker(&self) -> bool {
        self.failed.is_some() && self.pair.is_some() && self.posted.back().is_some_and(|last| !last.signalled)
    }

    /// Posts a request that is flushed at once; its completion is that of all before it. A queue that is full takes it
    /// later.
    fn mark(&mut self, hop: u32, at: usize) {
        let request = self.request(hop, at, true);
        let Some(pair) = &self.pair else { return };
        // SAFETY: a READ of no bytes, on a queue pair that was ended.
        if unsafe { pair.read(&[request]) }.is_ok() {
            self.posted.push_back(Posted {
                sequence: request.id as u32,
                signalled: true,
                what: What::Marker,
            });
        }
    }

    fn request(&mut self, hop: u32, lane: usize, signalled: bool) -> ReadRequest {
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

fn lane_of(id: u64) -> usize {
    (id >> 32) as usize & 0xff
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
        if let Some(job) = self.jobs.iter_mut().find(|j| j.id == job && j.cancelled.is_none()) {
            job.cancelled = Some(now);
            if job.has_more() {
                job.failed = true;
                let range = job.landing.range();
                let detail = format!("bytes {range} were cancelled; nothing of them will land any more");
                job.landing.fail(Error::new(Kind::Cancelled, "pull", detail).with_peer(&self.peer));
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

    /// When the first cancelled pull has had its time.
    pub(crate) fn next_deadline(&self, grace: Duration) -> Option<Instant> {
        let cancelled = self.jobs.iter().filter(|job| job.in_flight > 0).filter_map(|job| job.cancelled);
        cancelled.min().and_then(|at| at.checked_add(grace))
    }

    /// Ends the lanes of cancelled pulls that have had their time.
    pub(crate) fn expire(&mut self, now: Instant, shared: &Shared) {
        let late: Vec<u64> = self
            .jobs
            .iter()
            .filter(|job| job.in_flight > 0)
            .filter(|job| job.cancelled.is_some_and(|at| now.saturating_duration_since(at) >= shared.grace))
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
        let posted = match &lane.pair {
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
                lane.posted.push_back(Posted { sequence, signalled, what });
            } else {
                release(lane, &mut self.jobs, what, None, shared);
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
            release(lane, &mut self.jobs, what, outcome, shared);
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
            if lane.posted.is_empty()
                && (lane.failed.is_some() || quiet_and_closed)
                && let Some(pair) = lane.pair.take()
            {
                if lane.failed.is_some() && !self.closing {
                    shared.counters.rails_lost.add(1);
                }
                if let Some(rail) = shared.rails.get(lane.rail) {
                    rail.give_back(pair);
                }
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
            && self.lanes.iter().all(|lane| lane.pair.is_none()))
    }

    fn why_down(&self, lane: Option<usize>) -> Error {
        let of = |lane: &Lane| lane.failed.clone();
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
fn release(lane: &mut Lane, jobs: &mut [Job], what: What, outcome: Option<()>, shared: &mut Shared) {
    match what {
        What::Payload { job, message } => {
            lane.payload_posted = lane.payload_posted.saturating_sub(1);
            let Some(job) = jobs.iter_mut().find(|j| j.id == job) else { return };
            if outcome.is_none() {
                shared.counters.reads_repeated.add(1);
                return job.missed(message);
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
            let told = match (outcome, &lane.failed) {
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
