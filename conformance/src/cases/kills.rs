//! SIGKILL at every chunk of a replication: of the source, of a reader, and of a clone that is both; in star and chain.
//!
//! A seed is killed by one of its readers, as it begins to pull the chunk: the death falls into that copy. It has
//! published no more than that chunk, so what comes after must come from elsewhere. Whoever survives finishes, and holds
//! every byte. That the memory is back is checked once all cases are over ([`Fixture::free_memory`](crate::Fixture)).

use super::case;
use crate::{
    Ctx,
    ctx::{Member, PATIENCE, Plan},
    harness::Case,
    oracle,
};
use flashboot_core::{BLOCK, ByteRange, Geometry, Pull, ShardId, schedule::Schedule};
use flashboot_driver::Step;
use std::{collections::BTreeSet, time::Duration};

const SALT: u64 = 11;
const CHUNKS: u64 = 6;
/// How long a source may stand still where nobody reports a death. A live one that is given up costs a hop, no more.
const STALL: Duration = Duration::from_secs(2);

/// Deaths at chunks drawn at random, of replications as large as real ones, beside the table's own: for machines with real
/// GPUs, where a copy of a small chunk is over before a signal arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drawn {
    times: u64,
    chunks: u64,
    chunk_mib: u64,
    seed: u64,
}

impl Drawn {
    /// From `times=10,chunks=32,chunk_mib=64,seed=1`, each with a default.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut drawn = Self { times: 10, chunks: 32, chunk_mib: 64, seed: 1 };
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=')?;
            let value: u64 = value.parse().ok()?;
            match name {
                "times" => drawn.times = value,
                "chunks" => drawn.chunks = value,
                "chunk_mib" => drawn.chunk_mib = value,
                "seed" => drawn.seed = value,
                _ => return None,
            }
        }
        let whole = (drawn.chunk_mib << 20).is_multiple_of(BLOCK);
        (whole && drawn.chunk_mib > 0 && (1..=drawn.chunks).contains(&drawn.times)).then_some(drawn)
    }

    fn geometry(self) -> Geometry {
        let chunk = self.chunk_mib << 20;
        Geometry::new(self.chunks * chunk, BLOCK, chunk, 1).expect("whole blocks")
    }

    /// `times` different chunks, others for each of the roles.
    fn of(self, role: u64) -> BTreeSet<u64> {
        let mut state = self.seed.wrapping_mul(31).wrapping_add(role);
        let mut drawn = BTreeSet::new();
        while (drawn.len() as u64) < self.times {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            drawn.insert((state >> 33) % self.chunks);
        }
        drawn
    }
}

pub(super) fn cases(table: &mut Vec<Case>) {
    let geometry = oracle::small(CHUNKS * oracle::SMALL_CHUNK, 1);
    for at in 0..CHUNKS {
        roles(table, "death", geometry, |_| [at].into());
    }
}

/// The cases of `drawn`.
pub(crate) fn drawn(table: &mut Vec<Case>, drawn: Drawn) {
    roles(table, "death/drawn", drawn.geometry(), |role| drawn.of(role));
}

fn roles(table: &mut Vec<Case>, prefix: &str, geometry: Geometry, chunks: impl Fn(u64) -> BTreeSet<u64>) {
    for at in chunks(0) {
        let name = format!("{prefix}/the-seed-of-a-star-dies-at-chunk-{at}");
        case(table, name, 4, move |ctx| seed(ctx, Schedule::Star { clones: 2 }, geometry, at));
    }
    for at in chunks(1) {
        let name = format!("{prefix}/the-seed-of-a-chain-dies-at-chunk-{at}");
        case(table, name, 4, move |ctx| seed(ctx, Schedule::Chain { clones: 2 }, geometry, at));
    }
    for at in chunks(2) {
        let name = format!("{prefix}/a-clone-in-the-chain-dies-at-chunk-{at}");
        case(table, name, 4, move |ctx| chain(ctx, geometry, at));
    }
    for at in chunks(3) {
        let name = format!("{prefix}/a-reader-dies-at-chunk-{at}");
        case(table, name, 3, move |ctx| reader(ctx, geometry, at));
    }
}

/// A survivor's plan, with `rank` to go to, as often as it takes.
fn plan(ctx: &Ctx, rank: u32) -> Plan {
    let stall = if ctx.fixture.caps().reports_death { PATIENCE } else { STALL };
    Plan { stall, ..Plan::verified(SALT) }.or_from(&[rank; 4])
}

/// Finishes, with every byte kept once and right; gives how many sources were lost.
async fn survives(
    member: &Member,
    schedule: Schedule,
    plan: &Plan,
    at_step: &mut (dyn FnMut(Step) + Send),
) -> u32 {
    let mut observer = |step| at_step(step);
    let report = member.observed(schedule, plan, &mut observer).await.expect("a survivor finishes");
    assert_eq!(report.bytes, member.geometry.payload(), "no chunk is pulled and kept twice");
    member.expect_whole(SALT);
    report.losses
}

