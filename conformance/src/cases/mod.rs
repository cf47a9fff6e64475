//! The table of cases. Every transport runs all of it.

mod access;
mod broadcast;
mod death;
mod gather;
mod generation;
pub(crate) mod kills;
mod locator;
mod membership;
mod probe;
mod repair;
mod sizes;
mod spans;
mod waiting;

use crate::{Ctx, harness::Case};
use std::future::Future;

/// Every case, in order. The names are stable: they stand in lists of ignored cases.
pub(crate) fn table() -> Vec<Case> {
    let mut table = Vec::new();
    sizes::cases(&mut table);
    spans::cases(&mut table);
    broadcast::cases(&mut table);
    gather::cases(&mut table);
    membership::cases(&mut table);
    probe::cases(&mut table);
    generation::cases(&mut table);
    locator::cases(&mut table);
    repair::cases(&mut table);
    death::cases(&mut table);
    kills::cases(&mut table);
    waiting::cases(&mut table);
    access::cases(&mut table);
    table
}

/// Adds a case of `ranks` ranks.
fn case<F, Fut>(table: &mut Vec<Case>, name: impl Into<String>, ranks: u32, run: F)
where
    F: Fn(Ctx) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    table.push(Case::new(name.into(), ranks, run));
}
