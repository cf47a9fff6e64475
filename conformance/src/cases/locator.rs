//! Locators that were damaged, or that name something else.

use super::case;
use crate::{
    Ctx,
    ctx::{SETUP, random_generation},
    harness::Case,
    oracle::{self, SMALL_BLOCK as B},
};
use flashboot_core::{Kind, Locator, TransportName};
use std::sync::Arc;

pub(super) fn cases(table: &mut Vec<Case>) {
    case(table, "locator/every-damaged-byte-is-refused", 1, damaged);
    case(table, "locator/every-wrong-field-is-refused", 2, wrong_fields);
    case(table, "locator/another-arena-size-is-refused", 2, other_arena);
}

async fn damaged(ctx: Ctx) {
    let member = ctx.seed(&oracle::small(B, 1), 7).await;
    let text = member.export.as_ref().expect("exported").locator().encode();
    assert_eq!(text.parse::<Locator>().as_ref(), Ok(member.export.as_ref().expect("exported").locator()));
    for at in 0..text.len() {
        let mut bytes = text.clone().into_bytes();
        bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
        let damaged = String::from_utf8(bytes).expect("ASCII");
        assert!(damaged.parse::<Locator>().is_err(), "byte {at}");
        assert!(text[..at].parse::<Locator>().is_err(), "cut at {at}");
    }
}

async fn wrong_fields(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, 7).await;
    }
    let member = ctx.member(&geometry).await;
    let good = ctx.locator(0).await;
    let other = if good.transport == TransportName::Tcp { TransportName::Rdma } else { TransportName::Tcp };
    let wrong = [
        ("transport", Locator { transport: other, ..good.clone() }),
        ("payload", Locator { payload: good.payload + 1, ..good.clone() }),
        ("capacity", Locator { capacity: good.capacity + 4096, ..good.clone() }),
        ("shards", Locator { shards: 2, ..good.clone() }),
        ("generation", Locator { generation: random_generation(), ..good.clone() }),
    ];
    for (field, locator) in wrong {
        let refused = member.exchange.import(&locator, Arc::clone(&member.arena), SETUP).await;
        let kind = refused.expect_err(field).kind();
        let fits = match field {
            "generation" => matches!(kind, Kind::StaleGeneration | Kind::SourceLost | Kind::Unavailable),
            _ => matches!(kind, Kind::Mismatch | Kind::Corrupt | Kind::Invalid),
        };
        assert!(fits, "a wrong {field} is {kind:?}");
    }
    member.expect_untouched();
    drop(member.import(0).await); // the right one still works
    ctx.barrier("done").await;
}

async fn other_arena(ctx: Ctx) {
    let geometry = oracle::small(2 * B, 1);
    if ctx.rank() == 0 {
        return ctx.serve(&geometry, 7).await;
    }
    let exchange = ctx.open().await;
    let locator = ctx.locator(0).await;
    for wrong in [oracle::small(2 * B - 1, 1), oracle::small(2 * B + 1, 1), oracle::small(2 * B, 3)] {
        let refused = exchange.import(&locator, ctx.arena(&wrong), SETUP).await;
        assert_eq!(refused.expect_err("another size").kind(), Kind::Mismatch);
    }
    ctx.barrier("done").await;
}
