//! One suite that every transport runs, and that a transport cannot pick from.
//!
//! A backend's test target is one line, with `harness = false`:
//!
//! ```text
//! fn main() -> std::process::ExitCode { flashboot_conformance::main(|| Box::new(MyFixture)) }
//! ```
//!
//! Each case is one async function that every rank runs (`src/cases/`). For a transport between processes the
//! test binary is executed again once per rank, so ranks are real processes and SIGKILL is a real death; the
//! mock runs the same functions as tasks under a paused clock. The oracle compares every byte on the host, with
//! canaries where no byte may land. A case has a deadline; what cannot run on a machine shows as *ignored* with
//! its reason, and `FLASHBOOT_REQUIRE=name,…` turns that absence into a failure.
//!
//! This crate is test code that other crates link: it panics where a test would.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failed assertion is how a case reports; every crate that links this is a test"
)]

mod cases;
mod ctx;
mod faulty;
mod fixture;
mod harness;
mod oracle;

pub use ctx::Ctx;
pub use faulty::{Faulty, Misfortune};
pub use fixture::{Fixture, Ranks, Resources, WriteAttempt};
pub use harness::{Case, Outcome, main, run_in_tasks, table};
