//! Ring all-gather at 2 to 8 ranks: each rank begins with its own shard.

use super::case;
use crate::{
    Ctx,
    ctx::Plan,
    harness::Case,
    oracle::{self, SMALL_BLOCK as B, SMALL_CHUNK as C},
};
use flashboot_core::{ShardId, schedule::Schedule};

const SALT: u64 = 4;

pub(super) fn cases(table: &mut Vec<Case>) {
    for nodes in 2..=8 {
        let payload = u64::from(nodes) * 2 * C + 1;
        case(table, format!("gather/ring/{nodes}"), nodes, move |ctx| gather(ctx, payload));
    }
    case(table, "gather/ring/fewer-blocks-than-nodes", 4, |ctx| gather(ctx, 2 * B + 5));
    case(table, "gather/ring/empty", 3, |ctx| gather(ctx, 0));
}

async fn gather(ctx: Ctx, payload: u64) {
    let schedule = Schedule::Ring { nodes: ctx.ranks };
    let geometry = oracle::small(payload, ctx.ranks);
    let member = ctx.member(&geometry).await;
    let own = geometry.shard_range(ShardId(ctx.rank()));
    oracle::write(&*member.arena, SALT, own);
    let report = member.run(schedule, &Plan::verified(SALT)).await.expect("gathered");
    assert_eq!(report.bytes, payload - own.len());
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}