/// Rank 0 dies as rank 1 begins to pull chunk `at`, the last that is published. Rank 3 holds all of it.
async fn seed(ctx: Ctx, schedule: Schedule, geometry: Geometry, at: u64) {
    let chunk = geometry.chunk_at(ShardId(0), at).expect("a chunk of it");
    let member = match ctx.rank() {
        0 => ctx.seed_up_to(&geometry, SALT, chunk.range.end).await,
        3 => ctx.seed(&geometry, SALT).await,
        _ => ctx.member(&geometry).await,
    };
    ctx.barrier("exported").await;
    let reads_from_the_seed = schedule.legs(ctx.rank().min(2)).first().is_some_and(|leg| leg.source == 0);
    match ctx.rank() {
        0 => ctx.killed().await,
        3 => member.expect_whole(SALT),
        rank => {
            let mut kills = |step: Step| {
                if rank == 1
                    && matches!(step, Step::Pulling { source, chunk } if chunk.index == at && source.0 == 0)
                {
                    ctx.kill(0);
                }
            };
            let losses = survives(&member, schedule, &plan(&ctx, 3), &mut kills).await;
            if reads_from_the_seed && at + 1 < geometry.chunks_in(ShardId(0)) {
                assert!(losses > 0, "what the seed had not published came from it");
            }
        }
    }
    ctx.death_of(0).await;
    ctx.barrier_of("done", &[1, 2, 3]).await;
}

/// Rank 1 of seed → 1 → 2 → 3 dies. 2 goes on at the seed from where it was; 3 does not notice.
async fn chain(ctx: Ctx, geometry: Geometry, at: u64) {
    let schedule = Schedule::Chain { clones: 3 };
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    // Everyone is attached to someone who lives when it begins.
    ctx.barrier("exported").await;
    match ctx.rank() {
        0 => {}
        1 => {
            let mut dies = |step: Step| {
                if matches!(step, Step::Verified { chunk, .. } if chunk.index == at) {
                    ctx.die();
                }
            };
            let ended = member.observed(schedule, &Plan::verified(SALT), &mut dies).await;
            ctx.buried(&format!("it was to die, and ended with {ended:?}")).await;
        }
        rank => {
            let losses = survives(&member, schedule, &plan(&ctx, 0), &mut |_| {}).await;
            // To whom nobody reports a death, a source that waits looks like a dead one.
            let told = ctx.fixture.caps().reports_death;
            assert!(!told || losses <= u32::from(rank == 2), "rank {rank} lost {losses}");
        }
    }
    member.expect_whole(SALT);
    ctx.death_of(1).await;
    ctx.barrier_of("done", &[0, 2, 3]).await;
}

/// Rank 2 of a star dies under its own pull; seed and rank 1 are unharmed, and the seed serves on.
async fn reader(ctx: Ctx, geometry: Geometry, at: u64) {
    let schedule = Schedule::Star { clones: 2 };
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    ctx.barrier("exported").await;
    match ctx.rank() {
        0 => {}
        1 => {
            let losses = survives(&member, schedule, &plan(&ctx, 0), &mut |_| {}).await;
            assert_eq!(losses, 0, "unharmed");
            ctx.death_of(2).await;
            // And the seed serves someone new.
            let again = member.import(0).await;
            let range = ByteRange::new(0, geometry.chunk());
            again.start(Pull { range, hash: None }).expect("starts").quiesced().await.expect("lands");
        }
        _ => {
            let mut dies = |step: Step| {
                if matches!(step, Step::Pulling { chunk, .. } if chunk.index == at) {
                    ctx.die();
                }
            };
            let ended = member.observed(schedule, &Plan::verified(SALT), &mut dies).await;
            ctx.buried(&format!("it was to die, and ended with {ended:?}")).await;
        }
    }
    member.expect_whole(SALT);
    ctx.death_of(2).await;
    ctx.barrier_of("done", &[0, 1]).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drawn_is_as_many_different_chunks_as_asked_for_and_the_same_each_time() {
        let drawn = Drawn::parse("times=10,chunks=12,chunk_mib=16,seed=3").unwrap();
        for role in 0..4 {
            let chunks = drawn.of(role);
            assert_eq!(chunks.len(), 10);
            assert!(chunks.iter().all(|chunk| *chunk < 12));
            assert_eq!(chunks, drawn.of(role));
        }
        assert_ne!(drawn.of(0), drawn.of(1));
        assert_eq!(Drawn::parse("").unwrap().geometry().payload(), 2 << 30);
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        for text in
            ["times=11,chunks=10", "chunk_mib=1", "chunk_mib=0", "times=0", "times", "often=1", "times=x"]
        {
            assert_eq!(Drawn::parse(text), None, "{text}");
        }
    }
}
