//! Whether a pair works, told before anything moves.

use super::case;
use crate::{
    Ctx,
    harness::Case,
    oracle::{self, SMALL_BLOCK as B},
};
use flashboot_core::Readiness;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "probe/a-pair-is-ready-until-its-source-is-gone", 2, pair);
}

async fn pair(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    if ctx.rank() == 0 {
        let seed = ctx.seed(&geometry, 12).await;
        ctx.wait("probed").await;
        drop(seed);
        ctx.put("gone", "").await;
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    let (locator, into) = (ctx.locator(0).await, member.arena.location());
    assert_eq!(ctx.fixture.probe_pair(&locator, &into).await, Readiness::Ready);
    ctx.put("probed", "").await;
    ctx.wait("gone").await;
    match ctx.fixture.probe_pair(&locator, &into).await {
        Readiness::Ready => panic!("nobody is there"),
        Readiness::Unavailable { reason, remedy } => {
            assert!(!reason.is_empty() && !remedy.is_empty(), "{reason:?}; {remedy:?}");
        }
    }
    member.expect_untouched();
    ctx.barrier("done").await;
}
