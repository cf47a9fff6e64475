//! Ranks that die without a word (SIGKILL, where ranks are processes), beside the deaths at every chunk of `kills`.

use super::case;
use crate::{
    Ctx, Misfortune,
    ctx::{PATIENCE, Plan},
    harness::Case,
    oracle::{self, SMALL_CHUNK as C},
};
use flashboot_core::{ByteRange, Kind, Pull, Retry, ShardId, schedule::Schedule};
use flashboot_driver::Step;
use std::time::Duration;

const SALT: u64 = 9;
const CHUNKS: u64 = 6;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "death/the-seed-dies-half-filled", 2, half_filled);
    case(table, "death/the-seed-dies-when-all-is-published", 2, published);
    case(table, "death/a-clone-whose-own-context-is-lost-ends-at-once-and-the-others-finish", 3, context);
    case(table, "death/ranks-of-a-ring-behind-a-dead-one-fail-in-time", 3, ring);
}

/// Rank 1 of seed → 1 → 2 loses its own context: it asks nobody else for what is missing, says so, and its process
/// ends. Rank 2 goes on at the seed.
async fn context(ctx: Ctx) {
    let geometry = oracle::small(CHUNKS * C, 1);
    let schedule = Schedule::Chain { clones: 2 };
    let member = match ctx.rank() {
        0 => ctx.seed(&geometry, SALT).await,
        1 => ctx.unlucky(&geometry, vec![(3, Misfortune::ContextLost)]).await,
        _ => ctx.member(&geometry).await,
    };
    ctx.barrier("exported").await;
    // Rank 1 could go on at the seed again and again, and must not.
    let plan = Plan::verified(SALT).or_from(&[0; 8]);
    match ctx.rank() {
        0 => member.expect_whole(SALT),
        1 => {
            let cause = member.run(schedule, &plan).await.expect_err("its context is lost");
            assert_eq!((cause.kind(), cause.retry()), (Kind::ContextLost, Retry::NewProcess), "{cause}");
            assert!(cause.remedy().is_some_and(|remedy| remedy.contains("restart")), "{cause}");
            assert!(member.sought().is_empty(), "it asked for another source");
            ctx.die();
            ctx.buried("SIGKILL was survived").await;
        }
        _ => {
            let report = member.run(schedule, &plan).await.expect("a survivor finishes");
            assert_eq!(report.bytes, geometry.payload());
            member.expect_whole(SALT);
        }
    }
    ctx.barrier_of("done", &[0, 2]).await;
}

async fn half_filled(ctx: Ctx) {
    let geometry = oracle::small(CHUNKS * C, 1);
    let half = CHUNKS / 2 * C;
    let member = ctx.member(&geometry).await;
    if ctx.rank() == 0 {
        oracle::write(&*member.arena, SALT, ByteRange::new(0, half));
        member.arena.publish(ShardId(0), half).expect("grows");
        ctx.wait("half").await;
        ctx.die();
        ctx.buried("SIGKILL was survived").await;
    }
    let told = ctx.clone();
    let mut observer = |step: Step| {
        if matches!(step, Step::Published { bytes, .. } if bytes == half) {
            let told = told.clone();
            tokio::spawn(async move { told.put("half", "").await });
        }
    };
    let began = tokio::time::Instant::now();
    let ended = member.observed(Schedule::Chain { clones: 1 }, &Plan::verified(SALT), &mut observer).await;
    let cause = ended.expect_err("half an image is none");
    assert_eq!(cause.kind(), Kind::SourceLost, "{cause}");
    assert!(began.elapsed() < PATIENCE / 2, "long before the stall timer, where the transport tells");
    assert_eq!(member.arena.observe(ShardId(0)).progress, half);
    oracle::expect_payload(&*member.arena, SALT, ByteRange::new(0, half));
    oracle::expect_canary(&*member.arena, ByteRange::new(half, geometry.payload()));
}

/// `outlives_exporter` and `reports_death`, each held to its word. What is not promised may be so all the same.
async fn published(ctx: Ctx) {
    let geometry = oracle::small(CHUNKS * C, 1);
    if ctx.rank() == 0 {
        let _seed = ctx.seed(&geometry, SALT).await;
        ctx.wait("attached").await;
        ctx.die();
        ctx.buried("SIGKILL was survived").await;
    }
    let member = ctx.member(&geometry).await;
    let mover = member.import(0).await;
    ctx.put("attached", "").await;
    let caps = ctx.fixture.caps();
    if caps.reports_death {
        // Until the death has arrived: with `at_least` past the end the look ends in the loss.
        let lost = mover.observe(ShardId(0), u64::MAX, PATIENCE).await;
        assert_eq!(lost.expect_err("the source died").kind(), Kind::SourceLost);
    } else {
        ctx.death_of(0).await;
    }
    let whole = ByteRange::new(0, geometry.payload());
    let pulled = match mover.start(Pull { range: whole, hash: None }) {
        Ok(mut pull) => pull.quiesced().await,
        Err(e) => Err(e),
    };
    match pulled {
        Ok(_) => {
            member.expect_payload(SALT);
            let seen =
                mover.observe(ShardId(0), geometry.payload(), Duration::ZERO).await.expect("it is all there");
            assert_eq!(seen.progress, geometry.payload());
        }
        Err(e) if caps.outlives_exporter => panic!("what was published can still be read: {e}"),
        Err(e) => assert_eq!(e.kind(), Kind::SourceLost, "{e}"),
    }
}

async fn ring(ctx: Ctx) {
    let geometry = oracle::small(6 * C, 3);
    let schedule = Schedule::Ring { nodes: 3 };
    let member = ctx.member(&geometry).await;
    oracle::write(&*member.arena, SALT, geometry.shard_range(ShardId(ctx.rank())));
    ctx.barrier("exported").await;
    if ctx.rank() == 0 {
        ctx.die();
        ctx.buried("SIGKILL was survived").await;
    }
    // Shard 0 died with its owner before anyone had it: nobody can finish, and everybody says so.
    let ended = member.run(schedule, &Plan { stall: Duration::from_secs(2), ..Plan::verified(SALT) }).await;
    assert_eq!(ended.expect_err("a shard is gone").kind(), Kind::SourceLost);
    ctx.barrier_of("done", &[1, 2]).await;
}
