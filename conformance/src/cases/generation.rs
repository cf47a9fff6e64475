//! A refilled arena is never read as the old one.

use super::case;
use crate::{
    Ctx,
    ctx::{Plan, SETUP, random_generation},
    harness::Case,
    oracle::{self, SMALL_CHUNK as C},
};
use flashboot_core::{ByteRange, Kind, ShardId, schedule::Schedule};
use flashboot_driver::Step;
use std::{sync::Arc, time::Duration};

const OLD: u64 = 6;
const NEW: u64 = 66;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "generation/stale-before-the-import", 2, before);
    case(table, "generation/stale-between-import-and-first-chunk", 2, between);
    case(table, "generation/stale-during-the-transfer", 2, |ctx| during(ctx, true));
    case(table, "generation/stale-during-an-unverified-transfer", 2, |ctx| during(ctx, false));
    case(table, "generation/retired-while-waited-for", 2, retired);
}

/// Fills the arena anew, as its owner may at any time.
fn refill(member: &crate::ctx::Member) {
    member.arena.retire();
    oracle::write(&*member.arena, NEW, ByteRange::new(0, member.geometry.payload()));
    member.arena.begin(random_generation());
    member.arena.publish(ShardId(0), member.geometry.payload()).expect("grows");
}

async fn before(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    if ctx.rank() == 0 {
        let seed = ctx.seed(&geometry, OLD).await;
        refill(&seed);
        ctx.put("refilled", "").await;
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    ctx.wait("refilled").await;
    let locator = ctx.locator(0).await;
    let refused = member.exchange.import(&locator, Arc::clone(&member.arena), SETUP).await;
    assert_eq!(refused.expect_err("the filling is gone").kind(), Kind::StaleGeneration);
    member.expect_untouched();
    ctx.barrier("done").await;
}

async fn between(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    if ctx.rank() == 0 {
        let seed = ctx.seed(&geometry, OLD).await;
        ctx.wait("imported").await;
        refill(&seed);
        ctx.put("refilled", "").await;
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    let mover = member.import(0).await;
    ctx.put("imported", "").await;
    ctx.wait("refilled").await;
    let look = || mover.observe(ShardId(0), 1, Duration::from_millis(50));
    let mut seen = look().await.expect("the source lives");
    if seen.generation == Some(mover.generation()) {
        // The first one may be the import's.
        seen = look().await.expect("the source lives");
    }
    assert_ne!(seen.generation, Some(mover.generation()), "the look must show that the filling is gone");
    ctx.barrier("done").await;
}

async fn during(ctx: Ctx, verify: bool) {
    let geometry = oracle::small(3 * C, 1);
    if ctx.rank() == 0 {
        let seed = ctx.member(&geometry).await;
        oracle::write(&*seed.arena, OLD, ByteRange::new(0, geometry.payload()));
        seed.arena.publish(ShardId(0), C).expect("grows");
        ctx.wait("first-chunk").await;
        refill(&seed);
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    let plan = if verify { Plan::verified(OLD) } else { Plan::unverified() };
    let (told, mut tell) = (ctx.clone(), Some(()));
    let mut observer = |step: Step| {
        if matches!(step, Step::Verified { .. }) && tell.take().is_some() {
            let told = told.clone();
            tokio::spawn(async move { told.put("first-chunk", "").await });
        }
    };
    let ended = member.observed(Schedule::Chain { clones: 1 }, &plan, &mut observer).await;
    let cause = ended.expect_err("half of each filling is no image");
    assert_eq!(cause.kind(), Kind::StaleGeneration, "{cause}");
    assert_eq!(member.arena.observe(ShardId(0)).progress, C, "only what came from the old filling");
    oracle::expect_payload(&*member.arena, OLD, ByteRange::new(0, C));
    ctx.barrier("done").await;
}

async fn retired(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    if ctx.rank() == 0 {
        let seed = ctx.member(&geometry).await;
        ctx.wait("waiting").await;
        seed.arena.retire();
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    let mover = member.import(0).await;
    ctx.put("waiting", "").await;
    let seen = mover.observe(ShardId(0), 1, crate::ctx::PATIENCE).await.expect("the source lives");
    assert_eq!(seen.generation, None, "told at once, not after the wait");
    ctx.barrier("done").await;
}
