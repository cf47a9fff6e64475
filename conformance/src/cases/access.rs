//! Who may do what, and what is left behind.

use super::case;
use crate::{
    Ctx, WriteAttempt,
    ctx::Plan,
    harness::Case,
    oracle::{self, SMALL_BLOCK as B},
};
use flashboot_core::{ByteRange, Pull, schedule::Schedule};

const SALT: u64 = 11;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "access/a-reader-that-tries-to-write", 2, write);
    case(table, "access/readers-leave-nothing-behind", 2, leaks);
    case(table, "access/an-exporter-leaves-nothing-behind", 1, exporter_leaks);
}

async fn write(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    if ctx.rank() == 0 {
        let seed = ctx.seed(&geometry, SALT).await;
        let attempt = ctx.wait("attempted").await;
        if ctx.fixture.caps().enforces_read_only {
            assert_ne!(attempt, "written", "the transport promises that the system stops a writer");
            seed.expect_whole(SALT);
        }
        ctx.barrier("done").await;
        return;
    }
    let member = ctx.member(&geometry).await;
    let locator = ctx.locator(0).await;
    let attempt = ctx.fixture.try_write(&locator, std::sync::Arc::clone(&member.arena)).await;
    let said = match attempt {
        WriteAttempt::Refused(how) => format!("refused: {how}"),
        WriteAttempt::Written => "written".to_owned(),
    };
    ctx.put("attempted", said).await;
    // Having tried does not harm a reader.
    member.run(Schedule::Chain { clones: 1 }, &Plan::verified(SALT)).await.expect("replicated");
    ctx.barrier("done").await;
}

async fn leaks(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    let round = || async {
        let mover = member.import(0).await;
        let range = ByteRange::new(0, 2 * B);
        mover.start(Pull { range, hash: Some(B) }).expect("starts").quiesced().await.expect("lands");
    };
    if ctx.rank() == 1 {
        round().await; // whatever is made once is made now
    }
    ctx.barrier("warm").await;
    ctx.settled().await;
    let before = ctx.fixture.resources();
    ctx.barrier("counted").await;
    if ctx.rank() == 1 {
        for _ in 0..50 {
            round().await;
        }
    }
    ctx.barrier("read").await;
    let after = ctx.settled_to(before).await;
    // Each of so many would have left one at least: a count that was still falling hides none.
    assert!(after.is_within(&before), "after 50 readers: {after:?}, before them {before:?}");
    ctx.barrier("done").await;
}

async fn exporter_leaks(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    drop(ctx.fresh_member(&geometry, 0).await);
    ctx.settled().await;
    let before = ctx.fixture.resources();
    for round in 1..30 {
        drop(ctx.fresh_member(&geometry, round).await);
    }
    let after = ctx.settled_to(before).await;
    assert!(
        after.is_within(&before),
        "after 30 arenas exported and dropped: {after:?}, before them {before:?}"
    );
}
