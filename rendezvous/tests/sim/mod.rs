//! A world of simulated members around the real [`Service`]: messages are lost, doubled and late, members die, the
//! service dies and its clock leaps. One seed is one history.
//!
//! `RENDEZVOUS_SEED=17` runs one seed; every failing run prints the command that repeats it.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "each test uses its own part; tests panic"
)]

use flashboot_core::{Generation, Location, Locator, TransportName};
use flashboot_rendezvous::protocol::{
    Answer, Cause, Content, Holder, MemberId, Place, Plan, Reason, Registration, Request, Role, Rules,
    Service,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

pub(crate) const CHUNKS: u64 = 12;
const STEP: Duration = Duration::from_millis(10);
const STALL: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_millis(300);

/// Runs `check` over many seeds; `test` is the file's name.
pub(crate) fn seeds(test: &str, check: impl Fn(u64)) {
    let one = std::env::var("RENDEZVOUS_SEED").ok().and_then(|text| text.parse().ok());
    let seeds: Vec<u64> = one.map_or_else(|| (0..60).collect(), |seed| vec![seed]);
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(seed))) {
            eprintln!("reproduce: RENDEZVOUS_SEED={seed} cargo test -p flashboot-rendezvous --test {test}");
            resume_unwind(panic);
        }
    }
}

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x9E37_79B9)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(crate) fn percent(&mut self, n: u64) -> bool {
        self.below(100) < n
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let len = of.len() as u64;
        (len > 0).then(|| of[usize::try_from(self.below(len)).unwrap()])
    }
}

/// Content `n`.
pub(crate) fn content(n: u64) -> Content {
    Content {
        image: format!("{n:064x}"),
        rank: "target-0-0-0-0".into(),
        model: format!("model-{n}"),
        revision: String::new(),
        fingerprint: "f".into(),
        bytes: CHUNKS,
        manifest: "ab".repeat(32),
        manifest_bytes: 10,
    }
}

/// A registration of a member on simulated host `host`.
pub(crate) fn registration(word: u64, role: Role, content: Content, host: u64) -> Registration {
    let member = MemberId(Generation::from_random(word));
    let locator = Locator {
        transport: TransportName::Tcp,
        generation: member.0,
        payload: content.bytes,
        capacity: 1 << 20,
        shards: 1,
        location: Location::Host { boot_id: host.to_string(), numa_node: None },
        endpoint: format!("10.0.0.{host}:1"),
    };
    Registration {
        member,
        secret: word ^ 0xFFFF,
        name: None,
        role,
        holds: if role == Role::Seed { content.bytes } else { 0 },
        content,
        place: Place { host: host.to_string(), ..Place::default() },
        locators: vec![locator.encode()],
        transports: vec![TransportName::Tcp],
        readers: 4,
        expect: None,
        upstream: None,
        epoch: 0,
        trace: Some(format!("{word:016x}")),
        rate: None,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Registering,
    Reading,
    Seeking(MemberId),
    Done,
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) said: Registration,
    pub(crate) alive: bool,
    pub(crate) have: u64,
    pub(crate) phase: Phase,
    pub(crate) upstream: Option<MemberId>,
    epoch: u32,
    membership: u64,
    holders: Vec<Holder>,
    moved: Duration,
    /// The number of the question that waits for an answer, since when, and when to ask next.
    asked: Option<(u64, Duration)>,
    ask_at: Duration,
    lost_at: Duration,
    lost: BTreeSet<MemberId>,
    /// Sources lost, and sources taken.
    pub(crate) losses: u64,
    pub(crate) moves: u64,
}

#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
enum Message {
    Ask(MemberId, u64, Request),
    Answer(MemberId, u64, Answer),
}

/// What happens in a world, in percent a message, or a thousand steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weather {
    pub(crate) lose: u64,
    pub(crate) double: u64,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) now: Duration,
    /// How far ahead the service's clock is.
    pub(crate) leap: Duration,
    pub(crate) service: Option<Service>,
    pub(crate) nodes: BTreeMap<MemberId, Node>,
    pub(crate) weather: Weather,
    pub(crate) history: Vec<Request>,
    flying: Vec<(Duration, Message)>,
    numbers: u64,
}

impl World {
    pub(crate) fn new(seed: u64, weather: Weather) -> Self {
        Self {
            dice: Dice::new(seed),
            now: Duration::ZERO,
            leap: Duration::ZERO,
            service: Some(Service::new(Rules::default())),
            nodes: BTreeMap::new(),
            weather,
            history: Vec::new(),
            flying: Vec::new(),
            numbers: 0,
        }
    }

