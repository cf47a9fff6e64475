//! The model held against what was measured: the FlashBoot paper's figures, and our own chains on H200s.
//!
//! [`page`] makes `docs/results/paper.md`; `cargo run -p flashboot-sim --example paper` writes it, and a test compares.
//! Every figure of others stands here once, beside where it was read; every simulated one is run when it is asked for.

mod fit;
mod gb300;
mod h200;
mod page;
mod row;

pub use fit::{Fit, Free};
pub use page::page;
pub use row::{Basis, Mark, Row, Table, Wanted};

use crate::{Error, Profile};

/// Every table of the page, with `gb300` in the place of the built-in profile of that name.
///
/// # Errors
/// Whatever a simulation fails with.
pub fn tables(gb300: &Profile) -> Result<Vec<Table>, Error> {
    let mut tables = gb300::tables(gb300)?;
    tables.extend(h200::tables()?);
    Ok(tables)
}
