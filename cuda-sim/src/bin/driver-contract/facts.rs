//! What a case found out, as one line without addresses and timings.

use crate::abi::code;
use std::fmt;

/// `name=value` pairs in the order they were found.
#[derive(Debug, Default)]
pub(crate) struct Facts(Vec<String>);

/// What a case gives: its facts, or the set-up call that failed.
pub(crate) type Outcome = Result<Facts, String>;

impl Facts {
    /// No facts yet.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// The result of a driver call.
    pub(crate) fn code(&mut self, what: &str, result: u32) -> &mut Self {
        self.fact(what, name(result))
    }

    /// Anything else.
    pub(crate) fn fact(&mut self, what: &str, value: impl fmt::Display) -> &mut Self {
        self.0.push(format!("{what}={value}"));
        self
    }

    /// The line, taken out.
    pub(crate) fn done(&mut self) -> Outcome {
        Ok(Self(std::mem::take(&mut self.0)))
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" "))
    }
}

/// A result's name, or its number.
pub(crate) fn name(result: u32) -> String {
    code::name(result).map_or_else(|| result.to_string(), str::to_owned)
}

/// `Ok` for success, else the call and its result.
pub(crate) fn must(call: &str, result: u32) -> Result<(), String> {
    if result == code::SUCCESS { Ok(()) } else { Err(format!("setup {call}={}", name(result))) }
}