    /// Adds a member; returns who it is.
    pub(crate) fn join(&mut self, role: Role, of: u64) -> MemberId {
        let (word, host) = (self.dice.next(), self.dice.below(4));
        let said = registration(word, role, content(of), host);
        let id = said.member;
        let seed = role == Role::Seed;
        let node = Node {
            have: said.holds,
            said,
            alive: true,
            phase: Phase::Registering,
            upstream: None,
            epoch: 0,
            membership: 0,
            holders: Vec::new(),
            moved: self.now,
            asked: None,
            ask_at: self.now,
            lost_at: self.now,
            lost: BTreeSet::new(),
            losses: 0,
            moves: 0,
        };
        self.nodes.insert(id, node);
        assert!(seed || self.nodes[&id].have == 0);
        id
    }

    pub(crate) fn kill(&mut self, id: MemberId) {
        self.nodes.get_mut(&id).unwrap().alive = false;
    }

    pub(crate) fn alive(&self) -> Vec<MemberId> {
        self.nodes.iter().filter(|(_, n)| n.alive).map(|(id, _)| *id).collect()
    }

    /// Members that hold everything of the content of `id`.
    pub(crate) fn holders(&self, of: &Content) -> usize {
        self.nodes.values().filter(|n| n.alive && n.have == CHUNKS && n.said.content == *of).count()
    }

