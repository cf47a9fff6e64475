//! Bytes that land wrong, late, or not at all are repaired, counted, and never passed on.

use super::case;
use crate::{
    Ctx, Misfortune,
    ctx::Plan,
    harness::Case,
    oracle::{self, SMALL_CHUNK as C},
};
use flashboot_core::{Kind, ShardId, schedule::Schedule};
use std::time::Duration;

const SALT: u64 = 8;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "repair/a-corrupt-chunk-is-pulled-again-and-counted", 3, corrupt);
    case(table, "repair/a-source-that-stays-corrupt-is-left", 3, stays_corrupt);
    case(table, "repair/with-no-other-source-nothing-is-committed", 2, hopeless);
    case(table, "repair/a-late-pull-is-waited-for", 2, late);
    case(table, "repair/a-failed-pull-goes-elsewhere", 3, failed);
}

async fn corrupt(ctx: Ctx) {
    let geometry = oracle::small(4 * C, 1);
    let schedule = Schedule::Chain { clones: 2 };
    let member = match ctx.rank() {
        0 => ctx.seed(&geometry, SALT).await,
        1 => ctx.unlucky(&geometry, vec![(1, Misfortune::Corrupt)]).await,
        _ => ctx.member(&geometry).await,
    };
    if ctx.rank() > 0 {
        let report = member.run(schedule, &Plan::verified(SALT)).await.expect("repaired");
        assert_eq!(
            report.repaired,
            u64::from(ctx.rank() == 1),
            "one bad block at the first hop, none behind it"
        );
        assert_eq!(report.losses, 0);
        assert_eq!(
            report.verified,
            geometry.blocks(),
            "each block is counted once, however often it was pulled"
        );
    }
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}

async fn stays_corrupt(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    // The default policy pulls a chunk three times from one source; the fourth pull is from another.
    let unlucky = vec![(0, Misfortune::Corrupt), (2, Misfortune::Corrupt), (3, Misfortune::Corrupt)];
    let member = match ctx.rank() {
        2 => ctx.unlucky(&geometry, unlucky).await,
        _ => ctx.seed(&geometry, SALT).await,
    };
    if ctx.rank() == 2 {
        let plan = Plan::verified(SALT).or_from(&[0]);
        let report = member.run(Schedule::Chain { clones: 2 }, &plan).await.expect("found elsewhere");
        assert_eq!((report.repaired, report.losses), (1, 1), "{report:?}");
    }
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}

async fn hopeless(ctx: Ctx) {
    let geometry = oracle::small(2 * C, 1);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, SALT).await;
    }
    let member = ctx.unlucky(&geometry, (0..20).map(|pull| (pull, Misfortune::Corrupt)).collect()).await;
    let ended = member.run(Schedule::Chain { clones: 1 }, &Plan::verified(SALT)).await;
    assert_eq!(ended.expect_err("nothing verified").kind(), Kind::Corrupt);
    assert_eq!(member.arena.observe(ShardId(0)).progress, 0, "nothing is published");
    ctx.barrier("done").await;
}

async fn late(ctx: Ctx) {
    let geometry = oracle::small(4 * C, 1);
    let member = match ctx.rank() {
        0 => ctx.seed(&geometry, SALT).await,
        _ => ctx.unlucky(&geometry, vec![(0, Misfortune::Late(Duration::from_millis(300)))]).await,
    };
    if ctx.rank() == 1 {
        let report =
            member.run(Schedule::Chain { clones: 1 }, &Plan::verified(SALT)).await.expect("waited for");
        assert!(report.transfer >= Duration::from_millis(300), "{report:?}");
    }
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}

async fn failed(ctx: Ctx) {
    let geometry = oracle::small(4 * C, 1);
    let member = match ctx.rank() {
        2 => ctx.unlucky(&geometry, vec![(1, Misfortune::Fail)]).await,
        _ => ctx.seed(&geometry, SALT).await,
    };
    if ctx.rank() == 2 {
        let plan = Plan::verified(SALT).or_from(&[0]);
        let report = member.run(Schedule::Chain { clones: 2 }, &plan).await.expect("found elsewhere");
        assert_eq!(report.losses, 1);
    }
    member.expect_whole(SALT);
    ctx.barrier("done").await;
}
