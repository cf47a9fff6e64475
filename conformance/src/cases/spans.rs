//! Single pulls: every byte of the span lands, and not one beside it.

use super::case;
use crate::{
    Ctx,
    harness::Case,
    oracle::{self, SMALL_BLOCK as B},
};
use flashboot_core::{ByteRange, Pull};

const SALT: u64 = 2;
const PAYLOAD: u64 = 6 * B + 777;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "spans/one-pull-touches-its-span-only", 2, |ctx| spans(ctx, Some(B)));
    case(table, "spans/one-unhashed-pull-touches-its-span-only", 2, |ctx| spans(ctx, None));
    case(table, "spans/two-pulls-at-once", 2, two_at_once);
}

async fn spans(ctx: Ctx, hash: Option<u64>) {
    let geometry = oracle::small(PAYLOAD, 1);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, SALT).await;
    }
    let member = ctx.member(&geometry).await;
    let mover = member.import(0).await;
    let digests = oracle::digests(SALT, &geometry);
    for range in [
        ByteRange::new(0, B),
        ByteRange::new(B, 2 * B),
        ByteRange::new(2 * B, 5 * B),
        ByteRange::new(6 * B, PAYLOAD),
        ByteRange::new(0, 0),
        ByteRange::new(0, PAYLOAD),
    ] {
        member.arena.fill(ByteRange::new(0, PAYLOAD), oracle::CANARY).expect("quiet");
        let landed = mover.start(Pull { range, hash }).expect("starts").quiesced().await.expect("lands");
        oracle::expect_canary(&*member.arena, ByteRange::new(0, range.start));
        oracle::expect_payload(&*member.arena, SALT, range);
        oracle::expect_canary(&*member.arena, ByteRange::new(range.end, PAYLOAD));
        let blocks = geometry.blocks_of(range);
        match hash {
            None => assert!(landed.digests.is_empty()),
            Some(_) => assert_eq!(
                landed.digests,
                digests.values()[blocks.start as usize..blocks.end as usize],
                "the digests of {range}"
            ),
        }
    }
    ctx.barrier("done").await;
}

async fn two_at_once(ctx: Ctx) {
    let geometry = oracle::small(PAYLOAD, 1);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, SALT).await;
    }
    let member = ctx.member(&geometry).await;
    let mover = member.import(0).await;
    let first = ByteRange::new(0, 2 * B);
    let second = ByteRange::new(3 * B, 5 * B);
    let mut one = mover.start(Pull { range: first, hash: Some(B) }).expect("starts");
    let mut two = mover.start(Pull { range: second, hash: Some(B) }).expect("a second one, apart from it");
    two.quiesced().await.expect("lands");
    let again = two.quiesced().await.expect("the same answer again");
    assert_eq!(again.digests.len(), 2);
    one.quiesced().await.expect("lands");
    oracle::expect_payload(&*member.arena, SALT, first);
    oracle::expect_canary(&*member.arena, ByteRange::new(2 * B, 3 * B));
    oracle::expect_payload(&*member.arena, SALT, second);
    oracle::expect_canary(&*member.arena, ByteRange::new(5 * B, PAYLOAD));
    ctx.barrier("done").await;
}
