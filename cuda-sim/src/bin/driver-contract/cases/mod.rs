//! The cases, by subject. A name is a row of the committed transcript, which the stand-in's code cites.

mod context;
mod copy;
mod device;
mod fault;
mod host;
mod memory;
mod module;
mod order;
mod share;
mod stand_in;

pub(crate) use fault::break_context;

use crate::{driver::Driver, facts::Outcome};

/// A question to the driver.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Driver) -> Outcome,
}

/// All of them, in the transcript's order.
pub(crate) fn all() -> impl Iterator<Item = Case> {
    [
        device::CASES,
        context::CASES,
        memory::CASES,
        copy::CASES,
        order::CASES,
        share::CASES,
        host::CASES,
        module::CASES,
        fault::CASES,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// The case of a name, also one that is for the stand-in alone.
pub(crate) fn find(name: &str) -> Option<Case> {
    all().chain(stand_in::CASES.iter().copied()).find(|case| case.name == name)
}

/// The table of a module's cases.
macro_rules! cases {
    ($($name:literal = $run:ident,)*) => {
        pub(super) const CASES: &[crate::cases::Case] =
            &[$(crate::cases::Case { name: $name, run: $run }),*];
    };
}
use cases;
