//! Deadlines, cancelling, back-pressure: nothing hangs, nothing is pulled before it is quiet.

use super::case;
use crate::{
    Ctx, Misfortune,
    ctx::{Plan, SETUP},
    harness::Case,
    oracle::{self, SMALL_BLOCK as B, SMALL_CHUNK as C},
};
use flashboot_core::{ByteRange, Kind, Pull, ShardId, replica::Policy, schedule::Schedule};
use flashboot_driver::Step;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

const SALT: u64 = 10;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "waiting/a-stalled-source-is-left-after-the-deadline", 3, stall);
    case(table, "waiting/a-look-ends-when-its-wait-does", 2, look);
    case(table, "waiting/a-look-ends-when-the-word-arrives", 2, arrives);
    case(table, "waiting/cancelled-and-pulled-again", 2, cancel);
    case(table, "waiting/an-owned-range-is-busy", 2, busy);
    case(table, "waiting/at-most-two-chunks-are-queued", 2, back_pressure);
    case(table, "waiting/a-locator-of-nobody-fails-in-time", 2, nobody);
    case(table, "waiting/ranges-outside-the-payload-are-refused", 2, outside);
}

/// Rank 1 publishes one chunk and stands still; rank 2 leaves it for the seed.
async fn stall(ctx: Ctx) {
    let geometry = oracle::small(4 * C, 1);
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    match ctx.rank() {
        0 => {}
        1 => {
            oracle::write(&*member.arena, SALT, ByteRange::new(0, C));
            member.arena.publish(ShardId(0), C).expect("grows");
        }
        _ => {
            let stall = Duration::from_millis(400);
            let plan = Plan { stall, ..Plan::verified(SALT).or_from(&[0]) };
            let began = Instant::now();
            let report =
                member.run(Schedule::Chain { clones: 2 }, &plan).await.expect("finished at the seed");
            assert_eq!(report.losses, 1);
            assert!(began.elapsed() >= stall, "not before its time");
            assert!(began.elapsed() < stall + Duration::from_secs(10), "and not long after");
            member.expect_whole(SALT);
        }
    }
    ctx.barrier("done").await;
}

async fn look(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    let member = ctx.member(&geometry).await;
    if ctx.rank() == 1 {
        let mover = member.import(0).await;
        let wait = Duration::from_millis(150);
        let began = Instant::now();
        let seen = mover.observe(ShardId(0), 1, wait).await.expect("the source lives");
        assert_eq!(seen.progress, 0);
        assert!(began.elapsed() >= wait && began.elapsed() < wait + crate::ctx::PATIENCE / 2);
        let began = Instant::now();
        mover.observe(ShardId(0), 1, Duration::ZERO).await.expect("one look");
        assert!(began.elapsed() < crate::ctx::PATIENCE / 2, "it waits for nothing");
    }
    ctx.barrier("done").await;
}

async fn arrives(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    let member = ctx.member(&geometry).await;
    if ctx.rank() == 0 {
        ctx.wait("looking").await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        member.arena.publish(ShardId(0), C).expect("grows");
    } else {
        let mover = member.import(0).await;
        ctx.put("looking", "").await;
        let began = Instant::now();
        let seen = mover.observe(ShardId(0), C, crate::ctx::PATIENCE).await.expect("the source lives");
        assert_eq!((seen.progress, seen.generation), (C, Some(mover.generation())));
        assert!(began.elapsed() < crate::ctx::PATIENCE / 2, "told at once");
    }
    ctx.barrier("done").await;
}

