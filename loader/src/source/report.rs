//! What a load did, for reports.

use crate::pipeline::PhasesMs;
use flashboot_core::Error;
use serde::Serialize;
use std::fmt;

/// Kinds of sources, in the order in which they are tried unless one is told otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    /// An arena that stayed in memory when its engine went.
    Held,
    /// Another rank that has it, over a transport.
    Peer,
    /// Host memory that the node agent filled ahead.
    Staged,
    /// A rank image's file.
    Image,
    /// A rank image's object, in an object store or behind an HTTP server.
    Object,
    /// A stock checkpoint.
    Checkpoint,
}

impl SourceKind {
    /// All of them, in order.
    pub const ALL: [Self; 6] =
        [Self::Held, Self::Peer, Self::Staged, Self::Image, Self::Object, Self::Checkpoint];

    /// The name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Peer => "peer",
            Self::Staged => "staged",
            Self::Image => "image",
            Self::Object => "object",
            Self::Checkpoint => "checkpoint",
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for SourceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
            format!("`{text}` is none of {}", names.join(", "))
        })
    }
}

/// A source that delivered something.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Used {
    /// Its kind.
    pub kind: SourceKind,
    /// Its name.
    pub name: String,
    /// Bytes that it filled, verified.
    pub bytes: u64,
    /// How long it was at it, in milliseconds.
    pub ms: f64,
}

/// A source that was passed over, or left in the middle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skip {
    /// Its kind.
    pub kind: SourceKind,
    /// Its name.
    pub name: String,
    /// Whether it had begun to deliver.
    pub failover: bool,
    /// Why.
    pub reason: String,
    /// What to do about it, where something is known.
    pub remedy: Option<String>,
}

impl Skip {
    pub(super) fn new(kind: SourceKind, name: String, failover: bool, error: &Error) -> Self {
        let remedy = error.remedy().map(str::to_owned);
        let code = error.code().map_or_else(String::new, |code| format!(": {code}"));
        Self { kind, name, failover, reason: format!("{}: {}{code}", error.op(), error.detail()), remedy }
    }
}

/// What a load did. Times in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LoadReport {
    /// The source that completed it.
    pub source: Option<SourceKind>,
    /// Every source that delivered something, in order.
    pub used: Vec<Used>,
    /// Every source that was passed over or left, in order.
    pub skips: Vec<Skip>,
    /// Whether every block was compared with a digest.
    pub verified: bool,
    /// From the call to the last byte copied and, where there are digests, verified: the arena's making included.
    pub ms: f64,
    /// Where the time went.
    pub phases: PhasesMs,
}

impl LoadReport {
    /// How many sources were left in the middle.
    pub fn failovers(&self) -> usize {
        self.skips.iter().filter(|skip| skip.failover).count()
    }
}
