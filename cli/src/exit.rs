//! How a verb fails: what is printed, and with which exit code.

use flashboot::ErrorWire;
use flashboot_core::{Error, Kind};
use serde_json::{Map, Value};

/// How the program ends: 0 done, 1 failed, 2 bad usage, 3 refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(u8);

impl Code {
    /// Done.
    pub const SUCCESS: Self = Self(0);
    /// Failed.
    pub const FAILURE: Self = Self(1);

    /// As the system has it.
    pub fn number(self) -> u8 {
        self.0
    }
}

impl From<u8> for Code {
    fn from(number: u8) -> Self {
        Self(number)
    }
}

impl From<Code> for std::process::ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code.0)
    }
}

/// A failed verb.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) error: Box<ErrorWire>,
    pub(crate) exit: u8,
    /// Fields that stand beside `error` in the object.
    pub(crate) beside: Map<String, Value>,
}

impl Failure {
    /// Bad usage: exit 2.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        let message = message.into();
        let error = ErrorWire {
            kind: "usage".into(),
            op: "arguments".into(),
            detail: message.clone(),
            peer: None,
            chunk: None,
            code: None,
            code_text: None,
            remedy: None,
            message,
        };
        Self { error: Box::new(error), exit: 2, beside: Map::new() }
    }

    /// Puts the fields of `object` beside the error.
    pub(crate) fn beside(mut self, object: &impl serde::Serialize) -> Self {
        if let Ok(Value::Object(fields)) = serde_json::to_value(object) {
            self.beside = fields;
        }
        self
    }
}

impl From<Error> for Failure {
    /// Arguments that cannot work, found past the parser (a chunk that is not there, an empty set of transports), are
    /// bad usage (2); refusals are 3; everything else failed (1).
    fn from(e: Error) -> Self {
        let exit = match e.kind() {
            Kind::Invalid => 2,
            kind if kind.is_refusal() => 3,
            _ => 1,
        };
        Self { error: Box::new(ErrorWire::from(&e)), exit, beside: Map::new() }
    }
}

impl From<flashboot_checkpoint::Error> for Failure {
    /// An input that is not there, not allowed, or not what it should be is refused (3); a disk that fails or is
    /// full, and a stop on request, are failures (1).
    fn from(e: flashboot_checkpoint::Error) -> Self {
        let exit = match e.kind() {
            Kind::Io | Kind::Exhausted | Kind::Cancelled => 1,
            _ => 3,
        };
        let flag = flag(&e);
        let mut error = Error::from(e);
        if let Some(flag) = flag {
            error = error.with_remedy(flag);
        }
        Self { error: Box::new(ErrorWire::from(&error)), exit, beside: Map::new() }
    }
}

/// The remedy in this command's words, where a flag is the remedy.
fn flag(e: &flashboot_checkpoint::Error) -> Option<&'static str> {
    use flashboot_checkpoint::Error as E;
    match e {
        E::Exists { path } if path.is_dir() => Some("choose another name, or replace it with --replace"),
        // The same error bounds an index and metadata, which no flag does.
        E::HeaderOverCap { file, .. } if file.extension().is_some_and(|x| x == "safetensors") => {
            Some("if the file is sound, raise the cap with --header-cap SIZE (or pack.header_cap)")
        }
        E::Trailing { .. } => {
            Some("accept them with --allow-trailing (or pack.allow_trailing), if that is meant")
        }
        _ => None,
    }
}
