//! Who comes and goes when: late joins, guards dropped in any order, the same locator twice.

use super::case;
use crate::{
    Ctx,
    ctx::{Plan, SETUP},
    harness::Case,
    oracle::{self, SMALL_BLOCK as B, SMALL_CHUNK as C},
};
use flashboot_core::{ByteRange, Kind, Pull, schedule::Schedule};
use std::sync::Arc;

const SALT: u64 = 5;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "membership/late-join-reads-a-finished-clone", 3, late_join);
    case(table, "membership/a-finished-clone-serves-after-its-seed-left", 3, seed_leaves);
    case(table, "membership/one-locator-imported-twice", 2, double_import);
    case(table, "membership/a-dropped-export-admits-nobody-new", 2, dropped_export);
    case(table, "membership/everything-dropped-in-every-order", 2, drop_orders);
}

async fn late_join(ctx: Ctx) {
    let geometry = oracle::small(4 * C + 3, 1);
    let schedule = Schedule::Chain { clones: 2 };
    if ctx.rank() == 2 {
        ctx.wait("first-is-done").await;
    }
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    if ctx.rank() > 0 {
        member.run(schedule, &Plan::verified(SALT)).await.expect("replicated");
        ctx.put("first-is-done", "").await;
    }
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}

async fn seed_leaves(ctx: Ctx) {
    let geometry = oracle::small(4 * C + 3, 1);
    let schedule = Schedule::Chain { clones: 2 };
    match ctx.rank() {
        0 => {
            let seed = ctx.seed(&geometry, SALT).await;
            ctx.wait("first-is-done").await;
            drop(seed);
            ctx.put("seed-left", "").await;
        }
        1 => {
            let member = ctx.member(&geometry).await;
            member.run(schedule, &Plan::verified(SALT)).await.expect("replicated");
            ctx.put("first-is-done", "").await;
            ctx.wait("second-is-done").await;
            member.expect_whole(SALT);
        }
        _ => {
            ctx.wait("seed-left").await;
            let member = ctx.member(&geometry).await;
            member.run(schedule, &Plan::verified(SALT)).await.expect("replicated");
            member.expect_whole(SALT);
            ctx.put("second-is-done", "").await;
        }
    }
}

async fn double_import(ctx: Ctx) {
    let geometry = oracle::small(4 * B, 1);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, SALT).await;
    }
    let member = ctx.member(&geometry).await;
    let one = member.import(0).await;
    let two = member.import(0).await;
    let (first, second) = (ByteRange::new(0, 2 * B), ByteRange::new(2 * B, 4 * B));
    one.start(Pull { range: first, hash: None }).expect("starts").quiesced().await.expect("lands");
    drop(one);
    two.start(Pull { range: second, hash: None })
        .expect("starts")
        .quiesced()
        .await
        .expect("the other still works");
    member.expect_payload(SALT);
    ctx.barrier("done").await;
}

async fn dropped_export(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    if ctx.rank() == 0 {
        let mut seed = ctx.seed(&geometry, SALT).await;
        ctx.wait("attached").await;
        seed.export = None;
        ctx.put("dropped", "").await;
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    let attached = member.import(0).await;
    ctx.put("attached", "").await;
    ctx.wait("dropped").await;
    let locator = ctx.locator(0).await;
    let refused = member.exchange.import(&locator, Arc::clone(&member.arena), SETUP).await;
    match refused {
        // Nobody stands at the door, and the transport says so.
        Ok(mover) if !ctx.fixture.caps().closes_with_export => drop(mover),
        Ok(_) => panic!("the export is gone, and admits somebody new"),
        Err(e) => {
            let kind = e.kind();
            assert!(matches!(kind, Kind::SourceLost | Kind::StaleGeneration | Kind::Unavailable), "{e}");
        }
    }
    // Who is attached keeps what it has.
    let range = ByteRange::new(0, 2 * B);
    attached.start(Pull { range, hash: None }).expect("starts").quiesced().await.expect("lands");
    member.expect_payload(SALT);
    ctx.barrier("done").await;
}

async fn drop_orders(ctx: Ctx) {
    let geometry = oracle::small(4 * B, 1);
    let whole = ByteRange::new(0, 4 * B);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, SALT).await;
    }
    for order in 0..4 {
        let member = ctx.fresh_member(&geometry, order).await;
        let mover = member.import(0).await;
        let pull = mover.start(Pull { range: whole, hash: Some(B) }).expect("starts");
        match order {
            0 => {
                drop(mover);
                let mut pull = pull;
                pull.quiesced().await.expect("a pull outlives its mover");
                member.expect_payload(SALT);
            }
            1 => drop((pull, mover, member)),
            2 => drop((member, mover, pull)),
            _ => drop((mover, member, pull)),
        }
    }
    ctx.barrier("done").await;
}
