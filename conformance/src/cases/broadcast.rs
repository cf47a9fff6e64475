//! Star, chain and tree at 2 to 8 ranks.

use super::case;
use crate::{
    Ctx,
    ctx::Plan,
    harness::Case,
    oracle::{self, SMALL_CHUNK as C},
};
use flashboot_core::schedule::Schedule;

const SALT: u64 = 3;

pub(super) fn cases(table: &mut Vec<Case>) {
    for ranks in 2..=8 {
        let clones = ranks - 1;
        for schedule in [
            Schedule::Star { clones },
            Schedule::Chain { clones },
            Schedule::Tree { clones, length: 2, fanout: 2 },
        ] {
            case(table, format!("broadcast/{schedule}/{ranks}"), ranks, move |ctx| broadcast(ctx, schedule));
        }
    }
    case(table, "broadcast/chain/unverified", 4, unverified);
}

async fn broadcast(ctx: Ctx, schedule: Schedule) {
    let geometry = oracle::small(5 * C + 1, 1);
    let member = if ctx.rank() == 0 {
        // The clones attach while the seed is still being filled.
        let member = ctx.member(&geometry).await;
        ctx.barrier("exported").await;
        member.fill(SALT, flashboot_core::ShardId(0));
        member
    } else {
        let member = ctx.member(&geometry).await;
        ctx.barrier("exported").await;
        let report = member.run(schedule, &Plan::verified(SALT)).await.expect("replicated");
        assert_eq!((report.bytes, report.verified), (geometry.payload(), geometry.blocks()));
        member
    };
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}

async fn unverified(ctx: Ctx) {
    let geometry = oracle::small(5 * C + 1, 1);
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    if ctx.rank() > 0 {
        let report =
            member.run(Schedule::Chain { clones: 3 }, &Plan::unverified()).await.expect("replicated");
        assert_eq!((report.bytes, report.verified), (geometry.payload(), 0));
    }
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}
