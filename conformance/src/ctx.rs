//! What a case has at hand on one rank.

use crate::{Fixture, Misfortune, Ranks, Resources, faulty::Faulty, oracle};
use async_trait::async_trait;
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Error, Export, Generation, Geometry, HandleExchange, Locator, Mover, PeerId,
    Result, ShardId,
    replica::{Assignment, Policy},
    schedule::Schedule,
};
use flashboot_driver::{Job, Limits, Observer, Report, Sources, Step, replicate};
use flashboot_rendezvous::{Board, barrier};
use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::sync::watch;

/// How long a case waits for a peer before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How long a case waits for another rank to come as far as it has, whose work may be long on an emulated processor; less than
/// the harness gives the case.
const COMPANY: Duration = Duration::from_secs(60);
/// How long a source may stand still where standing still is all that shows its death.
const STANDSTILL: Duration = Duration::from_secs(5);
/// How long imports and exports may take.
pub(crate) const SETUP: Duration = Duration::from_secs(5);

/// One rank of one case.
#[derive(Clone)]
pub struct Ctx {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) fixture: Arc<dyn Fixture>,
    pub(crate) board: Arc<dyn Board>,
    pub(crate) dir: PathBuf,
    /// With ranks as tasks: set when this rank is dead.
    pub(crate) dead: watch::Sender<bool>,
}

impl Ctx {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub(crate) async fn open(&self) -> Arc<dyn HandleExchange> {
        self.fixture.open(self.rank, &self.dir).await.expect("the endpoint opens")
    }

    pub(crate) fn arena(&self, geometry: &Geometry) -> Arc<dyn Arena> {
        let spec = ArenaSpec { payload: geometry.payload(), shards: geometry.shards() };
        let arena = self.fixture.arena(self.rank, spec).expect("the arena is made");
        arena.fill(ByteRange::new(0, spec.payload), oracle::CANARY).expect("nobody owns it yet");
        arena
    }

    /// An arena full of canaries with a filling begun, exported, its locator on the board.
    pub(crate) async fn member(&self, geometry: &Geometry) -> Member {
        self.member_at(self.open().await, geometry).await
    }

    /// As [`member`](Self::member), over an endpoint whose pulls meet `misfortunes`.
    pub(crate) async fn unlucky(&self, geometry: &Geometry, misfortunes: Vec<(u64, Misfortune)>) -> Member {
        let exchange = Arc::new(Faulty::new(self.open().await, misfortunes));
        self.member_at(exchange, geometry).await
    }

    async fn member_at(&self, exchange: Arc<dyn HandleExchange>, geometry: &Geometry) -> Member {
        let member = self.exported(exchange, geometry).await;
        member.announce().await;
        member
    }

    async fn exported(&self, exchange: Arc<dyn HandleExchange>, geometry: &Geometry) -> Member {
        let arena = self.arena(geometry);
        arena.begin(random_generation());
        let export = exchange.export(Arc::clone(&arena), SETUP).await.expect("the arena is exported");
        let sought = Arc::default();
        Member { ctx: self.clone(), geometry: *geometry, arena, exchange, export: Some(export), sought }
    }

    /// As [`member`](Self::member), one of several of this rank in turn: it stands on no board.
    pub(crate) async fn fresh_member(&self, geometry: &Geometry, number: u32) -> Member {
        let dir = self.dir.join(number.to_string());
        std::fs::DirBuilder::new().mode(0o700).create(&dir).expect("a directory of the rank's own");
        let exchange = self.fixture.open(self.rank, &dir).await.expect("the endpoint opens");
        self.exported(exchange, geometry).await
    }

