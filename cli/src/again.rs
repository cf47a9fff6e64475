//! A process that begins anew in its own place: the same arguments, the same number, nothing of its memory.
//!
//! For what only a new process helps against: a GPU context that is lost takes every call of its process with it, and gives the
//! GPU's memory back only when that is gone. Whoever supervises the process sees no end of it.

use crate::program;
use flashboot_core::{Error, Retry};
use std::{
    convert::Infallible, ffi::OsString, io, os::unix::process::CommandExt as _, process::Command, thread,
    time::Duration,
};
use tracing::warn;

/// How often a process begins anew.
const MOST: u32 = 2;
/// How long the first time waits; the next twice as long.
const BACK_OFF: Duration = Duration::from_millis(500);
/// The hidden flag that counts.
const FLAG: &str = "--restarted";

/// Begins anew where that is what helps against `error` and was not done too often: `before` times by now. Returns where it is not,
/// or cannot be.
pub(crate) fn instead_of(error: &Error, before: u32) {
    if error.retry() != Retry::NewProcess || before >= MOST {
        return;
    }
    let wait = BACK_OFF.saturating_mul(1 << before);
    warn!(%error, "only a new process helps: beginning anew in {wait:?}");
    thread::sleep(wait);
    let Err(error) = exec(&arguments(program::arguments().into_iter(), before + 1));
    warn!(%error, "cannot begin anew");
}

fn exec(arguments: &[OsString]) -> Result<Infallible, io::Error> {
    let (path, leading) = program::same();
    Err(Command::new(path).args(leading).args(arguments).exec())
}

/// `given`, with the count in place of the one before.
fn arguments(given: impl Iterator<Item = OsString>, count: u32) -> Vec<OsString> {
    let mut arguments = Vec::new();
    let mut given = given;
    while let Some(argument) = given.next() {
        if argument == FLAG {
            given.next();
        } else {
            arguments.push(argument);
        }
    }
    arguments.extend([FLAG.into(), count.to_string().into()]);
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_there_once() {
        let of = |given: &[&str], count| arguments(given.iter().map(OsString::from), count);
        let first = of(&["clone", "--model", "m"], 1);
        assert_eq!(first, ["clone", "--model", "m", "--restarted", "1"]);
        let second = arguments(first.into_iter(), 2);
        assert_eq!(second, ["clone", "--model", "m", "--restarted", "2"]);
    }
}
