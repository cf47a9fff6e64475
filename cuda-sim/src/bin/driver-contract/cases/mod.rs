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

/// `Case`s of functions of the same names, hyphens for underscores.
macro_rules! cases {
    ($($name:literal = $run:ident,)*) => {
        pub(super) const CASES: &[crate::cases::Case] =
            &[$(crate::cases::Case { name: $name, run: $run }),*];
    };
}
use cases;