    /// Gives what ends on its own (a responder noticing that a reader left) the time to.
    pub(crate) async fn settled(&self) {
        let mut last = self.fixture.resources();
        for _ in 0..50 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = self.fixture.resources();
            if last.is_within(&now) {
                return;
            }
            last = now;
        }
    }

    /// Waits until no more is held than `before`, which what is dropped on a thread of a transport's own takes a while to
    /// let go of, and gives what is.
    pub(crate) async fn settled_to(&self, before: Resources) -> Resources {
        let began = tokio::time::Instant::now();
        loop {
            let now = self.fixture.resources();
            if now.is_within(&before) || began.elapsed() > SETUP {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A member that holds the payload `salt`, all of it published before its locator stands on the board: a
    /// case may pull from it without looking at its words.
    pub(crate) async fn seed(&self, geometry: &Geometry, salt: u64) -> Member {
        self.seed_up_to(geometry, salt, geometry.payload()).await
    }

    /// As [`seed`](Self::seed), but only the first `bytes` are published.
    pub(crate) async fn seed_up_to(&self, geometry: &Geometry, salt: u64, bytes: u64) -> Member {
        let member = self.exported(self.open().await, geometry).await;
        oracle::write(&*member.arena, salt, geometry.shard_range(ShardId(0)));
        member.arena.publish(ShardId(0), bytes).expect("grows");
        member.announce().await;
        member
    }

    /// A seed's whole part in most cases: holds the payload `salt` until every rank is done.
    pub(crate) async fn serve(&self, geometry: &Geometry, salt: u64) {
        let _seed = self.seed(geometry, salt).await;
        self.barrier("done").await;
    }

    pub(crate) async fn put(&self, name: &str, value: impl Into<String>) {
        self.board.put(name, value.into()).await.expect("the board takes it");
    }

    pub(crate) async fn wait(&self, name: &str) -> String {
        self.board.wait(name, COMPANY).await.expect("a peer says so in time")
    }

    pub(crate) async fn locator(&self, rank: u32) -> Locator {
        self.wait(&format!("locator/{rank}")).await.parse().expect("a locator")
    }

    /// Waits for every rank to come here.
    pub(crate) async fn barrier(&self, name: &str) {
        barrier(&*self.board, name, self.rank, self.ranks, COMPANY).await.expect("every rank comes");
    }

    /// Waits for `ranks` to have said `name`, and says it.
    pub(crate) async fn barrier_of(&self, name: &str, ranks: &[u32]) {
        self.put(&format!("{name}/{}", self.rank), "").await;
        for rank in ranks {
            self.wait(&format!("{name}/{rank}")).await;
        }
    }

    /// Dies without cleaning up: SIGKILL for a process. A task is dead to its peers and is dropped at its
    /// next await.
    pub(crate) fn die(&self) {
        // A file, because the board is asynchronous and this is the last thing done: it tells the parent that
        // this death is part of the case, and the survivors that it has come.
        std::fs::write(death_note(&self.dir), "").expect("the rank's own directory");
        if self.fixture.ranks() == Ranks::Processes {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
        self.fixture.die(self.rank);
        self.dead.send_replace(true);
    }

    /// After [`die`](Self::die): a task is dropped here. Whoever is still alive fails with `why`.
    pub(crate) async fn buried(&self, why: &str) {
        tokio::task::yield_now().await;
        panic!("rank {}: {why}", self.rank);
    }

    /// Kills `rank`, which waits for it in [`killed`](Self::killed), at once: SIGKILL for a process.
    pub(crate) fn kill(&self, rank: u32) {
        let dir = self.dir.with_file_name(rank.to_string());
        // First, as for `die`.
        std::fs::write(death_note(&dir), "").expect("the directory of a rank of this case");
        if self.fixture.ranks() == Ranks::Processes {
            let pid = std::fs::read_to_string(pid_note(&dir)).expect("every rank leaves its number");
            let pid = pid.parse().ok().and_then(rustix::process::Pid::from_raw).expect("a process number");
            // It is a child of our own parent's, not waited for: the number is nobody else's.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        self.fixture.die(rank);
    }

    /// Waits to be killed by a peer, and fails if it is not.
    pub(crate) async fn killed(&self) {
        self.death_of(self.rank).await;
        if self.fixture.ranks() == Ranks::Tasks {
            self.dead.send_replace(true);
            tokio::task::yield_now().await;
        }
        // The signal comes after the note.
        tokio::time::sleep(PATIENCE).await;
        panic!("rank {}: a peer was to kill it", self.rank);
    }

    /// Waits until `rank` has died: who stays for it must not leave before.
    pub(crate) async fn death_of(&self, rank: u32) {
        let note = death_note(&self.dir.with_file_name(rank.to_string()));
        let began = tokio::time::Instant::now();
        while !note.exists() {
            assert!(began.elapsed() < PATIENCE, "rank {rank} was to die");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Where a rank says that it is about to die, in its own directory.
pub(crate) fn death_note(dir: &Path) -> PathBuf {
    dir.join("dying")
}

/// Where a rank that is a process says its number, in its own directory.
pub(crate) fn pid_note(dir: &Path) -> PathBuf {
    dir.join("pid")
}

/// A fresh generation.
pub(crate) fn random_generation() -> Generation {
    let mut bits = [0; 8];
    getrandom::fill(&mut bits).expect("the system has randomness");
    Generation::from_random(u64::from_le_bytes(bits))
}

/// One rank's arena, exported.
pub(crate) struct Member {
    pub(crate) ctx: Ctx,
    pub(crate) geometry: Geometry,
    pub(crate) arena: Arc<dyn Arena>,
    pub(crate) exchange: Arc<dyn HandleExchange>,
    pub(crate) export: Option<Box<dyn Export>>,
    sought: Arc<Mutex<Vec<PeerId>>>,
}

impl Member {
    /// Puts the locator on the board.
    async fn announce(&self) {
        let locator = self.export.as_ref().expect("exported").locator().encode();
        self.ctx.put(&format!("locator/{}", self.ctx.rank), locator).await;
    }

    /// Writes and publishes `shard` of the payload `salt`.
    pub(crate) fn fill(&self, salt: u64, shard: ShardId) {
        let range = self.geometry.shard_range(shard);
        oracle::write(&*self.arena, salt, range);
        self.arena.publish(shard, range.len()).expect("grows");
    }

    /// Imports `rank`'s arena.
    pub(crate) async fn import(&self, rank: u32) -> Box<dyn Mover> {
        let locator = self.ctx.locator(rank).await;
        let mover = self.exchange.import(&locator, Arc::clone(&self.arena), SETUP).await;
        mover.expect("the import succeeds")
    }

    /// Runs this rank's part of `schedule` for the payload `salt`.
    pub(crate) async fn run(&self, schedule: Schedule, plan: &Plan) -> Result<Report> {
        self.observed(schedule, plan, &mut ()).await
    }

    pub(crate) async fn observed(
        &self,
        schedule: Schedule,
        plan: &Plan,
        observer: &mut dyn Observer,
    ) -> Result<Report> {
        let told = self.ctx.fixture.caps().reports_death;
        let stall = if told { plan.stall } else { plan.stall.min(STANDSTILL) };
        let job = Job {
            arena: Arc::clone(&self.arena),
            assignment: Assignment::of(schedule, self.ctx.rank, self.geometry),
            expected: plan.verify.map(|salt| Arc::new(oracle::digests(salt, &self.geometry))),
            policy: Policy { stall, ..Policy::default() },
            limits: Limits { pull: Duration::from_secs(10), quiesce: Duration::from_secs(5), floor: None },
        };
        let peers = Peers {
            ctx: self.ctx.clone(),
            arena: Arc::clone(&self.arena),
            exchange: Arc::clone(&self.exchange),
            fallbacks: Mutex::new(plan.fallbacks.clone()),
            sought: Arc::clone(&self.sought),
        };
        let mut guard =
            NeverAhead { arena: &*self.arena, held: schedule.holds(self.ctx.rank), verified: 0, observer };
        replicate(job, Arc::new(peers), &mut guard).await
    }

    /// The sources for which its runs sought another, in order.
    pub(crate) fn sought(&self) -> Vec<PeerId> {
        self.sought.lock().expect("no panic under it").clone()
    }

    /// Compares every byte with the payload `salt`.
    #[track_caller]
    pub(crate) fn expect_payload(&self, salt: u64) {
        oracle::expect_payload(&*self.arena, salt, ByteRange::new(0, self.geometry.payload()));
    }

    /// Checks that nothing has landed.
    #[track_caller]
    pub(crate) fn expect_untouched(&self) {
        oracle::expect_canary(&*self.arena, ByteRange::new(0, self.geometry.payload()));
        assert_eq!(self.arena.observe(ShardId(0)).progress, 0);
    }

    /// Compares every byte with the payload `salt`, and the words with its length.
    #[track_caller]
    pub(crate) fn expect_whole(&self, salt: u64) {
        self.expect_payload(salt);
        for shard in (0..self.geometry.shards()).map(ShardId) {
            let whole = self.geometry.shard_range(shard).len();
            assert_eq!(self.arena.observe(shard).progress, whole, "the word of {shard:?}");
        }
    }
}

/// How a member replicates.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The payload whose digests are checked; `None` moves without verification.
    pub(crate) verify: Option<u64>,
    /// Ranks to go to, in order, when a source is lost.
    pub(crate) fallbacks: Vec<u32>,
    pub(crate) stall: Duration,
}

impl Plan {
    pub(crate) fn verified(salt: u64) -> Self {
        Self { verify: Some(salt), fallbacks: Vec::new(), stall: PATIENCE }
    }

    pub(crate) fn unverified() -> Self {
        Self { verify: None, fallbacks: Vec::new(), stall: PATIENCE }
    }

    pub(crate) fn or_from(mut self, ranks: &[u32]) -> Self {
        self.fallbacks = ranks.iter().rev().copied().collect();
        self
    }
}

/// Peers by rank, their locators from the board.
struct Peers {
    ctx: Ctx,
    arena: Arc<dyn Arena>,
    exchange: Arc<dyn HandleExchange>,
    fallbacks: Mutex<Vec<u32>>,
    sought: Arc<Mutex<Vec<PeerId>>>,
}

#[async_trait]
impl Sources for Peers {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let text = self.ctx.board.wait(&format!("locator/{}", source.0), PATIENCE).await?;
        self.exchange.import(&text.parse()?, Arc::clone(&self.arena), SETUP).await
    }

    async fn replace(&self, lost: PeerId, _: ShardId, _: u64, _: &Error) -> Option<PeerId> {
        self.sought.lock().expect("no panic under it").push(lost);
        self.fallbacks.lock().expect("no panic under it").pop().map(|rank| PeerId(u64::from(rank)))
    }
}

/// Watches that peers never see a byte that is not verified.
struct NeverAhead<'a> {
    arena: &'a dyn Arena,
    held: Vec<ShardId>,
    verified: u64,
    observer: &'a mut dyn Observer,
}

impl Observer for NeverAhead<'_> {
    fn step(&mut self, step: Step) {
        if let Step::Verified { chunk, .. } = step {
            self.verified += chunk.range.len();
        }
        let published: u64 = (0..self.arena.shards())
            .map(ShardId)
            .filter(|shard| !self.held.contains(shard))
            .map(|shard| self.arena.observe(shard).progress)
            .sum();
        assert!(
            published <= self.verified,
            "peers are told of {published} bytes, {} are verified ({step:?})",
            self.verified
        );
        self.observer.step(step);
    }
}