    /// One step of time.
    pub(crate) fn step(&mut self) {
        self.now += STEP;
        let at = self.now + self.leap;
        if let Some(service) = &mut self.service {
            service.tick(at);
        }
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.flying).into_iter().partition(|(t, _)| *t <= self.now);
        self.flying = later;
        for (_, message) in due {
            match message {
                Message::Ask(from, number, request) => {
                    let Some(service) = &mut self.service else { continue };
                    let answer = service.handle(at, request.clone());
                    self.history.push(request);
                    self.send(Message::Answer(from, number, answer));
                }
                Message::Answer(to, number, answer) => self.answered(to, number, answer),
            }
        }
        for id in self.alive() {
            self.read(id);
            self.ask(id);
        }
    }

    fn send(&mut self, message: Message) {
        if !self.dice.percent(self.weather.lose) {
            let at = self.now + Duration::from_millis(self.dice.below(30));
            self.flying.push((at, message.clone()));
        }
        if self.dice.percent(self.weather.double) {
            let at = self.now + Duration::from_millis(self.dice.below(3000));
            self.flying.push((at, message));
        }
    }

    /// The data plane: a chunk, or the end of the source.
    fn read(&mut self, id: MemberId) {
        let node = &self.nodes[&id];
        let (Phase::Reading, Some(source)) = (node.phase, node.upstream) else { return };
        let there = self.nodes.get(&source).filter(|n| n.alive).map(|n| n.have);
        let quick = self.dice.percent(30);
        let now = self.now;
        let node = self.nodes.get_mut(&id).unwrap();
        match there {
            Some(have) if have > node.have => {
                if quick {
                    node.have += 1;
                    node.moved = now;
                }
                if node.have == CHUNKS {
                    (node.phase, node.upstream, node.ask_at) = (Phase::Done, None, now);
                }
            }
            Some(_) if now.saturating_sub(node.moved) < STALL => {}
            _ => {
                node.losses += 1;
                node.lost.insert(source);
                (node.phase, node.lost_at, node.asked, node.ask_at) =
                    (Phase::Seeking(source), now, None, now);
            }
        }
    }

    fn ask(&mut self, id: MemberId) {
        let now = self.now;
        self.numbers += 1;
        let number = self.numbers;
        let node = self.nodes.get_mut(&id).unwrap();
        if node.asked.is_some_and(|(_, since)| now.saturating_sub(since) > PATIENCE) {
            node.asked = None;
        }
        // The service does not answer: what is known of others has to do.
        if let Phase::Seeking(source) = node.phase
            && now.saturating_sub(node.lost_at) > 3 * PATIENCE
        {
            let lost = &node.lost;
            let known = node.holders.iter().filter(|h| !lost.contains(&h.member) && h.member != source);
            let next = known.max_by_key(|h| h.complete).map(|h| h.member);
            if let Some(next) = next {
                node.epoch += 1;
                node.moves += 1;
                (node.upstream, node.phase, node.moved) = (Some(next), Phase::Reading, now);
            }
            node.lost_at = now;
        }
        if node.asked.is_some() || now < node.ask_at {
            return;
        }
        let (member, secret, holds) = (id, node.said.secret, node.have);
        let request = match node.phase {
            Phase::Registering => Request::Register(Registration {
                holds,
                upstream: node.upstream,
                epoch: node.epoch,
                ..node.said.clone()
            }),
            Phase::Seeking(source) => {
                let (epoch, cause, corrupt) = (node.epoch, Cause::Lost, false);
                Request::Lost { member, secret, source, epoch, cause, corrupt, holds }
            }
            Phase::Reading | Phase::Done => {
                let (upstream, epoch, membership) = (node.upstream, node.epoch, node.membership);
                Request::Renew { member, secret, holds, upstream, epoch, membership }
            }
        };
        node.asked = Some((number, now));
        self.send(Message::Ask(id, number, request));
    }

    fn answered(&mut self, to: MemberId, number: u64, answer: Answer) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(&to) else { return };
        if node.asked.map(|(n, _)| n) != Some(number) || !node.alive {
            return;
        }
        node.asked = None;
        node.ask_at = now + Duration::from_secs(1);
        match answer {
            Answer::Registered { plan: Some(plan), .. } => self.take(to, plan),
            Answer::Registered { plan: None, .. } => node.phase = Phase::Done,
            Answer::Renewed { plan, .. } => {
                if let Some(plan) = plan {
                    node.membership = plan.membership;
                    node.holders = plan.holders;
                }
            }
            Answer::Wait { retry_ms, .. } => node.ask_at = now + Duration::from_millis(retry_ms),
            Answer::Refused(refusal) => {
                assert_eq!(refusal.reason, Reason::UnknownMember, "{refusal}");
                node.ask_at = now;
                self.register_again(to);
            }
            other => panic!("an answer that nobody asked for: {other:?}"),
        }
    }

    /// The service does not know us. A reader goes on reading, and registers beside it.
    fn register_again(&mut self, id: MemberId) {
        let node = self.nodes.get_mut(&id).unwrap();
        if matches!(node.phase, Phase::Seeking(_)) {
            node.upstream = None;
        }
        node.phase = Phase::Registering;
    }

    fn take(&mut self, id: MemberId, plan: Plan) {
        let content = self.nodes[&id].said.content.clone();
        let source = &self.nodes[&plan.upstream];
        assert_eq!(source.said.content, content, "{id} is to read another content from {}", plan.upstream);
        assert_ne!(plan.upstream, id);
        for holder in &plan.holders {
            for line in &holder.locators {
                let locator: Locator = line.parse().unwrap();
                assert_eq!(locator.generation, holder.member.0, "a locator of another filling");
            }
        }
        let node = self.nodes.get_mut(&id).unwrap();
        if plan.epoch < node.epoch {
            return;
        }
        if node.upstream != Some(plan.upstream) || matches!(node.phase, Phase::Seeking(_)) {
            node.moves += 1;
            node.moved = self.now;
        }
        node.phase = if node.have == CHUNKS { Phase::Done } else { Phase::Reading };
        (node.upstream, node.epoch) = (Some(plan.upstream), plan.epoch);
        (node.membership, node.holders) = (plan.membership, plan.holders);
        if node.have == CHUNKS {
            node.upstream = None;
        }
    }

    /// Deaths, births and outages, for `steps`; a holder of everything of each content stays.
    pub(crate) fn trouble(&mut self, steps: u32, outages: bool, mut look: impl FnMut(&Self)) {
        let mut back = None;
        for _ in 0..steps {
            if self.dice.below(1000) < 12 {
                let alive = self.alive();
                if let Some(victim) = self.dice.pick(&alive) {
                    let node = &self.nodes[&victim];
                    if node.have < CHUNKS || self.holders(&node.said.content) > 1 {
                        self.kill(victim);
                    }
                }
            }
            if self.dice.below(1000) < 12 && self.nodes.len() < 24 {
                let (role, of) =
                    (if self.dice.percent(15) { Role::Seed } else { Role::Clone }, self.dice.below(2));
                self.join(role, of);
            }
            if outages && back.is_none() && self.dice.below(1000) < 5 {
                self.service = None;
                back = Some(self.now + Duration::from_millis(self.dice.below(4000)));
            }
            if back.is_some_and(|at| at <= self.now) {
                self.service = Some(Service::new(Rules::default()));
                back = None;
            }
            self.step();
            look(self);
        }
        self.service.get_or_insert_with(|| Service::new(Rules::default()));
    }

    /// Quiet, until every live clone holds everything or `limit` is over; whether they do.
    pub(crate) fn settle(&mut self, limit: Duration, mut look: impl FnMut(&Self)) -> bool {
        let until = self.now + limit;
        while self.now < until {
            if self.nodes.values().all(|n| !n.alive || n.have == CHUNKS) {
                return true;
            }
            self.step();
            look(self);
        }
        false
    }
}

/// A world with a seed of each of two contents and some clones.
pub(crate) fn world(seed: u64) -> World {
    let mut world = World::new(seed, Weather { lose: 10, double: 10 });
    for of in 0..2 {
        world.join(Role::Seed, of);
    }
    for _ in 0..6 {
        let of = world.dice.below(2);
        world.join(Role::Clone, of);
    }
    world
}
