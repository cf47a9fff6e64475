//! Payloads around the edges of alignment, blocks and chunks, from one seed to one clone.

use super::case;
use crate::{
    Ctx,
    ctx::Plan,
    harness::Case,
    oracle::{self, SMALL_BLOCK as B, SMALL_CHUNK as C},
};
use flashboot_core::{BLOCK, Geometry, schedule::Schedule};

const SIZES: [(&str, u64); 17] = [
    ("0", 0),
    ("1", 1),
    ("511", 511),
    ("512", 512),
    ("513", 513),
    ("page-1", 4095),
    ("page", 4096),
    ("page+1", 4097),
    ("block-1", B - 1),
    ("block", B),
    ("block+1", B + 1),
    ("chunk-1", C - 1),
    ("chunk", C),
    ("chunk+1", C + 1),
    ("several-chunks-1", 3 * C - 1),
    ("several-chunks", 3 * C),
    ("several-chunks+1", 3 * C + 1),
];

pub(super) fn cases(table: &mut Vec<Case>) {
    for (name, size) in SIZES {
        case(table, format!("sizes/{name}"), 2, move |ctx| one_clone(ctx, oracle::small(size, 1), true));
        case(table, format!("sizes/unverified/{name}"), 2, move |ctx| {
            one_clone(ctx, oracle::small(size, 1), false)
        });
    }
    // The block that images have.
    for (name, size) in [("16MiB+1", BLOCK + 1), ("40MiB", 40 << 20)] {
        case(table, format!("sizes/real-block/{name}"), 2, move |ctx| {
            one_clone(ctx, oracle::real(size), true)
        });
    }
}

async fn one_clone(ctx: Ctx, geometry: Geometry, verify: bool) {
    const SALT: u64 = 1;
    let schedule = Schedule::Chain { clones: 1 };
    let member = if ctx.rank() == 0 { ctx.seed(&geometry, SALT).await } else { ctx.member(&geometry).await };
    if ctx.rank() == 1 {
        let plan = if verify { Plan::verified(SALT) } else { Plan::unverified() };
        let report = member.run(schedule, &plan).await.expect("replicated");
        assert_eq!(report.bytes, geometry.payload());
        assert_eq!(report.verified, if verify { geometry.blocks() } else { 0 });
        assert_eq!((report.repaired, report.losses), (0, 0));
        member.expect_whole(SALT);
    }
    ctx.barrier("done").await;
}