async fn cancel(ctx: Ctx) {
    let geometry = oracle::small(64 * B, 1);
    let whole = ByteRange::new(0, geometry.payload());
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, SALT).await;
    }
    let member = ctx.member(&geometry).await;
    let mover = member.import(0).await;
    for _ in 0..20 {
        let mut pull = mover.start(Pull { range: whole, hash: Some(B) }).expect("starts");
        pull.cancel();
        match pull.quiesced().await {
            Ok(_) => {} // it was faster
            Err(e) => assert_eq!(e.kind(), Kind::Cancelled, "{e}"),
        }
        // Quiet means quiet: what we write now stays.
        member.arena.fill(whole, oracle::CANARY).expect("the range is free");
        tokio::time::sleep(Duration::from_millis(5)).await;
        oracle::expect_canary(&*member.arena, whole);
        drop(mover.start(Pull { range: whole, hash: Some(B) }).expect("starts")); // dropping cancels too
        let mut pull = loop {
            // Until the dropped one is quiet the range is busy.
            match mover.start(Pull { range: whole, hash: Some(B) }) {
                Ok(pull) => break pull,
                Err(e) => assert_eq!(e.kind(), Kind::Busy, "{e}"),
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        let landed = pull.quiesced().await.expect("lands");
        assert_eq!(landed.digests, oracle::digests(SALT, &geometry).values());
        member.expect_payload(SALT);
    }
    ctx.barrier("done").await;
}

async fn busy(ctx: Ctx) {
    let geometry = oracle::small(64 * B, 1);
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    if ctx.rank() == 1 {
        let mover = member.import(0).await;
        for _ in 0..20 {
            let whole = ByteRange::new(0, geometry.payload());
            let mut pull = mover.start(Pull { range: whole, hash: Some(B) }).expect("starts");
            // Either it is still at work, and then it owns its bytes, or they have all landed.
            match mover.start(Pull { range: ByteRange::new(B, 2 * B), hash: None }) {
                Err(e) => assert_eq!(e.kind(), Kind::Busy, "{e}"),
                Ok(mut other) => drop(other.quiesced().await.expect("lands")),
            }
            pull.quiesced().await.expect("lands");
            member.expect_payload(SALT);
        }
    }
    ctx.barrier("done").await;
}

/// The source has everything; the reader is slow. It still queues no more than it may.
async fn back_pressure(ctx: Ctx) {
    let geometry = oracle::small(12 * C, 1);
    let depth = Policy::default().depth;
    let late = (0..12).map(|pull| (pull, Misfortune::Late(Duration::from_millis(10)))).collect();
    let member =
        if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.unlucky(&geometry, late).await };
    if ctx.rank() == 1 {
        let (mut queued, mut most) = (0_usize, 0);
        let mut observer = |step: Step| match step {
            Step::Pulling { .. } => {
                queued += 1;
                most = most.max(queued);
            }
            Step::Verified { .. } => queued -= 1,
            _ => {}
        };
        let schedule = Schedule::Chain { clones: 1 };
        member.observed(schedule, &Plan::verified(SALT), &mut observer).await.expect("replicated");
        assert_eq!((queued, most), (0, depth));
        member.expect_whole(SALT);
    }
    ctx.barrier("done").await;
}

async fn nobody(ctx: Ctx) {
    let geometry = oracle::small(B, 1);
    if ctx.rank() == 0 {
        drop(ctx.seed(&geometry, SALT).await);
        ctx.put("gone", "").await;
        return;
    }
    let exchange = ctx.open().await;
    let locator = ctx.locator(0).await;
    ctx.wait("gone").await;
    let began = Instant::now();
    let refused = exchange.import(&locator, ctx.arena(&geometry), Duration::from_millis(500)).await;
    let kind = refused.expect_err("nobody is there").kind();
    assert!(
        matches!(kind, Kind::SourceLost | Kind::Unavailable | Kind::StaleGeneration | Kind::Deadline),
        "{kind:?}"
    );
    assert!(began.elapsed() < SETUP, "{:?}", began.elapsed());
}

async fn outside(ctx: Ctx) {
    let geometry = oracle::small(2 * B + 9, 1);
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    if ctx.rank() == 1 {
        let mover = member.import(0).await;
        for range in [(0, 3 * B), (2 * B, 2 * B + 10), (u64::MAX - B + 1, u64::MAX)] {
            let range = ByteRange::new(range.0, range.1);
            match mover.start(Pull { range, hash: None }) {
                Err(e) => assert_eq!(e.kind(), Kind::Invalid, "{e}"),
                Ok(_) => panic!("{range} is past the payload"),
            }
            let arena = Arc::clone(&member.arena);
            assert_eq!(arena.copy_in(range.end - 1, &[0]).map_err(|e| e.kind()), Err(Kind::Invalid));
            assert_eq!(arena.copy_out(range.end - 1, &mut [0]).map_err(|e| e.kind()), Err(Kind::Invalid));
        }
        member.expect_untouched();
    }
    ctx.barrier("done").await;
}
